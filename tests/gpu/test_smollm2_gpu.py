"""The default model on a GPU: the captured, fused Triton engine says what plain torch operators say, for 64 tokens."""

from __future__ import annotations

from typing import Any

import pytest

from strata_lab.build import Builder
from strata_lab.config import toggles
from strata_lab.engine import LLMEngine
from strata_lab.models.hub import find_model
from strata_lab.sampling_params import SamplingParams
from tests.test_smollm2 import MODEL, PROMPTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_model(MODEL) is None, reason=f"{MODEL} is not installed; run `make model`"),
]
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
SETTINGS = {"device": "cuda", "dtype": "float32", "kv_cache_dtype": "fp32", "max_model_len": 512, "max_num_seqs": 8}


def tokens(engine: LLMEngine) -> list[list[int]]:
    return [list(o.token_ids) for o in engine.generate(list(PROMPTS), GREEDY)]


@pytest.fixture(scope="module")
def reference() -> list[list[int]]:
    """Plain torch operators, step by step."""
    patch = pytest.MonkeyPatch()
    patch.setattr(Builder, "_gpu_backend", lambda self: "reference")
    with LLMEngine(MODEL, **SETTINGS, cuda_graph=False, fused_kernels=False) as engine:
        found = tokens(engine)
    patch.undo()
    return found


def test_every_lossless_toggle_leaves_the_tokens_of_the_reference_path(reference: Any) -> None:
    flips = [t for t in toggles() if t.kind == "bool" and t.lossless]
    with LLMEngine(MODEL, **SETTINGS) as engine:
        assert tokens(engine) == reference
        for toggle in flips:
            now = getattr(engine.optimizations, toggle.name)
            assert engine.apply(**{toggle.name: not now}).ok, toggle.name
            assert tokens(engine) == reference, toggle.name
            assert engine.apply(**{toggle.name: now}).ok, toggle.name


def test_one_request_alone_says_what_it_says_among_twenty(reference: Any) -> None:
    with LLMEngine(MODEL, **SETTINGS) as engine:
        for index in (0, 7):
            assert list(engine.generate([PROMPTS[index]], GREEDY)[0].token_ids) == reference[index]

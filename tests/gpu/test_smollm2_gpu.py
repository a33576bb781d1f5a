"""The default model on a GPU: the captured, fused Triton engine says what plain torch operators say, for 64 tokens."""

from __future__ import annotations

from dataclasses import replace
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


TIE_NATS = 1e-4  # between the two best tokens of float32 logits, whose sums another order changes by about 1e-5


def tokens(engine: LLMEngine) -> list[list[int]]:
    return [list(o.token_ids) for o in engine.generate(list(PROMPTS), GREEDY)]


def check_same(found: list[list[int]], expected: list[list[int]], margins: list[list[float]], what: str) -> None:
    """The same texts, but for what follows a tie of the two best tokens."""
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        assert first is None or margins[index][first] < TIE_NATS, (what, index, first, margins[index][first])


@pytest.fixture(scope="module")
def reference() -> list[list[int]]:
    """Tokens by plain torch operators, step by step."""
    return _by_reference(GREEDY)[0]


@pytest.fixture(scope="module")
def margins(reference: Any) -> list[list[float]]:
    """How much likelier each of those tokens was than the second best, nats."""
    found, outputs = _by_reference(replace(GREEDY, logprobs=2))
    assert found == reference
    tops = [[list(step.top.values()) for step in output.logprobs] for output in outputs]
    return [[best - second for best, second, *_ in text] for text in tops]


def _by_reference(params: SamplingParams) -> tuple[list[list[int]], list[Any]]:
    patch = pytest.MonkeyPatch()
    patch.setattr(Builder, "_gpu_backend", lambda self: "reference")
    with LLMEngine(MODEL, **SETTINGS, cuda_graph=False, fused_kernels=False) as engine:
        outputs = engine.generate(list(PROMPTS), params)
    patch.undo()
    return [list(o.token_ids) for o in outputs], outputs


def test_every_lossless_toggle_leaves_the_tokens_of_the_reference_path(reference: Any, margins: Any) -> None:
    flips = [t for t in toggles() if t.kind == "bool" and t.lossless]
    with LLMEngine(MODEL, **SETTINGS) as engine:
        assert tokens(engine) == reference
        for toggle in flips:
            now = getattr(engine.optimizations, toggle.name)
            assert engine.apply(**{toggle.name: not now}).ok, toggle.name
            check_same(tokens(engine), reference, margins, toggle.name)
            assert engine.apply(**{toggle.name: now}).ok, toggle.name


def test_one_request_alone_says_what_it_says_among_twenty(reference: Any) -> None:
    with LLMEngine(MODEL, **SETTINGS) as engine:
        for index in (0, 7):
            assert list(engine.generate([PROMPTS[index]], GREEDY)[0].token_ids) == reference[index]

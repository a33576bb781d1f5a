"""Every toggle, derived from its field: lossless ones keep the greedy tokens, lossy ones stay within a stated bound."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from strata_lab.config import WEIGHT_FORMATS, Optimizations, toggles
from strata_lab.engine import LLMEngine
from strata_lab.explain import explain
from strata_lab.sampling_params import SamplingParams
from strata_lab.settings import Toggle
from tests.checkpoints import write_checkpoint
from tests.test_models import our_logits

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# Values that differ from the default and still fit the tiny model below.
OTHER: dict[str, Any] = {
    "max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 64, "gpu_memory_utilization": 0.5,
    "scheduling_policy": "priority", "max_passes": 0, "preemption": "swap", "max_waiting": 8, "max_waiting_tokens": 64,
    "thermal_governor": "pace", "watermark": 0.2, "watermark_high": 0.5,
    "speculative": "ngram", "num_draft_tokens": 3,
}  # fmt: skip
# Root mean square error of logits over that of the logits themselves, on random weights: each format's rounding,
# through two layers. bf16 keeps 8 bits of mantissa, int8 groups 7 bits, e4m3 4 bits, int4 groups 4 bits.
BOUNDS = {"fp32": 1e-5, "bf16": 0.01, "int8": 0.03, "fp8": 0.10, "int4": 0.25}
KV_BOUNDS = {"fp32": 1e-5, "bf16": 0.01, "fp8": 0.10}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama on disk."""
    return write_checkpoint(tmp_path_factory.mktemp("toggles"), "llama")[0]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(3, 300, (9 + i,), generator=generator).tolist() for i in range(4)]


def run(folder, **options: Any) -> list[tuple[int, ...]]:
    with LLMEngine(folder, device="cpu", dtype="float32", **({"max_model_len": 128} | options)) as engine:
        for name, value in options.items():
            if name in Optimizations().as_dict():
                assert getattr(engine.optimizations, name) == value
        return [o.token_ids for o in engine.generate(prompts(), GREEDY)]


@pytest.fixture(scope="module")
def expected(folder) -> list[tuple[int, ...]]:
    """The slow, obviously right engine, one prompt at a time."""
    off = Optimizations.none()
    with LLMEngine(
        folder, device="cpu", dtype="float32", optimizations=off, weight_format="fp32", kv_cache_dtype="fp32"
    ) as e:
        return [e.generate([p], GREEDY)[0].token_ids for p in prompts()]


@pytest.mark.parametrize("toggle", [t for t in toggles() if t.lossless], ids=lambda t: t.name)
def test_lossless_toggles_keep_the_greedy_tokens(toggle: Toggle, folder, expected) -> None:
    for value in {toggle.off, toggle.default} if toggle.kind == "bool" else {OTHER[toggle.name]}:
        assert run(folder, **{"cuda_graph": False, toggle.name: value}) == expected


def test_every_lossy_toggle_has_a_bound() -> None:
    lossy = {t.name: set(t.choices) for t in toggles() if not t.lossless}
    # what these compute is defined exactly: tests/test_kv_window.py, tests/test_sparse_pages.py
    by_mask = {"kv_window": set(), "kv_sinks": set(), "sparse_pages": set()}
    assert lossy == {"weight_format": set(BOUNDS), "kv_cache_dtype": set(KV_BOUNDS)} | by_mask
    assert set(BOUNDS) == set(WEIGHT_FORMATS)


@pytest.mark.parametrize(
    ("field", "value", "bound"),
    [*(("weight_format", v, b) for v, b in BOUNDS.items()), *(("kv_cache_dtype", v, b) for v, b in KV_BOUNDS.items())],
)
def test_lossy_toggles_stay_within_their_bound(field, value, bound, folder) -> None:
    tokens, slices = prompts()[3] * 3, (20, 1, 15)

    def logits(**changes: Any) -> torch.Tensor:
        base = {"weight_format": "fp32", "kv_cache_dtype": "fp32", "cuda_graph": False}
        return our_logits(folder, tokens, slices=slices, **(base | changes))

    exact = logits()
    error = (logits(**{field: value}) - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error.item() < bound


def test_every_toggle_is_documented_has_an_off_value_and_is_explained() -> None:
    for toggle in toggles():
        assert toggle.doc.endswith(".") and len(toggle.doc) > 20
        assert toggle.check(toggle.off) == toggle.off
        if toggle.choices:
            assert toggle.off == toggle.choices[0]
    names = {t.name for t in toggles()}
    assert set(explain("cpu")) == set(explain("cuda")) == names
    assert Optimizations.none().as_dict() == {t.name: t.off for t in toggles()}

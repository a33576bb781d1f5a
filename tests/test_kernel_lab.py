"""Laws of the kernel lab: only what keeps its SPEC gets in, the engine serves through everything, and back again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from strata_lab import kernel_lab
from strata_lab.engine import LLMEngine
from strata_lab.events import SettingEvent
from strata_lab.kernel_lab import spec_of
from strata_lab.kernels.rms_norm import rms_norm_ref
from strata_lab.sampling_params import SamplingParams
from tests.checkpoints import write_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [5, 9, 14, 3, 22]


@pytest.fixture
def engine(tmp_path: Any) -> Any:
    folder = write_checkpoint(tmp_path, "llama")[0]
    options = {"device": "cpu", "dtype": "float32", "max_model_len": 128}
    with LLMEngine(folder, cuda_graph=True, fused_kernels=False, **options) as made:
        yield made


def tokens(engine: LLMEngine) -> tuple[int, ...]:
    return engine.generate([PROMPT], GREEDY)[0].token_ids


def by_hand(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def in_place(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x.copy_(by_hand(x, weight, eps))
    return x.clone()


def shared(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x


def no_eps(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return by_hand(x, weight, 0.0)


def flat(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return by_hand(x, weight, eps).flatten()


def raising(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    raise KeyError("oops")


def test_a_right_function_runs_in_the_engine_and_changes_no_token(engine: LLMEngine) -> None:
    before = tokens(engine)
    report = engine.swap_op("rms_norm", by_hand)
    assert report.status == "applied", report
    assert report.us > 0 < report.built_in_us and report.bytes_moved > 0 < report.calls_per_step
    assert engine.swapped_ops == {"rms_norm": by_hand}
    assert tokens(engine) == before
    assert any(f.feature == "cuda_graph" and "uncaptured" in f.reason for f in engine.fallbacks)
    assert engine.swap_op("rms_norm", None).status == "applied"
    assert engine.swapped_ops == {} and tokens(engine) == before
    assert not any("uncaptured" in f.reason for f in engine.fallbacks), "it is captured again"
    assert engine.swap_op("rms_norm", None).status == "unchanged"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [(in_place, "changes its argument 'x'"), (shared, "shares memory"), (flat, "the contract says"), (raising, "oops")],
)
def test_a_function_that_breaks_the_contract_is_refused_and_serving_goes_on(
    engine: LLMEngine, wrong: Any, words: str
) -> None:
    before = tokens(engine)
    report = engine.swap_op("rms_norm", wrong)
    assert report.status == "refused" and words in report.reason
    assert engine.swapped_ops == {} and tokens(engine) == before


def test_a_wrong_number_is_named_by_case_and_element(engine: LLMEngine) -> None:
    """Without eps a row of small values comes out too large; of the cases before it, none is off."""
    report = engine.swap_op("rms_norm", no_eps)
    found = report.difference
    assert report.status == "refused" and found is not None
    inputs = next(c for c in spec_of("rms_norm").cases() if c.name == found.case).make(torch.device("cpu"))
    assert found.got == no_eps(**inputs)[found.index].item()
    assert found.expected == pytest.approx(rms_norm_ref(**inputs)[found.index].item(), rel=1e-5)
    assert abs(found.got - found.expected) > found.tolerance
    assert found.case in report.reason and str(list(found.index)) in report.reason


def test_a_function_too_slow_to_serve_is_refused(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_lab, "SLOWEST_MS", 0.0)
    report = engine.swap_op("rms_norm", by_hand)
    assert report.status == "refused" and "ms per call" in report.reason and engine.swapped_ops == {}


def test_settings_tell_of_swaps(engine: LLMEngine) -> None:
    engine.swap_op("rms_norm", by_hand)
    engine.swap_op("rms_norm", None)
    told = [e.changes for e in engine.events.since(0)[0] if isinstance(e, SettingEvent)]
    assert told == [{"op rms_norm": "by_hand"}, {"op rms_norm": "built-in"}]


def test_a_function_that_fails_later_ends_its_requests_and_gives_way(engine: LLMEngine) -> None:
    before, broken = tokens(engine), []

    def later(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if broken:
            raise ArithmeticError("later")
        return rms_norm_ref(x, weight, eps)

    assert engine.swap_op("rms_norm", later).ok
    broken.append(True)
    assert engine.generate([PROMPT], GREEDY)[0].finish_reason == "error"
    assert engine.swapped_ops == {} and tokens(engine) == before
    assert any(f.feature == "op rms_norm" and "later" in f.reason for f in engine.fallbacks)


def test_an_unknown_operator_is_named(engine: LLMEngine) -> None:
    with pytest.raises(ValueError, match="rms_norm"):
        engine.swap_op("rmsnorm", by_hand)

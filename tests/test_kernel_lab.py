"""Laws of the kernel lab: only what keeps its SPEC gets in, the engine serves through everything, and back again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from strata_lab import kernel_lab
from strata_lab.engine import LLMEngine
from strata_lab.events import SettingEvent
from strata_lab.kernel_lab import judge, spec_of
from strata_lab.kernels import OPERATORS
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


# -- every operator --------------------------------------------------------------------------------------------------


def off_by_a_percent(fn: Any) -> Any:
    """The same function, but for its first number: of the result, or of the first cache that it writes."""

    def wrong(**inputs: Any) -> Any:
        returned = fn(**inputs)
        first = returned[0] if isinstance(returned, tuple) else returned
        if first is None:
            first = next(x for name, x in inputs.items() if name.endswith("_cache"))
        first.view(-1)[0] = first.view(-1)[0] * 1.01 + 0.5
        return returned

    return wrong


@pytest.mark.parametrize("op", list(OPERATORS))
def test_of_every_operator_the_reference_is_accepted_and_one_wrong_number_is_found(op: str) -> None:
    spec, cpu = spec_of(op), torch.device("cpu")
    accepted = judge(op, spec.ref, spec.ref, cpu, torch.float32, True)
    assert accepted.ok and accepted.bytes_moved > 0 < accepted.us, accepted
    refused = judge(op, off_by_a_percent(spec.ref), spec.ref, cpu, torch.float32, True)
    assert refused.status == "refused" and refused.difference is not None, refused
    assert set(refused.difference.index) == {0} and refused.difference.case in refused.reason


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    return gate / (1 + torch.exp(-gate)) * up


def plus(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([x, y]).sum(0)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * torch.cat([cos, cos], -1)[:, None] + turned * torch.cat([sin, sin], -1)[:, None]


@pytest.mark.parametrize(("op", "fn"), [("silu_mul", silu_times), ("add", plus), ("rope", rotated)])
def test_other_operators_written_by_hand_run_in_the_engine_and_change_no_token(
    engine: LLMEngine, op: str, fn: Any
) -> None:
    before = tokens(engine)
    report = engine.swap_op(op, fn)
    assert report.status == "applied" and report.calls_per_step > 0, report
    assert tokens(engine) == before
    assert engine.swap_op(op, lambda *args, **kwargs: fn(*args, **kwargs) * 1.1).status == "refused"
    assert engine.swapped_ops == {op: fn}, "what kept its contract goes on"

"""The split of a step by cause: it adds up to what was measured, and holds nothing that was not."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from strata_lab.bench import causes as causing
from strata_lab.bench.causes import NAMES, READS, WHOLE_TIME, Whole, captured_mbu, measure_whole, record, split, table
from strata_lab.bench.harness import Environment, RooflineExceeded
from strata_lab.bench.kernels import Report, Row, arguments, by_cause, main
from strata_lab.bench.op_calls import BuiltStep, Conditions, load_weights_of, operators
from strata_lab.engine import LLMEngine
from strata_lab.kernels import Ops
from strata_lab.layers.weights import MoeWeights
from strata_lab.telemetry.ceilings import Ceilings, LaunchCosts
from tests.checkpoints import write_checkpoint

ENVIRONMENT = Environment(hardware={"gpu": "some card"}, versions={}, date="2026-01-01", commit="abc")
BYTES_S = 1e12  # a million bytes take a microsecond
ROWS = [
    Row("take_rows", 2, 3.0, 1_000, 0.0, False),
    Row("linear 5120x2560 norm", 10, 20.0, 13_000_000, 0.65, False),
    Row("qkv_attention", 10, 8.0, 500_000, 0.06, False),
    Row("moe_block", 10, 90.0, 60_300_000, 0.67, False, router_bytes=300_000),
    Row("lm_head 151936x2560", 1, 400.0, 390_000_000, 0.975, False),
    Row("sample_greedy 151936", 1, 12.0, 600_000, 0.05, False),
]
SUM_MS = (2 * 3 + 10 * 20 + 10 * 8 + 10 * 90 + 400 + 12) / 1e3
WHOLE = Whole(bare_ms=1.5, api_tok_s=(600.0, 625.0, 640.0), batch=1, distinct=1.0)


def test_every_cause_has_its_measured_part() -> None:
    parts = split(ROWS, BYTES_S, WHOLE).parts
    assert parts == {
        "weights": pytest.approx(0.13 + 0.60 + 0.39),
        "kv": pytest.approx(0.005),
        "routing": pytest.approx(0.003),
        "sampling": pytest.approx(0.012),
        "launch_ramp": pytest.approx(0.006 + (0.2 - 0.13) + (0.08 - 0.005) + (0.9 - 0.603) + (0.4 - 0.39)),
        "overlap": pytest.approx(1.5 - SUM_MS),
        "host": pytest.approx(1.6 - 1.5),
    }
    assert list(parts) == list(NAMES)
    assert parts["overlap"] < 0, "the operators overlap, and that is shown as it is"


@pytest.mark.parametrize("seed", range(20))
def test_the_parts_add_up_to_the_step_through_the_api(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)

    def number(top: float) -> float:
        return float(torch.rand((), generator=random)) * top

    labels = [*READS, *WHOLE_TIME, "rms_norm", "add"]
    rows = [
        Row(name, 1 + int(number(40)), number(100), int(number(1e8)), 0.5, False, int(number(100))) for name in labels
    ]
    whole = Whole(number(10), tuple(number(2000) for _ in range(3)), 1 + int(number(64)))
    found = split(rows, number(5e12), whole)
    assert whole.api_ms is not None
    assert found.step_ms == whole.api_ms
    assert sum(found.parts.values()) == pytest.approx(found.step_ms, rel=1e-9, abs=1e-9)


def test_a_step_is_that_of_the_median_run_and_of_all_streams() -> None:
    assert WHOLE.api_ms == pytest.approx(1e3 / 625)
    assert replace(WHOLE, batch=8).api_ms == pytest.approx(8e3 / 625)


def test_what_was_not_measured_is_absent() -> None:
    dense = [r for r in ROWS if r.label not in ("moe_block", "sample_greedy 151936")]
    whole = replace(WHOLE, api_tok_s=())
    found = split(dense, BYTES_S, whole)
    assert set(found.parts) == {"weights", "kv", "launch_ramp", "overlap"}
    assert found.step_ms == whole.bare_ms
    assert sum(found.parts.values()) == pytest.approx(1.5)
    lines = list(table(found, whole))
    assert not any(word in line for line in lines for word in ("host", "routing", "sampling", "API"))
    assert lines[-1].split() == ["captured", "step", "1.5000", "100.0%", "666.7", "tok/s"]
    made = record(found, whole, 1_000, BYTES_S, {"model": "m"}, ENVIRONMENT, "script")
    assert made.spread is None
    assert not {"host_ms", "routing_ms", "sampling_ms", "output_tok_s"} & set(made.metrics)


def test_routing_that_is_an_operator_counts_whole() -> None:
    rows = [Row("router_topk", 10, 4.0, 300_000, 0.1, False), Row("moe_mlp", 10, 80.0, 60_000_000, 0.75, False)]
    parts = split(rows, BYTES_S, WHOLE).parts
    assert parts["routing"] == pytest.approx(0.04)
    assert parts["weights"] == pytest.approx(0.6)
    assert parts["launch_ramp"] == pytest.approx(0.2)


def test_every_operator_has_its_cause() -> None:
    """A new operator has to be placed here: it reads weights or cache, or all its time counts as launch."""
    only_launch = {"rms_norm", "rope", "silu_mul", "add", "take_rows", "kv_append", "qkv_rope_append"}
    assert {f.name for f in fields(Ops)} == only_launch | set(READS) | set(WHOLE_TIME) - {
        "sample_greedy", "sample_drawn",
    }  # fmt: skip
    assert set(READS.values()) | set(WHOLE_TIME.values()) <= set(NAMES)


@pytest.mark.parametrize(("model", "routes"), [("qwen3.8-flash@0.03", True), ("qwen3.8-flash-dense@0.03", False)])
def test_the_routers_bytes_are_those_of_a_real_step(model: str, routes: bool) -> None:
    config, weights = load_weights_of(model, "fp8", 2, torch.device("cpu"), torch.float32)
    conditions = Conditions(model, 1, 40, "fp8", "fp8", 7, "reference", "greedy")
    found = operators(BuiltStep(conditions, config, weights, torch.device("cpu"), torch.float32))
    routers = {op.label: op.router_bytes for op in found if op.router_bytes}
    mlp = weights.layers[0].mlp
    assert routers == ({"moe_block": mlp.router.nbytes} if isinstance(mlp, MoeWeights) else {})
    assert bool(routers) == routes
    assert all(op.router_bytes < op.nbytes for op in found)


def test_the_table_shows_milliseconds_share_and_sign() -> None:
    lines = list(table(split(ROWS, BYTES_S, WHOLE), WHOLE))
    assert lines[0].split() == ["where", "the", "step", "goes", "ms", "share"]
    cells = {line[:34].strip(): line[34:].split() for line in lines[1:-1]}
    assert cells["reading weights"] == ["1.1200", "70.0%"]
    assert cells["whole step less its operators"] == ["-0.0980", "-6.1%"]
    assert cells["host"][0] == "0.1000"
    assert cells["step through the API"] == ["1.6000", "100.0%", "625.0", "tok/s"]
    assert lines[-1] == "(captured step 1.5000 ms; through the API 600.0 to 640.0 tok/s in 3 runs)"


def test_a_record_holds_the_parts_and_their_sum() -> None:
    found = split(ROWS, BYTES_S, WHOLE)
    made = record(found, WHOLE, 1_200_000_000, BYTES_S, {"model": "m", "batch": 1}, ENVIRONMENT, "script").as_dict()
    m = made["metrics"]
    assert made["name"] == "causes/m/x1"
    assert sum(m[f"{cause}_ms"] for cause in NAMES) == pytest.approx(m["step_ms"])
    assert (m["captured_step_ms"], m["output_tok_s"], m["distinct_tokens"]) == (1.5, 625.0, 1.0)
    assert m["mbu"] == pytest.approx(0.8)
    assert made["spread"] == {"runs": 3, "min": 600.0, "median": 625.0, "max": 640.0}
    json.dumps(made)


def test_a_captured_step_faster_than_the_memory_is_told_and_not_recorded() -> None:
    assert captured_mbu(WHOLE, 1_800_000_000, BYTES_S) == pytest.approx(1.2)
    with pytest.raises(RooflineExceeded):
        record(split(ROWS, BYTES_S, WHOLE), WHOLE, 1_800_000_000, BYTES_S, {"model": "m"}, ENVIRONMENT, "script")
    conditions = Conditions("m", 1, 40, "fp8", "fp8", 10, "triton", "greedy")
    card = Ceilings("some card", BYTES_S, "sum", 0, LaunchCosts(1.5, 1.0, 16.0))
    report = Report(conditions, card, ROWS, 1500.0)
    lines, made = by_cause(report, WHOLE, ENVIRONMENT, "script", 4)
    assert made is not None and made.conditions["layers_built"] == 4
    assert not any("ERROR" in line for line in lines)
    lines, made = by_cause(report, replace(WHOLE, bare_ms=1.0), ENVIRONMENT, "script", 4)
    assert made is None
    assert "ERROR" in lines[-1]


def test_an_engines_step_is_measured_bare_and_through_the_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        causing, "bare_step", lambda engine, batch, start: (asked.append((batch, start)), (0.5, 1.0))[1]
    )
    folder = write_checkpoint(tmp_path, "llama")[0]
    with LLMEngine(folder, device="cpu", num_kv_blocks=64) as engine:
        whole = measure_whole(engine, 2, 96)
        alone = measure_whole(engine, 2, 80)
    assert whole.bare_ms == 0.5
    assert len(whole.api_tok_s) == 3 and min(whole.api_tok_s) > 0
    assert whole.api_ms is not None and whole.distinct in (0.5, 1.0)
    assert asked[0] == (2, 96 - 2 * (3 + 20)), "96 tokens in the middle of the timed replays"
    assert (alone.api_tok_s, alone.api_ms, alone.distinct) == ((), None, None), "no room for a prompt"


def test_prompts_that_cost_too_much_leave_the_api_unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causing, "bare_step", lambda *a: (0.5, 1.0))
    engine: Any = SimpleNamespace()
    assert measure_whole(engine, 64, 8192) == Whole(0.5, (), 64)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--whole", "--sampler", "drawn"], "--sampler greedy"),
        (["--whole", "--backend", "reference"], "--backend triton"),
        (["--whole", "--context", "40000"], "must be at most 39936 with --whole"),
    ],
)
def test_what_an_engine_cannot_be_measured_at_is_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments(argv)
    assert message in capsys.readouterr().err


@pytest.mark.gpu
def test_a_presets_step_is_split_from_end_to_end(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Everything fits into the cache, so figures may be impossible; then they are refused."""
    path = tmp_path / "kernels.json"
    code = main(["--model", "qwen3.8-flash@0.03", "--batch", "1", "3", "--layers", "2", "--json", str(path), "--whole"])
    out = capsys.readouterr().out
    assert out.count("where the step goes") == 2
    assert out.count("step through the API") == 2
    if code == 0:
        made = [r for r in json.loads(path.read_text()) if r["name"].startswith("causes/")]
        assert len(made) == 2
        for r in made:
            m = r["metrics"]
            assert sum(m.get(f"{cause}_ms", 0.0) for cause in NAMES) == pytest.approx(m["step_ms"])
    else:
        assert code == 1 and "ERROR" in out

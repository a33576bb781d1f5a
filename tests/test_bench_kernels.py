"""The operator benchmark: what it counts, what it refuses, and that it takes a step apart without losing a call."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from strata_lab.bench.harness import Environment, RooflineExceeded
from strata_lab.bench.kernels import (
    MAX_SETS,
    SETS_BYTES,
    Report,
    Row,
    arguments,
    as_record,
    main,
    measure,
    num_sets,
    share_of,
    table,
)
from strata_lab.bench.op_calls import BuiltStep, Conditions, label, load_weights_of, operators
from strata_lab.quant import get_format
from strata_lab.telemetry import ceilings as ceilings_module
from strata_lab.telemetry.ceilings import Ceilings, LaunchCosts
from strata_lab.telemetry.roofline import forecast

MOE, DENSE = "qwen3.8-flash@0.03", "qwen3.8-flash-dense@0.03"
CARD = Ceilings("some card", 1e12, "sum", 0, LaunchCosts(1.5, 1.0, 16.0))
CONDITIONS = Conditions(MOE, 1, 40, "fp8", "fp8", 40, "reference", "greedy")
ENVIRONMENT = Environment(hardware={"gpu": "some card"}, versions={}, date="2026-01-01", commit="abc")


def built(model: str, batch: int = 1, layers: int = 2, whole: int = 7) -> BuiltStep:
    config, weights = load_weights_of(model, "fp8", layers, torch.device("cpu"), torch.float32)
    conditions = replace(CONDITIONS, model=model, batch=batch, num_layers=whole)
    return BuiltStep(conditions, config, weights, torch.device("cpu"), torch.float32)


def report(*rows: Row, step_us: float = 100.0) -> Report:
    return Report(CONDITIONS, CARD, list(rows), step_us)


@pytest.mark.parametrize("model", [MOE, DENSE])
def test_every_operator_call_of_a_step_is_found_once(model: str) -> None:
    step = built(model)
    found = operators(step)
    names = [op.label.split()[0] for op in found]
    mlp = ["moe_block"] if model == MOE else ["linear", "linear"]
    assert names == ["take_rows", "embedding", "linear", "qkv_attention", "linear", *mlp, "lm_head", "sample_greedy"]
    assert [op.per_step for op in found] == [2, 1, 0, 0, 0, *[0] * len(mlp), 1, 1]
    assert [op.per_layer for op in found] == [0, 0, 1, 1, 1, *[1] * len(mlp), 0, 0]
    assert [len(op.calls) for op in found] == [2, 1, 2, 2, 2, *[2] * len(mlp), 1, 1]


@pytest.mark.parametrize("model", [MOE, DENSE])
def test_the_bytes_of_a_step_are_those_of_the_forecast(model: str) -> None:
    """Counted call by call against counted from the geometry, which leaves activations out."""
    layers = 2
    step = built(model, layers=layers, whole=layers)
    counted = sum(op.nbytes * (op.per_layer * layers + op.per_step) for op in operators(step))
    expected = forecast(step.config, "fp8", "fp8").step_bytes(1, step.conditions.context)
    assert expected * 0.98 < counted < expected * 1.2  # small widths: activations weigh more than they do in a model


def test_further_sets_are_copies_of_weights_and_cache_alone() -> None:
    step = built(DENSE, layers=2)
    for op in operators(step):
        if not op.streamed:
            assert op.set_bytes == 0
            continue
        calls = op.on_sets(5)
        pointers: dict[str, set[int]] = {name: set() for name in op.streamed}
        for call in calls:
            for name in op.streamed:
                value = call.keywords[name]  # type: ignore[attr-defined]
                pointers[name].add((value if isinstance(value, torch.Tensor) else value.data).data_ptr())
            call()
        assert all(len(found) == max(5, len(op.calls)) for found in pointers.values()), op.label
        last, source = calls[-1].keywords, op.calls[(len(calls) - 1) % len(op.calls)]  # type: ignore[attr-defined]
        assert all(last[name] is source[name] for name in source if name not in op.streamed)


def test_layers_that_are_not_built_count_as_the_built_ones() -> None:
    step = built(MOE, layers=2, whole=12)

    def clock(calls: Sequence[Callable[[], object]]) -> float:
        for call in calls[:2]:
            call()
        if calls[0] == step.run:
            return 1000.0
        return 200.0 if calls[0] == step.run_layers else 3.0

    card = replace(CARD, bytes_s=1e15)
    measured = measure(step.conditions, step, card, clock)
    assert measured.step_us == 1000 + 10 * 200 / 2
    calls = {row.label.split()[0]: row.calls for row in measured.rows}
    assert calls["qkv_attention"] == 12 and calls["lm_head"] == 1 and calls["take_rows"] == 2
    assert measured.sum_us == 3.0 * sum(row.calls for row in measured.rows)
    assert measured.step_bytes == sum(row.calls * row.nbytes for row in measured.rows)
    assert not measured.impossible


def test_sets_of_weights_are_as_many_as_overflow_the_cache_and_fit_into_memory() -> None:
    assert num_sets(1000, 100, 100, present=4) == 10
    assert num_sets(1000, 1000, 1000, present=4) == 4
    assert num_sets(1001, 1000, 1000, present=1) == 2
    assert num_sets(1000, 100, 0, present=3) == 3  # nothing to copy
    assert num_sets(10**12, 1, 1, present=4) == MAX_SETS
    assert num_sets(10**12, 1, SETS_BYTES // 2, present=4) == 6


def test_a_share_is_bytes_per_second_over_the_ceiling() -> None:
    assert share_of(500_000, 1.0, 1e12) == pytest.approx(0.5)
    row = Row("linear", 2, 1.0, 500_000, 0.5, False)
    made = report(row, step_us=4.0)
    assert made.step_bytes == 1_000_000 and made.sum_us == 2.0
    assert made.share == pytest.approx(0.25) and not made.impossible


def test_a_figure_above_the_ceiling_is_marked_and_not_recorded() -> None:
    fast = Row("linear 4x4", 1, 1.0, 1_100_000, 1.1, False)
    slow = Row("lm_head", 1, 1.0, 10, 1e-5, True)
    made = report(fast, slow)
    lines = list(table(made, built_layers=4))
    assert [line for line in lines if "ERROR" in line] == [line for line in lines if line.startswith("linear 4x4")]
    assert next(line for line in lines if line.startswith("lm_head")).endswith("(cache)")
    with pytest.raises(RooflineExceeded, match="linear 4x4"):
        as_record(made, ENVIRONMENT, "script", 4)
    whole = report(slow, Row("linear", 1, 100.0, 90_000_000, 0.9, False), step_us=50.0)
    assert whole.impossible
    assert "ERROR" in next(line for line in table(whole, 4) if line.startswith("measured step"))
    with pytest.raises(RooflineExceeded, match="180.0%"):
        as_record(whole, ENVIRONMENT, "script", 4)


def test_the_table_says_what_was_measured() -> None:
    row = Row("linear 5120x2560 norm", 40, 5.0, 2_500_000, 0.5, False)
    lines = list(table(report(row, step_us=400.0), built_layers=4))
    assert lines[0] == f"{MOE}, batch 1, context 40, fp8 weights, fp8 KV cache"
    assert "reads 1.00 TB/s" in lines[1] and "1.50 us, 1.00 with dependent launch, 16.0 from Python" in lines[1]
    assert lines[3].split() == ["linear", "5120x2560", "norm", "40", "5.00", "200.0", "2.500", "500", "50.0%"]
    assert lines[4].split() == ["sum", "of", "operators", "200.0"]
    assert lines[5].split() == ["measured", "step", "400.0", "100.0", "25.0%"]
    assert lines[6] == "(4 of 40 layers were built; the others count as these do)"
    assert lines[7] == "2500 tok/s without the host, of 10000 if a step only read its bytes (100 us)"
    assert not any("layers were built" in line for line in table(report(row), built_layers=40))


def test_a_record_holds_operators_and_conditions() -> None:
    row = Row("linear", 40, 5.0, 2_500_000, 0.5, False)
    record = as_record(report(row, step_us=400.0), ENVIRONMENT, "script", 4).as_dict()
    assert record["name"] == f"kernels/{MOE}/x1" and record["conditions"]["layers_built"] == 4
    assert record["metrics"]["mbu"] == pytest.approx(0.25)
    assert record["metrics"]["operators"] == [
        {
            "label": "linear",
            "calls": 40,
            "us": 5.0,
            "nbytes": 2_500_000,
            "share": 0.5,
            "from_cache": False,
            "router_bytes": 0,
        }
    ]
    json.dumps(record)


def test_labels_name_shape_and_what_is_fused() -> None:
    weight = get_format("fp32").quantize(torch.ones(6, 4))
    given = {"x": torch.ones(1, 4), "weight": weight, "norm_weight": torch.ones(4), "bias": None, "silu_mul": True}
    assert label("linear", given) == "linear 6x4 norm silu"
    assert label("linear", {"x": torch.ones(1, 4), "weight": weight, "residual": torch.ones(1, 6)}) == (
        "linear 6x4 residual"
    )
    assert label("moe_block", {"gate_up": weight}) == "moe_block"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "nobody"], "must be one of qwen3.8-flash"),
        (["--model", "qwen3.8-flash@7"], "scale '7'"),
        (["--batch", "1", "0"], "--batch 0 must be at least 1"),
        (["--context", "0"], "--context 0 must be from 1"),
        (["--context", "40960"], "from 1 to 40959"),
        (["--layers", "41"], "--layers 41 must be from 1 to 40"),
        (["--json", "out.txt"], "must end in .json"),
        (["--weights", "fp9"], "invalid choice: 'fp9'"),
    ],
)
def test_a_wrong_argument_is_named_with_what_would_work(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        arguments(argv)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_without_a_gpu_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "needs a CUDA device" in err


def test_launch_costs_survive_the_cache_and_a_damaged_file_does_not(tmp_path: Path) -> None:
    path, costs = tmp_path / "deep" / "launch.json", LaunchCosts(1.4, None, 16.0)
    assert ceilings_module._load(path) is None
    ceilings_module._save(path, costs)
    assert ceilings_module._load(path) == costs
    assert [p.name for p in path.parent.iterdir()] == ["launch.json"]
    path.write_text('{"graph_us": 1}')
    assert ceilings_module._load(path) is None
    assert ceilings_module._load(None) is None


@pytest.mark.gpu
def test_launch_costs_of_a_card_are_ordered(fresh_cache: Path) -> None:
    costs = ceilings_module.launch_costs(torch.device("cuda"))
    assert 0.2 < costs.graph_us < costs.eager_us
    assert costs.dependent_us is None or 0.2 < costs.dependent_us < 2 * costs.graph_us
    assert ceilings_module.launch_costs(torch.device("cuda")).graph_us > 0


@pytest.mark.gpu
def test_a_small_preset_is_measured_from_end_to_end(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Everything fits into the cache, so figures may be impossible; then they are refused."""
    path = tmp_path / "kernels.json"
    for sampler in ("greedy", "drawn"):
        argv = ["--model", MOE, "--batch", "1", "3", "--layers", "2", "--json", str(path), "--sampler", sampler]
        code = main(argv)
        out = capsys.readouterr().out
        assert out.count("measured step") == 2
        assert (code == 0 and path.exists()) or (code == 1 and "ERROR" in out)

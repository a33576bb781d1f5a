"""What the sweep of the expert kernels tries and tells, without a card."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from strata_lab.bench import sweep_moe, sweep_moe_plan
from strata_lab.bench.sweep_moe_plan import Result, best, candidates, merged, stages, table


@pytest.mark.parametrize("weights", ["fp8", "bf16", "int8", "int4"])
@pytest.mark.parametrize("tokens", [1, 8])
def test_every_candidate_is_a_configuration_and_none_comes_twice(weights: str, tokens: int) -> None:
    for stage in stages(tokens):
        found = candidates(stage, tokens, weights)
        assert found[0] == {}
        assert len({repr(sorted(o.items(), key=str)) for o in found}) == len(found)
        for overrides in found:
            sweep_moe._config(weights, overrides)
        assert len(found) > 1 or stage not in ("gate_up", "down")


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_integer_experts_are_swept_in_the_path_and_the_variant_that_an_engine_takes(weights: str) -> None:
    from strata_lab.kernels.gpu.moe_config import CONFIGS

    assert sweep_moe._config(weights, {}) == CONFIGS[{"int4": "int4-centered"}.get(weights, weights)]
    for tokens, stage in itertools.product((1, 8), ("gate_up", "down")):
        assert all(sweep_moe._config(weights, o).half for o in candidates(stage, tokens, weights))


def test_what_is_expected_to_be_best_is_tried_first() -> None:
    for prefix, tokens, stage in (
        ("gate", 1, "gate_up"),
        ("one", 1, "down"),
        ("shared", 8, "gate_up"),
        ("down", 8, "down"),
    ):
        mine = [o for o in sweep_moe_plan.EXPECTED if any(k.startswith(prefix) for k in o)]
        first = candidates(stage, tokens, "fp8")[1 : 1 + len(mine)]
        assert mine
        assert [o for o in mine if o in first] == first[: len([o for o in mine if o in first])]
        assert first[0] in mine


def test_stages_that_disagree_are_not_merged() -> None:
    gates = [{"shared_tiles": 1, "pairs": 1}, {"shared_tiles": 2, "pairs": 2}]
    downs = [{"down_tiles": 4, "pairs": 2}, {}]
    assert merged(gates, downs) == [
        {"shared_tiles": 1, "pairs": 1},
        {"shared_tiles": 2, "pairs": 2, "down_tiles": 4},
        {"shared_tiles": 2, "pairs": 2},
    ]


def test_the_best_are_the_fastest_that_did_not_fail() -> None:
    results = [Result("down", 1, "fp8", {"one_rows": n}, us=float(n), byte_us=1.0) for n in (8, 2, 4)]
    results += [Result("down", 1, "fp8", {}, us=9.0), Result("down", 1, "fp8", {"one_rows": 1}, problem="spilled")]
    results += [Result("down", 8, "fp8", {}, us=0.5)]
    assert [r.us for r in best(results, "down", 1, "fp8", 2)] == [2.0, 4.0]
    text = table(results, "down", 1, "fp8")
    assert "5 tried, 1 failed" in text
    assert "2.00 us bytes   1.00 us ( 50%)" in text
    assert "present" in text
    assert "spilled" in text


def test_the_weights_and_the_expected_result_are_those_of_the_geometry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HIDDEN", 64), ("WIDTH", 32), ("EXPERTS", 16), ("TOP_K", 2)):
        monkeypatch.setattr(sweep_moe, name, value)
    bench = sweep_moe.Bench("fp8", 3, torch.device("cpu"))
    assert [tuple(x.shape) for x in bench.inputs] == [(3, 64)] * sweep_moe.CALLS
    assert 2 <= bench.distinct <= 6
    assert bench.nbytes("gate_up") == pytest.approx(bench.distinct * 64 * (64 + 4))
    assert bench.experts[0][0].shape == (16 * 64, 64)
    from strata_lab.kernels.moe_block import moe_block_ref

    wide = bench.inputs[0].double(), bench.norm.double()
    y = moe_block_ref(wide[0], wide[1], 1e-6, bench.router.double(), *bench.experts[0], top_k=2, normalize=True)
    assert bench.exact is not None
    assert (y - bench.exact).abs().max() < 2e-2 * y.abs().max()


@pytest.mark.parametrize(("weights", "tokens"), [("fp8", 1), ("int4", 2)])
def test_every_stage_of_a_step_is_checked_and_can_be_called_alone(
    weights: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strata_lab.kernels.gpu import launch
    from strata_lab.telemetry import ceilings

    if not launch.INTERPRETED:
        pytest.skip("the sweep itself runs on a card")
    for name, value in (("HIDDEN", 32), ("WIDTH", 16), ("EXPERTS", 4), ("TOP_K", 2), ("CALLS", 1), ("COPIES", 1)):
        monkeypatch.setattr(sweep_moe, name, value)
    shapes: list[tuple[int, ...]] = []

    def once(calls: list[Any], device: torch.device) -> float:
        (call,) = calls
        result = call()
        shapes.append(tuple(result.shape) if isinstance(result, torch.Tensor) else ())
        return 3.0

    monkeypatch.setattr(ceilings, "median_us", once)
    bench = sweep_moe.Bench(weights, tokens, torch.device("cpu"))
    wide = {"gate_warps": 16, "gate_tiles": 1, "one_rows": 8, "shared_warps": 16, "shared_tiles": 1, "down_warps": 32}
    for stage in (*stages(tokens), "block"):
        result = sweep_moe.measured(bench, stage, wide | {"down_tiles": 1}, 1e12)
        assert (result.problem, result.us) == ("", 3.0)
    alone = [(1, 4), (), (1, 32), (1, 32)] if tokens == 1 else [(2, 4), (), (), (4, 32), (2, 32), (2, 32)]
    assert shapes == alone
    bench.exact = -bench.exact if bench.exact is not None else None
    wrong = sweep_moe.measured(bench, "down", wide | {"down_tiles": 1}, 1e12)
    assert wrong.us is None
    assert wrong.problem.startswith("wrong")
    failed = sweep_moe.measured(bench, "down", {"nothing": 1}, 1e12)
    assert failed.us is None
    assert "nothing" in failed.problem


def test_a_pool_that_has_nothing_to_do_costs_nothing() -> None:
    assert sweep_moe.warm([], time.monotonic() + 1, 4) == 0
    assert sweep_moe.warm([("fp8", 1, {})], time.monotonic() + 1, 0) == 0

"""The sweep's parts that need no card: what is tried, in which order, what a lost process leaves, what is printed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from strata_lab.bench import linear_candidates, sweep_linear
from strata_lab.bench.linear_candidates import FORMATS, PRODUCTS, TOKENS, Product, Task, exact_weight, random_weight
from strata_lab.bench.sweep_linear import Result
from strata_lab.kernels.gpu import gemm, gemv, gemv_int, gemv_mma_config

SMALL = Product("small", 24, 512, norm=True)


def _result(us: float | None, path: str = "mma", problem: str | None = None) -> Result:
    return Result("o", "fp8", 1, path, None if path == "default" else {"warps": 8}, us, us and 1.0, problem)


def test_every_group_tries_the_default_and_every_path_that_fits_its_rows() -> None:
    paths = {
        1: {gemv.GemvConfig, gemv_mma_config.MmaConfig},
        8: {gemv_mma_config.MmaConfig, gemm.DotConfig},
        17: {gemm.DotConfig},
    }
    for product in PRODUCTS:
        for fmt in (*FORMATS, "bf16", "int8"):
            for tokens, kinds in paths.items():
                found = linear_candidates.candidates(product, fmt, tokens)
                if tokens == 1 and fmt.startswith("int"):
                    kinds = {gemv_int.IntConfig, gemv_mma_config.MmaConfig}
                assert found[0] is None
                assert {type(config) for config in found[1:]} == kinds, (product, fmt, tokens)
                assert len(set(found)) == len(found)


def test_a_few_rows_are_tried_on_cuda_cores_where_those_of_the_weight_are_short() -> None:
    kinds = {p.name: {type(c) for c in linear_candidates.candidates(p, "bf16", 4)[1:]} for p in PRODUCTS}
    assert kinds["small-gate-up"] == {gemv.GemvConfig, gemv_mma_config.MmaConfig}
    assert kinds["gate-up"] == {gemv_mma_config.MmaConfig}


def test_candidates_are_valid() -> None:
    def power(value: int) -> bool:
        return value > 0 and value & (value - 1) == 0

    for task in linear_candidates.tasks((*FORMATS, "bf16"), TOKENS):
        config = task.config
        if isinstance(config, gemv.GemvConfig | gemv_int.IntConfig):
            assert power(config.rows)
            assert power(config.chunk)
            assert config.preload >= 1
            assert not task.product.gated or config.pieces % 2 == 0
        elif isinstance(config, gemv_mma_config.MmaConfig):
            assert config.preload >= 1
            assert config.pieces % 2 == 0 or (config.pieces == 1 and not task.product.gated)
            assert config.block >= 8
        elif config is not None:
            assert config.split <= task.product.k // config.block_k


def test_what_is_named_first_is_tried_first() -> None:
    groups = list(dict.fromkeys(task.group for task in linear_candidates.tasks(["fp8", "int4"], [1, 8])))
    assert len(groups) == 4 * len(PRODUCTS)
    assert [group[1:] for group in groups[:: len(PRODUCTS)]] == [("fp8", 1), ("fp8", 8), ("int4", 1), ("int4", 8)]
    assert [group[0] for group in groups[: len(PRODUCTS)]] == [product.name for product in PRODUCTS]


@pytest.mark.parametrize("fmt", FORMATS)
def test_candidates_are_checked_against_the_definition(fmt: str) -> None:
    """The very check that a card makes, with a right product and a wrong one."""
    task = Task(SMALL, fmt, 2, gemv_mma_config.MmaConfig(2, 2, 1))
    inputs, sets, expected = sweep_linear._prepared(task, 1000, torch.device("cpu"))
    assert len(sets) >= 2
    assert all(s.nbytes == sets[0].nbytes and s.data.data_ptr() != sets[0].data.data_ptr() for s in sets[1:])
    result = sweep_linear.call(task.product, inputs, sets[0], task.config)
    assert sweep_linear.wrong(result, expected) is None
    assert "wrong" in (sweep_linear.wrong(result.roll(1, dims=1), expected) or "")
    assert "wrong" in (sweep_linear.wrong(torch.full_like(result, torch.nan), expected) or "")


def test_random_weights_have_unit_gain() -> None:
    for fmt in FORMATS:
        w = exact_weight(random_weight(fmt, 64, 512, torch.device("cpu"))).data
        assert 0.8 < float(w.square().sum(dim=1).mean()) < 1.25


def test_a_candidate_that_took_its_process_down_is_begun_but_not_ended(tmp_path: Path) -> None:
    assert sweep_linear.progress(tmp_path) == (set(), {})
    ended = {"number": 0, "result": sweep_linear.asdict(_result(5.0))}
    lines = [{"begun": 0}, ended, {"begun": 1}]
    (tmp_path / "measured").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert sweep_linear.progress(tmp_path) == ({0, 1}, {0: _result(5.0)})
    (tmp_path / "compiled-0").write_text("0\n2\n")
    (tmp_path / "compiled-1").write_text("1\n")
    assert sweep_linear._compiled(tmp_path) == {0, 1, 2}


def test_candidates_are_measured_once_in_order_and_a_lost_context_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong configuration is reported and not timed; after a CUDA error the next process goes on behind it."""
    configs = [
        None,
        gemm.DotConfig(16, 16, 128, 1, 4, 2),
        gemv_mma_config.MmaConfig(2, 2, 1),
        gemv_mma_config.MmaConfig(3, 2, 1),
    ]
    every = [Task(SMALL, "fp8", 2, config) for config in configs]
    timed: list[int] = []

    def median(calls: list[Callable[[], object]], device: torch.device) -> float:
        timed.append(len(calls))
        if len(timed) == 2:
            raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
        calls[0]()
        return 3.0

    cpu = torch.device("cpu")
    monkeypatch.setattr(sweep_linear, "median_us", median)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1000))
    (tmp_path / "compiled-0").write_text("0\n1\n2\n3\n")
    with pytest.raises(RuntimeError, match="illegal"):
        sweep_linear.measure(every, tmp_path, time.time() + 60, cpu)
    begun, done = sweep_linear.progress(tmp_path)
    assert begun == done.keys() == {0, 1}
    sweep_linear.measure(every, tmp_path, time.time() + 60, cpu)
    begun, done = sweep_linear.progress(tmp_path)
    assert begun == done.keys() == {0, 1, 2, 3}
    assert [done[i].us for i in range(4)] == [3.0, None, 3.0, None]
    assert "illegal" in (done[1].problem or "")
    assert timed == [sweep_linear.MIN_CALLS] * 3
    late = tmp_path / "late"
    late.mkdir()
    sweep_linear.measure(every, late, time.time() - 1, cpu)
    assert sweep_linear.progress(late) == (set(), {})


def test_the_report_has_the_best_the_default_and_what_failed() -> None:
    slow_default = _result(99.0, "default")
    results = [*(_result(float(us)) for us in (9, 8, 7, 6, 5, 4)), slow_default, _result(None, problem="wrong by 1")]
    lines = sweep_linear.report(results).splitlines()
    assert lines[0] == "o fp8 T=1: 7 timed, 1 failed"
    assert [float(line.split()[0]) for line in lines[1:7]] == [4, 5, 6, 7, 8, 99]
    assert lines[7].endswith("wrong by 1")


def test_an_ended_task_knows_its_path_and_bandwidth() -> None:
    task = Task(SMALL, "fp8", 2, gemv_mma_config.MmaConfig(2, 2, 1))
    result = sweep_linear.ended(task, 2.0, 8_000_000, None)
    assert (result.path, result.tb_s) == ("mma", 4.0)
    assert sweep_linear.ended(Task(SMALL, "fp8", 2, None), None, 1, "lost").path == "default"

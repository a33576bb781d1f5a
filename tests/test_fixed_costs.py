"""Fixed costs of products without a card: the line, the sizes, what a record says."""

from __future__ import annotations

import statistics

import pytest
import torch

from strata_lab.bench import fixed_costs, sweep_linear
from strata_lab.bench.harness import Environment
from strata_lab.bench.linear_candidates import REFERENCE, Product

FIXED_US, GB_S = 3.0, 4000.0
HERE = Environment({"cpu": "test"}, {"python": "3"}, "2026-01-01", "abc")


def test_the_line_finds_what_points_were_made_of_and_says_how_far_they_are_from_a_line() -> None:
    nbytes = [4e6, 8e6, 16e6]
    us = [FIXED_US + n / GB_S * 1e-3 for n in nbytes]
    found = fixed_costs.line(nbytes, us)
    assert found.fixed_us == pytest.approx(FIXED_US)
    assert found.bytes_s == pytest.approx(GB_S * 1e9)
    assert found.deviation_us == pytest.approx(0, abs=1e-9)
    assert fixed_costs.line(nbytes, [us[0], us[1] + 1, us[2]]).deviation_us > 0.5
    assert fixed_costs.line(nbytes, [5.0, 5.0, 5.0]).bytes_s == float("inf")
    with pytest.raises(statistics.StatisticsError):
        fixed_costs.line(nbytes[:1], us[:1])


def test_sizes_are_whole_and_keep_pairs_of_gate_and_up_together() -> None:
    for product in REFERENCE:
        sizes = [fixed_costs.sized(product, size).n for size in fixed_costs.SIZES]
        assert sizes == sorted(set(sizes)) and all(n % 256 == 0 for n in sizes)


def test_a_record_holds_every_point_and_its_line_reads_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(product, fmt, tokens, device, *, bare=False):
        nbytes = product.n * product.k
        return nbytes, FIXED_US - bare + nbytes / GB_S * 1e-3

    monkeypatch.setattr(fixed_costs, "timed", timed)
    costs = type("Costs", (), {"dependent_us": 0.5})()
    monkeypatch.setattr(fixed_costs, "launch_costs", lambda device: costs)
    monkeypatch.setattr(fixed_costs, "coded", lambda product, fmt, device: 1.25 if fmt == "int4g128" else None)
    product = next(p for p in REFERENCE if p.name == "o")
    record = fixed_costs.measure(product, "fp8", 1, torch.device("cpu"), HERE)
    m = record.metrics
    assert m["coded_us"] is None
    other = fixed_costs.measure(product, "int4g128", 1, torch.device("cpu"), HERE)
    assert fixed_costs.row(other).endswith(", coded 1.25 us")
    assert m["fixed_us"] == pytest.approx(FIXED_US) and m["bandwidth_gb_s"] == pytest.approx(GB_S)
    assert m["bare_us"] == pytest.approx(m["us"] - 1)
    assert len(m["points"]) == len(fixed_costs.SIZES)
    assert "3.00 of them whatever its size, then  4000 GB/s" in fixed_costs.row(record)


@pytest.mark.parametrize("product", [Product("in", 64, 512, norm=True, gated=True), Product("out", 64, 512)])
@pytest.mark.parametrize("fmt", ["fp8", "int8row", "int4g128"])
def test_what_is_timed_is_the_product_that_the_model_calls(product: Product, fmt: str, monkeypatch) -> None:
    pytest.importorskip("triton")
    ran: list[torch.Tensor | None] = []

    def once(sets, run, device):
        ran.append(run(sets[0]))
        return 1.0

    cpu = torch.device("cpu")
    monkeypatch.setattr(fixed_costs, "time_over", once)
    monkeypatch.setattr(
        fixed_costs, "_made", lambda p, f, tokens, device: sweep_linear.inputs_and_sets(p, f, tokens, 1000, device)
    )
    assert fixed_costs.timed(product, fmt, 1, cpu)[0] > 0 and fixed_costs.timed(product, fmt, 1, cpu, bare=True)[1] == 1
    assert [None if y is None else y.shape for y in ran] == [(1, 32 if product.gated else 64), (1, 64)]
    assert fixed_costs.coded(product, fmt, cpu) == (1.0 if fmt == "int4g128" else None), "of the others x has no codes"


def test_where_there_is_no_card_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fixed_costs.main([]) == 2
    assert "need a CUDA device" in capsys.readouterr().err

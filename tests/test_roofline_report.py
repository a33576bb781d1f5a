"""Laws of `strata roofline`: bytes give ceilings and needs, above 100% is an alarm, projections are labelled."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from strata_lab import cli
from strata_lab.bench.projection import nearest, project, results
from strata_lab.bench.roofline_report import LADDER, report
from strata_lab.models.presets import PRESETS
from strata_lab.settings import ConfigError
from strata_lab.telemetry.bandwidth import Bandwidth
from strata_lab.telemetry.cards import CARDS, READ_SHARE, card
from strata_lab.telemetry.roofline import forecast

DOCS = Path(__file__).resolve().parent.parent / "docs"
MODEL = "qwen3.8-flash"


def made(**options: Any) -> Any:
    return report(MODEL, PRESETS[MODEL], card("rtx4090-48g"), **options)


def test_the_table_of_cards_is_the_documented_one_with_a_source_each() -> None:
    rows = {}
    for line in (DOCS / "cards.md").read_text().splitlines():
        cells = [c.strip() for c in line.strip("|").split("|")]
        if len(cells) == 7 and cells[0] in CARDS:
            rows[cells[0]] = cells
    assert set(rows) == set(CARDS)
    for key, (_, memory, bandwidth, bf16, fp8, int8, source) in rows.items():
        c = CARDS[key]
        assert (c.memory_bytes, c.bandwidth_bytes_s) == (int(memory) << 30, float(bandwidth) * 1e9)
        assert [c.tensor_tflops["bf16"], c.tensor_tflops["int8"]] == [float(bf16), float(int8)]
        assert c.tensor_tflops.get("fp8") == (None if fp8 == "none" else float(fp8))
        assert len(source) > 10


def test_the_share_that_reads_is_the_measured_one() -> None:
    records = json.loads((DOCS / "results" / "evidence_gpu.json").read_text())
    best = max(r["metrics"].get("read_bandwidth_tb_s", 0.0) for r in records)
    assert abs(best / 4.8 - READ_SHARE) < 0.001


def test_a_ceiling_is_bandwidth_over_bytes() -> None:
    cost = forecast(PRESETS[MODEL], "fp8", "fp8")
    (ceiling,) = [c for c in made(kv_cache_dtype="fp8", contexts=(512,)).ceilings if c.weight_format == "fp8"]
    assert ceiling.tok_s == pytest.approx(1008e9 * READ_SHARE / cost.step_bytes(1, 512))
    assert ceiling.bound == "memory"
    assert 3.8 < ceiling.step_gb < 4.0, "the articles count 3.8 GB a token"


def test_a_large_batch_is_bound_by_arithmetic_and_a_small_card_does_not_hold_the_model() -> None:
    dense = PRESETS["qwen3.8-flash-dense"]
    many = report("dense", dense, card("rtx3090"), batch=4096, contexts=(1,), kv_cache_dtype="fp8").ceilings[0]
    assert many.bound == "arithmetic" and many.tok_s == pytest.approx(71e12 / (2 * 4.0e9), rel=0.05)
    fits = {c.weight_format: c.fits for c in report(MODEL, PRESETS[MODEL], card("rtx4090"), contexts=(512,)).ceilings}
    assert fits == {"bf16": False, "fp8": True, "int8": True, "int4": True}


def test_the_articles_figures_are_held_against_the_ceiling() -> None:
    needs = {n.tok_s: n for n in made(kv_cache_dtype="fp8").needs}
    assert set(needs) == set(LADDER)
    assert 0.5 < needs[150].one_stream < 0.65, "the articles say 57% of the card's own bandwidth"
    assert all(n.several_streams < n.one_stream for n in needs.values())
    assert made(kv_cache_dtype="fp8").alarms == []
    red = report(MODEL, PRESETS[MODEL], card("l4"))
    assert [a.split()[0] for a in red.alarms] == [str(n.tok_s) for n in red.needs if n.one_stream > 1]
    assert "240" in " ".join(red.alarms) and "cannot be" in red.alarms[0]


def test_a_projection_lies_between_its_two_assumptions_and_under_the_ceiling() -> None:
    entry = nearest(results(), False, MODEL, "fp8", 1, 3.9e9)
    assert entry is not None
    target = card("rtx4090-48g")
    step = entry[1]["metrics"]["step_gb"] * 1e9
    p = project(entry, target, MODEL, step, 1)
    floor = target.read_bytes_s / step
    assert p.low_tok_s < p.tok_s < p.high_tok_s < floor
    assert p.low_tok_s == pytest.approx(entry[1]["metrics"]["mbu"] * floor, rel=0.01)
    assert p.same_model and p.measured_on == "NVIDIA H200" and p.source.startswith("evidence_gpu.json")


def test_the_nearest_measurement_is_of_the_same_kind_of_device_then_model_then_batch() -> None:
    found = nearest(results(), False, MODEL, "fp8", 6, 1e10)
    assert found is not None
    assert (found[1]["conditions"]["model"], found[1]["conditions"]["batch"]) == (MODEL, 8)
    cpu = nearest(results(), True, "whatever", "int8", 1, 1e8)
    assert cpu is not None and "cpu" in cpu[1]["hardware"]
    assert nearest([], True, MODEL, "fp8", 1, 1e9) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch=0 must be a whole number of at least 1"), ({"contexts": (0,)}, "context=0"),
        ({"contexts": ()}, "try 512"), ({"need_format": "fp4"}, "weight_format='fp4' must be one of"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype='int4'"),
    ],
)  # fmt: skip
def test_bad_numbers_name_one_that_works(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        made(**options)


def test_the_command_shows_alarms_in_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata_lab.telemetry.bandwidth.ceiling", lambda *a, **k: Bandwidth(25e9, 1, "memory", "test"))
    run = CliRunner().invoke
    shown = run(cli.app, ["roofline", MODEL])
    assert shown.exit_code == 0 and "PROJECTED" in shown.stdout and "their claim" in shown.stdout
    assert run(cli.app, ["roofline", MODEL, "--measured", "200"]).exit_code == 0
    alarm = run(cli.app, ["roofline", MODEL, "--measured", "300"])
    assert alarm.exit_code == 1 and "ALARM: the given 300 tok/s" in alarm.stdout
    found = json.loads(run(cli.app, ["roofline", MODEL, "--card", "cpu", "--json"]).stdout)
    assert found["card"]["measured"] and found["card"]["bandwidth_bytes_s"] == 25e9
    wrong = run(cli.app, ["roofline", MODEL, "--card", "rtx9090"])
    assert wrong.exit_code == 2 and "try 'rtx4090-48g'" in wrong.output

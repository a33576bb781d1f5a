"""Laws of measuring: what is counted, how runs are ordered, what may be recorded, and how a climb is told."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from strata_lab.apply import ApplyReport, FieldResult
from strata_lab.bench import climb as climbing
from strata_lab.bench import climb_plan, climb_records, compare, evidence, harness, measure
from strata_lab.bench.climb import Climb
from strata_lab.bench.climb_plan import Course, Stage, article_course, fitting_scale, longest, plan, pool_blocks
from strata_lab.bench.climb_records import Unfinished
from strata_lab.bench.climb_report import html_page, text_table
from strata_lab.bench.harness import (
    Environment,
    Record,
    RooflineExceeded,
    Spread,
    a_b_a,
    interleave,
    median_interval,
    read_results,
    write_results,
)
from strata_lab.bench.measure import RunFailed, run, summarize
from strata_lab.bench.svg import nice_ticks, number
from strata_lab.bench.workloads import TEXT_FILE, article, batch, single_stream, text_tokens, uneven
from strata_lab.config import Optimizations, toggles
from strata_lab.engine import LLMEngine
from strata_lab.events import EVENT_CAPACITY, EventLog, StepEvent, TokenEvent
from strata_lab.models.presets import PRESETS
from strata_lab.quant import FORMATS, get_format
from strata_lab.request import RequestOutput
from strata_lab.settings import ConfigError
from strata_lab.telemetry import bandwidth, roofline
from strata_lab.telemetry.bandwidth import Bandwidth
from tests.checkpoints import write_checkpoint

# -- the roofline -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("shape", [(8, 64), (24, 576), (5, 40)])
def test_forecast_bytes_equal_the_bytes_a_weight_really_has(weight_format: str, shape: tuple[int, int]) -> None:
    weight = get_format(weight_format).quantize(torch.randn(shape))
    assert roofline.linear_bytes(*shape, weight_format) == weight.nbytes


@pytest.mark.parametrize(
    ("preset", "gigabytes", "tok_s"), [("qwen3.8-flash", 3.88, 1184), ("qwen3.8-flash-dense", 4.07, 1130)]
)
def test_reference_geometries_have_the_published_byte_floor(preset: str, gigabytes: float, tok_s: float) -> None:
    """FP8 weights and KV, 512 tokens of context, 4.60 TB/s."""
    step = roofline.forecast(PRESETS[preset], "fp8", "fp8").step_bytes(1, 512)
    assert step / 1e9 == pytest.approx(gigabytes, rel=0.005)
    assert roofline.roofline_tok_s(step, 4.60e12) == pytest.approx(tok_s, rel=0.005)


def test_one_token_touches_exactly_k_experts_and_many_touch_all() -> None:
    config = PRESETS["qwen3.8-flash"]
    cost = roofline.forecast(config, "fp8", "fp8")
    experts_of_one = cost.weight_bytes(1) - cost.dense_bytes - cost.row_bytes
    assert experts_of_one == config.num_layers * config.num_experts_per_tok * cost.expert_bytes
    all_experts = config.num_layers * config.num_experts * cost.expert_bytes
    assert cost.weight_bytes(1000) - cost.dense_bytes - 1000 * cost.row_bytes == pytest.approx(all_experts, rel=1e-9)


def test_unknown_formats_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="try 'int8'"):
        roofline.linear_bytes(8, 64, "int3")
    with pytest.raises(ConfigError, match="try 'bf16'"):
        roofline.kv_bytes_per_token(PRESETS["qwen3.8-flash"], "int8")


def test_mbu_is_one_exactly_at_the_roofline() -> None:
    assert roofline.mbu(25e9, 1.0, 25e9) == 1.0
    assert roofline.mbu(1e9, 0.1, 25e9) == pytest.approx(0.4)


@pytest.fixture
def probed(fresh_cache: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Measurements of bandwidth that were asked for; each finds 10 GB/s more than the last one."""
    asked: list[tuple[int, str]] = []

    def measure(device: str, size: int, level: str) -> Bandwidth:
        asked.append((size, level))
        return Bandwidth(10e9 * len(asked), size, level, "test")

    monkeypatch.setattr(bandwidth, "_measure", measure)
    return asked


def test_bandwidth_is_measured_once_and_then_remembered(probed: list[tuple[int, str]]) -> None:
    first = bandwidth.ceiling("cpu")
    assert bandwidth.ceiling("cpu") == first
    assert [level for _, level in probed] == ["memory"]


def test_a_ceiling_never_falls(probed: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    bandwidth.ceiling("cpu")
    higher = bandwidth.ceiling("cpu", fresh=True)
    assert higher.bytes_s == 20e9
    monkeypatch.setattr(bandwidth, "_measure", lambda d, size, level: Bandwidth(1.0, size, level, "slow"))
    assert bandwidth.ceiling("cpu", fresh=True) == higher


def test_a_working_set_that_fits_the_cache_gets_the_ceiling_of_the_cache(
    probed: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = SimpleNamespace(last_level_cache_bytes=64 << 20, available_memory_bytes=64 << 30)
    monkeypatch.setattr(bandwidth, "cpu_info", lambda: cpu)
    assert bandwidth.ceiling("cpu", 20 << 20).level == "cache"
    assert bandwidth.ceiling("cpu", 100 << 20).level == "memory"
    assert probed == [(1 << 30, "memory"), (32 << 20, "cache")]


def test_the_probe_reads_a_plausible_speed() -> None:
    found = bandwidth._measure("cpu", 32 << 20, "cache")
    assert 1e8 < found.bytes_s < 1e13
    assert found.buffer_bytes == 32 << 20


@pytest.mark.gpu
def test_the_gpu_ceiling_comes_from_reading_and_covers_torchs_own_reductions(fresh_cache: Any) -> None:
    found = bandwidth.ceiling("cuda")
    assert found.level == "memory"
    flat = torch.ones(1 << 28, device="cuda")
    torch_reads = flat.nbytes / min(bandwidth._seconds(flat.sum, "cuda") for _ in range(5))
    assert 1e11 < torch_reads <= found.bytes_s * 1.02


# -- the harness ------------------------------------------------------------------------------------------------------


def test_runs_alternate_and_end_where_they_began() -> None:
    order: list[str] = []
    a, b = a_b_a(order.append, lambda: len(order), rounds=2)
    assert order == ["a", "b", "a", "b", "a"]
    assert (a, b) == ([1, 3, 5], [2, 4])


def test_interleaving_turns_around_in_every_round() -> None:
    order: list[str] = []
    variants = {name: (lambda n=name: (order.append(n), len(order))[1]) for name in "xyz"}
    results = interleave(variants, rounds=3)
    assert "".join(order) == "xyzzyxxyz"
    assert results == {"x": [1, 6, 7], "y": [2, 5, 8], "z": [3, 4, 9]}


@pytest.mark.parametrize(("n", "rank"), [(5, 1), (6, 1), (10, 2), (20, 6), (30, 10), (100, 40)])
def test_the_interval_of_a_median_has_the_ranks_of_the_sign_test(n: int, rank: int) -> None:
    values = [float(v) for v in range(n, 0, -1)]
    assert median_interval(values) == (rank, n + 1 - rank)


def test_spread_keeps_the_ends() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 9.0]) == Spread(4, 1.0, 2.5, 9.0)


def record(**changes: Any) -> Record:
    parts: dict[str, Any] = {"conditions": {"model": "m"}, "metrics": {"output_tok_s": 1.0, "mbu": 0.5}}
    return Environment.now("cpu", threads=1).record("test", script="pytest", **(parts | changes))


def test_a_record_has_exactly_the_fields_of_the_results_files(tmp_path: Any) -> None:
    path = write_results(
        "x", [record(spread=Spread.of([1.0]), peer={"name": "p", "version": "1", "metrics": {}})], tmp_path
    )
    (found,) = json.loads(path.read_text())
    assert list(found) == list(harness.RECORD_FIELDS)
    assert set(found["hardware"]) >= {"cpu", "memory_gb", "driver", "clocks", "temperature", "threads", "load_average"}
    assert set(found["versions"]) >= {"python", "torch", "triton"}
    assert found["spread"] == {"runs": 1, "min": 1.0, "median": 1.0, "max": 1.0}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["date"])
    assert found["commit"] == "unknown" or re.fullmatch(r"[0-9a-f]{12}(-dirty)?", found["commit"])
    assert list(tmp_path.iterdir()) == [path], "nothing is left beside the file"


def test_a_figure_above_the_roofline_is_an_error_and_not_a_record(tmp_path: Any) -> None:
    with pytest.raises(RooflineExceeded, match="101"):
        record(metrics={"mbu": 1.01})
    smuggled = Record("x", "pytest", {}, {"mbu": 1.5})
    with pytest.raises(RooflineExceeded):
        write_results("x", [smuggled], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_measured_nothing_leaves_no_file(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="at least one record"):
        write_results("x", [], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_evidence_of_another_run_replaces_what_it_measured_again(tmp_path: Any) -> None:
    environment = Environment(hardware={"gpu": "some"}, versions={}, date="2026-01-01", commit="abc")

    def cell(batch: int, ms: float) -> Record:
        conditions = {"model": "m", "weight_format": "fp8", "kv_cache_dtype": "fp8", "batch": batch, "context": 512}
        return environment.record("decode", script="evidence", conditions=conditions, metrics={"step_ms": ms})

    write_results("evidence_gpu", [cell(1, 2.0), cell(8, 4.0)], tmp_path)
    later = write_results("later", [cell(8, 3.0), cell(16, 6.0)], tmp_path)
    assert evidence.main(["--add", str(later), "--results", str(tmp_path)]) == 0
    kept = read_results(tmp_path / "evidence_gpu.json")
    assert [(r.conditions["batch"], r.metrics["step_ms"]) for r in kept] == [(1, 2.0), (8, 3.0), (16, 6.0)]


def test_outside_a_checkout_the_commit_is_unknown(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "REPOSITORY", tmp_path)
    assert harness.commit() == "unknown"
    monkeypatch.setenv("STRATA_COMMIT", "0123456789ab")
    assert harness.commit() == "0123456789ab"


def test_measuring_waits_until_other_programs_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    idle_total = iter([(0.0, 0.0), (0.5, 2.0), (0.5, 2.0), (2.4, 4.0), (2.4, 4.0), (4.3, 6.0), (9.0, 9.0)])
    monkeypatch.setattr(harness.hardware, "processor_times", lambda: next(idle_total))
    monkeypatch.setattr(harness, "QUIET_SAMPLE_S", 0.0)
    assert harness.wait_until_quiet() == pytest.approx(0.05), "75% busy, then 5% busy"
    assert next(idle_total) == (2.4, 4.0)


def test_waiting_for_quiet_gives_up_and_says_how_busy_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr(harness.hardware, "processor_times", lambda: (0.0, float(next(ticks))))
    monkeypatch.setattr(harness, "QUIET_SAMPLE_S", 0.0)
    assert harness.wait_until_quiet(limit_s=0.01) == 1.0
    monkeypatch.setattr(harness.hardware, "processor_times", lambda: None)
    assert harness.wait_until_quiet() == 0.0, "a system that does not tell is taken to be quiet"


# -- workloads --------------------------------------------------------------------------------------------------------


class Letters:
    """One token per character."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]


def test_prompts_have_their_length_and_differ() -> None:
    for encoder in (Letters(), None):
        found = batch(8, 100, 16).prompts(encoder, 500)
        assert [len(p) for p in found] == [100] * 8
        assert len({tuple(p) for p in found}) == 8
        assert found == batch(8, 100, 16).prompts(encoder, 500), "the same every time"


def test_a_prompt_longer_than_the_text_goes_round() -> None:
    whole = text_tokens(Letters(), 1 << 16)
    (prompt,) = single_stream(len(whole) + 10, 8).prompts(Letters(), 1 << 16)
    assert prompt == whole + whole[:10]


def test_ids_for_a_model_without_tokenizer_stay_in_its_vocabulary() -> None:
    assert all(0 <= i < 50 for p in batch(3, 3000, 8).prompts(None, 50) for i in p)


def test_article_workloads_are_as_published_and_scale_down() -> None:
    a, b, c = (article(letter) for letter in "ABC")
    prompts = a.prompts(Letters(), 1 << 16)
    assert [len(p) for p in prompts] == [600] * 4
    assert len({tuple(p) for p in prompts}) == 4
    assert (b.prompt_tokens, b.output_tokens, b.concurrency) == (2048, (512,), 1)
    assert (c.prompt_tokens, set(c.output_tokens), c.concurrency) == (512, {512}, 8)
    small = article("C", 0.125)
    assert (small.prompt_tokens, small.output_tokens, small.concurrency) == (64, (64,) * 8, 8)
    assert len(article("A", 0.5).prompts(Letters(), 1 << 16)[0]) == 300
    with pytest.raises(ValueError, match="must be one of A, B, C"):
        article("D")


def test_uneven_requests_outnumber_the_seats_and_differ_in_length() -> None:
    mix = uneven(4, 16, 64)
    assert len(mix.output_tokens) == 12
    assert set(mix.output_tokens) == {64, 16}


def test_the_text_is_in_two_languages() -> None:
    text = TEXT_FILE.read_text(encoding="utf-8")
    assert len(re.findall(r"[\u4e00-\u9fff]", text)) > 300
    assert len(re.findall(r"[a-z]{3,}", text)) > 300


# -- one run ----------------------------------------------------------------------------------------------------------


def step_event(t_s: float, tokens: dict[str, int], prefill: int = 0, bytes_moved: int = 1000) -> StepEvent:
    made = tuple(TokenEvent(r, i, "", i) for r, i in tokens.items())
    decode = len(tokens) if not prefill else len(tokens) - 1
    return StepEvent(0, t_s, 1, 0, 1, 0, 0, prefill, decode, len(tokens), 0, 0, 1, 9, bytes_moved, made)


def output(request_id: str, tokens: int, ttft_ms: float, tpot_ms: float) -> RequestOutput:
    return RequestOutput(
        request_id, "", (1,) * 10, "", tuple(range(tokens)), "length", ttft_ms=ttft_ms, tpot_ms=tpot_ms
    )


def test_decode_rate_counts_only_steps_in_which_everybody_decodes() -> None:
    steps = [
        step_event(1.0, {"a": 0}, prefill=10),
        step_event(1.5, {"a": 1, "b": 0}, prefill=10),  # marks the start of the full steps
        step_event(1.6, {"a": 2, "b": 1}),
        step_event(1.7, {"a": 3, "b": 2}),
        step_event(1.8, {"a": 4, "b": 3}),
        step_event(9.8, {"b": 4}),  # a has left: slow for other reasons
    ]
    found = summarize(steps, [output("a", 5, 1000.0, 200.0), output("b", 5, 1500.0, 2000.0)], 0.0, concurrency=2)
    assert found.decode_tok_s == pytest.approx(6 / 0.3)
    assert found.read_bytes_s == pytest.approx(3000 / 0.3)
    assert found.step_bytes == 1000
    assert found.total_tok_s == pytest.approx(10 / 9.8)
    assert found.prefill_tok_s == pytest.approx(10.0)
    assert (found.ttft_ms, found.tpot_ms) == (1250.0, 1100.0)


def test_one_token_has_no_decode_rate() -> None:
    found = summarize([step_event(1.0, {"a": 0}, prefill=10)], [output("a", 1, 10.0, 0.0)], 0.0, 1)
    assert (found.decode_tok_s, found.itl_p99_ms) == (None, None)


def test_a_failed_request_fails_the_run() -> None:
    broken = RequestOutput("r", "", (1,), "", (), "error", error="NaN logits")
    engine = SimpleNamespace(
        tokenizer=None,
        model_config=SimpleNamespace(vocab_size=50),
        events=EventLog(),
        generate=lambda p, s: [broken],
        reset_prefix_cache=lambda: None,
    )
    with pytest.raises(RunFailed, match="NaN logits"):
        run(engine, single_stream(8, 8))


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other programs do is no concern of a stub's climb."""
    monkeypatch.setattr(climbing, "wait_until_quiet", lambda limit_s: 0.0)
    monkeypatch.setattr(measure, "time", CLOCK)


# -- the climb --------------------------------------------------------------------------------------------------------


class Clock:
    """The clock of `measure`, which lets a stub start exactly when a run does."""

    latest_s = 0.0

    def perf_counter(self) -> float:
        self.latest_s = time.perf_counter()
        return self.latest_s


CLOCK = Clock()


class Stub:
    """An engine whose speed is a function of its toggles, on a clock of its own."""

    def __init__(self, speed: Callable[[Optimizations], float], refused: str = "", idle: str = "") -> None:
        self.speed, self.refused, self.idle = speed, refused, idle
        self.optimizations = Optimizations.none()
        self.config, self.device = SimpleNamespace(model="stub"), SimpleNamespace(type="cpu", __str__=lambda s: "cpu")
        self.tokenizer, self.model_config, self.events = None, SimpleNamespace(vocab_size=99), EventLog()
        self.clock, self.seats = time.perf_counter(), []
        self._loop = SimpleNamespace(captures=0)

    def apply(self, **changes: Any) -> ApplyReport:
        (name,) = changes if len(changes) == 1 else [""]
        if name and f"{name}={changes[name]}" == self.refused:
            return ApplyReport({name: FieldResult("refused", None, "not on this machine")})
        self.optimizations = self.optimizations.replace(changes)
        reasons = {self.idle: "No effect here: nothing to capture with"}
        return ApplyReport({n: FieldResult("applied", v, reasons.get(n, "")) for n, v in changes.items()})

    def reset_prefix_cache(self) -> None:
        """Nothing is kept between two runs."""

    def stats(self) -> Any:
        return SimpleNamespace(weight_bytes=2e9, kv_bytes=1e9)

    def generate(self, prompts: list[list[int]], params: list[Any]) -> list[RequestOutput]:
        self.seats.append((len(prompts), self.optimizations.max_num_seqs))
        self.clock = start = CLOCK.latest_s
        for i in range(max(p.max_tokens for p in params)):
            self.clock += 1 / self.speed(self.optimizations)
            alive = {f"r{n}": i for n, p in enumerate(params) if i < p.max_tokens}
            self.events.append(step_event(self.clock, alive, prefill=0 if i else 8, bytes_moved=1000))
        return [output(f"r{n}", p.max_tokens, (self.clock - start) * 1e3, 5.0) for n, p in enumerate(params)]


SWITCHES = {
    "cuda_graph": 2.0, "fused_kernels": 1.1, "pd_split": 0.5, "continuous_batching": 1.5, "prefix_cache": 0.6,
}  # fmt: skip


def speed(o: Optimizations) -> float:
    """Every toggle gains or loses clearly: what changes nothing would be kept or not by the rounding of a clock."""
    values = o.as_dict()
    factor = {"bf16": 1.0, "int8": 2.0, "int4": 1.5, "fp8": 1.0}[values["weight_format"]]
    for name, gain in SWITCHES.items():
        factor *= gain if values[name] else 1.0
    factor *= 1.05 if values["kv_cache_dtype"] == "fp8" else 1.0
    factor *= 0.7 if values["scheduling_policy"] == "priority" else 1.0
    return 100.0 * factor


@pytest.fixture
def generous(monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory no stub can exceed."""
    monkeypatch.setattr(climb_records, "ceiling", lambda *a, **k: Bandwidth(1e6, 1, "memory", "test"))


def climb(engine: Any, **options: Any) -> list[dict[str, Any]]:
    course = options.pop("course", Course(single_stream(8, 12), uneven(2, 4, 8)))
    return [r.as_dict() for r in Climb(engine, course, **options).records()]


def by_stage(records: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(r["conditions"]["series"], r["conditions"]["stage"]): r for r in records}


def test_every_switch_is_a_stage_and_crowds_come_last() -> None:
    names = {t.name for t in toggles() if t.kind in ("bool", "choice")} - set(climb_plan.NOT_A_STAGE)
    for device in ("cpu", "cuda"):
        stages = plan(device)
        assert {s.toggle for s in stages} == names
        assert [s.several for s in stages] == sorted(s.several for s in stages)
    assert Stage("weight_format", "fp8") not in plan("cpu")
    assert Stage("weight_format", "fp8") in plan("cuda")


def test_a_new_toggle_becomes_a_stage_by_existing(monkeypatch: pytest.MonkeyPatch) -> None:
    new = SimpleNamespace(name="overlap", kind="choice", choices=("none", "some", "all"))
    monkeypatch.setattr(climb_plan, "toggles", lambda: (*toggles(), new))
    assert [s.name for s in plan("cpu") if s.toggle == "overlap"] == ["overlap=some", "overlap=all"]


def test_each_stage_is_measured_against_the_one_before_it(generous: None) -> None:
    found = by_stage(climb(Stub(speed)))
    one = "single stream"
    figures = {stage: r["metrics"] for (series, stage), r in found.items() if series == one}
    assert figures["baseline"]["output_tok_s"] == pytest.approx(100)
    assert figures["cuda_graph=on"]["speedup_vs_before"] == pytest.approx(2.0)
    assert figures["fused_kernels=on"]["speedup_vs_before"] == pytest.approx(1.1)
    assert figures["weight_format=int8"]["speedup_vs_baseline"] == pytest.approx(4.4)
    assert figures["everything"]["speedup_vs_before"] == pytest.approx(4.4 * 1.05)
    assert found["several streams", "continuous_batching=on"]["metrics"]["speedup_vs_before"] == pytest.approx(
        1.5, rel=0.05
    )
    assert figures["cuda_graph=on"]["mbu"] == pytest.approx(0.2), "200 steps/s of 1000 bytes of 1 MB/s"


def test_a_stage_that_loses_is_shown_and_taken_back(generous: None) -> None:
    engine = Stub(speed)
    found = by_stage(climb(engine))
    lost = found["single stream", "weight_format=int4"]
    assert lost["metrics"]["speedup_vs_before"] == pytest.approx(0.75)
    assert (lost["conditions"]["kept"], lost["conditions"]["toggles"]["weight_format"]) == (False, "int4")
    assert "taken back" in lost["note"]
    assert found["single stream", "kv_cache_dtype=fp8"]["conditions"]["toggles"]["weight_format"] == "int8"
    values = engine.optimizations.as_dict()
    assert values == Optimizations.none().as_dict() | {
        "cuda_graph": True, "fused_kernels": True, "weight_format": "int8", "kv_cache_dtype": "fp8",
        "continuous_batching": True, "speculative": "ngram",
    }  # fmt: skip


def test_runs_of_the_same_setting_add_up_in_the_spread(generous: None) -> None:
    found = by_stage(climb(Stub(speed), rounds=2))
    runs = {stage: r["spread"]["runs"] for (series, stage), r in found.items() if series == "single stream"}
    assert (runs["baseline"], runs["cuda_graph=on"], runs["weight_format=int4"]) == (3, 2 + 3, 2)


class Capturing(Stub):
    """A card that captures while it meets a setting for the first `meetings` times, which makes it slow."""

    def __init__(self, meetings: int) -> None:
        super().__init__(lambda o: speed(o) / (10 if self.captures_now else 1))
        self.device, self.meetings = SimpleNamespace(type="cuda", __str__=lambda s: "cpu"), meetings
        self.met: list[Optimizations] = []
        self.captures_now = False

    def generate(self, prompts: list[list[int]], params: list[Any]) -> list[RequestOutput]:
        self.met.append(self.optimizations)
        self.captures_now = self.met.count(self.optimizations) <= self.meetings
        self._loop.captures += self.captures_now
        return super().generate(prompts, params)


def climb_card(engine: Stub) -> dict[str, dict[str, Any]]:
    one = Climb(engine, Course(single_stream(8, 12), None), stages=[Stage("fused_kernels", True)])
    one.device = "cpu"  # of the records
    return {r.conditions["stage"]: r.as_dict() for r in one.records()}


def test_what_a_card_captures_is_never_in_a_figure(generous: None) -> None:
    engine = Capturing(meetings=2)
    found = climb_card(engine)
    fused = found["fused_kernels=on"]
    assert (fused["conditions"]["kept"], fused["note"]) == (True, "")
    assert fused["metrics"]["speedup_vs_before"] == pytest.approx(1.1)
    assert found["baseline"]["spread"]["min"] == pytest.approx(100), "no run of the second meeting is among them"
    plain = Capturing(meetings=0)
    climb_card(plain)
    assert len(engine.met) == len(plain.met) + 2, "one more run for each setting, none for going back to it"


def test_a_card_that_goes_on_capturing_is_said_so_and_the_climb_ends(generous: None) -> None:
    found = climb_card(Capturing(meetings=10**6))
    assert found["fused_kernels=on"]["note"].startswith("something was captured in 1 of the runs")
    assert found["baseline"]["note"].startswith("everything off; something was captured in 2 of the runs")


@pytest.mark.parametrize(("looping", "kept"), [(64, False), (34, False), (0, True)])
def test_guesses_of_texts_that_go_round_in_circles_are_shown_and_taken_back(
    generous: None, looping: int, kept: bool
) -> None:
    engine = Stub(lambda o: speed(o) * (3 if o.speculative == "ngram" else 1))
    generate, text = engine.generate, (*range(64 - looping), *(7,) * looping)
    engine.generate = lambda *a: [replace(o, token_ids=text) for o in generate(*a)]
    stages = [Stage("cuda_graph", True), Stage("speculative", "ngram"), Stage("fused_kernels", True)]
    records = climb(engine, course=Course(single_stream(8, 64), None), stages=stages)
    found = {r["conditions"]["stage"]: r for r in records}
    guesses, line = found["speculative=ngram"], climb_records.line(Record(**found["speculative=ngram"]))
    assert guesses["metrics"]["speedup_vs_before"] == pytest.approx(3), "shown in any case"
    assert guesses["metrics"]["looping_tokens"] == pytest.approx(looping / 64)
    assert guesses["conditions"]["kept"] == kept
    flag = f"texts go round in circles ({looping / 64:.0%} of the tokens): no record, taken back"
    assert (guesses["note"], flag in line) == ("" if kept else flag, not kept)
    assert found["cuda_graph=on"]["conditions"]["kept"], "other stages' speed does not depend on the texts"
    assert "looping_tokens" not in found["cuda_graph=on"]["metrics"]
    assert found["everything"]["metrics"]["speedup_vs_before"] == pytest.approx(2.2 * (3 if kept else 1))
    page = html_page(records)
    assert (page.count(flag) >= 2) == (not kept), "on the column and in the table"
    assert ("speculative=ngram (taken back)" in page) == (not kept)


def test_one_text_of_several_that_loops_is_enough() -> None:
    outputs = [replace(output(f"r{n}", 64, 10, 5), token_ids=t) for n, t in enumerate(((7,) * 64, tuple(range(64))))]
    seen = summarize([step_event(1.0, {"r0": 0, "r1": 0})], outputs, 0.0, 2)
    assert (seen.looping, seen.most_looping) == (0.5, 1.0)
    stage = climb_records.Measured("s", "several streams", {"speculative": "ngram"}, runs=[seen])
    assert stage.guesses_loops
    stage.optimizations = {"speculative": "none"}
    assert not stage.guesses_loops


def test_a_round_is_three_runs_and_two_after_a_stage_that_was_taken_back(generous: None) -> None:
    engine, said, measured = Stub(speed), [], []
    generate = engine.generate

    def seen(prompts: list[list[int]], params: list[Any]) -> list[RequestOutput]:
        if params[0].max_tokens == 12:  # no warm-up
            measured.append(engine.optimizations.as_dict())
        return generate(prompts, params)

    engine.generate = seen
    stages = [Stage("cuda_graph", True), Stage("prefix_cache", True), Stage("fused_kernels", True)]
    course = Course(single_stream(8, 12), None)
    found = by_stage(climb(engine, course=course, stages=stages, rounds=1, say=said.append))
    assert len(measured) == 3 + 3 + 2 + 3
    assert [m["fused_kernels"] for m in measured[-3:]] == [True, False, True], "the end is in force already"
    assert said == ["3 stages and a check of everything: at most 12 runs, 3 for each, and those that warm up"]
    one = "single stream"
    assert not found[one, "prefix_cache=on"]["conditions"]["kept"]
    assert found[one, "cuda_graph=on"]["spread"]["runs"] == 1 + 2 + 1, "the run that both stages use counts once"
    assert found[one, "fused_kernels=on"]["metrics"]["speedup_vs_before"] == pytest.approx(1.1)


def test_what_a_machine_cannot_do_is_a_record_without_figures(generous: None) -> None:
    found = by_stage(climb(Stub(speed, refused="weight_format=int8")))
    refused = found["single stream", "weight_format=int8"]
    assert (refused["metrics"], refused["spread"], refused["note"]) == ({}, None, "not on this machine")
    assert found["single stream", "weight_format=int4"]["metrics"]["speedup_vs_before"] == pytest.approx(1.5)


def test_what_has_no_effect_in_either_direction_is_said_and_the_climb_goes_on(generous: None) -> None:
    records = climb(Stub(speed, idle="cuda_graph"))
    assert [r["conditions"]["stage"] for r in records[:3]] == ["baseline", "cuda_graph=on", "fused_kernels=on"]
    assert "<b>100</b> to <b>231 tok/s</b>" in html_page(records), "1.1, int8's 2 and fp8 keys' 1.05"
    found = by_stage(records)
    idle = found["single stream", "cuda_graph=on"]
    assert (idle["metrics"], idle["note"]) == ({}, "No effect here: nothing to capture with")
    assert found["single stream", "fused_kernels=on"]["metrics"]["speedup_vs_before"] == pytest.approx(1.1)
    assert not found["single stream", "fused_kernels=on"]["conditions"]["toggles"]["cuda_graph"]


def test_crowds_are_measured_with_their_own_seats_which_are_given_back(generous: None) -> None:
    engine = Stub(speed)
    before = engine.optimizations.max_num_seqs
    climb(engine)
    assert {seats for requests, seats in engine.seats if requests > 1} == {2}
    assert {seats for requests, seats in engine.seats if requests == 1} >= {before}
    assert engine.optimizations.max_num_seqs == before


def test_a_climb_above_the_roofline_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    top = Bandwidth(1.5e5, 1, "memory", "t")  # 1000 bytes a step: the baseline's 100 steps/s fit, 200 do not
    monkeypatch.setattr(climb_records, "ceiling", lambda *a, **k: (asked.append(k), top)[1])
    with pytest.raises(RooflineExceeded, match="cuda_graph=on"):
        climb(Stub(speed))
    assert {"fresh": True} in asked, "the bandwidth was measured anew before refusing"


def test_progress_only_goes_forward(generous: None) -> None:
    told: list[float] = []
    climb(Stub(speed), progress=lambda task, fraction: told.append(fraction))
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_a_climb_that_is_cut_leaves_its_stages_marked_as_unfinished(generous: None, tmp_path: Any) -> None:
    told: list[str] = []
    kept = Unfinished(tmp_path / "climb.json", told.append)

    def cut(records: list[Record]) -> None:
        kept(records)
        if len(records) == 3:
            raise KeyboardInterrupt

    course = Course(single_stream(8, 12), uneven(2, 4, 8))
    with pytest.raises(KeyboardInterrupt):
        Climb(Stub(speed), course, stage_done=cut).records()
    left = json.loads((tmp_path / "climb.unfinished.json").read_text())
    assert [r["conditions"]["stage"] for r in left] == ["baseline", "cuda_graph=on", "fused_kernels=on"]
    assert all(r["conditions"]["unfinished"] for r in left)
    assert [p.name for p in tmp_path.iterdir()] == ["climb.unfinished.json"]
    assert len(told) == 3
    assert "cuda_graph=on" in told[1] and "200.0 tok/s  2.00 x  20% of roofline" in told[1]


def test_the_climbs_own_command_writes_one_whole_file(
    folder: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(climb_records, "ceiling", lambda *a, **k: Bandwidth(1e15, 1, "memory", "test"))
    monkeypatch.setattr(climbing, "plan", lambda device: [Stage("weight_format", "int8"), Stage("cuda_graph", True)])
    monkeypatch.setattr(climbing, "wait_until_quiet", lambda limit_s: 0.0)
    results = tmp_path / "c.json"
    words = ["--model", str(folder), "--device", "cpu", "--workload", "B", "--scale", "0.03125", "--rounds", "1"]
    assert climbing.main([*words, "--cold", "1", "--results", str(results), "--html", str(tmp_path / "c.html")]) == 0
    stages = [r["conditions"]["stage"] for r in json.loads(results.read_text())]
    assert stages == ["baseline", "weight_format=int8", "cuda_graph=on", "everything", "cold starts"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.html", "c.json"]
    printed = capsys.readouterr().out
    assert [sum(f": {stage} " in line for line in printed.splitlines()) for stage in stages] == [1] * 5
    assert "unfinished" not in results.read_text()
    assert climbing.main(["--workload", "B", "--scale", "7"]) == 2


def test_a_climb_refuses_a_toggle_that_it_sets_itself() -> None:
    with pytest.raises(ConfigError, match="leave it out"):
        climbing.climb("any", fused_kernels=True)
    with pytest.raises(ConfigError, match="at least 8"):
        climbing.climb("any", tokens=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Any:
    """A tiny Llama on disk."""
    return write_checkpoint(tmp_path_factory.mktemp("bench"), "llama")[0]


def test_the_real_engine_climbs(folder: Any, generous: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(climb_records, "ceiling", lambda *a, **k: Bandwidth(1e15, 1, "memory", "test"))
    stages = [Stage("fused_kernels", True), Stage("weight_format", "int8"), Stage("continuous_batching", True)]
    off = Optimizations.none()
    with LLMEngine(folder, device="cpu", optimizations=off, num_kv_blocks=64) as engine:
        found = by_stage(climb(engine, stages=stages))
        assert engine.stats().num_running == 0
    assert [stage for _, stage in found] == [
        "baseline", "fused_kernels=on", "weight_format=int8", "everything", "baseline", "continuous_batching=on",
    ]  # fmt: skip
    int8 = found["single stream", "weight_format=int8"]
    baseline = found["single stream", "baseline"]
    assert int8["metrics"]["step_gb"] < baseline["metrics"]["step_gb"]
    assert int8["conditions"]["toggles"]["weight_format"] == "int8"
    assert all(r["metrics"]["output_tok_s"] > 0 and r["spread"]["runs"] >= 1 for r in found.values())
    json.dumps(list(found.values()))


# -- the articles' workloads ------------------------------------------------------------------------------------------


def crowd_speed(o: Optimizations) -> float:
    """fp8 doubles, int8 is a bit slower than fp8, int4 is the fastest."""
    factor = {"bf16": 1.0, "fp8": 2.0, "int8": 1.8, "int4": 3.5}[o.as_dict()["weight_format"]]
    return 100.0 * factor * (1.2 if o.continuous_batching else 1.0)


def article_climb(engine: Any, letter: str, **options: Any) -> list[dict[str, Any]]:
    return climb(engine, course=article_course("stub", letter, 0.03125), **options)


@pytest.mark.parametrize(("letter", "streams"), [("A", 4), ("C", 8)])
def test_every_stage_of_a_crowds_workload_is_measured_with_all_its_streams(letter: str, streams: int) -> None:
    engine = Stub(crowd_speed)
    records = article_climb(engine, letter)
    assert {r["conditions"]["series"] for r in records} == {"several streams"}
    assert {r["conditions"]["stage"] for r in records} == {
        "baseline", "everything", *(s.name for s in plan("cpu")),
    }  # fmt: skip
    assert set(engine.seats) == {(streams, streams)}, "warming up included"
    assert engine.optimizations.max_num_seqs == Optimizations.none().max_num_seqs
    for r in records:
        assert (r["conditions"]["workload"], r["conditions"]["scale"]) == (letter, 0.03125)
        assert r["conditions"]["batch"] == streams
        assert r["name"] == f"climb/{letter}/{r['conditions']['stage']}"
        assert r["script"] == f"strata climb --model stub --workload {letter} --scale 0.03125"
    baseline = records[0]["metrics"]
    steps_s, tokens = 100.0, max(article(letter, 0.03125).output_tokens)
    assert baseline["output_tok_s"] == pytest.approx(streams * steps_s, rel=0.02), f"{tokens} steps, all tokens counted"
    assert "mbu" not in baseline


def test_a_single_streams_workload_leaves_out_what_needs_several(generous: None) -> None:
    engine = Stub(speed)
    records = article_climb(engine, "B")
    assert {r["conditions"]["series"] for r in records} == {"single stream"}
    assert not {r["conditions"]["stage"] for r in records} & {s.name for s in plan("cpu") if s.several}
    assert {requests for requests, _ in engine.seats} == {1}
    assert all(0 < r["metrics"]["mbu"] < 1 for r in records if r["metrics"])


def test_weight_formats_are_told_against_bf16_with_all_else_equal() -> None:
    engine = Stub(crowd_speed)
    stages = [Stage("fused_kernels", True), *(Stage("weight_format", f) for f in ("fp8", "int8", "int4"))]
    metrics = {r["conditions"]["stage"]: r["metrics"] for r in article_climb(engine, "C", stages=stages)}
    ratios = {stage: m["ratio_to_bf16"] for stage, m in metrics.items() if "ratio_to_bf16" in m}
    assert ratios == {
        "weight_format=fp8": pytest.approx(2.0, rel=0.02),
        "weight_format=int8": pytest.approx(1.8, rel=0.02),
        "weight_format=int4": pytest.approx(3.5, rel=0.02),
    }
    assert metrics["weight_format=int4"]["speedup_vs_before"] == pytest.approx(3.5 / 2.0, rel=0.02), "int8 lost"


def test_no_run_of_an_articles_workload_is_longer_than_the_event_buffer() -> None:
    for letter in "ABC":
        workload = article(letter)
        steps = sum(workload.output_tokens) + len(workload.output_tokens) * -(-longest(workload) // 64)
        assert steps < EVENT_CAPACITY, "even if every token and every slice of a prompt had a step of its own"


def test_the_pool_holds_all_streams_of_every_workload() -> None:
    assert pool_blocks(article_course("m", "C", 1.0), 16) == 8 * (1024 + 64) // 16
    assert pool_blocks(article_course("m", "B", 1.0), 8) == (2048 + 512 + 64) // 8
    assert pool_blocks(article_course("m", "A", 1.0), None) == 4 * -(-(1800 + 256 + 64) // 16)


def test_a_graphics_card_is_warmed_up_with_all_of_the_workload_and_again_when_weights_are_made_anew() -> None:
    engine = Stub(crowd_speed)
    engine.device = SimpleNamespace(type="cuda", __str__=lambda s: "cpu")
    tokens: list[int] = []
    generate = engine.generate
    engine.generate = lambda prompts, params: (tokens.append(params[0].max_tokens), generate(prompts, params))[1]
    stages = [Stage("fused_kernels", True), Stage("continuous_batching", True)]
    found = Climb(engine, article_course("stub", "C", 0.03125), stages=stages)
    found.device = "cpu"
    found._switch({}, "several streams")
    found._switch({"fused_kernels": True}, "several streams")
    found._switch({"fused_kernels": False}, "several streams")
    assert tokens == [16, 16, 4], "both captured once"
    found._switch({}, "several streams")
    assert len(tokens) == 3, "nothing changed and all is warm"
    rebuilt = ApplyReport({"weight_format": FieldResult("rebuilt", "int8")})
    engine.apply = lambda **changes: rebuilt
    found._switch({"weight_format": "int8"}, "several streams")
    assert tokens == [16, 16, 4, 4], "without captures nothing is lost with the weights"
    engine.optimizations = engine.optimizations.replace({"cuda_graph": True})
    uncaptured = engine.generate
    engine.generate = lambda *a: (setattr(engine._loop, "captures", engine._loop.captures + 1), uncaptured(*a))[1]
    for _ in range(2):
        found._switch({"weight_format": "int8"}, "several streams")
    assert tokens == [16, 16, 4, 4, 16, 16]


def test_a_processor_gets_the_largest_scale_that_it_finishes_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(climb_plan, "run", lambda engine, workload: clock.__setitem__(0, clock[0] + 0.5))
    monkeypatch.setattr(climb_plan.time, "perf_counter", lambda: clock[0])
    optimizations, stats = SimpleNamespace(max_model_len=4096), SimpleNamespace(kv_blocks_total=4096)
    engine = SimpleNamespace(
        device=SimpleNamespace(type="cpu"), tokenizer=None, model_config=SimpleNamespace(vocab_size=99),
        optimizations=optimizations, config=SimpleNamespace(block_size=16), stats=lambda: stats,
    )  # fmt: skip
    # Half a second at 1/32 is 16 s at full length; 160 s of runs are affordable.
    assert fitting_scale(engine, "C", 10) == 1.0
    assert fitting_scale(engine, "C", 40) == 0.25
    assert fitting_scale(engine, "C", 10_000) == 0.03125
    optimizations.max_model_len = 300
    assert fitting_scale(engine, "C", 10) == 0.25, "512 tokens a request do not fit"
    stats.kv_blocks_total = 40
    assert fitting_scale(engine, "C", 10) == 0.0625
    stats.kv_blocks_total = 7
    with pytest.raises(ConfigError, match="need 16 KV blocks and the pool has 7; try num_kv_blocks=16"):
        fitting_scale(engine, "C", 10)
    engine.device.type = "cuda"
    assert fitting_scale(engine, "C", 10_000) == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workload": "D"}, "must be one of A, B, C"),
        ({"workload": "A", "scale": 0.0}, "must be from 0.03125 to 1"),
        ({"workload": "A", "scale": 1.5}, "must be from 0.03125 to 1"),
        ({"scale": 0.5}, "add --workload"),
    ],
)
def test_a_wrong_workload_is_named_before_anything_is_loaded(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        climbing.climb("no such model", **options)


def test_a_workload_longer_than_the_model_takes_is_refused(folder: Any) -> None:
    with pytest.raises(ConfigError, match="2560 tokens a request, and max_model_len is 256; try a smaller --scale"):
        climbing.climb(str(folder), device="cpu", workload="B", scale=1.0)


@pytest.mark.parametrize(("letter", "batch_size"), [("A", 4), ("B", 1), ("C", 8)])
def test_the_real_engine_climbs_an_articles_workload(
    folder: Any, monkeypatch: pytest.MonkeyPatch, letter: str, batch_size: int
) -> None:
    monkeypatch.setattr(climb_records, "ceiling", lambda *a, **k: Bandwidth(1e15, 1, "memory", "test"))
    few = [Stage("weight_format", "int8"), Stage("continuous_batching", True)]
    monkeypatch.setattr(climbing, "plan", lambda device: few)
    records = [
        r.as_dict()
        for r in climbing.climb(str(folder), device="cpu", workload=letter, scale=0.03125, rounds=1)
    ]  # fmt: skip
    stages = [r for r in records if r["conditions"]["series"] != "cold starts"]
    assert {r["conditions"]["batch"] for r in records} == {batch_size}
    assert {r["conditions"]["workload"] for r in records} == {letter}
    outputs = article(letter, 0.03125).output_tokens
    assert {r["conditions"]["output_tokens"] for r in records} == {max(outputs)}
    assert stages[1]["metrics"]["ratio_to_bf16"] > 0
    cold = [r for r in records if r not in stages]
    assert len(cold) == (1 if letter == "B" else 0)
    for r in cold:
        m = r["metrics"]
        assert r["spread"]["runs"] == len(m["load_s_each"]) == len(m["first_ttft_ms_each"]) == 3
        assert min(m["load_s_each"]) > 0 and min(m["first_ttft_ms_each"]) > 0 and m["output_tok_s"] > 0
    json.dumps(records)
    page = html_page(records)
    assert f"workload {letter} of the articles shortened to 0.03125" in page
    assert ("3 cold starts" in page) == (letter == "B")
    assert ("x FP16" in page) == (letter == "C")


def test_reports_of_a_crowd_have_one_series_and_the_formats_beside_the_articles_claim() -> None:
    from rich.console import Console

    records = article_climb(Stub(crowd_speed), "C")
    page = html_page(records)
    assert page.count("<svg") == 1 + 2, "the hatching, the total, and the articles' claim"
    assert "8 streams in total" in page and "One stream" not in page
    assert "x FP16, article's claim" in page and ">3.52<" in page
    console = Console(width=260, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(text_table(records))
    text = console.export_text()
    assert text.count("workload C of the articles shortened to 0.03125 of its length") == 1
    assert "x bf16" in text and "everything" in text


# -- reports ----------------------------------------------------------------------------------------------------------


def test_the_page_stands_alone_and_says_its_conditions(generous: None) -> None:
    engine = Stub(speed, refused="kv_cache_dtype=fp8")
    engine.config.model = "<script>evil</script>"
    records = climb(engine)
    page = html_page(records)
    assert not re.search(r"https?:|<script|<link|@import|url\((?!#)|src=", page)
    assert "&lt;script&gt;evil" in page
    assert "prefers-color-scheme: dark" in page
    assert page.count("<svg") == page.count("</svg>") == 4 + 1, "four charts and the hatching they share"
    first = records[0]
    for shown in (first["commit"], first["date"], first["versions"]["torch"], "not on this machine", "taken back"):
        assert str(shown) in page
    assert "their claim" in page
    assert all(f">{value}</text>" in page for value in (58, 80, 95, 130, 150, 240))


def test_a_roofline_far_above_the_columns_is_told_and_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    for bandwidth_bytes_s, drawn in ((1e6, True), (1e8, False)):
        top = Bandwidth(bandwidth_bytes_s, 1, "memory", "test")
        monkeypatch.setattr(climb_records, "ceiling", lambda *a, top=top, **k: top)
        page = html_page(climb(Stub(speed)))
        assert ('class="ghost"' in page) == drawn
        assert ("far above this chart" in page) != drawn


def test_the_text_table_has_a_row_per_record(generous: None) -> None:
    from rich.console import Console

    records = climb(Stub(speed))
    console = Console(width=240, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(text_table(records))
    text = console.export_text()
    for r in records:
        assert r["conditions"]["stage"] in text
    assert "4.40" in text


@pytest.mark.parametrize("top", [0.0, 0.3, 1.0, 7.0, 58.0, 99.9, 100.0, 240.0, 1184.0])
def test_axes_have_few_round_ticks_and_reach_the_top(top: float) -> None:
    ticks = nice_ticks(top)
    assert ticks[0] == 0.0
    assert ticks[-1] >= top
    assert 2 <= len(ticks) <= 6


def test_numbers_keep_three_digits() -> None:
    assert [number(v) for v in (58, 1.234, 12.34, 123.4, 1234.5)] == ["58", "1.23", "12.3", "123", "1234"]
    assert [number(v) for v in (99.97, 99.94, 9.996, 9.99)] == ["100", "99.9", "10.0", "9.99"], "after rounding"


# -- peers ------------------------------------------------------------------------------------------------------------

WORKER = """
import json, sys
print(json.dumps({"version": "9.9"}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    print(json.dumps({"seconds": 0.5 if request["op"] == "prefill" else 2.0}), flush=True)
"""


def peer(name: str, code: str = WORKER) -> compare.Peer:
    prompts = {"decode x1": [[1] * 10], "decode x8": [[1] * 10] * 8}
    return compare.Peer(name, [sys.executable, "-c", code], prompts, output_tokens=11)


def test_a_peer_is_measured_through_its_pipe() -> None:
    worker = peer("other 1")
    assert worker.version == "9.9"
    assert worker.measure() == {"decode x1": 5.0, "decode x8": 40.0, "prefill": 20.0}
    worker.close()


def test_a_peer_that_dies_is_named() -> None:
    with pytest.raises(RuntimeError, match="other 1 ended with exit code 3"):
        peer("other 1", "raise SystemExit(3)")


def test_our_best_is_compared_with_the_peers_best() -> None:
    results = {
        "strata_lab int8": [{"decode x1": 90.0, "prefill": 300.0}, {"decode x1": 100.0, "prefill": 250.0}],
        "strata_lab int4": [{"decode x1": 80.0, "prefill": 310.0}, {"decode x1": 70.0, "prefill": 290.0}],
        "llama.cpp q8_0": [{"decode x1": 50.0, "prefill": 600.0}, {"decode x1": 40.0, "prefill": 500.0}],
        "llama.cpp f16": [{"decode x1": 45.0, "prefill": 620.0}, {"decode x1": 60.0, "prefill": 610.0}],
    }
    versions = {"llama.cpp q8_0": "1", "llama.cpp f16": "1"}
    made = compare.records(results, versions, "m", compare.Sizes(rounds=2), Environment.now("cpu", 1))
    found = {r.name: r for r in made}
    decode, prefill = found["compare/decode x1/llama.cpp"], found["compare/prefill/llama.cpp"]
    assert (decode.metrics["output_tok_s"], decode.peer["name"], decode.metrics["ratio_to_peer"]) == (
        100.0, "llama.cpp f16", pytest.approx(100 / 60),
    )  # fmt: skip
    assert (prefill.conditions["weight_format"], prefill.metrics["ratio_to_peer"]) == ("int4", pytest.approx(0.5))


def test_a_peer_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(compare, "Peer", lambda name, *a: SimpleNamespace(name=name))
    monkeypatch.setattr(compare.importlib.util, "find_spec", lambda name: None)
    started, missing = compare.peers(tmp_path / "m.gguf", {}, compare.Sizes(), None, tmp_path)
    assert [p.name for p in started] == ["transformers fp32"]
    assert "--llama-python" in missing[0]
    started, missing = compare.peers(tmp_path / "m.gguf", {}, compare.Sizes(), "python", tmp_path)
    assert [p.name for p in started][1:] == ["llama.cpp shipped", "llama.cpp q8_0", "llama.cpp f16"]


def test_a_gpu_run_is_recorded_by_outcome_and_file(tmp_path) -> None:
    from strata_lab.bench.gpu_record import record
    from strata_lab.bench.harness import Environment

    report = tmp_path / "gpu.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.gpu.a" name="x"/><testcase classname="tests.gpu.a" name="y">'
        '<failure/></testcase><testcase classname="tests.b" name="z"><skipped/></testcase></testsuite></testsuites>'
    )
    environment = Environment(hardware={"gpu": "some"}, versions={}, date="2026-01-01", commit="abc")
    metrics = record([report], environment).metrics
    assert metrics == {
        "passed": 1, "failed": 1, "skipped": 1, "passed_by_file": {"tests.gpu.a": 1}, "failures": ["tests.gpu.a::y"],
    }  # fmt: skip

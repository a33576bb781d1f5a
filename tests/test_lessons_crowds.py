"""Notebooks 06 to 12: what they measure on tiny models, and what their exercises answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from strata_lab.bench.interference import Disturbance
from strata_lab.bench.measure import Run
from strata_lab.bench.tiny_model import write_tiny_model
from strata_lab.bench.workloads import uneven
from strata_lab.config import DEFAULT_MODEL, Optimizations
from strata_lab.events import StepEvent, TokenEvent
from strata_lab.kernel_lab import SwapReport
from strata_lab.kernels.rms_norm import rms_norm_ref
from strata_lab.lessons import batching, crowd, drafting, kernels, kv_cache, mixture, pd_split, tuning
from strata_lab.lessons.lesson import Lesson
from strata_lab.lessons.measuring import Compared, Trace
from strata_lab.models.loader import open_checkpoint
from strata_lab.models.shipped import draft_for
from strata_lab.telemetry.checks import Check
from strata_lab.telemetry.roofline import StepCost
from tests.exercises import assert_choice_is_judged, assert_number_is_judged, name_of


@pytest.fixture(scope="module")
def lesson(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lesson]:
    folder = write_tiny_model(tmp_path_factory.mktemp("model"))
    made = Lesson(str(folder), "cpu", 0.01, 3, max_num_seqs=4, num_kv_blocks=128, optimizations=Optimizations.none())
    yield made
    made.close()


@pytest.fixture(scope="module")
def experts() -> Iterator[Lesson]:
    made = Lesson("moe-small@0.5", "cpu", 0.01, 3, name="experts", max_model_len=128, num_kv_blocks=16)
    made.engine.watch_experts()
    yield made
    made.close()


# -- a crowd ----------------------------------------------------------------------------------------------------------


def test_a_picture_shows_requests_at_work_and_nobody_is_left_behind(lesson: Lesson) -> None:
    state = crowd.picture_of(lesson.engine, [[5, 6, 7], [8, 9]], (200, 200), when_tokens=6)
    assert {r.request_id for r in state.requests} == {"request 1", "request 2"}
    assert all(r.blocks and r.num_computed_tokens for r in state.requests)
    detail = crowd.pool(lesson.engine, state)
    assert [o["title"] for o in detail.map.owners] == [r.request_id for r in state.requests]
    assert {r["id"] for r in detail.lanes.requests} == {"request 1", "request 2"}
    assert lesson.engine.snapshot().requests == ()


def test_a_picture_of_nobody_is_refused(lesson: Lesson) -> None:
    with pytest.raises(ValueError, match="when_tokens=4 must be below the 4 tokens"):
        crowd.picture_of(lesson.engine, [[5], [6]], (2, 2), when_tokens=4)


# -- 06 ---------------------------------------------------------------------------------------------------------------


def test_the_newcomer_is_told_from_the_streams_and_times_count_from_its_sending(lesson: Lesson) -> None:
    lesson.engine.apply(max_num_seqs=8, continuous_batching=True)
    seen = pd_split.interrupt(lesson.engine, 100, streams=3)
    assert list(seen.arrivals) == ["stream 1", "stream 2", "stream 3", "newcomer"]
    assert seen.arrivals["newcomer"][0] == pytest.approx(seen.figures.ttft_ms)
    assert all(seen.arrivals[f"stream {i}"][0] < 0 < seen.arrivals[f"stream {i}"][-1] for i in (1, 2, 3))
    chart = pd_split.raster({"one": seen, "other": seen}, "t")
    assert len(chart.data) == 8 and len({trace.y[0] for trace in chart.data}) == 8
    assert [shape.x1 for shape in chart.layout.shapes] == [seen.figures.ttft_ms] * 2


def test_a_smaller_budget_is_in_force_while_it_is_measured(lesson: Lesson) -> None:
    found = pd_split.budgets(lesson.engine, 60, (64, 16))
    largest = {size: max(s.num_prefill_tokens for s in one.steps) for size, one in found.items()}
    assert largest[64] == 60 and largest[16] <= 16
    assert [list(t.x) for t in pd_split.trade(found).data] == [[64, 16]] * 2


# -- 07 ---------------------------------------------------------------------------------------------------------------


def test_the_engine_takes_the_steps_that_bus_and_taxi_foretell(lesson: Lesson) -> None:
    work = uneven(concurrency=4, prompt_tokens=6, longest=16)
    sides = {"bus": {"continuous_batching": False}, "taxi": {"continuous_batching": True}}
    lesson.engine.apply(max_num_seqs=4, max_num_batched_tokens=512)
    found = batching.compare(lesson.engine, work, rounds=1, **sides).extra
    assert len(found["bus"].token_steps) == batching.bus_steps(work.output_tokens, 4)
    assert len(found["taxi"].token_steps) == batching.taxi_steps(work.output_tokens, 4)
    assert found["bus"].num_tokens == found["taxi"].num_tokens == sum(work.output_tokens)
    assert found["bus"].used < found["taxi"].used <= 1 and found["bus"].first_steps == [1] * 4 + [17] * 4 + [33] * 4
    squares = batching.seat_map(found).data
    for one, chart in zip(found.values(), squares, strict=True):
        got = sum(z in (batching.FIRST, batching.NEXT) for row in chart.z for z in row)
        assert got == one.num_tokens and len(chart.z) == len(work.output_tokens)


@pytest.mark.parametrize("seats", [1, 2, 3, 9])
def test_a_taxi_rank_never_takes_more_steps_than_a_bus(seats: int) -> None:
    for lengths in itertools.permutations((9, 4, 4, 1, 7)):
        bus, taxi = batching.bus_steps(lengths, seats), batching.taxi_steps(lengths, seats)
        assert max(*lengths, math.ceil(sum(lengths) / seats)) <= taxi <= bus


# -- 08 ---------------------------------------------------------------------------------------------------------------


def test_a_text_holds_its_bytes_rounded_up_to_blocks(lesson: Lesson) -> None:
    held = kv_cache.growth(lesson.engine, [5] * 10, 30)
    stats, size = lesson.engine.stats(), lesson.engine.config.block_size
    for tokens, mb in held.items():
        blocks = mb * 1e6 / (size * stats.kv_bytes_per_token)
        assert blocks == pytest.approx(round(blocks)) and math.ceil((tokens - 1) / size) <= round(blocks)
        assert round(blocks) <= math.ceil((tokens + 1) / size)


def test_what_is_filled_is_held_and_what_is_held_is_less_than_what_would_be_reserved(lesson: Lesson) -> None:
    state = crowd.picture_of(lesson.engine, [[5] * 20, [6] * 33], (200, 200), when_tokens=60)
    room = kv_cache.room(lesson.engine, state)
    assert 0 < room.filled <= room.held <= room.filled + 2 * (state.block_size + 1) < room.reserved
    assert list(kv_cache.rooms(room).data[0].x) == [room.reserved, room.held, room.filled]


def test_a_second_question_finds_the_document(lesson: Lesson) -> None:
    found = kv_cache.asked_twice(lesson.engine, kv_cache.some_text(lesson.engine, 64), rounds=1)
    assert set(found.rounds) == {"without", "with_prefix_cache"}
    assert lesson.engine.stats().prefix_hit_tokens >= 64 and min(map(min, found.rounds.values())) > 0


def test_ways_to_keep_a_cache_are_judged_by_one_text_and_put_back(lesson: Lesson) -> None:
    before, text = lesson.engine.optimizations, kv_cache.some_text(lesson.engine, 48)
    settings = {"all": {"kv_window": 0}, "window": {"kv_window": 16, "kv_sinks": 2}}
    found = kv_cache.ways(lesson.engine, text, settings, prompt=text[:8], tokens=70)
    assert lesson.engine.optimizations == before
    assert max(found["window"].held.values()) < max(found["all"].held.values())
    assert found["all"].perplexity == pytest.approx(kv_cache.perplexity(lesson.engine, text), rel=1e-5)
    assert found["window"].perplexity != found["all"].perplexity


# -- 09 ---------------------------------------------------------------------------------------------------------------


def test_expected_tokens_are_those_of_all_outcomes() -> None:
    chance, total = 0.7, 0.0
    for outcome in itertools.product((True, False), repeat=3):
        right = next((i for i, came_true in enumerate(outcome) if not came_true), 3)
        total += (1 + right) * math.prod(chance if came_true else 1 - chance for came_true in outcome)
    assert drafting.expected_tokens(chance, 3) == pytest.approx(total)


def test_guesses_of_a_text_are_counted_marked_and_change_nothing(lesson: Lesson) -> None:
    sides = {"plain": {"speculative": "none"}, "ngram": {"speculative": "ngram"}}
    found = drafting.compare(lesson, "copy", 120, rounds=1, **sides)
    plain, guessed = found.extra["plain"], found.extra["ngram"]
    lesson.engine.apply(speculative="none")
    assert plain.output.token_ids == guessed.output.token_ids and plain.proposed == 0
    drafts = [d for s in guessed.steps for d in s.drafts]
    assert guessed.accepted == sum(d.num_accepted for d in drafts) <= guessed.proposed
    assert drafting.marked(guessed).data.count("<span") == guessed.accepted
    assert sum(map(len, drafting.sizes(guessed.steps).values())) == len(guessed.steps)


def test_look_up_is_tried_until_it_guesses_and_stays_on(lesson: Lesson, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes, tried = [0, 0, 3, 3], []

    def write(lesson: Lesson, task: str, tokens: int) -> Any:
        tried.append(lesson.engine.optimizations.num_draft_tokens)
        return SimpleNamespace(accepted=outcomes.pop(0))

    monkeypatch.setattr(drafting, "write", write)
    assert drafting.guess(lesson, "copy", 8).accepted == 3 and tried == [8, 7, 6]
    assert lesson.engine.optimizations.speculative == "ngram"
    lesson.engine.apply(speculative="none", num_draft_tokens=8)


def test_marked_text_cannot_be_a_tag() -> None:
    token = TokenEvent("r", 1, "<b>&", 0, drafted=True)
    shown = drafting.marked(SimpleNamespace(seen=SimpleNamespace(arrivals=[(0.0, token)])))  # type: ignore[arg-type]
    assert "&lt;b&gt;&amp;" in shown.data and "<b>" not in shown.data


def test_without_a_draft_model_the_notebook_says_how_to_give_one(lesson: Lesson) -> None:
    assert "draft_model" in drafting.with_model(lesson, 4).data
    assert drafting.learned(lesson).data == drafting.NO_DRAFT


def test_a_model_that_guesses_is_measured_and_its_training_shown(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    made = Lesson(
        str(folder), "cpu", 0.01, 3, name="drafted", draft_model=str(folder), max_model_len=256, num_kv_blocks=32
    )
    assert "a model of its own, with 2 layers" in drafting.learned(made).data, "it was not trained for this one"
    said = drafting.with_model(made, 24).data
    assert str(folder) in said and "Every token is the same" in said and "Drafting is" in said
    assert made.engine.optimizations.speculative == "none"
    made.close()


@pytest.mark.skipif(draft_for(DEFAULT_MODEL) is None, reason="no draft is in this checkout")
def test_the_shipped_draft_shows_what_its_card_says() -> None:
    config = SimpleNamespace(model=DEFAULT_MODEL, draft_model=None)
    lesson: Any = SimpleNamespace(engine=SimpleNamespace(config=config, model_config=SimpleNamespace(num_layers=30)))
    before, after = drafting.learned(lesson).data
    part = open_checkpoint(draft_for(DEFAULT_MODEL)).draft
    assert list(after.y) == part.facts["after"]["by_position"] and after.y[0] > before.y[0]


# -- 10 ---------------------------------------------------------------------------------------------------------------


def test_every_token_chooses_its_experts_in_every_layer(experts: Lesson) -> None:
    engine = experts.engine
    counts = mixture.chosen(engine, mixture.random_prompt(engine, 20, 1), tokens=1)
    c = engine.model_config
    assert [sum(layer) for layer in counts] == [20 * c.num_experts_per_tok] * c.num_layers
    assert mixture.distinct(engine, (1,), 0, rounds=2) == {1.0: c.num_experts_per_tok}
    chart = mixture.heat(counts, "t").data[0]
    assert all(sum(row) == pytest.approx(1.0) for row in chart.z) and max(map(max, chart.z)) == mixture.busiest(counts)


def test_distinct_experts_are_those_of_one_token_and_at_most_all() -> None:
    even, lopsided = [[5] * 16], [[40, 40, *[0] * 14]]
    assert mixture.expected_by_share(even, 2, 4) == pytest.approx(mixture.expected_distinct(16, 2, 4))
    assert mixture.expected_by_share(lopsided, 2, 50) == 2
    assert mixture.expected_distinct(16, 2, 1) == pytest.approx(2) and mixture.expected_distinct(16, 2, 1e4) == 16
    pairs = list(itertools.combinations(range(4), 2))
    by_hand = sum(len({*a, *b}) for a in pairs for b in pairs) / len(pairs) ** 2
    assert mixture.expected_distinct(4, 2, 2) == pytest.approx(by_hand)


def test_stored_and_read_bytes_are_the_forecast(experts: Lesson) -> None:
    cost = mixture.cost(experts.engine)
    many, rest = mixture.stored_and_read(cost).data
    assert many.x[0] + rest.x[0] == pytest.approx(cost.stored_bytes / 1e6)
    assert many.x[1] + rest.x[1] == pytest.approx((cost.weight_bytes(1) - cost.row_bytes) / 1e6, rel=1e-3)


# -- 11 ---------------------------------------------------------------------------------------------------------------


def test_margins_tell_what_the_judge_would_refuse() -> None:
    def no_eps(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm_ref(x, weight, 0.0)

    device = torch.device("cpu")
    right, wrong = (kernels.margins("rms_norm", fn, device) for fn in (rms_norm_ref, no_eps))
    assert max(right.values()) <= 1 < wrong["one-row"] < wrong["small-values"]
    assert all(name in kernels.contract("rms_norm") for name in right)
    assert len(kernels.judged({"right": right, "wrong": wrong}).data) == 2


def test_an_effect_is_measured_both_ways_and_leaves_the_function_in_force(lesson: Lesson) -> None:
    def mine(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm_ref(x, weight, eps)

    seen = kernels.effect(lesson, "rms_norm", mine, rounds=1)
    assert lesson.engine.swapped_ops == {"rms_norm": mine} and set(seen.found.rounds) == {"built-in", "yours"}
    more_ms = seen.report.calls_per_step * (seen.report.us - seen.report.built_in_us) / 1e3
    assert seen.predicted_ms == pytest.approx(seen.found.best("built-in") + more_ms)
    with pytest.raises(ValueError, match="refused"):
        kernels.effect(lesson, "rms_norm", lambda x, weight, eps: x)
    lesson.engine.swap_op("rms_norm", None)


def test_a_readers_activation_is_run_by_the_engine_or_refused_with_the_reason(lesson: Lesson) -> None:
    check = kernels.Checks(lesson, EFFECT)
    assert check.silu_mul(None).right is None and check.silu_mul(3).right is False
    assert check.silu_mul(lambda gate, up: gate * up).right is False
    assert check.silu_mul(lambda gate, up: torch.nn.functional.silu(gate.float()) * up).right is True
    assert lesson.engine.swapped_ops == {}


# -- 12 ---------------------------------------------------------------------------------------------------------------


def test_a_climb_measures_every_stage_on_top_of_those_before(lesson: Lesson) -> None:
    found = tuning.climb(lesson, rounds=2)
    assert list(found.rounds) == ["everything off", "cuda_graph=on", "fused_kernels=on", "weight_format=int4"]
    now = lesson.engine.optimizations
    assert now.cuda_graph and now.fused_kernels and now.weight_format == "int4" and not now.continuous_batching
    columns = tuning.stairs(found).data[0]
    assert list(columns.y) == [1e3 / found.best(label) for label in found.rounds]


def test_seats_change_while_streams_run(lesson: Lesson) -> None:
    lesson.engine.apply(continuous_batching=True, max_num_seqs=8, cuda_graph=False, fused_kernels=False)
    found = tuning.more_seats(lesson, 0.04, (1, 2, 4))
    assert [e.changes for e in found.changes][-2:] == [{"max_num_seqs": 2}, {"max_num_seqs": 4}]
    assert min(found.rates.values()) > 0 and lesson.engine.snapshot().requests == ()
    assert len(tuning.live(found).layout.shapes) == len(found.changes)


def test_a_rate_counts_only_steps_of_that_many_streams() -> None:
    def step(i: int, decodes: int) -> StepEvent:
        tokens = tuple(TokenEvent(f"r{j}", 7, "a", i) for j in range(decodes))
        return StepEvent(i, i * 0.1, 100.0, 0, 0, 0, 0, 0, decodes, decodes, 0, 0, 1, 8, 1, tokens)

    seen = Trace(None)
    seen.events = [step(0, 1), step(1, 1), step(2, 4)]
    assert tuning._rates(seen, (1, 4, 8)) == {1: pytest.approx(10.0), 4: pytest.approx(40.0), 8: 0.0}


def test_findings_begin_with_what_is_wrong() -> None:
    lines = [Check("engine", "well", "fine"), Check("engine", "slow", "yes", "warn", "mend it", "torn")]
    text = tuning.findings(lines).data
    assert text.index("slow") < text.index("torn") < text.index("mend it") < text.index("well")
    assert "Nothing is wrong." in tuning.findings(lines[:1]).data


# -- exercises --------------------------------------------------------------------------------------------------------


def run_of(decode_tok_s: float) -> Run:
    return Run(decode_tok_s, decode_tok_s, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 8, 8)


def big_step(tokens: int, ms: float) -> StepEvent:
    return StepEvent(0, 1.0, ms, 0, 0, 0, 0, tokens, 3, 4, 0, 0, 1, 8, 1, ())


WHOLE = pd_split.Interruption(Disturbance(10.0, 800.0, 800.0, 10.0, 800.0, 800.0), {}, [big_step(400, 800.0)])
SPLIT = pd_split.Checks(WHOLE, WHOLE, 400)
SERVED = batching.Served(run_of(80.0), [], {}, 4)
BATCH = batching.Checks(SERVED, SERVED, {1: run_of(100.0), 8: run_of(310.0)})
CACHE = kv_cache.Checks(23_040, 16)
DRAFTS = drafting.Checks({1: 8.0, 4: 12.0, 9: 22.0})
EXPERTS = mixture.Checks(StepCost(1, 1, 8, 16, 2, 1, 1, 1))
EFFECT = kernels.Effect(
    Compared("ms", {"built-in": [12.0], "yours": [14.0]}),
    SwapReport("rms_norm", "applied", us=60.0, built_in_us=7.0, calls_per_step=61),
)
LAB = kernels.Checks(SimpleNamespace(engine=SimpleNamespace(model_config=SimpleNamespace(hidden_size=576))), EFFECT)  # type: ignore[arg-type]
TUNING = tuning.Checks(
    Compared("ms per token", {"off": [20.0, 21.0], "one": [12.0], "two": [8.0]}),
    {1: 100.0, 2: 180.0, 4: 260.0, 8: 300.0},
)
NUMBERS: list[tuple[Callable[[Any], Any], float]] = [
    (SPLIT.gap_of, 2000.0), (SPLIT.budget_for, 50.0), (BATCH.static_steps, 60), (BATCH.free_speed, 3.1),
    (CACHE.texts_in, 86), (CACHE.wasted, 7.5), (DRAFTS.break_even, 2.75), (DRAFTS.on_average, 3.3616),
    (EXPERTS.times_less, 8), (EXPERTS.for_four, 16 * (1 - 0.875**4)), (LAB.bytes_of_a_row, 6912),
    (LAB.share_of_step, 100 * 61 * 7 / 12000), (TUNING.product, 2.5), (TUNING.seats_for, 2),
]  # fmt: skip
CHOICES: list[tuple[Callable[[Any], Any], str, tuple[str, ...]]] = [
    (SPLIT.who_pays, "newcomer", ("streams", "nobody")),
    (BATCH.more_seats, "slower", ("faster", "same")),
    (CACHE.clock_first, "nothing", ("the rest", "everything")),
    (DRAFTS.changes_text, "nothing", ("worse", "shorter")),
    (EXPERTS.where, "one stream", ("many streams", "a long prompt")),
    (LAB.in_place, "refused", ("accepted",)),
    (TUNING.first_look, "temperature", ("model", "prompt")),
]


@pytest.mark.parametrize(("check", "truth"), NUMBERS, ids=name_of)
def test_a_number_is_judged_by_the_figures_and_no_hint_gives_it_away(check: Callable[[Any], Any], truth: float) -> None:
    assert_number_is_judged(check, truth)


@pytest.mark.parametrize(("check", "truth", "wrong"), CHOICES, ids=name_of)
def test_a_choice_is_judged_and_every_wrong_word_has_a_hint_of_its_own(
    check: Callable[[Any], Any], truth: str, wrong: tuple[str, ...]
) -> None:
    assert_choice_is_judged(check, truth, wrong)

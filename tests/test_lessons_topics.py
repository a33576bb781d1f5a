"""Notebooks 01 to 05: what they measure on a tiny model, and what their exercises answer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from strata_lab.bench.tiny_model import write_tiny_model
from strata_lab.lessons import bandwidth, crowd, first_token, follow, quantization, recorded
from strata_lab.lessons.by_hand import MAX_TOKENS, ByHand, Call
from strata_lab.lessons.first_token import Waits
from strata_lab.lessons.lesson import Lesson
from strata_lab.lessons.measuring import Compared, Trace, decode, decode_ms, ttft_ms
from tests.exercises import assert_choice_is_judged, assert_number_is_judged, name_of

TEXT = "the lighthouse"


@pytest.fixture(scope="module")
def lesson(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lesson]:
    folder = write_tiny_model(tmp_path_factory.mktemp("model"))
    made = Lesson(str(folder), "cpu", 0.01, 3)
    yield made
    made.close()


# -- the engine of a notebook -----------------------------------------------------------------------------------------


def test_a_cell_that_is_run_again_closes_the_engine_of_the_run_before(tmp_path) -> None:
    folder = str(write_tiny_model(tmp_path))
    first, second = Lesson(folder, "cpu", name="twice"), Lesson(folder, "cpu", name="twice")
    assert first.engine.closed and not second.engine.closed
    second.close()
    assert "closed" in second._repr_html_()


def test_a_lesson_says_what_it_runs_and_brings_the_stylesheet(lesson: Lesson) -> None:
    shown = lesson._repr_html_()
    assert "2 layers" in shown and lesson.machine in shown and "<style>" in shown and "--jp-ui-font-color1" in shown


def test_a_lesson_writes_exactly_the_tokens_asked_for_and_the_same_every_time(lesson: Lesson) -> None:
    one, other = lesson.write(TEXT, 9), lesson.write(TEXT, 9)
    assert len(one.token_ids) == 9 and one.token_ids == other.token_ids


def test_measurements_are_of_the_run_they_are_asked_about(lesson: Lesson) -> None:
    with Trace(lesson.engine) as seen:
        found = decode(lesson.engine, 0.01, batch=2, prompt_tokens=20)
    assert found.prompt_tokens == 20 and found.output_tokens >= 12
    assert max(s.num_decode_tokens for s in seen.steps) == 2
    assert decode_ms(lesson.engine, 0.01) > 0 and ttft_ms(lesson.engine, 5) > 0


def test_a_trace_tells_when_each_token_came(lesson: Lesson) -> None:
    with Trace(lesson.engine) as seen:
        output = lesson.write(TEXT, 5)
    assert [token.token_id for _, token in seen.arrivals] == list(output.token_ids)
    times = [ms for ms, _ in seen.arrivals]
    assert times == sorted(times) and times[0] > 0
    stairs = first_token.staircase(seen).data
    assert [list(trace.y) for trace in stairs] == [[0, 1, 2, 3, 4, 5], [1], [2, 3, 4, 5]]


# -- 01 ---------------------------------------------------------------------------------------------------------------


def test_waits_are_measured_at_every_length(lesson: Lesson) -> None:
    found = first_token.by_prompt_length(lesson.engine, (4, 64), rounds=1)
    assert list(found) == [4, 64] and all(w.ttft_ms > 0 and w.tpot_ms > 0 for w in found.values())


def test_draws_follow_the_probabilities_and_zero_temperature_takes_the_likeliest(lesson: Lesson) -> None:
    likely = first_token.probabilities(lesson.engine, TEXT)
    assert len(likely) == first_token.SHOWN and 0 < sum(likely.values()) <= 1
    assert list(likely.values()) == sorted(likely.values(), reverse=True)
    found = first_token.draws(lesson.engine, TEXT, (0.0, 1.0), 64, seed=5)
    assert found[0.0] == Counter({next(iter(likely)): 64})
    assert found[1.0].total() == 64 and found == first_token.draws(lesson.engine, TEXT, (0.0, 1.0), 64, seed=5)
    chart = first_token.drawn(lesson.engine.tokenizer, likely, found)
    for trace in chart.data:
        assert sum(trace.y) == pytest.approx(1.0), "shares of everything that can happen"


def test_a_label_shows_spaces_and_cannot_be_a_tag() -> None:
    assert first_token.shown(" <b>\n") == "␣&lt;b>⏎" and first_token.shown("") == "(half a character)"


# -- 02 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_a_model_run_by_hand_writes_what_the_engine_writes(lesson: Lesson, fused: bool) -> None:
    output = lesson.write(TEXT, 6)
    hand, tokens = ByHand(lesson.engine, fused=fused), list(output.prompt_token_ids)
    written: list[int] = []
    for _ in range(6):
        written.append(int(hand.feed(tokens).argmax()))
        tokens = written[-1:]
    assert written == list(output.token_ids)


def test_the_last_layer_of_the_lens_is_the_model(lesson: Lesson) -> None:
    hand = ByHand(lesson.engine)
    logits = hand.feed(lesson.engine.tokenizer.encode(TEXT))
    seen = hand.lens()
    assert seen.shape == (lesson.engine.model_config.num_layers, lesson.engine.model_config.vocab_size)
    assert torch.allclose(seen[-1], logits.softmax(-1), atol=1e-4)
    assert len(follow.lens(lesson.engine.tokenizer, seen).data) == follow.CANDIDATES


def test_running_by_hand_is_refused_beyond_its_cache(lesson: Lesson) -> None:
    hand = ByHand(lesson.engine)
    hand.feed([5] * (MAX_TOKENS - 1))
    for wrong in ([], [5, 5]):
        with pytest.raises(ValueError, match=f"must be 1 to {MAX_TOKENS} in all"):
            hand.feed(wrong)
    assert hand.feed([5]).shape == (lesson.engine.model_config.vocab_size,)


def test_every_operator_call_of_a_step_is_seen_and_drawn(lesson: Lesson) -> None:
    hand, layers = ByHand(lesson.engine), lesson.engine.model_config.num_layers
    hand.feed([5, 6])
    hand.feed([7])
    found = follow.by_operator(hand.calls)
    assert found["paged_attention"][0] == found["kv_append"][0] == layers and found["lm_head"][0] == 1
    chart = follow.operators(hand.calls)
    assert sum(int(text.split()[0]) for text in chart.data[0].text) == len(hand.calls)
    assert sum(chart.data[0].x) == pytest.approx(sum(call.ms for call in hand.calls))
    assert recorded.num_calls(lesson.engine) < len(hand.calls), "fused operators are fewer"


def test_the_winner_settles_where_it_leads_for_good() -> None:
    wins = torch.tensor([[0.6, 0.4], [0.1, 0.9], [0.7, 0.3], [0.2, 0.8], [0.4, 0.6]])
    assert follow.settled_after(wins) == 4
    assert follow.settled_after(wins[1:2]) == 1


def test_slots_show_prompt_written_and_free_ones(lesson: Lesson) -> None:
    ids = lesson.engine.tokenizer.encode("12345")
    state = crowd.picture_of(lesson.engine, [ids], (400,), when_tokens=6)
    (view,) = state.requests
    text = follow.slots(state).data
    assert text.count(": prompt'") == len(ids)
    assert text.count(": written by the model'") == view.num_computed_tokens - len(ids)
    assert len(re.findall(r"position \d+", text)) == len(view.blocks) * state.block_size


def test_pieces_show_half_characters_in_hex_and_escape_text(lesson: Lesson) -> None:
    tokenizer = lesson.engine.tokenizer
    shown = follow.pieces(tokenizer, tokenizer.encode("<é", add_special_tokens=False)).data
    assert "&lt;" in shown and "c3" in shown and "a9" in shown and "<é" not in shown


# -- 03 ---------------------------------------------------------------------------------------------------------------


def test_the_parts_of_a_step_are_all_that_it_reads(lesson: Lesson) -> None:
    parts = bandwidth.parts_of_step(lesson.engine)
    assert sum(parts.values()) == lesson.engine.stats().bytes_per_step and min(parts.values()) > 0
    chart = bandwidth.step_parts(parts, 1000, "t")
    assert sum(trace.x[0] for trace in chart.data) == pytest.approx((sum(parts.values()) + 1000) / 1e6)


def test_the_floor_is_bytes_over_bandwidth_and_points_tell_their_share_of_it() -> None:
    assert bandwidth.floor_ms(100e6, 20e9) == 5.0
    line, points = bandwidth.formats({"a": 100_000_000, "b": 50_000_000}, {"a": 10.0, "b": 2.5}, 20e9).data
    assert list(line.y) == [0, 5.0] and list(points.customdata) == [0.5, 1.0]


def test_streams_are_measured_back_and_forth_and_the_best_round_counts() -> None:
    order: list[int] = []

    def measure(n: int) -> float:
        order.append(n)
        return 10.0 * n if len(order) < 3 else 5.0 * n

    assert bandwidth.tok_s(measure, (1, 2), rounds=2) == {1: 200.0, 2: 200.0}
    assert order == [1, 2, 2, 1]


def test_the_ceiling_of_a_card_is_its_reading_over_the_bytes_of_a_token() -> None:
    cost = bandwidth.article_cost().step_bytes(1, bandwidth.ARTICLE_CONTEXT)
    found = bandwidth.card_ceilings(cost)
    assert len(found) == len(bandwidth.CHOSEN)
    name = bandwidth.CARDS["h200"].name
    assert found[name] == pytest.approx(4800e9 * bandwidth.READ_SHARE / cost)


# -- 05 ---------------------------------------------------------------------------------------------------------------


def test_both_ways_are_measured_and_their_last_steps_kept(lesson: Lesson) -> None:
    found = recorded.both_ways(lesson.engine, 0.01, rounds=2)
    assert set(found.rounds) == set(found.extra) == {recorded.OFF, recorded.ON}
    assert all(len(values) == 2 for values in found.rounds.values()) and all(found.extra.values())
    assert lesson.engine.optimizations.cuda_graph is False, "A B B A ends where it began"
    assert recorded.why_not(lesson.engine) == ""


def test_a_saving_below_the_noise_is_called_so() -> None:
    clear = Compared("ms", {recorded.OFF: [12.0, 14.0], recorded.ON: [9.0, 9.5]})
    noisy = Compared("ms", {recorded.OFF: [20.0], recorded.ON: [21.0]})
    assert (
        recorded.told({1: clear, 4: noisy}) == "1 stream: 3.00 ms, 25% of the step; 4 streams: less than the noise here"
    )
    assert [list(trace.y) for trace in recorded.saved({1: clear, 4: noisy}).data] == [[12.0, 20.0], [9.0, 21.0]]


# -- exercises --------------------------------------------------------------------------------------------------------

FIRST = first_token.Checks({16: Waits(50.0, 10.0), 256: Waits(700.0, 12.5)})
FOLLOW = follow.Checks([Call("linear", 1.0)] * 28 + [Call("add", 0.1)], num_layers=4, block_size=16)
BYTES = bandwidth.Checks({"int8": 150_000_000, "int4": 96_000_000}, 20e9, 48_000)
QUANTIZATION = quantization.Checks(seed=0)
RECORDED = recorded.Checks(Compared("ms", {recorded.OFF: [15.0], recorded.ON: [12.0]}), calls=150)
NUMBERS: list[tuple[Callable[[Any], Any], float]] = [
    (FIRST.seconds_for, (700 + 99 * 12.5) / 1e3), (FIRST.tokens_per_second, 80.0),
    (FOLLOW.blocks, 7), (FOLLOW.products_per_layer, 7),
    (BYTES.most_tok_s, 133.33), (BYTES.meeting_context, 2000.0), (BYTES.at_home, 256.0),
    (RECORDED.per_call_us, 20.0), (RECORDED.deeper_model, 12.0),
]  # fmt: skip
NUMBERS += [(QUANTIZATION.bits, 4.5), (QUANTIZATION.narrower_groups, 0.8)]
CHOICES: list[tuple[Callable[[Any], Any], str, tuple[str, ...]]] = [
    (FIRST.same_text, "seed", ("temperature", "nothing")),
    (FOLLOW.who_decides, "sampler", ("model", "scheduler")),
    (RECORDED.gains_most, "small model", ("large model", "same")),
]


@pytest.mark.parametrize(("check", "truth"), NUMBERS, ids=name_of)
def test_a_number_is_judged_by_the_figures_and_no_hint_gives_it_away(check: Callable[[Any], Any], truth: float) -> None:
    assert_number_is_judged(check, truth)


@pytest.mark.parametrize(("check", "truth", "wrong"), CHOICES, ids=name_of)
def test_a_choice_is_judged_and_every_wrong_word_has_a_hint_of_its_own(
    check: Callable[[Any], Any], truth: str, wrong: tuple[str, ...]
) -> None:
    assert_choice_is_judged(check, truth, wrong)


def test_the_pair_about_outliers_is_what_rounding_them_says() -> None:
    check = QUANTIZATION
    harm = check.harm()
    assert harm["int8/channel"] > 2 * harm["int8/group32"] > 2 * harm["fp8"]
    assert check.outliers(None).right is None and check.outliers(("int8/channel", "fp8")).right is True
    for wrong in (("fp8", "int8/channel"), ("int8/channel", "int8/group32"), ("int8", "fp8"), "fp8", 3):
        verdict = check.outliers(wrong)
        assert verdict.right is False and "int8/channel most" not in verdict.text

"""The chart's data are sums of the events and nothing else."""

from __future__ import annotations

from strata_lab.events import Draft, SpeculationEvent, StepEvent, TokenEvent
from strata_lab.speculative.lanes import speculation_chart


def step(number: int, tokens: list[tuple[str, int, str]], drafts: list[Draft]) -> StepEvent:
    events = tuple(TokenEvent(name, 7, text, index) for name, index, text in tokens)
    return StepEvent(
        number, float(number), 1.0, 0.1, 0.7, 0.1, 0.1, 0, 1, 1, 0, 0, 1, 8, 100, events, drafts=tuple(drafts)
    )


EVENTS = [
    step(0, [("a", 0, "A")], []),
    step(1, [("a", 1, "b"), ("a", 2, "c"), ("x", 4, "z")], [Draft("a", 1, (5, 6, 7), 1, "code")]),
    SpeculationEvent(1.5, "ngram", "off", "slow"),
    step(2, [("a", 3, "d"), ("a", 4, "e"), ("a", 5, "f")], [Draft("a", 3, (5, 6), 2, "repetition", is_loop=True)]),
    step(3, [("a", 6, "g")], [Draft("a", 6, (5, 6, 7), 2, "code")]),  # the text ended inside the window
]


def test_lanes_show_what_each_step_kept_and_threw_away() -> None:
    lanes = speculation_chart(EVENTS).lanes
    assert [(w.index, w.texts, w.num_accepted, w.num_rejected, w.kind) for w in lanes["a"]] == [
        (0, ("A",), 0, 0, ""), (1, ("b", "c"), 1, 2, "code"), (3, ("d", "e", "f"), 2, 0, "repetition"),
        (6, ("g",), 1, 1, "code"),
    ]  # fmt: skip
    assert [w.is_loop for w in lanes["a"]] == [False, False, True, False]
    assert [w.texts for w in lanes["x"]] == [("z",)]
    assert len(speculation_chart(EVENTS, last=2).lanes["a"]) == 2


def test_acceptance_is_counted_by_place_and_changes_are_listed() -> None:
    chart = speculation_chart(EVENTS)
    assert (chart.drafted_by_position, chart.accepted_by_position) == ((3, 3, 2), (3, 2, 0))
    assert chart.acceptance_by_position == (1.0, 2 / 3, 0.0)
    assert chart.tokens_per_step == 7 / 4  # the first token came with the prompt
    assert chart.changes == ((1.5, "off", "slow"),)
    assert chart.as_dict()["lanes"]["x"][0]["texts"] == ("z",)


def test_a_span_without_drafts_has_no_acceptance() -> None:
    chart = speculation_chart([])
    assert (chart.acceptance_by_position, chart.tokens_per_step, chart.lanes) == ((), 1.0, {})

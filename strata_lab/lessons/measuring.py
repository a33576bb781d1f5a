"""Measurements that a cell makes: what the engine did in a stretch of time, and settings compared fairly.

Times come from the engine's events (`bench/measure.py` reads them). Settings are compared in turn and back again,
A B C C B A, so that a machine that slows down meanwhile slows all of them; and by the best round of each, because other
programs can only make a run slower. On a laptop that does something else as well, the best of a few rounds is what is
left of the truth.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strata_lab.bench.measure import Run, run
from strata_lab.bench.workloads import Workload
from strata_lab.events import Event, StepEvent, TokenEvent
from strata_lab.workbench.causes import Ceiling, cause_data, split_step

WARM_TOKENS = 4
# Of a timed run. With the prompt the most stay below what the narrowest captured table holds: a wider one is captured
# when it is first needed, in the middle of the run.
FEWEST_TOKENS, MOST_TOKENS = 12, 224
PROMPT_TOKENS = 16


class Trace:
    """What an engine did between the start and the end of a `with` block.

    Attributes:
        start_s: when the block began, on the events' clock.
        events: all of them, in order; empty until the block has ended.
        lost: events that the engine's buffer had already dropped.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.start_s = 0.0
        self.events: list[Event] = []
        self.lost = 0

    def __enter__(self) -> Trace:
        self._cursor, self.start_s = self.engine.events.cursor, time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.events, _next, self.lost = self.engine.events.since(self._cursor)

    @property
    def steps(self) -> list[StepEvent]:
        """The engine's steps."""
        return [e for e in self.events if isinstance(e, StepEvent)]

    @property
    def prefill_steps(self) -> list[StepEvent]:
        """Steps that computed tokens of a prompt."""
        return [s for s in self.steps if s.num_prefill_tokens]

    @property
    def decode_steps(self) -> list[StepEvent]:
        """Steps that only decoded."""
        return [s for s in self.steps if s.num_decode_tokens and not s.num_prefill_tokens]

    @property
    def arrivals(self) -> list[tuple[float, TokenEvent]]:
        """Milliseconds since the block began, and the token that came then; in order, of all requests."""
        return [((s.t_s - self.start_s) * 1e3, t) for s in self.steps for t in s.tokens if t.token_id >= 0]


def decode(engine: Any, seconds: float, *, batch: int = 1, prompt_tokens: int = PROMPT_TOKENS) -> Run:
    """One greedy run of about `seconds` of decoding, after a short one that warms up; prefill is told apart in it.

    Args:
        engine: an open `LLMEngine`.
        seconds: of decoding; at least `FEWEST_TOKENS` tokens and at most `MOST_TOKENS` are made.
        batch: equal requests together.
        prompt_tokens: of each.

    Raises:
        RunFailed: a request ended in an error, or events were lost.
    """

    def once(tokens: int) -> Run:
        return run(engine, Workload("lesson", "equal requests", prompt_tokens, (tokens,) * batch, batch))

    per_token_s = (once(WARM_TOKENS).tpot_ms or 1.0) / 1e3
    return once(max(FEWEST_TOKENS, min(MOST_TOKENS, round(seconds / per_token_s))))


def decode_ms(engine: Any, seconds: float, *, batch: int = 1, prompt_tokens: int = PROMPT_TOKENS) -> float:
    """Milliseconds of a decode step; as `decode`."""
    found = decode(engine, seconds, batch=batch, prompt_tokens=prompt_tokens)
    assert found.decode_tok_s is not None  # a run of FEWEST_TOKENS tokens has decode steps
    return batch * 1e3 / found.decode_tok_s


def ttft_ms(engine: Any, prompt_tokens: int) -> float:
    """Time to first token of a prompt of that length that nothing cached can answer, milliseconds."""
    return run(engine, Workload("lesson", "one prompt", prompt_tokens, (2,))).ttft_ms


def prompt_rounds(engine: Any) -> int:
    """Rounds after which the best is right for prompts: a GPU captures a shape when it meets it a second time."""
    return 3 if engine.device.type == "cuda" else 2


def causes_ms(steps: Sequence[StepEvent], ceiling: Ceiling) -> dict[str, float]:
    """Where the time of a step goes: mean milliseconds per cause (a key of `cause_data`); they add up to its duration.

    Raises:
        ValueError: there are no steps.
    """
    if not steps:
        raise ValueError("steps=[] must hold a step at least; generate inside `with Trace(engine) as seen:`")
    parts = [split_step(step, ceiling)[4:] for step in steps]
    keys = [row["key"] for row in cause_data(ceiling)]
    return {key: statistics.mean(values) for key, values in zip(keys, zip(*parts, strict=True), strict=True)}


@dataclass
class Compared:
    """Settings measured in turn.

    Attributes:
        unit: of the values, for example "ms per token"; less is better.
        rounds: label to its values, a value per round.
        extra: label to whatever the caller wants to keep beside it.
    """

    unit: str
    rounds: dict[str, list[float]]
    extra: dict[str, Any] = field(default_factory=dict)

    def best(self, label: str) -> float:
        """The least value of a setting: other programs can only add to it."""
        return min(self.rounds[label])

    def times_faster(self, fast: str, slow: str) -> float:
        """Best of `slow` over best of `fast`; above 1 where `fast` is faster."""
        return self.best(slow) / self.best(fast)

    def require_faster(self, fast: str, slow: str, by: float = 1.0) -> float:
        """`times_faster`, after making sure that it is above `by`.

        Raises:
            AssertionError: it is not; the message gives all rounds, and says what to do.
        """
        ratio = self.times_faster(fast, slow)
        rounds = "; ".join(f"{name}: {', '.join(f'{v:.2f}' for v in values)}" for name, values in self.rounds.items())
        assert ratio > by, (
            f"{fast!r} should be more than {by:.2f} times as fast as {slow!r} and was {ratio:.2f} times ({rounds} "
            f"{self.unit}). Close other programs, raise `seconds`, and run this cell again."
        )
        return ratio


def in_turn(
    sides: Mapping[str, Callable[[], object]], measure: Callable[[], float], *, rounds: int = 2, unit: str = "ms"
) -> Compared:
    """Measure settings in turn, forward and then backward, so that slow drift of the machine meets all alike.

    Args:
        sides: label to what switches that setting on.
        measure: one value of what is switched on; less is better.
        rounds: values per setting.
        unit: of the values.
    """
    found: dict[str, list[float]] = {label: [] for label in sides}
    order = list(sides)
    for _ in range(rounds):
        for label in order:
            sides[label]()
            found[label].append(measure())
        order.reverse()
    return Compared(unit, found)


def applying(engine: Any, **settings: Mapping[str, Any]) -> dict[str, Callable[[], None]]:
    """Sides for `in_turn`: label to a function that applies those settings and insists that all are in force."""

    def switch(changes: Mapping[str, Any]) -> Callable[[], None]:
        def do() -> None:
            report = engine.apply(**changes)
            if not report.ok:
                raise RuntimeError(str(report))

        return do

    return {label: switch(changes) for label, changes in settings.items()}

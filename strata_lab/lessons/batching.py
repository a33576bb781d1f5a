"""Notebook 07: who sits in the batch, step by step, and what a fuller batch costs and brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strata_lab.bench.measure import Run, run
from strata_lab.bench.workloads import Workload
from strata_lab.events import StepEvent
from strata_lab.lessons.checks import Verdict, choice, number
from strata_lab.lessons.crowd import token_ms
from strata_lab.lessons.measuring import Compared, Trace, applying, decode, in_turn, prompt_rounds
from strata_lab.lessons.theme import BLUE, COLOURS, GREY, ORANGE, figure

WAITING, FIRST, NEXT = 0.0, 0.5, 1.0  # what a square of the map says
_SCALE = ((0.0, GREY), (0.33, GREY), (0.34, ORANGE), (0.66, ORANGE), (0.67, BLUE), (1.0, BLUE))
BATCHES = (1, 2, 4, 8)
SWEEP_PROMPT_TOKENS = 8


@dataclass(frozen=True)
class Served:
    """A workload, served.

    Attributes:
        run: its figures.
        steps: what the engine did.
        arrivals: request to the times of its tokens, ms since all were sent; in order of sending.
        seats: most requests at the same time.
    """

    run: Run
    steps: list[StepEvent]
    arrivals: dict[str, list[float]]
    seats: int

    @property
    def token_steps(self) -> list[StepEvent]:
        """Steps that made a token."""
        return [s for s in self.steps if s.tokens]

    @property
    def num_tokens(self) -> int:
        """All that were made."""
        return sum(map(len, self.arrivals.values()))

    @property
    def used(self) -> float:
        """Tokens made over tokens that the seats could have made in as many steps, 0 to 1."""
        return self.num_tokens / (self.seats * len(self.token_steps))

    @property
    def first_steps(self) -> list[int]:
        """Of each request the step that made its first token, counted from 1."""
        return [next(i for i, s in enumerate(self.token_steps, 1) if _got(request, s)) for request in self.arrivals]

    @property
    def total_ms(self) -> float:
        """Until the last token."""
        return max(times[-1] for times in self.arrivals.values())


def serve(engine: Any, workload: Workload) -> Served:
    """Send a workload, with as many seats as it has concurrency."""
    with Trace(engine) as seen:
        found = run(engine, workload)
    return Served(found, seen.steps, token_ms(seen), engine.optimizations.max_num_seqs)


def compare(
    engine: Any, workload: Workload, rounds: int | None = None, **settings: Mapping[str, Any]
) -> Compared:  # fmt: skip
    """Time for a whole workload under several settings, in turn; `extra` has each one's best round."""
    every: list[Served] = []

    def measure() -> float:
        every.append(serve(engine, workload))
        return every[-1].total_ms

    sides, rounds = applying(engine, **settings), rounds or prompt_rounds(engine)
    found = in_turn(sides, measure, rounds=rounds, unit="ms for all requests")
    took = {one.total_ms: one for one in every}
    found.extra = {label: took[found.best(label)] for label in settings}
    return found


def seat_map(served: Mapping[str, Served]) -> Any:
    """A row per request, a column per step: grey while it waits, a first token, its other tokens; a map per setting."""
    from plotly.subplots import make_subplots

    made = make_subplots(rows=len(served), shared_xaxes=True, vertical_spacing=0.12, subplot_titles=list(served))
    for row, one in enumerate(served.values(), start=1):
        rows = [_squares(request, one.token_steps) for request in one.arrivals]
        made.add_heatmap(
            z=rows, y=[f"{i + 1}" for i in range(len(rows))], x=list(range(1, len(one.token_steps) + 1)),
            zmin=WAITING, zmax=NEXT, colorscale=_SCALE, showscale=False, xgap=1, ygap=2, row=row, col=1,
            hovertemplate="request %{y}, step %{x}<br>grey: waits; orange: its first token; blue: one more"
            "<extra></extra>",
        )  # fmt: skip
        made.update_yaxes(autorange="reversed", title="request", row=row, col=1)
    house = figure("Who gets a token in which step", height=90 + 230 * len(served))
    made.update_layout({k: v for k, v in house.layout.to_plotly_json().items() if k not in ("xaxis", "yaxis")})
    made.update_xaxes(showgrid=False, zeroline=False)
    made.update_yaxes(showgrid=False, zeroline=False)
    return made.update_xaxes(title="step", row=len(served), col=1)


def _squares(request: str, steps: Sequence[StepEvent]) -> list[float | None]:
    """One value per step; None once it has ended."""
    got = [i for i, step in enumerate(steps) if _got(request, step)]
    first, last = got[0], got[-1]
    return [WAITING if i < first else FIRST if i == first else NEXT if i <= last else None for i in range(len(steps))]


def _got(request: str, step: StepEvent) -> bool:
    return any(token.request_id == request for token in step.tokens)


def waits(served: Mapping[str, Served]) -> Any:
    """The wait of each request for its first token, a line per setting."""
    made = figure("How long each request waits for its first token", x="request, in order of sending", y="ms")
    for (label, one), colour in zip(served.items(), COLOURS, strict=False):
        made.add_scatter(
            x=[i + 1 for i in range(len(one.arrivals))], y=[times[0] for times in one.arrivals.values()], name=label,
            mode="lines+markers", line={"color": colour, "shape": "hvh"}, marker={"size": 8},
            hovertemplate=f"{label}, request %{{x}}: %{{y:.0f}} ms<br>first StepEvent.t_s less when all were sent"
            "<extra></extra>",
        )  # fmt: skip
    return made


def sweep(engine: Any, seconds: float, batches: Sequence[int] = BATCHES) -> dict[int, Run]:
    """Equal requests together: the best of two runs per batch size, forward and backward."""
    found: dict[int, list[Run]] = {batch: [] for batch in batches}
    for batch in (*batches, *reversed(batches)):
        found[batch].append(decode(engine, seconds, batch=batch, prompt_tokens=SWEEP_PROMPT_TOKENS))
    return {batch: max(runs, key=lambda r: r.decode_tok_s or 0.0) for batch, runs in found.items()}


def rates(found: Mapping[int, Run]) -> Any:
    """Tokens per second against the batch: in total and per stream, never mixed."""
    made = figure("One reading of the weights serves the whole batch", x="requests in the batch", y="tok/s")
    total = [r.decode_tok_s or 0.0 for r in found.values()]
    each = [t / batch for t, batch in zip(total, found, strict=True)]
    lines = (
        ("all together", total, "tokens of decode steps / their time"),
        ("per stream", each, "the same / requests"),
    )
    for (name, values, formula), colour in zip(lines, COLOURS, strict=False):
        made.add_scatter(
            x=list(found), y=values, name=name, mode="lines+markers", line={"color": colour}, marker={"size": 9},
            hovertemplate=f"%{{x}} requests: %{{y:.0f}} tok/s {name}<br>{formula}<extra></extra>",
        )  # fmt: skip
    made.update_xaxes(type="log", tickvals=list(found), ticktext=[str(n) for n in found])
    return made.update_yaxes(rangemode="tozero")


def bus_steps(lengths: Sequence[int], seats: int) -> int:
    """Steps of a static batch: groups of `seats`, each as long as its longest."""
    return sum(max(lengths[i : i + seats]) for i in range(0, len(lengths), seats))


def taxi_steps(lengths: Sequence[int], seats: int) -> int:
    """Steps when a seat is taken again as soon as it is free, in order."""
    ends = [0] * seats
    for length in lengths:
        free = ends.index(min(ends))
        ends[free] += length
    return max(ends)


class Checks:
    """The exercises.

    Args:
        static, continuous: the same workload, served both ways.
        found: batch size to its run.
    """

    LENGTHS = (40, 10, 10, 10, 10, 10)
    SEATS = 2

    def __init__(self, static: Served, continuous: Served, found: Mapping[int, Run]) -> None:
        self.static, self.continuous, self.found = static, continuous, found

    def static_steps(self, answer: Any) -> Verdict:
        """Steps that `SEATS` seats need for requests of `LENGTHS` tokens with a static batch."""
        truth, other = bus_steps(self.LENGTHS, self.SEATS), taxi_steps(self.LENGTHS, self.SEATS)
        return number(
            answer, truth, within=0.01,
            because=f"Pairs wait for their longer half: 40 + 10 + 10 = {truth}. The other way takes {other}.",
            hint="Form groups of two in order. How many steps does each group take?",
            traps=((other, "That is continuous batching: here a free seat stays empty until the whole group is done."),
                   (sum(self.LENGTHS), "That is one request after the other; two sit in the batch.")),
        )  # fmt: skip

    def free_speed(self, answer: Any) -> Verdict:
        """How many times as many tokens per second the largest measured batch makes as one stream."""
        largest = max(self.found)
        total = self.found[largest].decode_tok_s or 0.0
        truth = total / (self.found[1].decode_tok_s or 1.0)
        return number(
            answer, truth, within=0.1,
            because=f"{largest} streams make {truth:.1f} times the tokens of one. Had reading the weights been all, it "
            f"would be {largest} times: arithmetic grows with the batch.",
            hint="Compare the right end of the upper line with its left end.",
            traps=((largest, "That would be so if a step took the same time at every batch size. Does it?"),),
        )  # fmt: skip

    def more_seats(self, answer: Any) -> Verdict:
        """What a single stream feels when `max_num_seqs` grows and all seats are taken: "faster", "slower", "same"."""
        return choice(
            answer, "slower",
            because="A fuller batch makes more tokens in total, and each step takes longer. What the crowd gains, a "
            "stream pays. The setting is that choice.",
            hints={
                "faster": "Look at the lower line of section 5.",
                "same": "On an ideal machine, perhaps. Look at the lower line of section 5.",
            },
        )  # fmt: skip

"""Notebook 06: what a long prompt does to those who are being answered, and how slices of it help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strata_lab.bench.interference import Disturbance, disturb
from strata_lab.bench.measure import COUNTS_CAPTURES, MOST_RUNS, until_none_captured
from strata_lab.events import StepEvent
from strata_lab.lessons.checks import Verdict, choice, number
from strata_lab.lessons.crowd import token_ms
from strata_lab.lessons.measuring import Compared, Trace, applying, in_turn, prompt_rounds, ttft_ms
from strata_lab.lessons.theme import BLUE, COLOURS, GREY, LEGEND_BELOW, ORANGE, figure

STREAMS = 3
PROBE_TOKENS = 64
SHORTEST, LONGEST = 192, 6144  # tokens of the long prompt


@dataclass(frozen=True)
class Interruption:
    """One long prompt among running streams.

    Attributes:
        figures: gaps and the wait for the newcomer's first token.
        arrivals: name of a stream, or "newcomer", to the times of its tokens, ms since the prompt was sent.
        steps: what the engine did meanwhile.
    """

    figures: Disturbance
    arrivals: dict[str, list[float]]
    steps: list[StepEvent]


def prompt_tokens(engine: Any, seconds: float) -> int:
    """Tokens of a prompt that this machine reads in about half of `seconds`: a multiple of 64."""
    best_ms = min(ttft_ms(engine, PROBE_TOKENS) for _ in range(3))
    tokens = round(seconds * 1e3 / 2 / best_ms) * PROBE_TOKENS
    return max(SHORTEST, min(LONGEST, tokens))


def interrupt(engine: Any, tokens: int, streams: int = STREAMS) -> Interruption:
    """Let some streams decode, send one prompt of `tokens` tokens, and see who waits how long.

    On a GPU again, until a time in which nothing was captured: that takes longer than a prompt.
    """
    most = 1 if COUNTS_CAPTURES[engine.device.type] else MOST_RUNS
    found = until_none_captured(lambda: _interrupt(engine, tokens, streams), lambda: engine._loop.captures, most)
    return found[-1][0]


def _interrupt(engine: Any, tokens: int, streams: int) -> Interruption:
    with Trace(engine) as seen:
        found = disturb(engine, streams, tokens)
    came = token_ms(seen)
    newcomer = list(came)[-1]  # the others had tokens before it was sent
    sent_ms = came[newcomer][0] - found.ttft_ms
    names = ["newcomer" if request == newcomer else f"stream {i + 1}" for i, request in enumerate(came)]
    arrivals = {name: [ms - sent_ms for ms in times] for name, times in zip(names, came.values(), strict=True)}
    return Interruption(found, arrivals, seen.steps)


def compare(engine: Any, tokens: int, **settings: Mapping[str, Any]) -> Compared:
    """The longest gap of a running stream under several settings, in turn; `extra` has each one's best round."""
    every: list[Interruption] = []

    def measure() -> float:
        every.append(interrupt(engine, tokens))
        return every[-1].figures.worst_ms

    found = in_turn(applying(engine, **settings), measure, rounds=prompt_rounds(engine), unit="ms, longest gap")
    worst = {one.figures.worst_ms: one for one in every}
    found.extra = {label: worst[found.best(label)] for label in settings}
    return found


def raster(seen: Mapping[str, Interruption], title: str) -> Any:
    """A tick per token and stream, a band of rows per setting; the shaded time is the newcomer's wait."""
    made = figure(title, x="ms since the long prompt was sent", height=90 + 150 * len(seen))
    rows: list[tuple[float, str]] = []
    end = max(one.figures.ttft_ms for one in seen.values())
    for band, (label, one) in enumerate(seen.items()):
        for i, (name, times) in enumerate(one.arrivals.items()):
            y = -(band * (STREAMS + 2.2) + i)
            rows.append((y, name))
            colour = ORANGE if name == "newcomer" else BLUE
            made.add_scatter(
                x=times, y=[y] * len(times), mode="markers", showlegend=False, name=name,
                marker={"symbol": "line-ns-open", "size": 13, "color": colour, "line": {"width": 2}},
                hovertemplate=f"{label}, {name}: a token at %{{x:.0f}} ms<br>StepEvent.t_s less when the prompt was "
                "sent<extra></extra>",
            )  # fmt: skip
        top, bottom = rows[-len(one.arrivals)][0] + 0.5, rows[-1][0] - 0.5
        made.add_shape(
            type="rect", x0=0, x1=one.figures.ttft_ms, y0=bottom, y1=top, fillcolor=GREY, opacity=0.18, line_width=0
        )
        made.add_annotation(
            x=0, y=top + 0.35, text=f"<b>{label}</b>", showarrow=False, xanchor="left", yanchor="middle"
        )
    made.update_yaxes(tickvals=[y for y, _ in rows], ticktext=[name for _, name in rows], showgrid=False)
    return made.update_xaxes(range=[-0.15 * end, 1.2 * end])


def trade(found: Mapping[int, Interruption]) -> Any:
    """Both waits against the budget of a step: the longest gap of the streams, and the newcomer's first token."""
    title = "A smaller budget: shorter gaps, a later first token"
    made = figure(title, x="max_num_batched_tokens", y="ms", height=380, legend=LEGEND_BELOW)
    lines = (
        ("longest gap of a running stream", lambda f: f.worst_ms, "between two tokens, until the newcomer's first"),
        ("newcomer's first token", lambda f: f.ttft_ms, "from sending to its first token"),
    )
    for (name, read, formula), colour in zip(lines, COLOURS, strict=False):
        made.add_scatter(
            x=list(found), y=[read(one.figures) for one in found.values()], name=name, mode="lines+markers",
            line={"color": colour}, marker={"size": 9},
            hovertemplate=f"budget %{{x}}: %{{y:.0f}} ms<br>{formula}<extra></extra>",
        )  # fmt: skip
    made.update_xaxes(type="log", tickvals=list(found), ticktext=[str(n) for n in found])
    return made.update_yaxes(rangemode="tozero")


def budgets(engine: Any, tokens: int, sizes: tuple[int, ...]) -> dict[int, Interruption]:
    """One interruption per budget of a step, without `pd_split`."""
    found = {}
    for size in sizes:
        applying(engine, budget={"max_num_batched_tokens": size, "pd_split": False})["budget"]()
        found[size] = interrupt(engine, tokens)
    return found


class Checks:
    """The exercises.

    Args:
        whole: an interruption by the prompt in one piece.
        split: the same prompt in slices.
        tokens: of the prompt.
    """

    def __init__(self, whole: Interruption, split: Interruption, tokens: int) -> None:
        self.whole, self.split, self.tokens = whole, split, tokens

    @property
    def ms_per_token(self) -> float:
        """What a token of the prompt takes, in one piece."""
        return max(s.duration_ms for s in self.whole.steps if s.num_prefill_tokens) / self.tokens

    def gap_of(self, answer: Any, tokens: int = 1000) -> Verdict:
        """Milliseconds that streams stand still for a prompt of `tokens` tokens in one step."""
        truth = tokens * self.ms_per_token
        return number(
            answer, truth, within=0.15,
            because=f"A step ends when its last token is computed: {tokens} times {self.ms_per_token:.2f} ms.",
            hint="Take the longest step of section 3 and the tokens it computed. How long does one of them take?",
            traps=((truth / 1e3, "That is in seconds; milliseconds are asked for."),),
        )  # fmt: skip

    def budget_for(self, answer: Any, gap_ms: float = 100.0) -> Verdict:
        """Prompt tokens that a step may compute so that nobody waits longer than `gap_ms`."""
        truth = gap_ms / self.ms_per_token
        return number(
            answer, truth, within=0.25,
            because=f"{gap_ms:g} ms hold about {truth:.0f} prompt tokens here. A faster machine affords a larger "
            "slice.",
            hint="Divide the time that may pass by what one prompt token takes.",
            traps=((gap_ms * self.ms_per_token, "That multiplies. Which unit does it have?"),),
        )  # fmt: skip

    def who_pays(self, answer: Any) -> Verdict:
        """Who waits longer because of the slices: "newcomer", "streams" or "nobody"."""
        return choice(
            answer, "newcomer",
            because="The slices of its prompt take turns with the decode steps of all others, so it is read later. "
            "Nothing became faster: the waiting was shared out.",
            hints={
                "streams": "Look at the ticks of the streams with and without slices: which picture has the wide gap?",
                "nobody": "The prompt has as many tokens as before, and now decode steps lie between its slices.",
            },
        )  # fmt: skip

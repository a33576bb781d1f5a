"""Notebook 09: which tokens were guessed, what a step that verifies guesses costs, and on which texts that pays."""

from __future__ import annotations

import html
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strata_lab.events import StepEvent
from strata_lab.lessons.checks import Verdict, choice, number
from strata_lab.lessons.crowd import still
from strata_lab.lessons.lesson import Lesson
from strata_lab.lessons.measuring import Compared, Trace, applying, in_turn
from strata_lab.lessons.theme import BLUE, COLOURS, GREY, LEGEND_BELOW, ORANGE, figure
from strata_lab.models.loader import open_checkpoint
from strata_lab.models.shipped import draft_for
from strata_lab.request import RequestOutput
from strata_lab.workbench.drafts import DraftsDetail

_NOTE = (
    "The lighthouse keeper climbed the stairs every evening at six. He lit the lamp, cleaned the glass, and wrote the "
    "weather into a thick book. On stormy nights he stayed awake until the last ship had passed the rocks. In the "
    "morning he slept, and the gulls kept watch."
)
TASKS = {
    "copy": f"Repeat the following text exactly, word for word.\n\n{_NOTE}",
    "code": "Write a Python class for a bank account with the methods deposit, withdraw and balance.",
    "story": "Tell me a story about a lighthouse.",
}
NO_DRAFT = (
    "No model guesses for this one. Set `draft_model` at the top to a smaller model of the same family, with the same "
    "tokenizer, or train one with `strata train-draft`, and run everything again."
)
FIRST_TRIES = (8, 7, 6, 5)  # most guesses per step
MIN_STEPS = 3  # of one size, before their median is shown


@dataclass(frozen=True)
class Written:
    """A text and how it came to be.

    Attributes:
        output: the text.
        seen: what the engine did.
    """

    output: RequestOutput
    seen: Trace

    @property
    def steps(self) -> list[StepEvent]:
        """Steps that only decoded."""
        return self.seen.decode_steps

    @property
    def tokens_per_step(self) -> float:
        """Tokens that decode steps gave, on average."""
        return sum(len(s.tokens) for s in self.steps) / len(self.steps)

    @property
    def proposed(self) -> int:
        """Guesses that were verified."""
        return sum(len(d.token_ids) for s in self.steps for d in s.drafts)

    @property
    def accepted(self) -> int:
        """Guesses that came true."""
        return sum(d.num_accepted for s in self.steps for d in s.drafts)

    @property
    def acceptance(self) -> float:
        """Guesses that came true over guesses that were verified; 0 where there were none."""
        return self.accepted / self.proposed if self.proposed else 0.0


def prompt_of(engine: Any, task: str) -> Any:
    """A task as a chat message where the model has a template, else as text."""
    text = TASKS[task]
    return [{"role": "user", "content": text}] if getattr(engine.tokenizer, "chat_template", None) else text


def write(lesson: Lesson, task: str, tokens: int) -> Written:
    """Do a task, `tokens` tokens long, greedily."""
    lesson.engine.reset_prefix_cache()
    with Trace(lesson.engine) as seen:
        output = lesson.write([prompt_of(lesson.engine, task)], tokens)
    return Written(output, seen)


def guess(lesson: Lesson, task: str, tokens: int) -> Written:
    """Do a task with look-up, which is on afterwards.

    What verification costs is measured when drafting begins. On a busy machine that may look too dear, and nothing is
    proposed; then it is measured anew, for one guess less.
    """
    for most in FIRST_TRIES:
        lesson.engine.apply(speculative="ngram", num_draft_tokens=most)
        written = write(lesson, task, tokens)
        if written.accepted:
            break
    return written


def compare(lesson: Lesson, task: str, tokens: int, rounds: int = 2, **settings: Mapping[str, Any]) -> Compared:
    """Milliseconds per token under several settings, in turn; `extra` has each one's best round."""
    every: list[Written] = []

    def measure() -> float:
        every.append(write(lesson, task, tokens))
        return every[-1].output.tpot_ms or 0.0

    found = in_turn(applying(lesson.engine, **settings), measure, rounds=rounds, unit="ms per token")
    took = {one.output.tpot_ms: one for one in every}
    found.extra = {label: took[found.best(label)] for label in settings}
    return found


def marked(written: Written) -> Any:
    """The text; what was guessed and came true is marked, what the model had to write itself is not."""
    from IPython.display import HTML

    style = f"background:color-mix(in srgb,{BLUE} 30%,transparent);border-bottom:2px solid {BLUE}"
    pieces = []
    for _ms, token in written.seen.arrivals:
        text = html.escape(token.text).replace("\n", "<br>")
        pieces.append(f'<span style="{style}">{text}</span>' if token.drafted else text)
    return HTML(f'<p style="max-width:60em;line-height:1.8">{"".join(pieces)}</p>')


def proposals(lesson: Lesson, written: Written) -> Any:
    """The workbench's panel of proposals: what was accepted and what was not, round by round."""
    detail = DraftsDetail()
    still(detail, lesson.engine, written.steps)
    return detail.lanes


def step_ms(step: StepEvent) -> float:
    """What a step took: the device's own time where it ran ahead and sampled by itself, else the step's duration.

    A host that waits for several queued steps at once waits for the first of them and finds the others ready.
    """
    return step.duration_ms if step.sample_ms else step.forward_ms


def sizes(steps: list[StepEvent]) -> dict[int, list[float]]:
    """Tokens that a step computed, its guesses included, to the milliseconds of such steps (`step_ms`)."""
    found: dict[int, list[float]] = {}
    for step in steps:
        size = step.num_decode_tokens + sum(len(d.token_ids) for d in step.drafts)
        found.setdefault(size, []).append(step_ms(step))
    return dict(sorted(found.items()))


def step_costs(steps: list[StepEvent]) -> dict[int, float]:
    """Median milliseconds of a step by the tokens it computed; sizes that hardly occurred are left out."""
    return {size: statistics.median(ms) for size, ms in sizes(steps).items() if len(ms) >= MIN_STEPS}


def costs(steps: list[StepEvent]) -> Any:
    """A point per step, its duration against the tokens that it computed, and the medians."""
    title, x = "What it costs to verify guesses", "tokens computed in the step (its guesses included)"
    made = figure(title, x=x, y="ms", height=380, legend=LEGEND_BELOW)
    points = [(size, ms) for size, times in sizes(steps).items() for ms in times]
    made.add_scatter(
        x=[p[0] for p in points], y=[p[1] for p in points], mode="markers", name="a step",
        marker={"color": GREY, "size": 6, "opacity": 0.5}, hovertemplate="%{x} tokens: %{y:.2f} ms<br>"
        "StepEvent.duration_ms; forward_ms where a GPU sampled<extra></extra>",
    )  # fmt: skip
    middle = step_costs(steps)
    made.add_scatter(
        x=list(middle), y=list(middle.values()), mode="lines+markers", name="median", line={"color": BLUE},
        marker={"size": 10}, hovertemplate="%{x} tokens: %{y:.2f} ms, median<extra></extra>",
    )  # fmt: skip
    one = middle[1]
    made.add_scatter(
        x=list(middle), y=[one * size for size in middle], mode="lines", name="as many steps of one token",
        line={"color": ORANGE, "dash": "dash"}, hovertemplate="%{x} steps of one token: %{y:.1f} ms<extra></extra>",
    )  # fmt: skip
    return made.update_yaxes(range=[0, 1.1 * max(max(middle.values()), 4 * one)])


def by_task(found: Mapping[str, Compared], plain: str, guessing: str) -> Any:
    """How much sooner each task was done with guessing, and how many guesses came true."""
    made = figure("It depends on the text", y="times as fast as without")
    ratios = [one.times_faster(guessing, plain) for one in found.values()]
    told = [(one.extra[guessing].accepted, one.extra[guessing].proposed) for one in found.values()]
    made.add_bar(
        x=list(found), y=ratios, marker_color=COLOURS[: len(found)], customdata=told,
        text=[f"{r:.2f} times<br>{a} of {p} guesses right" for r, (a, p) in zip(ratios, told, strict=True)],
        textposition="outside", cliponaxis=False,
        hovertemplate="%{x}: %{y:.2f} times as fast<br>best ms per token without / with<br>"
        "%{customdata[0]} of %{customdata[1]} guesses came true<extra></extra>",
    )  # fmt: skip
    made.add_hline(y=1.0, line={"color": GREY, "dash": "dash"})
    return made.update_yaxes(range=[0, 1.3 * max(ratios)])


def expected_tokens(chance: float, guesses: int) -> float:
    """Tokens that a step gives on average when each guess comes true with `chance` and the first wrong one ends it."""
    return sum(chance**i for i in range(guesses + 1))


def model_that_guesses(lesson: Lesson) -> str | None:
    """The draft that `speculative="draft"` takes: the given one, else the one that comes with the model."""
    config = lesson.engine.config
    return config.draft_model or draft_for(config.model)


def learned(lesson: Lesson) -> Any:
    """How often the draft's first, second, ... guess comes true, before and after it was trained (its own record)."""
    from IPython.display import Markdown

    name = model_that_guesses(lesson)
    if name is None:
        return Markdown(NO_DRAFT)
    draft = open_checkpoint(name)
    layers, part = draft.config.num_layers, getattr(draft, "draft", None)  # of folders that the trainer wrote
    draft.close()
    if part is None:
        return Markdown(
            f"`{name}` is a model of its own, with {layers} layers. Nobody trained it to guess for this one."
        )
    facts, target = part.facts, lesson.engine.model_config
    title = (
        f"{layers} of {target.num_layers} layers, {len(part.to_target):,} of {part.vocab_size:,} tokens, "
        f"learned from {facts['tokens']:,} tokens"
    )
    made = figure(title, x="guess (those before it came true)", y="came true", legend=LEGEND_BELOW)
    for when, colour in (("before", GREY), ("after", BLUE)):
        came_true = facts[when]["by_position"]
        made.add_bar(
            x=list(range(1, len(came_true) + 1)), y=came_true, name=f"{when} training", marker_color=colour,
            hovertemplate=f"guess %{{x}}: %{{y:.0%}}<br>{facts[when]['places']:,} places in texts it had not seen"
            "<extra></extra>",
        )  # fmt: skip
    return made.update_yaxes(tickformat=".0%", range=[0, 1])


def with_model(lesson: Lesson, tokens: int) -> Any:
    """The story with a model that guesses, beside none: Markdown; without a model, what it would take."""
    from IPython.display import Markdown

    name, engine = model_that_guesses(lesson), lesson.engine
    if name is None:
        return Markdown(NO_DRAFT)
    found = compare(lesson, "story", tokens, none={"speculative": "none"}, draft={"speculative": "draft"})
    state, reason = engine.stats().speculation
    engine.apply(speculative="none")
    guessed, same = found.extra["draft"], found.extra["none"].output.token_ids == found.extra["draft"].output.token_ids
    assert same or lesson.on_gpu, "a draft changed the text"
    return Markdown(
        f"`{name}` guessed {guessed.proposed} tokens of the story, and **{guessed.accepted}** came true: "
        f"{guessed.tokens_per_step:.2f} tokens per step, **{found.times_faster('draft', 'none'):.2f} times** as fast "
        f"as without. {'Every token is the same.' if same else 'Rounding decided a near tie otherwise.'} Drafting is "
        f"*{state}* now: {reason}."
    )


class Checks:
    """The exercises.

    Args:
        costs_ms: tokens that a step computes to what it takes (`step_costs`).
    """

    CHANCE, GUESSES = 0.8, 4

    def __init__(self, costs_ms: Mapping[int, float]) -> None:
        self.costs_ms = costs_ms

    @property
    def largest(self) -> int:
        """Most tokens of a step that was measured often enough."""
        return max(self.costs_ms)

    def break_even(self, answer: Any) -> Verdict:
        """Tokens that the largest measured step must give to be as fast as plain steps."""
        ratio = self.costs_ms[self.largest] / self.costs_ms[1]
        return number(
            answer, ratio, within=0.1,
            because=f"It takes {ratio:.2f} times as long as a plain step, which gives one token. So it must give "
            f"{ratio:.2f} on average: the model's own, and {ratio - 1:.2f} right guesses.",
            hint="In section 4, compare the median at the right end with the one at 1.",
            traps=((ratio - 1, "That many *guesses* must be right. The step also gives a token of the model itself."),),
        )  # fmt: skip

    def on_average(self, answer: Any) -> Verdict:
        """Tokens per step with 4 guesses that each come true with 80%."""
        truth = expected_tokens(self.CHANCE, self.GUESSES)
        return number(
            answer, truth, within=0.03,
            because=f"1 + 0.8 + 0.8² + 0.8³ + 0.8⁴ = {truth:.2f}. The fourth guess is of use only if the first three "
            "are right, which is why long proposals are rarely worth it.",
            hint="The second guess counts only if the first is right. Add up the chances, one guess after the other.",
            traps=((1 + self.CHANCE * self.GUESSES, "That counts a right guess behind a wrong one. It is thrown away."),
                   (truth - 1, "The model's own token comes on top.")),
        )  # fmt: skip

    def changes_text(self, answer: Any) -> Verdict:
        """What bad guesses do to the text: "worse", "nothing" or "shorter"."""
        return choice(
            answer, "nothing",
            because="Each position is computed by the model and drawn with its own random number. A guess is kept only "
            "if it is what came out anyway. A bad drafter costs time, never quality.",
            hints={
                "worse": "In section 3, two texts were compared. Were they different?",
                "shorter": "When is a text at its end? Does a guess decide that?",
            },
        )  # fmt: skip

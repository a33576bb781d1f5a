"""Notebook 01: when tokens come, what a longer prompt changes, and how a token is drawn."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strata_lab.bench.measure import run
from strata_lab.bench.workloads import Workload
from strata_lab.lessons.checks import Verdict, choice, number
from strata_lab.lessons.measuring import Trace, prompt_rounds
from strata_lab.lessons.theme import BLUE, COLOURS, GREY, ORANGE, figure
from strata_lab.sampling_params import SamplingParams

TIMED_TOKENS = 12  # of output, per prompt length
SHOWN = 6  # candidates for a token


def shown(text: str) -> str:
    """A token's text as a label: spaces and ends of lines can be seen, and no character is a tag."""
    visible = text.replace(" ", "␣").replace("\n", "⏎")
    return visible.replace("&", "&amp;").replace("<", "&lt;") or "(half a character)"


def staircase(seen: Trace) -> Any:
    """Every token at the moment it came: the tread of the first stair is the time to first token."""
    times = [0.0, *(ms for ms, _ in seen.arrivals)]
    made = figure("One token after another", x="ms since the request was sent", y="tokens so far")
    made.add_scatter(
        x=times, y=list(range(len(times))), mode="lines", line={"shape": "hv", "color": GREY, "width": 1},
        hoverinfo="skip", showlegend=False,
    )  # fmt: skip
    for name, colour, part in (("first token", ORANGE, slice(0, 1)), ("the others", BLUE, slice(1, None))):
        came = seen.arrivals[part]
        first = 1 if name == "first token" else 2
        made.add_scatter(
            x=[ms for ms, _ in came], y=list(range(first, first + len(came))), mode="markers", name=name,
            marker={"color": colour, "size": 9}, customdata=[shown(token.text) for _, token in came],
            hovertemplate="token %{y}: %{customdata}<br>%{x:.1f} ms = StepEvent.t_s of its step, less when the request "
            "was sent<extra></extra>",
        )  # fmt: skip
    return made


@dataclass(frozen=True)
class Waits:
    """Milliseconds of one prompt length, best of its rounds: to the first token, and for each one after it."""

    ttft_ms: float
    tpot_ms: float


def by_prompt_length(engine: Any, lengths: Sequence[int], rounds: int | None = None) -> dict[int, Waits]:
    """Both waits at several prompt lengths, measured in turn; the prefix cache is dropped before each."""
    found: dict[int, list[Waits]] = {length: [] for length in lengths}
    run(engine, Workload("lesson", "warms up", min(lengths), (TIMED_TOKENS,)))
    for _ in range(rounds or prompt_rounds(engine)):
        for length in lengths:
            one = run(engine, Workload("lesson", "a prompt of some length", length, (TIMED_TOKENS,)))
            assert one.tpot_ms is not None  # TIMED_TOKENS > 1
            found[length].append(Waits(one.ttft_ms, one.tpot_ms))
    return {n: Waits(min(w.ttft_ms for w in all_), min(w.tpot_ms for w in all_)) for n, all_ in found.items()}


def prompt_lengths(found: Mapping[int, Waits]) -> Any:
    """Both waits against the length of the prompt."""
    made = figure("A longer prompt delays the first token, not the others", x="tokens of the prompt", y="ms")
    lines = (
        ("to the first token (TTFT)", ORANGE, [w.ttft_ms for w in found.values()], "RequestOutput.ttft_ms"),
        ("per token after it (TPOT)", BLUE, [w.tpot_ms for w in found.values()], "RequestOutput.tpot_ms"),
    )
    for name, colour, values, source in lines:
        made.add_scatter(
            x=list(found), y=values, name=name, mode="lines+markers", line={"color": colour}, marker={"size": 9},
            hovertemplate=f"prompt of %{{x}} tokens: %{{y:.1f}} ms<br>{source}, best of its rounds<extra></extra>",
        )  # fmt: skip
    return made


def probabilities(engine: Any, prompt: str) -> dict[int, float]:
    """The likeliest next tokens after a prompt and their probabilities, best first."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=SHOWN, ignore_eos=True)
    (entry,) = engine.generate(prompt, params)[0].logprobs
    return {token: math.exp(value) for token, value in entry.top.items()}


def draws(engine: Any, prompt: str, temperatures: Sequence[float], count: int, seed: int) -> dict[float, Counter[int]]:
    """The first token of `count` texts at each temperature: how often each one was drawn."""
    found = {}
    for temperature in temperatures:
        params = [
            SamplingParams(temperature=temperature, max_tokens=1, seed=seed + i, ignore_eos=True) for i in range(count)
        ]
        outputs = engine.generate([prompt] * count, params)
        found[temperature] = Counter(output.token_ids[0] for output in outputs)
    return found


def drawn(tokenizer: Any, likely: Mapping[int, float], found: Mapping[float, Counter[int]]) -> Any:
    """The model's probabilities of the first token beside how often each was drawn, a bar per temperature."""
    labels = [shown(tokenizer.decode([token], skip_special_tokens=False)) for token in likely]
    made = figure("Temperature decides how often the unlikely is taken", x="first token", y="share of the draws")
    made.add_bar(
        x=[*labels, "all others"], y=[*likely.values(), 1 - sum(likely.values())], marker_color=GREY,
        name="the model's probability",
        hovertemplate="%{x}: %{y:.1%}<br>softmax of the logits / temperature 1<extra></extra>",
    )  # fmt: skip
    for (temperature, counts), colour in zip(found.items(), COLOURS, strict=False):
        total = counts.total()
        made.add_bar(
            x=[*labels, "all others"], name=f"temperature {temperature:g}", marker_color=colour,
            y=[*(counts[t] / total for t in likely), 1 - sum(counts[t] for t in likely) / total],
            hovertemplate=f"%{{x}}: %{{y:.1%}}<br>drawn / {total} texts, temperature {temperature:g}<extra></extra>",
        )  # fmt: skip
    return made.update_yaxes(tickformat=".0%").update_layout(barmode="group", margin={"t": 90})


class Checks:
    """The exercises.

    Args:
        waits: prompt length to what was measured.
    """

    def __init__(self, waits: Mapping[int, Waits]) -> None:
        self.waits = waits

    @property
    def longest(self) -> Waits:
        """Of the longest prompt."""
        return self.waits[max(self.waits)]

    def seconds_for(self, answer: Any, tokens: int = 100) -> Verdict:
        """How long until `tokens` tokens of the longest prompt are there, seconds."""
        w = self.longest
        truth = (w.ttft_ms + (tokens - 1) * w.tpot_ms) / 1e3
        return number(
            answer, truth, within=0.05,
            because=f"The first token takes TTFT, and each of the {tokens - 1} others TPOT: {truth:.2f} s in all.",
            hint="Add the wait for the first token to the waits for all those after it.",
            traps=((truth * 1e3, "That is in milliseconds; seconds are asked for."),
                   (tokens * w.tpot_ms / 1e3, "That leaves the wait for the first token out.")),
        )  # fmt: skip

    def tokens_per_second(self, answer: Any) -> Verdict:
        """What one stream writes per second, once it writes (longest prompt)."""
        truth = 1e3 / self.longest.tpot_ms
        return number(
            answer, truth, within=0.05,
            because=f"One token every {self.longest.tpot_ms:.1f} ms is {truth:.1f} a second; TTFT has no part in it.",
            hint="How many times does TPOT fit into a second?",
            traps=((1 / self.longest.tpot_ms, "TPOT is in milliseconds."),
                   (1e3 / self.longest.ttft_ms, "That is how many first tokens fit into a second.")),
        )  # fmt: skip

    def same_text(self, answer: Any) -> Verdict:
        """What makes a text come out the same again: "seed", "temperature" or "nothing"."""
        return choice(
            answer, "seed",
            because="A draw is a function of the logits, the seed and the position. Same three, same token, at any "
            "temperature, whatever other requests run beside it.",
            hints={
                "temperature": "Temperature 0 repeats itself because nothing is drawn. What repeats a draw?",
                "nothing": "Run the cell of the draws twice and look at the bars: are they really random?",
            },
        )  # fmt: skip

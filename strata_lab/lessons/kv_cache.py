"""Notebook 08: what a text leaves behind in the cache, where it lies, who shares it, and how to make it smaller."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strata_lab.bench.workloads import text_tokens
from strata_lab.events import StateEvent
from strata_lab.lessons.checks import Verdict, choice, number
from strata_lab.lessons.measuring import Compared, Trace, applying, in_turn, prompt_rounds
from strata_lab.lessons.theme import BLUE, COLOURS, GREY, LEGEND_BELOW, ORANGE, figure
from strata_lab.sampling_params import SamplingParams

MB = 1e6
QUESTION_TOKENS = 8


def some_text(engine: Any, tokens: int, start: int = 0) -> list[int]:
    """`tokens` token ids of the project's English and Chinese text, from token `start` on."""
    source = text_tokens(engine.tokenizer, engine.model_config.vocab_size)
    return [source[(start + i) % len(source)] for i in range(tokens)]


def growth(engine: Any, prompt: Sequence[int], tokens: int) -> dict[float, float]:
    """Tokens of a text, prompt included, to the megabytes of the blocks it held: one point per step that decoded."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    with Trace(engine) as seen:
        engine.generate([list(prompt)], params)
    block_mb = engine.config.block_size * engine.stats().kv_bytes_per_token / MB
    held = [s.kv_blocks_used * block_mb for s in seen.decode_steps[:-1]]  # the last step gives them back
    return {len(prompt) + 1.0 + i: mb for i, mb in enumerate(held)}


@dataclass(frozen=True)
class Room:
    """How much of the cache some texts take, in tokens.

    Attributes:
        reserved: if each had room for the longest text that is allowed.
        held: in the blocks they have.
        filled: tokens that are really there.
    """

    reserved: int
    held: int
    filled: int


def room(engine: Any, state: StateEvent) -> Room:
    """Of the requests of a picture that hold blocks."""
    holders = [r for r in state.requests if r.blocks]
    return Room(
        reserved=len(holders) * engine.optimizations.max_model_len,
        held=len({b for r in holders for b in r.blocks}) * state.block_size,
        filled=sum(r.num_computed_tokens for r in holders),
    )


def rooms(found: Room) -> Any:
    """The three as bars."""
    made = figure("Room for texts that are still growing", x="tokens", height=230)
    rows = (
        ("reserved for the longest", found.reserved, GREY, "requests x max_model_len: what arrays of one size need"),
        ("blocks held", found.held, BLUE, "distinct blocks x block_size"),
        ("tokens that are there", found.filled, ORANGE, "sum of RequestView.num_computed_tokens"),
    )
    made.add_bar(
        y=[r[0] for r in rows], x=[r[1] for r in rows], orientation="h", marker_color=[r[2] for r in rows],
        text=[f"{r[1]}" for r in rows], textposition="outside", cliponaxis=False, customdata=[r[3] for r in rows],
        hovertemplate="%{y}: %{x} tokens<br>%{customdata}<extra></extra>",
    )  # fmt: skip
    return made.update_yaxes(autorange="reversed")


def second_question(engine: Any, document: Sequence[int]) -> float:
    """Ask two questions about a document; the wait for the first token of the second answer, milliseconds."""
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    engine.reset_prefix_cache()
    waits = []
    for i in range(2):
        question = some_text(engine, QUESTION_TOKENS, start=1000 + 100 * i)
        waits.append(engine.generate([[*document, *question]], params)[0].ttft_ms)
    return float(waits[1])


def asked_twice(engine: Any, document: Sequence[int], rounds: int | None = None) -> Compared:
    """`second_question` without and with the prefix cache, in turn."""
    sides = applying(engine, without={"prefix_cache": False}, with_prefix_cache={"prefix_cache": True})
    rounds = rounds or prompt_rounds(engine)
    return in_turn(sides, lambda: second_question(engine, document), rounds=rounds, unit="ms to the first token")


def perplexity(engine: Any, tokens: Sequence[int]) -> float:
    """How surprised the engine is by a text, as it computes it now; 1 is not at all."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    entries = engine.generate([list(tokens)], params)[0].prompt_logprobs
    known = [entry.logprob for entry in entries if entry is not None]
    return math.exp(-sum(known) / len(known))


@dataclass(frozen=True)
class Kept:
    """A way to keep the cache.

    Attributes:
        token_bytes: of a token that is kept.
        perplexity: of the same text.
        held: tokens of a text so far to the megabytes it held (`growth`); empty where it was not looked at.
    """

    token_bytes: int
    perplexity: float
    held: Mapping[float, float]


def ways(
    engine: Any, text: Sequence[int], settings: Mapping[str, Mapping[str, Any]], prompt: Sequence[int] = (),
    tokens: int = 0,
) -> dict[str, Kept]:  # fmt: skip
    """Judge settings by the same text; with a `prompt`, also by the memory that `tokens` more tokens take.

    The settings in force before are back afterwards.
    """
    before = {name: getattr(engine.optimizations, name) for changes in settings.values() for name in changes}
    found = {}
    for label, switch in applying(engine, **settings).items():
        switch()
        engine.reset_prefix_cache()
        held = growth(engine, prompt, tokens) if prompt else {}
        found[label] = Kept(engine.stats().kv_bytes_per_token, perplexity(engine, text), held)
    applying(engine, before=before)["before"]()
    return found


def prices(found: Mapping[str, Kept], title: str) -> Any:
    """Perplexity as a bar per setting."""
    made = figure(title, y="perplexity, less is better")
    made.add_bar(
        x=list(found), y=[k.perplexity for k in found.values()], text=[f"{k.perplexity:.1f}" for k in found.values()],
        textposition="outside", cliponaxis=False, marker_color=COLOURS[: len(found)],
        customdata=[k.token_bytes / 1e3 for k in found.values()],
        hovertemplate="%{x}: perplexity %{y:.2f}, %{customdata:.1f} kB a token<br>exp(- mean log probability of the "
        "text's tokens)<extra></extra>",
    )  # fmt: skip
    return made


def held(found: Mapping[str, Kept]) -> Any:
    """Memory of a growing text, a line per setting."""
    title = "A window bounds the memory of a text"
    made = figure(title, x="tokens of the text", y="MB held", height=380, legend=LEGEND_BELOW)
    for (label, kept), colour in zip(found.items(), COLOURS, strict=False):
        made.add_scatter(
            x=list(kept.held), y=list(kept.held.values()), name=label, mode="lines", line={"color": colour, "width": 3},
            hovertemplate=f"{label}, %{{x}} tokens: %{{y:.2f}} MB<br>StepEvent.kv_blocks_used x bytes of a block"
            "<extra></extra>",
        )  # fmt: skip
    return made.update_yaxes(rangemode="tozero")


class Checks:
    """The exercises.

    Args:
        token_bytes: of a token in the cache, as it is kept now.
        block_size: tokens of a block.
    """

    def __init__(self, token_bytes: int, block_size: int) -> None:
        self.token_bytes, self.block_size = token_bytes, block_size

    def texts_in(self, answer: Any, gigabytes: float = 4.0, tokens: int = 2000) -> Verdict:
        """How many texts of `tokens` tokens fit into `gigabytes` GB of cache."""
        truth = math.floor(gigabytes * 1e9 / (tokens * self.token_bytes))
        return number(
            answer, truth, within=0.05,
            because=f"Each takes {tokens * self.token_bytes / MB:.0f} MB, so {truth} fit. More would have to wait.",
            hint="First the bytes of one text, then how often they go into the memory there is.",
            traps=((truth / 1e3, "Check the units: a gigabyte is 1e9 bytes."),
                   (truth * tokens, "That is how many tokens fit. Each text has many of them.")),
        )  # fmt: skip

    def wasted(self, answer: Any) -> Verdict:
        """Slots that a text leaves empty in its last block, on average."""
        truth = (self.block_size - 1) / 2
        return number(
            answer, truth, within=0.1,
            because=f"Only the last block has gaps: 0 to {self.block_size - 1}, {truth:g} on average, however long the "
            "text. Smaller blocks waste less and need longer tables.",
            hint="All blocks but the last are full. How many slots of the last one are empty, at least and at most?",
            traps=((float(self.block_size), "A block with nothing in it would not have been taken."),),
        )  # fmt: skip

    def clock_first(self, answer: Any) -> Verdict:
        """What the cache finds when every prompt begins with the time of day: "nothing", "the rest" or "everything"."""
        return choice(
            answer, "nothing",
            because="A block is found by *all* tokens up to its end. One different token at the beginning, and every "
            "block after it is another block. Put what changes at the end.",
            hints={
                "the rest": "Keys and values of a token depend on all tokens before it. Is the rest still the same?",
                "everything": "The first tokens differ, so at least they must be computed.",
            },
        )  # fmt: skip

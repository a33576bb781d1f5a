"""Notebook 02: what a token is made of, where it lives, what it passes through, and who chooses it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from strata_lab.events import StateEvent
from strata_lab.lessons.by_hand import Call
from strata_lab.lessons.checks import Verdict, choice, number
from strata_lab.lessons.figures import BAR_HEIGHT, FRAME_HEIGHT
from strata_lab.lessons.first_token import shown
from strata_lab.lessons.theme import BLUE, COLOURS, GREY, figure

CANDIDATES = 5  # lines of the lens
SMALL = 0.02  # operators below this share of a step are drawn together
_CHIP = (
    "<span title='token {id}' style='display:inline-block;margin:2px;padding:2px 6px;border-radius:4px;"
    "border:1.5px solid {colour};font-family:var(--jp-code-font-family,monospace)'>{text}"
    "<br><small style='opacity:.75'>{id}</small></span>"
)
_SLOT = (
    "<i title='{title}' style='display:inline-block;width:.9em;height:.9em;margin:1px;border-radius:2px;"
    "border:1.5px solid {colour};background:{fill}'></i>"
)


def pieces(tokenizer: Any, token_ids: Sequence[int]) -> Any:
    """Tokens as chips: text above, number below. A space is drawn; bytes that are no whole character are in hex."""
    from IPython.display import HTML

    chips = []
    for i, token in enumerate(token_ids):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if "\N{REPLACEMENT CHARACTER}" in text:
            text = "-".join(f"{byte:02x}" for byte in tokenizer.token_bytes(token))
        chips.append(_CHIP.format(id=token, colour=COLOURS[i % len(COLOURS)], text=shown(text)))
    return HTML(f"<div style='line-height:1.3'>{''.join(chips)}</div>")


def slots(state: StateEvent) -> Any:
    """Where a request's tokens are: its blocks of the KV cache, slot by slot. For one request."""
    from IPython.display import HTML

    if not state.requests:
        return HTML("<p>No request is unfinished: all blocks are free again.</p>")
    (view,) = state.requests
    rows = []
    for place, block in enumerate(view.blocks):
        first = place * state.block_size
        row = ""
        for position in range(first, first + state.block_size):
            kind, colour = _slot_kind(position, view.num_prompt_tokens, view.num_computed_tokens)
            fill = "transparent" if kind == "free" else colour
            row += _SLOT.format(title=f"position {position}: {kind}", colour=colour, fill=fill)
        rows.append(f"<div><code>block {block:>4}</code> {row}</div>")
    told = (
        f"{html.escape(view.state)}: {view.num_computed_tokens} of {view.num_prompt_tokens + view.num_output_tokens} "
        f"tokens have keys and values, in {len(view.blocks)} of {state.num_blocks} blocks of {state.block_size} slots"
    )
    return HTML(f"<div>{''.join(rows) or '<div>no block yet</div>'}<small>{told}</small></div>")


def _slot_kind(position: int, num_prompt: int, num_computed: int) -> tuple[str, str]:
    if position >= num_computed:
        return "free", GREY
    return ("prompt", COLOURS[1]) if position < num_prompt else ("written by the model", COLOURS[0])


def lens(tokenizer: Any, probabilities: Tensor) -> Any:
    """How the winner comes up: probability of the final candidates if the model ended after each layer.

    `probabilities`: [layers, V], as `ByHand.lens` gives them.
    """
    layers = list(range(1, len(probabilities) + 1))
    made = figure("The answer forms on the way through the layers", x="layers passed", y="probability")
    best = probabilities.max(-1)
    favourites = [shown(tokenizer.decode([int(token)], skip_special_tokens=False)) for token in best.indices]
    for token, colour in zip(probabilities[-1].topk(CANDIDATES).indices.tolist(), COLOURS, strict=False):
        made.add_scatter(
            x=layers, y=probabilities[:, token].tolist(), mode="lines+markers", line={"color": colour},
            name=shown(tokenizer.decode([token], skip_special_tokens=False)), customdata=favourites,
            hovertemplate="after layer %{x}: %{y:.1%}<br>softmax(head(norm(state of this layer)))<br>likeliest here: "
            "%{customdata}<extra></extra>",
        )  # fmt: skip
    return made.update_yaxes(tickformat=".0%")


def settled_after(probabilities: Tensor) -> int:
    """After how many layers the final winner leads and goes on leading; [layers, V] -> 1 to layers."""
    leads = probabilities.argmax(-1) == probabilities[-1].argmax()
    behind = torch.nonzero(~leads)
    return 1 if not len(behind) else int(behind[-1]) + 2


def by_operator(calls: Sequence[Call]) -> dict[str, tuple[int, float]]:
    """Operator to how often it was called and its milliseconds in all, longest first."""
    found: dict[str, tuple[int, float]] = {}
    for call in calls:
        count, ms = found.get(call.operator, (0, 0.0))
        found[call.operator] = count + 1, ms + call.ms
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def operators(calls: Sequence[Call]) -> Any:
    """The operators of a step by the time they took together; the smallest are one bar."""
    found = by_operator(calls)
    total = sum(ms for _, ms in found.values())
    bars = {name: of for name, of in found.items() if of[1] >= SMALL * total}
    rest = [of for name, of in found.items() if name not in bars]
    if rest:
        bars["all others"] = sum(count for count, _ in rest), sum(ms for _, ms in rest)
    made = figure(
        f"{len(calls)} operator calls make one token",
        x="ms in one step",
        height=FRAME_HEIGHT + BAR_HEIGHT * len(bars) // 2,
    )
    made.add_bar(
        y=list(bars), x=[ms for _, ms in bars.values()], orientation="h", marker_color=BLUE,
        text=[f"{count} calls" for count, _ in bars.values()], textposition="outside", cliponaxis=False,
        hovertemplate="%{y}: %{x:.2f} ms, %{text}<br>sum of the host clock around each call / one step<extra></extra>",
    )  # fmt: skip
    return made.update_yaxes(autorange="reversed")


class Checks:
    """The exercises.

    Args:
        calls: operator calls of one decode step.
        num_layers: of the model.
        block_size: slots of a block.
    """

    def __init__(self, calls: Sequence[Call], num_layers: int, block_size: int) -> None:
        self.found, self.num_layers, self.block_size = by_operator(calls), num_layers, block_size

    def blocks(self, answer: Any, tokens: int = 100) -> Verdict:
        """Blocks that hold `tokens` tokens."""
        truth = -(-tokens // self.block_size)
        return number(
            answer, truth, within=0.0,
            because=f"{tokens} / {self.block_size} is {tokens / self.block_size:.2f}; a block is taken whole: {truth}.",
            hint="How many slots has a block in section 3? Can a request take part of a block?",
            traps=((tokens // self.block_size, "That leaves the last tokens without a slot."),
                   (tokens / self.block_size, "A request takes whole blocks only.")),
        )  # fmt: skip

    def products_per_layer(self, answer: Any) -> Verdict:
        """Matrix products of one layer in the textbook's order."""
        truth = self.found["linear"][0] / self.num_layers
        return number(
            answer, truth, within=0.0,
            because=f"{self.found['linear'][0]} calls of `linear` in {self.num_layers} layers: q, k, v, the projection "
            "behind attention, and the matrices of the MLP.",
            hint="The chart of section 5 tells the calls of `linear` in a whole step. How many layers share them?",
            traps=((self.found["linear"][0], "That is a whole step; the question is about one layer."),),
        )  # fmt: skip

    def who_decides(self, answer: Any) -> Verdict:
        """Who picks one token among the probabilities: "model", "sampler" or "scheduler"."""
        return choice(
            answer, "sampler",
            because="The model gives a number per word of the vocabulary, no more. One token is picked behind it.",
            hints={
                "model": "What does the model give at its end: a token, or a number for every token?",
                "scheduler": "The scheduler works before the model: it picks *requests*.",
            },
        )  # fmt: skip

"""Notebook 10: a mixture of experts: what is stored and what is read, who is chosen, and what a batch costs."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from strata_lab.events import ExpertEvent
from strata_lab.kernels import bind
from strata_lab.kernels.cpu.packing import pack
from strata_lab.lessons.checks import Verdict, choice, number
from strata_lab.lessons.theme import BLUE, GREY, ORANGE, figure
from strata_lab.quant import get_format
from strata_lab.sampling_params import SamplingParams
from strata_lab.telemetry.roofline import StepCost, forecast

WIDTH = 512  # of the experts that are timed alone, and of what goes into them
TIMED_TOKENS, CALLS, ROUNDS = 8, 8, 5


def cost(engine: Any) -> StepCost:
    """Bytes of the engine's model, from its geometry and formats."""
    on = engine.optimizations.as_dict()
    return forecast(engine.model_config, on["weight_format"], on["kv_cache_dtype"])


def stored_and_read(found: StepCost) -> Any:
    """What lies in memory and what one token reads of it, experts apart from the rest."""
    made = figure("All experts are stored, few are read", x="MB", height=230)
    experts = found.num_layers * found.expert_bytes / 1e6
    rest = found.dense_bytes / 1e6
    rows = {"stored": experts * found.num_experts, "read for one token": experts * found.experts_per_token}
    parts = (
        ("experts", BLUE, list(rows.values()), "layers x experts x bytes of one"),
        ("all others", GREY, [found.stored_bytes / 1e6 - rows["stored"], rest], "attention, router, norms, head"),
    )
    for name, colour, values, formula in parts:
        made.add_bar(
            y=list(rows), x=values, name=name, orientation="h", marker_color=colour,
            hovertemplate=f"%{{y}}, {name}: %{{x:.2f}} MB<br>{formula}<extra></extra>",
        )  # fmt: skip
    made.update_layout(barmode="stack")
    return made.update_yaxes(autorange="reversed")


def random_prompt(engine: Any, tokens: int, seed: int) -> list[int]:
    """Token ids drawn evenly from the vocabulary."""
    draw = random.Random(seed)
    return [draw.randrange(engine.model_config.vocab_size) for _ in range(tokens)]


def chosen(engine: Any, prompt: Sequence[int], tokens: int = 1) -> list[list[int]]:
    """How often a prompt and what follows it chose each expert, a list per layer; the engine must `watch_experts`."""
    before = engine.experts()
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=tokens, ignore_eos=True)
    engine.reset_prefix_cache()
    engine.generate([list(prompt)], params)
    return rows(engine.experts(), before)


def rows(event: ExpertEvent, before: ExpertEvent) -> list[list[int]]:
    """Choices between two readings, a list per layer."""
    counts = [now - then for now, then in zip(event.counts, before.counts, strict=True)]
    return [counts[i : i + event.num_experts] for i in range(0, len(counts), event.num_experts)]


def heat(counts: Sequence[Sequence[int]], title: str) -> Any:
    """Layers by experts: the share of a layer's choices that went to each expert."""
    shares = [[n / max(1, sum(layer)) for n in layer] for layer in counts]
    made = figure(title, x="expert", y="layer", height=140 + 26 * len(counts))
    made.add_heatmap(
        z=shares, customdata=counts, xgap=2, ygap=2, colorscale=((0.0, "rgba(128,128,128,0.12)"), (1.0, BLUE)),
        zmin=0.0, colorbar={"title": "share", "tickformat": ".0%"},
        hovertemplate="layer %{y}, expert %{x}: %{z:.1%}<br>%{customdata} choices / all of the layer "
        "(ExpertEvent.counts)<extra></extra>",
    )  # fmt: skip
    made.update_xaxes(showgrid=False, dtick=1)
    return made.update_yaxes(showgrid=False, autorange="reversed", dtick=1)


def busiest(counts: Sequence[Sequence[int]]) -> float:
    """Largest share of a layer's choices that one expert got."""
    return max(max(layer) / sum(layer) for layer in counts)


def distinct(engine: Any, sizes: Sequence[int], seed: int, rounds: int = 6) -> dict[float, float]:
    """Tokens that a step computes to the experts it needs per layer, mean over layers and prompts.

    A prompt of that many tokens is one step, so every expert that was chosen at all is read in it.
    """
    found = {}
    for size in sizes:
        steps = [chosen(engine, random_prompt(engine, size, seed + 1000 * size + i)) for i in range(rounds)]
        found[float(size)] = statistics.mean(sum(n > 0 for n in layer) for step in steps for layer in step)
    return found


def expected_distinct(num_experts: int, top_k: int, tokens: float) -> float:
    """Experts that are chosen at least once, if each token chose `top_k` of them at random."""
    return num_experts * (1 - (1 - top_k / num_experts) ** tokens)


def expected_by_share(counts: Sequence[Sequence[int]], top_k: int, tokens: float) -> float:
    """The same if experts are as popular as in `counts`, mean over layers: tokens choose alike, but not together."""

    def layer(row: Sequence[int]) -> float:
        return sum(1 - (1 - min(1.0, n * top_k / sum(row))) ** tokens for n in row)

    return statistics.mean(layer(row) for row in counts)


@dataclass(frozen=True)
class Crowding:
    """The same tokens and the same arithmetic through more or fewer experts.

    Attributes:
        ms: distinct experts to the best time of a call.
        expert_mb: of one expert's weights.
    """

    ms: dict[int, float]
    expert_mb: float


def crowding(device_type: str, num_experts: int, top_k: int, seed: int) -> Crowding:
    """Time the experts' operator alone: 8 tokens whose choices fall on few experts or on all, in turn."""
    draw = torch.Generator().manual_seed(seed)
    backend, device = ("triton", "cuda") if device_type == "cuda" else ("cpu", "cpu")
    matrices = [
        get_format("bf16").quantize((torch.randn(num_experts * rows, WIDTH, generator=draw) * 0.02).to(device))
        for rows in (2 * WIDTH, WIDTH)
    ]
    gate_up, down = [pack(m) for m in matrices] if backend == "cpu" else matrices
    dtype = torch.float32 if backend == "cpu" else torch.bfloat16
    x = torch.randn(TIMED_TOKENS, WIDTH, generator=draw).to(device, dtype)
    weights = torch.full((TIMED_TOKENS, top_k), 1.0 / top_k, device=device)
    run = bind(backend).moe_mlp
    counts = [n for n in (top_k, 2 * top_k, 4 * top_k, 8 * top_k) if n <= num_experts]
    best = dict.fromkeys(counts, float("inf"))
    for _ in range(ROUNDS):
        for count in counts:
            ids = (torch.arange(TIMED_TOKENS * top_k) % count).view(TIMED_TOKENS, top_k).to(device)
            best[count] = min(best[count], _call_ms(lambda ids=ids: run(x, gate_up, down, weights, ids), device))
    return Crowding(best, sum(m.nbytes for m in matrices) / num_experts / 1e6)


def _call_ms(call: Any, device: str) -> float:
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    wait()
    return (time.perf_counter() - started) * 1e3 / CALLS


def crowded(found: Crowding) -> Any:
    """Time of the operator against the experts that it had to read."""
    made = figure("Same tokens, same arithmetic, more experts", x="experts that 8 tokens chose", y="ms per call")
    made.add_bar(
        x=[str(n) for n in found.ms], y=list(found.ms.values()), marker_color=ORANGE,
        text=[f"{ms:.2f}" for ms in found.ms.values()], textposition="outside", cliponaxis=False,
        customdata=[n * found.expert_mb for n in found.ms],
        hovertemplate="%{x} experts: %{y:.3f} ms, %{customdata:.1f} MB to read<br>best of its rounds<extra></extra>",
    )  # fmt: skip
    return made.update_xaxes(type="category")


class Checks:
    """The exercises.

    Args:
        found: bytes of the model.
    """

    def __init__(self, found: StepCost) -> None:
        self.found = found

    def times_less(self, answer: Any) -> Verdict:
        """How many times as many expert bytes are stored as one token reads."""
        truth = self.found.num_experts / self.found.experts_per_token
        return number(
            answer, truth, within=0.02,
            because=f"{self.found.num_experts} are stored and {self.found.experts_per_token} are read: {truth:g} "
            "times. The rest of the model is read by every token as before.",
            hint="How many experts has a layer, and how many does a token take?",
            traps=((1 / truth, "That is the share that is read. How many times as much is stored?"),
                   (float(self.found.num_experts), "A token takes more than one of them.")),
        )  # fmt: skip

    def for_four(self, answer: Any) -> Verdict:
        """Distinct experts per layer that four tokens need if they choose at random."""
        experts, k = self.found.num_experts, self.found.experts_per_token
        truth = expected_distinct(experts, k, 4)
        return number(
            answer, truth, within=0.05,
            because=f"An expert is left out by one token with chance {1 - k / experts:.3f}, by all four with that to "
            f"the fourth. {experts} times the rest is {truth:.2f}.",
            hint="With which chance does *no* token choose a given expert? Then count those that are chosen.",
            traps=((4.0 * k, "That would be so if no two tokens ever met at the same expert."),),
        )  # fmt: skip

    def where(self, answer: Any) -> Verdict:
        """Where a mixture saves most reading per token: "one stream", "many streams" or "a long prompt"."""
        return choice(
            answer, "one stream",
            because="A single token reads its few experts. With many tokens in a step nearly all experts are read, as "
            "in a dense model of that size, but each token still *computes* only with its own.",
            hints={
                "many streams": "Look at section 3: how many experts does a step of 32 tokens read?",
                "a long prompt": "A prompt is many tokens in one step. Look at section 3.",
            },
        )  # fmt: skip

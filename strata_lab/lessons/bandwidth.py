"""Notebook 03: bytes that a decode step reads, the time that reading takes at least, and what other cards could do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from strata_lab.lessons.checks import Verdict, number
from strata_lab.lessons.theme import BLUE, COLOURS, GREY, ORANGE, figure
from strata_lab.models.presets import preset_config
from strata_lab.telemetry.cards import CARDS, READ_SHARE, Card
from strata_lab.telemetry.roofline import StepCost, forecast, roofline_tok_s

CHOSEN = ("l4", "rtx3090", "rtx4090-48g", "rtx5090", "h100", "h200")
ARTICLE_MODEL, ARTICLE_CONTEXT = "qwen3.8-flash", 512
EXERCISE_PARAMETERS, EXERCISE_BITS = 7e9, 4.5  # a model people run at home, in a common file format


def parts_of_step(engine: Any) -> dict[str, int]:
    """What a decode step of one request reads beside the KV cache: part to bytes, from the tensors in memory."""
    weights, total = engine.parts.weights, engine.stats().bytes_per_step
    attention = sum(layer.attention.qkv.nbytes + layer.attention.out.nbytes for layer in weights.layers)
    head = weights.head.nbytes
    return {"MLP and norms": total - attention - head, "attention": attention, "output head": head}


def step_parts(parts: Mapping[str, int], kv_bytes: int, title: str) -> Any:
    """One bar: the bytes of a step, cut by what they are."""
    made = figure(title, x="MB read per token", height=200)
    for (name, nbytes), colour in zip({**parts, "KV cache": kv_bytes}.items(), COLOURS, strict=False):
        made.add_bar(
            y=[""], x=[nbytes / 1e6], name=name, orientation="h", marker_color=colour,
            hovertemplate=f"{name}: %{{x:.2f}} MB<br>sum of the sizes of its tensors / one reading<extra></extra>",
        )  # fmt: skip
    return made.update_layout(barmode="stack")


def floor_ms(nbytes: float, bytes_s: float) -> float:
    """What reading takes at least: bytes / bandwidth, in milliseconds."""
    return nbytes / bytes_s * 1e3


def bytes_by_format(engine: Any, formats: Sequence[str]) -> dict[str, int]:
    """What a decode step of the engine's model would read in each weight format; arithmetic on the geometry."""
    kv = engine.parts.kv.kv_format
    return {name: forecast(engine.model_config, name, kv).weight_bytes() for name in formats}


def formats(nbytes: Mapping[str, int], measured_ms: Mapping[str, float], bytes_s: float) -> Any:
    """Measured milliseconds of a step against the bytes it reads, above the floor that the memory sets."""
    made = figure("Fewer bytes, faster steps; the memory sets the floor", x="MB read per step", y="ms per step")
    most = max(nbytes.values())
    made.add_scatter(
        x=[0, most / 1e6], y=[0, floor_ms(most, bytes_s)], mode="lines", name="floor of this memory",
        line={"color": GREY, "dash": "dash", "width": 2},
        hovertemplate=f"%{{x:.0f}} MB: %{{y:.2f}} ms<br>bytes / {bytes_s / 1e9:.1f} GB/s, measured here<extra></extra>",
    )  # fmt: skip
    made.add_scatter(
        x=[nbytes[n] / 1e6 for n in measured_ms], y=list(measured_ms.values()), mode="markers+text",
        name="measured here", text=list(measured_ms), textposition="top center", cliponaxis=False,
        marker={"size": 12, "color": BLUE},
        customdata=[floor_ms(nbytes[n], bytes_s) / ms for n, ms in measured_ms.items()],
        hovertemplate="%{text}: %{y:.2f} ms for %{x:.0f} MB<br>MBU = floor / measured %{customdata:.0%}<extra></extra>",
    )  # fmt: skip
    return made.update_yaxes(rangemode="tozero")


def batches(measured_tok_s: Mapping[int, float], weight_bytes: int, kv_bytes: int, bytes_s: float) -> Any:
    """Tokens per second of all streams against how many there are, below what the memory would allow."""
    made = figure("One reading of the weights serves every stream", x="streams", y="tok/s, all streams together")
    allowed = [roofline_tok_s(weight_bytes + n * kv_bytes, bytes_s, n) for n in measured_tok_s]
    single = [n * next(iter(measured_tok_s.values())) / next(iter(measured_tok_s)) for n in measured_tok_s]
    lines = (
        ("memory would allow", allowed, {"color": GREY, "dash": "dash"}, "streams x bandwidth / bytes of a step"),
        ("if streams cost nothing", single, {"color": ORANGE, "dash": "dot"}, "streams x speed of one, measured"),
        (
            "measured here",
            list(measured_tok_s.values()),
            {"color": BLUE},
            "tokens / time of the decode steps, best round",
        ),
    )
    for name, values, line, formula in lines:
        made.add_scatter(
            x=list(measured_tok_s), y=values, mode="lines+markers", name=name, line=line,
            hovertemplate=f"%{{x}} streams: %{{y:.0f}} tok/s<br>{formula}<extra></extra>",
        )  # fmt: skip
    return made.update_yaxes(rangemode="tozero").update_xaxes(tickvals=list(measured_tok_s))


def context_bytes(weight_bytes: int, kv_token_bytes: int) -> Any:
    """Bytes of a step against the context: weights stay, keys and values grow. Arithmetic, not measured."""
    meet = weight_bytes / kv_token_bytes
    contexts = [meet * i / 10 for i in range(16)]
    made = figure("Weights stay, the KV cache grows", x="tokens of context", y="MB read per token")
    for name, colour, per_token, fixed in (("weights", BLUE, 0, weight_bytes), ("KV cache", ORANGE, kv_token_bytes, 0)):
        made.add_scatter(
            x=contexts, y=[(fixed + per_token * c) / 1e6 for c in contexts], name=name, line={"color": colour},
            mode="lines",
            hovertemplate=f"{name} at %{{x:.0f}} tokens: %{{y:.1f}} MB<br>computed from tensor sizes / not measured"
            "<extra></extra>",
        )  # fmt: skip
    return made


def article_cost() -> StepCost:
    """Bytes of the articles' mixture in FP8, from its geometry."""
    config = preset_config(ARTICLE_MODEL)
    assert config is not None
    return forecast(config, "fp8", "fp8")


def card_ceilings(step_bytes: float) -> dict[str, float]:
    """Card to the most tokens per second of one stream that its memory allows; from data sheets, not measured."""
    return {CARDS[key].name: roofline_tok_s(step_bytes, CARDS[key].read_bytes_s) for key in CHOSEN}


def cards(ceilings: Mapping[str, float]) -> Any:
    """`card_ceilings` as bars."""
    made = figure("The ceiling of one stream on other cards (computed)", x="tok/s at most", height=360)
    made.add_bar(
        y=list(ceilings), x=list(ceilings.values()), orientation="h", marker_color=BLUE, cliponaxis=False,
        text=[f"{value:.0f}" for value in ceilings.values()], textposition="outside",
        hovertemplate=f"%{{y}}: %{{x:.0f}} tok/s<br>data sheet x {READ_SHARE:.1%} / bytes of a step; arithmetic"
        "<extra></extra>",
    )  # fmt: skip
    return made.update_yaxes(autorange="reversed")


class Checks:
    """The exercises.

    Args:
        nbytes: weight format to bytes of a step.
        bytes_s: bandwidth measured here.
        kv_token_bytes: of one token of context, all layers.
    """

    def __init__(self, nbytes: Mapping[str, int], bytes_s: float, kv_token_bytes: int) -> None:
        self.nbytes, self.bytes_s, self.kv_token_bytes = nbytes, bytes_s, kv_token_bytes

    def most_tok_s(self, answer: Any, weight_format: str = "int8") -> Verdict:
        """Most tokens per second of one stream in a format, on this machine, at short context."""
        truth = roofline_tok_s(self.nbytes[weight_format], self.bytes_s)
        return number(
            answer, truth, within=0.05,
            because=f"{self.bytes_s / 1e9:.1f} GB/s over {self.nbytes[weight_format] / 1e6:.0f} MB a token: at most "
            f"{truth:.0f} tok/s.",
            hint=f"Point at the measured {weight_format}: how many MB is a token? How often do they fit into what this "
            "memory reads in a second?",
            traps=((1e3 / truth, "That is the floor in milliseconds; how many of those fit into a second?"),
                   (truth / 1e3, "Mind the units: a GB is a thousand MB.")),
        )  # fmt: skip

    def meeting_context(self, answer: Any, weight_format: str = "int4") -> Verdict:
        """Tokens of context at which a step reads as many bytes of KV cache as of weights."""
        truth = self.nbytes[weight_format] / self.kv_token_bytes
        return number(
            answer, truth, within=0.1,
            because=f"{self.nbytes[weight_format] / 1e6:.0f} MB of weights; {self.kv_token_bytes / 1e3:.1f} KB each: "
            f"{truth:.0f} tokens. From there on the cache costs more than the weights.",
            hint="Where do the two lines of section 6 cross?",
        )  # fmt: skip

    def at_home(self, answer: Any) -> Verdict:
        """Most tokens per second of a dense model of `EXERCISE_PARAMETERS` on the articles' card."""
        card: Card = CARDS["rtx4090-48g"]
        nbytes = EXERCISE_PARAMETERS * EXERCISE_BITS / 8
        truth = roofline_tok_s(nbytes, card.bandwidth_bytes_s)
        return number(
            answer, truth, within=0.1,
            because=f"{nbytes / 1e9:.2f} GB each, {card.bandwidth_bytes_s / 1e9:.0f} GB/s on paper: {truth:.0f} tok/s; "
            f"{truth * READ_SHARE:.0f} at the speed of plain reading. Who reports more counts something else.",
            hint="Bytes of a token first: parameters times bits, over 8.",
            traps=((truth / 8, "Bits are not bytes: there are 8 in one."),
                   (truth * EXERCISE_BITS / 8, "That is with a whole byte per weight.")),
        )  # fmt: skip


def tok_s(measure_ms: Callable[[int], float], streams: Sequence[int], rounds: int = 2) -> dict[int, float]:
    """Streams to tokens per second of all of them: the best of rounds that alternate, forward and backward.

    `measure_ms`: streams to milliseconds of a step.
    """
    found: dict[int, list[float]] = {n: [] for n in streams}
    for i in range(rounds):
        for n in streams if i % 2 == 0 else reversed(streams):
            found[n].append(n * 1e3 / measure_ms(n))
    return {n: max(values) for n, values in found.items()}

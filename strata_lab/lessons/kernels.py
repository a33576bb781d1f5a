"""Notebook 11: a reader's operator beside its contract, and what it does to a step once it runs in the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from strata_lab.kernel_lab import SwapReport, spec_of
from strata_lab.lessons.checks import ASK, Verdict, choice, number
from strata_lab.lessons.lesson import Lesson
from strata_lab.lessons.measuring import Compared, decode_ms, in_turn
from strata_lab.lessons.theme import BLUE, GREY, ORANGE, figure

LEAST = 1e-4  # of the allowed error: what is shown of a function that is exact
Function = Callable[..., Any]


def contract(op: str) -> str:
    """What an operator's SPEC holds, as Markdown: its formula, its cases, its tolerance."""
    spec = spec_of(op)
    names = ", ".join(f"`{case.name}`" for case in spec.cases())
    allowed = "; ".join(
        f"{str(dtype).removeprefix('torch.')}: {rtol:g} relative, {atol:g} absolute"
        for dtype, (rtol, atol) in spec.tolerance.items()
    )
    module = __import__(spec.ref.__module__, fromlist=["__doc__"])
    first = str(module.__doc__).splitlines()[0]
    return f"**{first}**\n\nTried on: {names}.\n\nAllowed difference from the reference in float64: {allowed}."


def margins(op: str, fn: Function, device: torch.device) -> dict[str, float]:
    """Case of the SPEC to the largest error of `fn`, as a multiple of what is allowed there; above 1 it is refused.

    For operators with one result and no cache; on each case's own numbers, float32.
    """
    spec, found = spec_of(op), {}
    for case in spec.cases():
        got = fn(**case.make(device))
        exact = {n: x.double() if _floats(x) else x for n, x in case.make(device).items()}
        want = spec.ref(**exact)
        rtol, atol = spec.tolerance[got.dtype]
        error = (got.double() - want).abs() / (atol + rtol * want.abs())
        found[case.name] = float(error.max())
    return found


def _floats(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def judged(by_name: Mapping[str, Mapping[str, float]]) -> Any:
    """Error of some functions on every case, in units of what is allowed, log scale."""
    made = figure("Each function against its contract", x="largest error / allowed error", height=380)
    colours = (BLUE, ORANGE, GREY)
    for (name, cases), colour in zip(by_name.items(), colours, strict=False):
        made.add_scatter(
            x=[max(LEAST, value) for value in cases.values()], y=list(cases), name=name, mode="markers",
            marker={"color": colour, "size": 12, "symbol": "circle" if colour == BLUE else "x"},
            hovertemplate=f"{name}, case %{{y}}: %{{x:.3g}} times what is allowed<br>|got - reference| / (atol + rtol "
            "|reference|), largest element<extra></extra>",
        )  # fmt: skip
    made.add_vline(x=1.0, line={"color": GREY, "dash": "dash"}, annotation_text="refused beyond")
    return made.update_xaxes(type="log").update_yaxes(autorange="reversed")


@dataclass(frozen=True)
class Effect:
    """What a swapped function does to a decode step.

    Attributes:
        found: ms per step, built-in and swapped.
        report: of the swap.
    """

    found: Compared
    report: SwapReport

    @property
    def predicted_ms(self) -> float:
        """The built-in's step, and the difference per call as often as it is called."""
        more_us = self.report.calls_per_step * (self.report.us - self.report.built_in_us)
        return self.found.best(BUILT_IN) + more_us / 1e3


BUILT_IN, SWAPPED = "built-in", "yours"


def effect(lesson: Lesson, op: str, fn: Function, rounds: int = 2) -> Effect:
    """Milliseconds of a decode step with the built-in and with `fn`, in turn; `fn` is in force afterwards.

    Raises:
        ValueError: `fn` was refused.
    """
    engine, reports = lesson.engine, []

    def swap(wanted: Function | None) -> None:
        report = engine.swap_op(op, wanted)
        if not report.ok:
            raise ValueError(str(report))
        reports.append(report)

    sides = {BUILT_IN: lambda: swap(None), SWAPPED: lambda: swap(fn)}
    found = in_turn(sides, lambda: decode_ms(engine, 0.2 * lesson.seconds), rounds=rounds, unit="ms per step")
    swap(fn)
    return Effect(found, reports[-1])


def row_operator(kernel: Any) -> Function:
    """An `rms_norm` that launches a Triton kernel, one program per row: `kernel[grid](x, weight, y, eps, D, BLOCK)`."""

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y = torch.empty_like(rows)
        block = 1 << (rows.shape[1] - 1).bit_length()
        kernel[(rows.shape[0],)](rows, weight, y, eps, rows.shape[1], BLOCK=block)
        return y.view(x.shape)

    return rms_norm


class Checks:
    """The exercises.

    Args:
        lesson: whose engine is asked.
        effect: of the reader's norm.
    """

    def __init__(self, lesson: Lesson, effect: Effect) -> None:
        self.lesson, self.effect = lesson, effect

    def bytes_of_a_row(self, answer: Any) -> Verdict:
        """Bytes that the norm of one row must move, float32."""
        width = self.lesson.engine.model_config.hidden_size
        x, weight = torch.empty(1, width), torch.empty(width)
        truth = spec_of("rms_norm").bytes_moved(x, weight, 1e-5)
        return number(
            answer, truth, within=0.01,
            because=f"x is read, y is written and the weight is read: 3 rows of {width} numbers of 4 bytes, {truth} "
            "bytes.",
            hint="Which arrays does a call touch, and how many bytes has a float32?",
            traps=((truth / 3, "That is one array. Count all that are read or written."),
                   (truth * 2 / 3, "Is the weight read too?"),
                   (truth / 4, "Those are numbers; bytes are asked for.")),
        )  # fmt: skip

    def share_of_step(self, answer: Any) -> Verdict:
        """Percent of a step that the built-in norms take."""
        report = self.effect.report
        truth = 100 * report.calls_per_step * report.built_in_us / 1e3 / self.effect.found.best(BUILT_IN)
        return number(
            answer, truth, within=0.15,
            because=f"{report.calls_per_step} calls of {report.built_in_us:.1f} us are {truth:.1f}% of the step. Even "
            "a norm that took no time at all could not win more than that.",
            hint="Calls per step times microseconds per call, over the milliseconds of a step. Mind the units.",
            traps=((truth / 100, "That is the share; percent is asked for."),
                   (truth / report.calls_per_step, "There is more than one norm in a step.")),
        )  # fmt: skip

    def in_place(self, answer: Any) -> Verdict:
        """What becomes of a norm that is right, but writes its result into x: "accepted" or "refused"."""
        return choice(
            answer, "refused",
            because="The residual stream still needs x after the norm. The contract says that arguments are left "
            "alone, and the judge compares them before and after.",
            hints={"accepted": "Where does the sum x + attention(norm(x)) take its x from?"},
        )  # fmt: skip

    def silu_mul(self, answer: Any) -> Verdict:
        """The reader's `silu_mul(gate, up)`, judged by its SPEC and run in the engine."""
        if answer is None:
            return Verdict(None, ASK)
        if not callable(answer):
            return Verdict(False, f"`{answer!r}` is not a function; `def` one and give its name.")
        engine = self.lesson.engine
        report = engine.swap_op("silu_mul", answer)
        if not report.ok:
            return Verdict(False, f"Refused: {report.reason}")
        engine.swap_op("silu_mul", None)
        return Verdict(True, f"It ran in the engine, {report.calls_per_step} times a step.")

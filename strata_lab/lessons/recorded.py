"""Notebook 05: what Python costs between operators, and what is left of it when the step is recorded and replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from strata_lab.lessons.by_hand import ByHand
from strata_lab.lessons.checks import Verdict, choice, number
from strata_lab.lessons.measuring import Compared, Trace, decode_ms, in_turn
from strata_lab.lessons.theme import BLUE, GREY, figure

OFF, ON = "from Python", "recorded"


def why_not(engine: Any) -> str:
    """Why a step cannot be recorded here; empty where it can."""
    text: str = engine.explain()["cuda_graph"]
    return text if text.startswith("No effect") else ""


def sides(engine: Any) -> dict[str, Callable[[], object]]:
    """Both ways of running a step, for `in_turn`."""
    return {OFF: lambda: engine.apply(cuda_graph=False), ON: lambda: engine.apply(cuda_graph=True)}


def num_calls(engine: Any) -> int:
    """Operator calls of one decode step, as the engine composes its layers by default (fused)."""
    hand = ByHand(engine, fused=True)
    hand.feed([0, 1])
    hand.feed([2])
    return len(hand.calls)


def both_ways(engine: Any, seconds: float, rounds: int = 4, batch: int = 1) -> Compared:
    """Milliseconds of a step from Python and recorded, in turn; what each did last is kept in `extra` as steps."""
    kept: dict[str, Any] = {}
    label = OFF
    switches = sides(engine)

    def switching(name: str) -> Callable[[], None]:
        def do() -> None:
            nonlocal label
            label = name
            switches[name]()

        return do

    def measure() -> float:
        with Trace(engine) as seen:
            ms = decode_ms(engine, seconds, batch=batch)
        kept[label] = seen.decode_steps
        return ms

    found = in_turn({name: switching(name) for name in switches}, measure, rounds=rounds, unit="ms per step")
    found.extra.update(kept)
    return found


def saved(by_batch: Mapping[int, Compared]) -> Any:
    """Both ways at several batch sizes, and above each pair what recording takes off."""
    made = figure("The same milliseconds off a step, however long it is", x="streams", y="ms per step")
    labels = [str(n) for n in by_batch]
    for name, colour in ((OFF, GREY), (ON, BLUE)):
        made.add_bar(
            x=labels, y=[found.best(name) for found in by_batch.values()], name=name, marker_color=colour,
            text=[f"{found.best(name):.1f}" for found in by_batch.values()], textposition="outside", cliponaxis=False,
            hovertemplate=f"%{{x}} streams, {name}: %{{y:.2f}} ms<br>streams x time / tokens, best of its rounds"
            "<extra></extra>",
        )  # fmt: skip
    return made.update_layout(barmode="group").update_xaxes(type="category")


def off_a_step(found: Compared) -> float:
    """Milliseconds that recording takes off a step: best from Python less best recorded."""
    return found.best(OFF) - found.best(ON)


def told(by_batch: Mapping[int, Compared]) -> str:
    """What recording took off at each batch size, as a sentence; says so where other programs drown the difference."""
    parts = []
    for n, found in by_batch.items():
        less = off_a_step(found)
        share = f"{less:.2f} ms, {less / found.best(OFF):.0%} of the step" if less > 0 else "less than the noise here"
        parts.append(f"{n} stream{'s' * (n > 1)}: {share}")
    return "; ".join(parts)


class Checks:
    """The exercises.

    Args:
        found: both ways, one stream.
        calls: operator calls of a step.
    """

    def __init__(self, found: Compared, calls: int) -> None:
        self.found, self.calls = found, calls

    def per_call_us(self, answer: Any) -> Verdict:
        """Microseconds that calling one operator from Python costs."""
        truth = off_a_step(self.found) / self.calls * 1e3
        return number(
            answer, truth, within=0.1,
            because=f"{off_a_step(self.found):.2f} ms / {self.calls} calls = {truth:.1f} µs for arguments, checks, "
            "looking up the function, and memory for the result.",
            hint="Section 2 says how much shorter a recorded step is, section 1 how many calls it makes.",
            traps=((truth / 1e3, "That is in milliseconds."),
                   (self.found.best(OFF) / self.calls * 1e3, "That is the whole step; what recording saves counts.")),
        )  # fmt: skip

    def deeper_model(self, answer: Any, factor: int = 4) -> Verdict:
        """Milliseconds that recording would take off a model with `factor` times the layers."""
        truth = factor * off_a_step(self.found)
        return number(
            answer, truth, within=0.15,
            because=f"Every layer makes the same calls, so {factor} times the layers cost {factor} times the Python: "
            f"{truth:.1f} ms. How large the matrices are makes no difference to it.",
            hint="What does a layer more add: calls, bytes, or both? Which of them does recording save?",
            traps=((off_a_step(self.found), "That is this model's; the other one makes more calls."),),
        )  # fmt: skip

    def gains_most(self, answer: Any) -> Verdict:
        """Whose speed recording raises most: "small model", "large model" or "same"."""
        off, on = self.found.best(OFF), self.found.best(ON)
        return choice(
            answer, "small model",
            because=f"What is saved depends on the number of calls only. Here it was {1 - on / off:.0%} of a step of "
            f"{off:.1f} ms; of a step of {10 * off:.0f} ms it would be a tenth of that share.",
            hints={
                "large model": "A large model's step is longer: it reads more. Does recording make reading faster?",
                "same": "The milliseconds saved may be the same. Are they the same share of the step?",
            },
        )  # fmt: skip

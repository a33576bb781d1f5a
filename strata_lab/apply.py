"""What `LLMEngine.apply` answers: per field, what happened and the value now in force. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["applied", "rebuilt", "refused", "unchanged"]


@dataclass(frozen=True, slots=True)
class FieldResult:
    """The answer for one field.

    Attributes:
        status: "applied" between two steps, "rebuilt" after weights or pools were made anew, "refused" with nothing
            changed, "unchanged" when it already had that value.
        value: the value now in force.
        reason: why it was refused, or what it means on this machine; may be empty.
    """

    status: Status
    value: Any
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ApplyReport:
    """Answers of one `apply` call.

    Attributes:
        results: field name to answer.
        build_ms: time spent building what the change needed, while the engine went on.
        swap_ms: time the engine stood still.
    """

    results: Mapping[str, FieldResult]
    build_ms: float = 0.0
    swap_ms: float = 0.0

    @property
    def ok(self) -> bool:
        """Nothing was refused."""
        return all(r.status != "refused" for r in self.results.values())

    def __str__(self) -> str:
        return "\n".join(
            f"{name}: {r.status}, now {r.value!r}" + (f" ({r.reason})" if r.reason else "")
            for name, r in self.results.items()
        )


@dataclass(frozen=True, slots=True)
class Fallback:
    """Something asked for that this machine or model cannot do, and what is done instead.

    Attributes:
        feature: the toggle or option.
        reason: why, and what runs in its place.
    """

    feature: str
    reason: str

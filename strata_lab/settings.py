"""What a setting is: its legal values, how they are checked, what the errors say. Which there are: `config.py`."""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


class ConfigError(ValueError):
    """A setting is wrong. The message names the value, the rule and a value that works."""


class RequestError(ValueError):
    """A request cannot be served as asked. The message names the value, the rule and a value that works."""


@dataclass(frozen=True)
class Toggle:
    """What is known about one field of `Optimizations` (derived, see `toggles()`).

    Attributes:
        name: field name, also the CLI flag (with dashes) and the widget label.
        topic: what it is about, the heading that it stands under in the panel.
        doc: one sentence for help texts and tooltips.
        kind: "bool", "choice", "int" or "float".
        choices: legal values of a choice, off value first; empty for other kinds.
        minimum, maximum: inclusive bounds of a number; None where there is none.
        off: the value in `Optimizations.none()`.
        default: the value in `Optimizations()`.
        cost: "live" (a swap between two steps) or "rebuild" (weights or pools are rebuilt).
        lossless: whether greedy tokens are unchanged by it.
        optional: whether None is legal; it then means "decided at load time".
    """

    name: str
    topic: str
    doc: str
    kind: Literal["bool", "choice", "int", "float"]
    choices: tuple[str, ...]
    minimum: float | None
    maximum: float | None
    off: Any
    default: Any
    cost: Literal["live", "rebuild"]
    lossless: bool
    optional: bool

    def check(self, value: Any) -> Any:
        """Return `value` in the field's type, or raise `ConfigError` naming a value that works."""
        if value is None and self.optional:
            return None
        if self.kind == "bool":
            if isinstance(value, bool):
                return value
            raise ConfigError(f"{self.name}={value!r} must be True or False; try {self.default}")
        if self.kind == "choice":
            if value in self.choices:
                return value
            raise ConfigError(
                f"{self.name}={value!r} must be one of {', '.join(self.choices)}; try {self.choices[0]!r}"
            )
        return self._check_number(value)

    def _check_number(self, value: Any) -> int | float:
        example = self.default if self.default is not None else self.minimum
        whole = self.kind == "int"
        is_number = isinstance(value, int) or (not whole and isinstance(value, float) and math.isfinite(value))
        if isinstance(value, bool) or not is_number:
            raise ConfigError(f"{self.name}={value!r} must be a {'whole ' if whole else ''}number; try {example}")
        if self.minimum is not None and value < self.minimum:
            raise ConfigError(f"{self.name}={value} must be at least {self.minimum:g}; try {example}")
        if self.maximum is not None and value > self.maximum:
            raise ConfigError(f"{self.name}={value} must be at most {self.maximum:g}; try {example}")
        return int(value) if whole else float(value)


def toggle(
    doc: str,
    default: Any,
    off: Any,
    *,
    topic: str,
    cost: str = "live",
    lossless: bool = True,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    number: str = "",
    optional: bool = False,
) -> Any:
    """Declare a field of `Optimizations`; the arguments are the attributes of `Toggle`."""
    kind = "choice" if choices else (number or "bool")
    meta = {"topic": topic, "doc": doc, "kind": kind, "choices": choices, "minimum": minimum, "maximum": maximum,
            "off": off, "cost": cost, "lossless": lossless, "optional": optional}  # fmt: skip
    return field(default=default, metadata={"toggle": meta})


def check_names(given: Mapping[str, Any], known: list[str], what: str) -> None:
    """Raise `ConfigError` for the first name in `given` that is not in `known`, with the nearest match."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"unknown {what} {name!r}; {hint}")


def check_whole(name: str, value: Any, minimum: int, example: int) -> None:
    """Raise `ConfigError` unless `value` is a whole number of at least `minimum`; `example` is one that works."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(f"{name}={value!r} must be a whole number of at least {minimum}; try {example}")


def check_size(name: str, value: Any) -> None:
    """Raise `ConfigError` unless `value` is a number of GiB, 0 or more."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise ConfigError(f"{name}={value!r} must be a number of GiB, at least 0; try 4")


def attribute_docs(cls: type) -> dict[str, str]:
    """Field name to its text in the class docstring's "Attributes:" section; names may share a line with commas."""
    section = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2]
    docs: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", section.split("\n\n")[0].rstrip()):
        names, _, text = entry.strip().partition(": ")
        docs |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return docs

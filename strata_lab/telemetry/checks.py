"""One line of a report on a machine: what was looked at, what was found, why that is so, what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        section: heading it belongs under.
        name: what was looked at.
        value: what was found, measured where it can be.
        verdict: "ok", "warn" (works, but slower or unproven) or "fail" (does not work).
        fix: what to do about it; empty when ok.
        cause: why it is so; may be empty.
    """

    section: str
    name: str
    value: str
    verdict: Verdict = "ok"
    fix: str = ""
    cause: str = ""

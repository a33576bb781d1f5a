"""Where the milliseconds of each step went: one stacked bar per step, split by cause, and the means beside it.

Steps arrive as append-only binary records; `history` holds the latest for views that open late.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import traitlets as t

from strata_widgets._base import StrataWidget, load_style, load_view

CAUSES = ("schedule", "weights", "kv", "compute", "sample", "commit", "host")
STEP = struct.Struct(f"<{4 + len(CAUSES)}d")  # step, whole ms, prefill tokens, decode tokens, ms of each cause


def pack_steps(steps: Iterable[Sequence[float]]) -> bytes:
    """Steps `(step, duration_ms, num_prefill_tokens, num_decode_tokens, *ms of CAUSES)` as little-endian float64."""
    return b"".join(STEP.pack(*step) for step in steps)


class StepTimeline(StrataWidget):
    """A chart of steps.

    Records: `{steps: count}` with one buffer as `pack_steps` makes it; steps rise from record to record.

    Traits:
        causes: `{key, label, tip}` per cause, in the order of `CAUSES`; `tip` is its formula.
        history: the latest steps, as `pack_steps` makes them.
        note: what is not known here, one sentence; empty where everything is.
    """

    _esm = load_view(__path__[0])
    _css = load_style(__path__[0])
    causes = t.List(t.Dict()).tag(sync=True)
    history = t.Bytes(b"").tag(sync=True)
    note = t.Unicode("").tag(sync=True)

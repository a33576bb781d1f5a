"""Which engine this is and what it is doing: model, device, formats, memory, state, progress of long work."""

from __future__ import annotations

import traitlets as t

from strata_widgets._base import StrataWidget, load_style, load_view

STATES = ("loading", "ready", "generating", "rebuilding", "failed", "closed")


class EngineHeader(StrataWidget):
    """One line about the engine.

    Traits:
        model: its name.
        facts: label, value and explanation of each thing worth knowing, in order: `[{label, value, tip}]`.
        state: one of `STATES`.
        task: what long work is being done, for a human; empty when none is.
        fraction: how far that work is, 0.0 to 1.0; negative when it cannot say.
        badge: what this is instead of a running engine, for example a recording; empty for an engine.
        problem: what went wrong, in words; empty when nothing did.
        notes: fallbacks and lost events, one sentence each.
    """

    _esm = load_view(__path__[0])
    _css = load_style(__path__[0])
    model = t.Unicode("").tag(sync=True)
    facts = t.List(t.Dict()).tag(sync=True)
    state = t.Enum(STATES, default_value="loading").tag(sync=True)
    task = t.Unicode("").tag(sync=True)
    fraction = t.Float(-1.0).tag(sync=True)
    badge = t.Unicode("").tag(sync=True)
    problem = t.Unicode("").tag(sync=True)
    notes = t.List(t.Unicode()).tag(sync=True)

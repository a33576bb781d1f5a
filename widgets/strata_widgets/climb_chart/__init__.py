"""The climb: one column per stage, from everything off upwards, with its spread; the articles' claim beside it."""

from __future__ import annotations

from collections.abc import Callable

import traitlets as t

from strata_widgets._base import StrataWidget, load_style, load_view


class ClimbChart(StrataWidget):
    """Columns of speed.

    Traits:
        stages: `{label, low, median, high, before, baseline, kept, tip}` per stage, in order: tokens per second;
            `before` and `baseline` are ratios, None where they cannot be told; `kept` is False for one that was taken
            back; `tip` says how it was measured.
        can_restart: whether the stages are measured live, so that they can begin anew.
        unit: of the columns, for example "tok/s per stream".
        source: how the stages were measured, one sentence.
        claims: `{label, detail, value}` of the articles, in order, on another scale: only ratios compare.
        claims_note: whose claim that is.
    """

    _esm = load_view(__path__[0])
    _css = load_style(__path__[0])
    stages = t.List(t.Dict()).tag(sync=True)
    unit = t.Unicode("tok/s per stream").tag(sync=True)
    source = t.Unicode("").tag(sync=True)
    can_restart = t.Bool(False).tag(sync=True)
    claims = t.List(t.Dict()).tag(sync=True)
    claims_note = t.Unicode("").tag(sync=True)

    def on_restart(self, handler: Callable[[], None]) -> None:
        """Call `handler()` when someone asks to begin anew. It must return at once."""
        self._on_kind("restart", lambda _content: handler())

"""How close decoding is to what the memory can deliver: achieved bytes per second over measured bandwidth."""

from __future__ import annotations

from collections.abc import Callable

import traitlets as t

from strata_widgets._base import StrataWidget, load_style, load_view


class RooflineGauge(StrataWidget):
    """A gauge from nothing to the roofline.

    Traits:
        share: achieved over measured bandwidth, 0.0 to 1.0; above 1.0 it is shown as a wrong measurement; None where
            it is not known.
        share_tip: its formula.
        numbers: `{label, unit, tip}` per number beside the bar; `tip` is its formula.
        values: their values, in order: a number, text, or None.
        can_measure: whether the ceiling is unknown and can be measured now.
        busy: whether it is being measured.
        note: what stands in the way, or what the ceiling is, one sentence.
    """

    _esm = load_view(__path__[0])
    _css = load_style(__path__[0])
    share = t.Float(None, allow_none=True).tag(sync=True)
    share_tip = t.Unicode("").tag(sync=True)
    numbers = t.List(t.Dict()).tag(sync=True)
    values = t.List().tag(sync=True)
    can_measure = t.Bool(False).tag(sync=True)
    busy = t.Bool(False).tag(sync=True)
    note = t.Unicode("").tag(sync=True)

    def on_measure(self, handler: Callable[[], None]) -> None:
        """Call `handler()` when someone asks to measure the ceiling. It must return at once."""

        self._on_kind("measure", lambda _content: handler())

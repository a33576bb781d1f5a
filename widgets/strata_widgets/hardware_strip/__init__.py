"""What the sensors say, in the order in which a slow machine is examined: temperature, power, clocks, load."""

from __future__ import annotations

import traitlets as t

from strata_widgets._base import StrataWidget, load_style, load_view


class HardwareStrip(StrataWidget):
    """A line of readings.

    Traits:
        readings: `{label, value, unit, tone, tip}` per sensor, in order; `value` is text, "no sensor" where there is
            none; `tone` is "", "warn" or "bad"; `tip` says where it was read and what it means.
        note: what the governor is doing, or why little can be read; one sentence.
    """

    _esm = load_view(__path__[0])
    _css = load_style(__path__[0])
    readings = t.List(t.Dict()).tag(sync=True)
    note = t.Unicode("").tag(sync=True)

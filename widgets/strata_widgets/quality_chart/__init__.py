"""Quality against speed: what each way to run the model costs and gives, and which of them nothing else beats."""

from __future__ import annotations

import traitlets as t

from strata_widgets._base import StrataWidget, load_style, load_view


class QualityChart(StrataWidget):
    """Points in a plane.

    Traits:
        points: `{label, x, y, best, tip}` per way to run the model; `best` is whether no other point is at least as
            good in both and better in one; `tip` says where both numbers come from.
        x_label, y_label: what the axes are, with units. More of `x` is better, less of `y` is better.
        note: what was measured, where; or why there is nothing to see.
    """

    _esm = load_view(__path__[0])
    _css = load_style(__path__[0])
    points = t.List(t.Dict()).tag(sync=True)
    x_label = t.Unicode("").tag(sync=True)
    y_label = t.Unicode("").tag(sync=True)
    note = t.Unicode("").tag(sync=True)

"""What the drafter proposed and how much of it was taken: the latest rounds per request, and acceptance by position."""

from __future__ import annotations

import traitlets as t

from strata_widgets._base import StrataWidget, load_style, load_view


class DraftLanes(StrataWidget):
    """Rounds of proposals.

    Traits:
        lanes: `{id, title, color, rounds}` per request, newest round last; a round is `{accepted: [text], rejected:
            [text]}`, one text per token.
        by_position: `{position, drafted, accepted}` per place in a proposal, from 1.
        numbers: `{label, value, tip}` per number above the lanes; `tip` is its formula.
        note: why there is nothing to see; one sentence, empty where there is.
    """

    _esm = load_view(__path__[0])
    _css = load_style(__path__[0])
    lanes = t.List(t.Dict()).tag(sync=True)
    by_position = t.List(t.Dict()).tag(sync=True)
    numbers = t.List(t.Dict()).tag(sync=True)
    note = t.Unicode("").tag(sync=True)

"""The text of running requests as it comes, one lane per request.

Text arrives as append-only records, so the cost of a push does not grow with the text. A view that opened late, or
missed a record, is repaired by `snapshot`, which is pushed now and then and whenever everything has finished.
"""

from __future__ import annotations

import traitlets as t

from strata_widgets._base import StrataWidget, load_style, load_view


class TokenStream(StrataWidget):
    """Lanes of text.

    Records: `{append: [{id, start, end, text, drafted}]}`: `text` is characters `start` to `end` of lane `id`;
    `drafted` lists the parts `[from, to)` of them that a drafter had proposed.

    Traits:
        lanes: `{id, title, color, prompt, state, phase, accepted, note, num_tokens, rate}` per request, in order.
            `color` is 0 to 7; `state` is "waiting", "generating" or "done"; `phase` is where the engine has it, "" once
            it has ended; `accepted` is the share of proposed tokens that were taken, None without proposals; `note`
            says how it ended; `rate` is tokens per second of this stream, or None.
        snapshot: `{id, end, text}` per lane: the text up to character `end`; a long one holds its last part only.
    """

    _esm = load_view(__path__[0])
    _css = load_style(__path__[0])
    lanes = t.List(t.Dict()).tag(sync=True)
    snapshot = t.List(t.Dict()).tag(sync=True)

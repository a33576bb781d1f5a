"""Who is in the batch and who waits: one line per request, with its phase and how far it has come."""

from __future__ import annotations

import traitlets as t

from strata_widgets._base import StrataWidget, load_style, load_view


class BatchLanes(StrataWidget):
    """Lines of requests.

    Traits:
        requests: `{id, title, color, state, prompt, output, computed, cached, blocks, priority, preemptions}` per
            unfinished request: those that run, then those that wait, next first. `state` is "waiting", "prefilling",
            "decoding", "parked" or "preempted"; `prompt`, `output`, `computed` and `cached` are tokens.
        num_more: requests that are not listed.
        totals: `{label, value, tip}` per number above the lines; `tip` is its formula.
    """

    _esm = load_view(__path__[0])
    _css = load_style(__path__[0])
    requests = t.List(t.Dict()).tag(sync=True)
    num_more = t.Int(0).tag(sync=True)
    totals = t.List(t.Dict()).tag(sync=True)

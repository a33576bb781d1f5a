"""A mixture of experts as a heat map: a row per layer, a column per expert, darker where more tokens went."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

import traitlets as t

from strata_widgets._base import StrataWidget, load_style, load_view


def pack_counts(counts: Iterable[int]) -> bytes:
    """Counts layer by layer, as the view reads them: doubles, exact up to 2^53."""
    return array("d", counts).tobytes()


class ExpertMap(StrataWidget):
    """How often each expert of each layer was chosen.

    Traits:
        counts: as `pack_counts` makes them, `num_layers * num_experts` of them.
        num_layers, num_experts, top_k: of the model; a token chooses `top_k` experts in every layer.
        numbers: `{label, value, tip}` per figure above the map.
        note: a sentence under it.
        enabled: whether counting anew can be asked for.
    """

    _esm = load_view(__path__[0])
    _css = load_style(__path__[0])
    counts = t.Bytes(b"").tag(sync=True)
    num_layers = t.Int(0).tag(sync=True)
    num_experts = t.Int(0).tag(sync=True)
    top_k = t.Int(0).tag(sync=True)
    numbers = t.List(t.Dict()).tag(sync=True)
    note = t.Unicode("").tag(sync=True)
    enabled = t.Bool(False).tag(sync=True)

    def on_restart(self, handler: Callable[[], None]) -> None:
        """Call `handler()` when someone asks to count anew. It must return at once."""
        self._on_kind("restart", lambda _content: handler())

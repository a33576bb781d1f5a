"""Output speed over the last minute: total and per stream as two lines, with a marker at every change of a setting.

Samples arrive as append-only binary records; `history` holds the whole minute for views that open late.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import traitlets as t

from strata_widgets._base import StrataWidget, load_style, load_view

SAMPLE = struct.Struct("<4d")  # t_s, total tok/s, tok/s per stream (NaN: no stream), streams generating


def pack_samples(samples: Iterable[tuple[float, float, float, float]]) -> bytes:
    """Samples `(t_s, output_tok_s, tok_s_per_stream, num_generating)` as little-endian float64, four per sample."""
    return b"".join(SAMPLE.pack(*sample) for sample in samples)


class RateChart(StrataWidget):
    """A chart of speed, headed by the numbers of this moment.

    Records: `{samples: count}` with one buffer as `pack_samples` makes it; `t_s` rises from record to record.

    Traits:
        numbers: `{label, unit, line, tip}` per number shown above the chart: `tip` is its formula; `line` is "total"
            or "stream" for the two that the chart draws, else "".
        values: their values, in order: a number, text, or None for what is not known now.
        history: the last minute of samples, as `pack_samples` makes it.
        markers: `{t, label}` per change of a setting, on the time axis of the samples.
    """

    _esm = load_view(__path__[0])
    _css = load_style(__path__[0])
    numbers = t.List(t.Dict()).tag(sync=True)
    values = t.List().tag(sync=True)
    history = t.Bytes(b"").tag(sync=True)
    markers = t.List(t.Dict()).tag(sync=True)

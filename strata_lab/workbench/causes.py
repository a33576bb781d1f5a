"""Where the milliseconds of a step go, from its event and the measured bandwidth: arithmetic, no engine, no widget.

The clock gives scheduling, forward pass, sampling and booking. Inside the forward pass the bytes that the step has to
read, over the bandwidth measured on this machine, are the time that reading alone would take; what is left of it is
launches, arithmetic and whatever reading does not hide. Nothing is split where the bandwidth is not known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strata_lab.events import StepEvent
from strata_lab.telemetry.achieved import DecodeReads, roofline_tok_s

WINDOW_S = 1.0  # what the gauge looks back over
_SPLIT = (
    ("schedule", "scheduling", "StepEvent.schedule_ms: choosing requests and blocks, host clock."),
    ("weights", "reading weights", "(bytes_moved - kv_bytes_moved) / measured bandwidth: what reading the weights takes"
     " at least."),
    ("kv", "reading KV", "kv_bytes_moved / measured bandwidth: what reading keys and values takes at least."),
    ("compute", "launch, arithmetic", "forward_ms less the two readings: launches, arithmetic, and reading that ran"
     " below full bandwidth."),
    ("sample", "sampling", "StepEvent.sample_ms: choosing the next tokens."),
    ("commit", "booking, text", "StepEvent.commit_ms: blocks, stop strings, text and events."),
    ("host", "between", "duration_ms less all of the above: Python between the parts of a step."),
)  # fmt: skip
_WHOLE = ("compute", "forward pass", "StepEvent.forward_ms, not split: the bandwidth of this machine is not measured.")


@dataclass(frozen=True)
class Ceiling:
    """The bandwidth that percentages are taken of.

    Attributes:
        bytes_s: bytes read per second; None where it is not measured.
        level: "memory" or "cache": what was read.
        reader: the operation that read fastest.
    """

    bytes_s: float | None = None
    level: str = "memory"
    reader: str = ""


def cause_data(ceiling: Ceiling) -> list[dict[str, str]]:
    """The causes as `StepTimeline.causes` takes them."""
    split = ceiling.bytes_s is not None
    rows = [row if split or row[0] != "compute" else _WHOLE for row in _SPLIT]
    return [dict(zip(("key", "label", "tip"), row, strict=True)) for row in rows]


def split_step(step: StepEvent, ceiling: Ceiling) -> tuple[float, ...]:
    """One step as `pack_steps` takes it; the parts add up to its duration."""
    fixed_ms = step.schedule_ms + step.sample_ms + step.commit_ms
    # A device that ran ahead has computed part of the forward pass during earlier steps: only the rest was waited for.
    forward_ms = max(0.0, min(step.forward_ms, step.duration_ms - fixed_ms))
    weights_ms = kv_ms = 0.0
    if ceiling.bytes_s is not None:
        weights_ms = min(forward_ms, (step.bytes_moved - step.kv_bytes_moved) / ceiling.bytes_s * 1e3)
        kv_ms = min(forward_ms - weights_ms, step.kv_bytes_moved / ceiling.bytes_s * 1e3)
    compute_ms = forward_ms - weights_ms - kv_ms
    host_ms = max(0.0, step.duration_ms - forward_ms - fixed_ms)
    parts = (step.schedule_ms, weights_ms, kv_ms, compute_ms, step.sample_ms, step.commit_ms, host_ms)
    return (step.step, step.duration_ms, step.num_prefill_tokens, step.num_decode_tokens, *parts)


class RooflineMeter:
    """Bytes per second of the decode steps of the last second."""

    def __init__(self) -> None:
        self._reads = DecodeReads(WINDOW_S)
        self.feed, self.forget = self._reads.feed, self._reads.forget

    def reading(self, ceiling: Ceiling) -> dict[str, Any]:
        """What `RooflineGauge` takes: `share` and `values`, in the order of `GAUGE_NUMBERS`."""
        reads, seconds = self._reads, self._reads.seconds
        limit = None if ceiling.bytes_s is None else ceiling.bytes_s / 1e9
        if not seconds:
            return {"share": None, "values": [None, limit, None, None]}
        nbytes, steps = reads.nbytes, reads.num_steps
        limit_tok_s = None
        if ceiling.bytes_s is not None:
            limit_tok_s = roofline_tok_s(nbytes / steps, ceiling.bytes_s, reads.num_tokens / steps)
        values = [nbytes / seconds / 1e9, limit, nbytes / steps / 1e6, limit_tok_s]
        return {"share": reads.mbu(ceiling.bytes_s), "values": values}


SHARE_TIP = (
    "Model bandwidth utilization: bytes_moved / (duration_ms x measured bandwidth), summed over the decode steps of "
    "the last second. bytes_moved counts every weight once and the KV cache of the context."
)
_GAUGE = (
    ("reads now", "GB/s", "Sum of bytes_moved / sum of duration_ms, decode steps of one second."),
    ("limit, measured here", "GB/s", "Fastest of several readings of a large buffer, best of 5."),
    ("bytes per step", "MB", "Mean bytes_moved of a decode step: weights once, KV of the context."),
    ("limit in tokens", "tok/s", "Tokens per step x bandwidth / bytes per step: total of all streams."),
)
GAUGE_NUMBERS = [dict(zip(("label", "unit", "tip"), row, strict=True)) for row in _GAUGE]

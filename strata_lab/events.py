"""What the engine tells the world: plain records in a ring buffer, nothing else.

Charts, metrics and the server read these and never reach into the engine. Torch-free. A reader keeps a
cursor; a slow reader loses the oldest records and is told how many, and never slows the engine down.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from strata_lab.draft_events import Draft as Draft
from strata_lab.draft_events import SpeculationEvent as SpeculationEvent
from strata_lab.expert_events import ExpertEvent as ExpertEvent

FINISH_REASONS = ("stop", "length", "abort", "timeout", "error")

EVENT_CAPACITY = 8192  # about a minute of steps at 130 steps/s


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token.

    Attributes:
        request_id: whose token it is.
        token_id: -1 for an event that only carries the end of a request.
        text: characters that became certain with this token; may be empty in the middle of a character.
        index: position among the generated tokens, from 0.
        finish_reason: "stop", "length", "abort", "timeout" or "error" on the last event, else None.
        error: what went wrong, when `finish_reason` is "error".
        drafted: whether a drafter had proposed it.
        choice: which of the texts of its prompt it belongs to (`SamplingParams.n`).
    """

    request_id: str
    token_id: int
    text: str
    index: int
    finish_reason: str | None = None
    error: str | None = None
    drafted: bool = False
    choice: int = 0


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One engine step.

    Attributes:
        step: step number, from 0.
        t_s: `time.perf_counter()` at the end of the step, seconds.
        duration_ms: wall time of the step.
        schedule_ms, forward_ms, sample_ms, commit_ms: its parts (measured on the host; they sum to at most
            `duration_ms`).
        num_prefill_tokens, num_decode_tokens: tokens computed in this step by phase.
        num_running, num_waiting, num_preempted: requests after the step; `num_preempted` counts the
            preemptions of this step.
        kv_blocks_used, kv_blocks_total: pool after the step.
        bytes_moved: weights and KV bytes this step has to read, from shapes (see `telemetry/roofline.py`).
        tokens: the tokens generated in this step.
        kv_bytes_moved: the part of `bytes_moved` that is keys and values.
        drafts: proposals that this step has verified.
    """

    step: int
    t_s: float
    duration_ms: float
    schedule_ms: float
    forward_ms: float
    sample_ms: float
    commit_ms: float
    num_prefill_tokens: int
    num_decode_tokens: int
    num_running: int
    num_waiting: int
    num_preempted: int
    kv_blocks_used: int
    kv_blocks_total: int
    bytes_moved: int
    tokens: tuple[TokenEvent, ...]
    kv_bytes_moved: int = 0
    drafts: tuple[Draft, ...] = ()


@dataclass(frozen=True, slots=True)
class SettingEvent:
    """A change of settings took effect between two steps.

    Attributes:
        t_s: `time.perf_counter()` when the new setting was in force, seconds.
        changes: field name to the value now in force.
        build_ms: time spent building what the change needed while the engine went on.
        swap_ms: time the engine stood still for it.
    """

    t_s: float
    changes: dict[str, Any]
    build_ms: float
    swap_ms: float


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """Long work (loading, quantizing, compiling) has advanced.

    Attributes:
        t_s: `time.perf_counter()`, seconds.
        task: what is being done, for a human.
        fraction: 0.0 to 1.0.
    """

    t_s: float
    task: str
    fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareEvent:
    """One reading of a device's sensors. What a device does not tell is None.

    Attributes:
        t_s: `time.perf_counter()` of the reading, seconds.
        device: "cuda:0", or "cpu".
        name: product name.
        note: why values are missing, for people; empty when they are not.
        core_c, memory_c: temperatures; on a CPU `core_c` is its hottest thermal zone, for information only.
        core_limit_c, memory_limit_c: from which temperatures on the card slows down.
        sm_mhz, sm_max_mhz, memory_mhz, memory_max_mhz: clocks now, and the highest ones.
        power_w, power_limit_w: draw, and the limit in force.
        gpu_percent, memory_percent: share of the last moment in which a kernel ran, and in which memory was busy.
        memory_used_bytes, memory_bytes: in use by anyone, and in total.
        throttle: what holds the clocks down now, in words, in the order in which to look: heat, power, others.
        pcie_gen, pcie_gen_max, pcie_width, pcie_width_max: the link now (an idle card lowers it) and at best.
        ecc_errors: uncorrected memory errors since the driver was loaded; None without ECC.
    """

    t_s: float
    device: str
    name: str
    note: str = ""
    core_c: float | None = None
    memory_c: float | None = None
    core_limit_c: float | None = None
    memory_limit_c: float | None = None
    sm_mhz: int | None = None
    sm_max_mhz: int | None = None
    memory_mhz: int | None = None
    memory_max_mhz: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    gpu_percent: int | None = None
    memory_percent: int | None = None
    memory_used_bytes: int | None = None
    memory_bytes: int | None = None
    throttle: tuple[str, ...] = ()
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    ecc_errors: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernorEvent:
    """The thermal governor has changed what it does.

    Attributes:
        t_s: `time.perf_counter()`, seconds.
        policy: value of the toggle `thermal_governor`.
        action: "pace", "shrink", "relax" (one of them is taken back a little), "none" or "no sensor".
        idle_share: share of the time in which the card rests now, 0.0 to 1.0.
        max_num_seqs: seats in force now, at most the setting of that name.
        sensor: which sensor decided: "core", "memory" or "none".
        temperature_c, predicted_c, target_c: its reading, what it will read when its lag and the look-ahead are over,
            and what it is held to.
        reason: a sentence for people.
        advice: a command that the user could run instead; empty if there is none.
    """

    t_s: float
    policy: str
    action: str
    idle_share: float
    max_num_seqs: int
    sensor: str
    temperature_c: float | None
    predicted_c: float | None
    target_c: float | None
    reason: str
    advice: str = ""


REQUEST_STATES = ("waiting", "prefilling", "decoding", "parked", "preempted")


@dataclass(frozen=True, slots=True)
class RequestView:
    """One unfinished request at one moment.

    Attributes:
        request_id: its name.
        state: one of `REQUEST_STATES`: "parked" is set aside with its work kept, "preempted" has lost it.
        num_prompt_tokens, num_output_tokens: what it was given and what it has made.
        num_computed_tokens: of both, those that have keys and values in the cache.
        priority: as it was asked for.
        num_preemptions: how often it has lost its blocks.
        num_cached_tokens: of its prompt, what the prefix cache held.
        blocks: its blocks of the pool, in token order.
    """

    request_id: str
    state: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    priority: int
    num_preemptions: int
    num_cached_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateEvent:
    """All unfinished requests at one moment. Made when somebody asks for it, never by a step.

    Attributes:
        t_s: `time.perf_counter()`, seconds.
        requests: those that run, most senior first, then those that wait, next first.
        num_blocks, block_size: of the pool; tokens of a block.
        cached: blocks that nobody holds and the prefix cache keeps.
    """

    t_s: float
    requests: tuple[RequestView, ...]
    num_blocks: int
    block_size: int
    cached: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SentEvent:
    """A request was sent from a panel: what its lane is called. Only recordings hold these.

    Attributes:
        t_s: `time.perf_counter()` when it was sent, seconds.
        request_id, title, prompt: of its lane.
    """

    t_s: float
    request_id: str
    title: str
    prompt: str


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """A request has ended, well or not.

    Attributes:
        t_s: `time.perf_counter()` when that was booked, seconds.
        request_id: whose end it is.
        finish_reason: "stop", "length", "abort", "timeout" or "error".
        num_prompt_tokens, num_output_tokens: given and generated.
        num_cached_tokens: of the prompt, found in the prefix cache.
        num_preemptions: how often it lost its blocks.
        ttft_ms: arrival to first token; None where it never had one.
        e2e_ms: arrival to its end.
    """

    t_s: float
    request_id: str
    finish_reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    ttft_ms: float | None
    e2e_ms: float


Event = (
    StepEvent
    | SettingEvent
    | ProgressEvent
    | RequestEvent
    | HardwareEvent
    | GovernorEvent
    | StateEvent
    | SentEvent
    | SpeculationEvent
    | ExpertEvent
)


@dataclass
class EventLog:
    """Thread-safe ring buffer of events with cursors."""

    capacity: int = EVENT_CAPACITY
    _events: deque[Event] = field(default_factory=deque, repr=False)
    _next: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition, repr=False)

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"capacity={self.capacity} must be at least 1; try {EVENT_CAPACITY}")

    def append(self, event: Event) -> None:
        """Add an event; the oldest one is dropped when the buffer is full."""
        with self._changed:
            if len(self._events) == self.capacity:
                self._events.popleft()
            self._events.append(event)
            self._next += 1
            self._changed.notify_all()

    @property
    def cursor(self) -> int:
        """The cursor that sees only events appended from now on."""
        return self._next

    def since(self, cursor: int) -> tuple[list[Event], int, int]:
        """Events from `cursor` on, the next cursor, and how many events were lost in between."""
        with self._changed:
            first = self._next - len(self._events)
            lost = max(0, first - cursor)
            start = max(cursor, first) - first
            return [self._events[i] for i in range(start, len(self._events))], self._next, lost

    def wait(self, cursor: int, timeout_s: float) -> bool:
        """Block until there is an event at or after `cursor`; False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._next > cursor, timeout_s)

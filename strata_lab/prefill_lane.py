"""Prompts beside the decode steps: `pd_split` on a GPU.

A thread of its own launches prompt slices on a stream of its own, while the engine thread goes on with decode steps,
whose captured kernels have the higher priority. Where torch and the driver have green contexts, that stream belongs to
one that owns a part of the multiprocessors: a prompt's long kernels then leave the others to the decode steps at once,
where priority alone only lets a decode kernel go first when a program of the prompt's ends. One batch at a time; the
scheduler holds its requests and their blocks until it has landed. Nothing here decides what is computed.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strata_lab.batch import ScheduledBatch
from strata_lab.runner import Runner, States, Step, StepInputs, StepResult

SM_SHARE = 0.5  # of the multiprocessors for prompts
SM_UNIT = 8  # multiprocessors that a green context takes or leaves together (compute capability 9.0)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LaneStream:
    """A stream for prompts, which outlives the lanes that use it one after the other: captures were made on it.

    Attributes:
        stream: of low priority.
        multiprocessors: that it may use; None: all.
        part: the green context that it belongs to, if there is one.
    """

    stream: torch.cuda.Stream
    multiprocessors: int | None = None
    part: Any = None

    @classmethod
    def of(cls, device: torch.device) -> LaneStream:
        """In a green context; where there are none an ordinary stream of the lowest priority."""
        count = lane_multiprocessors(device)
        try:
            from torch.cuda.green_contexts import GreenContext

            part: Any = GreenContext.create(num_sms=count, device_id=device.index or 0)
            return cls(part.Stream(), count, part)
        except (ImportError, AttributeError, RuntimeError, TypeError) as error:
            logger.info("prompts share all multiprocessors: no green context (%s)", error)
            return cls(torch.cuda.Stream(device))


class Finished:
    """A step that has been computed when it returns.

    What comes next copies tokens to the host, and while such a copy waits for its stream the driver lets nobody else
    launch: decode steps would stand still until the prompt is read.
    """

    def __init__(self, step: Step, on: LaneStream) -> None:
        self.step, self._stream = step, on.stream

    @property
    def capture_bytes(self) -> int:
        """Device memory that captures of the step took."""
        return getattr(self.step, "capture_bytes", 0)

    @property
    def states(self) -> States:
        """`Step.states`."""
        return self.step.states

    def __call__(self, inputs: StepInputs) -> Tensor:
        """[S, V] float32."""
        logits = self.step(inputs)
        self._stream.synchronize()  # SYNC: in the lane's thread; others go on meanwhile
        return logits


class PrefillLane:
    """Runs one batch of prompt slices at a time.

    Args:
        runner: for prompts; it and its sampler are used by one lane at a time.
        on: the stream; None on a CPU, where the lane is a thread (for tests).

    Attributes:
        batch: what is or was computed last.
        submitted_s: when, on the events' clock.
        multiprocessors: that it may use; None: all.
    """

    batch: ScheduledBatch
    submitted_s: float

    def __init__(self, runner: Runner, on: LaneStream | None = None) -> None:
        self.runner, self._on = runner, on
        self._stream = None if on is None else on.stream
        self.multiprocessors = None if on is None else on.multiprocessors
        self._pool = ThreadPoolExecutor(1, "strata-prefill")
        self._future: Future[StepResult] | None = None

    @property
    def busy(self) -> bool:
        """Whether a batch has not been fetched yet."""
        return self._future is not None

    @property
    def done(self) -> bool:
        """Whether `result` would not wait."""
        return self._future is not None and self._future.done()

    def submit(self, batch: ScheduledBatch) -> None:
        """Start computing; there must be nothing else in the lane.

        It starts when all that is queued on the caller's stream has run: some of it may still write to blocks that
        have been freed and belong to this batch now.
        """
        assert self._future is None, "one batch at a time"
        self.batch, self.submitted_s = batch, time.perf_counter()
        before = None
        if self._stream is not None:
            before = torch.cuda.current_stream(self._stream.device).record_event()
        self._future = self._pool.submit(self._run, batch, before)

    def _run(self, batch: ScheduledBatch, before: Any) -> StepResult:
        if self._stream is not None:
            self._stream.wait_event(before)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            result = self.runner.run(batch)
            if self._stream is not None:  # a slice that samples nothing has not waited for anything yet
                self._stream.synchronize()  # SYNC: its keys and values are in the cache
        return result

    def result(self) -> StepResult:
        """Wait for the batch; its exception comes out here. The lane is free afterwards."""
        assert self._future is not None
        future, self._future = self._future, None
        return future.result()

    def close(self) -> None:
        """Wait for what runs and end the thread."""
        self._pool.shutdown(wait=True)


def lane_multiprocessors(device: torch.device) -> int:
    """How many multiprocessors the lane gets: `SM_SHARE` of the card's, in whole units."""
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return max(SM_UNIT, int(count * SM_SHARE) // SM_UNIT * SM_UNIT)

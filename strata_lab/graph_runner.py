"""The decode step without Python between its operators: captured once per shape, then replayed.

A capture is a list of operator calls at fixed addresses. On a GPU it is a CUDA graph; on a CPU it is the same thing,
kept by `kernels/cpu/replay.cpp`. A step copies its inputs into the captured addresses and replays; rows that only pad
write nowhere (slot -1) and read one slot. Steps that verify drafts go to `graph_windows.py`, those with prompts to
`graph_prompts.py` on a GPU, anything else to `EagerStep`. `CompiledStep` is the alternative that inductor offers on a
CPU. Nothing here knows toggles.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from strata_lab.capture import CAPTURING, MIN_TABLE_WIDTH, Capture, Recorder, Taken, captured_width, fill, free_bytes
from strata_lab.graph_prompts import CapturedPrompts
from strata_lab.graph_windows import CapturedRows, CapturedWindows
from strata_lab.runner import EagerStep, States, StepInputs

# Batch sizes captured on a GPU. Small ones as they are: in a mixture of experts a row that only pads costs its experts.
GRAPH_BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 24, 32, 48, 64, 96, 128)
HIGH_PRIORITY = -1  # of a CUDA stream; 0 is the lowest


class CapturedStep:
    """A decode step that is replayed, one capture per (batch size, block-table width).

    Args:
        eager: the step it captures, and leaves everything but pure decode to.
        recorder: how this device captures.
        tell: is told what runs uncaptured after all, and why.
    """

    def __init__(
        self, eager: EagerStep, recorder: Recorder, tell: Callable[[str], None] = lambda reason: None
    ) -> None:  # fmt: skip
        self.eager, self.recorder = eager, recorder
        self.windows = (CapturedWindows if recorder.ragged else CapturedRows)(eager, recorder)
        # on a CPU a prompt's operators take far longer than their launch
        self.prompts = None if recorder.ragged else CapturedPrompts(eager, recorder, tell)
        self._captures: dict[tuple[int, int], Capture] = {}

    @property
    def capture_bytes(self) -> int:
        """Device memory that captures of its recorder took, those of others who have it too."""
        return self.recorder.capture_bytes

    @property
    def states(self) -> States:
        """`Step.states`."""
        return self.eager.states

    def prepare(self, progress: Callable[[float], None]) -> None:
        """Capture the step of one request; others are captured when they are first needed."""
        with torch.inference_mode():
            self._capture(1, MIN_TABLE_WIDTH)
        progress(1.0)

    def __call__(self, inputs: StepInputs) -> Tensor:
        """[S, V] float32; valid until the next step."""
        num_seqs, width = inputs.block_tables.shape
        bucket = self.recorder.bucket(num_seqs)
        if inputs.max_q_len > 1 and self.windows.takes(inputs):
            return self.windows(inputs)
        if inputs.max_q_len > 1 and self.prompts is not None:
            self.eager.states = states = self.prompts.hidden(inputs)
            return self.eager.model.logits(states[-1][inputs.sample_rows])
        if inputs.max_q_len > 1 or not bucket:
            return self.eager(inputs)
        key = bucket, captured_width(width)
        capture = self._captures.get(key) or self._capture(*key)
        fill(capture.inputs, inputs)
        capture.replay()
        self.eager.states = capture.states
        logits, samples = capture.logits[:num_seqs], inputs.sample_rows
        # a prompt slice of one token samples nothing
        return logits if samples.shape[0] == num_seqs else logits[samples]

    def _capture(self, num_seqs: int, width: int) -> Capture:
        device = self.eager.model.rotary[0].device
        inputs = StepInputs.idle(num_seqs, width, device)
        replay, rows = self.recorder.record(lambda: self.eager.rows(inputs), device)
        self._captures[num_seqs, width] = Capture(replay, inputs, *rows)
        return self._captures[num_seqs, width]


class CudaRecorder:
    """CUDA graphs that share one memory pool, so that their replays must take turns.

    Args:
        stream: to capture on; None makes one of high priority.
    """

    ragged = False  # grids are fixed
    captures = 0

    def __init__(self, stream: Any = None) -> None:
        self._pool: Any = None
        self._stream = stream
        self._taken = Taken()

    @property
    def capture_bytes(self) -> int:
        """As of `Recorder`."""
        return self._taken.nbytes

    def bucket(self, num_seqs: int) -> int:
        """The next captured batch size; 0 above the largest."""
        return next((b for b in GRAPH_BATCHES if b >= num_seqs), 0)

    def record(self, work: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
        """Warm up, then capture on the same stream, whose workspaces the kernels then know.

        Captured kernels keep the stream's priority: decode steps go before prompts that run beside them. A graph knows
        addresses, not tensors: what `work` refers to lives as long as the replay that is returned.
        """
        with CAPTURING:
            before = free_bytes(device)
            side = self._stream = self._stream or torch.cuda.Stream(device, priority=HIGH_PRIORITY)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                work()  # loads kernels and workspaces, which a capture may not do
            torch.cuda.current_stream(device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # thread_local: another thread may be building new weights meanwhile, which allocates
            pool, self._pool = self._pool, None  # one in which a capture failed takes no other
            with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                result = work()
            self._pool = pool or graph.pool()
            self.captures += 1

            def replay(graph: Any = graph, kept: Any = work) -> None:
                graph.replay()

            self._taken.count(replay, max(0, before - free_bytes(device)))
        return replay, result


class CpuRecorder:
    """Lists of C++ operator calls (`kernels/cpu/replay.h`)."""

    ragged = True  # attention plans its work when it is replayed
    captures = capture_bytes = 0  # main memory is not counted

    def __init__(self) -> None:
        from strata_lab.kernels.cpu.build import load

        self._ops = load()

    def bucket(self, num_seqs: int) -> int:
        """Every batch size is captured as it is: a capture takes milliseconds and a few hundred kilobytes."""
        return num_seqs

    def record(self, work: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
        """Run once with the capture open; anything but our operators and views is refused."""
        program = _Program(self._ops, self._ops.capture_begin())
        try:
            with _OnlyOurOperators():
                result = work()
        finally:
            self._ops.capture_end()
        self.captures += 1
        return program, result


class _Program:
    """A captured list of calls; frees it with itself."""

    def __init__(self, ops: Any, handle: int) -> None:
        self._ops, self._handle = ops, handle

    def __call__(self) -> None:
        self._ops.replay(self._handle)

    def __del__(self) -> None:
        self._ops.capture_free(self._handle)


class _OnlyOurOperators(TorchDispatchMode):
    """Refuses operators that a CPU capture would miss: their results would be stale at every replay."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in ("strata", "strata_avx2") and not func.is_view:
            raise RuntimeError(f"{func} cannot be captured on a CPU; give it an operator in kernels/")
        return func(*args, **(kwargs or {}))


class CompiledStep:
    """The whole decode step as one graph compiled by inductor; results are cached on disk.

    Slower to make than a capture by minutes, and slower to run: inductor keeps Python between our operators. Kept to
    measure that (docs/decisions/0007-cpu-capture-is-replay.md).
    """

    states: States = ()

    def __init__(self, eager: EagerStep) -> None:
        import platformdirs  # here, so that a GPU machine needs only torch

        # Inductor's own default is a folder under /tmp, which a reboot empties.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", platformdirs.user_cache_dir("strata_lab") + "/inductor")
        # Formats and compositions share one code object, whose compiled versions count together.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        self.eager = eager
        self._run = torch.compile(eager.every_row, dynamic=True, fullgraph=True)

    def prepare(self, progress: Callable[[float], None]) -> None:
        """Compile now, for one request and for several, so that no later step waits for it."""
        device = self.eager.model.rotary[0].device
        with torch.inference_mode():
            for done, num_seqs in enumerate((1, 2)):  # size 1 is a graph of its own, any other size shares the second
                progress(done / 2)
                self._run(StepInputs.idle(num_seqs, 2, device))
        progress(1.0)

    def __call__(self, inputs: StepInputs) -> Tensor:
        """[S, V] float32."""
        return self._run(inputs)[inputs.sample_rows] if inputs.max_q_len == 1 else self.eager(inputs)

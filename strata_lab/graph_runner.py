"""The decode step without Python between its operators: captured once per shape, then replayed.

A capture is a list of operator calls at fixed addresses. On a GPU it is a CUDA graph; on a CPU it is the same thing,
kept by `kernels/cpu/replay.cpp`. A step copies its inputs into the captured addresses and replays; rows that only pad
write nowhere (slot -1) and read one slot. Steps that are not pure decode go to `EagerStep`. `CompiledStep` is the
alternative that inductor offers on a CPU. Nothing here knows toggles.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from strata_lab.runner import EagerStep, StepInputs

# Batch sizes captured on a GPU. Small ones as they are: in a mixture of experts a row that only pads costs its experts.
GRAPH_BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 24, 32, 48, 64, 96, 128)
HIGH_PRIORITY = -1  # of a CUDA stream; 0 is the lowest
MAX_WINDOW_TOKENS = 16  # of a captured step that verifies drafts
# Rows captured where one capture serves every sharing of them; few sizes, as each compiles kernels of its own.
WINDOW_ROWS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MAX_WINDOW_CAPTURES = 24
MIN_TABLE_WIDTH = 16  # blocks; wider tables are captured in powers of two


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU; 0 elsewhere."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def captured_width(blocks: int) -> int:
    """The width of block table that is captured for tables of `blocks`."""
    return max(MIN_TABLE_WIDTH, 1 << (blocks - 1).bit_length())


class Recorder(Protocol):
    """Captures what a function does to device memory."""

    ragged: bool  # whether how many tokens each request has may change between replays
    captures: int  # made so far

    def bucket(self, num_seqs: int) -> int:
        """The batch size to capture for `num_seqs` requests; 0 for more than a capture is worth."""
        ...

    def record(self, work: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
        """Run `work` once; return what replays it, and its tensors, whose memory every replay writes anew."""
        ...


@dataclass
class _Capture:
    replay: Callable[[], None]
    inputs: StepInputs
    logits: Tensor
    states: Tensor


class CapturedStep:
    """A decode step that is replayed, one capture per (batch size, block-table width).

    Args:
        eager: the step it captures, and leaves everything but pure decode to.
        recorder: how this device captures.
    """

    def __init__(self, eager: EagerStep, recorder: Recorder) -> None:
        self.eager, self.recorder = eager, recorder
        self.windows = (CapturedWindows if recorder.ragged else CapturedRows)(eager, recorder)
        self._captures: dict[tuple[int, int], _Capture] = {}
        self._capture_bytes = 0

    @property
    def capture_bytes(self) -> int:
        """Device memory that its captures took."""
        return self._capture_bytes + self.windows.capture_bytes

    @property
    def states(self) -> Tensor | None:
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
        if inputs.max_q_len > 1 or not bucket:
            return self.eager(inputs)
        key = bucket, captured_width(width)
        capture = self._captures.get(key) or self._capture(*key)
        _fill(capture.inputs, inputs)
        capture.replay()
        self.eager.states = capture.states
        logits, samples = capture.logits[:num_seqs], inputs.sample_rows
        # a prompt slice of one token samples nothing
        return logits if samples.shape[0] == num_seqs else logits[samples]

    def _capture(self, num_seqs: int, width: int) -> _Capture:
        device = self.eager.model.rotary[0].device
        inputs, before = StepInputs.idle(num_seqs, width, device), free_bytes(device)
        replay, rows = self.recorder.record(lambda: self.eager.rows(inputs), device)
        self._capture_bytes += max(0, before - free_bytes(device))
        self._captures[num_seqs, width] = _Capture(replay, inputs, *rows)
        return self._captures[num_seqs, width]


class CapturedWindows:
    """Steps that verify drafts, replayed: one capture per (requests, tokens, block-table width).

    How the tokens are shared between the requests is read at every replay. Few tokens only: with more, what a replay
    saves is a small part of the step, and its results take half a megabyte per token on the default model. The captures
    used last are kept.
    """

    capture_bytes = 0  # main memory is not counted

    def __init__(self, eager: EagerStep, recorder: Recorder) -> None:
        self.eager, self.recorder = eager, recorder
        self._captures: OrderedDict[tuple[int, int, int], _Capture] = OrderedDict()

    def takes(self, inputs: StepInputs) -> bool:
        """Whether a step is one of verification alone, and small enough."""
        return _verifies(inputs) and inputs.input_ids.shape[0] <= MAX_WINDOW_TOKENS

    def __call__(self, inputs: StepInputs) -> Tensor:
        """[T, V] float32; valid until the next step."""
        num_seqs, width = inputs.block_tables.shape
        key = num_seqs, inputs.input_ids.shape[0], captured_width(width)
        capture = _latest(self._captures, key, self._capture)
        _fill(capture.inputs, inputs)
        capture.inputs.cu_seqlens_q.copy_(inputs.cu_seqlens_q)
        capture.replay()
        self.eager.states = capture.states
        return capture.logits

    def _capture(self, num_seqs: int, num_tokens: int, width: int) -> _Capture:
        device = self.eager.model.rotary[0].device
        idle, rows = StepInputs.idle(num_seqs, width, device), torch.arange(num_tokens, device=device)
        inputs = replace(
            idle,
            input_ids=torch.zeros_like(rows),
            positions=torch.zeros_like(rows),
            slot_mapping=torch.full_like(rows, -1),
            sample_rows=rows,
            max_q_len=num_tokens,
        )
        replay, rows = self.recorder.record(lambda: self.eager.rows(inputs), device)
        return _Capture(replay, inputs, *rows)


class CapturedRows:
    """Steps that verify drafts, where the grids of a capture are fixed: one capture per (rows, block-table width).

    Every row stands as a request of one token that sees what lies before it (`StepInputs.apart`), so a capture serves
    any number of requests and any sharing of its rows between them. The captures used last are kept.

    Attributes:
        capture_bytes: device memory that they took.
    """

    def __init__(self, eager: EagerStep, recorder: Recorder) -> None:
        self.eager, self.recorder = eager, recorder
        self._captures: OrderedDict[tuple[int, int], _Capture] = OrderedDict()
        self.capture_bytes = 0

    def takes(self, inputs: StepInputs) -> bool:
        """Whether a step is one of verification alone, small enough to be bound by the memory that weights cross."""
        return _verifies(inputs) and inputs.input_ids.shape[0] <= WINDOW_ROWS[-1]

    def __call__(self, inputs: StepInputs) -> Tensor:
        """[T, V] float32; valid until the next step."""
        num_rows, width = inputs.input_ids.shape[0], inputs.block_tables.shape[1]
        key = next(rows for rows in WINDOW_ROWS if rows >= num_rows), captured_width(width)
        capture = _latest(self._captures, key, self._capture)
        _fill(capture.inputs, inputs.one_by_one())
        capture.replay()
        self.eager.states = capture.states
        return capture.logits[:num_rows]

    def _capture(self, num_rows: int, width: int) -> _Capture:
        device = self.eager.model.rotary[0].device
        inputs, before = replace(StepInputs.idle(num_rows, width, device), apart=True), free_bytes(device)
        replay, rows = self.recorder.record(lambda: self.eager.rows(inputs), device)
        self.capture_bytes += max(0, before - free_bytes(device))
        return _Capture(replay, inputs, *rows)


def _latest(captures: OrderedDict[Any, _Capture], key: Any, capture: Callable[..., _Capture]) -> _Capture:
    """The capture of a key, made where it is missing; of all those of windows the ones used last are kept."""
    if key not in captures:
        captures[key] = capture(*key)
        if len(captures) > MAX_WINDOW_CAPTURES:
            captures.popitem(last=False)
    captures.move_to_end(key)
    return captures[key]


class CudaRecorder:
    """CUDA graphs that share one memory pool."""

    ragged = False  # grids are fixed
    captures = 0

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None

    def bucket(self, num_seqs: int) -> int:
        """The next captured batch size; 0 above the largest."""
        return next((b for b in GRAPH_BATCHES if b >= num_seqs), 0)

    def record(self, work: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
        """Warm up, then capture on the same stream, whose workspaces the kernels then know.

        Captured kernels keep the stream's priority: decode steps go before prompts that run beside them. A graph knows
        addresses, not tensors: what `work` refers to lives as long as the replay that is returned.
        """
        side = self._stream = self._stream or torch.cuda.Stream(device, priority=HIGH_PRIORITY)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            work()  # loads kernels and workspaces, which a capture may not do
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread may be building new weights meanwhile, which allocates
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            result = work()
        self._pool = self._pool or graph.pool()
        self.captures += 1

        def replay(graph: Any = graph, kept: Any = work) -> None:
            graph.replay()

        return replay, result


class CpuRecorder:
    """Lists of C++ operator calls (`kernels/cpu/replay.h`)."""

    ragged = True  # attention plans its work when it is replayed
    captures = 0

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

    states = None

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


def _verifies(inputs: StepInputs) -> bool:
    """Whether every row of a step needs its logits and looks its token up."""
    return inputs.sample_rows.shape[0] == inputs.input_ids.shape[0] and inputs.embedded is None


def _fill(static: StepInputs, inputs: StepInputs) -> None:
    """Copy a step into captured addresses; rows beyond it become padding."""
    num_seqs, width = inputs.block_tables.shape
    num_tokens = inputs.input_ids.shape[0]
    static.input_ids[:num_tokens].copy_(inputs.input_ids)
    static.positions[:num_tokens].copy_(inputs.positions)
    static.block_tables[:num_seqs, :width].copy_(inputs.block_tables)
    if static.input_ids.shape[0] > num_tokens:
        static.slot_mapping.fill_(-1)
        static.seq_lens.fill_(1)
    static.slot_mapping[:num_tokens].copy_(inputs.slot_mapping)
    static.seq_lens[:num_seqs].copy_(inputs.seq_lens)
    static.prompt_lens[:num_seqs].copy_(inputs.prompt_lens)

"""The decode step without Python between its operators: compiled on a CPU, captured on a GPU.

Both have `EagerStep`'s interface and hand every step that is not pure decode to it. On a CPU inductor compiles one
layer and all layers share it (or the whole model as one graph: slower to compile, a little faster to run); results
are cached on disk. On a GPU a CUDA graph is captured per batch bucket, on first use. Nothing here knows toggles.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strata_lab.layers.attention import LayerKV, StepContext
from strata_lab.layers.weights import LayerWeights
from strata_lab.models.base import CausalLM
from strata_lab.runner import EagerStep, StepInputs, step_context

GRAPH_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)  # few, captured lazily: a graph costs memory and capture time


class CompiledStep:
    """A decode step through torch.compile (inductor).

    Args:
        eager: the step it replaces, and falls back to for prefill.
        whole_model: compile all layers as one graph instead of one layer shared by all.
    """

    def __init__(self, eager: EagerStep, *, whole_model: bool = False) -> None:
        self.eager = eager
        import platformdirs  # here, so that a GPU machine needs only torch

        # Inductor's own default is a folder under /tmp, which a reboot empties.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", platformdirs.user_cache_dir("strata_lab") + "/inductor")
        body = self._whole if whole_model else self._by_layer
        self._layer = torch.compile(_layer, dynamic=True, fullgraph=True) if not whole_model else _layer
        self._run: Callable[[StepInputs], Tensor] = (
            torch.compile(body, dynamic=True, fullgraph=True) if whole_model else body
        )

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
        return self._run(inputs) if inputs.max_q_len == 1 else self.eager(inputs)

    def _by_layer(self, inputs: StepInputs) -> Tensor:
        model, kv = self.eager.model, self.eager.kv
        step = step_context(model, inputs)
        x = model.embed(inputs.input_ids, self.eager.dtype)
        for index, weights in enumerate(model.weights.layers):
            x = self._layer(model, x, weights, step, kv.layer(index))
        return model.logits(x[inputs.sample_rows])

    def _whole(self, inputs: StepInputs) -> Tensor:
        return self.eager(inputs)


def _layer(model: CausalLM, x: Tensor, weights: LayerWeights, step: StepContext, kv: LayerKV) -> Tensor:
    # No layer index among the arguments: inductor would compile one graph for each value.
    return model.layer(x, weights, step, kv)


@dataclass
class _Capture:
    graph: torch.cuda.CUDAGraph
    inputs: StepInputs
    logits: Tensor


class CudaGraphStep:
    """A decode step replayed from a CUDA graph, one per (batch bucket, block-table width bucket).

    Inputs are copied into the addresses that were captured; padding rows write nowhere (slot -1) and read one slot.
    """

    def __init__(self, eager: EagerStep) -> None:
        self.eager = eager
        self._captures: dict[tuple[int, int], _Capture] = {}
        self._pool: Any = None  # memory that all captures share

    def prepare(self, progress: Callable[[float], None]) -> None:
        """Capture the graph of one request; others are captured when they are first needed."""
        self._capture(1, 16)
        progress(1.0)

    def __call__(self, inputs: StepInputs) -> Tensor:
        """[S, V] float32."""
        if inputs.max_q_len > 1 or inputs.input_ids.shape[0] > GRAPH_BATCHES[-1]:
            return self.eager(inputs)
        num_seqs, width = inputs.block_tables.shape
        key = (next(b for b in GRAPH_BATCHES if b >= num_seqs), _power_of_two(width))
        capture = self._captures.get(key) or self._capture(*key)
        _fill(capture.inputs, inputs)
        capture.graph.replay()
        return capture.logits[:num_seqs]

    def _capture(self, num_seqs: int, width: int) -> _Capture:
        device = self.eager.model.rotary[0].device
        inputs = StepInputs.idle(num_seqs, width, device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(side):
            self.eager(inputs)  # loads kernels and workspaces, which a capture may not do
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread may be building new weights meanwhile, which allocates.
        mode = "thread_local"
        with torch.inference_mode(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode=mode):
            logits = self.eager(inputs)
        self._pool = self._pool or graph.pool()
        self._captures[num_seqs, width] = _Capture(graph, inputs, logits)
        return self._captures[num_seqs, width]


def _power_of_two(n: int) -> int:
    return 1 << max(4, (n - 1).bit_length())


def _fill(static: StepInputs, inputs: StepInputs) -> None:
    """Copy a step into captured addresses; rows beyond it become padding."""
    num_seqs, width = inputs.block_tables.shape
    static.input_ids[:num_seqs].copy_(inputs.input_ids)
    static.positions[:num_seqs].copy_(inputs.positions)
    static.slot_mapping.fill_(-1)
    static.slot_mapping[:num_seqs].copy_(inputs.slot_mapping)
    static.block_tables[:num_seqs, :width].copy_(inputs.block_tables)
    static.seq_lens.fill_(1)
    static.seq_lens[:num_seqs].copy_(inputs.seq_lens)

"""What a captured decode step keeps on the device, and who samples there.

The kernels are `kernels/gpu/sampling.py`; this is the seam between them and `run_ahead.py`, so that running ahead can
be tested where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from strata_lab.batch import ScheduledRequest
from strata_lab.sampler import inverse_temperature
from strata_lab.sampling_random import seed_keys
from strata_lab.scheduler import most_slots


class DecodeState(Protocol):
    """Device tensors of one captured batch size: what a step reads and the sampling at its end writes anew.

    Attributes:
        input_ids, positions, slot_mapping: [B] int64; a row that only pads has slot -1 and seq_len 0 for ever.
        seq_lens: [B] int32, tokens in the cache, this step's included.
        max_seq_lens: [B] int32; a row that has reached it becomes padding.
        block_tables: [B, width] int32.
        inverse_temperature, top_p, min_p: [B] float64; inverse_temperature 0 is greedy.
        top_k, seed_keys, output_positions: [B] int64.
        out_tokens: [steps, B] int64, the sampled tokens; negative where only the host can tell.
        to_target: of guesses, [V] int64: the token that each logit stands for; they are never negative.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor
    max_seq_lens: Tensor
    block_tables: Tensor
    inverse_temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed_keys: Tensor
    output_positions: Tensor
    out_tokens: Tensor
    to_target: Tensor | None


class DeviceSampling(Protocol):
    """Sampling that stays on the device (`kernels/gpu/sampling.py`)."""

    def state(self, num_seqs: int, table_width: int, steps: int) -> DecodeState:
        """An idle state: every row pads."""
        ...

    def greedy(self, logits: Tensor, state: Any, step: int) -> None:
        """Most likely tokens into `out_tokens[step]`, and the state moved on by one token."""
        ...

    def drawn(self, logits: Tensor, state: Any, step: int) -> None:
        """The same for rows of which some have a temperature."""
        ...


class GpuSampling:
    """`DeviceSampling` by the Triton kernels.

    Args:
        block_size: tokens per KV block.
        vocab_size: logits of a row.
        device: a CUDA device.
    """

    def __init__(self, block_size: int, vocab_size: int, device: torch.device) -> None:
        from strata_lab.kernels.gpu import sampling, sampling_draw, window_state  # here: a CPU needs no Triton

        self._empty = sampling.DecodeState.empty
        self._shape = (block_size, vocab_size, device)
        self.greedy, self.drawn = sampling.sample_greedy, sampling_draw.sample_drawn
        self.windows = window_state.WINDOWS

    def state(self, num_seqs: int, table_width: int, steps: int) -> DecodeState:
        """An idle state: every row pads."""
        return self._empty(num_seqs, table_width, steps, *self._shape)


def send(target: Tensor, values: list[Any]) -> None:
    """Copy values to a contiguous tensor of the device, behind what is queued there and without waiting for it.

    From pinned memory: a copy from any other waits for the queued steps, and one by one for each copy.
    """
    target.copy_(torch.tensor(values, dtype=target.dtype, pin_memory=target.is_cuda), non_blocking=True)


def fill(
    state: DecodeState, items: Sequence[ScheduledRequest], block_size: int, vocab_size: int, max_model_len: int
) -> None:
    """Write the items' next step into `state`; rows beyond them become padding."""
    num_rows, width = state.block_tables.shape
    padding = num_rows - len(items)
    requests = [item.request for item in items]

    def put(target: Tensor, values: list[Any], pad: Any) -> None:
        send(target, values + [pad] * padding)

    put(state.input_ids, [item.request.token_ids[item.start] for item in items], 0)
    put(state.positions, [item.start for item in items], 0)
    put(state.seq_lens, [item.start + 1 for item in items], 0)
    put(state.max_seq_lens, [most_slots(request, max_model_len) for request in requests], 0)
    slots = [item.block_table[item.start // block_size] * block_size + item.start % block_size for item in items]
    put(state.slot_mapping, slots, -1)
    nothing = [0] * width
    put(state.block_tables, [(item.block_table + nothing)[:width] for item in items], nothing)
    put(state.inverse_temperature, [inverse_temperature(r.params) for r in requests], 0.0)
    put(state.top_k, [min(r.params.top_k or vocab_size, vocab_size) for r in requests], vocab_size)
    put(state.top_p, [r.params.top_p for r in requests], 1.0)
    put(state.min_p, [r.params.min_p for r in requests], 0.0)
    put(state.seed_keys, seed_keys([r.seed for r in requests]).view("int64").tolist(), 0)
    put(state.output_positions, [r.num_output_tokens for r in requests], 0)

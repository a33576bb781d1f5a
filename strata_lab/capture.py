"""What all captured steps share: how a device records, what a capture is, and how a step is copied into its addresses.

Torch only; what is captured, and when, is decided in `graph_runner.py`, `graph_windows.py` and `graph_prompts.py`.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from strata_lab.runner import States, StepInputs

T = TypeVar("T")
# Held by whoever captures: threads build, decode and read prompts at the same time, and a capture begins with a wait
# for the device, which another one would forbid.
CAPTURING = threading.RLock()
MIN_TABLE_WIDTH = 16  # blocks; wider tables are captured in powers of two


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU; 0 elsewhere."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def wait_for(device: torch.device) -> None:
    """Until a GPU has nothing queued; it refuses to be asked while something is captured."""
    if device.type == "cuda":
        with CAPTURING:
            torch.cuda.synchronize(device)  # SYNC: of the whole device, by whoever calls this


def idle_rows(num_tokens: int, num_seqs: int, width: int, device: torch.device) -> StepInputs:
    """A step of several tokens that writes nowhere; they are the first request's, until a replay shares them."""
    rows = torch.arange(num_tokens, device=device)
    idle = StepInputs.idle(num_seqs, width, device)
    lengths = torch.cat([torch.full_like(idle.seq_lens[:1], num_tokens), idle.seq_lens[1:]])
    return replace(
        idle,
        input_ids=torch.zeros_like(rows),
        positions=rows,
        slot_mapping=torch.full_like(rows, -1),
        seq_lens=lengths,
        cu_seqlens_q=torch.full_like(idle.cu_seqlens_q, num_tokens).index_fill_(0, rows[:1], 0),
        sample_rows=rows,
        max_q_len=num_tokens,
    )


def captured_width(blocks: int) -> int:
    """The width of block table that is captured for tables of `blocks`."""
    return max(MIN_TABLE_WIDTH, 1 << (blocks - 1).bit_length())


class Recorder(Protocol):
    """Captures what a function does to device memory."""

    ragged: bool  # whether how many tokens each request has may change between replays
    captures: int  # made so far

    @property
    def capture_bytes(self) -> int:
        """Device memory that its captures took, of those that somebody can still replay."""
        ...

    def bucket(self, num_seqs: int) -> int:
        """The batch size to capture for `num_seqs` requests; 0 for more than a capture is worth."""
        ...

    def record(self, work: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
        """Run `work` once; return what replays it, and its tensors, whose memory every replay writes anew."""
        ...


class Taken:
    """What captures took of a device's memory, each for as long as its replay lives."""

    def __init__(self) -> None:
        self._entries: list[tuple[weakref.ref[Callable[[], None]], int]] = []

    def count(self, replay: Callable[[], None], nbytes: int) -> None:
        """Count a capture's bytes until nobody has its replay any more."""
        self._entries = [entry for entry in self._entries if entry[0]() is not None]
        self._entries.append((weakref.ref(replay), nbytes))

    @property
    def nbytes(self) -> int:
        """Of all that can still be replayed; from any thread."""
        return sum(nbytes for replay, nbytes in self._entries if replay() is not None)


@dataclass
class Capture:
    """Operators at fixed addresses: `replay` reads `inputs` and writes the rest.

    Attributes:
        replay: runs them again.
        inputs: what a step is copied into.
        logits: of all rows, [T, V] float32.
        states: hidden states of all rows.
    """

    replay: Callable[[], None]
    inputs: StepInputs
    logits: Tensor
    states: States


def latest(captures: OrderedDict[Any, T], key: Any, capture: Callable[..., T], most: int) -> T:
    """The capture of a key, made where it is missing; of all of them the `most` used last are kept."""
    if key not in captures:
        captures[key] = capture(*key)
        if len(captures) > most:
            captures.popitem(last=False)
    captures.move_to_end(key)
    return captures[key]


def verifies(inputs: StepInputs) -> bool:
    """Whether every row of a step needs its logits and looks its token up."""
    return inputs.sample_rows.shape[0] == inputs.input_ids.shape[0] and inputs.embedded is None


def fill(static: StepInputs, inputs: StepInputs) -> None:
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

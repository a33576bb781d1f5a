"""What a draft model takes of a device's memory, before it is loaded: its weights and a pool of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from strata_lab.models.checkpoint import is_linear
from strata_lab.models.loader import open_model
from strata_lab.quant import engine_granularity
from strata_lab.speculative.make import num_draft_blocks
from strata_lab.telemetry.roofline import forecast, kv_bytes_per_token


@dataclass(frozen=True)
class DraftMemory:
    """Bytes of a draft model.

    Attributes:
        weights_bytes: its matrices; the embedding only where it has one of its own.
        kv_bytes: its pool.
    """

    weights_bytes: int
    kv_bytes: int

    @property
    def total_bytes(self) -> int:
        """Of both."""
        return self.weights_bytes + self.kv_bytes


def layers_seen(name: str, device: torch.device | str) -> tuple[int, ...]:
    """Behind how many of the target's layers a draft model wants states, beside the last ones."""
    checkpoint: Any = open_model(name, 0, device)
    try:
        part = getattr(checkpoint, "draft", None)
        return () if part is None else part.seen[:-1]
    finally:
        checkpoint.close()


def draft_memory(
    name: str, device: torch.device | str, *, max_num_seqs: int, max_model_len: int, block_size: int
) -> DraftMemory:
    """Forecast for a draft model that guesses for so many requests of such a length; `CheckpointError` as for loading.

    It runs as an engine with default toggles would: weights as stored, keys and values in the device's usual dtype.
    """
    kind = torch.device(device).type
    checkpoint: Any = open_model(name, 0, device)
    own = 0
    try:
        config, stored = checkpoint.config, checkpoint.stored_format
        if (part := getattr(checkpoint, "draft", None)) is not None:
            config = replace(config, tie_word_embeddings=True)  # only the head is its own
            own = sum(checkpoint.linear(n).nbytes for n in part.own_tensors(config.hidden_size) if is_linear(n))
    finally:
        checkpoint.close()
    weights = own + forecast(config, stored, "bf16", engine_granularity(stored, kind)).stored_bytes
    tokens = num_draft_blocks(max_num_seqs, max_model_len, block_size) * block_size
    return DraftMemory(weights, tokens * kv_bytes_per_token(config, "bf16" if kind == "cuda" else "fp32"))

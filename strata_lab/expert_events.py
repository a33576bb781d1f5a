"""What a mixture of experts tells when it is asked: how often each expert was chosen (see `events.py`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertEvent:
    """Choices of the router since counting began. Made when somebody asks for it, never by a step.

    Attributes:
        t_s: `time.perf_counter()` when the counts were read, seconds.
        counts: how often each expert was chosen, layer by layer: `num_layers * num_experts` numbers. Every token that
            the model computes, of prompts too, chooses `top_k` experts in every layer.
        num_layers, num_experts, top_k: of the model.
    """

    t_s: float
    counts: tuple[int, ...]
    num_layers: int
    num_experts: int
    top_k: int

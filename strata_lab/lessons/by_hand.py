"""The engine's model run by hand, beside the engine: what comes out of each layer, and how long each operator takes.

Same weights, same operators, same code for the layers; the KV cache is its own, so the engine notices nothing. It is
for looking, not for speed: every operator is called from Python, and on a GPU waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from strata_lab.kernels import Ops, bind
from strata_lab.kv_cache import KVCache
from strata_lab.layers.attention import LayerKV, StepContext
from strata_lab.layers.weights import LayerWeights
from strata_lab.models.base import CausalLM
from strata_lab.runner import EagerStep, Slice, StepInputs

MAX_TOKENS = 256  # of the text that is run by hand


@dataclass(frozen=True)
class Call:
    """One call of an operator and its milliseconds."""

    operator: str
    ms: float


class _WatchedModel(CausalLM):
    """Keeps what comes out of every layer at the last token."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.states: list[Tensor] = []

    def layer(self, x: Tensor, weights: LayerWeights, step: StepContext, kv: LayerKV) -> Tensor:
        made = super().layer(x, weights, step, kv)
        self.states.append(made[-1:].clone())
        return made


class ByHand:
    """A model that can be looked into.

    Args:
        engine: an open `LLMEngine`; its weights in force now are used, so make a new one after `apply`.
        fused: which composition of operators a layer is: the textbook's, one after the other, or the fused ones.

    Attributes:
        calls: operator calls of the last `feed`, in order.
    """

    def __init__(self, engine: Any, *, fused: bool = False) -> None:
        builder, parts = engine._builder, engine.parts
        self.calls: list[Call] = []
        self.device, self.block_size = engine.device, engine.config.block_size
        ops = bind(builder.backend)
        watched = Ops(**{f.name: self._watched(f.name, getattr(ops, f.name)) for f in fields(Ops)})
        self.model = _WatchedModel(engine.model_config, parts.weights, watched, builder.rotary, fused=fused)
        self._blocks = list(range(-(-MAX_TOKENS // self.block_size)))
        kv = KVCache(
            engine.model_config, len(self._blocks), self.block_size, parts.kv.kv_format, self.device, parts.kv.scales
        )
        self._step = EagerStep(self.model, kv, builder.dtype)
        self.num_tokens = 0  # in its cache

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **options)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.calls.append(Call(name, (time.perf_counter() - start) * 1e3))
            return result

        return call

    @torch.inference_mode()
    def feed(self, token_ids: Sequence[int]) -> Tensor:
        """Compute tokens after those fed before; logits of the last one, [V] float32.

        Raises:
            ValueError: no tokens, or more in all than `MAX_TOKENS`.
        """
        total = self.num_tokens + len(token_ids)
        if not token_ids or total > MAX_TOKENS:
            raise ValueError(
                f"{len(token_ids)} tokens after {self.num_tokens} must be 1 to {MAX_TOKENS} in all; try fewer"
            )
        self.calls.clear()
        self.model.states.clear()
        part = Slice(list(token_ids), self.num_tokens, self._blocks, 1)
        logits = self._step(StepInputs.gather([part], self.block_size, self.device))
        self.num_tokens = total
        return logits[0].float().cpu()

    @torch.inference_mode()
    def lens(self) -> Tensor:
        """Probabilities of the next token if the model ended after each layer, [layers, V]: the *logit lens*."""
        logits = [self.model.logits(state)[0] for state in self.model.states]
        return torch.stack(logits).float().softmax(-1).cpu()

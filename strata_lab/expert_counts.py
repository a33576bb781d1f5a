"""How often each expert is chosen: counted where the choice is made, and only while somebody looks.

`CountingStep` is an `EagerStep` whose router also adds to a small tensor on the device, so a captured step counts at
every replay without asking the host anything. A step that does not count is another object and pays nothing. Rows that
only pad a captured batch have no slot and are not counted. Reading copies the tensor beside the steps; nothing waits
for it but the reader.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strata_lab.expert_events import ExpertEvent
from strata_lab.kernels import Ops
from strata_lab.kv_cache import KVCache
from strata_lab.layers.mlp import FusedMlp, PlainMlp
from strata_lab.layers.weights import MlpWeights, MoeWeights
from strata_lab.model_config import ModelConfig
from strata_lab.models.base import CausalLM
from strata_lab.op_swap import SwapsOps
from strata_lab.runner import EagerStep, States, StepInputs
from strata_lab.settings import ConfigError


class ExpertCounts:
    """Counts of one model, [layers, experts] int64 on its device."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.config = config
        self.total = torch.zeros(config.num_layers, config.num_experts, dtype=torch.int64, device=device)
        self._lock = threading.Lock()  # readers share the copy
        self._copy = torch.zeros(self.total.shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def read(self) -> ExpertEvent:
        """The counts as of now; waits for one small copy on a stream of its own."""
        with self._lock:
            if self._stream is None:
                self._copy.copy_(self.total)
            else:
                with torch.cuda.stream(self._stream):
                    self._copy.copy_(self.total, non_blocking=True)
                self._stream.synchronize()
            counts = tuple(self._copy.flatten().tolist())
        c = self.config
        return ExpertEvent(time.perf_counter(), counts, c.num_layers, c.num_experts, c.num_experts_per_tok)


class Tally:
    """What the operators of one step tell their choices to.

    Attributes:
        row: counts of the layer that is computed, [experts].
        slots: where each of the step's tokens writes, [T]; negative for a row that only pads.
    """

    row: Tensor
    slots: Tensor

    def ids(self, expert_ids: Tensor) -> None:
        """Count the experts [T, top_k] that tokens take."""
        real = (self.slots >= 0).to(torch.int64)[:, None].expand_as(expert_ids)
        self.row.index_add_(0, expert_ids.reshape(-1), real.reshape(-1))

    def logits(self, logits: Tensor, top_k: int) -> None:
        """Count the best `top_k` of router logits [T, E], where an operator chooses them without telling."""
        from strata_lab.kernels.gpu.moe_step import count_choices

        count_choices(logits, self.slots, self.row, top_k)


def counting(ops: Ops, tally: Tally) -> Ops:
    """The same operators, which tell `tally` what they choose."""

    def route(h: Tensor, router: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
        weights, expert_ids = ops.router_topk(h, router, top_k, normalize)
        tally.ids(expert_ids)
        return weights, expert_ids

    def block(x: Tensor, norm_weight: Tensor, eps: float, router: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """For a swapped operator, which tells nothing: its choice is made a second time, by the contract."""
        route(ops.rms_norm(x, norm_weight, eps), router, kwargs["top_k"], kwargs["normalize"])
        return ops.moe_block(x, norm_weight, eps, router, *args, **kwargs)

    tells = "tally" in inspect.signature(ops.moe_block).parameters
    return replace(ops, router_topk=route, moe_block=partial(ops.moe_block, tally=tally) if tells else block)


class CountingStep(EagerStep):
    """An `EagerStep` that counts.

    Args:
        model, kv, dtype: as `EagerStep` takes them.
        counts: where to.
    """

    def __init__(self, model: CausalLM, kv: KVCache, dtype: torch.dtype, *, counts: ExpertCounts) -> None:
        super().__init__(model, kv, dtype)
        self._tally = Tally()
        assert isinstance(model.mlp, PlainMlp | FusedMlp)
        counted = type(model.mlp)(model.config, counting(model.ops, self._tally))
        rows = {id(layer.mlp): counts.total[i] for i, layer in enumerate(model.weights.layers)}

        def mlp(x: Tensor, w: MlpWeights | MoeWeights) -> Tensor:
            self._tally.row = rows[id(w)]
            return counted(x, w)

        model.mlp = mlp

    def hidden(self, inputs: StepInputs) -> States:
        """See `EagerStep`."""
        self._tally.slots = inputs.slot_mapping
        return super().hidden(inputs)


class WatchesExperts(SwapsOps):
    """The part of `LLMEngine` that changes the operators of a step: others in their place, and some that count."""

    _counts: ExpertCounts | None = None
    _watched = False

    def watch_experts(self, on: bool = True) -> None:
        """Count from now on which experts tokens take, or stop counting; takes effect between two steps.

        The step that counts is built beside the one that runs. Counts go on where they stood.

        Raises:
            ConfigError: the model has no experts.
        """
        with self._apply_lock:
            self._loop.check_open()
            builder, loop = self._builder, self._loop
            if not builder.model_config.num_experts:
                raise ConfigError(f"{builder.config.model} has no experts to count: it is dense; try a mixture")
            if on == self._watched:
                return
            if self._counts is None:
                self._counts = ExpertCounts(builder.model_config, builder.device)
                self._counting: Callable[..., EagerStep] = partial(CountingStep, counts=self._counts)
            builder.step_class = self._counting if on else EagerStep
            started = time.perf_counter()
            parts = builder.parts(loop.parts.optimizations, loop.parts)
            loop.swap(parts, builder.new_block_manager, (time.perf_counter() - started) * 1e3)
            self._watched = on

    def experts(self) -> ExpertEvent | None:
        """How often each expert was chosen while it was counted; None when `watch_experts` was never called."""
        self._loop.check_open()
        return None if self._counts is None else self._counts.read()

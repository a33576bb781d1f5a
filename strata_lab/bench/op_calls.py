"""A decode step taken apart: it runs once, and every operator call it makes is kept to be made again.

Nothing here lists a model's operators: whatever `layers/` calls is found, so the benchmark cannot miss one. Weights are
random and there are only as many layers as asked for. It times nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from strata_lab.kernels import SPECS, Ops, bind
from strata_lab.kv_cache import KVCache
from strata_lab.layers.attention import StepContext
from strata_lab.layers.rotary import rotary_table
from strata_lab.layers.weights import ModelWeights
from strata_lab.model_config import ModelConfig
from strata_lab.models import get_family
from strata_lab.models.base import CausalLM, WeightReader, load_weights
from strata_lab.models.presets import PresetCheckpoint, preset_config
from strata_lab.quant.base import LinearWeight

BLOCK_SIZE = 16
# Arguments that a step reads from memory and no other call of the step has just read or written.
STREAMED = {
    "linear": ("weight",),
    "lm_head": ("weight",),
    "moe_block": ("router", "gate_up", "down"),
    "moe_mlp": ("gate_up", "down"),
    "router_topk": ("router",),
    "qkv_attention": ("k_cache", "v_cache"),
    "paged_attention": ("k_cache", "v_cache"),
}


@dataclass(frozen=True)
class Conditions:
    """What is measured. `num_layers` is the whole model's, however many are built."""

    model: str
    batch: int
    context: int
    weight_format: str
    kv_cache_dtype: str
    num_layers: int
    backend: str
    sampler: str


@dataclass(frozen=True)
class Operator:
    """Equal calls of one operator.

    Attributes:
        label: name and shape.
        function: of the backend.
        calls: keyword arguments of each call; a call of every layer built.
        streamed: names of the arguments that come from memory.
        nbytes: bytes one call has to move (mean).
        per_layer, per_step: calls in each layer, and in a step besides.
    """

    label: str
    function: Callable[..., object]
    calls: list[dict[str, Any]]
    streamed: tuple[str, ...]
    nbytes: int
    per_layer: int
    per_step: int

    @property
    def set_bytes(self) -> int:
        """Memory of the arguments that come from memory."""
        return sum(_nbytes(self.calls[0][name]) for name in self.streamed)

    @property
    def router_bytes(self) -> int:
        """Bytes of a call that are a router's, in an operator that does more than route."""
        return _nbytes(self.calls[0]["router"]) if self.label == "moe_block" else 0

    def on_sets(self, count: int) -> list[Callable[[], object]]:
        """`count` calls, each on weights and cache of its own."""
        made = list(self.calls)
        while len(made) < count:
            source = self.calls[len(made) % len(self.calls)]
            made.append(source | {name: _copy(source[name]) for name in self.streamed})
        return [functools.partial(self.function, **call) for call in made]


def load_weights_of(
    model: str, weight_format: str, num_layers: int, device: torch.device, dtype: torch.dtype
) -> tuple[ModelConfig, ModelWeights]:
    """Geometry and random weights of the first layers of a preset."""
    whole = preset_config(model)
    assert whole is not None, model
    config = replace(whole, num_layers=num_layers)
    checkpoint = PresetCheckpoint(model, config, 0, device)
    reader = WeightReader(checkpoint, weight_format, device, dtype, lambda weight: weight, lambda fraction: None)
    with torch.no_grad():
        return config, load_weights(reader, get_family(config.architecture))


class BuiltStep:
    """A decode step that can be run as a whole, in part, or with other operators.

    Args:
        conditions: batch, context and formats.
        config: geometry with the layers that are built.
        weights: of those layers.
        device, dtype: of the activations.
    """

    def __init__(
        self,
        conditions: Conditions,
        config: ModelConfig,
        weights: ModelWeights,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.conditions, self.config, self.weights, self.device, self.dtype = conditions, config, weights, device, dtype
        batch, context = conditions.batch, conditions.context
        blocks = -(-context // BLOCK_SIZE)
        self.kv = KVCache(config, batch * blocks, BLOCK_SIZE, conditions.kv_cache_dtype, device)
        for index in range(config.num_layers):
            for cache in (self.kv.layer(index).k, self.kv.layer(index).v):
                cache.copy_(torch.randn(cache.shape, dtype=torch.float32, device=device))
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(batch * blocks, dtype=torch.int32, generator=generator)  # as a pool in use has them
        order = order.view(batch, blocks)
        position = context - 1
        self.slot_mapping = (order[:, -1].long() * BLOCK_SIZE + position % BLOCK_SIZE).to(device)
        self.block_tables = order.to(device)
        self.positions = torch.full((batch,), position, device=device)
        self.seq_lens = torch.full((batch,), context, dtype=torch.int32, device=device)
        self.cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=device)
        self.input_ids = torch.randint(config.vocab_size, (batch,), generator=generator).to(device)
        self.rotary = rotary_table(config, context, device)
        self.model = self._model(bind(conditions.backend))
        self.sample = self._sampler()
        x, self.step = self.begin(self.model)
        self._x = x.clone()

    def _model(self, ops: Ops) -> CausalLM:
        return CausalLM(self.config, self.weights, ops, self.rotary, fused=True)

    def _sampler(self) -> Callable[[Tensor], object]:
        if self.conditions.backend != "triton":
            return lambda logits: logits.argmax(dim=1)
        from strata_lab.kernels.gpu.sampling import DecodeState, sample_drawn, sample_greedy

        state = DecodeState.empty(self.conditions.batch, 2**16, 1, BLOCK_SIZE, self.config.vocab_size, self.device)
        state.seq_lens.fill_(1)  # far from the end of its table, however often it runs
        if self.conditions.sampler == "greedy":
            return lambda logits: sample_greedy(logits, state, 0)
        state.inverse_temperature.fill_(1.0)
        state.top_p.fill_(0.9)
        return lambda logits: sample_drawn(logits, state, 0)

    def begin(self, model: CausalLM) -> tuple[Tensor, StepContext]:
        """What a step does before its layers."""
        cos, sin = (model.ops.take_rows(part, self.positions) for part in model.rotary)
        step = StepContext(
            cos, sin, self.slot_mapping, self.block_tables, self.seq_lens, self.cu_seqlens_q, max_q_len=1
        )
        return model.embed(self.input_ids, self.dtype), step

    def through_layers(self, model: CausalLM, x: Tensor, step: StepContext) -> Tensor:
        """All layers that are built."""
        for index, weights in enumerate(self.weights.layers):
            x = model.layer(x, weights, step, self.kv.layer(index))
        return x

    def run(self) -> None:
        """The whole step, sampling included."""
        x, step = self.begin(self.model)
        self.sample(self.model.logits(self.through_layers(self.model, x, step)))

    def run_layers(self) -> None:
        """Its layers alone."""
        self.through_layers(self.model, self._x, self.step)

    def recorded(self) -> tuple[_Recorder, Tensor]:
        """Run it once with every operator call recorded; also returns the logits."""
        recorder = _Recorder(bind(self.conditions.backend))
        model = self._model(recorder.ops)
        with torch.inference_mode():
            x, step = self.begin(model)
            recorder.in_layers = True
            x = self.through_layers(model, x, step)
            recorder.in_layers = False
            return recorder, model.logits(x)


@dataclass(frozen=True)
class _Call:
    """One recorded call."""

    name: str
    function: Callable[..., object]
    arguments: dict[str, Any]
    in_layers: bool


class _Recorder:
    """Operators that remember how they were called."""

    def __init__(self, ops: Ops) -> None:
        self.calls: list[_Call] = []
        self.in_layers = False
        self.specs = {spec.name: spec for spec in SPECS()}
        self.ops = Ops(**{f.name: self._recording(f.name, getattr(ops, f.name)) for f in fields(Ops)})

    def _recording(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(self.specs[name].ref)

        def run(*args: Any, **kwargs: Any) -> Any:
            arguments = dict(signature.bind(*args, **kwargs).arguments)
            self.calls.append(_Call(name, function, arguments, self.in_layers))
            return function(**arguments)

        return run


def operators(step: BuiltStep) -> list[Operator]:
    """The operators of a step in order of their first call, equal ones together, and its sampling."""
    recorder, logits = step.recorded()
    groups: dict[str, list[_Call]] = {}
    for call in recorder.calls:
        groups.setdefault(label(call.name, call.arguments), []).append(call)
    found = []
    for name, calls in groups.items():
        first = calls[0]
        in_layers = sum(call.in_layers for call in calls)
        bytes_moved = recorder.specs[first.name].bytes_moved
        found.append(
            Operator(
                label=name,
                function=first.function,
                calls=[call.arguments for call in calls],
                streamed=STREAMED.get(first.name, ()),
                nbytes=sum(bytes_moved(**call.arguments) for call in calls) // len(calls),
                per_layer=in_layers // step.config.num_layers,
                per_step=len(calls) - in_layers,
            )
        )
    sampling = f"sample_{step.conditions.sampler} {logits.shape[1]}"
    return [*found, Operator(sampling, step.sample, [{"logits": logits}], (), _nbytes(logits), 0, 1)]


def label(name: str, arguments: Mapping[str, Any]) -> str:
    """Operator, shape of its weight, and what is fused with it: "linear 5120x2560 norm"."""
    shapes = ["x".join(map(str, value.shape)) for value in arguments.values() if isinstance(value, LinearWeight)]
    if name in ("linear", "lm_head"):
        parts = {"norm": "norm_weight", "bias": "bias", "silu": "silu_mul", "residual": "residual"}
        fused = [part for part, argument in parts.items() if _given(arguments.get(argument))]
        return " ".join([name, *shapes, *fused])
    return name


def _given(value: Any) -> bool:
    return value is not None and value is not False


def _nbytes(value: LinearWeight | Tensor) -> int:
    return value.nbytes


def _copy(value: LinearWeight | Tensor) -> LinearWeight | Tensor:
    if isinstance(value, Tensor):
        return value.clone()
    scales, mins = (None if t is None else t.clone() for t in (value.scales, value.mins))
    return replace(value, data=value.data.clone(), scales=scales, mins=mins)

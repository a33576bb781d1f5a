"""The composition root: the only file that reads toggles and turns each into a choice of object.

`Builder.resolve` says what a wish means on this machine, or refuses it with the numbers, before anything is torn
down. `Builder.parts` then makes the objects, reusing what two settings share. Nothing here runs a step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from strata_lab.admission import (
    QUEUE_ORDERS,
    ContinuousAdmission,
    MixedPrefill,
    QueueOrder,
    SplitPrefill,
    StaticAdmission,
)
from strata_lab.apply import Fallback
from strata_lab.backends import why_no_cpu_kernels, why_no_gpu_kernels
from strata_lab.block_manager import BlockManager
from strata_lab.config import ConfigError, EngineConfig, Optimizations
from strata_lab.device_sampling import GpuSampling
from strata_lab.graph_runner import CapturedStep, CompiledStep, CpuRecorder, CudaRecorder
from strata_lab.kernels import bind
from strata_lab.kv_cache import KVCache, block_bytes
from strata_lab.layers.rotary import rotary_table
from strata_lab.layers.weights import ModelWeights
from strata_lab.memory_forecast import workspace_nbytes
from strata_lab.models import get_family
from strata_lab.models.base import CausalLM, WeightReader, load_weights
from strata_lab.models.loader import open_model
from strata_lab.prefill_lane import PrefillLane
from strata_lab.prefix_cache import BlockNames, NoPrefixCache, PrefixCache
from strata_lab.quant import engine_granularity
from strata_lab.quant.base import LinearWeight
from strata_lab.run_ahead import RunAhead
from strata_lab.runner import EagerStep, Runner
from strata_lab.sampler import Sampler
from strata_lab.telemetry.ceilings import Ceilings, ceilings
from strata_lab.telemetry.roofline import forecast

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_FORMAT_OF = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "bf16"}
POOL_FIELDS = ("kv_cache_dtype", "gpu_memory_utilization")  # a change of these makes a new KV pool
CPU_POOL_BYTES = 1 << 30  # enough for 16 streams of 2,800 tokens on the default model; a laptop has other work to do

# Prompt tokens between two steps of decodes with `pd_split`: on 2 cores the default model takes 60 ms for 64.
SLICE_TOKENS = {"cpu": 64, "cuda": 512}

ProgressFn = Callable[[str, float], None]


@dataclass(frozen=True)
class Parts:
    """What an engine runs on under one setting of the toggles."""

    optimizations: Optimizations
    weights: ModelWeights
    kv: KVCache
    runner: Runner | RunAhead
    admission: ContinuousAdmission | StaticAdmission
    prefill: MixedPrefill | SplitPrefill
    lane: PrefillLane | None
    order: QueueOrder
    prefixes: BlockNames
    max_model_len: int


class Builder:
    """Makes and remakes `Parts` for one engine.

    Args:
        config: the engine's configuration.
        progress: called with a task and a fraction during long work.
    """

    def __init__(self, config: EngineConfig, progress: ProgressFn) -> None:
        self.config, self.progress = config, progress
        self.fallbacks: list[Fallback] = []
        self.device = _device(config.device)
        self.dtype = self._dtype(config.dtype)
        self.checkpoint: Any = open_model(config.model, config.seed, self.device)
        self.model_config = self.checkpoint.config
        self.backend = self._backend()
        self.ceilings = self._ceilings()
        self.rotary = rotary_table(self.model_config, self.model_config.max_position, self.device)
        self._runners: dict[tuple[Any, ...], Any] = {}  # with the captures of the weights and pool in force
        self._planned_blocks: dict[Any, int] = {}  # what the latest `resolve` promised

    def _ceilings(self) -> Ceilings | None:
        """The card's measured limits, while its memory is still free; from the cache folder after the first time."""
        if self.backend != "triton":
            return None
        self.progress("measuring the card", 0.0)
        return ceilings(self.device)

    # -- what a wish means here ---------------------------------------------------------------------------------

    def resolve(self, wish: Optimizations, current: Parts | None = None) -> Optimizations:
        """`wish` with every None decided; raises `ConfigError` for what cannot be done here.

        A None that the pool in force decides (`max_model_len`) stays as it is while that pool stays.
        """
        limit = self.model_config.max_position
        if wish.max_model_len is not None and wish.max_model_len > limit:
            raise ConfigError(
                f"max_model_len={wish.max_model_len} is more than the {limit} positions {self.checkpoint.name} was "
                f"made for; try {limit}"
            )
        changes: dict[str, Any] = {}
        if wish.weight_format is None:
            changes["weight_format"] = self._stored_format()
        if wish.kv_cache_dtype is None:
            changes["kv_cache_dtype"] = KV_FORMAT_OF[self.dtype]
        resolved = wish.replace(changes)
        self._planned_blocks.clear()
        tokens = self._pool_blocks(resolved, current) * self.config.block_size
        if wish.max_model_len is None:
            return resolved.replace({"max_model_len": min(limit, tokens)})
        if wish.max_model_len > tokens:
            needed = -(-wish.max_model_len // self.config.block_size)
            raise ConfigError(
                f"max_model_len={wish.max_model_len} needs {needed} KV blocks but the pool has "
                f"{tokens // self.config.block_size} ({tokens} tokens); try max_model_len={tokens}, a larger "
                f"gpu_memory_utilization or num_kv_blocks, or kv_cache_dtype='fp8'"
            )
        return resolved

    def _pool_blocks(self, resolved: Optimizations, current: Parts | None) -> int:
        """Blocks of the pool in force where it can stay, else of the one to be made."""
        if current is not None and not _differ(resolved, current.optimizations, POOL_FIELDS):
            blocks = current.kv.num_blocks
            if (resolved.max_model_len or 0) <= blocks * self.config.block_size:
                return blocks
        key = (resolved.weight_format, resolved.kv_cache_dtype, resolved.gpu_memory_utilization)
        if key not in self._planned_blocks:  # before anything is loaded: what is free afterwards is another number
            self._planned_blocks[key] = self.num_kv_blocks(resolved, current)
        return self._planned_blocks[key]

    def num_kv_blocks(self, resolved: Optimizations, current: Parts | None) -> int:
        """Blocks of the pool: as configured, or what all streams could fill, within the memory there is."""
        if self.config.num_kv_blocks is not None:
            return self.config.num_kv_blocks
        per_block = block_bytes(self.model_config, self.config.block_size, resolved.kv_cache_dtype or "bf16")
        length = resolved.max_model_len or self.model_config.max_position
        wanted = resolved.max_num_seqs * -(-length // self.config.block_size)
        budget = self._memory_budget(resolved, current)
        blocks = min(wanted, budget // per_block)
        if blocks < 1:
            raise ConfigError(
                f"gpu_memory_utilization={resolved.gpu_memory_utilization} leaves {budget / 2**20:.0f} MiB for the KV "
                f"cache, less than one block of {per_block / 2**20:.2f} MiB; try a larger share or a smaller model"
            )
        return int(blocks)

    def _memory_budget(self, resolved: Optimizations, current: Parts | None) -> int:
        """Bytes for the KV pool: what is free now, less what is still to come and what must stay free."""
        utilization = resolved.gpu_memory_utilization
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(self.device)
            loaded = current is not None and current.optimizations.weight_format == resolved.weight_format
            weights = 0 if loaded else self.weight_nbytes(resolved.weight_format or "bf16")
            workspace = workspace_nbytes(self.model_config, resolved.max_num_batched_tokens, resolved.max_num_seqs)
            return max(0, int(free - (1 - utilization) * total - weights - workspace))
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min(CPU_POOL_BYTES, int(free * utilization))

    def weight_nbytes(self, weight_format: str) -> int:
        """Forecast of all weights in a format, as this engine would make them."""
        granularity = engine_granularity(weight_format, self.device.type)
        return forecast(self.model_config, weight_format, "bf16", granularity).stored_bytes

    def _stored_format(self) -> str:
        if self.dtype is torch.float32 and self.config.dtype == "float32":
            return "fp32"  # asking for float32 by name asks for the checkpoint's exact values
        return self.checkpoint.stored_format

    def _dtype(self, name: str) -> torch.dtype:
        if self.device.type == "cuda":
            return DTYPES["bfloat16" if name == "auto" else name]
        if name not in ("auto", "float32"):
            self.fallbacks.append(Fallback("dtype", f"activations are float32 on a CPU, not {name}"))
        return torch.float32

    def _backend(self) -> str:
        if self.device.type == "cuda":
            return self._gpu_backend()
        reason = why_no_cpu_kernels(self.model_config, self.progress)
        if reason:
            self.fallbacks.append(Fallback("cpu kernels", reason))
        return "reference" if reason else "cpu"

    def _gpu_backend(self) -> str:
        reason = why_no_gpu_kernels(self.device)
        if reason:
            self.fallbacks.append(Fallback("gpu kernels", reason))
        return "reference" if reason else "triton"

    # -- making the objects -------------------------------------------------------------------------------------

    def parts(self, resolved: Optimizations, current: Parts | None = None) -> Parts:
        """Objects for a resolved setting; weights and pool are taken from `current` where they do not change."""
        weights, kv = self._weights(resolved, current), self._kv(resolved, current)
        if current is not None and (weights is not current.weights or kv is not current.kv):
            self._runners = {}
        assert resolved.max_model_len is not None
        return Parts(
            optimizations=resolved,
            weights=weights,
            kv=kv,
            runner=self._runner(resolved, weights, kv),
            admission=ContinuousAdmission() if resolved.continuous_batching else StaticAdmission(),
            prefill=self._prefill() if resolved.pd_split else MixedPrefill(),
            lane=self._lane(resolved, weights, kv) if resolved.pd_split else None,
            order=QUEUE_ORDERS[resolved.scheduling_policy](),
            prefixes=self._prefixes(resolved.prefix_cache, current, weights, kv),
            max_model_len=resolved.max_model_len,
        )

    def new_block_manager(self, parts: Parts) -> BlockManager:
        """Empty books for a pool."""
        return BlockManager(parts.kv.num_blocks, self.config.block_size, parts.prefixes)

    def _weights(self, resolved: Optimizations, current: Parts | None) -> ModelWeights:
        weight_format = resolved.weight_format
        assert weight_format is not None
        if current is not None and current.weights.layers and current.optimizations.weight_format == weight_format:
            return current.weights
        task = f"loading weights as {weight_format}"
        reader = WeightReader(
            self.checkpoint, weight_format, self.device, self.dtype, self._pack(), lambda f: self.progress(task, f),
            engine_granularity(weight_format, self.device.type),
        )  # fmt: skip
        with torch.no_grad():
            made = load_weights(reader, get_family(self.model_config.architecture))
        notes = [Fallback("checkpoint", note) for note in self.checkpoint.notes()]
        self.fallbacks += [note for note in notes if note not in self.fallbacks]
        return made

    def _pack(self) -> Callable[[LinearWeight], LinearWeight]:
        if self.backend != "cpu":
            return lambda weight: weight
        from strata_lab.kernels.cpu.packing import pack

        return pack

    def _kv(self, resolved: Optimizations, current: Parts | None) -> KVCache:
        assert resolved.kv_cache_dtype is not None
        blocks = self._pool_blocks(resolved, current)
        if current is not None and current.kv.num_blocks == blocks and current.kv.kv_format == resolved.kv_cache_dtype:
            return current.kv
        scales = getattr(self.checkpoint, "kv_scales", None) if resolved.kv_cache_dtype == "fp8" else None
        size = self.config.block_size
        return KVCache(self.model_config, blocks, size, resolved.kv_cache_dtype, self.device, scales)

    def _prefixes(self, wanted: bool, current: Parts | None, weights: ModelWeights, kv: KVCache) -> BlockNames:
        """The prefix cache in force while it is wanted and what it knows is still true, else an empty one."""
        made = PrefixCache(self.config.block_size) if wanted else NoPrefixCache()
        if current is not None and weights is current.weights and kv is current.kv:
            return current.prefixes if type(current.prefixes) is type(made) else made
        return made

    def _prefill(self) -> SplitPrefill:
        """Prompts between decode steps, or on a GPU beside them, as soon as the lane is free."""
        return SplitPrefill(SLICE_TOKENS[self.device.type], decode_steps=0 if self.device.type == "cuda" else 1)

    def _lane(self, resolved: Optimizations, weights: ModelWeights, kv: KVCache) -> PrefillLane | None:
        if self.device.type != "cuda":
            return None
        return PrefillLane(self._plain(self._eager(resolved, weights, kv)), self.device)

    def _eager(self, resolved: Optimizations, weights: ModelWeights, kv: KVCache) -> EagerStep:
        model = CausalLM(self.model_config, weights, bind(self.backend), self.rotary, fused=resolved.fused_kernels)
        return EagerStep(model, kv, self.dtype)

    def _runner(self, resolved: Optimizations, weights: ModelWeights, kv: KVCache) -> Any:
        """The runner of a setting; kept, so that toggling back and forth captures nothing twice."""
        key = (resolved.cuda_graph, resolved.fused_kernels)
        if key not in self._runners:
            eager = self._eager(resolved, weights, kv)
            reason = self.why_not_captured() if resolved.cuda_graph else ""
            if reason and (fallback := Fallback("cuda_graph", reason)) not in self.fallbacks:
                self.fallbacks.append(fallback)
            captured = resolved.cuda_graph and not reason
            self._runners[key] = self._captured(eager) if captured else self._plain(eager)
        runner = self._runners[key]
        runner.max_model_len = resolved.max_model_len or 0
        return runner

    def _plain(self, step: Any) -> Runner:
        return Runner(step, Sampler(), self.config.block_size, self.device)

    def _captured(self, eager: EagerStep) -> Runner | RunAhead:
        if self.device.type == "cpu" and self.config.capture == "inductor":
            step: CompiledStep | CapturedStep = CompiledStep(eager)
        else:
            recorder = CudaRecorder() if self.device.type == "cuda" else CpuRecorder()
            step = CapturedStep(eager, recorder)
        if self.backend == "triton":
            sampling = GpuSampling(self.config.block_size, self.model_config.vocab_size, self.device)
            clock = partial(torch.cuda.Event, enable_timing=True)
            ahead = RunAhead(self._plain(step), eager, recorder, sampling, clock=clock, progress=self.progress)
            ahead.prepare()
            return ahead
        step.prepare(lambda fraction: self.progress("capturing the decode step", fraction))
        return self._plain(step)

    def forget_captures(self) -> None:
        """Drop every runner, and with it captures and what they hold."""
        self._runners = {}

    def why_not_captured(self) -> str:
        """Why `cuda_graph` has no effect here; empty where it has."""
        if self.device.type == "cpu" and self.model_config.num_experts:
            return "which experts run depends on the data, so the step of a mixture of experts stays eager on a CPU"
        if self.device.type == "cpu" and self.backend == "reference":
            return "without the CPU kernels the step stays eager"
        return ""

    def close(self) -> None:
        """Drop every reference to device memory and to the checkpoint."""
        self.forget_captures()
        self.checkpoint.close()


def _differ(a: Optimizations, b: Optimizations, names: tuple[str, ...]) -> bool:
    return any(getattr(a, name) != getattr(b, name) for name in names)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}: torch {torch.__version__} sees no CUDA device; try device='cpu'")
    return torch.device(name)


def changed_fields(before: Optimizations, after: Optimizations) -> Mapping[str, Any]:
    """Fields whose value differs, with the new value."""
    old = before.as_dict()
    return {name: value for name, value in after.as_dict().items() if old[name] != value}

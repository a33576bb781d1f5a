"""The composition root: the only file that reads toggles and turns each into a choice of object.

`resolve.py` has decided by then what a wish means on this machine. `Builder.parts` makes the objects, reusing what two
settings share. Nothing here runs a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from strata_lab.admission import (
    QUEUE_ORDERS,
    ContinuousAdmission,
    MixedPrefill,
    QueueOrder,
    SplitPrefill,
    StaticAdmission,
    Watermark,
)
from strata_lab.block_manager import BlockManager
from strata_lab.capture import wait_for
from strata_lab.config import EngineConfig, Optimizations
from strata_lab.device_sampling import GpuSampling
from strata_lab.graph_runner import CapturedStep, CompiledStep, CpuRecorder, CudaRecorder
from strata_lab.kernel_lab import SWAPPED_STEP, Guarded
from strata_lab.kernels import bind, seeing
from strata_lab.kv_cache import HostBlocks, KVCache
from strata_lab.kv_retention import Retention
from strata_lab.layers.attention import READ_ALL, ReadPages
from strata_lab.layers.weights import ModelWeights
from strata_lab.models import get_family
from strata_lab.models.base import CausalLM, WeightReader, load_weights
from strata_lab.preemption import Preemption, Recompute, SwapToHost
from strata_lab.prefill_lane import Finished, LaneStream, PrefillLane
from strata_lab.prefix_cache import BlockNames, NoPrefixCache, PrefixCache
from strata_lab.quant import engine_granularity
from strata_lab.quant.base import LinearWeight
from strata_lab.resolve import ProgressFn, Resolver
from strata_lab.run_ahead import RunAhead
from strata_lab.runner import EagerStep, Runner, StepInputs
from strata_lab.sampler import Sampler
from strata_lab.speculative.ahead import DraftAhead
from strata_lab.speculative.draft_model import DraftModel
from strata_lab.speculative.make import draft_config, model_drafter, num_draft_blocks, speculator
from strata_lab.speculative.ngram import NgramDrafter
from strata_lab.speculative.speculator import NoSpeculation, Speculation
from strata_lab.speculative.traffic import Recorder
from strata_lab.telemetry.governor import Governor, NoGovernor
from strata_lab.telemetry.monitor import NO_CPU_SENSOR, source_for

# Prompt tokens between two steps of decodes with `pd_split`: on 2 cores the default model takes 60 ms for 64.
SLICE_TOKENS = {"cpu": 64, "cuda": 512}


@dataclass(frozen=True)
class Parts:
    """What an engine runs on under one setting of the toggles."""

    optimizations: Optimizations
    weights: ModelWeights
    kv: KVCache
    runner: Runner | RunAhead | DraftAhead
    admission: ContinuousAdmission | StaticAdmission
    prefill: MixedPrefill | SplitPrefill
    lane: PrefillLane | None
    order: QueueOrder
    watermark: Watermark
    prefixes: BlockNames
    governor: Governor | NoGovernor
    preemption: Preemption
    host_blocks: HostBlocks
    retention: Retention
    basis: bytes  # tells ways of computing keys and values apart
    speculation: Speculation
    max_model_len: int
    swapped: Mapping[str, Any]


class Builder(Resolver):
    """Makes and remakes `Parts` for one engine."""

    def __init__(self, config: EngineConfig, progress: ProgressFn) -> None:
        super().__init__(config, progress)
        self._runners: dict[tuple[Any, ...], Any] = {}  # with the captures of the weights and pool in force
        self._traffic = Recorder(Path(config.record_traffic)) if config.record_traffic else None
        self.on_done = self._traffic.add if self._traffic else None
        self.embedding: LinearWeight | None = None  # of the target, where this builds a draft that has none
        self.step_class: Callable[..., EagerStep] = EagerStep  # or one that counts (`expert_counts.py`)
        self.swapped: dict[str, Guarded] = {}  # operators that the kernel lab put in place of the backend's

    # -- making the objects -------------------------------------------------------------------------------------

    def parts(self, resolved: Optimizations, current: Parts | None = None) -> Parts:
        """Objects for a resolved setting; weights and pool are taken from `current` where they do not change."""
        weights, kv = self._weights(resolved, current), self._kv(resolved, current)
        host_blocks = self._host_blocks(resolved, current, kv)
        if current is not None and (weights is not current.weights or kv is not current.kv):
            self._runners = {}
        assert resolved.max_model_len is not None
        runner, basis = self._runner(resolved, weights, kv), self._basis(resolved)
        speculation = self._speculation(resolved, runner, weights, kv)
        return Parts(
            optimizations=resolved,
            weights=weights,
            kv=kv,
            runner=speculation.runner or runner,
            admission=ContinuousAdmission() if resolved.continuous_batching else StaticAdmission(),
            prefill=self._prefill() if resolved.pd_split else MixedPrefill(),
            lane=self._lane(resolved, weights, kv) if resolved.pd_split else None,
            order=QUEUE_ORDERS[resolved.scheduling_policy](),
            watermark=Watermark(resolved.watermark, resolved.watermark_high),
            prefixes=self._prefixes(resolved.prefix_cache, current, weights, kv, basis),
            retention=self.retention(resolved),
            basis=basis,
            governor=self._governor(resolved.thermal_governor, resolved.max_num_seqs, current),
            preemption=self._preemption(host_blocks, current, weights),
            host_blocks=host_blocks,
            speculation=speculation,
            max_model_len=resolved.max_model_len,
            swapped=dict(self.swapped),
        )

    def new_block_manager(self, parts: Parts) -> BlockManager:
        """Empty books for a pool."""
        return BlockManager(parts.kv.num_blocks, self.config.block_size, parts.prefixes, parts.retention)

    def _weights(self, resolved: Optimizations, current: Parts | None) -> ModelWeights:
        weight_format = resolved.weight_format
        assert weight_format is not None
        if current is not None and current.weights.layers and current.optimizations.weight_format == weight_format:
            return current.weights
        with torch.no_grad():
            family = get_family(self.model_config.architecture)
            made = load_weights(self.reader(weight_format), family, self.embedding)
        for note in self.checkpoint.notes():
            self.record("checkpoint", note)
        return made

    def reader(self, weight_format: str) -> WeightReader:
        """What reads the checkpoint's weights in a format."""
        task = f"loading weights as {weight_format}"
        return WeightReader(
            self.checkpoint, weight_format, self.device, self.dtype, self._pack(), lambda f: self.progress(task, f),
            engine_granularity(weight_format, self.device.type),
        )  # fmt: skip

    def _pack(self) -> Callable[[LinearWeight], LinearWeight]:
        if self.backend != "cpu":
            return lambda weight: weight
        from strata_lab.kernels.cpu.packing import pack

        return pack

    def _kv(self, resolved: Optimizations, current: Parts | None) -> KVCache:
        assert resolved.kv_cache_dtype is not None
        blocks = self._pool_blocks(resolved, current)
        now = None if current is None else current.kv
        bounded = resolved.sparse_pages > 0 or (now is not None and now.has_bounds)  # idle blocks still have theirs
        if now is not None and now.num_blocks == blocks and now.kv_format == resolved.kv_cache_dtype:
            return now.with_bounds() if bounded else now
        scales = getattr(self.checkpoint, "kv_scales", None) if resolved.kv_cache_dtype == "fp8" else None
        size = self.config.block_size
        made = KVCache(self.model_config, blocks, size, resolved.kv_cache_dtype, self.device, scales)
        return made.with_bounds() if bounded else made

    def _basis(self, resolved: Optimizations) -> bytes:
        """What of a setting decides keys and values beside weights and pool; fused or not counts only to the bit."""
        exact = (resolved.fused_kernels,) if resolved.batch_invariant and not self.why_invariant_anyway() else ()
        kept = self.retention(resolved).setting
        return repr((kept, exact)).encode() if kept or exact else b""

    def _prefixes(
        self, wanted: bool, current: Parts | None, weights: ModelWeights, kv: KVCache, basis: bytes
    ) -> BlockNames:
        """The prefix cache in force while it is wanted and what it knows is still true, else an empty one."""
        made = PrefixCache(self.config.block_size) if wanted else NoPrefixCache()
        made.computed_with(basis)
        if current is not None and weights is current.weights and kv is current.kv:
            return current.prefixes if type(current.prefixes) is type(made) else made
        return made

    def _governor(self, policy: str, seats: int, current: Parts | None) -> Governor | NoGovernor:
        """The governor in force while policy and seats stay, else a new one."""
        if policy == "off":
            return NoGovernor()
        if self.device.type == "cpu":
            self.record("thermal_governor", NO_CPU_SENSOR)
        now = None if current is None else current.governor
        if isinstance(now, Governor) and (now.policy, now.seats) == (policy, seats):
            return now
        return Governor(policy, seats, partial(source_for, self.device), partial(wait_for, self.device))

    def _host_blocks(self, resolved: Optimizations, current: Parts | None, kv: KVCache) -> HostBlocks:
        """Host memory for the blocks of preempted requests; what is in force while pool and wish stay."""
        swaps = resolved.preemption == "swap"
        if current is not None and current.kv is kv and (current.optimizations.preemption == "swap") == swaps:
            return current.host_blocks
        return HostBlocks(kv, self.num_host_blocks(kv) if swaps else 0)

    def _preemption(self, host: HostBlocks, current: Parts | None, weights: ModelWeights) -> Preemption:
        """The books of host memory; empty ones for other memory or other weights."""
        if current is not None and current.host_blocks is host and current.weights is weights:
            return current.preemption
        return SwapToHost(host.num_blocks) if host.num_blocks else Recompute()

    def _prefill(self) -> SplitPrefill:
        """Prompts between decode steps, or on a GPU beside them, as soon as the lane is free."""
        return SplitPrefill(SLICE_TOKENS[self.device.type], decode_steps=0 if self.device.type == "cuda" else 1)

    def _lane(self, resolved: Optimizations, weights: ModelWeights, kv: KVCache) -> PrefillLane | None:
        if self.device.type != "cuda":
            return None
        key = ("lane", *self._step_key(resolved))
        if key not in self._runners:
            eager, on = self._eager(resolved, weights, kv), LaneStream.of(self.device)
            captured = resolved.cuda_graph and not self.why_not_captured()
            tell = partial(self.record, "pd_split")
            step = CapturedStep(eager, CudaRecorder(on.stream), tell) if captured else eager
            self._runners[key] = self._plain(Finished(step, on)), on
        return PrefillLane(*self._runners[key])

    def _eager(self, resolved: Optimizations, weights: ModelWeights, kv: KVCache) -> EagerStep:
        ops = bind(self.backend, self.swapped, invariant=resolved.batch_invariant)
        if resolved.kv_window:
            ops = seeing(ops, resolved.kv_sinks, resolved.kv_window)
        reading = ReadPages(resolved.sparse_pages) if resolved.sparse_pages else READ_ALL
        model = CausalLM(self.model_config, weights, ops, self.rotary, fused=resolved.fused_kernels, reading=reading)
        step = self.step_class(model, kv, self.dtype)
        step.seen = self._layers_seen(resolved)
        return step

    def _runner(self, resolved: Optimizations, weights: ModelWeights, kv: KVCache) -> Any:
        """The runner of a setting; kept, so that toggling back and forth captures nothing twice."""
        own = self._own_ops()
        self._runners = {k: r for k, r in self._runners.items() if k[0] == "draft model" or k[-1] in ((), own)}
        key = ("step", *self._step_key(resolved))
        if key not in self._runners:
            eager = self._eager(resolved, weights, kv)
            reason = self.why_not_captured() if resolved.cuda_graph else ""
            if reason:
                self.record("cuda_graph", reason)
            captured = resolved.cuda_graph and not reason
            make = self._captured_or_eager if own else self._captured
            self._runners[key] = make(eager) if captured else self._plain(eager)
        runner = self._runners[key]
        runner.max_model_len = resolved.max_model_len or 0
        return runner

    def _own_ops(self) -> tuple[tuple[str, Guarded], ...]:
        return tuple(sorted(self.swapped.items(), key=lambda item: item[0]))

    def _step_key(self, resolved: Optimizations) -> tuple[Any, ...]:
        """What tells steps over the same weights and pool apart; the swapped operators last."""
        r, kept = resolved, self.retention(resolved).setting
        seen = self._layers_seen(r)
        return r.cuda_graph, r.fused_kernels, r.batch_invariant, kept, seen, self.step_class, self._own_ops()

    def _plain(self, step: Any) -> Runner:
        return Runner(step, Sampler(), self.config.block_size, self.device)

    def _recorder(self) -> CudaRecorder | CpuRecorder:
        return CudaRecorder() if self.device.type == "cuda" else CpuRecorder()

    def _captured_or_eager(self, eager: EagerStep) -> Runner | RunAhead:
        """A captured step, or the plain one where a swapped operator cannot be captured."""
        try:
            return self._captured(eager)
        except RuntimeError as error:
            reason = f"{SWAPPED_STEP} {', '.join(self.swapped)} runs uncaptured: {str(error).splitlines()[0]}"
            self.record("cuda_graph", reason)
            return self._plain(eager)

    def calls_per_step(self, op: str, parts: Parts) -> int:
        """Run a step that writes nowhere with the swapped operators; how often it calls `op`."""
        before = (guarded := self.swapped[op]).calls
        step = self._eager(parts.optimizations, parts.weights, parts.kv)
        with torch.inference_mode():
            step.every_row(StepInputs.idle(1, 1, self.device))
        return guarded.calls - before

    def _captured(self, eager: EagerStep) -> Runner | RunAhead:
        if self.device.type == "cpu" and self.config.capture == "inductor":
            step: CompiledStep | CapturedStep = CompiledStep(eager)
        else:
            recorder = self._recorder()
            step = CapturedStep(eager, recorder, partial(self.record, "cuda_graph"))
        if self.backend == "triton":
            sampling = GpuSampling(self.config.block_size, self.model_config.vocab_size, self.device)
            clock = partial(torch.cuda.Event, enable_timing=True)
            ahead = RunAhead(self._plain(step), eager, recorder, sampling, clock=clock, progress=self.progress)
            ahead.prepare()
            return ahead
        step.prepare(lambda fraction: self.progress("capturing the decode step", fraction))
        return self._plain(step)

    def _speculation(
        self, resolved: Optimizations, runner: Runner | RunAhead, weights: ModelWeights, kv: KVCache
    ) -> Speculation:
        """Who guesses, with what it knows of this runner's costs: kept beside the runner.

        They are measured on a step of its own: the buffers of the runner's captured one may be in use meanwhile.
        """
        if resolved.speculative == "none":
            return NoSpeculation()
        key = ("speculation", resolved.speculative, resolved.num_draft_tokens, *self._step_key(resolved))
        if key not in self._runners:
            self.progress("measuring what verification costs", 0.0)
            drafter = NgramDrafter() if resolved.speculative == "ngram" else self._draft_model(resolved, weights)
            eager = self._eager(resolved, weights, kv)
            captured = isinstance(_plain_runner(runner).step, CapturedStep)
            step = CapturedStep(eager, self._recorder()) if captured else eager
            self._runners[key] = speculator(drafter, step, runner, resolved.num_draft_tokens, self._recorder)
            self.progress("measuring what verification costs", 1.0)
        return self._runners[key]

    def _draft_model(self, resolved: Optimizations, weights: ModelWeights) -> DraftModel:
        """The model that guesses: a small engine's parts without its loop, kept until the weights change."""
        name, size = self.draft_model, self.config.block_size
        assert name is not None
        blocks = num_draft_blocks(resolved.max_num_seqs, resolved.max_model_len or 1, size)
        key = ("draft model", name, blocks)
        if key not in self._runners:
            builder = Builder(draft_config(name, self.config, self.device, blocks), self.progress)
            made = model_drafter(builder, name, self.checkpoint, weights.embedding, resolved.kv_cache_dtype)
            for fallback in builder.fallbacks:
                self.record(fallback.feature, fallback.reason)
            self._runners[key] = made
        return self._runners[key]

    def forget_captures(self) -> None:
        """Drop every runner, and with it captures and what they hold."""
        self._runners = {}

    def close(self) -> None:
        """Drop every reference to device memory and to the checkpoint; write what is left of the traffic."""
        self.forget_captures()
        self.checkpoint.close()
        if self._traffic is not None:
            self._traffic.close()


def _plain_runner(runner: Runner | RunAhead | DraftAhead) -> Runner:
    ahead = runner.ahead if isinstance(runner, DraftAhead) else runner
    return ahead.runner if isinstance(ahead, RunAhead) else ahead

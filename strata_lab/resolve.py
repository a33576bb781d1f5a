"""What a wish for settings means on this machine: every None decided, the impossible refused with the numbers.

Nothing is loaded or torn down here beyond the checkpoint's description; `build.py` makes the objects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from strata_lab.apply import Fallback
from strata_lab.backends import why_no_cpu_kernels, why_no_gpu_kernels
from strata_lab.config import EngineConfig, Optimizations
from strata_lab.kv_cache import KVCache, block_bytes
from strata_lab.kv_retention import Retention, retention
from strata_lab.layers.rotary import rotary_table
from strata_lab.memory_forecast import CPU_POOL_BYTES, workspace_nbytes
from strata_lab.models.loader import open_model
from strata_lab.models.shipped import draft_for
from strata_lab.quant import engine_granularity
from strata_lab.settings import ConfigError
from strata_lab.speculative.forecast import draft_memory, layers_seen
from strata_lab.telemetry import hardware
from strata_lab.telemetry.ceilings import Ceilings, ceilings
from strata_lab.telemetry.roofline import forecast

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_FORMAT_OF = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "bf16"}
POOL_FIELDS = ("kv_cache_dtype", "gpu_memory_utilization")  # a change of these makes a new KV pool
GIB = 1 << 30
MAX_SWAP_BYTES = 4 * GIB  # what vLLM takes per GPU by default
SWAP_SHARE = 0.1  # of the free main memory: it is pinned on a GPU machine, so nobody else can have it

ProgressFn = Callable[[str, float], None]


class PoolInForce(Protocol):
    """What is already there: a setting and the KV pool made for it (`build.Parts`)."""

    @property
    def optimizations(self) -> Optimizations:
        """The setting in force."""
        ...

    @property
    def kv(self) -> KVCache:
        """Its pool."""
        ...


class Resolver:
    """One machine and one checkpoint: which settings they can have.

    Args:
        config: the engine's configuration.
        progress: called with a task and a fraction during long work.
    """

    def __init__(self, config: EngineConfig, progress: ProgressFn) -> None:
        self.config, self.progress = config, progress
        self.fallbacks: list[Fallback] = []
        self.device = device_named(config.device)
        self.dtype = self._dtype(config.dtype)
        self.checkpoint: Any = open_model(config.model, config.seed, self.device)
        self.model_config = self.checkpoint.config
        self.backend = self._backend()
        self.ceilings = self._ceilings()
        self.rotary = rotary_table(self.model_config, self.model_config.max_position, self.device)
        self.draft_model = config.draft_model or draft_for(config.model)
        self._seen: tuple[int, ...] | None = None  # what the draft model sees, once that is known
        self._planned_blocks: dict[Any, int] = {}  # what the latest `resolve` promised

    def record(self, feature: str, reason: str) -> None:
        """Note once that something runs otherwise than asked for."""
        fallback = Fallback(feature, reason)
        if fallback not in self.fallbacks:
            self.fallbacks.append(fallback)

    def _ceilings(self) -> Ceilings | None:
        """The card's measured limits, while its memory is still free; from the cache folder after the first time."""
        if self.backend != "triton":
            return None
        self.progress("measuring the card", 0.0)
        return ceilings(self.device)

    # -- what a wish means here ---------------------------------------------------------------------------------

    def resolve(self, wish: Optimizations, current: PoolInForce | None = None) -> Optimizations:
        """`wish` with every None decided; raises `ConfigError` for what cannot be done here.

        A None that the pool in force decides (`max_model_len`) stays as it is while that pool stays.
        """
        limit = self.model_config.max_position
        if wish.max_model_len is not None and wish.max_model_len > limit:
            raise ConfigError(
                f"max_model_len={wish.max_model_len} is more than the {limit} positions {self.checkpoint.name} was "
                f"made for; try {limit}"
            )
        if wish.speculative == "draft" and self.draft_model is None:
            raise ConfigError(
                "speculative='draft' needs a model that guesses; try draft_model=<a small model of the same family> "
                "when the engine is made, or speculative='ngram'"
            )
        changes: dict[str, Any] = {}
        if wish.weight_format is None:
            changes["weight_format"] = self._stored_format()
        if wish.kv_cache_dtype is None:
            changes["kv_cache_dtype"] = KV_FORMAT_OF[self.dtype]
        resolved = wish.replace(changes)
        if resolved.batch_invariant and self.device.type == "cuda" and self.backend == "reference":
            raise ConfigError(
                f"batch_invariant=True needs the Triton operators here: {why_no_gpu_kernels(self.device)}; try "
                f"device='cpu' or batch_invariant=False"
            )
        self._check_pages(resolved)
        self._planned_blocks.clear()
        blocks = self._pool_blocks(resolved, current)
        tokens = blocks * self.config.block_size
        if self._fewest_blocks(resolved, limit) <= blocks:
            tokens = limit
        if wish.max_model_len is None:
            return resolved.replace({"max_model_len": min(limit, tokens)})
        needed = self._fewest_blocks(resolved, wish.max_model_len)
        if needed > blocks:
            per_block = self._block_bytes(resolved)
            raise ConfigError(
                f"max_model_len={wish.max_model_len} needs {needed} KV blocks but the pool has {blocks} ({tokens} "
                f"tokens), {needed * per_block / 2**20:.1f} MiB against {blocks * per_block / 2**20:.1f}; try "
                f"max_model_len={tokens}, a larger gpu_memory_utilization or num_kv_blocks, kv_cache_dtype='fp8', "
                f"or a kv_window"
            )
        return resolved

    def _check_pages(self, resolved: Optimizations) -> None:
        """Refuse what cannot be had together with a choice of blocks."""
        if resolved.sparse_pages and resolved.kv_window:
            raise ConfigError(
                f"sparse_pages={resolved.sparse_pages} chooses among all blocks and kv_window={resolved.kv_window} "
                f"gives most of them back; try kv_window=0, or sparse_pages=0"
            )
        if resolved.sparse_pages and resolved.batch_invariant and self.backend != "cpu":
            raise ConfigError(
                f"sparse_pages={resolved.sparse_pages} chooses blocks by sums whose last bits depend on the batch "
                f"here, which batch_invariant=True rules out; try batch_invariant=False, or sparse_pages=0"
            )

    def retention(self, resolved: Optimizations) -> Retention:
        """Which tokens attention sees under a setting."""
        r = resolved
        return retention(r.kv_sinks, r.kv_window, r.sparse_pages, self.config.block_size)

    def _block_bytes(self, resolved: Optimizations) -> int:
        size, kv_format = self.config.block_size, resolved.kv_cache_dtype or "bf16"
        return block_bytes(self.model_config, size, kv_format, bounds=resolved.sparse_pages > 0)

    def _fewest_blocks(self, resolved: Optimizations, length: int) -> int:
        """Blocks without which a request of `length` tokens cannot be served."""
        size = self.config.block_size
        return min(-(-length // size), self.retention(resolved).most_blocks(size, 1))

    def _pool_blocks(self, resolved: Optimizations, current: PoolInForce | None) -> int:
        """Blocks of the pool in force where it can stay, else of the one to be made."""
        if current is not None and not differ(resolved, current.optimizations, POOL_FIELDS):
            blocks = current.kv.num_blocks
            if self._fewest_blocks(resolved, resolved.max_model_len or 0) <= blocks:
                return blocks
        key = (resolved.weight_format, resolved.kv_cache_dtype, resolved.gpu_memory_utilization)
        if key not in self._planned_blocks:  # before anything is loaded: what is free afterwards is another number
            self._planned_blocks[key] = self.num_kv_blocks(resolved, current)
        return self._planned_blocks[key]

    def num_kv_blocks(self, resolved: Optimizations, current: PoolInForce | None) -> int:
        """Blocks of the pool: as configured, or what all streams could fill, within the memory there is."""
        if self.config.num_kv_blocks is not None:
            return self.config.num_kv_blocks
        per_block = self._block_bytes(resolved)
        length = resolved.max_model_len or self.model_config.max_position
        size, step = self.config.block_size, min(length, resolved.max_num_batched_tokens)
        wanted = resolved.max_num_seqs * min(-(-length // size), self.retention(resolved).most_blocks(size, step))
        budget = self._memory_budget(resolved, current)
        blocks = min(wanted, budget // per_block)
        if blocks < 1:
            raise ConfigError(
                f"gpu_memory_utilization={resolved.gpu_memory_utilization} leaves {budget / 2**20:.0f} MiB for the KV "
                f"cache, less than one block of {per_block / 2**20:.2f} MiB; try a larger share or a smaller model"
            )
        if current is not None and self.device.type == "cuda":
            self._check_beside(int(blocks) * per_block, resolved, current)
        return int(blocks)

    def _check_beside(self, pool_bytes: int, resolved: Optimizations, current: PoolInForce) -> None:
        """Refuse a pool that finds no room beside the one in force, which stands until its content is copied."""
        free, total = torch.cuda.mem_get_info(self.device)
        if pool_bytes > free:
            share = resolved.gpu_memory_utilization
            raise ConfigError(
                f"gpu_memory_utilization={share} makes a KV pool of {pool_bytes / GIB:.2f} GiB that must stand beside "
                f"that in force ({current.kv.nbytes / GIB:.2f} GiB) until it is copied, and {free / GIB:.2f} GiB are "
                f"free; try {max(0.05, share - (pool_bytes - free) / total):.2f}, or make a new engine"
            )

    def num_host_blocks(self, kv: KVCache) -> int:
        """Blocks of main memory for preempted requests: `swap_space`, or a modest share; `ConfigError` for too much."""
        per_block, free = kv.nbytes // kv.num_blocks, hardware.cpu_info().available_memory_bytes or MAX_SWAP_BYTES
        if self.config.swap_space is None:
            wanted = min(kv.nbytes, MAX_SWAP_BYTES, int(SWAP_SHARE * free))
        else:
            wanted = int(self.config.swap_space * GIB)
            if wanted > free:
                raise ConfigError(
                    f"swap_space={self.config.swap_space} GiB is more than the {free / GIB:.2f} GiB of main memory "
                    f"that are free; try {int(free / GIB / 2)}"
                )
        blocks = wanted // per_block
        reason = f"{wanted / GIB:.3g} GiB of swap space hold no block: preempted requests are computed again"
        if not blocks:
            self.record("preemption", reason)
        return blocks

    def _memory_budget(self, resolved: Optimizations, current: PoolInForce | None) -> int:
        """Bytes for the KV pool: what is free now, less what is still to come and what must stay free."""
        utilization = resolved.gpu_memory_utilization
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(self.device)
            loaded = current is not None and current.optimizations.weight_format == resolved.weight_format
            weights = 0 if loaded else self.weight_nbytes(resolved.weight_format or "bf16")
            workspace = workspace_nbytes(self.model_config, resolved.max_num_batched_tokens, resolved.max_num_seqs)
            given_back = 0 if current is None else current.kv.nbytes  # the pool in force goes when the new one is there
            taken = (1 - utilization) * total + weights + workspace + self._draft_nbytes(resolved)
            return max(0, int(free + given_back - taken))
        available = hardware.cpu_info().available_memory_bytes
        if available is None:
            return CPU_POOL_BYTES
        return min(CPU_POOL_BYTES, max(0, int(available * utilization) - self._draft_nbytes(resolved)))

    def _draft_nbytes(self, resolved: Optimizations) -> int:
        """Forecast of the draft model, whose weights and pool come beside the target's; 0 where none is asked for."""
        if resolved.speculative != "draft" or self.draft_model is None:
            return 0
        length = resolved.max_model_len or self.model_config.max_position
        return draft_memory(
            self.draft_model, self.device, max_num_seqs=resolved.max_num_seqs, max_model_len=length,
            block_size=self.config.block_size,
        ).total_bytes  # fmt: skip

    def _layers_seen(self, resolved: Optimizations) -> tuple[int, ...]:
        """Behind which layers states are kept, beside the last ones: where the draft model asks for them."""
        if resolved.speculative != "draft" or self.draft_model is None:
            return ()
        if self._seen is None:
            self._seen = layers_seen(self.draft_model, self.device)
        return self._seen

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
            self.record("dtype", f"activations are float32 on a CPU, not {name}")
        return torch.float32

    def _backend(self) -> str:
        if self.device.type == "cuda":
            return self._gpu_backend()
        reason = why_no_cpu_kernels(self.model_config, self.progress)
        if reason:
            self.record("cpu kernels", reason)
        return "reference" if reason else "cpu"

    def _gpu_backend(self) -> str:
        reason = why_no_gpu_kernels(self.device)
        if reason:
            self.record("gpu kernels", reason)
        return "reference" if reason else "triton"

    def why_invariant_anyway(self) -> str:
        """Why `batch_invariant` changes nothing here; empty where it does."""
        if self.backend == "cpu" and not self.model_config.num_experts:
            return "each C++ operator gives a row the same bits whatever is computed beside it, with and without"
        return ""

    def why_not_captured(self) -> str:
        """Why `cuda_graph` has no effect here; empty where it has."""
        if self.device.type == "cpu" and self.model_config.num_experts:
            return "which experts run depends on the data, so the step of a mixture of experts stays eager on a CPU"
        if self.device.type == "cpu" and self.backend == "reference":
            return "without the CPU kernels the step stays eager"
        return ""


def differ(a: Optimizations, b: Optimizations, names: tuple[str, ...]) -> bool:
    """Whether any of the named fields differs between two settings."""
    return any(getattr(a, name) != getattr(b, name) for name in names)


def device_named(name: str) -> torch.device:
    """The device of a setting: "auto" takes a GPU where there is one; `ConfigError` for one that is not here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}: torch {torch.__version__} sees no CUDA device; try device='cpu'")
    return torch.device(name)

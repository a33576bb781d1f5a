"""Does it fit? What an engine will take of a card's memory and of the host's, before anything is loaded.

The same arithmetic that sizes the KV pool of a running engine (`resolve.py`), for a card that may not be here. Where it
does not fit, or the pool is smaller than asked for, one setting is named that helps, and a value that was computed to
be enough. It loads nothing and asks no driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from strata_lab.memory_forecast import (
    CPU_POOL_BYTES,
    GRAPH_BYTES,
    activation_nbytes,
    conversion_nbytes,
    dequantized_nbytes,
    rotary_nbytes,
)
from strata_lab.model_config import ModelConfig
from strata_lab.quant import engine_granularity
from strata_lab.telemetry.roofline import KV_BYTES, forecast, kv_bytes_per_token

CONTEXT_BYTES = 600 << 20  # a CUDA context, before the first allocation: an allowance, no measurement of every driver
NARROWER = ("fp8", "int8", "int4")
SHORTEST = 2048  # tokens: a request limit below this is no help to most people
MOST_UTILIZATION = 0.95
GIB = 1 << 30

Verdict = Literal["fits", "tight", "too small"]


@dataclass(frozen=True)
class Plan:
    """What is to run where.

    Attributes:
        config: geometry of the model.
        device: "cpu" or "cuda".
        memory_bytes: of the card, or what a CPU has available.
        weight_format, kv_cache_dtype: formats, decided.
        max_num_seqs, max_num_batched_tokens, gpu_memory_utilization: as in `Optimizations`.
        max_model_len: longest request; None takes what the pool holds, at most the model's own limit.
        block_size: tokens per block.
        num_kv_blocks: size of the pool; None takes what is left.
        captures: whether decode steps are captured.
        swap_bytes: pinned main memory for preempted requests.
        draft_bytes: of the draft model, weights and pool (`speculative/forecast.py`); 0 for none.
    """

    config: ModelConfig
    device: str
    memory_bytes: int
    weight_format: str
    kv_cache_dtype: str
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    captures: bool = True
    swap_bytes: int = 0
    draft_bytes: int = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return kv_bytes_per_token(self.config, self.kv_cache_dtype) * self.block_size

    @property
    def length(self) -> int:
        """The longest request that is asked for."""
        return self.max_model_len or self.config.max_position


@dataclass(frozen=True)
class Forecast:
    """The answer.

    Attributes:
        weights_bytes, kv_bytes, draft_bytes, workspace_bytes, captures_bytes, context_bytes: parts of the device's
            memory.
        total_bytes: their sum.
        limit_bytes: what may be taken: the device's memory times `gpu_memory_utilization`.
        host_pinned_bytes, host_peak_bytes: main memory: locked for swapping, and taken for a moment while loading.
        kv_blocks, kv_tokens: of the pool.
        full_requests: requests of full length that the pool holds at the same time.
        verdict: "fits", "tight" (it runs, but not all requests at full length at once) or "too small" (it will not
            start).
        reason: a sentence.
        setting, value: the first setting to change, and to what; empty and None where nothing has to be.
    """

    weights_bytes: int
    kv_bytes: int
    draft_bytes: int
    workspace_bytes: int
    captures_bytes: int
    context_bytes: int
    total_bytes: int
    limit_bytes: int
    host_pinned_bytes: int
    host_peak_bytes: int
    kv_blocks: int
    kv_tokens: int
    full_requests: int
    verdict: Verdict
    reason: str
    setting: str = ""
    value: Any = None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def check(plan: Plan) -> Forecast:
    """Forecast a plan, with the first change that helps where it does not fit."""
    made = _measure(plan)
    if made.verdict == "fits":
        return made
    for setting, value, changed in _changes(plan, made):
        if changed.verdict == "fits" or (made.verdict == "too small" and changed.verdict == "tight"):
            return replace(made, setting=setting, value=value)
    if made.verdict == "tight":
        return replace(made, setting="max_num_seqs", value=max(1, made.full_requests))
    return replace(made, setting="model", value="a smaller one, or a card with more memory")


def _measure(p: Plan) -> Forecast:
    gpu = p.device == "cuda"
    weights = forecast(p.config, p.weight_format, "bf16", engine_granularity(p.weight_format, p.device)).stored_bytes
    workspace = activation_nbytes(p.config, p.max_num_batched_tokens, p.max_num_seqs) + rotary_nbytes(p.config)
    workspace += dequantized_nbytes(p.config) if gpu else 0
    captures, context = (GRAPH_BYTES if gpu and p.captures else 0), (CONTEXT_BYTES if gpu else 0)
    limit = int(p.memory_bytes * p.gpu_memory_utilization)
    taken = weights + workspace + captures + context + p.draft_bytes
    left = limit - taken
    blocks = _blocks(p, left if gpu else min(CPU_POOL_BYTES, left))
    kv = max(0, blocks) * p.block_bytes
    tokens = max(0, blocks) * p.block_size
    full = tokens // (-(-p.length // p.block_size) * p.block_size)
    verdict, reason = _judge(p, left - kv, tokens, full)
    return Forecast(
        weights_bytes=weights,
        kv_bytes=kv,
        draft_bytes=p.draft_bytes,
        workspace_bytes=workspace,
        captures_bytes=captures,
        context_bytes=context,
        total_bytes=taken + kv,
        limit_bytes=limit,
        host_pinned_bytes=p.swap_bytes,
        host_peak_bytes=conversion_nbytes(p.config),
        kv_blocks=max(0, blocks),
        kv_tokens=tokens,
        full_requests=full,
        verdict=verdict,
        reason=reason,
    )


def _blocks(p: Plan, budget: int) -> int:
    """Blocks of the pool, as the engine would decide."""
    if p.num_kv_blocks is not None:
        return p.num_kv_blocks
    return min(p.max_num_seqs * -(-p.length // p.block_size), budget // p.block_bytes)


def _judge(p: Plan, spare: int, tokens: int, full: int) -> tuple[Verdict, str]:
    if spare < 0:
        return "too small", f"{-spare / GIB:.2f} GiB more are needed than may be taken"
    if tokens < (p.max_model_len or p.block_size):
        wanted = p.max_model_len or p.block_size
        return "too small", f"the KV pool would hold {tokens} tokens and a request may need {wanted}"
    if full >= p.max_num_seqs:
        return "fits", f"all {p.max_num_seqs} requests fit at their full {p.length} tokens"
    many = f"{full} of {p.max_num_seqs} requests fit at their full {p.length} tokens" if full else (
        f"one request gets at most {tokens} of the model's {p.length} tokens"
    )  # fmt: skip
    return "tight", f"{many}; more of them wait or are computed again"


def _changes(p: Plan, made: Forecast) -> Iterator[tuple[str, Any, Forecast]]:
    """Changes of one setting in the order of what they cost: cache format, request length, share, weights, budget."""

    def tried(setting: str, value: Any) -> tuple[str, Any, Forecast]:
        return setting, value, _measure(replace(p, **{setting: value}))

    short = made.verdict == "too small" and made.kv_tokens >= p.block_size
    if p.num_kv_blocks is not None and made.verdict == "too small":
        most = _measure(replace(p, num_kv_blocks=None)).kv_blocks
        if most:
            yield tried("num_kv_blocks", most)
    if KV_BYTES[p.kv_cache_dtype] > 1:
        yield tried("kv_cache_dtype", "fp8")
    if short and made.kv_tokens >= SHORTEST:
        yield tried("max_model_len", made.kv_tokens)
    if p.gpu_memory_utilization < MOST_UTILIZATION:
        yield tried("gpu_memory_utilization", MOST_UTILIZATION)
    if made.verdict == "too small":
        narrower = [f for f in NARROWER if _stored(p, f) < _stored(p, p.weight_format)]
        yield from (tried("weight_format", f) for f in narrower)
        for tokens in _halvings(p.max_num_batched_tokens):
            yield tried("max_num_batched_tokens", tokens)


def _stored(p: Plan, weight_format: str) -> int:
    return forecast(p.config, weight_format, "bf16", engine_granularity(weight_format, p.device)).stored_bytes


def _halvings(value: int) -> Iterator[int]:
    while value > 64:
        value //= 2
        yield value


def rows(made: Forecast) -> list[tuple[str, int, str]]:
    """(part, bytes, what it is) for a table."""
    explained: list[tuple[str, Callable[[Forecast], int], str]] = [
        ("weights", lambda f: f.weights_bytes, "all matrices with their scales"),
        ("KV pool", lambda f: f.kv_bytes, f"{made.kv_blocks} blocks, {made.kv_tokens} tokens"),
        ("draft model", lambda f: f.draft_bytes, "weights and KV pool of what guesses"),
        ("workspace", lambda f: f.workspace_bytes, "activations of the largest step, logits, tables"),
        ("captures", lambda f: f.captures_bytes, "CUDA graphs and libraries' handles (an allowance)"),
        ("context", lambda f: f.context_bytes, "of the driver (an allowance)"),
        ("total", lambda f: f.total_bytes, ""),
        ("may be taken", lambda f: f.limit_bytes, "memory x gpu_memory_utilization"),
        ("host, pinned", lambda f: f.host_pinned_bytes, "swap space of preempted requests"),
        ("host, at most", lambda f: f.host_peak_bytes, "for a moment, if weights are converted while loading"),
    ]
    return [(name, of(made), text) for name, of, text in explained]

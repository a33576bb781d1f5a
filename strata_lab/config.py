"""Every setting of the engine, validated once, with errors that say what would work.

`Optimizations` holds the toggles people flip while the engine runs; `EngineConfig` holds what is fixed
for the life of an engine. Nothing here touches a device: whether a *valid* value is also *possible* on
this machine is decided in `build.py`, which is the only file that reads `Optimizations`.

CLI flags, the notebook panel, the ablation table, `strata doctor` and the equivalence tests are derived
from `toggles()`; none of them lists a toggle by hand.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from strata_lab.kv_retention import LEAST_PAGES
from strata_lab.settings import ConfigError, Toggle, check_names, check_size, check_whole, toggle

DEFAULT_MODEL = "smollm2-135m"
BLOCK_SIZES = (8, 16, 32)
WEIGHT_FORMATS = ("bf16", "fp32", "fp8", "int8", "int4")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
CAPTURES = ("replay", "inductor")
SPEED, LOAD, LONG, MACHINE = TOPICS = ("Speed", "Many requests", "Long texts", "Machine and exactness")  # of toggles


@dataclass(frozen=True, kw_only=True)
class Optimizations:
    """The toggles. Defaults are what suits most people; `none()` is the slow, obviously right engine."""

    cuda_graph: bool = toggle(
        "Replay the decode step from a capture instead of launching it op by op "
        "(a CUDA graph on a GPU, recorded operator calls on a CPU).",
        topic=SPEED, default=True, off=False,
    )  # fmt: skip
    fused_kernels: bool = toggle(
        "Run norm+QKV, RoPE+cache write, gate/up+SiLU and projection+residual as one kernel each.",
        topic=SPEED, default=True, off=False,
    )  # fmt: skip
    weight_format: str | None = toggle(
        "Number format of the linear layers' weights; None takes what the checkpoint is stored in.",
        topic=SPEED, default=None, off="bf16", choices=WEIGHT_FORMATS, cost="rebuild", lossless=False, optional=True,
    )  # fmt: skip
    kv_cache_dtype: str | None = toggle(
        "Number format of the KV cache; None takes the engine's dtype.",
        topic=SPEED, default=None, off="bf16", choices=("bf16", "fp32", "fp8"), cost="rebuild", lossless=False,
        optional=True,
    )  # fmt: skip
    pd_split: bool = toggle(
        "Give prompts steps of their own, in bounded slices between the decode steps, so that a long prompt does not "
        "stall running streams.",
        topic=SPEED, default=False, off=False,
    )  # fmt: skip
    continuous_batching: bool = toggle(
        "Admit a new request as soon as there is room; off waits until the whole batch has finished.",
        topic=SPEED, default=True, off=False,
    )  # fmt: skip
    prefix_cache: bool = toggle(
        "Keep the KV cache of texts that have ended, and start a request whose prompt begins like one of them behind "
        "what they share.",
        topic=SPEED, default=True, off=False,
    )  # fmt: skip
    batch_invariant: bool = toggle(
        "Add everything up in one order, whatever is computed beside it: log probabilities are the same to the last "
        "bit alone, in a batch, after preemption and behind a cached prefix.",
        topic=MACHINE, default=False, off=False,
    )  # fmt: skip
    kv_window: int = toggle(
        "Tokens of the past that attention sees, beside the first kv_sinks; what lies between is dropped from the KV "
        "cache, so memory is bounded. 0 sees all.",
        topic=LONG, default=0, off=0, number="int", minimum=0, lossless=False,
    )  # fmt: skip
    kv_sinks: int = toggle(
        "First tokens of a text that attention sees for ever; only with kv_window.",
        topic=LONG, default=4, off=4, number="int", minimum=0, maximum=4096, lossless=False,
    )  # fmt: skip
    sparse_pages: int = toggle(
        "KV blocks that a token of an answer attends: the first, the last two, and those whose keys may match best; "
        "prompts attend all. 0 attends all, else at least 4.",
        topic=LONG, default=0, off=0, number="int", minimum=0, lossless=False,
    )  # fmt: skip
    scheduling_policy: str = toggle(
        "Who waits in which order: first come, first served, or the highest priority first, which then also takes the "
        "place of running requests of lower priority.",
        topic=LOAD, default="fcfs", off="fcfs", choices=("fcfs", "priority"),
    )  # fmt: skip
    max_passes: int = toggle(
        "How many shorter requests may go before one that must wait for KV blocks; 0 keeps the order of the queue.",
        topic=LOAD, default=4, off=0, number="int", minimum=0, maximum=1024,
    )  # fmt: skip
    watermark: float = toggle(
        "Share of the KV blocks that a new request must leave free beside those who run; less waits in the pool, and "
        "fewer requests lose their blocks again.",
        topic=LOAD, default=0.0, off=0.0, number="float", minimum=0.0, maximum=0.9,
    )  # fmt: skip
    watermark_high: float = toggle(
        "The same share after the pool ran short, until so much is free; no more than watermark changes nothing.",
        topic=LOAD, default=0.0, off=0.0, number="float", minimum=0.0, maximum=0.9,
    )  # fmt: skip
    thermal_governor: str = toggle(
        "Do a little less before the card gets too hot: rest between steps (pace), take fewer requests at a time first "
        "(shrink), or rest first so that no result changes by a bit (precise).",
        topic=MACHINE, default="off", off="off", choices=("off", "pace", "shrink", "precise"),
    )  # fmt: skip
    preemption: str = toggle(
        "What becomes of a request that must give its KV blocks to another: its tokens are computed again, or its "
        "blocks are copied to host memory and back.",
        topic=LOAD, default="recompute", off="recompute", choices=("recompute", "swap"),
    )  # fmt: skip
    max_waiting: int = toggle(
        "Most requests that wait; one more is refused at once and may be sent again later.",
        topic=LOAD, default=1024, off=1024, number="int", minimum=1, maximum=1_000_000,
    )  # fmt: skip
    max_waiting_tokens: int = toggle(
        "Most tokens of all requests that wait; a request that would exceed it is refused, unless nobody waits.",
        topic=LOAD, default=1 << 20, off=1 << 20, number="int", minimum=1, maximum=1 << 40,
    )  # fmt: skip
    speculative: str = toggle(
        "Guess the next tokens and verify them all in one step: ngram copies from the request's own text, draft asks a "
        "small model. Texts stay the same; it stops by itself where it does not pay.",
        topic=SPEED, default="none", off="none", choices=("none", "ngram", "draft"),
    )  # fmt: skip
    num_draft_tokens: int = toggle(
        "Most tokens that are guessed for a request in one step; fewer are where more would not pay.",
        topic=SPEED, default=8, off=8, number="int", minimum=1, maximum=16,
    )  # fmt: skip
    max_num_seqs: int = toggle(
        "Most requests that run at the same time.",
        topic=LOAD, default=16, off=16, number="int", minimum=1, maximum=1024,
    )  # fmt: skip
    max_num_batched_tokens: int = toggle(
        "Most tokens in one step, prompt slices and decode tokens together; a longer prompt is sliced.",
        topic=LOAD, default=512, off=512, number="int", minimum=1, maximum=131072,
    )  # fmt: skip
    gpu_memory_utilization: float = toggle(
        "Share of the device's memory that weights, KV cache and workspace may take together.",
        topic=MACHINE, default=0.9, off=0.9, number="float", minimum=0.05, maximum=1.0, cost="rebuild",
    )  # fmt: skip
    max_model_len: int | None = toggle(
        "Longest prompt plus output of one request, in tokens; None takes the model's own limit.",
        topic=LONG, default=None, off=None, number="int", minimum=2, cost="rebuild", optional=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        for t in toggles():
            object.__setattr__(self, t.name, t.check(getattr(self, t.name)))
        if 0 < self.sparse_pages < LEAST_PAGES:
            raise ConfigError(
                f"sparse_pages={self.sparse_pages} must be 0 or at least {LEAST_PAGES}, since the first block and the "
                f"last two are always attended; try 32"
            )

    @classmethod
    def none(cls) -> Optimizations:
        """Everything off: the engine that others are compared against."""
        return cls(**{t.name: t.off for t in toggles()})

    def replace(self, changes: Mapping[str, Any]) -> Optimizations:
        """A copy with `changes`; unknown names and bad values raise `ConfigError`."""
        check_names(changes, [t.name for t in toggles()], "optimization")
        return dataclasses.replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Field name to value, in declaration order."""
        return dataclasses.asdict(self)


def changed_fields(before: Optimizations, after: Optimizations) -> Mapping[str, Any]:
    """Fields whose value differs, with the new value."""
    old = before.as_dict()
    return {name: value for name, value in after.as_dict().items() if old[name] != value}


def toggles() -> tuple[Toggle, ...]:
    """One `Toggle` per field of `Optimizations`, in declaration order."""
    return tuple(
        Toggle(name=f.name, default=f.default, **f.metadata["toggle"]) for f in dataclasses.fields(Optimizations)
    )


def toggles_by_topic() -> dict[str, list[Toggle]]:
    """The same under their topics, in the order of `TOPICS`."""
    return {topic: [toggle for toggle in toggles() if toggle.topic == topic] for topic in TOPICS}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What is fixed for the life of one engine.

    Attributes:
        model: a known name ("smollm2-135m"), a preset ("qwen3.8-flash@0.05"), a .gguf file or a
            Hugging Face folder.
        device: "auto" takes CUDA where there is one.
        dtype: dtype of activations; "auto" is bfloat16 on CUDA and float32 on CPU.
        block_size: tokens per KV block.
        num_kv_blocks: size of the pool; None sizes it from free memory.
        swap_space: GiB of main memory for the blocks of preempted requests with preemption="swap"; None takes what the
            pool could fill, at most a tenth of what is free and at most 4.
        capture: how `cuda_graph` is made on a CPU: "replay" records the operator calls of a step and repeats them,
            "inductor" has torch.compile turn the step into one graph (minutes the first time; for comparison).
        draft_model: the model that guesses with `speculative="draft"`: named as `model` is, with the same tokenizer, or
            a folder of `strata train-draft`; None takes the draft that comes with the model, where there is one.
        record_traffic: a file on this machine to which prompts and answers are added, as token ids, for `strata
            train-draft`; nothing is recorded without it.
        seed: seeds random weights of presets and requests that carry no seed.
        optimizations: the toggles at start.
    """

    model: str = DEFAULT_MODEL
    device: str = "auto"
    dtype: str = "auto"
    block_size: int = 16
    num_kv_blocks: int | None = None
    swap_space: float | None = None
    capture: str = "replay"
    draft_model: str | None = None
    record_traffic: str | None = None
    seed: int = 0
    optimizations: Optimizations = field(default_factory=Optimizations)

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", str(self.model))
        object.__setattr__(self, "device", str(self.device))  # a torch.device is welcome
        if not re.fullmatch(r"cuda:\d+", self.device):
            _one_of("device", self.device, DEVICES)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("block_size", self.block_size, BLOCK_SIZES)
        check_whole("block_size", self.block_size, BLOCK_SIZES[0], 16)  # 16.0 equals a legal size and is none
        _one_of("capture", self.capture, CAPTURES)
        check_whole("seed", self.seed, 0, 42)
        for name in ("draft_model", "record_traffic"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, str(getattr(self, name)))
        if self.num_kv_blocks is not None:
            check_whole("num_kv_blocks", self.num_kv_blocks, 1, 64)
        if self.swap_space is not None:
            check_size("swap_space", self.swap_space)
        if not isinstance(self.optimizations, Optimizations):
            raise ConfigError(f"optimizations={self.optimizations!r} must be an Optimizations; try Optimizations()")


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} must be one of {', '.join(map(str, allowed))}; try {allowed[0]!r}")


def why_bad(name: str, value: Any) -> str:
    """Why a toggle cannot have a value, whatever the machine; empty if it can."""
    try:
        Optimizations().replace({name: value})
    except ConfigError as error:
        return str(error)
    return ""


# The source articles' and vLLM's names for our fields, accepted by `LLMEngine(...)` and as flags.
ALIASES = {
    "quantization": "weight_format",
    "max_batch_size": "max_num_seqs",
    "max_seq_len": "max_model_len",
    "max_batch_tokens": "max_num_batched_tokens",
    "enable_cuda_graph": "cuda_graph",
    "enable_prefix_caching": "prefix_cache",
}


def engine_config(
    model: Any = DEFAULT_MODEL, *, optimizations: Optimizations | None = None, **options: Any
) -> EngineConfig:
    """Build an `EngineConfig` from flat keyword options, as `LLMEngine(...)` and the CLI take them.

    Options are the fields of `EngineConfig` and `Optimizations` and the names in `ALIASES`. Options given
    beside `optimizations` override it. Raises `ConfigError` for unknown names and bad values.
    """
    config_fields = [f.name for f in dataclasses.fields(EngineConfig) if f.name not in ("model", "optimizations")]
    toggle_fields = [t.name for t in toggles()]
    check_names(options, config_fields + toggle_fields + list(ALIASES), "engine option")
    for alias, name in ALIASES.items():
        if alias in options:
            if name in options:
                raise ConfigError(f"{alias} and {name} are the same setting; give only {name}")
            options[name] = options.pop(alias)
    changes = {k: v for k, v in options.items() if k in toggle_fields}
    fixed = {k: v for k, v in options.items() if k in config_fields}
    start = EngineConfig(
        model=model, optimizations=Optimizations() if optimizations is None else optimizations, **fixed
    )
    return dataclasses.replace(start, optimizations=start.optimizations.replace(changes))

"""The operators models are made of, and the one place that chooses who computes them.

`bind` turns a backend's name into an `Ops`: the callables that a model is given and calls. Which function stands
behind a name is written in `OPERATORS` as an import string, so importing this package imports no kernel and compiles
nothing; binding the "cpu" backend does. It knows no toggles: those are read in `build.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from strata_lab.kernels.spec import KernelSpec

_HERE = "strata_lab.kernels"

# operator -> (its function for the CPU, in kernels/<operator>.py; its Triton function, in kernels/gpu/)
_FUNCTIONS = {
    "rms_norm": ("rms_norm_cpu", "elementwise:rms_norm_triton"),
    "rope": ("rope_cpu", "elementwise:rope_triton"),
    "silu_mul": ("silu_mul_cpu", "elementwise:silu_mul_triton"),
    "add": ("add_cpu", "elementwise:add_triton"),
    "take_rows": ("take_rows_cpu", "elementwise:take_rows_triton"),
    "linear": ("linear", "linear:linear_triton"),
    "lm_head": ("lm_head_cpu", "linear:lm_head_triton"),
    "embedding": ("embedding", "elementwise:embedding_triton"),
    "kv_append": ("kv_append_cpu", "elementwise:kv_append_triton"),
    "paged_attention": ("paged_attention_cpu", "attention:paged_attention_triton"),
    "qkv_rope_append": ("qkv_rope_append_cpu", "elementwise:qkv_rope_append_triton"),
    "qkv_attention": ("qkv_attention_cpu", "attention:qkv_attention_triton"),
    "page_bounds": ("page_bounds_cpu", "sparse_attention:page_bounds_triton"),
    "sparse_attention": ("sparse_attention_cpu", "sparse_attention:sparse_attention_triton"),
    "router_topk": ("router_topk_ref", "moe:router_topk_triton"),
    "moe_mlp": ("moe_mlp_cpu", "moe:moe_mlp_triton"),
    "moe_block": ("moe_block_cpu", "moe:moe_block_triton"),
}
BACKENDS = ("reference", "cpu", "triton")
# operator -> backend -> "module:function".
OPERATORS: dict[str, dict[str, str]] = {
    name: {
        "reference": f"{_HERE}.{name}:{name}_ref",
        "cpu": f"{_HERE}.{name}:{cpu}",
        "triton": f"{_HERE}.gpu.{triton}",
    }
    for name, (cpu, triton) in _FUNCTIONS.items()
}
# Backend -> operator -> what replaces it where a row's result must be the same, to the last bit, whatever is computed
# beside it. The other functions of a backend keep that promise anyway (docs/decisions/0015-batch-invariant-mode.md),
# except `sparse_attention` outside of C++, which `resolve.py` refuses in that mode.
_BY_ROW = ("rms_norm", "silu_mul", "linear", "lm_head", "paged_attention", "qkv_rope_append", "qkv_attention",
           "router_topk", "moe_mlp", "moe_block")  # fmt: skip
_INVARIANT = {
    "reference": {name: f"{_HERE}.by_row:{name}_by_row" for name in _BY_ROW},
    "cpu": {
        "router_topk": f"{_HERE}.by_row:router_topk_by_row",
        "moe_block": f"{_HERE}.by_row:moe_block_routed_by_row",
    },
    "triton": {
        name: f"{_HERE}.gpu.invariant:{name}_invariant"
        for name in ("linear", "lm_head", "paged_attention", "qkv_attention", "router_topk", "moe_mlp", "moe_block")
    },
}


@dataclass(frozen=True)
class Ops:
    """One callable per operator; each operator's contract is the docstring of its module."""

    rms_norm: Callable[..., Tensor]
    rope: Callable[..., Tensor]
    silu_mul: Callable[..., Tensor]
    add: Callable[..., Tensor]
    take_rows: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    lm_head: Callable[..., Tensor]
    embedding: Callable[..., Tensor]
    kv_append: Callable[..., None]
    paged_attention: Callable[..., Tensor]
    qkv_rope_append: Callable[..., Tensor]
    qkv_attention: Callable[..., Tensor]
    page_bounds: Callable[..., None]
    sparse_attention: Callable[..., Tensor]
    router_topk: Callable[..., tuple[Tensor, Tensor]]
    moe_mlp: Callable[..., Tensor]
    moe_block: Callable[..., Tensor]


def bind(
    backend: str = "reference",
    overrides: Mapping[str, str | Callable[..., Any]] | None = None,
    *,
    invariant: bool = False,
) -> Ops:
    """The operators of a backend.

    Args:
        backend: one of `BACKENDS`. "cpu" loads the C++ operators, which compiles them on first use on a machine.
        overrides: operator name to what replaces it: a backend's name, "module:function" or a callable.
        invariant: take operators whose rows do not depend on how many there are, to the last bit.

    Raises:
        ValueError: an unknown backend or operator.
        CpuKernelsUnavailable: "cpu" is asked for and cannot be had; the message says why.
    """
    chosen: dict[str, str | Callable[..., Any]] = dict.fromkeys((f.name for f in fields(Ops)), backend)
    if invariant:
        chosen |= _INVARIANT.get(backend, {})
    for name, choice in (overrides or {}).items():
        if name not in chosen:
            raise ValueError(f"operator {name!r} is unknown; the operators are {', '.join(chosen)}")
        chosen[name] = choice
    if backend == "cpu" or "cpu" in chosen.values():
        prepare("cpu")
    return Ops(**{name: _resolve(name, choice) for name, choice in chosen.items()})


def seeing(ops: Ops, sinks: int, window: int) -> Ops:
    """The same operators, whose attention sees the first `sinks` tokens and the last `window` only."""
    some = {"sinks": sinks, "window": window}
    return replace(
        ops, paged_attention=partial(ops.paged_attention, **some), qkv_attention=partial(ops.qkv_attention, **some)
    )


def prepare(backend: str) -> None:
    """Do what a backend's functions need before their first call; a no-op when done already.

    Raises:
        CpuKernelsUnavailable: the C++ operators cannot be built or loaded; the message says why.
    """
    if backend == "cpu":
        import_module(f"{_HERE}.cpu.build").load()


def SPECS() -> tuple[KernelSpec, ...]:
    """The contracts of all operators, with their cases, tolerances and costs."""
    return tuple(_load(f"{_HERE}.{name}:SPEC") for name in OPERATORS)


def _resolve(name: str, choice: str | Callable[..., Any]) -> Callable[..., Any]:
    if callable(choice):
        return choice
    if ":" in choice:
        return _load(choice)
    if choice not in OPERATORS[name]:
        raise ValueError(f"backend {choice!r} is unknown; choose one of {', '.join(BACKENDS)}, or 'module:function'")
    return _load(OPERATORS[name][choice])


def _load(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)

"""The operators models are made of, and the one place that chooses who computes them.

`bind` turns a backend's name into an `Ops`: twelve callables that a model is given and calls. Which function stands
behind a name is written in `OPERATORS` as an import string, so importing this package imports no kernel and compiles
nothing; binding the "cpu" backend does. It knows no toggles: those are read in `build.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from strata_lab.kernels.spec import KernelSpec

_HERE = "strata_lab.kernels"

# operator -> backend -> "module:function". A backend without a kernel of its own names the reference here.
OPERATORS: dict[str, dict[str, str]] = {
    "rms_norm": {"reference": f"{_HERE}.rms_norm:rms_norm_ref", "cpu": f"{_HERE}.rms_norm:rms_norm_cpu"},
    "rope": {"reference": f"{_HERE}.rope:rope_ref", "cpu": f"{_HERE}.rope:rope_cpu"},
    "silu_mul": {"reference": f"{_HERE}.silu_mul:silu_mul_ref", "cpu": f"{_HERE}.silu_mul:silu_mul_cpu"},
    "add": {"reference": f"{_HERE}.add:add_ref", "cpu": f"{_HERE}.add:add_cpu"},
    "take_rows": {"reference": f"{_HERE}.take_rows:take_rows_ref", "cpu": f"{_HERE}.take_rows:take_rows_cpu"},
    "linear": {"reference": f"{_HERE}.linear:linear_ref", "cpu": f"{_HERE}.linear:linear"},
    "embedding": {"reference": f"{_HERE}.embedding:embedding_ref", "cpu": f"{_HERE}.embedding:embedding"},
    "kv_append": {"reference": f"{_HERE}.kv_append:kv_append_ref", "cpu": f"{_HERE}.kv_append:kv_append_cpu"},
    "paged_attention": {
        "reference": f"{_HERE}.paged_attention:paged_attention_ref",
        "cpu": f"{_HERE}.paged_attention:paged_attention_cpu",
    },
    "qkv_rope_append": {
        "reference": f"{_HERE}.qkv_rope_append:qkv_rope_append_ref",
        "cpu": f"{_HERE}.qkv_rope_append:qkv_rope_append_cpu",
    },
    "router_topk": {"reference": f"{_HERE}.router_topk:router_topk_ref", "cpu": f"{_HERE}.router_topk:router_topk_ref"},
    "moe_mlp": {"reference": f"{_HERE}.moe_mlp:moe_mlp_ref", "cpu": f"{_HERE}.moe_mlp:moe_mlp_cpu"},
}
BACKENDS = ("reference", "cpu")

_SPECS = (
    f"{_HERE}.rms_norm:SPEC",
    f"{_HERE}.rope:SPEC",
    f"{_HERE}.silu_mul:SPEC",
    f"{_HERE}.add:SPEC",
    f"{_HERE}.take_rows:SPEC",
    f"{_HERE}.linear:SPEC",
    f"{_HERE}.embedding:SPEC",
    f"{_HERE}.kv_append:SPEC",
    f"{_HERE}.paged_attention:SPEC",
    f"{_HERE}.qkv_rope_append:SPEC",
    f"{_HERE}.router_topk:SPEC",
    f"{_HERE}.moe_mlp:SPEC",
)


@dataclass(frozen=True)
class Ops:
    """One callable per operator; each operator's contract is the docstring of its module."""

    rms_norm: Callable[..., Tensor]
    rope: Callable[..., Tensor]
    silu_mul: Callable[..., Tensor]
    add: Callable[..., Tensor]
    take_rows: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    embedding: Callable[..., Tensor]
    kv_append: Callable[..., None]
    paged_attention: Callable[..., Tensor]
    qkv_rope_append: Callable[..., Tensor]
    router_topk: Callable[..., tuple[Tensor, Tensor]]
    moe_mlp: Callable[..., Tensor]


def bind(backend: str = "reference", overrides: Mapping[str, str | Callable[..., Any]] | None = None) -> Ops:
    """The operators of a backend.

    Args:
        backend: one of `BACKENDS`. "cpu" loads the C++ operators, which compiles them on first use on a machine.
        overrides: operator name to what replaces it: a backend's name, "module:function" or a callable.

    Raises:
        ValueError: an unknown backend or operator.
        CpuKernelsUnavailable: "cpu" is asked for and cannot be had; the message says why.
    """
    chosen: dict[str, str | Callable[..., Any]] = dict.fromkeys((f.name for f in fields(Ops)), backend)
    for name, choice in (overrides or {}).items():
        if name not in chosen:
            raise ValueError(f"operator {name!r} is unknown; the operators are {', '.join(chosen)}")
        chosen[name] = choice
    if "cpu" in chosen.values():
        prepare("cpu")
    return Ops(**{name: _resolve(name, choice) for name, choice in chosen.items()})


def prepare(backend: str) -> None:
    """Do what a backend's functions need before their first call; a no-op when done already.

    Raises:
        CpuKernelsUnavailable: the C++ operators cannot be built or loaded; the message says why.
    """
    if backend == "cpu":
        import_module(f"{_HERE}.cpu.build").load()


def SPECS() -> tuple[KernelSpec, ...]:
    """The contracts of all operators, with their cases, tolerances and costs."""
    return tuple(_load(path) for path in _SPECS)


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

"""Write the keys and values of this step's tokens into their cache slots.

Contract: k and v [T, Hkv, D] (any strides); k_cache and v_cache [NB, BS, Hkv, D] in float32, bfloat16 or
float8_e4m3fn, changed in place; slot_mapping [T] int64, slot = block * BS + offset, and a negative slot skips its
token (padding of a captured step). No two tokens of a step share a slot. What is stored is value / scale, divided in
float32 and rounded to nearest even; for float8_e4m3fn it is clamped to +-448 first, so nothing finite becomes NaN
and infinities become +-448; NaN stays NaN. Slots that are not named are not touched. Bytes moved: k and v read once,
their slots written once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from strata_lab.kernels.cpu.build import fakes
from strata_lab.kernels.spec import Case, KernelSpec

FP8_MAX = 448.0  # largest finite float8_e4m3fn


def to_cache(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """The stored form of x: x / scale in `dtype`; float8_e4m3fn saturates."""
    stored = x.to(torch.float32) / torch.full((), scale, device=x.device)  # by a number, CUDA multiplies with 1 / scale
    if dtype == torch.float8_e4m3fn:
        stored = stored.clamp(-FP8_MAX, FP8_MAX)
    return stored.to(dtype)


def kv_append_ref(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Store k and v [T, Hkv, D] at the slots of `slot_mapping` [T]; see the module for what is stored.

    Without a host synchronization or a shape that depends on data: a skipped token repeats the write of a token that
    is not skipped, and where all are skipped, slot 0 is overwritten by itself.
    """
    valid = slot_mapping >= 0
    stand_in = torch.argmax(valid.to(torch.int32))
    source = torch.where(valid, torch.arange(len(slot_mapping), device=k.device), stand_in)
    slots = slot_mapping[source].clamp(min=0)
    block, offset = slots // k_cache.shape[1], slots % k_cache.shape[1]
    for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        stored = to_cache(new, scale, cache.dtype)[source]
        chosen = torch.where(valid.any(), stored.float(), cache[block, offset].float())  # exact: both are stored forms
        cache[block, offset] = chosen.to(cache.dtype)


def kv_append_cpu(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """`kv_append_ref` in C++ for float32 k and v on the CPU. A slot outside the cache is a ValueError."""
    torch.ops.strata.kv_append(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


@fakes
def _register_fake(namespace: str) -> None:
    @torch.library.register_fake(f"{namespace}::kv_append")
    def _(
        k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, k_scale: float, v_scale: float
    ) -> None:
        return None


def _cases() -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        name = str(dtype).removeprefix("torch.")
        yield Case(f"{name}-skips", functools.partial(_inputs, [5, -1, 17, 0, -1], (3, 64), dtype, 1.0))
        yield Case(f"{name}-scaled", functools.partial(_inputs, [30], (1, 80), dtype, 0.037))
    yield Case("all-skipped", functools.partial(_inputs, [-1, -1], (2, 8), torch.bfloat16, 1.0))
    yield Case("saturates", functools.partial(_inputs, [3, 9], (2, 8), torch.float8_e4m3fn, 1e-3))


def _inputs(
    slots: list[int], heads: tuple[int, int], dtype: torch.dtype, scale: float, device: torch.device
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(len(slots))
    k, v = (3 * torch.randn(len(slots), *heads, generator=generator).to(device) for _ in range(2))
    k_cache, v_cache = (torch.full((4, 8, *heads), float("nan"), device=device).to(dtype) for _ in range(2))
    slot_mapping = torch.tensor(slots, dtype=torch.int64, device=device)
    return {
        "k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slot_mapping,
        "k_scale": scale, "v_scale": 2 * scale,
    }  # fmt: skip


def _bytes_moved(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, **_: float) -> int:
    return 2 * k.numel() * (k.element_size() + k_cache.element_size())


def _flops(k: Tensor, v: Tensor, **_: Any) -> int:
    return k.numel() + v.numel()


SPEC = KernelSpec(
    name="kv_append",
    ref=kv_append_ref,
    cases=_cases,
    tolerance={torch.float32: (0, 0), torch.bfloat16: (0, 0), torch.float8_e4m3fn: (0, 0)},
    bytes_moved=_bytes_moved,
    flops=_flops,
)

"""The smallest and largest key of every block of the cache, in every dimension: what `sparse_attention` chooses by.

Contract: k_cache [NB, BS, Hkv, D] in float32, bfloat16 or float8_e4m3fn; bounds_cache [NB, Hkv, 2, D] of its dtype,
changed in place: [..., 0, :] the smallest, [..., 1, :] the largest, as stored (scales do not matter); slot_mapping [T]
int64, the slots this step has written, in the order of each text; a negative slot is skipped. The bounds of every block
in which the step has written are computed afresh, from the keys up to the last slot written there. So they are a
function of the stored keys alone: what was in the block before, drafts that did not come true included, leaves no
trace, whoever copies keys copies bounds, and nothing has to be reset. Other blocks are not touched.

Bytes moved: per written block its keys once and two keys more; a decode step reads half a block on average.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from strata_lab.kernels.cpu.build import fakes
from strata_lab.kernels.kv_append import to_cache
from strata_lab.kernels.spec import Case, KernelSpec


def page_bounds_ref(k_cache: Tensor, bounds_cache: Tensor, slot_mapping: Tensor) -> None:
    """Bound the blocks of `slot_mapping` [T]; see the module. Without a host synchronization, as `kv_append_ref`."""
    size, valid = k_cache.shape[1], slot_mapping >= 0
    stand_in = torch.argmax(valid.to(torch.int32))
    tokens = torch.arange(len(slot_mapping), device=k_cache.device)
    slots = slot_mapping[torch.where(valid, tokens, stand_in)].clamp(min=0)
    blocks, offsets = slots // size, slots % size
    last = torch.zeros(k_cache.shape[0], dtype=torch.int64, device=k_cache.device)
    last = last.scatter_reduce(0, blocks, offsets, "amax")[blocks]  # of the step, in each token's block
    there = (torch.arange(size, device=k_cache.device) <= last[:, None])[:, :, None, None]  # [T, BS, 1, 1]
    keys = k_cache[blocks].float()  # [T, BS, Hkv, D]
    low = torch.where(there, keys, torch.inf).amin(dim=1)
    high = torch.where(there, keys, -torch.inf).amax(dim=1)
    found = torch.stack((low, high), dim=2)  # [T, Hkv, 2, D]
    kept = torch.where(valid.any(), found, bounds_cache[blocks].float())
    bounds_cache[blocks] = kept.to(bounds_cache.dtype)  # exact: each is a stored form


def page_bounds_cpu(k_cache: Tensor, bounds_cache: Tensor, slot_mapping: Tensor) -> None:
    """`page_bounds_ref` in C++; D a multiple of 8. A slot outside the cache is a ValueError."""
    torch.ops.strata.page_bounds(k_cache, bounds_cache, slot_mapping)


@fakes
def _register_fake(namespace: str) -> None:
    @torch.library.register_fake(f"{namespace}::page_bounds")
    def _(k_cache: Tensor, bounds_cache: Tensor, slot_mapping: Tensor) -> None:
        return None


def _cases() -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        name = str(dtype).removeprefix("torch.")
        yield Case(f"{name}-decodes", functools.partial(_inputs, [5, -1, 23, 8, -1], (3, 64), dtype))
        yield Case(f"{name}-slices", functools.partial(_inputs, [*range(3, 8), *range(16, 29)], (1, 80), dtype))
    yield Case("all-skipped", functools.partial(_inputs, [-1, -1], (2, 8), torch.float32))


def _inputs(slots: list[int], heads: tuple[int, int], dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Slots behind the last that is written in a block are NaN."""
    generator = torch.Generator().manual_seed(len(slots))
    keys = torch.randn(4, 8, *heads, generator=generator)
    last = {slot // 8: slot % 8 for slot in sorted(slots) if slot >= 0}
    for block, offset in last.items():
        keys[block, offset + 1 :] = torch.nan
    bounds = torch.full((4, heads[0], 2, heads[1]), torch.nan)
    return {
        "k_cache": to_cache(keys, 1.0, dtype).to(device), "bounds_cache": bounds.to(dtype).to(device),
        "slot_mapping": torch.tensor(slots, dtype=torch.int64, device=device),
    }  # fmt: skip


def _bytes_moved(k_cache: Tensor, slot_mapping: Tensor, **_: Any) -> int:
    row = k_cache.shape[2] * k_cache.shape[3] * k_cache.element_size()
    last: dict[int, int] = {}
    for slot in (s for s in slot_mapping.tolist() if s >= 0):
        block, offset = divmod(slot, k_cache.shape[1])
        last[block] = max(last.get(block, 0), offset + 1)
    return slot_mapping.numel() * slot_mapping.element_size() + sum(last.values()) * row + 2 * len(last) * row


def _flops(k_cache: Tensor, slot_mapping: Tensor, **_: Any) -> int:
    return 2 * int((slot_mapping >= 0).sum()) * k_cache.shape[2] * k_cache.shape[3]


SPEC = KernelSpec(
    name="page_bounds",
    ref=page_bounds_ref,
    cases=_cases,
    tolerance={torch.float32: (0, 0), torch.bfloat16: (0, 0), torch.float8_e4m3fn: (0, 0)},
    bytes_moved=_bytes_moved,
    flops=_flops,
)

"""Codes of published integer quantizations become the engine's weights: the same codes, regrouped, never requantized.

Every published scheme for 4 and 8 bits says w[n, k] = scale[n, g(k)] * (code[n, k] - zero[n, g(k)]) and differs only in
where the bits lie. A reader (`gptq.py`, `awq.py`, `compressed_tensors.py`) unpacks them into `Codes`; `to_weight` turns
those into a `LinearWeight`:

- A group becomes one, or is repeated to several, of 128, 64 or 32 columns (int8: the row, or 32 columns).
- A zero point of half the range is what the symmetric formats assume and costs nothing. Another zero point of 4 bits
  becomes the float16 minimum nearest to -scale * zero: off by at most 2^-11 of it (2^-25 where it is subnormal), for
  zeros up to 15 less than 1/128 of the scale. One of 8 bits is subtracted from the codes where all of them still fit.
- Scales wider than float16 are rounded to it (2^-11 of the scale) where the target has float16 scales.
- What no format of the engine can say (columns in scattered groups, scales beyond float16) is dequantized to float32.

Everything that is not exact leaves a sentence in `Notes`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from strata_lab.models.errors import CheckpointError
from strata_lab.quant.base import LinearWeight

INT4_GROUPS = (128, 64, 32)
BLOCK = 32  # columns of an int4 block, and of an int8 group
HALF_BLOCK = 16
WORD_BITS = 32
FLOAT16_MAX = torch.finfo(torch.float16).max
ROUNDED_SCALES = "scales were rounded to float16"
ROUNDED_MINIMA = "zero points became float16 minima, each the nearest"
SCATTERED = "its columns are in scattered groups (desc_act), which no format here can say: dequantized to float32"
TOO_WIDE = "its scales or zero points are beyond this engine's formats: dequantized to float32"


@dataclass
class Notes:
    """What was read otherwise than stored, and for which matrices. Filled while weights are read."""

    found: dict[str, dict[str, None]] = field(default_factory=dict)

    def add(self, reason: str, name: str) -> None:
        """`reason` is true of the matrix `name`."""
        self.found.setdefault(reason, {})[name] = None

    def lines(self) -> list[str]:
        """One sentence per reason."""
        return [f"{next(iter(names))} and {len(names) - 1} more: {reason}" for reason, names in self.found.items()]


@dataclass(frozen=True)
class Codes:
    """A quantized matrix, unpacked: w[n, k] = scales[n, g] * (codes[n, k] - zeros[n, g]) with g = group_of[k].

    Attributes:
        name: canonical, for messages.
        bits: 4 or 8.
        codes: uint8 [N, K], below 2^bits.
        scales: float [N, S].
        zeros: int [N, S]; None is half the range, 8 or 128.
        group_of: int64 [K], each below S; None: K/S columns each, in order, as `group_size` says.
        group_size: columns of a group as the file says; 0 for the whole row.
    """

    name: str
    bits: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_of: Tensor | None
    group_size: int


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 [..., W] -> uint8 [..., W * 32 / bits]: fields of 4 or 8 bits, lowest bits first."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack([octets & 0x0F, octets >> 4], dim=-1).flatten(-2)


def check_scales(scales: Tensor, name: str, file: object) -> None:
    """Raise `CheckpointError` unless every scale is finite."""
    finite = torch.isfinite(scales)
    if not bool(finite.all()):
        raise CheckpointError(
            f"{file}: {int((~finite).sum())} of {scales.numel()} scales of {name!r} are NaN or infinite; every scale "
            "must be a finite number such as 0.01: fetch the file again"
        )


def to_weight(stored: Codes, notes: Notes) -> LinearWeight:
    """The matrix in layout "rows": int4, int8, or fp32 where neither can hold it (see the module's docstring)."""
    made = _int4(stored, notes) if stored.bits == 4 else _int8(stored, notes)
    return made if made is not None else _dequantized(stored)


def _int4(stored: Codes, notes: Notes) -> LinearWeight | None:
    wanted = [g for g in INT4_GROUPS if g == stored.group_size] + list(INT4_GROUPS)
    found = next(((size, ids) for size in wanted if (ids := _groups(stored, size)) is not None), None)
    if found is None:
        notes.add(SCATTERED, stored.name)
        return None
    size, ids = found
    scales = _float16_scales(stored, notes)
    if scales is None:
        return None
    mins = None
    if stored.zeros is not None and bool((stored.zeros != 8).any()):
        exact = -scales.float() * stored.zeros  # 11 + 5 significant bits: exact in float32
        if float(exact.abs().max()) > FLOAT16_MAX:
            notes.add(TOO_WIDE, stored.name)
            return None
        mins = exact.half()
        if not torch.equal(mins.float(), exact):
            notes.add(ROUNDED_MINIMA, stored.name)
        mins = mins[:, ids].contiguous()
    n, k = stored.codes.shape
    return LinearWeight("int4", (n, k), _nibbles(stored.codes), scales[:, ids].contiguous(), mins, group_size=size)


def _int8(stored: Codes, notes: Notes) -> LinearWeight | None:
    n, k = stored.codes.shape
    data = _signed(stored)
    if data is None:
        notes.add(TOO_WIDE, stored.name)
        return None
    if stored.scales.shape[1] == 1:
        return LinearWeight("int8", (n, k), data, stored.scales.float().contiguous())
    ids = _groups(stored, BLOCK)
    if ids is None:
        notes.add(SCATTERED, stored.name)
        return None
    scales = _float16_scales(stored, notes)
    if scales is None:
        return None
    return LinearWeight("int8", (n, k), data, scales[:, ids].contiguous(), group_size=BLOCK)


def _signed(stored: Codes) -> Tensor | None:
    """codes - zeros as int8 [N, K], None where that overflows."""
    if stored.zeros is None or bool((stored.zeros == 128).all()):
        return (stored.codes ^ 0x80).view(torch.int8)
    shifted = stored.codes.to(torch.int16) - stored.zeros.to(torch.int16)[:, column_groups(stored)]
    if int(shifted.min()) < -128 or int(shifted.max()) > 127:
        return None
    return shifted.to(torch.int8)


def column_groups(stored: Codes) -> Tensor:
    """The group of every column, int64 [K]."""
    if stored.group_of is not None:
        return stored.group_of
    k = stored.codes.shape[1]
    return torch.arange(k) // (stored.group_size or k)


def _groups(stored: Codes, size: int) -> Tensor | None:
    """The stored group of every block of `size` columns [ceil(K/size)]; None where a block mixes groups."""
    of_column = column_groups(stored)
    ids = of_column[::size]
    return ids if torch.equal(ids.repeat_interleave(size)[: len(of_column)], of_column) else None


def _float16_scales(stored: Codes, notes: Notes) -> Tensor | None:
    """The stored scales in float16; None where one of them overflows or vanishes."""
    scales = stored.scales.half()
    if scales.dtype == stored.scales.dtype:
        return scales
    back = scales.to(stored.scales.dtype)
    if torch.equal(back, stored.scales):
        return scales
    if bool(torch.isinf(scales).any()) or bool(((scales == 0) & (stored.scales != 0)).any()):
        notes.add(TOO_WIDE, stored.name)
        return None
    notes.add(ROUNDED_SCALES, stored.name)
    return scales


def _nibbles(codes: Tensor) -> Tensor:
    """4-bit codes uint8 [N, K] -> [N, ceil(K/32) * 16] in the engine's order; a ragged last block repeats its last."""
    missing = -codes.shape[1] % BLOCK
    if missing:
        codes = functional.pad(codes[None].float(), (0, missing), mode="replicate")[0].to(torch.uint8)
    blocks = codes.unflatten(1, (-1, BLOCK))
    return (blocks[..., :HALF_BLOCK] | (blocks[..., HALF_BLOCK:] << 4)).flatten(1)


def _dequantized(stored: Codes) -> LinearWeight:
    groups = column_groups(stored)
    zeros = 1 << (stored.bits - 1) if stored.zeros is None else stored.zeros.float()[:, groups]
    data = (stored.codes.float() - zeros).mul_(stored.scales.float()[:, groups])
    return LinearWeight("fp32", (data.shape[0], data.shape[1]), data)

"""The products of `mma_asm.py` in plain Triton: what the interpreter runs, and what the asm is supposed to compute."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def low_half(w, FP16: tl.constexpr):
    """The 16-bit float in the low half of a word, float32."""
    if FP16:
        return (w & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (w << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_half(w, FP16: tl.constexpr):
    """That in the high half."""
    if FP16:
        return (w >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (w & -65536).to(tl.float32, bitcast=True)


@triton.jit
def join(low, high, FP16: tl.constexpr):
    """Two float32 tiles -> words of two 16-bit floats, rounded to nearest even."""
    if FP16:
        a = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        b = high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        return (a & 0xFFFF) | (b << 16)
    else:
        a, b = low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)
        a += 0x7FFF + ((a >> 16) & 1)
        b += 0x7FFF + ((b >> 16) & 1)
        return ((a >> 16) & 0xFFFF) | (b & -65536)


@triton.jit
def codes_plain(w, FORMAT: tl.constexpr, FP16: tl.constexpr, ZERO: tl.constexpr):
    """`codes_as_pairs`."""
    codes = ()
    for i in tl.static_range(8 if FORMAT == "int4" else 4):
        if FORMAT == "int4":
            codes += ((((w >> (i % 4 * 8 + i // 4 * 4)) & 15) - ZERO).to(tl.float32),)
        elif FORMAT == "int8":
            codes += (((w << (24 - 8 * i)) >> 24).to(tl.float32),)
        else:
            codes += (((w >> (8 * i)) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32),)
    if FORMAT == "int4":
        even, odd = join(codes[4], codes[6], FP16), join(codes[5], codes[7], FP16)
        return join(codes[0], codes[2], FP16), join(codes[1], codes[3], FP16), even, odd
    else:
        return join(codes[0], codes[2], FP16), join(codes[1], codes[3], FP16)


@triton.jit
def grams(a, x, FP16: tl.constexpr):
    """Per warp, rows of a times rows of x: [warps, 8, 8]."""
    shape: tl.constexpr = [a.shape[0] // 8, 8, 1, 16]
    turned: tl.constexpr = [a.shape[0] // 8, 1, 8, 16]
    low = tl.reshape(low_half(a, FP16), shape) * tl.reshape(low_half(x, FP16), turned)
    high = tl.reshape(high_half(a, FP16), shape) * tl.reshape(high_half(x, FP16), turned)
    return tl.sum(low + high, axis=3)


@triton.jit
def fragment(low, high):
    """Rows 0-7 and 8-15 of a product [warps, 8, 8] -> [8 * warps, 16] as `mma` returns it."""
    both = tl.reshape(tl.join(low, high), [low.shape[0], 8, 4, 2, 2])  # warp, row, lane, column, half
    return tl.reshape(tl.permute(both, [0, 1, 2, 4, 3]), [low.shape[0] * 8, 16])

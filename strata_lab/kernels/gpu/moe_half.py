"""How e4m3 (and int8, `moe_half_int8.py`) experts multiply 16-bit activations: in float16, two products an instruction.

Widening a code to float32 takes 1.5 instructions and the product one more; a pair of codes becomes a pair of float16
in one, and one more multiplies and adds the pair: 1.5 a weight with all that follows. float16 ends at 65504 and a code
at 448, so activations are divided down to `PEAK` (their largest; what is 2^-17 of it still has 10 bits) and sums stop
after eight products, four in each half of a pair: at most 448 * 8 * 4. Sums of eight go on in float32.

The norm of a token has one divisor; of h = silu(gate) * up each 8 columns (a program's) have their own, so nobody needs
to see all of h first. Loses about 2^-12 of x, less than a bfloat16 result is rounded by; never used for float32 x.
"""

from __future__ import annotations

import triton
import triton.language as tl

from strata_lab.kernels.gpu.moe_half_asm import PAIR_OPERANDS, sums_of_pairs
from strata_lab.kernels.gpu.moe_half_int8 import INT8_SUMS

GROUP = 8  # columns of h that share a divisor, and products that are added up in float16
PEAK = tl.constexpr(8.0)


@triton.jit
def first(a, b):
    """For `tl.reduce` where only the first element says anything: costs nothing within a thread."""
    return a


def _pairs(word: str) -> tuple[list[str], list[str]]:
    """`word` of four e4m3 codes -> the first two, then the last two, each pair in `a`."""
    return [f"mov.b32 {{l, h}}, {word};", "cvt.rn.f16x2.e4m3x2 a, l;"], ["cvt.rn.f16x2.e4m3x2 a, h;"]


FP8_SUMS, OPERANDS = tl.constexpr(sums_of_pairs(_pairs)), tl.constexpr(PAIR_OPERANDS)


@triton.jit
def sums_of_eight(w, x, FORMAT: tl.constexpr, ASM: tl.constexpr):
    """w [R, C, 16] e4m3 or int8, x [R, C, 16] float16 -> sums of products over each 8 of a chunk, float32 [R, C, 2].

    Relies on a thread holding a chunk's 16 columns in order, as a 16-byte load leaves them (a test looks).
    """
    if ASM:  # the sums stand in the first of their eight elements; the others are never looked at
        text: tl.constexpr = INT8_SUMS if FORMAT == "int8" else FP8_SUMS
        parts = tl.inline_asm_elementwise(text, OPERANDS, [w, x], dtype=tl.float32, is_pure=False, pack=16)
        return tl.reduce(tl.reshape(parts, [w.shape[0], w.shape[1], 2, 8]), 3, first)
    else:
        parts = w.to(tl.float32) * x.to(tl.float32)
        return tl.sum(tl.reshape(parts, [w.shape[0], w.shape[1], 2, 8]), axis=3)

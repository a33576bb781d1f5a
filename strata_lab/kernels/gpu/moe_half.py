"""How e4m3 experts multiply 16-bit activations: in float16, two products an instruction.

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

GROUP = 8  # columns of h that share a divisor, and products that are added up in float16
PEAK = tl.constexpr(8.0)


@triton.jit
def first(a, b):
    """For `tl.reduce` where only the first element says anything: costs nothing within a thread."""
    return a


@triton.jit
def sums_of_eight(w, x, ASM: tl.constexpr):
    """w [R, C, 16] e4m3, x [R, C, 16] float16 -> sums of products over each 8 of a chunk, float32 [R, C, 2].

    Relies on a thread holding a chunk's 16 columns in order, as a 16-byte load leaves them (a test looks).
    """
    if ASM:  # the sums stand in the first of their eight elements; the others are never looked at
        parts = tl.inline_asm_elementwise(
            """{
            .reg .b16 l, h;
            .reg .b32 a, s, t;
            .reg .f32 f, g;
            mov.b32 {l, h}, $16;
            cvt.rn.f16x2.e4m3x2 a, l;
            mul.rn.f16x2 s, a, $20;
            cvt.rn.f16x2.e4m3x2 a, h;
            fma.rn.f16x2 s, a, $21, s;
            mov.b32 {l, h}, $17;
            cvt.rn.f16x2.e4m3x2 a, l;
            fma.rn.f16x2 s, a, $22, s;
            cvt.rn.f16x2.e4m3x2 a, h;
            fma.rn.f16x2 s, a, $23, s;
            mov.b32 {l, h}, $18;
            cvt.rn.f16x2.e4m3x2 a, l;
            mul.rn.f16x2 t, a, $24;
            cvt.rn.f16x2.e4m3x2 a, h;
            fma.rn.f16x2 t, a, $25, t;
            mov.b32 {l, h}, $19;
            cvt.rn.f16x2.e4m3x2 a, l;
            fma.rn.f16x2 t, a, $26, t;
            cvt.rn.f16x2.e4m3x2 a, h;
            fma.rn.f16x2 t, a, $27, t;
            mov.b32 {l, h}, s;
            cvt.f32.f16 f, l;
            cvt.f32.f16 g, h;
            add.f32 $0, f, g;
            mov.b32 {l, h}, t;
            cvt.f32.f16 f, l;
            cvt.f32.f16 g, h;
            add.f32 $8, f, g;
            mov.b32 $1, 0;
            mov.b32 $2, 0;
            mov.b32 $3, 0;
            mov.b32 $4, 0;
            mov.b32 $5, 0;
            mov.b32 $6, 0;
            mov.b32 $7, 0;
            mov.b32 $9, 0;
            mov.b32 $10, 0;
            mov.b32 $11, 0;
            mov.b32 $12, 0;
            mov.b32 $13, 0;
            mov.b32 $14, 0;
            mov.b32 $15, 0;
            }""",
            "=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,r,r,r,r,r,r,r,r,r,r,r,r",
            [w, x],
            dtype=tl.float32,
            is_pure=False,
            pack=16,
        )
        parts = tl.reshape(parts, [w.shape[0], w.shape[1], 2, 8])
        return tl.reduce(parts, 3, first)
    else:
        parts = w.to(tl.float32) * x.to(tl.float32)
        return tl.sum(tl.reshape(parts, [w.shape[0], w.shape[1], 2, 8]), axis=3)

"""How a GEMV multiplies on CUDA cores, in few instructions per weight (`ASM`; in the interpreter plain Triton).

    float32     any x: codes become floats by their bits, 2-3 instructions per weight
    float16     e4m3 codes with 16-bit x, scaled into range: 1.5
    integers    int8 and int4 codes with 16-bit x, rounded to 16 bits per lane's columns and cut in two bytes: 1-1.5

The last two lose about 2^-12 and 2^-16 of x, less than a 16-bit result is rounded by; never used for float32 x.
All asm is volatile (`is_pure=False`), which keeps the compiler from unpacking everything first and then spilling.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def now(tile, ASM: tl.constexpr):
    """The tile, computed before what follows; else many weights are converted first, and registers run out."""
    if ASM:
        tile = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [tile], dtype=tl.float32, is_pure=False, pack=1)
    return tile


@triton.jit
def prefetch(pointers):
    """Ask for the lines these pointers are in to be brought to L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def per_lane(tile, VEC: tl.constexpr):
    """[rows, lanes * VEC] -> [rows, lanes]: each thread sums what it holds."""
    return tl.sum(tl.reshape(tile, [tile.shape[0], tile.shape[1] // VEC, VEC]), axis=2)


@triton.jit
def codes_as_floats(w, FORMAT: tl.constexpr, ASM: tl.constexpr):
    """What a weight tile's bits say: a tuple of float32 tiles (int4: the low and the high nibbles)."""
    if FORMAT == "int8":
        if ASM:  # byte ^ 0x80 to the top of the mantissa of 1.0
            v = tl.inline_asm_elementwise(
                """{
                .reg .b32 w, t;
                xor.b32 w, $4, 0x80808080;
                shl.b32 t, w, 15;
                lop3.b32 $0, t, 0x007f8000, 0x3f800000, 0xea;
                shl.b32 t, w, 7;
                lop3.b32 $1, t, 0x007f8000, 0x3f800000, 0xea;
                shr.b32 t, w, 1;
                lop3.b32 $2, t, 0x007f8000, 0x3f800000, 0xea;
                shr.b32 t, w, 9;
                lop3.b32 $3, t, 0x007f8000, 0x3f800000, 0xea;
                }""",
                "=f,=f,=f,=f,r",
                [w],
                dtype=tl.float32,
                is_pure=False,
                pack=4,
            )
        else:
            v = (w.to(tl.float32) + 128.0) / 256.0 + 1.0
        return (v,)
    elif FORMAT == "int4":
        if ASM:
            lo, hi = tl.inline_asm_elementwise(
                """{
                .reg .b32 t;
                shl.b32 t, $8, 19;
                lop3.b32 $0, t, 0x00780000, 0x3f800000, 0xea;
                shl.b32 t, $8, 11;
                lop3.b32 $1, t, 0x00780000, 0x3f800000, 0xea;
                shl.b32 t, $8, 3;
                lop3.b32 $2, t, 0x00780000, 0x3f800000, 0xea;
                shr.b32 t, $8, 5;
                lop3.b32 $3, t, 0x00780000, 0x3f800000, 0xea;
                shl.b32 t, $8, 15;
                lop3.b32 $4, t, 0x00780000, 0x3f800000, 0xea;
                shl.b32 t, $8, 7;
                lop3.b32 $5, t, 0x00780000, 0x3f800000, 0xea;
                shr.b32 t, $8, 1;
                lop3.b32 $6, t, 0x00780000, 0x3f800000, 0xea;
                shr.b32 t, $8, 9;
                lop3.b32 $7, t, 0x00780000, 0x3f800000, 0xea;
                }""",
                "=f,=f,=f,=f,=f,=f,=f,=f,r",
                [w],
                dtype=(tl.float32, tl.float32),
                is_pure=False,
                pack=4,
            )
        else:
            lo = (w & 15).to(tl.float32) / 16.0 + 1.0
            hi = (w >> 4).to(tl.float32) / 16.0 + 1.0
        return (lo, hi)
    else:
        return (w.to(tl.float32),)


@triton.jit
def e4m3_as_bf16(w):
    """Exact. The compiler's own way takes a quarter-rate conversion per element; this one 2.5 full-rate instructions.

    The code's bits, moved to where bfloat16 has sign, exponent and mantissa, read 2^-120 times its value.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, s, up, zero;
        mov.b32 up, 0x7b807b80;
        mov.b32 zero, 0x80008000;
        prmt.b32 a, $2, 0, 0x1404;
        and.b32 s, a, 0x80008000;
        shr.b32 b, a, 4;
        lop3.b32 a, b, 0x07f007f0, s, 0xea;
        fma.rn.bf16x2 $0, a, up, zero;
        prmt.b32 a, $2, 0, 0x3424;
        and.b32 s, a, 0x80008000;
        shr.b32 b, a, 4;
        lop3.b32 a, b, 0x07f007f0, s, 0xea;
        fma.rn.bf16x2 $1, a, up, zero;
        }""",
        "=r,=r,r",
        [w],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def half_fma(w, x, acc, ASM: tl.constexpr):
    """acc + w * x in float16, two at a time: e4m3 codes w, float16 x and acc."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 l, h;
            .reg .b32 a, b;
            mov.b32 {l, h}, $2;
            cvt.rn.f16x2.e4m3x2 a, l;
            cvt.rn.f16x2.e4m3x2 b, h;
            fma.rn.f16x2 $0, a, $3, $5;
            fma.rn.f16x2 $1, b, $4, $6;
            }""",
            "=r,=r,r,r,r,r,r",
            [w, x, acc],
            dtype=tl.float16,
            is_pure=False,
            pack=4,
        )
    else:
        return (w.to(tl.float32) * x.to(tl.float32) + acc.to(tl.float32)).to(tl.float16)


@triton.jit
def rounded(x, amax):
    """x [lanes * columns] as int16 and its unit [lanes]: 2^15 - 2^8 of them are the lane's largest magnitude `amax`."""
    unit = tl.maximum(amax, 1e-30) * (1.0 / 32512.0)
    lanes = tl.reshape(x, [amax.shape[0], x.shape[0] // amax.shape[0]])
    q = (lanes * (1.0 / unit)[:, None] + 32768.5).to(tl.int32) - 32768  # rounds: the cast cuts what is positive
    return tl.reshape(q, x.shape).to(tl.int16), unit


@triton.jit
def planes(q, ASM: tl.constexpr):
    """int16 -> (low bytes, unsigned; high bytes, signed)."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            prmt.b32 $0, $2, $3, 0x6420;
            prmt.b32 $1, $2, $3, 0x7531;
            }""",
            "=r,=r,r,r",
            [q],
            dtype=(tl.uint8, tl.int8),
            is_pure=False,
            pack=4,
        )
    else:
        return (q & 255).to(tl.uint8), (q >> 8).to(tl.int8)


@triton.jit
def int_dot(w, low, high, low1, high1, FORMAT: tl.constexpr, ASM: tl.constexpr):
    """Per lane sum of codes times x, exact int32 [rows, lanes]; int4: `low1`, `high1` belong to the high nibbles.

    Relies on a thread holding runs of four columns of w, as 16-byte loads of it leave them (a test looks).
    """
    if ASM:  # four products an instruction; the sum of a word's products stands in the first of its four elements
        if FORMAT == "int8":
            parts = tl.inline_asm_elementwise(
                """{
                .reg .b32 l, h;
                dp4a.s32.u32 l, $4, $5, 0;
                dp4a.s32.s32 h, $4, $6, 0;
                shl.b32 h, h, 8;
                add.s32 $0, l, h;
                mov.b32 $1, 0;
                mov.b32 $2, 0;
                mov.b32 $3, 0;
                }""",
                "=r,=r,=r,=r,r,r,r",
                [w, low, high],
                dtype=tl.int32,
                is_pure=False,
                pack=4,
            )
        else:
            parts = tl.inline_asm_elementwise(
                """{
                .reg .b32 a, b, l, h;
                and.b32 a, $4, 0x0f0f0f0f;
                shr.b32 b, $4, 4;
                and.b32 b, b, 0x0f0f0f0f;
                dp4a.s32.u32 l, a, $5, 0;
                dp4a.s32.u32 l, b, $7, l;
                dp4a.s32.s32 h, a, $6, 0;
                dp4a.s32.s32 h, b, $8, h;
                shl.b32 h, h, 8;
                add.s32 $0, l, h;
                mov.b32 $1, 0;
                mov.b32 $2, 0;
                mov.b32 $3, 0;
                }""",
                "=r,=r,=r,=r,r,r,r,r,r",
                [w, low, high, low1, high1],
                dtype=tl.int32,
                is_pure=False,
                pack=4,
            )
    else:
        x = low.to(tl.int32) + high.to(tl.int32) * 256
        x1 = low1.to(tl.int32) + high1.to(tl.int32) * 256
        parts = w.to(tl.int32) * x if FORMAT == "int8" else (w & 15).to(tl.int32) * x + (w >> 4).to(tl.int32) * x1
    return per_lane(parts, 16)

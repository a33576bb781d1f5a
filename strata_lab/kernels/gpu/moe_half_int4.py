"""How int4 experts without minima multiply 16-bit activations: in float16, two products an instruction.

Four codes of a word of eight are cut out in place, each as the last bits of 1024 or (high nibbles) 64 in float16, two a
word; one more instruction takes off what is too much, 8 included, exactly. Products of eight columns are added up in
float16 and go on in float32, under the unit of the activations (`moe_half.py`): 13 instructions for eight weights,
with all that follows about 18. A word's pairs are (0, 2) and (1, 3) of its four columns, so whoever writes
activations writes every four in that order (`stored_place`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from strata_lab.kernels.gpu.moe_half import first
from strata_lab.kernels.gpu.moe_half_asm import REGISTERS, nothing, pair_sum


def _sums() -> str:
    """Words of codes $16-$19, their columns' activations $20-$27, those of high nibbles $28-$35 -> sums $0, $4, ..."""
    lines = ["{", *REGISTERS, ".reg .b32 one, less, by, minus, none;"]
    lines += ["mov.b32 one, 0x3c003c00;", "mov.b32 less, 0xe408e408;"]  # 1, -1032
    lines += ["mov.b32 by, 0x2c002c00;", "mov.b32 minus, 0xd480d480;", "mov.b32 none, 0;"]  # 1/16, -72
    for word in range(4):
        for half in range(2):
            start = word % 2 == 0 and half == 0
            lines.append(f"mov.b32 w, ${16 + word};" if half == 0 else f"shr.b32 w, ${16 + word}, 8;")
            x = 20 + 2 * word + half
            lines += ["lop3.b32 a, w, 0x000f000f, 0x64006400, 0xea;", "fma.rn.f16x2 a, a, one, less;"]
            lines.append(f"fma.rn.f16x2 s, a, ${x}, {'none' if start else 's'};")
            lines += ["lop3.b32 a, w, 0x00f000f0, 0x64006400, 0xea;", "fma.rn.f16x2 a, a, by, minus;"]
            lines.append(f"fma.rn.f16x2 t, a, ${x + 8}, {'none' if start else 't'};")
        if word % 2 == 1:
            lines += [*pair_sum("s", 4 * (word // 2)), *pair_sum("t", 8 + 4 * (word // 2))]
    return "\n".join([*lines, *nothing([i for i in range(16) if i % 4]), "}"])


SUMS = tl.constexpr(_sums())
OPERANDS = tl.constexpr(",".join(["=f"] * 16 + ["r"] * 20))


@triton.jit
def stored_place(col):
    """Where the activation of column `col` is kept: the middle two of every four change places."""
    return tl.where((col % 4 == 1) | (col % 4 == 2), col ^ 3, col)


@triton.jit
def sums_of_eight_int4(w, low, high, ASM: tl.constexpr):
    """w [R, C, 16] bytes of two codes about 8, float16 activations of low and of high nibbles [R, C, 16] as stored.

    Returns float32 [R, C, 4]: sums of products over each 8 columns of a chunk of 32, in their order. Relies on a thread
    holding a chunk's 16 bytes in order, as a 16-byte load leaves them (a test looks).
    """
    if ASM:  # a sum stands in the first of its four elements; the others are never looked at
        parts = tl.inline_asm_elementwise(SUMS, OPERANDS, [w, low, high], dtype=tl.float32, is_pure=False, pack=16)
        return tl.reduce(tl.reshape(parts, [w.shape[0], w.shape[1], 4, 4]), 3, first)
    else:
        a = _plain((w & 15).to(tl.float32) - 8.0, low)
        b = _plain((w >> 4).to(tl.float32) - 8.0, high)
        return tl.reshape(tl.permute(tl.join(a, b), [0, 1, 3, 2]), [w.shape[0], w.shape[1], 4])


@triton.jit
def _plain(codes, x):
    quads = tl.reshape(x.to(tl.float32), [x.shape[0], x.shape[1] * 4, 2, 2])
    x = tl.reshape(tl.permute(quads, [0, 1, 3, 2]), codes.shape)
    return tl.sum(tl.reshape(codes * x, [x.shape[0], x.shape[1], 2, 8]), axis=3)

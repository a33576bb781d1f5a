"""How int8 experts multiply 16-bit activations: in float16, two products an instruction, as `moe_half.py` does.

A byte with its sign turned is the last eight bits of 1024 in float16; one instruction puts two of a word's bytes there,
the next takes off the 1024 and the 128 of the sign, exactly. With all that follows about 2.2 instructions a weight,
where float32 takes 3.3. The largest sum in float16 is 127 * 8 * 4, within its range by a factor of 16.
"""

from __future__ import annotations

import triton.language as tl

from strata_lab.kernels.gpu.moe_half_asm import sums_of_pairs


def _pairs(word: str) -> tuple[list[str], list[str]]:
    """`word` -> its bytes 0 and 1, then 2 and 3, each pair in `a`."""
    less = "fma.rn.f16x2 a, a, one, less;"  # an addition would do; with this ptxas needs fewer registers
    first = [f"xor.b32 w, {word}, 0x80808080;", "prmt.b32 a, w, above, 0x4140;", less]
    return first, ["prmt.b32 a, w, above, 0x4342;", less]


_CONSTANTS = (  # the upper byte of 1024 four times, 1, -1152
    ".reg .b32 above, one, less;", "mov.b32 above, 0x64646464;", "mov.b32 one, 0x3c003c00;",
    "mov.b32 less, 0xe480e480;",
)  # fmt: skip
INT8_SUMS = tl.constexpr(sums_of_pairs(_pairs, _CONSTANTS))

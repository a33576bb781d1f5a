"""Assembly that adds up products of a chunk in pairs of float16: what the formats share, as text.

A chunk is 16 bytes of a row; pieces of text say how a word of codes becomes pairs of float16. Registers: `s` and `t`
hold running pairs, `a` a pair of codes, `w` a word, `l` and `h` its halves, `f` and `g` the halves of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

PAIR_OPERANDS = ",".join(["=f"] * 16 + ["r"] * 12)  # of `sums_of_pairs`
REGISTERS = (".reg .b16 l, h;", ".reg .b32 w, a, s, t;", ".reg .f32 f, g;")


def pair_sum(pair: str, out: int) -> list[str]:
    """Both halves of a running pair, added in float32 to output `out`."""
    return [f"mov.b32 {{l, h}}, {pair};", "cvt.f32.f16 f, l;", "cvt.f32.f16 g, h;", f"add.f32 ${out}, f, g;"]


def nothing(outs: Sequence[int]) -> list[str]:
    """Zeros for the outputs that nobody looks at."""
    return [f"mov.f32 ${i}, 0f00000000;" for i in outs]


def sums_of_pairs(convert: Callable[[str], Sequence[Sequence[str]]], constants: Sequence[str] = ()) -> str:
    """Words of 8-bit codes $16-$19 and float16 activations of their columns $20-$27 -> sums of eight $0 and $8.

    Args:
        convert: of the name of a word: for its first and its last two codes what leaves them in `a`.
        constants: declared and set before.
    """
    lines = ["{", *REGISTERS, *constants]
    for word in range(4):
        pair = "s" if word < 2 else "t"
        for half, steps in enumerate(convert(f"${16 + word}")):
            x = f"${20 + 2 * word + half}"
            lines += steps
            first = word % 2 == 0 and half == 0
            lines.append(f"mul.rn.f16x2 {pair}, a, {x};" if first else f"fma.rn.f16x2 {pair}, a, {x}, {pair};")
    lines += [*pair_sum("s", 0), *pair_sum("t", 8), *nothing([i for i in range(16) if i % 8])]
    return "\n".join([*lines, "}"])

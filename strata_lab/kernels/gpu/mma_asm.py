"""Tensor-core products on registers as loads left them: `mma.m16n8k16` without `tl.dot`'s changes of layout.

All tiles here are int32 or float32 [8 * warps, 16], four elements per thread, eight rows by four lanes per warp: lane
(g, q) holds elements 4 q..4 q + 3 of row g. That is what coalescing makes of a 64-byte wide tile read in words. The
asm is silently wrong for any other layout, so a test reads the compiler's layouts back (`LAYOUT`).

The order in which a product sums its columns is free, so the bytes a lane holds are taken for the columns that `mma`
expects in that lane, and x is read in the same order. Words of 8-bit and 4-bit codes split in an even and an odd half:
word s of a lane (bytes b0..b3) becomes the pairs (b0, b2) and (b1, b3), and x follows (`paired`).

A result tile has, in element 4 q + 2 h + l of row g: row g + 8 h of the product, column 2 q + l.
Each function has a plain form for the interpreter, which also says what the asm is supposed to compute.
"""

from __future__ import annotations

import triton
import triton.language as tl

LAYOUT = r"sizePerThread = \[1, 4\], threadsPerWarp = \[8, 4\], warpsPerCTA = \[(\d+), 1\], order = \[1, 0\]"


def _chain(pairs: int, half: bool, has_high: bool) -> str:
    """acc ($0-$3) += A @ B over all of a lane's words. Inputs: A tiles of rows 0-7, of rows 8-15, B tiles, acc."""
    tiles = max(1, 2 * pairs)
    low = 4
    high = low + 4 * tiles
    x = high + 4 * tiles if has_high else high
    # first and second register of a step: of the even and the odd tile, or (16-bit weights) neighbours in one tile
    steps = [(8 * p + s, 8 * p + 4 + s) for p in range(pairs) for s in range(4)] or [(0, 1), (2, 3)]
    products = []
    for i, j in steps:
        high_i, high_j = (f"${high + i}", f"${high + j}") if has_high else ("z", "z")
        products.append((f"${low + i}, {high_i}, ${low + j}, {high_j}", f"${x + i}, ${x + j}"))
    return _products(products, x + 4 * tiles, half)


def _self_chain(tiles: int, half: bool, ones: bool) -> str:
    """acc += x @ x^T (`ones`: 1 @ x^T) over all of a lane's words. Inputs: x tiles, acc."""
    products = []
    for step in range(2 * tiles):
        i, j = f"${4 + 2 * step}", f"${5 + 2 * step}"
        products.append(("o, o, o, o" if ones else f"{i}, z, {j}, z", f"{i}, {j}"))
    return _products(products, 4 + 4 * tiles, half)


def _products(operands: list[tuple[str, str]], acc: int, half: bool) -> str:
    kind = "f16" if half else "bf16"
    lines = ["{", ".reg .b32 z, o;", ".reg .f32 c0, c1, c2, c3;", "mov.b32 z, 0;"]
    lines.append(f"mov.b32 o, {'0x3c003c00' if half else '0x3f803f80'};")
    lines += [f"mov.f32 c{i}, ${acc + i};" for i in range(4)]
    c = "{c0, c1, c2, c3}"
    for a, b in operands:
        lines.append(f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {c}, {{{a}}}, {{{b}}}, {c};")
    return "\n".join([*lines, *(f"mov.f32 ${i}, c{i};" for i in range(4)), "}"])


def _unpack(name: str, half: bool, zero: int = 0) -> str:
    """One word of codes -> words of two exact 16-bit floats each."""
    kind = "f16x2" if half else "bf16x2"
    outs = 4 if name == "int4" else 2
    shifts = {"fp8": ("shl.b32 w, $2, 8;", "mov.b32 w, $2;"), "int8": ("mov.b32 w, $2;", "shr.b32 w, $2, 8;")}
    nibbles = ("mov.b32 w, $4;", "shr.b32 w, $4, 8;", "shr.b32 w, $4, 4;", "shr.b32 w, $4, 12;")
    lines = ["{", f".reg .b32 w, t, s, by, plus, {', '.join(f'r{i}' for i in range(outs))};"]
    if name == "fp8":  # bits moved to another exponent and mantissa read 2^-8 (float16), 2^-120 (bfloat16) of the value
        lines += [f"mov.b32 by, {'0x5c005c00' if half else '0x7b807b80'};", "mov.b32 plus, 0x80008000;"]
    else:  # code + 128 or + 1024 by its bits, and then less that
        lines.append(f"mov.b32 by, {'0x3c003c00' if half else '0x3f803f80'};")
    if name == "int4":
        less = (0xE400 if half else 0xC300) + zero
        lines.append(f"mov.b32 plus, {hex(less << 16 | less)};")
    if name == "int8" and half:
        lines.append("mov.b32 plus, 0xe480e480;")
    for i, shift in enumerate(nibbles if name == "int4" else shifts[name]):
        lines.append(shift)
        if name == "fp8":
            lines += ["and.b32 s, w, 0x80008000;", f"shr.b32 t, w, {1 if half else 4};"]
            lines.append(f"lop3.b32 t, t, {'0x3f803f80' if half else '0x07f007f0'}, s, 0xea;")
        elif name == "int4":
            lines.append(f"lop3.b32 t, w, 0x000f000f, {'0x64006400' if half else '0x43004300'}, 0xea;")
        elif half:
            lines += ["xor.b32 w, w, 0x00800080;", "lop3.b32 t, w, 0x00ff00ff, 0x64006400, 0xea;"]
        else:  # seven bits of the mantissa: 128 + low bits, less 128 or, with the sign, 256
            lines += ["lop3.b32 plus, w, 0x00800080, 0xc300c300, 0xea;"]
            lines += ["lop3.b32 t, w, 0x007f007f, 0x43004300, 0xea;"]
        lines.append(f"fma.rn.{kind} r{i}, t, by, plus;")
    return "\n".join([*lines, *(f"mov.b32 ${i}, r{i};" for i in range(outs)), "}"])


def _paired() -> str:
    """Eight words of 16 columns -> per run of four columns (0, 2) and (1, 3): even tile $0-$3, odd tile $4-$7."""
    lines = ["{", ".reg .b32 r<8>;"]
    for s in range(4):
        lines += [f"prmt.b32 r{s}, ${8 + 2 * s}, ${9 + 2 * s}, 0x5410;"]
        lines += [f"prmt.b32 r{s + 4}, ${8 + 2 * s}, ${9 + 2 * s}, 0x7632;"]
    return "\n".join([*lines, *(f"mov.b32 ${i}, r{i};" for i in range(8)), "}"])


def _spread() -> str:
    """Words of two float16: scales of both rows, minima of both rows -> float32, scales $0-$3 and minima $4-$7."""
    lines = ["{", ".reg .b16 l, h;", ".reg .f32 r<8>;"]
    for i in range(4):
        lines += [f"mov.b32 {{l, h}}, ${8 + i};", f"cvt.f32.f16 r{2 * i}, l;", f"cvt.f32.f16 r{2 * i + 1}, h;"]
    return "\n".join([*lines, *(f"mov.f32 ${i}, r{i};" for i in range(8)), "}"])


def _operands(words: int) -> tl.constexpr:
    return tl.constexpr(",".join(["=f"] * 4 + ["r"] * words + ["f"] * 4))


# Names end in: float16 or not, rows 8-15 there or not.
CHAIN_16_00, CHAIN_16_01 = tl.constexpr(_chain(0, False, False)), tl.constexpr(_chain(0, False, True))
CHAIN_8_00, CHAIN_8_01 = tl.constexpr(_chain(1, False, False)), tl.constexpr(_chain(1, False, True))
CHAIN_8_10, CHAIN_8_11 = tl.constexpr(_chain(1, True, False)), tl.constexpr(_chain(1, True, True))
CHAIN_4_00, CHAIN_4_01 = tl.constexpr(_chain(2, False, False)), tl.constexpr(_chain(2, False, True))
CHAIN_4_10, CHAIN_4_11 = tl.constexpr(_chain(2, True, False)), tl.constexpr(_chain(2, True, True))
SQUARES_0, SQUARES_1 = tl.constexpr(_self_chain(1, False, False)), tl.constexpr(_self_chain(1, True, False))
SUMS_0, SUMS_1 = tl.constexpr(_self_chain(2, False, True)), tl.constexpr(_self_chain(2, True, True))
FP8_0, FP8_1 = tl.constexpr(_unpack("fp8", False)), tl.constexpr(_unpack("fp8", True))
INT8_0, INT8_1 = tl.constexpr(_unpack("int8", False)), tl.constexpr(_unpack("int8", True))
INT4_00, INT4_08 = tl.constexpr(_unpack("int4", False)), tl.constexpr(_unpack("int4", False, 8))
INT4_10, INT4_18 = tl.constexpr(_unpack("int4", True)), tl.constexpr(_unpack("int4", True, 8))
PAIRED, SPREAD = tl.constexpr(_paired()), tl.constexpr(_spread())
IN_4, IN_8, IN_12, IN_16 = _operands(4), _operands(8), _operands(12), _operands(16)
IN_24, IN_32, IN_48 = _operands(24), _operands(32), _operands(48)


@triton.jit
def codes_as_pairs(w, FORMAT: tl.constexpr, FP16: tl.constexpr, ZERO: tl.constexpr, ASM: tl.constexpr):
    """Words of codes -> tiles of exact 16-bit floats, two a word: (even, odd), int4 also those of the high nibbles.

    16-bit weights stay as they are. `ZERO` is the int4 code that means 0 (0 or 8).
    """
    if FORMAT == "bf16":
        return (w,)
    elif not ASM:
        return _codes_plain(w, FORMAT, FP16, ZERO)
    elif FORMAT == "int4":
        if FP16:
            text: tl.constexpr = INT4_18 if ZERO == 8 else INT4_10
        else:
            text: tl.constexpr = INT4_08 if ZERO == 8 else INT4_00
        kinds: tl.constexpr = (tl.int32, tl.int32, tl.int32, tl.int32)
        return tl.inline_asm_elementwise(text, "=r,=r,=r,=r,r", [w], dtype=kinds, is_pure=False, pack=1)
    else:
        if FORMAT == "fp8":
            text: tl.constexpr = FP8_1 if FP16 else FP8_0
        else:
            text: tl.constexpr = INT8_1 if FP16 else INT8_0
        return tl.inline_asm_elementwise(text, "=r,=r,r", [w], dtype=(tl.int32, tl.int32), is_pure=False, pack=1)


@triton.jit
def times(x, gain, FP16: tl.constexpr, ASM: tl.constexpr):
    """Products of 16-bit floats, two a word, rounded."""
    if not ASM:
        return _join(_low(x, FP16) * _low(gain, FP16), _high(x, FP16) * _high(gain, FP16), FP16)
    elif FP16:
        text: tl.constexpr = "mul.rn.f16x2 $0, $1, $2;"
        return tl.inline_asm_elementwise(text, "=r,r,r", [x, gain], dtype=tl.int32, is_pure=True, pack=1)
    else:
        text: tl.constexpr = "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }"
        return tl.inline_asm_elementwise(text, "=r,r,r", [x, gain], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def paired(x0, x1, ASM: tl.constexpr):
    """A lane's first and last four words (16 columns) -> their even and odd tiles, as `codes_as_pairs` has them."""
    if ASM:
        kinds: tl.constexpr = (tl.int32, tl.int32)
        text: tl.constexpr = "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r"
        return tl.inline_asm_elementwise(PAIRED, text, [x0, x1], dtype=kinds, is_pure=True, pack=4)
    else:
        rows: tl.constexpr = x0.shape[0]
        a0, b0 = tl.split(tl.reshape(x0, [rows, 8, 2]))
        a1, b1 = tl.split(tl.reshape(x1, [rows, 8, 2]))
        even = tl.join((a0 & 0xFFFF) | (b0 << 16), (a1 & 0xFFFF) | (b1 << 16))  # [rows, 4 lanes * 2, which]
        odd = tl.join(((a0 >> 16) & 0xFFFF) | (b0 & -65536), ((a1 >> 16) & 0xFFFF) | (b1 & -65536))
        even = tl.permute(tl.reshape(even, [rows, 4, 2, 2]), [0, 1, 3, 2])
        odd = tl.permute(tl.reshape(odd, [rows, 4, 2, 2]), [0, 1, 3, 2])
        return tl.reshape(even, [rows, 16]), tl.reshape(odd, [rows, 16])


@triton.jit
def ask(pointers, like, ASM: tl.constexpr):
    """Words or 16-bit halves of words at the pointers, int32, laid out as the tile `like` (whose values do not matter).

    `tl.load` lays out what is not contiguous as it sees fit, and changes of layout take shared memory.
    """
    if not ASM:
        return tl.load(pointers).to(tl.int32)
    else:
        WORDS: tl.constexpr = pointers.dtype.element_ty == tl.int32
        text: tl.constexpr = "ld.global.nc.b32 $0, [$1];" if WORDS else "ld.global.nc.u16 $0, [$1];"
        given = [pointers.to(tl.int64), like]
        return tl.inline_asm_elementwise(text, "=r,l,r", given, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def half_as_float(w):
    """The float16 in the low half of a word, float32."""
    return w.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def spread(w, ASM: tl.constexpr):
    """Words (scales of row g, of row g + 8, minima of row g, of row g + 8), each for columns 2 q and 2 q + 1 of the
    product -> scales, minima, float32, laid out as a result tile."""
    if ASM:
        kinds: tl.constexpr = (tl.float32, tl.float32)
        text: tl.constexpr = "=f,=f,=f,=f,=f,=f,=f,=f,r,r,r,r"
        return tl.inline_asm_elementwise(SPREAD, text, [w], dtype=kinds, is_pure=False, pack=4)
    else:
        rows: tl.constexpr = w.shape[0]
        scale, least = tl.split(tl.permute(tl.reshape(w, [rows, 4, 2, 2]), [0, 1, 3, 2]))
        scale, least = tl.join(_low(scale, True), _high(scale, True)), tl.join(_low(least, True), _high(least, True))
        return tl.reshape(scale, [rows, 16]), tl.reshape(least, [rows, 16])


@triton.jit
def chain(acc, low, high, x, FP16: tl.constexpr, ASM: tl.constexpr):
    """acc + the product of 16 rows (tuples of tiles: rows 0-7, rows 8-15 or nothing) with 8 columns of x."""
    TILES: tl.constexpr = len(low)
    HIGH: tl.constexpr = len(high) > 0
    if not ASM:
        a = tl.zeros([acc.shape[0] // 8, 8, 8], tl.float32)
        b = tl.zeros([acc.shape[0] // 8, 8, 8], tl.float32)
        for i in tl.static_range(TILES):
            a += _grams(low[i], x[i], FP16)
            if HIGH:
                b += _grams(high[i], x[i], FP16)
        return acc + _fragment(a, b)
    else:
        if TILES == 1:
            text: tl.constexpr = CHAIN_16_01 if HIGH else CHAIN_16_00
            operands: tl.constexpr = IN_12 if HIGH else IN_8
        elif TILES == 2:
            if FP16:
                text: tl.constexpr = CHAIN_8_11 if HIGH else CHAIN_8_10
            else:
                text: tl.constexpr = CHAIN_8_01 if HIGH else CHAIN_8_00
            operands: tl.constexpr = IN_24 if HIGH else IN_16
        else:
            if FP16:
                text: tl.constexpr = CHAIN_4_11 if HIGH else CHAIN_4_10
            else:
                text: tl.constexpr = CHAIN_4_01 if HIGH else CHAIN_4_00
            operands: tl.constexpr = IN_48 if HIGH else IN_32
        tiles = low + high + x + (acc,)
        return tl.inline_asm_elementwise(text, operands, tiles, dtype=tl.float32, is_pure=False, pack=4)


@triton.jit
def squares(acc, x, FP16: tl.constexpr, ASM: tl.constexpr):
    """acc + x @ x^T of eight rows of x."""
    if ASM:
        text: tl.constexpr = SQUARES_1 if FP16 else SQUARES_0
        return tl.inline_asm_elementwise(text, IN_4, [x, acc], dtype=tl.float32, is_pure=False, pack=4)
    else:
        gram = _grams(x, x, FP16)
        return acc + _fragment(gram, gram * 0.0)


@triton.jit
def sums(acc, x0, x1, FP16: tl.constexpr, ASM: tl.constexpr):
    """acc + the sums of eight rows of x, the same in every row of the result."""
    if ASM:
        text: tl.constexpr = SUMS_1 if FP16 else SUMS_0
        return tl.inline_asm_elementwise(text, IN_8, [x0, x1, acc], dtype=tl.float32, is_pure=False, pack=4)
    else:
        one = _join(_low(x0, FP16) * 0.0 + 1.0, _low(x0, FP16) * 0.0 + 1.0, FP16)
        total = _grams(one, x0, FP16) + _grams(one, x1, FP16)
        return acc + _fragment(total, total)


@triton.jit
def by_token(v, SLOTS: tl.constexpr):
    """[g, 4 lanes, h, 2] by columns of the product -> [g, 4 | 2, h, 2 | 1] by rows of x: the slots are added up."""
    if SLOTS > 1:
        v = tl.sum(v, axis=3, keep_dims=True)
    if SLOTS > 2:
        v = tl.sum(tl.reshape(v, [v.shape[0], 2, 2, v.shape[2]]), axis=2)
        v = tl.reshape(v, [v.shape[0], 2, v.shape[2], 1])
    return v


@triton.jit
def _low(w, FP16: tl.constexpr):
    if FP16:
        return (w & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (w << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(w, FP16: tl.constexpr):
    if FP16:
        return (w >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (w & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _join(low, high, FP16: tl.constexpr):
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
def _codes_plain(w, FORMAT: tl.constexpr, FP16: tl.constexpr, ZERO: tl.constexpr):
    codes = ()
    for i in tl.static_range(8 if FORMAT == "int4" else 4):
        if FORMAT == "int4":
            codes += ((((w >> (i % 4 * 8 + i // 4 * 4)) & 15) - ZERO).to(tl.float32),)
        elif FORMAT == "int8":
            codes += (((w << (24 - 8 * i)) >> 24).to(tl.float32),)
        else:
            codes += (((w >> (8 * i)) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32),)
    if FORMAT == "int4":
        even, odd = _join(codes[4], codes[6], FP16), _join(codes[5], codes[7], FP16)
        return _join(codes[0], codes[2], FP16), _join(codes[1], codes[3], FP16), even, odd
    else:
        return _join(codes[0], codes[2], FP16), _join(codes[1], codes[3], FP16)


@triton.jit
def _grams(a, x, FP16: tl.constexpr):
    """Per warp, rows of a times rows of x: [warps, 8, 8]."""
    shape: tl.constexpr = [a.shape[0] // 8, 8, 1, 16]
    turned: tl.constexpr = [a.shape[0] // 8, 1, 8, 16]
    low = tl.reshape(_low(a, FP16), shape) * tl.reshape(_low(x, FP16), turned)
    high = tl.reshape(_high(a, FP16), shape) * tl.reshape(_high(x, FP16), turned)
    return tl.sum(low + high, axis=3)


@triton.jit
def _fragment(low, high):
    """Rows 0-7 and 8-15 of a product [warps, 8, 8] -> [8 * warps, 16] as `mma` returns it."""
    both = tl.reshape(tl.join(low, high), [low.shape[0], 8, 4, 2, 2])  # warp, row, lane, column, half
    return tl.reshape(tl.permute(both, [0, 1, 2, 4, 3]), [low.shape[0] * 8, 16])

"""A warp that executes the few PTX instructions of the kernels' asm, as the PTX ISA defines them: 32 lanes of words."""

from __future__ import annotations

import re

import torch
from torch import Tensor

LANES = 32
MASK = 0xFFFFFFFF
G, Q = torch.arange(LANES) // 4, torch.arange(LANES) % 4


def halves(words: Tensor, half: bool) -> Tensor:
    """Words (int64 below 2^32) -> [..., 2] the two 16-bit floats of each, low half first, float64."""
    bits = torch.stack([words & 0xFFFF, words >> 16], dim=-1)
    bits = torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16)
    return bits.view(torch.float16 if half else torch.bfloat16).double()


def words_of(values: Tensor, half: bool) -> Tensor:
    """The reverse: [..., 2] -> words, rounded to nearest even."""
    bits = values.float().to(torch.float16 if half else torch.bfloat16).view(torch.int16).long() & 0xFFFF
    return bits[..., 0] | (bits[..., 1] << 16)


def execute(text: str, operands: dict[int, Tensor]) -> dict[int, Tensor]:
    """Run asm with `$i` as given (words int64 [32], floats float64 [32]); returns all operands afterwards."""
    registers = {f"${i}": value.clone() for i, value in operands.items()}
    for statement in text.replace("\n", " ").split(";"):
        line = statement.strip().lstrip("{").strip()
        if not line or line.startswith((".reg", "}")):
            continue
        name, rest = line.split(None, 1)
        if name.startswith("mma"):
            _mma(rest, registers, half=".f16.f16." in name)
            continue
        if rest.startswith("{"):  # both halves of a word
            low, high, word = re.fullmatch(r"{(\w+), (\w+)}, (\S+)", rest).groups()  # type: ignore[union-attr]
            registers[low], registers[high] = registers[word] & 0xFFFF, registers[word] >> 16
            continue
        target, *arguments = (part.strip() for part in rest.split(","))
        registers[target] = _value(name, [_operand(a, registers) for a in arguments])
    return {int(k[1:]): v for k, v in registers.items() if k.startswith("$")}


def _operand(text: str, registers: dict[str, Tensor]) -> Tensor:
    text = "0" if text == "0f00000000" else text
    return registers[text] if text in registers else torch.full((LANES,), int(text, 0), dtype=torch.int64)


def _value(name: str, a: list[Tensor]) -> Tensor:
    if name == "mov.f32":
        return a[0].double()
    if name == "cvt.f32.f16":
        return halves(a[0], True)[:, 0]
    if name == "add.f32":
        return (a[0].float() + a[1].float()).double()
    if name.startswith("mov"):
        return a[0].clone()
    if name == "and.b32":
        return a[0] & a[1]
    if name == "xor.b32":
        return a[0] ^ a[1]
    if name == "shl.b32":
        return (a[0] << a[1]) & MASK
    if name == "shr.b32":
        return a[0] >> a[1]
    if name == "lop3.b32":
        assert int(a[3][0]) == 0xEA
        return (a[0] & a[1]) | a[2]
    if name == "prmt.b32":
        source = a[0] | (a[1] << 32)
        picks = [(int(a[2][0]) >> (4 * i)) & 7 for i in range(4)]
        return sum((((source >> (8 * pick)) & 0xFF) << (8 * i) for i, pick in enumerate(picks)), a[0] * 0)
    if name == "cvt.rn.f16x2.e4m3x2":
        codes = torch.stack([a[0] & 0xFF, a[0] >> 8], dim=-1).to(torch.uint8)
        return words_of(codes.view(torch.float8_e4m3fn).double(), True)
    half = "bf16" not in name
    assert re.fullmatch(r"(fma|mul)\.rn\.b?f16x2", name), name
    product = halves(a[0], half) * halves(a[1], half)
    return words_of(product + halves(a[2], half) if name.startswith("fma") else product, half)


def _mma(text: str, registers: dict[str, Tensor], half: bool) -> None:
    d, a, b, c = ([name.strip() for name in group.split(",")] for group in re.findall(r"{([^}]*)}", text))
    left, right, acc = (torch.zeros(shape, dtype=torch.float64) for shape in ((16, 16), (16, 8), (16, 8)))
    for h in range(2):
        for i in range(4):
            left[G + 8 * (i % 2), 2 * Q + h + 8 * (i // 2)] = halves(registers[a[i]], half)[:, h]
        for i in range(2):
            right[2 * Q + h + 8 * i, G] = halves(registers[b[i]], half)[:, h]
    for i in range(4):
        acc[G + 8 * (i // 2), 2 * Q + i % 2] = registers[c[i]]
    acc += left @ right
    for i in range(4):
        registers[d[i]] = acc[G + 8 * (i // 2), 2 * Q + i % 2]

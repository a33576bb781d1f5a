"""GPTQ as AutoGPTQ and GPTQModel write it: int32 words along the input columns, 4 or 8 bits, any order of columns.

Tensors of a module [N, K], with P = 32/bits numbers per word and S groups: `qweight` int32 [K/P, N] (column P*r + i in
bits i*bits of word r), `scales` float [S, N], `qzeros` int32 [S, N/P] (row P*c + i in word c), `g_idx` int [K] with the
group of every column. w = scale * (code - zero).

Two conventions for the zeros: files of `checkpoint_format` "gptq" (v1) store zero - 1, subtracted from whole words, so
that a zero of 0 borrows from its neighbour; adding 1 to every field of the word, carries included, undoes exactly that.
"gptq_v2" stores the zero itself. With `desc_act` columns were quantized in order of importance and `g_idx` scatters the
groups: the codes then fit none of the engine's formats, and the matrix is dequantized, which a note says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strata_lab.models.packed import WORD_BITS, Codes, Notes, check_scales, to_weight, unpack_words
from strata_lab.models.quant_parts import FLOATS, Module, Settings, Tensors, claim, modules_with
from strata_lab.quant.base import LinearWeight

_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_ONES = {4: 0x11111111, 8: 0x01010101}
_BITS = (4, 8)


class GptqReader:
    """The GPTQ modules of a folder. Attributes and methods as `QuantReader` says."""

    def __init__(self, tensors: Tensors, settings: Settings) -> None:
        self._bits: int = settings.one_of("bits", _BITS)
        self._group_size = settings.group_size()
        layout = settings.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        self._zero_offset = 1 if layout == "gptq" else 0
        modules = modules_with(tensors, "qweight")
        self._modules = {m.canonical: m for m in modules}
        self.claimed = claim(modules, _PARTS)
        self.shapes = {m.canonical: self._shape(m) for m in modules}
        asymmetric = self._bits == 8 and settings.raw.get("sym") is False  # no format has 8 bits and minima
        dequantized = asymmetric or self._mostly_scattered(settings)
        self.stored_format = "bf16" if dequantized else f"int{self._bits}"

    def _shape(self, module: Module) -> tuple[int, int]:
        words, n = module.shape("qweight", ("I32",), 2)
        per_word = WORD_BITS // self._bits
        k = words * per_word
        if module.has("g_idx"):
            (k,) = module.shape("g_idx", ("I32", "I64"), 1)
            if -(-k // per_word) != words:
                raise module.error("g_idx", f"has {k} columns, but qweight has room for {words * per_word}")
        groups, _ = module.shape("scales", FLOATS, 2)
        module.check("scales", FLOATS, (groups, n))
        module.check("qzeros", ("I32",), (groups, -(-n // per_word)))
        expected = -(-k // (self._group_size or k))
        if groups != expected:
            raise module.error("scales", f"has {groups} groups, but {k} columns in groups of {self._group_size or k} "
                               f"are {expected}")  # fmt: skip
        return n, k

    def _groups(self, module: Module, k: int) -> Tensor:
        """int64 [K], checked."""
        if not module.has("g_idx"):
            return torch.arange(k) // (self._group_size or k)
        group_of, groups = module.get("g_idx").long(), module.tensors.shapes[f"{module.name}.scales"][0]
        if int(group_of.min()) < 0 or int(group_of.max()) >= groups:
            raise module.error("g_idx", f"names groups {int(group_of.min())}..{int(group_of.max())}, but there are "
                               f"{groups}, counted from 0")  # fmt: skip
        return group_of

    def _mostly_scattered(self, settings: Settings) -> bool:
        if not settings.raw.get("desc_act"):
            return False
        scattered = 0
        for name, module in self._modules.items():
            group_of = self._groups(module, self.shapes[name][1])
            scattered += not torch.equal(group_of[::32].repeat_interleave(32)[: len(group_of)], group_of)
        return 2 * scattered > len(self._modules)

    def linear(self, name: str, notes: Notes) -> LinearWeight:
        """The matrix [N, K]; raises `CheckpointError` for scales that are not finite and groups that do not exist."""
        module, (n, k) = self._modules[name], self.shapes[name]
        scales = module.get("scales").T.contiguous()
        check_scales(scales, name, module.tensors.where(f"{module.name}.scales"))
        codes = unpack_words(module.get("qweight").T, self._bits)[:, :k]
        words = module.get("qzeros")
        if self._zero_offset:
            words = words + _ONES[self._bits]  # int32 addition wraps, as the writer's subtraction did
        zeros = unpack_words(words, self._bits)[:, :n].T.to(torch.int16)
        stored = Codes(name, self._bits, codes, scales, zeros, self._groups(module, k), self._group_size)
        return to_weight(stored, notes)

"""AWQ as AutoAWQ writes it in its "gemm" version: int32 words along the output rows, 4 bits, nibbles interleaved.

Tensors of a module [N, K] with S = K/group_size groups: `qweight` int32 [K, N/8], `qzeros` int32 [S, N/8], `scales`
float [S, N]. w = scale * (code - zero), the zero stored as it is. Of the eight rows in a word the even ones lie in the
low half, the odd ones in the high half: nibble i holds row `_ROW_OF_NIBBLE[i]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strata_lab.models.packed import Codes, Notes, check_scales, to_weight
from strata_lab.models.quant_parts import FLOATS, Module, Settings, Tensors, claim, modules_with
from strata_lab.quant.base import LinearWeight

_PARTS = ("qweight", "qzeros", "scales")
_ROW_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)
_PER_WORD = 8


class AwqReader:
    """The AWQ modules of a folder. Attributes and methods as `QuantReader` says."""

    stored_format = "int4"

    def __init__(self, tensors: Tensors, settings: Settings) -> None:
        settings.one_of("w_bit" if "w_bit" in settings.raw else "bits", (4,))
        settings.one_of("version", ("gemm", "GEMM"), "gemm")
        settings.one_of("zero_point", (True,), True)
        key = "q_group_size" if "q_group_size" in settings.raw else "group_size"
        self._group_size = settings.group_size(key)
        modules = modules_with(tensors, "qweight")
        self._modules = {m.canonical: m for m in modules}
        self.claimed = claim(modules, _PARTS)
        self.shapes = {m.canonical: self._shape(m) for m in modules}

    def _shape(self, module: Module) -> tuple[int, int]:
        k, words = module.shape("qweight", ("I32",), 2)
        n, groups = words * _PER_WORD, -(-k // (self._group_size or k))
        module.check("scales", FLOATS, (groups, n))
        module.check("qzeros", ("I32",), (groups, words))
        return n, k

    def linear(self, name: str, notes: Notes) -> LinearWeight:
        """The matrix [N, K]; raises `CheckpointError` for scales that are not finite."""
        module = self._modules[name]
        scales = module.get("scales").T.contiguous()
        check_scales(scales, name, module.tensors.where(f"{module.name}.scales"))
        codes = _rows(module.get("qweight"))
        zeros = _rows(module.get("qzeros")).to(torch.int16)
        return to_weight(Codes(name, 4, codes, scales, zeros, None, self._group_size), notes)


def _rows(words: Tensor) -> Tensor:
    """int32 [R, W] -> uint8 [8 * W, R], transposed and the interleaving undone."""
    words = words.T.contiguous()  # moving words costs a quarter of what moving single codes does
    rows = torch.empty(words.shape[0], _PER_WORD, words.shape[1], dtype=torch.uint8)
    for nibble, row in enumerate(_ROW_OF_NIBBLE):
        rows[:, row] = (words >> (4 * nibble)) & 0x0F
    return rows.flatten(0, 1)

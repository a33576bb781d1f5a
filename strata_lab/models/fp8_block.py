"""FP8 as Qwen and DeepSeek publish it: e4m3 codes with one scale per 128 x 128 block, or per matrix.

A module has `weight` float8_e4m3fn [N, K] and `weight_scale_inv` [ceil(N/128), ceil(K/128)]; despite its name it is
what a code is multiplied by. Without `weight_block_size` there is one scale per matrix or per row, also called
`weight_scale`. Activations stay 16 bit: an `input_scale` is left unread. The codes are handed out as they are, a
block's scale repeated for each of its rows.
"""

from __future__ import annotations

from torch import Tensor

from strata_lab.models.packed import Notes, check_scales
from strata_lab.models.quant_parts import FLOATS, Module, Settings, Tensors, claim, modules_with
from strata_lab.quant.base import LinearWeight

FP8 = "F8_E4M3"
BLOCK = 128  # rows and columns that share a scale
_SCALES = ("weight_scale_inv", "weight_scale")


class Fp8Reader:
    """The FP8 modules of a folder. Attributes and methods as `QuantReader` says."""

    stored_format = "fp8"

    def __init__(self, tensors: Tensors, settings: Settings) -> None:
        settings.one_of("fmt", ("e4m3",), "e4m3")
        self._blocks = settings.one_of("weight_block_size", ([BLOCK, BLOCK], False), False) is not False
        modules = modules_with(tensors, "weight", (FP8,))
        self._scale_part = {m.canonical: next((p for p in _SCALES if m.has(p)), _SCALES[0]) for m in modules}
        self._modules = {m.canonical: m for m in modules}
        self.claimed = claim(modules, ("weight", "input_scale", *_SCALES))
        self.shapes = {m.canonical: fp8_shape(m, self._scale_part[m.canonical], blocks=self._blocks) for m in modules}

    def linear(self, name: str, notes: Notes) -> LinearWeight:
        """The matrix [N, K]; raises `CheckpointError` for scales that are not finite."""
        return fp8_linear(self._modules[name], self._scale_part[name], blocks=self._blocks)


def fp8_shape(module: Module, scale_part: str, *, blocks: bool) -> tuple[int, int]:
    """(N, K) of an FP8 module, its scales checked: one per block, or one per row or matrix."""
    n, k = module.shape("weight", (FP8,), 2)
    per_block, others = (-(-n // BLOCK), -(-k // BLOCK)), ((), (1,), (1, 1), (n,), (n, 1))
    module.check(scale_part, FLOATS, *((per_block,) if blocks else others))
    return n, k


def fp8_linear(module: Module, scale_part: str, *, blocks: bool) -> LinearWeight:
    """The codes as stored; scales float32 [N, 1], or [N, ceil(K/128)] with group_size 128 for blocks.

    Whether a scale is one of a block is told by `blocks` and not by their number: 4 blocks can be 4 rows.
    """
    data, scales = module.get("weight"), module.get(scale_part).float()
    check_scales(scales, module.canonical, module.tensors.where(f"{module.name}.{scale_part}"))
    n, k = data.shape
    if blocks:
        return LinearWeight("fp8", (n, k), data, _per_row(scales, n), group_size=BLOCK)
    return LinearWeight("fp8", (n, k), data, scales.reshape(-1, 1).expand(n, 1).contiguous())


def _per_row(scales: Tensor, n: int) -> Tensor:
    """[ceil(N/128), G] -> [N, G]."""
    return scales.repeat_interleave(BLOCK, dim=0)[:n].contiguous()

"""One GGUF tensor: which number format it becomes and its parts, taken from the mapped file without dequantizing.

Layout of the blocks: ggml's `ggml-common.h`. Every block holds `GROUP` columns of one row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from strata_lab.models.errors import CheckpointError
from strata_lab.models.safetensors_io import TensorPart

GROUP = 32  # columns that share a scale in Q4_0, Q4_1 and Q8_0


@dataclass(frozen=True)
class _Block:
    """How a tensor type is stored: format it becomes, bytes of a block, where its parts lie in it."""

    format: str
    nbytes: int
    codes: slice
    mins: bool = False


_BLOCKS = {
    "Q8_0": _Block("int8", 34, slice(2, 34)),
    "Q4_0": _Block("int4", 18, slice(2, 18), mins=True),
    "Q4_1": _Block("int4", 20, slice(4, 20), mins=True),
}
_PLAIN = {"F32": "fp32", "F16": "fp32", "BF16": "bf16"}  # fp16 is held exactly by fp32
SUPPORTED_TYPES = (*_PLAIN, *_BLOCKS)


class GgufTensor:
    """One tensor, read from the mapped file when asked.

    Attributes:
        shape: [N, K], [N] or [experts, N, K].
        format: of the `LinearWeight` it becomes.
        rows: None, or the order in which its rows are read.
    """

    def __init__(self, path: Path, tensor: Any) -> None:
        self.kind: str = tensor.tensor_type.name
        if self.kind not in SUPPORTED_TYPES:
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} has type {self.kind}; supported are {', '.join(SUPPORTED_TYPES)}. "
                "Use a Q4_1, Q4_0, Q8_0 or F16 file of the model"
            )
        self.name: str = tensor.name
        self.path = path
        self.shape = tuple(int(n) for n in reversed(tensor.shape))
        self.rows: np.ndarray | None = None
        self._raw = tensor.data
        self._block = _BLOCKS.get(self.kind)
        self.format = self._block.format if self._block else _PLAIN[self.kind]

    def plain(self) -> np.ndarray:
        """Values of a float tensor (bfloat16 as uint16)."""
        assert self._block is None, self.name
        raw = self._raw.view(np.uint16) if self.kind == "BF16" else self._raw
        return self._ordered(raw.reshape(self.shape))

    def parts(self, name: str) -> list[TensorPart]:
        """What a cache file stores under `name`: values, or codes with scales (and minimums), experts stacked."""
        if self._block is None:
            return [TensorPart(name, self.kind, self.shape, self.plain)]
        rows, groups = math.prod(self.shape[:-1]), self.shape[-1] // GROUP
        width = (self._block.codes.stop - self._block.codes.start) * groups
        dtype = "I8" if self.format == "int8" else "U8"
        parts = [
            TensorPart(name, dtype, (rows, width), lambda: self._blocks()[..., self._codes()]),
            TensorPart(f"{name}.scales", "F16", (rows, groups), lambda: self._half(0)),
        ]
        if self._block.mins:
            make: Callable[[], np.ndarray] = (lambda: self._half(2)) if self.kind == "Q4_1" else self._q4_0_mins
            parts.append(TensorPart(f"{name}.mins", "F16", (rows, groups), make))
        return parts

    def _codes(self) -> slice:
        assert self._block is not None
        return self._block.codes

    def _ordered(self, values: np.ndarray) -> np.ndarray:
        return values if self.rows is None else values[self.rows]

    def _blocks(self) -> np.ndarray:
        """[N, K/32, bytes of a block], uint8."""
        assert self._block is not None
        return self._ordered(self._raw.reshape(math.prod(self.shape[:-1]), -1, self._block.nbytes))

    def _half(self, offset: int) -> np.ndarray:
        return np.ascontiguousarray(self._blocks()[..., offset : offset + 2]).view("<f2")[..., 0]

    def _q4_0_mins(self) -> np.ndarray:
        """Q4_0 means scale * (code - 8): a minimum of -8 * scale, a power of two and so exact below 8188."""
        scales = self._half(0)
        with np.errstate(over="ignore"):
            mins = scales * np.float16(-8)
        if np.any(np.isinf(mins) & np.isfinite(scales)):
            raise CheckpointError(
                f"{self.path}: tensor {self.name!r} has Q4_0 scales of {np.abs(scales).max()}, too large for 16-bit "
                "minimums; use a Q8_0 file of the model"
            )
        return mins


def rope_row_order(heads: int, head_dim: int) -> np.ndarray:
    """Order of rows that undoes GGUF's interleaving of the two halves of each Llama q or k head."""
    return np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)

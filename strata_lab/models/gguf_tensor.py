"""One GGUF tensor: which number format it becomes and its parts, taken from the mapped file without dequantizing.

Layout of the blocks: ggml's `ggml-common.h`. A block of Q4_0, Q4_1 and Q8_0 holds `GROUP` columns of one row; its codes
and scales are taken apart. The K types hold 256 columns with scales that are themselves quantized, which no format of
the engine can say: their blocks are kept as they are and dequantized when a matrix is asked for.
"""

from __future__ import annotations

import math
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
    "Q4_0": _Block("int4", 18, slice(2, 18)),
    "Q4_1": _Block("int4", 20, slice(4, 20), mins=True),
}
_PLAIN = {"F32": "fp32", "F16": "fp32", "BF16": "bf16"}  # fp16 is held exactly by fp32
# Type -> (bytes of a block of 256 columns, where its float16 scales lie in it).
K_TYPES = {"Q4_K": (144, slice(0, 4)), "Q5_K": (176, slice(0, 4)), "Q6_K": (210, slice(208, 210))}
K_COLUMNS = 256
SUPPORTED_TYPES = (*_PLAIN, *_BLOCKS, *K_TYPES)


class GgufTensor:
    """One tensor, read from the mapped file when asked.

    Attributes:
        shape: [N, K], [N] or [experts, N, K].
        format: of the `LinearWeight` it becomes; "fp32" for the K types, which are dequantized.
        kept_as: the format that holds its values well: "bf16" for the K types, else `format`.
        rows: None, or the order in which its rows are read.
    """

    def __init__(self, path: Path, tensor: Any) -> None:
        self.kind: str = tensor.tensor_type.name
        if self.kind not in SUPPORTED_TYPES:
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} has type {self.kind}; supported are {', '.join(SUPPORTED_TYPES)}. "
                "Use a Q4_1, Q4_0, Q8_0, Q4_K_M or F16 file of the model"
            )
        self.name: str = tensor.name
        self.path = path
        self.shape = tuple(int(n) for n in reversed(tensor.shape))
        self.rows: np.ndarray | None = None
        self._raw = tensor.data
        self._block = _BLOCKS.get(self.kind)
        self.format = self._block.format if self._block else _PLAIN.get(self.kind, "fp32")
        self.kept_as = "bf16" if self.kind in K_TYPES else self.format

    @property
    def quantized(self) -> bool:
        """Whether it is stored in blocks."""
        return self.kind not in _PLAIN

    def plain(self) -> np.ndarray:
        """Values of a float tensor (bfloat16 as uint16)."""
        assert not self.quantized, self.name
        raw = self._raw.view(np.uint16) if self.kind == "BF16" else self._raw
        return self._ordered(raw.reshape(self.shape))

    def parts(self, name: str) -> list[TensorPart]:
        """What a cache file stores under `name`: values, or codes with scales (and minimums), experts stacked."""
        if self.kind in K_TYPES:
            width = self.shape[-1] // K_COLUMNS * K_TYPES[self.kind][0]
            return [TensorPart(name, "U8", (math.prod(self.shape[:-1]), width), self._k_blocks)]
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
            parts.append(TensorPart(f"{name}.mins", "F16", (rows, groups), lambda: self._half(2)))
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
        return self._finite(self._blocks()[..., offset : offset + 2])[..., 0]

    def _k_blocks(self) -> np.ndarray:
        """[N, bytes of a row], uint8."""
        nbytes, scales = K_TYPES[self.kind]
        blocks = self._ordered(self._raw.reshape(math.prod(self.shape[:-1]), -1, nbytes))
        self._finite(blocks[..., scales])
        return blocks.reshape(blocks.shape[0], -1)

    def _finite(self, raw: np.ndarray) -> np.ndarray:
        """Bytes as float16; `CheckpointError` unless all are finite."""
        values = np.ascontiguousarray(raw).view("<f2")
        bad = int(np.count_nonzero(~np.isfinite(values)))
        if bad:
            raise CheckpointError(
                f"{self.path}: {bad} of {values.size} scales of tensor {self.name!r} are NaN or infinite; every scale "
                "must be a finite number such as 0.01: fetch the file again"
            )
        return values


def rope_row_order(heads: int, head_dim: int) -> np.ndarray:
    """Order of rows that undoes GGUF's interleaving of the two halves of each Llama q or k head."""
    return np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)

"""Safetensors files: checked opening with errors that say what is wrong, and writing one tensor at a time.

The header is read and checked here first, so that a short file or an absurd header is named with its numbers; the
`safetensors` package then maps the file. Nothing here knows about models.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from strata_lab.models.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
_FLOATS = ("F32", "F16", "BF16")
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
_FETCH_AGAIN = "fetch the file again"


class SafetensorsFile:
    """One open, memory-mapped file.

    Attributes:
        path: the file.
        shapes: tensor name to shape.
        dtypes: tensor name to the format's own name of the dtype ("BF16").
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header = _read_header(path)
        self.shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
        self.dtypes = {name: str(entry["dtype"]) for name, entry in header.items()}
        try:
            self._file: Any = safe_open(str(path), framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read as safetensors: {error}; {_FETCH_AGAIN}") from error

    def get(self, name: str) -> Tensor:
        """A tensor whose memory is the mapped file."""
        if self._file is None:
            raise CheckpointError(f"{self.path} is closed; open the checkpoint again to read {name!r}")
        try:
            return self._file.get_tensor(name)
        except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{self.path}: tensor {name!r} cannot be read: {error}; {_FETCH_AGAIN}") from error

    def close(self) -> None:
        """Let go of the file; tensors handed out keep their mapping."""
        self._file = None


def _read_header(path: Path) -> dict[str, dict[str, Any]]:
    """The header's entries, after checking that they are well formed and that the file is as long as they say."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8 or prefix.startswith(b"version "):
            raise CheckpointError(f"{path} is not a safetensors file ({size} bytes, starts {prefix!r}); {_FETCH_AGAIN}")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path}: the header claims {length} bytes, but the file has {size} and the format allows "
                f"{MAX_HEADER_BYTES}; the file is truncated or not safetensors: {_FETCH_AGAIN}"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
        header.pop("__metadata__", None)
        end = max((_checked_end(name, entry) for name, entry in header.items()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is damaged ({error}); {_FETCH_AGAIN}") from error
    if size != 8 + length + end:
        raise CheckpointError(
            f"{path} is {'truncated' if size < 8 + length + end else 'too long'}: expected {8 + length + end} bytes, "
            f"found {size}; {_FETCH_AGAIN}"
        )
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; `ValueError` for a key that comes twice, of which readers would take this one or that."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a name comes twice among {sorted(found)[:3]}...")
    return found


def _checked_end(name: str, entry: dict[str, Any]) -> int:
    """Where a header entry's bytes end, relative to the data; `ValueError` when entry, shape and bytes disagree."""
    start, end = (int(x) for x in entry["data_offsets"])
    shape = [int(x) for x in entry["shape"]]
    item = _ITEM_BYTES.get(entry["dtype"])
    if not 0 <= start <= end or min(shape, default=0) < 0:
        raise ValueError(f"tensor {name!r} has offsets {start}..{end} and shape {shape}")
    if item is not None and end - start != item * math.prod(shape):
        raise ValueError(f"tensor {name!r} of {entry['dtype']} {shape} cannot have {end - start} bytes")
    return end


@dataclass(frozen=True)
class TensorPart:
    """A tensor to be written: its place in the file is known before its values are made.

    Attributes:
        name: key in the file.
        dtype: "F32", "F16", "BF16", "I8" or "U8".
        shape: its shape.
        make: returns the values, C order, in any numpy dtype of the same item size.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]


def write_safetensors(path: Path, parts: Sequence[TensorPart]) -> None:
    """Write the parts one after the other. Wide dtypes come first, so all are aligned."""
    ordered = sorted(parts, key=lambda part: -_ITEM_BYTES[part.dtype])
    header: dict[str, Any] = {}
    offset = 0
    for part in ordered:
        end = offset + _ITEM_BYTES[part.dtype] * math.prod(part.shape)
        header[part.name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 64)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for part in ordered:
            values = np.ascontiguousarray(part.make())
            assert values.nbytes == _ITEM_BYTES[part.dtype] * math.prod(part.shape), part.name
            file.write(values.reshape(-1).view(np.uint8).data)


def float_dtype(name: str) -> torch.dtype | None:
    """The torch dtype of a float dtype this engine reads, else None."""
    return DTYPES[name] if name in _FLOATS else None

"""What the readers of published quantizations share: which tensors belong to a module, and questions about a config.

A quantized module has several tensors (`q_proj.qweight`, `q_proj.scales`, ...) where a plain one has `q_proj.weight`.
A reader claims the tensors of the modules it understands and answers for each with the canonical name
`q_proj.weight`; all other tensors stay plain. Which modules are quantized is read off the tensors that exist and not
off the lists of exceptions in the config (`ignore`, `modules_to_not_convert`): a file cannot be at odds with itself,
and patterns that came with a file are never run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from strata_lab.models.checkpoint import is_linear
from strata_lab.models.errors import CheckpointError
from strata_lab.models.packed import Notes
from strata_lab.quant.base import LinearWeight

FLOATS = ("F32", "F16", "BF16")


class Tensors(Protocol):
    """The raw tensors of a folder (see `tensor_files.py`)."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name to shape."""
        ...

    @property
    def dtypes(self) -> Mapping[str, str]:
        """Name to safetensors' name of the dtype ("BF16")."""
        ...

    def get(self, name: str) -> Tensor:
        """The tensor as stored."""
        ...

    def where(self, name: str) -> object:
        """The file that holds it, for messages."""
        ...


class QuantReader(Protocol):
    """Reads the quantized modules of one folder.

    Attributes:
        shapes: canonical name of every matrix it answers for to (N, K).
        claimed: raw names that belong to those matrices.
        stored_format: "int4", "int8" or "fp8"; "bf16" where most matrices have to be dequantized.
    """

    shapes: dict[str, tuple[int, int]]
    claimed: set[str]
    stored_format: str

    def linear(self, name: str, notes: Notes) -> LinearWeight:
        """The matrix of a canonical name in `shapes`."""
        ...


class Module:
    """The raw tensors of one quantized module, each checked when asked for.

    Args:
        tensors: of the folder.
        name: of the module, without ".weight".
    """

    def __init__(self, tensors: Tensors, name: str) -> None:
        self.tensors, self.name = tensors, name
        self.canonical = f"{name}.weight"

    def error(self, part: str, what: str) -> CheckpointError:
        """An error about one of its tensors."""
        raw = f"{self.name}.{part}"
        where = self.tensors.where(raw if raw in self.tensors.shapes else self.canonical)
        return CheckpointError(
            f"{where}: tensor {raw!r} {what}; fetch the file again, or use another copy of the model"
        )

    def has(self, part: str) -> bool:
        """Whether the tensor exists."""
        return f"{self.name}.{part}" in self.tensors.shapes

    def shape(self, part: str, dtypes: Collection[str], dims: int) -> tuple[int, ...]:
        """The shape of a tensor that must exist with one of these dtypes and this many dimensions, none of them 0."""
        raw = f"{self.name}.{part}"
        if raw not in self.tensors.shapes:
            raise self.error(part, "is missing, and a quantized matrix needs it")
        shape, dtype = self.tensors.shapes[raw], self.tensors.dtypes[raw]
        if dtype not in dtypes:
            raise self.error(part, f"has dtype {dtype} and must be {' or '.join(sorted(dtypes))}")
        if len(shape) != dims or 0 in shape:
            raise self.error(part, f"has shape {list(shape)} and must have {dims} dimensions of at least 1")
        return shape

    def check(self, part: str, dtypes: Collection[str], *shapes: tuple[int, ...]) -> None:
        """Raise unless the tensor exists with one of these dtypes and shapes."""
        found = self.shape(part, dtypes, len(self.tensors.shapes.get(f"{self.name}.{part}", ())))
        if found not in shapes:
            raise self.error(part, f"has shape {list(found)} and must have {' or '.join(str(list(s)) for s in shapes)}")

    def get(self, part: str) -> Tensor:
        """The tensor."""
        return self.tensors.get(f"{self.name}.{part}")


def modules_with(tensors: Tensors, part: str, dtypes: Collection[str] | None = None) -> list[Module]:
    """Every module that has this tensor (in one of these dtypes), in the file's order.

    Raises `CheckpointError` for a module that must stay plain (a router, a norm) or that is stored twice.
    """
    found = []
    for raw in tensors.shapes:
        name, _, last = raw.rpartition(".")
        if last != part or (dtypes is not None and tensors.dtypes[raw] not in dtypes):
            continue
        module = Module(tensors, name)
        if not is_linear(module.canonical):
            raise module.error(part, "is quantized; only projections, the embedding and the LM head may be")
        if part != "weight" and module.has("weight"):
            raise module.error(part, f"says the same as {module.canonical!r}, which exists too; one of them must go")
        found.append(module)
    return found


def claim(modules: Sequence[Module], parts: Sequence[str]) -> set[str]:
    """Raw names of these parts of the modules, as far as they exist."""
    return {f"{m.name}.{part}" for m in modules for part in parts if m.has(part)}


class Settings:
    """A `quantization_config`, asked key by key; a value that is not supported raises `CheckpointError`.

    Args:
        file: the config.json, for messages.
        raw: the object in it.
    """

    def __init__(self, file: object, raw: Mapping[str, Any]) -> None:
        self.file, self.raw = file, raw

    def one_of(self, key: str, allowed: Sequence[Any], default: Any = None) -> Any:
        """The value of a key (`default` where absent or null), which must be one of `allowed`."""
        value = self.raw.get(key)
        value = default if value is None else value
        for known in allowed:
            if type(value) is type(known) and value == known:
                return known
        raise CheckpointError(
            f"{self.file}: quantization_config has {key}={value!r}; supported are "
            f"{', '.join(repr(a) for a in allowed)}. Use a copy of the model with one of these"
        )

    def group_size(self, key: str = "group_size") -> int:
        """Columns of a group; 0 for the whole row (-1 or null in the file)."""
        value = self.raw.get(key)
        value = -1 if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not (value == -1 or 0 < value <= 1 << 20):
            raise CheckpointError(
                f"{self.file}: quantization_config has {key}={value!r}; it must be -1 (the whole row) or a number of "
                "columns such as 128"
            )
        return 0 if value == -1 else value

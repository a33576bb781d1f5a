"""The compressed-tensors format of llm-compressor and vLLM: FP8, packed 4 and 8 bit integers, plain int8.

Tensors of a module [N, K], weights only (activations stay 16 bit; their scales and a KV cache's are left unread):

- "float-quantized": `weight` float8_e4m3fn with `weight_scale` per matrix [1], row [N, 1] or 128 x 128 block.
- "int-quantized": `weight` int8, `weight_scale` per matrix, row or group [N, S]; where asymmetric `weight_zero_point`
  int8.
- "pack-quantized": `weight_packed` int32 [N, ceil(K*bits/32)], the code of column P*c + i, plus half its range, in bits
  i*bits of word c; `weight_shape` (N, K); `weight_zero_point` packed the same way but along the rows; `weight_g_idx`
  [K], the group of every column, where the columns were quantized in order of importance.

w = weight_scale * (code - zero point). The config lists schemes with patterns of module names; a scheme is found by the
shapes of the module's tensors instead, which say the same and cannot disagree with what is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strata_lab.models.errors import CheckpointError
from strata_lab.models.fp8_block import BLOCK, FP8, fp8_linear, fp8_shape
from strata_lab.models.packed import WORD_BITS, Codes, Notes, check_scales, to_weight, unpack_words
from strata_lab.models.quant_parts import FLOATS, Module, Settings, Tensors, claim, modules_with
from strata_lab.quant.base import LinearWeight

_FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized", "mixed-precision")
_WEIGHT_PARTS = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
_SCALE = "weight_scale"
_ACTIVATION_PARTS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")
_CACHE_SCALES = (".self_attn.k_scale", ".self_attn.v_scale", ".self_attn.q_scale")


@dataclass(frozen=True)
class _Scheme:
    """One entry of `config_groups`: a type ("int" or "float") of so many bits with one scale per `strategy`."""

    kind: str
    bits: int
    strategy: str
    group_size: int

    def scale_shapes(self, n: int, k: int) -> tuple[tuple[int, ...], ...]:
        """The shapes that its scales may have for a matrix [n, k]."""
        if self.strategy == "group":
            return ((n, -(-k // self.group_size)),)
        return ((n, 1), (n,)) if self.strategy == "channel" else ((), (1,), (1, 1))


class CompressedTensorsReader:
    """The compressed modules of a folder. Attributes and methods as `QuantReader` says."""

    def __init__(self, tensors: Tensors, settings: Settings) -> None:
        self._schemes = list(_schemes(settings))
        packed = modules_with(tensors, "weight_packed")
        eights = modules_with(tensors, "weight", ("I8",))
        floats = modules_with(tensors, "weight", (FP8,))
        self._modules = {m.canonical: m for m in (*packed, *eights, *floats)}
        self._scheme: dict[str, _Scheme] = {}  # of the integer modules
        self.claimed = claim(list(self._modules.values()), (*_WEIGHT_PARTS, *_ACTIVATION_PARTS))
        self.claimed |= {raw for raw in tensors.shapes if raw.endswith(_CACHE_SCALES)}
        self.shapes = {m.canonical: self._packed_shape(m) for m in packed}
        self.shapes |= {m.canonical: self._int8_shape(m) for m in eights}
        any_blocks = any(s.strategy == "block" for s in self._schemes)
        self._in_blocks = {m.canonical: any_blocks and _has_block_scales(m) for m in floats}
        self.shapes |= {m.canonical: fp8_shape(m, _SCALE, blocks=self._in_blocks[m.canonical]) for m in floats}
        counts = {"fp8": len(floats), "int8": 0, "int4": 0, "bf16": 0}
        for name, scheme in self._scheme.items():
            asymmetric = scheme.bits == 8 and self._modules[name].has("weight_zero_point")  # no format has such minima
            counts["bf16" if asymmetric else f"int{scheme.bits}"] += 1
        self.stored_format = max(counts, key=lambda f: counts[f])

    def _packed_shape(self, module: Module) -> tuple[int, int]:
        rows, words = module.shape("weight_packed", ("I32",), 2)
        module.check("weight_shape", ("I64", "I32"), (2,))
        n, k = (int(x) for x in module.get("weight_shape"))
        if n != rows or k < 1:
            raise module.error("weight_shape", f"says [{n}, {k}], but weight_packed has {rows} rows")
        fitting = [s for s in self._schemes if s.kind == "int" and -(-k * s.bits // WORD_BITS) == words]
        scheme = self._find(module, fitting, n, k)
        if module.has("weight_zero_point"):
            _, groups = self._scales_2d(module, n)
            module.check("weight_zero_point", ("I32",), (-(-n * scheme.bits // WORD_BITS), groups))
        if module.has("weight_g_idx"):
            module.check("weight_g_idx", ("I32", "I64"), (k,))
        return n, k

    def _int8_shape(self, module: Module) -> tuple[int, int]:
        n, k = module.shape("weight", ("I8",), 2)
        self._find(module, [s for s in self._schemes if s.kind == "int" and s.bits == 8], n, k)
        if module.has("weight_zero_point"):
            module.check("weight_zero_point", ("I8",), module.tensors.shapes[f"{module.name}.weight_scale"])
        return n, k

    def _find(self, module: Module, schemes: list[_Scheme], n: int, k: int) -> _Scheme:
        found = module.shape("weight_scale", FLOATS, len(module.tensors.shapes.get(f"{module.name}.weight_scale", ())))
        for scheme in schemes:
            if found in scheme.scale_shapes(n, k):
                self._scheme[module.canonical] = scheme
                return scheme
        raise module.error(
            "weight_scale", f"of shape {list(found)} fits no entry of config_groups for a matrix [{n}, {k}]: "
            f"{self._schemes}"
        )  # fmt: skip

    def _scales_2d(self, module: Module, n: int) -> tuple[int, int]:
        shape = module.tensors.shapes[f"{module.name}.weight_scale"]
        return n, shape[1] if len(shape) == 2 else 1

    def linear(self, name: str, notes: Notes) -> LinearWeight:
        """The matrix [N, K]; raises `CheckpointError` for scales that are not finite and groups that do not exist."""
        module = self._modules[name]
        if name not in self._scheme:
            return fp8_linear(module, _SCALE, blocks=self._in_blocks[name])
        (n, k), scheme = self.shapes[name], self._scheme[name]
        scales = module.get("weight_scale")
        check_scales(scales, name, module.tensors.where(f"{module.name}.weight_scale"))
        scales = scales.expand(n, 1) if scales.numel() == 1 else scales.reshape(n, -1)
        if module.has("weight_packed"):
            codes = unpack_words(module.get("weight_packed"), scheme.bits)[:, :k]
        else:
            codes = module.get("weight").view(torch.uint8) ^ 0x80
        group_size = scheme.group_size if scheme.strategy == "group" else 0
        group_of = _group_of(module, scales.shape[1]) if module.has("weight_g_idx") else None
        stored = Codes(name, scheme.bits, codes, scales, _zeros(module, scheme.bits, n), group_of, group_size)
        return to_weight(stored, notes)


def _has_block_scales(module: Module) -> bool:
    """Whether there is a scale per 128 x 128 block (a lone block counts)."""
    n, k = module.shape("weight", (FP8,), 2)
    return module.tensors.shapes.get(f"{module.name}.{_SCALE}") == (-(-n // BLOCK), -(-k // BLOCK))


def _zeros(module: Module, bits: int, n: int) -> Tensor | None:
    """Zero points [N, S] in the unsigned codes' numbers."""
    if not module.has("weight_zero_point"):
        return None
    stored = module.get("weight_zero_point")
    if module.has("weight_packed"):
        return unpack_words(stored.T, bits).T[:n].to(torch.int16)
    zeros = stored.to(torch.int16) + 128
    return zeros.expand(n, 1) if zeros.numel() == 1 else zeros.reshape(n, -1)


def _group_of(module: Module, groups: int) -> Tensor | None:
    group_of = module.get("weight_g_idx").long()
    if bool((group_of == -1).all()):  # written, but never filled: columns are in order
        return None
    if int(group_of.min()) < 0 or int(group_of.max()) >= groups:
        raise module.error("weight_g_idx", f"names groups {int(group_of.min())}..{int(group_of.max())}, but there are "
                           f"{groups}, counted from 0")  # fmt: skip
    return group_of


def _schemes(settings: Settings) -> Iterator[_Scheme]:
    settings.one_of("format", _FORMATS, _FORMATS[0])  # a group may say its own
    sparsity = settings.raw.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise CheckpointError(
            f"{settings.file}: quantization_config has the sparsity format {sparsity.get('format')!r}; only 'dense' is "
            "supported: use a copy of the model without sparsity"
        )
    groups = settings.raw.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"{settings.file}: quantization_config needs 'config_groups'; fetch the file again")
    for name, group in groups.items():
        yield _scheme(settings, name, group)


def _scheme(settings: Settings, name: str, group: Any) -> _Scheme:
    file = f"{settings.file}, config_groups[{name!r}]"
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise CheckpointError(
            f"{file}: 'weights' must say how weights are quantized; use a copy of the model that does"
        )
    Settings(file, group).one_of("format", _FORMATS, _FORMATS[0])
    asked = Settings(file, weights)
    kind = asked.one_of("type", ("int", "float"))
    bits = asked.one_of("num_bits", (4, 8) if kind == "int" else (8,))
    strategies = ("tensor", "channel", "group") if kind == "int" else ("tensor", "channel", "block")
    strategy = asked.one_of("strategy", strategies)
    if strategy == "block":
        asked.one_of("block_structure", ([BLOCK, BLOCK],))
    size = asked.group_size() if strategy == "group" else 0
    if strategy == "group" and size == 0:
        strategy = "channel"
    return _Scheme(kind, bits, strategy, size)

"""Writes published quantizations of tiny models, from the formats' descriptions and independently of the readers.

Every packer is numpy on whole numbers; what it returns beside the raw tensors is the float64 matrix that the format's
own rule, scale * (code - zero), gives. `write_quantized` turns a folder of `tests.checkpoints` into a quantized one.

The readers were also held, once, against the writers themselves: modules packed by GPTQModel 7.7.0 (4 and 8 bits,
symmetric or not, groups of 32, 128 and whole rows, desc_act or not, v1 and v2: 48 modules) and by AutoAWQ 0.2.9 (groups
of 32, 64 and 128). Every matrix was within the rounding of its float16 minima.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from strata_lab.quant.base import LinearWeight

Tensors = dict[str, torch.Tensor]
Packed = tuple[Tensors, np.ndarray]  # tensors of a module by their last name, and its values [N, K] float64


def words(fields: np.ndarray, bits: int) -> torch.Tensor:
    """[R, C] of small numbers -> int32 [R, ceil(C * bits / 32)], the first number in the lowest bits."""
    per_word = 32 // bits
    padded = np.zeros((fields.shape[0], -(-fields.shape[1] // per_word) * per_word), np.uint64)
    padded[:, : fields.shape[1]] = fields
    packed = np.zeros((padded.shape[0], padded.shape[1] // per_word), np.uint64)
    for i in range(per_word):
        packed |= padded[:, i::per_word] << np.uint64(i * bits)
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32))


def draw(shape: tuple[int, int], groups: int, bits: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Random codes [N, K] and zeros [N, S], and float16 scales [N, S]; 0 and the largest zero are among them."""
    codes = rng.integers(0, 2**bits, shape)
    zeros = rng.integers(0, 2**bits, (shape[0], groups))
    zeros.flat[0], zeros.flat[-1] = 0, 2**bits - 1
    return codes, zeros, rng.uniform(0.002, 0.02, (shape[0], groups)).astype(np.float16)


def gptq(
    shape: tuple[int, int],
    rng: np.random.Generator,
    *,
    bits: int = 4,
    group_size: int = 32,
    sym: bool = False,
    v2: bool = False,
    order: np.ndarray | None = None,
) -> Packed:
    """A GPTQ module; `order` scatters the groups over the columns as `desc_act` does."""
    k = shape[1]
    size = k if group_size == -1 else group_size
    groups = -(-k // size)
    codes, zeros, scales = draw(shape, groups, bits, rng)
    if sym:
        zeros[:] = 1 << (bits - 1)
    g_idx = np.arange(k) // size
    if order is not None:
        g_idx = g_idx[order]
    values = scales.astype(np.float64)[:, g_idx] * (codes - zeros[:, g_idx])
    stored = words(zeros.T, bits)
    if not v2:  # as GPTQModel: one subtraction per word, whose borrows cross the fields
        ones = sum(1 << (i * bits) for i in range(32 // bits))
        stored = torch.from_numpy((stored.numpy().view(np.uint32) - np.uint32(ones)).view(np.int32))
    made = {"qweight": words(codes, bits).T.contiguous(), "qzeros": stored, "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.from_numpy(g_idx.astype(np.int32))}  # fmt: skip
    return made, values


def awq(shape: tuple[int, int], rng: np.random.Generator, *, group_size: int = 32) -> Packed:
    """An AWQ module of the gemm version."""
    n, k = shape
    size = k if group_size == -1 else group_size
    codes, zeros, scales = draw(shape, -(-k // size), 4, rng)
    groups = np.arange(k) // size
    values = scales.astype(np.float64)[:, groups] * (codes - zeros[:, groups])

    def interleaved(rows: np.ndarray) -> torch.Tensor:
        """[N, C] -> int32 [C, N/8]: within eight rows 0 2 4 6 1 3 5 7 from the lowest nibble up."""
        eights = rows.T.reshape(rows.shape[1], n // 8, 8)
        return words(np.concatenate([eights[..., 0::2], eights[..., 1::2]], axis=-1).reshape(rows.shape[1], n), 4)

    made = {"qweight": interleaved(codes), "qzeros": interleaved(zeros), "scales": torch.from_numpy(scales.T.copy())}
    return made, values


def fp8(
    shape: tuple[int, int], rng: np.random.Generator, *, kind: str = "block", scale: str = "weight_scale_inv"
) -> Packed:
    """An FP8 module with a scale per "block", "channel" or "tensor"."""
    n, k = shape
    codes = torch.from_numpy(rng.normal(0, 60, shape).astype(np.float32)).to(torch.float8_e4m3fn)
    if kind == "block":
        scales = rng.uniform(1e-4, 1e-3, (-(-n // 128), -(-k // 128))).astype(np.float32)
        wide = scales.repeat(128, 0)[:n].repeat(128, 1)[:, :k]
    else:
        scales = rng.uniform(1e-4, 1e-3, (n, 1) if kind == "channel" else (1,)).astype(np.float32)
        wide = np.broadcast_to(scales.reshape(-1, 1), (n, 1))
    return {"weight": codes, scale: torch.from_numpy(scales)}, codes.double().numpy() * wide.astype(np.float64)


def packed(
    shape: tuple[int, int], rng: np.random.Generator, *, bits: int = 4, group_size: int = 32, sym: bool = True
) -> Packed:
    """A "pack-quantized" module of compressed-tensors; group_size -1 is one scale per row."""
    n, k = shape
    size = k if group_size == -1 else group_size
    groups = np.arange(k) // size
    codes, zeros, scales = draw(shape, groups[-1] + 1, bits, rng)
    if sym:
        zeros[:] = 1 << (bits - 1)
    made = {"weight_packed": words(codes, bits), "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor([n, k])}  # fmt: skip
    if not sym:
        made["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
    return made, scales.astype(np.float64)[:, groups] * (codes - zeros[:, groups])


def int8(shape: tuple[int, int], rng: np.random.Generator) -> Packed:
    """An "int-quantized" module of compressed-tensors: int8 with a bfloat16 scale per row."""
    codes = rng.integers(-128, 128, shape).astype(np.int8)
    scales = torch.from_numpy(rng.uniform(0.001, 0.01, (shape[0], 1))).bfloat16()
    return {"weight": torch.from_numpy(codes), "weight_scale": scales}, codes * scales.double().numpy()


def gptq_config(**changes: object) -> dict[str, object]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False} | changes


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def ct_config(form: str, **weights: object) -> dict[str, object]:
    """A `quantization_config` of compressed-tensors with one scheme."""
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip


def write_quantized(
    folder: Path,
    config: dict[str, object],
    make: Callable[[tuple[int, int], np.random.Generator], Packed],
    *,
    skip: tuple[str, ...] = (),
    file: str = "model.safetensors",
) -> dict[str, np.ndarray]:
    """Replace the layers' matrices of a folder by quantized ones, save those named in `skip`.

    Returns canonical name to values [N, K] float64 of what was quantized.
    """
    state, rng, values = load_file(folder / "model.safetensors"), np.random.default_rng(11), {}
    for name in [n for n in state if n.endswith("_proj.weight") and not any(s in n for s in skip)]:
        made, values[name] = make(tuple(state.pop(name).shape), rng)
        state |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in made.items()}
    (folder / "model.safetensors").unlink()
    if file.endswith(".bin"):
        torch.save(state, folder / file)
    else:
        save_file(state, folder / file)
    edit(folder, quantization_config=config)
    return values


def edit(folder: Path, **changes: object) -> None:
    """Change keys of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def as_float64(weight: LinearWeight) -> np.ndarray:
    """What a weight means, by the definition of `LinearWeight` alone, in float64."""
    n, k = weight.shape
    codes = weight.data.double().numpy() if weight.format != "int4" else _codes(weight.data.numpy())[:, :k]
    if weight.scales is None:
        return codes
    size = weight.group_size or k
    assert weight.scales.shape == (n, -(-k // size))
    groups = np.arange(k) // size
    scales = weight.scales.double().numpy()[:, groups]
    if weight.mins is not None:
        return scales * codes + weight.mins.double().numpy()[:, groups]
    return scales * (codes - 8 if weight.format == "int4" else codes)


def _codes(data: np.ndarray) -> np.ndarray:
    blocks = data.reshape(data.shape[0], -1, 16).astype(np.int64)
    return np.concatenate([blocks & 15, blocks >> 4], axis=-1).reshape(data.shape[0], -1)


def rounding_of_minima(weight: LinearWeight) -> np.ndarray | float:
    """How far values may be off because a minimum is float16: half a unit of its last place."""
    if weight.mins is None:
        return 0.0
    groups = np.arange(weight.shape[1]) // weight.group_size
    return (np.abs(weight.mins.double().numpy()) * 2.0**-11 + 2.0**-25)[:, groups]

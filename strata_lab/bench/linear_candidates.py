"""What `sweep_linear.py` tries: the products of the reference and default models, and every sensible cut of each.

Nothing here needs a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from strata_lab.kernels.gpu import gemm, gemv, gemv_config, gemv_int, gemv_mma_config
from strata_lab.kernels.gpu.linear import Config
from strata_lab.quant import get_format
from strata_lab.quant.base import LinearWeight

FORMATS = ("fp8", "int4", "int4g128", "int8row")
TOKENS = (1, 8, 16)
HELD_REGISTERS = 96  # of a thread, for weights on their way: more spills
# Pieces, warps, preload, ahead and block of 9 to 16 rows of x with int4 whose scales have 128 columns: those that,
# compiled ahead of time, do not spill and keep 40 to 96 KB on their way to a multiprocessor. A block of 8 reads the
# weight twice, the second time from the cache; more pieces read x less often.
WIDE_INT4 = ((2, 4, 5, 1, 16), (2, 4, 5, 3, 8), (2, 4, 8, 1, 16), (1, 4, 8, 1, 16), (4, 4, 5, 2, 8), (4, 8, 3, 1, 16))


@dataclass(frozen=True)
class Product:
    """A product of a reference model.

    Attributes:
        name: for people.
        n, k: shape of the weight.
        norm, gated: what is fused; without a norm a residual is added.
        head: logits in float32.
    """

    name: str
    n: int
    k: int
    norm: bool = False
    gated: bool = False
    head: bool = False


REFERENCE = (
    Product("qkv-moe", 5120, 2560, norm=True),
    Product("o", 2560, 4096),
    Product("gate-up", 19456, 2560, norm=True, gated=True),
    Product("down", 2560, 9728),
    Product("qkv-dense", 6144, 2560, norm=True),
    Product("head", 151936, 2560, norm=True, head=True),
)
SMALL = (  # of the default model, SmolLM2-135M
    Product("small-qkv", 960, 576, norm=True),
    Product("small-o", 576, 576),
    Product("small-gate-up", 3072, 576, norm=True, gated=True),
    Product("small-down", 576, 1536),
    Product("small-head", 49152, 576, norm=True, head=True),
)
PRODUCTS = REFERENCE + SMALL


@dataclass(frozen=True)
class Task:
    """A candidate: `config` None is the default."""

    product: Product
    fmt: str
    tokens: int
    config: Config | None

    @property
    def group(self) -> tuple[str, str, int]:
        """What its time is compared within."""
        return self.product.name, self.fmt, self.tokens


def candidates(product: Product, fmt: str, tokens: int) -> list[Config | None]:
    """The default and every sensible configuration of every path."""
    found: list[Config | None] = [None]
    bits = 4 if fmt.startswith("int4") else 16 if fmt == "bf16" else 8
    if tokens == 1 and fmt.startswith("int"):
        found += _int_candidates(product, fmt, bits)
    elif 1 < tokens <= gemv.MAX_ROWS and fmt == "bf16" and product.k <= gemv_config.SHORT:
        found += _few_rows_candidates(product)
    elif tokens <= 2:
        found += _gemv_candidates(product, fmt, bits)
    if tokens <= gemv_mma_config.MAX_ROWS:
        wide = fmt == "int4g128" and tokens > 8
        found += _wide_int4_candidates(product) if wide else _mma_candidates(product, bits, tokens)
    if tokens >= 8:
        found += _dot_candidates(product, fmt, tokens)
    return found


def _int_candidates(product: Product, fmt: str, bits: int) -> Iterator[gemv_int.IntConfig]:
    per_load = 128 // bits
    for lanes in (8, 16, 32):
        chunks = -(-product.k // (lanes * per_load))
        for warps in (2, 4, 8):
            for pieces in (2, 4, 8) if product.gated or product.n > gemv_config.LONG else (1, 2, 4):
                most = HELD_REGISTERS // (pieces * (6 if fmt == "int4" else 5))  # scales and minima as well
                if most > 0 and chunks <= 4 * most:  # what is not requested at once is requested late
                    yield gemv_int.IntConfig(warps * 32 // lanes, lanes * per_load, pieces, min(chunks, most))


def _gemv_candidates(product: Product, fmt: str, bits: int) -> Iterator[gemv.GemvConfig]:
    per_load = 128 // bits
    for lanes in (16, 32, 64):
        chunks = -(-product.k // (lanes * per_load))
        for warps in (4, 8):
            rows = warps * 32 // lanes
            for pieces in (2, 4) if product.gated or product.n > gemv_config.LONG else (1, 2):
                most = HELD_REGISTERS // (4 * pieces * (2 if fmt == "int4" else 1))  # scales and minima as well
                if chunks > 2 * most:  # what is not requested at once is requested late
                    continue
                for share in (True, False) if product.norm or fmt == "int4" else (False, True):
                    yield gemv.GemvConfig(rows, lanes * per_load, pieces, min(chunks, most), share)


def _few_rows_candidates(product: Product) -> Iterator[gemv.GemvConfig]:
    """Short bf16 rows with a few rows of x: each thread loads x for itself, since sharing it costs barriers."""
    for lanes in (8, 16, 32):
        chunks = -(-product.k // (lanes * 8))
        for warps in (2, 4, 8):
            for pieces in (2, 4, 8) if product.gated or product.n > gemv_config.LONG else (1, 2, 4):
                if 4 * chunks * pieces <= HELD_REGISTERS:  # all of the weight is requested at once
                    yield gemv.GemvConfig(warps * 32 // lanes, lanes * 8, pieces, chunks)


def _mma_candidates(product: Product, bits: int, tokens: int) -> Iterator[gemv_mma_config.MmaConfig]:
    tiles = -(-product.k * bits // (8 * gemv_mma_config.TILE_BYTES))
    for pieces in (2, 4) if product.gated else (1, 2, 4):
        for warps in (4, 8, 16):
            chunks = -(-tiles // warps)
            most = min(chunks, HELD_REGISTERS // (4 * pieces))
            if warps > tiles or (bits == 4 and tokens > 2 and (pieces > 2 or warps > 8)):  # the latter spill
                continue
            block = 8 if bits == 4 else gemv_mma_config.MAX_ROWS
            for preload, ahead in ((most, 1), (most, 3), (max(1, most // 2), 2)):
                yield gemv_mma_config.MmaConfig(pieces, warps, preload, ahead, block)


def _wide_int4_candidates(product: Product) -> Iterator[gemv_mma_config.MmaConfig]:
    tiles, seen = -(-product.k // (2 * gemv_mma_config.TILE_BYTES)), set()
    for pieces, warps, preload, ahead, block in WIDE_INT4:
        config = gemv_mma_config.MmaConfig(pieces, warps, min(preload, -(-tiles // warps)), ahead, block)
        if config not in seen and not (product.gated and pieces == 1):
            seen.add(config)
            yield config


def _dot_candidates(product: Product, fmt: str, tokens: int) -> Iterator[gemm.DotConfig]:
    block_t = 16 if tokens <= 16 else 32
    for block_n, block_k, warps, stages in (
        (32, 256, 4, 3), (64, 256, 4, 3), (64, 128, 4, 4), (64, 128, 4, 3), (128, 128, 8, 3), (16, 256, 4, 4),
    ):  # fmt: skip
        if fmt == "bf16" and block_k > 128:
            continue
        tiles = -(-(product.n // 2 if product.gated else product.n) // block_n)
        steps = -(-product.k // block_k)
        for split in (1, 2, 4, 8):
            if tiles <= gemm.MAX_COUNTERS and split <= steps // 2 and (split == 1 or tiles * split <= 132 * 8):
                yield gemm.DotConfig(block_n, block_t, block_k, split, warps, stages)


def _has_format(product: Product, fmt: str) -> bool:
    return fmt != "int4g128" or product.k % 128 == 0


def tasks(formats: Sequence[str], tokens: Sequence[int], products: Sequence[Product] = PRODUCTS) -> list[Task]:
    """All candidates: what is named first among formats and tokens comes first, products in their order."""
    ranked = sorted((i + j, i, fmt, t) for i, fmt in enumerate(formats) for j, t in enumerate(tokens))
    groups = [(product, fmt, t) for _, _, fmt, t in ranked for product in products if _has_format(product, fmt)]
    return [Task(product, fmt, t, config) for product, fmt, t in groups for config in candidates(product, fmt, t)]


def random_weight(fmt: str, n: int, k: int, device: torch.device) -> LinearWeight:
    """A weight [n, k] of about unit gain."""
    if fmt == "int8row":
        return get_format("int8", "channel").quantize(torch.randn(n, k, device=device) / k**0.5)
    if fmt != "int4g128":
        return get_format(fmt).quantize(torch.randn(n, k, device=device) / k**0.5)
    assert k % 128 == 0, k
    data = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
    scales = ((torch.rand(n, k // 128, device=device) + 0.5) / (4.6 * k**0.5)).half()  # codes deviate by 4.6
    return LinearWeight("int4", (n, k), data, scales, group_size=128)


def exact_weight(weight: LinearWeight) -> LinearWeight:
    """The numbers it stands for, float32."""
    if weight.format != "int4" or weight.mins is not None:
        return LinearWeight("fp32", weight.shape, get_format(weight.format).dequantize(weight))
    assert weight.scales is not None
    packed = weight.data.unflatten(1, (-1, 16))
    codes = torch.cat([packed & 0x0F, packed >> 4], dim=-1).flatten(1).float() - 8
    grouped = codes.unflatten(1, (-1, weight.group_size)) * weight.scales.float().unsqueeze(-1)
    return LinearWeight("fp32", weight.shape, grouped.flatten(1))

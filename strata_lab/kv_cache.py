"""The device side of the paged KV cache: two preallocated tensors, sliced per layer.

Which block belongs to whom is `block_manager.py`'s business; what is written and read is the kernels'. A slot is
`block * block_size + offset`. Slots that nobody owns hold whatever was there before, and nothing may read them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from strata_lab.layers.attention import LayerKV
from strata_lab.model_config import ModelConfig

KV_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


class KVCache:
    """Keys and values of every layer.

    Args:
        config: geometry.
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        kv_format: key of `KV_DTYPES`.
        device: where it lives.
        scales: (k, v) of each layer: stored value = value / scale. None: 1; e4m3 reaches 448, the supported models stay
            below.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, kv_format: str, device: torch.device,
        scales: Sequence[tuple[float, float]] | None = None,
    ) -> None:  # fmt: skip
        self.num_blocks, self.block_size, self.kv_format = num_blocks, block_size, kv_format
        shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self._k = torch.empty(shape, dtype=KV_DTYPES[kv_format], device=device)
        self._v = torch.empty(shape, dtype=KV_DTYPES[kv_format], device=device)
        self.scales = [(1.0, 1.0)] * config.num_layers if scales is None else list(scales)
        self._layers = [LayerKV(self._k[i], self._v[i], *self.scales[i]) for i in range(config.num_layers)]

    def layer(self, index: int) -> LayerKV:
        """One layer's keys and values."""
        return self._layers[index]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return 2 * self._k.numel() * self._k.element_size()

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token of context costs, all layers."""
        return self.nbytes // (self.num_blocks * self.block_size)


def block_bytes(config: ModelConfig, block_size: int, kv_format: str) -> int:
    """Bytes of one block over all layers: 2 (k and v) x layers x tokens x heads x head_dim x element size."""
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return per_token * block_size * KV_DTYPES[kv_format].itemsize

"""The device side of the paged KV cache: preallocated tensors, sliced per layer, and what moves whole blocks.

Which block belongs to whom is `block_manager.py`'s business; what is written and read is the kernels'. A slot is
`block * block_size + offset`. Slots that nobody owns hold whatever was there before, and nothing may read them.

Where attention chooses blocks (`kernels/sparse_attention.py`), a third tensor holds the smallest and largest key of
each, which move with it as keys and values do.

Blocks move in batches: one gather and one scatter for keys and for values, whatever the number of blocks and layers. On
a GPU they are queued behind all that was queued before, so a block may be given away as soon as its copy is queued, and
the host waits for nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from strata_lab.batch import Pairs, ScheduledBatch
from strata_lab.layers.attention import LayerKV
from strata_lab.model_config import ModelConfig

KV_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
TAKEN_AT_ONCE = 64  # blocks


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
        self._share(None)

    def _share(self, bounds: Tensor | None) -> None:
        """Set up what is seen of the tensors."""
        self._bounds = bounds  # [layers, blocks, Hkv, 2, D]
        pools = (self._k, self._v) if bounds is None else (self._k, self._v, bounds)
        self._words = tuple(pool.flatten(2).view(torch.int64) for pool in pools)  # [layers, blocks, words] each
        self._layers = [
            LayerKV(self._k[i], self._v[i], *scales, None if bounds is None else bounds[i])
            for i, scales in enumerate(self.scales)
        ]

    @property
    def has_bounds(self) -> bool:
        """Whether there is room for the smallest and largest key of each block."""
        return self._bounds is not None

    def with_bounds(self) -> KVCache:
        """The same keys and values with room for bounds, those of no block known yet; itself where it has them."""
        if self.has_bounds:
            return self
        layers, blocks, _, heads, width = self._k.shape
        made = copy.copy(self)
        made._share(self._k.new_empty((layers, blocks, heads, 2, width)))
        return made

    def layer(self, index: int) -> LayerKV:
        """One layer's keys and values."""
        return self._layers[index]

    @torch.inference_mode()
    def copy_blocks(self, pairs: Pairs, source: KVCache | None = None) -> None:
        """Copy the content of blocks (from, to), all layers; all are read before any is written.

        `source`: the pool of the same format that is copied from; this one by default. Bounds come along where both
        have them.
        """
        source = source or self
        old, new = (indices(column, self._k.device) for column in zip(*pairs, strict=True))
        for ours, theirs in zip(self._words, source._words, strict=False):
            ours.index_copy_(1, new, theirs.index_select(1, old))

    def take_from(self, source: KVCache, pairs: Pairs) -> None:
        """Copy blocks (theirs, ours) from another pool of the same format, in pieces that need little memory beside."""
        for at in range(0, len(pairs), TAKEN_AT_ONCE):
            self.copy_blocks(pairs[at : at + TAKEN_AT_ONCE], source)

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        """What blocks hold, [n, layers, words] int64, a copy."""
        index = indices(blocks, self._k.device)
        return torch.cat([pool.index_select(1, index) for pool in self._words], dim=2).transpose(0, 1).contiguous()

    def write_blocks(self, blocks: Sequence[int], content: Tensor) -> None:
        """Fill blocks with what `read_blocks` returned."""
        index = indices(blocks, self._k.device)
        for pool, part in zip(self._words, content.split([p.shape[2] for p in self._words], dim=2), strict=True):
            pool.index_copy_(1, index, part.transpose(0, 1))

    @property
    def block_words(self) -> tuple[int, int]:
        """Shape of one block of `read_blocks`."""
        return self._k.shape[0], sum(pool.shape[2] for pool in self._words)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return sum(pool.numel() * pool.element_size() for pool in self._words)

    @property
    def device(self) -> torch.device:
        """Where it lives."""
        return self._k.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values that one token of context costs, all layers."""
        return 2 * self._k.numel() * self._k.element_size() // (self.num_blocks * self.block_size)


class HostBlocks:
    """Host memory for blocks of a pool, pinned where the pool is on a GPU.

    Args:
        kv: the pool.
        num_blocks: how many; 0 takes no memory.
    """

    def __init__(self, kv: KVCache, num_blocks: int) -> None:
        self.kv, self.num_blocks = kv, num_blocks
        pinned = num_blocks > 0 and kv.device.type == "cuda"
        self._content = torch.empty((num_blocks, *kv.block_words), dtype=torch.int64, pin_memory=pinned)

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self._content.numel() * self._content.element_size()

    @torch.inference_mode()
    def perform(self, batch: ScheduledBatch) -> None:
        """Make the moves of a batch, in their order; what is queued later on the same stream finds them made."""
        if batch.copies:
            self.kv.copy_blocks(batch.copies)
        if batch.swap_out:
            self._save(*zip(*batch.swap_out, strict=True))
        if batch.swap_in:
            self._restore(*zip(*batch.swap_in, strict=True))

    def _save(self, blocks: Sequence[int], hosts: Sequence[int]) -> None:
        content = self.kv.read_blocks(blocks)
        for first, stop, host in _runs(hosts):
            self._content[host : host + stop - first].copy_(content[first:stop], non_blocking=True)

    def _restore(self, hosts: Sequence[int], blocks: Sequence[int]) -> None:
        content = torch.empty((len(hosts), *self._content.shape[1:]), dtype=torch.int64, device=self.kv.device)
        for first, stop, host in _runs(hosts):
            content[first:stop].copy_(self._content[host : host + stop - first], non_blocking=True)
        self.kv.write_blocks(blocks, content)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Where numbers rise by one: (first, stop, number at first), so that each run is one copy."""
    first = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield first, i, numbers[first]
            first = i


def indices(numbers: Sequence[int], device: torch.device) -> Tensor:
    """[n] int64 on a device; from pinned memory, since a copy from any other waits for what is queued."""
    made = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return made.to(device, non_blocking=True)


def block_bytes(config: ModelConfig, block_size: int, kv_format: str, bounds: bool = False) -> int:
    """Bytes of one block over all layers: 2 (k and v) x layers x tokens x heads x head_dim x element size.

    `bounds`: with its smallest and largest key, which are as much as one token more.
    """
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return per_token * (block_size + bounds) * KV_DTYPES[kv_format].itemsize

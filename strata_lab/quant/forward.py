"""A model on whole sequences, in plain float32: what calibration and the measures of quality look through.

One sequence at a time, no batching, no cache that outlives a layer, the reference operators on any device. The engine
is the way to generate; this is the way to look inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from strata_lab.kernels import Ops, bind
from strata_lab.layers.attention import LayerKV, PlainAttention, StepContext
from strata_lab.layers.mlp import PlainMlp
from strata_lab.layers.rotary import rotary_table
from strata_lab.layers.weights import LayerWeights
from strata_lab.models import get_family
from strata_lab.models.base import WeightReader, WeightSource
from strata_lab.quant.base import LinearWeight

BLOCK_SIZE = 16
Overrides = dict[str, Callable[..., Any]]


class Forward:
    """Embedding, layers and logits of a model, each for one sequence.

    Args:
        source: the checkpoint; matrices in any format are read as float32.
        device: where to compute.
        overrides: operators to replace, by name (see `kernels.bind`): how calibration sees the inputs of matrices.
        kv_dtype: what keys and values are kept in.
        kv_scales: (k, v) of each layer: stored value = value / scale; None is 1.
    """

    def __init__(
        self, source: WeightSource, device: torch.device | str = "cpu", overrides: Overrides | None = None,
        *, kv_dtype: torch.dtype = torch.float32, kv_scales: Sequence[Sequence[float]] | None = None,
    ) -> None:  # fmt: skip
        self.kv_dtype, self.kv_scales = kv_dtype, kv_scales
        self.source, self.config, self.device = source, source.config, torch.device(device)
        self.ops: Ops = bind("reference", overrides)
        self.attention, self.mlp = PlainAttention(self.config, self.ops), PlainMlp(self.config, self.ops)
        self._reader = WeightReader(source, "fp32", self.device, torch.float32, _as_it_is, _ignore)
        self._family = get_family(self.config.architecture)

    def load_layer(self, index: int) -> LayerWeights:
        """Decoder layer `index` in float32."""
        return self._family.load_layer(self._reader, self.config, index)

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """[T] ids -> [T, hidden] float32."""
        table = self.source.linear("model.embed_tokens.weight")  # as stored: only the rows asked for are read
        ids = torch.tensor(token_ids, dtype=torch.int64, device=table.data.device)
        return self.ops.embedding(ids, table).float().to(self.device)

    def layer(self, x: Tensor, weights: LayerWeights, index: int = 0) -> Tensor:
        """Decoder layer `index` over a sequence [T, hidden] that starts at position 0."""
        step, kv = self._step(x.shape[0]), self._cache(x.shape[0], index)
        return self.mlp(self.attention(x, weights.attention, step, kv), weights.mlp)

    def logits(self, x: Tensor) -> Tensor:
        """Final norm and head, [T, hidden] -> [T, V] float32."""
        return self.ops.lm_head(x, *self._head, self.config.rms_norm_eps)

    @functools.cached_property
    def _head(self) -> tuple[LinearWeight, Tensor]:
        name = "model.embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"
        return self._reader.head(name), self._reader.vector("model.norm.weight")

    def _step(self, length: int) -> StepContext:
        cos, sin = rotary_table(self.config, length, self.device)
        blocks = -(-length // BLOCK_SIZE)
        return StepContext(
            cos=cos,
            sin=sin,
            slot_mapping=torch.arange(length, device=self.device),
            block_tables=torch.arange(blocks, dtype=torch.int32, device=self.device)[None],
            seq_lens=torch.tensor([length], dtype=torch.int32, device=self.device),
            cu_seqlens_q=torch.tensor([0, length], dtype=torch.int32, device=self.device),
            max_q_len=length,
        )

    def _cache(self, length: int, index: int) -> LayerKV:
        c = self.config
        shape = (-(-length // BLOCK_SIZE), BLOCK_SIZE, c.num_kv_heads, c.head_dim)
        k, v = (torch.zeros(shape, device=self.device).to(self.kv_dtype) for _ in range(2))
        k_scale, v_scale = (1.0, 1.0) if self.kv_scales is None else self.kv_scales[index]
        return LayerKV(k, v, k_scale, v_scale)


@torch.inference_mode()
def sequence_logits(
    source: WeightSource, device: torch.device | str = "cpu", **kv: Any
) -> Callable[[Sequence[int]], Tensor]:
    """A function from the token ids of a sequence to the logits of every position, [T, V] float32.

    It holds the whole model in float32; `kv` as for `Forward`. `ValueError` for a sequence that is empty or longer than
    the model's positions.
    """
    forward = Forward(source, device, **kv)
    layers = [forward.load_layer(index) for index in range(forward.config.num_layers)]

    @torch.inference_mode()
    def logits(token_ids: Sequence[int]) -> Tensor:
        check_length(token_ids, forward.config.max_position)
        x = forward.embed(token_ids)
        for index, layer in enumerate(layers):
            x = forward.layer(x, layer, index)
        return forward.logits(x)

    return logits


def check_length(token_ids: Sequence[int], most: int) -> None:
    """`ValueError` unless there is a token and at most `most`."""
    if not 0 < len(token_ids) <= most:
        raise ValueError(f"a sequence of {len(token_ids)} tokens must have 1 to {most}; try {min(most, 512)}")


def _as_it_is(weight: LinearWeight) -> LinearWeight:
    return weight


def _ignore(fraction: float) -> None:
    pass

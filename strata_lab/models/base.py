"""A decoder-only model assembled from operators, and how its weights are read from any checkpoint.

Families differ in which tensors a layer has; each is one small file that says so. What a layer *computes* is in
`layers/`, and which composition runs is chosen by `build.py`. There is no sampling, batching or caching here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from strata_lab.kernels import Ops
from strata_lab.layers.attention import READ_ALL, FusedAttention, LayerKV, PlainAttention, Reading, StepContext
from strata_lab.layers.mlp import FusedMlp, PlainMlp
from strata_lab.layers.weights import AttentionWeights, LayerWeights, MlpWeights, ModelWeights, MoeWeights
from strata_lab.model_config import ModelConfig
from strata_lab.models.merge import alike
from strata_lab.quant import convert, head_format
from strata_lab.quant.base import LinearWeight, concat_rows


class WeightSource(Protocol):
    """What a model needs of a checkpoint (see `models/loader.py`)."""

    config: ModelConfig

    def linear(self, name: str) -> LinearWeight:
        """A matrix as stored, layout "rows"."""
        ...

    def tensor(self, name: str) -> Tensor:
        """A plain tensor: a norm, a bias, a router."""
        ...


@dataclass(frozen=True)
class WeightReader:
    """Reads weights of one checkpoint in one number format onto one device.

    Attributes:
        source: the checkpoint.
        weight_format: format of the layers' matrices.
        device, dtype: of norms, biases and routers.
        pack: turns a matrix into the layout the kernels read; the identity where that is "rows".
        progress: called with a fraction after every layer.
        granularity: variant to make of matrices that are stored in another format.
    """

    source: WeightSource
    weight_format: str
    device: torch.device
    dtype: torch.dtype
    pack: Callable[[LinearWeight], LinearWeight]
    progress: Callable[[float], None]
    granularity: str | None = None

    def matrix(self, *names: str) -> LinearWeight:
        """One or several matrices, stacked along their rows."""
        parts = alike([self.source.linear(name) for name in names], self.weight_format)
        other = parts[0].format != self.weight_format
        return self._place(parts, self.weight_format, self.granularity if other else None)

    def head(self, name: str) -> LinearWeight:
        """The embedding or LM head; kept at least 8 bits wide."""
        return self._place([self.source.linear(name)], head_format(self.weight_format))

    def _place(self, parts: Sequence[LinearWeight], weight_format: str, granularity: str | None = None) -> LinearWeight:
        merged = parts[0] if len(parts) == 1 else concat_rows(parts)
        return self.pack(convert(merged.to(self.device), weight_format, granularity))

    def vector(self, name: str) -> Tensor:
        """A norm weight or bias."""
        return self.source.tensor(name).to(device=self.device, dtype=self.dtype)

    def attention(self, prefix: str, *, bias: bool = False, qk_norm: bool = False) -> AttentionWeights:
        """`prefix` is the layer, for example "model.layers.0."."""
        attn = f"{prefix}self_attn."
        parts = [f"{attn}{p}_proj" for p in "qkv"]
        return AttentionWeights(
            norm=self.vector(f"{prefix}input_layernorm.weight"),
            qkv=self.matrix(*(f"{p}.weight" for p in parts)),
            qkv_bias=torch.cat([self.vector(f"{p}.bias") for p in parts]) if bias else None,
            q_norm=self.vector(f"{attn}q_norm.weight") if qk_norm else None,
            k_norm=self.vector(f"{attn}k_norm.weight") if qk_norm else None,
            out=self.matrix(f"{attn}o_proj.weight"),
        )

    def mlp(self, prefix: str) -> MlpWeights:
        """The dense MLP of a layer."""
        mlp = f"{prefix}mlp."
        return MlpWeights(
            norm=self.vector(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self.matrix(f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"),
            down=self.matrix(f"{mlp}down_proj.weight"),
        )

    def moe(self, prefix: str, num_experts: int) -> MoeWeights:
        """The experts of a layer, stacked in order."""
        experts = [f"{prefix}mlp.experts.{e}." for e in range(num_experts)]
        return MoeWeights(
            norm=self.vector(f"{prefix}post_attention_layernorm.weight"),
            router=self.vector(f"{prefix}mlp.gate.weight"),
            gate_up=self.matrix(*(f"{e}{p}_proj.weight" for e in experts for p in ("gate", "up"))),
            down=self.matrix(*(f"{e}down_proj.weight" for e in experts)),
        )


class Family(Protocol):
    """A model family: which tensors a layer has."""

    def load_layer(self, reader: WeightReader, config: ModelConfig, index: int) -> LayerWeights:
        """Weights of decoder layer `index`."""
        ...


def load_weights(reader: WeightReader, family: Family, embedding: LinearWeight | None = None) -> ModelWeights:
    """Read a whole model; a draft is given the `embedding` of its target."""
    config = reader.source.config
    if embedding is None:
        embedding = reader.head("model.embed_tokens.weight")
    layers = []
    for index in range(config.num_layers):
        layers.append(family.load_layer(reader, config, index))
        reader.progress((index + 1) / config.num_layers)
    return ModelWeights(
        embedding=embedding,
        layers=tuple(layers),
        final_norm=reader.vector("model.norm.weight"),
        head=embedding if config.tie_word_embeddings else reader.head("lm_head.weight"),
    )


class CausalLM:
    """Token ids to logits.

    Args:
        config: geometry.
        weights: in any format the operators read.
        ops: bound operators.
        rotary: (cos, sin) tables, [max_position, D/2] each.
        fused: which composition of operators a layer is.
        reading: how much of the cache attention reads; by default all of it.
    """

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, ops: Ops, rotary: tuple[Tensor, Tensor], *, fused: bool,
        reading: Reading = READ_ALL,
    ) -> None:  # fmt: skip
        self.config, self.weights, self.ops, self.rotary = config, weights, ops, rotary
        self.attention = (FusedAttention if fused else PlainAttention)(config, ops, reading)
        self.mlp: Callable[[Tensor, MlpWeights | MoeWeights], Tensor] = (FusedMlp if fused else PlainMlp)(config, ops)

    def embed(self, input_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """[T] -> [T, hidden]."""
        return self.ops.embedding(input_ids, self.weights.embedding).to(dtype)

    def layer(self, x: Tensor, weights: LayerWeights, step: StepContext, kv: LayerKV) -> Tensor:
        """One decoder layer, [T, hidden] -> [T, hidden]."""
        return self.mlp(self.attention(x, weights.attention, step, kv), weights.mlp)

    def logits(self, x: Tensor) -> Tensor:
        """Final norm and LM head, [S, hidden] -> [S, V] float32."""
        w, eps = self.weights, self.config.rms_norm_eps
        return self.ops.lm_head(x, w.head, w.final_norm, eps)

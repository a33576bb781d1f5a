"""The weights of one decoder layer, merged the way the fused kernels read them.

q, k and v are one matrix and so are gate and up: the unfused composition takes row views of them, so flipping
`fused_kernels` copies nothing. Plain holders; they do no arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from strata_lab.model_config import ModelConfig
from strata_lab.quant.base import LinearWeight


@dataclass(frozen=True)
class AttentionWeights:
    """Attention of one layer.

    Attributes:
        norm: RMSNorm weight before it, [hidden].
        qkv: [(H + 2 Hkv) * D, hidden], rows in the order q, k, v.
        qkv_bias: None or [(H + 2 Hkv) * D].
        q_norm, k_norm: None or [D] (Qwen3).
        out: [hidden, H * D].
    """

    norm: Tensor
    qkv: LinearWeight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: LinearWeight


@dataclass(frozen=True)
class MlpWeights:
    """Gated MLP of one layer.

    Attributes:
        norm: RMSNorm weight before it, [hidden].
        gate_up: [2 * I, hidden], gate rows first.
        down: [hidden, I].
    """

    norm: Tensor
    gate_up: LinearWeight
    down: LinearWeight


@dataclass(frozen=True)
class MoeWeights:
    """Mixture of experts of one layer, experts contiguous.

    Attributes:
        norm: RMSNorm weight before it, [hidden].
        router: [E, hidden], unquantized.
        gate_up: [E * 2 * I, hidden]; expert e is rows e*2I to (e+1)*2I, gate rows first.
        down: [E * hidden, I].
    """

    norm: Tensor
    router: Tensor
    gate_up: LinearWeight
    down: LinearWeight


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer."""

    attention: AttentionWeights
    mlp: MlpWeights | MoeWeights


@dataclass
class ModelWeights:
    """A whole model; only `release` changes it.

    Attributes:
        embedding: [V, hidden].
        layers: in order.
        final_norm: [hidden].
        head: [V, hidden]; the embedding itself when tied.
    """

    embedding: LinearWeight
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: LinearWeight

    def release(self) -> None:
        """Let go of every matrix, whoever else holds this object; it cannot compute afterwards."""
        nothing = LinearWeight("fp32", (0, 0), self.final_norm.new_empty(0, 0))
        self.layers, self.embedding, self.head = (), nothing, nothing
        self.__dict__.pop("_dense_and_expert_bytes", None)

    def linears(self) -> Iterator[LinearWeight]:
        """Every matrix once, the LM head included, the embedding only where it is not the head."""
        for layer in self.layers:
            yield from (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
        yield self.head
        if self.embedding is not self.head:
            yield self.embedding

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices (norms and biases are under 0.1% and left out)."""
        return sum(w.nbytes for w in self.linears())

    @functools.cached_property
    def _dense_and_expert_bytes(self) -> tuple[int, int]:
        experts = sum(w.mlp.gate_up.nbytes + w.mlp.down.nbytes for w in self.layers if isinstance(w.mlp, MoeWeights))
        return self.nbytes - experts - (0 if self.embedding is self.head else self.embedding.nbytes), experts

    def bytes_read(self, config: ModelConfig, num_tokens: int) -> int:
        """Weight bytes a step of `num_tokens` has to read.

        Every matrix once; of a mixture, the distinct experts that `num_tokens` uniform choices of k out of E touch on
        average, E * (1 - (1 - k/E)^T). The embedding is a lookup of T rows, unless it is also the head.
        """
        dense, experts = self._dense_and_expert_bytes
        if not experts:
            return dense
        share = 1 - (1 - config.num_experts_per_tok / config.num_experts) ** num_tokens
        return dense + int(experts * share)

"""The gated MLP and the mixture of experts, each as a plain and a fused composition of operators."""

from __future__ import annotations

from torch import Tensor

from strata_lab.kernels import Ops
from strata_lab.layers.weights import MlpWeights, MoeWeights
from strata_lab.model_config import ModelConfig


class PlainMlp:
    """norm, gate, up, SiLU * up, down, residual: one operator each."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        self.config, self.ops = config, ops

    def __call__(self, x: Tensor, w: MlpWeights | MoeWeights) -> Tensor:
        """[T, hidden] -> [T, hidden], residual included."""
        h = self.ops.rms_norm(x, w.norm, self.config.rms_norm_eps)
        if isinstance(w, MoeWeights):
            c = self.config
            weights, expert_ids = self.ops.router_topk(h, w.router, c.num_experts_per_tok, c.norm_topk_prob)
            return self.ops.add(x, self.ops.moe_mlp(h, w.gate_up, w.down, weights, expert_ids))
        width = w.gate_up.shape[0] // 2
        gate = self.ops.linear(h, w.gate_up.rows(0, width))
        up = self.ops.linear(h, w.gate_up.rows(width, 2 * width))
        return self.ops.add(x, self.ops.linear(self.ops.silu_mul(gate, up), w.down))


class FusedMlp:
    """norm+gate/up+SiLU, down+residual: two operators; a mixture is one."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        self.config, self.ops = config, ops

    def __call__(self, x: Tensor, w: MlpWeights | MoeWeights) -> Tensor:
        """[T, hidden] -> [T, hidden], residual included."""
        c, eps = self.config, self.config.rms_norm_eps
        if isinstance(w, MoeWeights):
            return self.ops.moe_block(
                x, w.norm, eps, w.router, w.gate_up, w.down, top_k=c.num_experts_per_tok, normalize=c.norm_topk_prob
            )
        h = self.ops.linear(x, w.gate_up, norm_weight=w.norm, norm_eps=eps, silu_mul=True)
        return self.ops.linear(h, w.down, residual=x)

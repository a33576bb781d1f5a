"""A model in plain torch, over whole rows and with gradients: the target that teaches, the draft that learns.

Tensors have the canonical names and shapes of a checkpoint (`models/checkpoint.py`), so a draft begins as a few of the
target's own layers and is written as it is. It computes what the engine computes; a test compares the two. Generating
is the engine's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from strata_lab.layers.rotary import rotary_table
from strata_lab.model_config import ModelConfig
from strata_lab.models.base import WeightSource
from strata_lab.models.checkpoint import expected_tensors, is_linear
from strata_lab.quant import get_format
from strata_lab.settings import ConfigError

Tensors = dict[str, Tensor]
Attend = Callable[[str, Tensor, Tensor, Tensor], Tensor]
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
RIDGE = 1e-2  # of the mean square of a state, against directions that hardly occur
ROWS_AT_ONCE = 4096  # rows of the target's logits that are in memory at the same time


def read_network(source: WeightSource, device: torch.device, dtype: torch.dtype) -> Network:
    """A dense checkpoint's model, dequantized; a draft has no embedding, and perhaps tensors that make its rows."""
    config, part = source.config, getattr(source, "draft", None)
    names = [name for name, _ in expected_tensors(config)]
    if part is not None:
        names = [name for name in names if name != EMBEDDING] + list(part.own_tensors(config.hidden_size))
    tensors: Tensors = {}
    for name in names:
        if is_linear(name):
            weight = source.linear(name)
            value = get_format(weight.format).dequantize(weight)
        else:
            value = source.tensor(name)
        tensors[name] = value.to(device, dtype)
    return Network(config, tensors)


class Network:
    """A model over rows of tokens.

    Args:
        config: geometry of a dense model.
        tensors: by canonical name; a draft has no embedding of its own.
    """

    def __init__(self, config: ModelConfig, tensors: Tensors) -> None:
        self.config, self.tensors = config, tensors

    @property
    def head(self) -> Tensor:
        """[V, hidden]."""
        return self.tensors[EMBEDDING if self.config.tie_word_embeddings else HEAD]

    def hidden(self, x: Tensor) -> Tensor:
        """Embedded rows [B, T, hidden], each from position 0 on -> states after the final norm, [B, T, hidden]."""
        return self.norm(self.states(x), NORM)

    def states(self, x: Tensor, layers: range | None = None, attend: Attend | None = None) -> Tensor:
        """Rows [B, T, hidden] through some layers (all of them), before the final norm.

        `attend` computes attention of a layer, by its prefix, from q, k and v [B, heads, T, D]; causal by itself.
        """
        rotary = rotary_table(self.config, x.shape[1], x.device)
        for index in range(self.config.num_layers) if layers is None else layers:
            prefix = f"model.layers.{index}."
            h = self.norm(x, f"{prefix}input_layernorm.weight")
            x = x + self._attention(h, f"{prefix}self_attn.", rotary, attend or causal)
            x = x + self._mlp(self.norm(x, f"{prefix}post_attention_layernorm.weight"), f"{prefix}mlp.")
        return x

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm by the weight of this name."""
        weight = self.tensors[name]
        return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), self.config.rms_norm_eps)

    def _attention(self, h: Tensor, prefix: str, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        c = self.config
        q, k, v = (self._heads(h, f"{prefix}{part}", n) for part, n in
                   (("q", c.num_q_heads), ("k", c.num_kv_heads), ("v", c.num_kv_heads)))  # fmt: skip
        q, k = _rotated(q, rotary).to(v.dtype), _rotated(k, rotary).to(v.dtype)
        flat = attend(prefix, q, k, v).transpose(1, 2).reshape(*h.shape[:2], -1)
        return F.linear(flat, self.tensors[f"{prefix}o_proj.weight"])

    def _heads(self, h: Tensor, name: str, count: int) -> Tensor:
        """[B, heads, T, D]."""
        out = F.linear(h, self.tensors[f"{name}_proj.weight"], self.tensors.get(f"{name}_proj.bias"))
        heads = out.view(*h.shape[:2], count, self.config.head_dim)
        norm = f"{name}_norm.weight"
        return (self.norm(heads, norm) if norm in self.tensors else heads).transpose(1, 2)

    def _mlp(self, h: Tensor, prefix: str) -> Tensor:
        gate, up = (F.linear(h, self.tensors[f"{prefix}{part}_proj.weight"]) for part in ("gate", "up"))
        return F.linear(F.silu(gate) * up, self.tensors[f"{prefix}down_proj.weight"])


def causal(prefix: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`Attend` of a text: every row sees those before it."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])


def _rotated(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE in half-split order: [B, heads, T, D] with tables of [T, D/2], float32."""
    cos, sin = rotary
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def check_layers(num_layers: int, config: ModelConfig) -> None:
    """`ConfigError` unless a draft of the target of this geometry can have so many layers."""
    most = config.num_layers
    if not 1 <= num_layers <= most:
        raise ConfigError(f"layers={num_layers} must be from 1 to the target's {most}; try {min(2, most)}")
    if config.num_experts:
        raise ConfigError("the target is a mixture of experts, and drafts are trained for dense models; try another")


def first_draft(target: Network, num_layers: int, to_target: Tensor, first: int = 0) -> Network:
    """An untrained draft, float32: layers of the target from `first` on, and the vocabulary's rows of its head."""
    c = target.config
    config = replace(c, num_layers=num_layers, vocab_size=to_target.shape[0], tie_word_embeddings=False)
    rows = to_target.to(target.head.device)
    tensors = {NORM: target.tensors[NORM], HEAD: target.head[rows]}
    for layer in range(num_layers):
        prefix, own = f"model.layers.{first + layer}.", f"model.layers.{layer}."
        tensors |= {own + n.removeprefix(prefix): t for n, t in target.tensors.items() if n.startswith(prefix)}
    return Network(config, {name: learnable(value) for name, value in tensors.items()})


def learnable(value: Tensor) -> Tensor:
    """A copy that learns, float32."""
    return value.detach().float().clone().requires_grad_()


class Teacher:
    """What the target says at given places of rows, as the draft is to learn it.

    Args:
        network: the target.
        to_target: the draft's vocabulary, [Vd] int64 on the target's device.
    """

    def __init__(self, network: Network, to_target: Tensor) -> None:
        self.network, self.to_target = network, to_target

    def embed(self, token_ids: Tensor) -> Tensor:
        """The target's embeddings, which the draft shares: [B, T] -> [B, T, hidden]."""
        return F.embedding(token_ids, self.network.tensors[EMBEDDING])

    @torch.no_grad()
    def states(self, x: Tensor, seen: Sequence[int]) -> tuple[Tensor, ...]:
        """The target's states behind its first `seen` layers, numbers ascending: embedded rows [B, T, hidden] -> [B, T,
        hidden] each.
        """
        kept, done = [], 0
        for count in seen:
            x, done = self.network.states(x, range(done, count)), count
            kept.append(x)
        return tuple(kept)

    @torch.no_grad()
    def log_sums(self, states: Tensor) -> Tensor:
        """What logits are less than log probabilities by, over all tokens of the target, from its states before the
        final norm [N, hidden]: [N] float32.
        """
        return self._by_rows(states, lambda logits: logits.logsumexp(dim=1))

    @torch.no_grad()
    def log_probabilities(self, states: Tensor, log_sums: Tensor | None = None) -> Tensor:
        """Of the draft's tokens among all tokens of the target, from its states [N, hidden]: [N, Vd] float32."""
        sums = self.log_sums(states) if log_sums is None else log_sums
        rows = self.network.norm(states, NORM)
        return F.linear(rows, self.network.head[self.to_target]).float() - sums[:, None]

    @torch.no_grad()
    def fit_head(self, draft: Network, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Give an untrained draft the head that makes the best of its states: those of the target, as far as a linear
        map finds them there, under the target's own head. `pairs`: both after their final norms, [N, hidden]."""
        to_states = least_squares(pairs)  # [hidden, hidden]: states @ to_states are the target's
        draft.tensors[HEAD].copy_(self.network.head[self.to_target].double() @ to_states.T)

    @torch.no_grad()
    def best(self, states: Tensor) -> Tensor:
        """The target's most likely tokens, from its states [N, hidden]: [N] int64."""
        return self._by_rows(states, lambda logits: logits.argmax(dim=1))

    def _by_rows(self, states: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
        rows = self.network.norm(states, NORM)
        return torch.cat([of(F.linear(part, self.network.head).float()) for part in rows.split(ROWS_AT_ONCE)])


def least_squares(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """The matrix [K, N], float64, by which rows [R, K] become rows [R, N] best (ridge)."""
    own: Tensor | float = 0.0
    shared: Tensor | float = 0.0
    for given, wanted in pairs:
        rows = given.double()
        own, shared = own + rows.T @ rows, shared + rows.T @ wanted.double()
    assert isinstance(own, Tensor) and isinstance(shared, Tensor), "no rows"
    own.diagonal().add_(RIDGE * own.diagonal().mean())
    return torch.linalg.solve(own, shared)

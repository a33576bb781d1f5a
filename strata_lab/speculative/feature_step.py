"""The step of a draft that sees the target's hidden states: a row is a token, and the states it was chosen from.

Where an ordinary model embeds a token, such a draft adds products: of the token's embedding, and of the normed states
of the position before it, those of several of the target's layers, or behind a guess the draft's own. States that
nobody computed are zeros. Everything behind that is an ordinary model's: layers with a small cache, final norm, head
over some of the target's tokens. The products of the embeddings are the same in every text: they are made once, for all
tokens, and stand where an ordinary model has its embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strata_lab.models.base import CausalLM, WeightReader
from strata_lab.models.draft_part import SEEN_NORM, SEEN_PROJ, STATE_NORM, STATE_PROJ
from strata_lab.quant import get_format
from strata_lab.quant.base import LinearWeight
from strata_lab.runner import EagerStep, StepInputs

TOKENS_AT_ONCE = 4096  # whose products are made in one go: a few tens of MB beside the table


@dataclass(frozen=True)
class StateWeights:
    """What becomes of states: norm [hidden], then matrix [hidden, hidden]."""

    norm: Tensor
    matrix: LinearWeight


@dataclass(frozen=True)
class RowWeights:
    """How states become part of rows.

    Attributes:
        seen: of the target's states, in the order of its layers.
        own: of the draft's.
    """

    seen: tuple[StateWeights, ...]
    own: StateWeights

    @classmethod
    def read(cls, reader: WeightReader, num_seen: int) -> RowWeights:
        """From the checkpoint of a draft that sees so many states of the target."""
        seen = tuple(
            StateWeights(reader.vector(SEEN_NORM.format(i)), reader.matrix(SEEN_PROJ.format(i)))
            for i in range(num_seen)
        )
        own = StateWeights(reader.vector(STATE_NORM), reader.matrix(STATE_PROJ))
        return cls(seen, own)


def token_rows(
    embedding: LinearWeight, matrix: LinearWeight, look_up: Callable[[Tensor, LinearWeight], Tensor]
) -> LinearWeight:
    """What each token gives a row: the product of its embedding, summed in float32 and stored as bfloat16.

    Args:
        embedding: of the target, [V, hidden].
        matrix: of embeddings, [hidden, hidden], layout "rows".
        look_up: the `embedding` operator of its device.
    """
    device, num_tokens = embedding.data.device, embedding.shape[0]
    wide = get_format(matrix.format).dequantize(matrix).to(device).T
    rows = torch.empty(num_tokens, wide.shape[1], dtype=torch.bfloat16, device=device)
    for first in range(0, num_tokens, TOKENS_AT_ONCE):
        part = rows[first : first + TOKENS_AT_ONCE]
        part.copy_(look_up(torch.arange(first, first + len(part), device=device), embedding) @ wide)
    return LinearWeight("bf16", (num_tokens, wide.shape[1]), rows)


class FeatureStep:
    """A step of the draft.

    Args:
        eager: its layers, cache and head; as embedding it has `token_rows`.
        weights: what states add to rows.
    """

    def __init__(self, eager: EagerStep, weights: RowWeights) -> None:
        self.eager, self.weights = eager, weights

    @property
    def model(self) -> CausalLM:
        """Layers and head."""
        return self.eager.model

    @property
    def num_seen(self) -> int:
        """States of the target that it sees at each position."""
        return len(self.weights.seen)

    def no_states(self, *size: int) -> Tensor:
        """States that nobody computed, [*size, hidden]."""
        w = self.weights.own.norm
        return torch.zeros(*size, self.model.config.hidden_size, dtype=self.eager.dtype, device=w.device)

    def hidden(self, inputs: StepInputs, states: Sequence[Tensor]) -> Tensor:
        """The draft's own states before its final norm, [T, hidden], behind tokens of the text.

        Args:
            inputs: the tokens.
            states: the target's of the position before each of them, [T, hidden] for each layer that it sees.
        """
        return self._through(inputs, states, self.weights.seen)

    def further(self, inputs: StepInputs, own: Tensor) -> Tensor:
        """The same behind guesses, from the draft's own states before them, [T, hidden]."""
        return self._through(inputs, (own,), (self.weights.own,))

    def _through(self, inputs: StepInputs, states: Sequence[Tensor], weights: Sequence[StateWeights]) -> Tensor:
        model = self.model
        linear, eps = model.ops.linear, model.config.rms_norm_eps
        x, turns = self.eager.begin(inputs)
        for state, w in zip(states, weights, strict=True):
            x = linear(state, w.matrix, norm_weight=w.norm, norm_eps=eps, residual=x)
        return self.eager.through(x, turns, inputs)[-1]

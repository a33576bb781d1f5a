"""The step of a draft that sees the target's hidden states: a row is a token, and the states it was chosen from.

Where an ordinary model embeds a token, such a draft adds products: of the token's embedding, and of the normed states
of the position before it, those of several of the target's layers, or behind a guess the draft's own. States that
nobody computed are zeros. Everything behind that is an ordinary model's: layers with a small cache, final norm, head
over some of the target's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strata_lab.models.base import CausalLM, WeightReader
from strata_lab.models.draft_part import SEEN_NORM, SEEN_PROJ, STATE_NORM, STATE_PROJ, TOKEN_PROJ
from strata_lab.quant.base import LinearWeight
from strata_lab.runner import EagerStep, StepInputs


@dataclass(frozen=True)
class StateWeights:
    """What becomes of states: norm [hidden], then matrix [hidden, hidden]."""

    norm: Tensor
    matrix: LinearWeight


@dataclass(frozen=True)
class RowWeights:
    """How rows are made.

    Attributes:
        token: of embeddings, [hidden, hidden].
        seen: of the target's states, in the order of its layers.
        own: of the draft's.
    """

    token: LinearWeight
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
        return cls(reader.matrix(TOKEN_PROJ), seen, own)


class FeatureStep:
    """A step of the draft.

    Args:
        eager: its layers, cache and head.
        weights: how its rows are made.
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
        x = linear(model.embed(inputs.input_ids, self.eager.dtype), self.weights.token)
        for state, w in zip(states, weights, strict=True):
            x = linear(state, w.matrix, norm_weight=w.norm, norm_eps=eps, residual=x)
        return self.eager.through(x, inputs)[-1]

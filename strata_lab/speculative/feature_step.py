"""The step of a draft that sees the target's hidden states: a row is a token, and the state it was chosen from.

Where an ordinary model embeds a token, such a draft adds two products: of the token's embedding, and of the normed
state of the position before it. States that nobody computed are zeros. Everything behind that is an ordinary model's:
layers with a small cache, final norm, head over some of the target's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strata_lab.models.base import CausalLM, WeightReader
from strata_lab.models.draft_part import STATE_NORM, STATE_PROJ, TOKEN_PROJ
from strata_lab.quant.base import LinearWeight
from strata_lab.runner import EagerStep, StepInputs


@dataclass(frozen=True)
class RowWeights:
    """How rows are made.

    Attributes:
        token, state: [hidden, hidden], of embeddings and of states.
        norm: of states, [hidden].
    """

    token: LinearWeight
    state: LinearWeight
    norm: Tensor

    @classmethod
    def read(cls, reader: WeightReader) -> RowWeights:
        """From a draft's checkpoint."""
        return cls(reader.matrix(TOKEN_PROJ), reader.matrix(STATE_PROJ), reader.vector(STATE_NORM))


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

    def no_states(self, num_rows: int) -> Tensor:
        """States that nobody computed, [num_rows, hidden]."""
        size = num_rows, self.model.config.hidden_size
        return torch.zeros(size, dtype=self.eager.dtype, device=self.weights.norm.device)

    def hidden(self, inputs: StepInputs, states: Tensor) -> Tensor:
        """The draft's own states before its final norm, [T, hidden].

        Args:
            inputs: the tokens.
            states: of the position before each of them, [T, hidden], the target's or the draft's own.
        """
        model, w = self.model, self.weights
        x = model.ops.linear(model.embed(inputs.input_ids, self.eager.dtype), w.token)
        x = model.ops.linear(states, w.state, norm_weight=w.norm, norm_eps=model.config.rms_norm_eps, residual=x)
        return self.eager.through(x, inputs)

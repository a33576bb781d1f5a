"""Llama and everything shaped like it (SmolLM2 among them): no biases, no QK-norm."""

from __future__ import annotations

from strata_lab.layers.weights import LayerWeights
from strata_lab.model_config import ModelConfig
from strata_lab.models.base import WeightReader


def load_layer(reader: WeightReader, config: ModelConfig, index: int) -> LayerWeights:
    """Weights of decoder layer `index`."""
    prefix = f"model.layers.{index}."
    return LayerWeights(reader.attention(prefix), reader.mlp(prefix))

"""What a checkpoint is, whatever file it lies in, and which tensors a model must find in one.

Every reader (GGUF, Hugging Face folder) answers in the same canonical names, those of Hugging Face's Llama and Qwen
classes, and is held to the same list of names and shapes before a single weight is read. A file that does not fit its
own config fails here, by tensor name, and not in the middle of a step. It does not look at values (NaN weights pass).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from strata_lab.model_config import ModelConfig
from strata_lab.models.errors import CheckpointError
from strata_lab.quant.base import LinearWeight
from strata_lab.tokenizer import Tokenizer

# Buffers that old exporters stored beside the weights; they are computed, not learned.
_COMPUTED = re.compile(r"(rotary_emb\.inv_freq|\.attn\.masked_bias|\.attn\.bias)$")
_ROUTER = ".mlp.gate.weight"


class Checkpoint(Protocol):
    """A model on disk: its geometry, its weights by canonical name, its tokenizer.

    Attributes:
        name: short name for people.
        config: geometry, regular whatever the file.
        stored_format: number format of most of the layers' weights: "fp32", "bf16", "fp8", "int8" or "int4"; "bf16"
            where most of them come dequantized, because that holds them well.
        generation: the author's defaults for generating ("eos_token_ids", maybe "temperature", "top_p", "top_k").
    """

    name: str
    config: ModelConfig
    stored_format: str
    generation: dict[str, Any]

    def names(self) -> list[str]:
        """Canonical names of all tensors."""
        ...

    def linear(self, name: str) -> LinearWeight:
        """A matrix [N, K] as stored, layout "rows"; float16 comes as fp32, which holds it exactly."""
        ...

    def notes(self) -> list[str]:
        """Sentences on what `linear` handed out otherwise than the file stores it, so far."""
        ...

    def tensor(self, name: str) -> Tensor:
        """A norm, bias or router as float32 or bfloat16."""
        ...

    def tokenizer(self) -> Tokenizer | None:
        """Its tokenizer; None where the checkpoint has none."""
        ...

    def close(self) -> None:
        """Let go of the files. Tensors handed out stay valid."""
        ...


def is_linear(name: str) -> bool:
    """Whether `linear` serves this name (else `tensor` does): every matrix but the router."""
    return name.endswith(("_proj.weight", "embed_tokens.weight", "lm_head.weight")) and not name.endswith(_ROUTER)


def plain_linear(data: Tensor) -> LinearWeight:
    """A float matrix [N, K] as a weight: float32 and bfloat16 as they are, float16 widened to float32."""
    if data.dtype == torch.float16:
        data = data.float()
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[data.dtype]
    return LinearWeight(format=name, shape=(data.shape[0], data.shape[1]), data=data)


def plain_tensor(data: Tensor) -> Tensor:
    """A small float tensor as float32 or bfloat16."""
    return data.float() if data.dtype == torch.float16 else data


def expected_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Canonical name and shape of every tensor a model of this geometry needs."""
    hidden, vocab = config.hidden_size, config.vocab_size
    yield "model.embed_tokens.weight", (vocab, hidden)
    for i in range(config.num_layers):
        for name, shape in _layer_tensors(config):
            yield f"model.layers.{i}.{name}", shape
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (vocab, hidden)


def _layer_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, head_dim = config.hidden_size, config.head_dim
    q, kv = config.num_q_heads * head_dim, config.num_kv_heads * head_dim
    yield "input_layernorm.weight", (hidden,)
    for name, rows in (("q", q), ("k", kv), ("v", kv)):
        yield f"self_attn.{name}_proj.weight", (rows, hidden)
        if config.attention_bias:
            yield f"self_attn.{name}_proj.bias", (rows,)
    yield "self_attn.o_proj.weight", (hidden, q)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (head_dim,)
        yield "self_attn.k_norm.weight", (head_dim,)
    yield "post_attention_layernorm.weight", (hidden,)
    if not config.num_experts:
        yield from _mlp_tensors("mlp", hidden, config.intermediate_size)
        return
    yield "mlp.gate.weight", (config.num_experts, hidden)
    for e in range(config.num_experts):
        yield from _mlp_tensors(f"mlp.experts.{e}", hidden, config.moe_intermediate_size)


def _mlp_tensors(prefix: str, hidden: int, intermediate: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (intermediate, hidden)
    yield f"{prefix}.up_proj.weight", (intermediate, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, intermediate)


def check_tensors(
    found: Mapping[str, tuple[int, ...]], config: ModelConfig, file: str, elsewhere: Collection[str] = (),
    more: Mapping[str, tuple[int, ...]] | None = None,
) -> list[str]:  # fmt: skip
    """Hold a file to what its config needs and `more`, less what comes from `elsewhere`; the names a model will read.

    Raises `CheckpointError` for a missing tensor, a shape that does not fit, or a tensor the architecture has no use
    for (leaving out a bias would change the text without a word).
    """
    names = []
    # lazily: a damaged config may claim a billion layers
    for name, shape in chain(expected_tensors(config), (more or {}).items()):
        if name in elsewhere:
            continue
        if name not in found:
            raise CheckpointError(
                f"{file}: tensor {name!r} is missing; a {config.num_layers}-layer {config.architecture} needs it, and "
                f"{len(found)} tensors were found. The download may be incomplete, or the config belongs to another "
                "model: fetch both again"
            )
        if tuple(found[name]) != shape:
            raise CheckpointError(
                f"{file}: tensor {name!r} has shape {list(found[name])}, but the config asks for {list(shape)}. "
                "The config belongs to another model: fetch config and weights from the same place"
            )
        names.append(name)
    known = {*names, "lm_head.weight"} if config.tie_word_embeddings else set(names)
    for name in found:
        if name not in known and not _COMPUTED.search(name):
            raise CheckpointError(
                f"{file}: tensor {name!r} is not part of a {config.architecture} model as this engine knows it; "
                "leaving it out would change the output. Use a checkpoint of a supported family without it"
            )
    return names

"""Reads GGUF files of Llama and Qwen models: geometry, weights as stored, tokenizer lists.

Block-quantized tensors are taken apart, never dequantized: Q4_1 becomes int4 with scale and minimum, Q4_0 int4 with a
scale, Q8_0 int8, each group of 32 exactly what the file says; Q4_K, Q5_K and Q6_K stay blocks (`gguf_tensor.py`).
Llama's q and k rows, which GGUF stores in the order of interleaved rotary embeddings, are put back into Hugging Face's
order by moving whole rows. The `gguf` package parses the file; since that takes seconds, `conversion.py` keeps the
result.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from strata_lab.model_config import ModelConfig
from strata_lab.models.errors import CheckpointError
from strata_lab.models.gguf_tensor import GgufTensor, rope_row_order
from strata_lab.settings import ConfigError

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
_ROPE_FREQS = "rope_freqs.weight"


class _EndOfFileError(Exception):
    """The parser wanted bytes beyond the end."""


class GgufFile:
    """One parsed GGUF file.

    Attributes:
        path: the file.
        config: geometry.
        weights: canonical name to `GgufTensor`; the experts of a layer are one tensor, named with "*" for the expert.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _parse(path)
        if self.get("split.count", 1) > 1:
            raise CheckpointError(f"{path} is one part of a split GGUF; merge the parts with llama-gguf-split --merge")
        arch = self.get("general.architecture", None)
        if arch not in ARCHITECTURES:
            raise CheckpointError(
                f"{path}: architecture {arch!r} is not supported; supported are {', '.join(ARCHITECTURES)}. "
                "Use a model of one of these families, for example the default 'smollm2-135m'"
            )
        self._arch = arch
        tensors = {t.name: GgufTensor(path, t) for t in self._reader.tensors}
        freqs = tensors.pop(_ROPE_FREQS, None)
        self.config = self._config(tensors, None if freqs is None else freqs.plain())
        self.weights = {_canonical(path, name): t for name, t in tensors.items()}
        self._unpermute()

    def get(self, key: str, *default: Any) -> Any:
        """A metadata value; `CheckpointError` when it is missing and no default is given."""
        field = self._reader.get_field(key)
        if field is not None:
            try:
                return field.contents()
            except (ValueError, IndexError) as error:
                raise CheckpointError(
                    f"{self.path}: metadata key {key!r} is damaged ({error}); fetch it again"
                ) from error
        if default:
            return default[0]
        raise CheckpointError(f"{self.path}: metadata key {key!r} is missing; convert the model to GGUF again")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name to shape, one entry per expert."""
        found: dict[str, tuple[int, ...]] = {}
        for name, t in self.weights.items():
            if "*" not in name:
                found[name] = t.shape
                continue
            for e in range(t.shape[0]):
                found[name.replace("*", str(e))] = t.shape[1:]
        return found

    def stored_format(self) -> str:
        """The format that most of the layers' weights have, or that holds them well."""
        counts: dict[str, int] = {}
        for name, t in self.weights.items():
            if name.endswith("_proj.weight"):
                counts[t.kept_as] = counts.get(t.kept_as, 0) + math.prod(t.shape)
        return max(counts, key=lambda f: counts[f])

    def _number(self, key: str, *default: Any) -> Any:
        value = self.get(f"{self._arch}.{key}", *default)
        if isinstance(value, list):
            raise CheckpointError(
                f"{self.path}: {self._arch}.{key} differs from layer to layer ({value[:4]}...); "
                "such models are not supported, use one whose layers are alike"
            )
        if not isinstance(value, int | float):
            raise CheckpointError(
                f"{self.path}: {self._arch}.{key}={value!r} must be a number; convert the model again"
            )
        # The file holds float32; its shortest decimal is what the author's config said (1e-05, not 9.99e-06).
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def _config(self, tensors: dict[str, GgufTensor], freqs: np.ndarray | None) -> ModelConfig:
        heads, hidden = self._number("attention.head_count"), self._number("embedding_length")
        head_dim = self._number("attention.key_length", hidden // max(heads, 1))
        rotated = self._number("rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise CheckpointError(
                f"{self.path}: only {rotated} of {head_dim} head dimensions are rotated; "
                "partial rotary embeddings are not supported"
            )
        embedding = tensors.get("token_embd.weight")
        theta = self._number("rope.freq_base", 10000.0)
        try:
            return ModelConfig(
                architecture=ARCHITECTURES[self._arch],
                vocab_size=embedding.shape[0] if embedding else len(self.get("tokenizer.ggml.tokens")),
                hidden_size=hidden,
                num_layers=self._number("block_count"),
                num_q_heads=heads,
                num_kv_heads=self._number("attention.head_count_kv", heads),
                head_dim=head_dim,
                intermediate_size=self._number("feed_forward_length", 0),
                max_position=self._number("context_length"),
                rope_theta=theta,
                rope_scaling=self._rope_scaling(theta, head_dim, freqs),
                rms_norm_eps=self._number("attention.layer_norm_rms_epsilon"),
                tie_word_embeddings="output.weight" not in tensors,
                attention_bias="blk.0.attn_q.bias" in tensors,
                qk_norm=self._arch in ("qwen3", "qwen3moe"),
                num_experts=self._number("expert_count", 0),
                num_experts_per_tok=self._number("expert_used_count", 0),
                moe_intermediate_size=self._number("expert_feed_forward_length", 0),
                bos_token_id=self.get("tokenizer.ggml.bos_token_id", None),
                eos_token_ids=self._end_tokens(),
            )
        except ConfigError as error:
            raise CheckpointError(f"{self.path}: {error}") from error

    def _end_tokens(self) -> tuple[int, ...]:
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
        ids = (self.get(key, None) for key in keys)
        return tuple(dict.fromkeys(int(i) for i in ids if i is not None))

    def _rope_scaling(self, theta: float, head_dim: int, freqs: np.ndarray | None) -> dict[str, Any] | None:
        kind = self.get(f"{self._arch}.rope.scaling.type", "none")
        if kind == "linear":
            return {"rope_type": "linear", "factor": self._number("rope.scaling.factor")}
        if kind != "none":
            raise CheckpointError(f"{self.path}: rope scaling {kind!r} is not supported; supported: linear, llama3")
        if freqs is None:
            return None
        scaling = llama3_scaling(freqs, theta, head_dim)
        if scaling is None:
            raise CheckpointError(
                f"{self.path}: tensor {_ROPE_FREQS!r} is not the llama3 rule with its usual numbers; "
                "only that rule is supported"
            )
        return scaling

    def _unpermute(self) -> None:
        if self._arch != "llama":
            return
        for name, t in self.weights.items():
            heads = {"q": self.config.num_q_heads, "k": self.config.num_kv_heads}
            match = re.search(r"self_attn\.([qk])_proj", name)
            if match and t.shape[0] == heads[match[1]] * self.config.head_dim:
                t.rows = rope_row_order(heads[match[1]], self.config.head_dim)


def _parse(path: Path) -> Any:
    size = path.stat().st_size
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise CheckpointError(
            f"{path} is not a GGUF file: expected to start with b'GGUF', found {magic!r} ({size} bytes); fetch it again"
        )
    try:
        reader = _checked_reader(path)
    except _EndOfFileError as error:
        raise CheckpointError(f"{path} is truncated: it {error}; fetch it again") from error
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: the GGUF header is damaged or of an unknown version ({error}); fetch it again"
        ) from error
    if reader.byte_order != "I":
        raise CheckpointError(f"{path} is a big-endian GGUF; use the little-endian file of the model")
    return reader


def _checked_reader(path: Path) -> Any:
    """The package's reader, but a read past the end fails instead of yielding nothing (and looping on it)."""
    from gguf import GGUFReader

    class CheckedReader(GGUFReader):
        plain: np.ndarray | None = None

        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            if self.plain is None:
                self.plain = np.asarray(self.data)  # slicing a memmap costs several times as much
            start, end = int(offset), int(offset) + np.dtype(dtype).itemsize * int(count)
            if end > len(self.plain):
                raise _EndOfFileError(f"needs at least {end} bytes, found {len(self.plain)}")
            values = self.plain[start:end].view(dtype)
            return values.view(values.dtype.newbyteorder(override_order or self.byte_order))

    return CheckedReader(path)


def _canonical(path: Path, name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _IN_LAYER:
        return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"
    return name  # `check_tensors` refuses it by this name


def llama3_scaling(freqs: np.ndarray, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The llama3 rule that makes these divisors [head_dim/2] of the rotary frequencies, or None.

    GGUF stores the divisors and not the rule. Its numbers (1, 4 and 8192) are the same in every Llama 3 model; only
    the factor differs, and it is the largest divisor.
    """
    factor, low, high, original = float(freqs.max()), 1.0, 4.0, 8192
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    rule = 1 / ((1 - smooth) / factor + smooth)
    if freqs.shape != rule.shape or not np.allclose(freqs, rule, rtol=1e-4):
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }

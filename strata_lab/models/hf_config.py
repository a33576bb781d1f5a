"""Reads a Hugging Face `config.json` into a `ModelConfig`, and refuses what would be computed wrongly.

Field names and defaults are those of transformers' Llama, Qwen2, Qwen3 and Qwen3-MoE configurations, versions 4 and 5
(5 nests the rotary settings in `rope_parameters`). A setting that changes the computation and is not implemented
(a sliding window, another activation, YaRN) is an error, never ignored.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from strata_lab.model_config import ModelConfig
from strata_lab.models.errors import CheckpointError
from strata_lab.settings import ConfigError

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
ROPE_RULES = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# Key, the values this engine computes (absent counts as the first), in the words of config.json.
_ONLY: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("hidden_act", ("silu", "swish")),
    ("mlp_bias", (False, None)),
    ("partial_rotary_factor", (1.0, None)),
    ("decoder_sparse_step", (1, None)),
    ("mlp_only_layers", ([], None)),
    ("use_sliding_window", (False, None)),
)
FLOAT64_MAX = sys.float_info.max
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or `CheckpointError`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(content).__name__}; fetch it again")
    return content


def read_config(folder: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """Geometry and generation defaults ("eos_token_ids", sampling settings the author suggests) of a folder."""
    path = folder / "config.json"
    raw = read_json(path)
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    eos = tuple(dict.fromkeys(_ids(path, generation.get("eos_token_id")) + _ids(path, raw.get("eos_token_id"))))
    defaults = {key: generation[key] for key in _SAMPLING if generation.get(key) is not None}
    return model_config(path, raw, eos), {"eos_token_ids": list(eos), **defaults}


def model_config(path: Path, raw: dict[str, Any], eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """The geometry that a parsed `config.json` describes; `path` is only named in errors."""
    architecture = _architecture(path, raw)
    for key, allowed in _ONLY:
        if raw.get(key, allowed[0]) not in allowed:
            raise CheckpointError(f"{path}: {key}={raw[key]!r} is not supported; it must be {allowed[0]!r} or absent")
    layer_types = raw.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise CheckpointError(f"{path}: layer_types={str(layer_types)[:100]}; only a list of full_attention works")
    if raw.get("attention_bias") and architecture != "qwen2":
        raise CheckpointError(f"{path}: attention_bias=True is only supported for Qwen2; use a model without it")
    hidden, heads = _whole(path, raw, "hidden_size"), _whole(path, raw, "num_attention_heads")
    theta, scaling = _rope(path, raw)
    is_moe = architecture == "qwen3_moe"
    try:
        return ModelConfig(
            architecture=architecture,
            vocab_size=_whole(path, raw, "vocab_size"),
            hidden_size=hidden,
            num_layers=_whole(path, raw, "num_hidden_layers"),
            num_q_heads=heads,
            num_kv_heads=_whole(path, raw, "num_key_value_heads", heads),
            head_dim=_whole(path, raw, "head_dim", 128 if architecture == "qwen3" else hidden // max(heads, 1)),
            intermediate_size=_whole(path, raw, "intermediate_size"),
            max_position=_whole(path, raw, "max_position_embeddings"),
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=_number(path, raw, "rms_norm_eps", 1e-6),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=architecture == "qwen2",
            qk_norm=architecture in ("qwen3", "qwen3_moe"),
            num_experts=_experts(path, raw) if is_moe else 0,
            num_experts_per_tok=_whole(path, raw, "num_experts_per_tok") if is_moe else 0,
            moe_intermediate_size=_whole(path, raw, "moe_intermediate_size") if is_moe else 0,
            norm_topk_prob=bool(raw.get("norm_topk_prob", False)) if is_moe else True,
            bos_token_id=next(iter(_ids(path, raw.get("bos_token_id"))), None),
            eos_token_ids=eos_token_ids,
        )
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _architecture(path: Path, raw: dict[str, Any]) -> str:
    named = raw.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: architecture {name!r} is not supported; supported are {', '.join(ARCHITECTURES)}. "
            "Use a model of one of these families, for example the default 'smollm2-135m'"
        )
    return ARCHITECTURES[name]


def _rope(path: Path, raw: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    nested = raw.get("rope_parameters")  # transformers 5
    rule = nested or raw.get("rope_scaling") or {}
    if not isinstance(rule, dict):
        raise CheckpointError(f"{path}: the rope settings {rule!r} must be an object or null")
    if rule.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(f"{path}: partial_rotary_factor={rule['partial_rotary_factor']} is not supported")
    source = rule if rule.get("rope_theta") is not None else raw
    theta = _number(path, source, "rope_theta", 10000.0)
    kind = rule.get("rope_type") or rule.get("type") or "default"
    if kind == "default":
        return theta, None
    if not isinstance(kind, str) or kind not in ROPE_RULES:
        raise CheckpointError(f"{path}: rope scaling {kind!r} is not supported; supported are {', '.join(ROPE_RULES)}")
    return theta, {"rope_type": kind} | {key: _number(path, rule, key) for key in ROPE_RULES[kind]}


def _experts(path: Path, raw: dict[str, Any]) -> int:
    return _whole(path, raw, "num_experts" if "num_experts" in raw else "num_local_experts")


def _whole(path: Path, raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(f"{path}: {key}={value!r} must be a whole number; fetch config.json again")
    return value


def _number(path: Path, raw: dict[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= FLOAT64_MAX:
        raise CheckpointError(f"{path}: {key}={value!r} must be a number above 0; fetch config.json again")
    return float(value)


def _ids(path: Path, value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(i, int) or isinstance(i, bool) for i in ids):
        raise CheckpointError(f"{path}: token ids {value!r} must be whole numbers; fetch the config files again")
    return tuple(ids)

"""Writes tiny checkpoints for tests: Hugging Face folders by transformers' own classes, GGUF files by the gguf package.

Weights are random but lively (norms and biases too), so that a tensor in the wrong place changes the logits.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf.quants import quantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
VOCAB = 320
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ġw", "o"))
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_GEOMETRY = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.1, "bos_token_id": 1,
    "eos_token_id": 2, "attn_implementation": "eager",
}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-5},
    "qwen2": {},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "qwen3_moe": {
        "head_dim": 32, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip
_CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}


def write_checkpoint(
    folder: Path,
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "1GB",
    seed: int = 0,
    tokenizer: bool = True,
    **config: Any,
) -> tuple[Path, Any]:
    """Write a random model of a family into `folder`; return the folder and the transformers model.

    `config` overrides fields of the transformers configuration; a small `shard_size` ("40KB") makes shards.
    """
    own = {**_GEOMETRY, **_OWN[family], **config}
    name = _CLASSES[family]
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**own))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.uniform_(-0.5, 0.5) if key.endswith("bias") else parameter.uniform_(0.5, 1.5)
    model = model.to(dtype).eval()
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, max_shard_size=shard_size)
    if tokenizer:
        write_tokenizer(folder)
    return folder, model


def byte_vocab() -> dict[str, int]:
    """Special tokens, the 256 bytes and the results of `MERGES`: 265 tokens."""
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    return {token: i for i, token in enumerate(tokens)}


def byte_level_backend() -> Tokenizer:
    """A small byte-level BPE that can spell any text."""
    backend = Tokenizer(models.BPE(vocab=byte_vocab(), merges=list(MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return backend


def write_tokenizer(folder: Path) -> None:
    """The files of a Hugging Face tokenizer with a chat template."""
    byte_level_backend().save(str(folder / "tokenizer.json"))
    config = {"bos_token": SPECIAL[1], "eos_token": {"content": SPECIAL[2]}, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


_GGUF_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}  # fmt: skip


def write_gguf(
    path: Path,
    model: Any,
    *,
    kind: str = "Q4_1",
    tokenizer: str | None = "smollm",
    drop: tuple[str, ...] = (),
    tensors: dict[str, np.ndarray] | None = None,
    **metadata: Any,
) -> dict[str, np.ndarray]:
    """Write a transformers model as GGUF, matrices in type `kind`, and return what a reader must find.

    Args:
        path: the file.
        model: from `write_checkpoint`.
        kind: GGML type of the matrices; norms, biases and routers are F32.
        tokenizer: pre-tokenizer name of the tokenizer written with it; None writes none.
        drop: GGUF tensor names to leave out.
        tensors: GGUF names and float32 values to add or replace.
        metadata: keys to add or replace, "." written as "__"; None leaves a key out.

    Returns:
        Canonical Hugging Face name to float32 values after the rounding of `kind`.
    """
    config = model.config
    arch = config.model_type.replace("_", "")
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (_gguf_metadata(config, arch) | _tokenizer_metadata(tokenizer)).items():
        changed = metadata.pop(key.replace(".", "__"), value)
        _add(writer, key, changed)
    for key, value in metadata.items():
        _add(writer, key.replace("__", "."), value)
    found: dict[str, np.ndarray] = {}
    values = _gguf_tensors(model.float().state_dict(), config, found, kind) | (tensors or {})
    for name, array in values.items():
        if name in drop:
            continue
        plain = array.ndim == 1 or name.endswith("ffn_gate_inp.weight")
        dtype = gguf.GGMLQuantizationType["F32" if plain else kind]
        writer.add_tensor(name, _blocks(array, dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def _blocks(array: np.ndarray, dtype: gguf.GGMLQuantizationType) -> np.ndarray:
    """`array` [..., N, K] quantized. The gguf package cannot write K types: a row is random bytes of its own."""
    scales_at = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(dtype.name)
    if scales_at is None:
        return quantize(array, dtype)
    columns, nbytes = gguf.GGML_QUANT_SIZES[dtype]
    rows = array.reshape(-1, array.shape[-1])
    made = np.empty((len(rows), array.shape[-1] // columns, nbytes), np.uint8)
    for row, values in zip(made, rows, strict=True):
        rng = np.random.default_rng(zlib.crc32(values.tobytes()))
        row[:] = rng.integers(0, 256, row.shape)
        for at in scales_at:
            row[:, at : at + 2] = rng.uniform(1e-4, 1e-3, (len(row), 1)).astype(np.float16).view(np.uint8)
    return made.reshape(*array.shape[:-1], -1)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None or key == "general.architecture":  # the writer writes the architecture itself
        return
    if isinstance(value, list):
        writer.add_array(key, value)
        return
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    adders[type(value)](key, value)


def _gguf_metadata(config: Any, arch: str) -> dict[str, Any]:
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    if head_dim := getattr(config, "head_dim", None):
        keys["attention.key_length"] = head_dim
    if arch == "qwen3moe":
        keys["expert_count"] = config.num_experts
        keys["expert_used_count"] = config.num_experts_per_tok
        keys["expert_feed_forward_length"] = config.moe_intermediate_size
    return {f"{arch}.{key}": value for key, value in keys.items()}


def _tokenizer_metadata(pre: str | None) -> dict[str, Any]:
    if pre is None:
        return {}
    tokens = list(byte_vocab())
    keys: dict[str, Any] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "merges": [" ".join(pair) for pair in MERGES],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": False,
    }
    return {f"tokenizer.ggml.{k}": v for k, v in keys.items()} | {"tokenizer.chat_template": CHAT_TEMPLATE}


def _gguf_tensors(
    state: dict[str, torch.Tensor], config: Any, found: dict[str, np.ndarray], kind: str
) -> dict[str, np.ndarray]:
    """GGUF name to float32 values; fills `found` with canonical names and rounded values."""
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    result: dict[str, np.ndarray] = {}
    for name, array in _split_experts(state, config):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, suffix = name.rsplit(".", 1)
        short = top.get(stem) or _GGUF_NAMES[stem.split(".", 3)[3]]
        gguf_name = f"{short}.{suffix}" if stem in top else f"blk.{stem.split('.')[2]}.{short}.{suffix}"
        plain = array.ndim == 1 or short == "ffn_gate_inp"
        dtype = gguf.GGMLQuantizationType["F32" if plain else kind]
        rounded = gguf.quants.dequantize(_blocks(array, dtype), dtype)
        if array.ndim == 3:
            for e in range(len(rounded)):
                found[name.replace("experts.", f"experts.{e}.")] = rounded[e]
        else:
            found[name] = rounded
        if config.model_type == "llama" and short in heads:  # as llama.cpp's converter interleaves the halves
            array = array.reshape(heads[short], 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        result[gguf_name] = np.ascontiguousarray(array)
    return result


def _split_experts(state: dict[str, torch.Tensor], config: Any) -> list[tuple[str, np.ndarray]]:
    """The state dict with transformers' fused experts taken apart into gate, up and down, each [E, N, K]."""
    result = []
    for name, tensor in state.items():
        array = tensor.numpy()
        if name.endswith("experts.gate_up_proj"):
            half = config.moe_intermediate_size
            result.append((name.replace("gate_up_proj", "gate_proj.weight"), array[:, :half]))
            result.append((name.replace("gate_up_proj", "up_proj.weight"), array[:, half:]))
        elif name.endswith("experts.down_proj"):
            result.append((f"{name}.weight", array))
        else:
            result.append((name, array))
    return result

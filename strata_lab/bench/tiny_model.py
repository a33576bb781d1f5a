"""A random model of a few thousand weights with a tokenizer: for measurements of everything around a model.

What it writes is noise; servers, schedulers and clients do not care. Needs no download.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPECIAL = ("<pad>", "<s>", "</s>")
CONTEXT = 512
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{{ 'assistant:' }}"


def write_tiny_model(folder: Path, seed: int = 0, **geometry: Any) -> Path:
    """Write a random Llama as a Hugging Face folder and return it.

    Args:
        folder: is made where it does not exist.
        seed: same seed, same weights.
        **geometry: fields of transformers' `LlamaConfig` beside or in place of those here.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary = _write_tokenizer(folder)
    fields = {
        "vocab_size": vocabulary, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": CONTEXT, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**(fields | geometry))).float().save_pretrained(folder)
    return folder


def _write_tokenizer(folder: Path) -> int:
    """A byte-level tokenizer without merges; returns the size of its vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    made.save(str(folder / "tokenizer.json"))
    config = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return len(vocabulary)

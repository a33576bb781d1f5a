"""A model whose answers can be computed without it: for measurements that must know what is right.

One layer, one head. Queries and keys are the same for every token, so that attention weighs a token by its distance
alone; values say which token it is; there is no MLP. So the next token is the largest entry of

    sum over the text of  weight(distance) * history[token]  +  last[token of the end]

with random `history` and `last`. A token that is missing, doubled or in another place changes the sum, and the first
wrong answer changes all that follow. `answer` computes the same in float64 from the text alone.

Where the two largest entries are so close that rounding may choose, a text is too good to ask for: `answer` ends there.
With float32 activations that is rare. With bfloat16 it is every third token, and no choice of numbers mends it: a block
of the text has a hundredth of the weight, so what is certain in spite of bfloat16's steps would not notice another one.
Every weight is exact in bfloat16, so that a card can store them in a format that its own operators multiply.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

VOCABULARY, HEAD_DIM = 64, 64
HIDDEN = 512  # the norm of a hidden state of two ones is 16: dividing by it is exact
CONSTANT = VOCABULARY + HEAD_DIM  # the one entry of the hidden state that is the same for all tokens
THETA = 10_000.0
RANGE = 8  # weights are whole numbers up to it, which every number format holds
SWING = 4.0  # of the scores, at most: how unequal distances weigh; with more, fewer wrong blocks are noticed
SCALE_BITS = 5  # of the factor that makes them so: times a whole number up to RANGE it has the eight of bfloat16
LAST_SHARE = 0.25  # of the last token beside the history
MARGIN = 1e-4  # of the largest sum; what float32 makes of a text of 760 tokens differs from float64 by 3e-6 of it


class CountingModel:
    """The numbers of one such model.

    Args:
        seed: same seed, same model.
        max_length: of a text, tokens.
    """

    def __init__(self, seed: int = 0, max_length: int = 1024) -> None:
        numbers = np.random.default_rng(seed)
        self.max_length = max_length
        self.history = numbers.integers(-RANGE, RANGE + 1, (VOCABULARY, VOCABULARY)).astype(np.float64)
        self.last = numbers.integers(-RANGE, RANGE + 1, (VOCABULARY, VOCABULARY)).astype(np.float64) * LAST_SHARE
        np.fill_diagonal(self.last, -RANGE)  # the same token again and again would hide what is wrong
        half = HEAD_DIM // 2
        self.query = numbers.integers(-RANGE, RANGE + 1, half).astype(np.float64)
        angles = np.outer(np.arange(max_length), THETA ** (-np.arange(half) / half))
        scores = np.cos(angles) @ self.query  # rotated by i and by j, a key of ones: only i - j stays
        mantissa, exponent = math.frexp(SWING / np.abs(scores).max())
        self._scale = math.ldexp(math.floor(mantissa * 2**SCALE_BITS), exponent - SCALE_BITS)
        self._weights: NDArray[np.float64] = np.exp(scores * self._scale)[::-1]  # the last is that of distance 0

    def answer(self, prompt: Sequence[int], max_tokens: int, margin: float = MARGIN) -> list[int]:
        """The greedy continuation; shorter than `max_tokens` where it is not certain beyond."""
        text = np.zeros(self.max_length, dtype=np.int64)
        text[: len(prompt)] = prompt
        stop = min(len(prompt) + max_tokens, self.max_length)
        for length in range(len(prompt), stop):
            weights = self._weights[self.max_length - length :]
            shares = np.bincount(text[:length], weights / weights.sum(), VOCABULARY)
            sums = self.history @ shares + self.last[:, text[length - 1]]
            second, first = np.partition(sums, -2)[-2:]
            if first - second < margin * np.abs(sums).max():
                return [int(t) for t in text[len(prompt) : length]]
            text[length] = int(sums.argmax())
        return [int(t) for t in text[len(prompt) : stop]]

    def write(self, folder: Path) -> Path:
        """Write it as a Hugging Face folder, a Llama without a tokenizer, and return the folder."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=VOCABULARY, num_hidden_layers=1,
            num_attention_heads=1, num_key_value_heads=1, head_dim=HEAD_DIM, max_position_embeddings=self.max_length,
            rope_theta=THETA, rms_norm_eps=1e-8, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
            pad_token_id=None,
        )  # fmt: skip
        model: Any = LlamaForCausalLM(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            norm = math.sqrt(HIDDEN / 2)  # what the norm makes of a hidden state of two ones
            embedding = model.model.embed_tokens.weight
            embedding[:, :VOCABULARY] = torch.eye(VOCABULARY)
            embedding[:, CONSTANT] = 1.0
            layer, attention = model.model.layers[0], model.model.layers[0].self_attn
            layer.input_layernorm.weight.fill_(1.0)
            layer.post_attention_layernorm.weight.fill_(1.0)
            model.model.norm.weight.fill_(1.0)
            half = HEAD_DIM // 2
            scale = self._scale * math.sqrt(HEAD_DIM)  # attention divides by its square root
            attention.q_proj.weight[:half, CONSTANT] = torch.tensor(self.query * scale / norm, dtype=torch.float32)
            attention.k_proj.weight[:half, CONSTANT] = 1.0 / norm
            attention.v_proj.weight[:, :VOCABULARY] = torch.eye(VOCABULARY) / norm
            attention.o_proj.weight[VOCABULARY:CONSTANT] = torch.eye(HEAD_DIM)
            model.lm_head.weight[:, :VOCABULARY] = torch.tensor(self.last, dtype=torch.float32)
            model.lm_head.weight[:, VOCABULARY:CONSTANT] = torch.tensor(self.history, dtype=torch.float32)
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder)
        return folder

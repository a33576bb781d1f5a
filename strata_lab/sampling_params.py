"""How a request wants its tokens chosen and when it stops: checked once, errors say what works. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from strata_lab.settings import RequestError
from strata_lab.structured_outputs import StructuredOutputs

__all__ = ["RequestError", "SamplingParams", "StructuredOutputs"]

MAX_LOGPROBS = 20  # OpenAI's limit
MAX_STOP_STRINGS = 16
MAX_CHOICES = 128  # OpenAI's limit for `n`


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    Order of application: logit_bias, repetition / presence / frequency penalties, min_tokens and bad_words,
    structured_outputs, temperature, top_k, top_p, min_p. Names are vLLM's.

    Attributes:
        temperature: 0 is greedy.
        top_p: smallest set of tokens whose probability reaches top_p; 1 is off.
        top_k: the k most likely tokens; 0 is off.
        min_p: tokens at least min_p times as likely as the best one; 0 is off.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or output
            (Keskar et al. 2019, CTRL); 1 is off.
        presence_penalty: subtracted once from the logits of tokens already generated.
        frequency_penalty: subtracted once per occurrence in the output.
        logit_bias: token id to a number added to its logit; -100 forbids in practice.
        seed: same seed, same prompt: same text, whatever else runs in the batch. None draws a seed.
        max_tokens: most tokens to generate.
        stop: strings that end the text; they are not part of it unless `include_stop_str_in_output`.
        stop_token_ids: token ids that end the text, beside the model's own.
        ignore_eos: go on after the model's end token (for benchmarks).
        logprobs: how many alternatives' log probabilities to return per token (0: only the chosen one's);
            None returns none. They are of the distribution before temperature and filters.
        include_stop_str_in_output: keep the stop string in the text.
        skip_special_tokens: leave special tokens out of the text.
        n: how many texts to generate for the prompt, which is computed once. Text i has a seed of its own, made of
            `seed` and i; text 0 has `seed` itself, and is what n=1 gives.
        best_of: generate that many, and keep the n with the highest mean log probability of their tokens, best first.
        min_tokens: before that many tokens nothing ends the text: end tokens are not chosen, and stop strings that
            begin before are not looked for.
        bad_words: texts that are not generated: the last token of each is not chosen after its first ones, for the
            tokens that the tokenizer makes of it with and without a space before. The same letters in other tokens
            are not seen.
        prompt_logprobs: as `logprobs`, for the tokens of the prompt after the first.
        structured_outputs: what shape the text must have (`StructuredOutputs`, or its fields as a mapping). A text
            that `max_tokens` ends ("length") may be unfinished.
        timeout_s: seconds after which the request ends, wherever it is, with what it has; None waits for ever.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    best_of: int | None = None
    min_tokens: int = 0
    bad_words: tuple[str, ...] = ()
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))
        for name, kind, example in (
            ("stop", Iterable, "()"),
            ("stop_token_ids", Iterable, "()"),
            ("bad_words", Iterable, "()"),
            ("logit_bias", Mapping, "{}"),
        ):
            if not isinstance(getattr(self, name), kind):
                raise RequestError(f"{name}={getattr(self, name)!r} must be a collection; try {example} for none")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "bad_words", tuple(self.bad_words))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        _bounded("temperature", self.temperature, 0.0, 100.0, "0 for greedy, or 0.7")
        _bounded("top_p", self.top_p, 0.0, 1.0, "0.9, or 1 for off", open_low=True)
        _bounded("min_p", self.min_p, 0.0, 1.0, "0.05, or 0 for off")
        _bounded("repetition_penalty", self.repetition_penalty, 0.0, 10.0, "1.1, or 1 for off", open_low=True)
        _bounded("presence_penalty", self.presence_penalty, -2.0, 2.0, "0")
        _bounded("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "0")
        _whole("top_k", self.top_k, 0, None, "40, or 0 for off")
        _whole("max_tokens", self.max_tokens, 1, None, "256")
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens, "0 for off")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, MAX_LOGPROBS, "5, or None for off")
        if self.timeout_s is not None:
            _bounded("timeout_s", self.timeout_s, 0.0, 1e9, "30, or None for no limit", open_low=True)
        if self.seed is not None:
            _whole("seed", self.seed, 0, 2**63 - 1, "42")
        if len(self.stop) > MAX_STOP_STRINGS or any(not isinstance(s, str) or not s for s in self.stop):
            raise RequestError(
                f"stop={self.stop!r} must be at most {MAX_STOP_STRINGS} non-empty strings; try ('\\n\\n',)"
            )
        if any(not isinstance(word, str) or not word.strip() for word in self.bad_words):
            raise RequestError(f"bad_words={self.bad_words!r} must be texts that are not blank; try ('damn',)")
        self._check_choices()
        self._check_structured()
        for token_id in self.stop_token_ids:
            _whole("stop_token_ids", token_id, 0, None, "the model's end token, or ()")
        for token_id, bias in self.logit_bias.items():
            _whole("logit_bias key", token_id, 0, None, "a token id such as 42")
            _bounded("logit_bias value", bias, -100.0, 100.0, "-100 to forbid, 5 to favour")

    def _check_choices(self) -> None:
        _whole("n", self.n, 1, MAX_CHOICES, "1")
        if self.best_of is not None:
            _whole("best_of", self.best_of, self.n, MAX_CHOICES, f"{self.n}, or None for off")
        if self.num_choices > 1 and self.greedy:
            name = "n" if self.n > 1 else "best_of"
            raise RequestError(
                f"{name}={self.num_choices} with temperature=0 would give the same text {self.num_choices} times; "
                "try temperature=0.7, or n=1"
            )

    def _check_structured(self) -> None:
        wish = self.structured_outputs
        if wish is None:
            return
        if isinstance(wish, Mapping):
            names = {f.name for f in fields(StructuredOutputs)}
            if unknown := wish.keys() - names:
                raise RequestError(
                    f"structured_outputs has the unknown key {min(unknown)!r}; try one of {', '.join(sorted(names))}"
                )
            object.__setattr__(self, "structured_outputs", StructuredOutputs(**wish))
        elif not isinstance(wish, StructuredOutputs):
            raise RequestError(
                f"structured_outputs={wish!r} must be StructuredOutputs(...); try {{'json_object': True}}"
            )
        if self.ignore_eos or self.min_tokens:
            name = "ignore_eos=True" if self.ignore_eos else f"min_tokens={self.min_tokens}"
            raise RequestError(f"{name} does not go with structured_outputs, which say when a text ends; leave it out")

    @property
    def num_choices(self) -> int:
        """Texts that are generated."""
        return self.best_of or self.n

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


def _bounded(name: str, value: Any, low: float, high: float, example: str, *, open_low: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value > high or value < low or (open_low and value == low):
        left = "(" if open_low else "["
        raise RequestError(f"{name}={value!r} must be a number in {left}{low:g}, {high:g}]; try {example}")


def _whole(name: str, value: Any, low: int, high: int | None, example: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name}={value!r} must be a whole number, {bound}; try {example}")

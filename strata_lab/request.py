"""One request: what was asked, where it stands, what came out. Torch-free.

A request is the list of its tokens and one number, `num_computed_tokens`: how many of them have their keys and
values in the cache. Prefill, chunked prefill, decode and recompute after preemption are all "compute the tokens
that are not computed yet", so there is no phase flag to keep in step with the truth.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

MAX_LOGPROBS = 20  # OpenAI's limit
MAX_STOP_STRINGS = 16


class RequestError(ValueError):
    """A request cannot be served as asked. The message names the value, the rule and a value that works."""


class RequestState(Enum):
    """Where a request is. Every path leads to FINISHED."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


# Only these moves are legal; `Request.move_to` asserts it.
_MOVES = {
    RequestState.WAITING: {RequestState.RUNNING, RequestState.FINISHED},
    RequestState.RUNNING: {RequestState.PREEMPTED, RequestState.FINISHED},
    RequestState.PREEMPTED: {RequestState.RUNNING, RequestState.FINISHED},
    RequestState.FINISHED: set(),
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    Order of application: logit_bias, repetition / presence / frequency penalties, temperature, top_k, top_p, min_p.

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
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, kind, example in (
            ("stop", Iterable, "()"),
            ("stop_token_ids", Iterable, "()"),
            ("logit_bias", Mapping, "{}"),
        ):
            if not isinstance(getattr(self, name), kind):
                raise RequestError(f"{name}={getattr(self, name)!r} must be a collection; try {example} for none")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        _bounded("temperature", self.temperature, 0.0, 100.0, "0 for greedy, or 0.7")
        _bounded("top_p", self.top_p, 0.0, 1.0, "0.9, or 1 for off", open_low=True)
        _bounded("min_p", self.min_p, 0.0, 1.0, "0.05, or 0 for off")
        _bounded("repetition_penalty", self.repetition_penalty, 0.0, 10.0, "1.1, or 1 for off", open_low=True)
        _bounded("presence_penalty", self.presence_penalty, -2.0, 2.0, "0")
        _bounded("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "0")
        _whole("top_k", self.top_k, 0, None, "40, or 0 for off")
        _whole("max_tokens", self.max_tokens, 1, None, "256")
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS, "5, or None for off")
        if self.timeout_s is not None:
            _bounded("timeout_s", self.timeout_s, 0.0, 1e9, "30, or None for no limit", open_low=True)
        if self.seed is not None:
            _whole("seed", self.seed, 0, 2**63 - 1, "42")
        if len(self.stop) > MAX_STOP_STRINGS or any(not isinstance(s, str) or not s for s in self.stop):
            raise RequestError(
                f"stop={self.stop!r} must be at most {MAX_STOP_STRINGS} non-empty strings; try ('\\n\\n',)"
            )
        for token_id in self.stop_token_ids:
            _whole("stop_token_ids", token_id, 0, None, "the model's end token, or ()")
        for token_id, bias in self.logit_bias.items():
            _whole("logit_bias key", token_id, 0, None, "a token id such as 42")
            _bounded("logit_bias value", bias, -100.0, 100.0, "-100 to forbid, 5 to favour")

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


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one output position.

    Attributes:
        token_id: the chosen token.
        logprob: its natural-log probability.
        top: token id to log probability of the most likely tokens, best first.
    """

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(eq=False)
class Request:
    """The live state of one request. Only the engine thread changes it."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int = 0
    priority: int = 0
    arrival_s: float = field(default_factory=time.perf_counter)
    state: RequestState = RequestState.WAITING
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    num_passed: int = 0  # shorter requests that went before it because it did not fit yet
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache when it was first admitted
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)  # prompt, then output

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens (a copy)."""
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that still need a forward pass; 1 for a request that is decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def deadline_s(self) -> float | None:
        """When it ends at the latest, on the clock of `arrival_s`; None for never."""
        return None if self.params.timeout_s is None else self.arrival_s + self.params.timeout_s

    @property
    def is_decoding(self) -> bool:
        """Whether the next step computes exactly the token generated last."""
        return self.num_output_tokens > 0 and self.num_uncomputed_tokens == 1

    @property
    def finished(self) -> bool:
        """Whether it has ended, well or not."""
        return self.state is RequestState.FINISHED

    def move_to(self, state: RequestState) -> None:
        """Change state; an illegal move is a bug of ours."""
        assert state in _MOVES[self.state], f"{self.request_id}: {self.state} -> {state}"
        self.state = state

    def append(self, token_id: int, now_s: float) -> None:
        """Record a generated token."""
        self.token_ids.append(token_id)
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s

    def finish(self, reason: str, error: str | None = None) -> None:
        """End it: "stop", "length", "abort", "timeout" or "error"."""
        self.move_to(RequestState.FINISHED)
        self.finish_reason = reason
        self.error = error


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What came out of a request.

    Attributes:
        request_id: the engine's name for it.
        prompt: the text that was given (empty when token ids were given).
        prompt_token_ids: the prompt as tokens.
        text: the generated text.
        token_ids: the generated tokens.
        finish_reason: "stop", "length", "abort", "timeout" or "error"; None while it runs.
        error: what went wrong, for "error".
        logprobs: one entry per generated token when asked for, else empty.
        ttft_ms: arrival to first token, milliseconds; None before the first token.
        tpot_ms: mean milliseconds per output token after the first; None with fewer than two.
        e2e_ms: arrival to last token, milliseconds; None before the first token.
        num_cached_tokens: tokens of the prompt that the prefix cache held, so that they were not computed.
    """

    request_id: str
    prompt: str
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    num_cached_tokens: int = 0

    @classmethod
    def of(cls, request: Request, prompt: str, text: str) -> RequestOutput:
        """Snapshot of a request with its text."""
        n, first, last = request.num_output_tokens, request.first_token_s, request.last_token_s
        return cls(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=tuple(request.prompt_token_ids),
            text=text,
            token_ids=tuple(request.output_token_ids),
            finish_reason=request.finish_reason,
            error=request.error,
            logprobs=tuple(request.logprobs),
            ttft_ms=None if first is None else (first - request.arrival_s) * 1e3,
            tpot_ms=None if n < 2 or first is None or last is None else (last - first) * 1e3 / (n - 1),
            e2e_ms=None if last is None else (last - request.arrival_s) * 1e3,
            num_cached_tokens=request.num_cached_tokens,
        )


def check_token_ids(token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """Return the ids as a list, or raise `RequestError` for an empty prompt or an id outside the vocabulary."""
    ids = list(token_ids)
    if not ids:
        raise RequestError("the prompt has no tokens; give at least one, for example 'Hello'")
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise RequestError(f"token id {token_id!r} must be a whole number from 0 to {vocab_size - 1}; try 1")
    return ids

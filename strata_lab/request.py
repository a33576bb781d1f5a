"""One request: what was asked, where it stands, what came out. Torch-free.

A request is the list of its tokens and one number, `num_computed_tokens`: how many of them have their keys and
values in the cache. Prefill, chunked prefill, decode and recompute after preemption are all "compute the tokens
that are not computed yet", so there is no phase flag to keep in step with the truth.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from strata_lab.sampling_params import RequestError, SamplingParams


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
    draft_token_ids: list[int] = field(default_factory=list)  # guesses at its next tokens, for the next step alone
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the tokens after the first, so far
    stop_ids: frozenset[int] = frozenset()  # tokens that end it
    bad_words: tuple[tuple[int, ...], ...] = ()  # as tokens
    grammar: Any = None  # compiled (`grammar.py`); None: any text
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    prompt_embeds: Any = None  # [T, hidden] on the device in the place of the prompt's tokens (`prompt_embeds.py`)

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
    def wants_prompt_rows(self) -> bool:
        """Whether logits of prompt tokens are asked for and not all there yet: nothing of it may be skipped."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < len(self.prompt_token_ids) - 1

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
        prompt_token_ids: the prompt as tokens; -1 where an embedding was given instead.
        text: the generated text.
        token_ids: the generated tokens.
        finish_reason: "stop", "length", "abort", "timeout" or "error"; None while it runs.
        error: what went wrong, for "error".
        logprobs: one entry per generated token when asked for, else empty.
        ttft_ms: arrival to first token, milliseconds; None before the first token.
        tpot_ms: mean milliseconds per output token after the first; None with fewer than two.
        e2e_ms: arrival to last token, milliseconds; None before the first token.
        num_cached_tokens: tokens of the prompt that the prefix cache held, so that they were not computed.
        index: which of the texts of its prompt this is.
        stop_reason: the stop string or stop token id that ended it; None for the model's own end token and other ends.
        prompt_logprobs: one entry per prompt token when asked for, the first one None; else empty.
        others: the other texts of the prompt, with `n` or `best_of`.
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
    index: int = 0
    stop_reason: int | str | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    others: tuple[RequestOutput, ...] = ()

    @property
    def outputs(self) -> tuple[RequestOutput, ...]:
        """All texts of the prompt, this one first."""
        return (self, *self.others)

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the tokens' log probabilities; None where they were not asked for."""
        return sum(entry.logprob for entry in self.logprobs) if self.logprobs else None

    @classmethod
    def of(cls, request: Request, prompt: str, text: str, index: int = 0) -> RequestOutput:
        """Snapshot of a request with its text."""
        n, first, last = request.num_output_tokens, request.first_token_s, request.last_token_s
        return cls(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=tuple(max(-1, token_id) for token_id in request.prompt_token_ids),
            text=text,
            token_ids=tuple(request.output_token_ids),
            finish_reason=request.finish_reason,
            error=request.error,
            logprobs=tuple(request.logprobs),
            ttft_ms=None if first is None else (first - request.arrival_s) * 1e3,
            tpot_ms=None if n < 2 or first is None or last is None else (last - first) * 1e3 / (n - 1),
            e2e_ms=None if last is None else (last - request.arrival_s) * 1e3,
            num_cached_tokens=request.num_cached_tokens,
            index=index,
            stop_reason=request.stop_reason,
            prompt_logprobs=(None, *request.prompt_logprobs) if request.params.prompt_logprobs is not None else (),
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

"""The caller's side of a request: prompt text in, text and token events out.

The engine thread pushes tokens into a `Session`; callers read its queue. Nothing here touches tensors, so a slow
reader costs the engine nothing.
"""

from __future__ import annotations

import asyncio
import queue
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from strata_lab.detokenizer import Detokenizer
from strata_lab.events import TokenEvent
from strata_lab.model_config import ModelConfig
from strata_lab.request import Request, RequestOutput, TokenLogprobs, check_token_ids
from strata_lab.sampling_params import RequestError, SamplingParams

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
ASYNC_POLL_S = 0.25  # how long an abandoned asyncio reader may keep its helper thread


class Session:
    """One request with its text.

    Args:
        request: the scheduler's view.
        prompt: the text that was given, "" for token ids.
        detokenizer: None when the model has no tokenizer; the text is then empty.
        eos_token_ids: ids that end the text unless `ignore_eos`.
    """

    def __init__(
        self, request: Request, prompt: str, detokenizer: Detokenizer | None, eos_token_ids: frozenset[int]
    ) -> None:
        self.request, self.prompt = request, prompt
        self.followed = False
        self._detokenizer = detokenizer
        stops = request.params.stop_token_ids
        self._stop_ids = frozenset(stops) | (frozenset() if request.params.ignore_eos else eos_token_ids)
        self._queue: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        self._ended = False

    def check_new(self, sessions: Mapping[str, Session]) -> None:
        """Refuse an id that is in use."""
        if self.request.request_id in sessions:
            raise RequestError(f"request_id={self.request.request_id!r} is in use; leave it out to get a fresh one")

    def accept(
        self, token_id: int, logprobs: TokenLogprobs | None, error: str | None, now_s: float, max_model_len: int
    ) -> TokenEvent:
        """Record a sampled token; the event says whether the request is to end and why (`finish_reason`)."""
        request = self.request
        index = request.num_output_tokens
        if error is not None:
            return TokenEvent(request.request_id, -1, self._flush(), index, "error", error)
        request.append(token_id, now_s)
        if logprobs is not None:
            request.logprobs.append(logprobs)
        text = self._detokenizer.push(token_id) if self._detokenizer else ""
        reason = self._finish_reason(token_id, max_model_len)
        if reason is not None:
            text += self._flush()
        return TokenEvent(request.request_id, token_id, text, index, reason)

    def _finish_reason(self, token_id: int, max_model_len: int) -> str | None:
        if token_id in self._stop_ids or (self._detokenizer and self._detokenizer.stopped):
            return "stop"
        full = self.request.num_output_tokens >= self.request.params.max_tokens
        return "length" if full or self.request.num_tokens >= max_model_len else None

    def _flush(self) -> str:
        return self._detokenizer.flush() if self._detokenizer and not self._detokenizer.stopped else ""

    def deliver(self, event: TokenEvent) -> None:
        """Hand an event to whoever follows."""
        self._ended = self._ended or event.finish_reason is not None
        self._queue.put(event)

    def end(self) -> None:
        """Deliver the end of a request that ended without a token: aborted or failed."""
        if not self._ended:
            r = self.request
            self.deliver(TokenEvent(r.request_id, -1, self._flush(), r.num_output_tokens, r.finish_reason, r.error))

    def next_event(self) -> TokenEvent:
        """Wait for the next event; the last one has a `finish_reason`. One reader at a time."""
        self.followed = True
        return self._queue.get()

    def poll_event(self, timeout_s: float) -> TokenEvent | None:
        """The next event, or None after `timeout_s`."""
        self.followed = True
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def output(self) -> RequestOutput:
        """Everything so far."""
        text = self._detokenizer.text if self._detokenizer else ""
        return RequestOutput.of(self.request, self.prompt, text)


class Intake:
    """Turns what callers pass into sessions; every mistake becomes a `RequestError` before anything is queued."""

    def __init__(self, tokenizer: Any, config: ModelConfig) -> None:
        self.tokenizer, self.config = tokenizer, config
        tokenizer_eos = tuple(tokenizer.eos_token_ids) if tokenizer is not None else ()
        self.eos_token_ids = frozenset(config.eos_token_ids) | frozenset(tokenizer_eos)

    def session(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None, priority: int, prompt_embeds: Any = None
    ) -> Session:
        """A session for one prompt; with `prompt_embeds` the prompt is what `prompt_embeds.placeholder_ids` gave."""
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params={params!r} must be a SamplingParams; try SamplingParams(max_tokens=64)"
            )
        if prompt_embeds is None:
            text, token_ids = self._tokens(prompt)
            token_ids = context = check_token_ids(token_ids, self.config.vocab_size)
        else:
            text, token_ids, context = "", [int(i) for i in prompt], []  # type: ignore[arg-type]
            if params.repetition_penalty != 1:
                raise RequestError(
                    f"repetition_penalty={params.repetition_penalty} looks at the prompt's tokens, and embeddings have "
                    "none; try presence_penalty"
                )
        request = Request(
            request_id=request_id or f"r-{uuid.uuid4().hex[:12]}",
            prompt_token_ids=token_ids,
            params=params,
            seed=params.seed if params.seed is not None else secrets.randbits(62),
            priority=priority,
            arrival_s=time.perf_counter(),
            prompt_embeds=prompt_embeds,
        )
        for token_id in (*params.logit_bias, *params.stop_token_ids):
            check_token_ids([token_id], self.config.vocab_size)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer and this model has none; use stop_token_ids")
        detokenizer = None if self.tokenizer is None else Detokenizer(self.tokenizer, context, params)
        return Session(request, text, detokenizer, self.eos_token_ids)

    def _tokens(self, prompt: Prompt) -> tuple[str, list[int]]:
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("prompt='' is empty; give at least one character, for example 'Hello'")
            return prompt, self._need_tokenizer("text").encode(prompt)
        items: list[Any] = list(prompt)
        if items and isinstance(items[0], Mapping):
            return "", self._need_tokenizer("chat messages").apply_chat_template(items)
        return "", items

    def _need_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise RequestError(
                f"the prompt is {what} but this model has no tokenizer; give token ids, such as [1, 2, 3]"
            )
        return self.tokenizer

    def pair(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[tuple[Prompt, SamplingParams]]:
        """Prompts with their params, whichever of the two is single."""
        many: list[Any] = [prompts] if _is_one(prompts) else list(prompts)
        if params is None or isinstance(params, SamplingParams):
            return [(prompt, params or SamplingParams()) for prompt in many]
        if len(params) != len(many):
            raise RequestError(f"{len(many)} prompts but {len(params)} sampling_params; give one, or one per prompt")
        return list(zip(many, params, strict=True))


def _is_one(prompts: Any) -> bool:
    """A text, a list of token ids or a conversation is one prompt; any other list holds several."""
    if isinstance(prompts, str):
        return True
    items = list(prompts)
    return bool(items) and isinstance(items[0], int | Mapping)


def collect(sessions: Sequence[Session], progress: bool) -> list[RequestOutput]:
    """Wait for requests and return their outputs in order."""
    from tqdm.auto import tqdm

    with tqdm(total=len(sessions), desc="requests", unit="req", disable=not progress) as bar:
        for session in sessions:
            while session.next_event().finish_reason is None:
                pass
            bar.update()
    return [session.output() for session in sessions]


class TokenStream:
    """A session's events as an iterator and an async iterator; `close`, or dropping it, aborts the request.

    Args:
        session: whose events.
        release: called once, however the reader leaves.
    """

    def __init__(self, session: Session, release: Callable[[], Any]) -> None:
        self._session, self._release, self._done = session, release, False

    @property
    def request_id(self) -> str:
        """The engine's name for the request."""
        return self._session.request.request_id

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> TokenEvent:
        if self._done:
            raise StopIteration
        try:
            event = self._session.next_event()
        except BaseException:  # an interrupt, for example: nobody will read the rest
            self.close()
            raise
        return self._passed_on(event)

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenEvent:
        if self._done:
            raise StopAsyncIteration
        try:
            while (event := await asyncio.to_thread(self._session.poll_event, ASYNC_POLL_S)) is None:
                pass
        except BaseException:  # cancelled
            self.close()
            raise
        return self._passed_on(event)

    def _passed_on(self, event: TokenEvent) -> TokenEvent:
        if event.finish_reason is not None:
            self.close()
        return event

    def close(self) -> None:
        """Stop reading; an unfinished request is aborted. Safe to repeat."""
        if not self._done:
            self._done = True
            self._release()

    async def aclose(self) -> None:
        """`close` under the name that asyncio uses."""
        self.close()

    def __del__(self) -> None:
        self.close()

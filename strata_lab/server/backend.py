"""What stands between the endpoints and one engine: who gets in, and how a body becomes requests.

It knows no HTTP beyond its statuses and does no serialization. All of it runs in the event loop; what takes long
(tokenizing long texts, compiling structures) runs in threads. The server's state is in `service.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from strata_lab.sampling_params import RequestError, SamplingParams
from strata_lab.server.bridge import Bridge, Reply
from strata_lab.server.errors import ApiError, bad, of_request_error
from strata_lab.server.settings import ServerConfig
from strata_lab.server.translate import retry_seconds

INLINE_CHARACTERS = 4096  # shorter texts are tokenized in the event loop: about a millisecond

T = TypeVar("T")


class Backend:
    """One engine as endpoints see it.

    Args:
        name: under which its answers come.
        engine: serves them.
        config: how to serve.
        unavailable: makes the error of a server whose engine is gone.

    Attributes:
        bridge: carries its events.
    """

    def __init__(self, name: str, engine: Any, config: ServerConfig, unavailable: Callable[[], ApiError]) -> None:
        self.name, self.config, self.unavailable = name, config, unavailable
        self._engine = engine
        self.bridge = Bridge(asyncio.get_running_loop(), config.max_stream_backlog)
        engine.start()

    @property
    def engine(self) -> Any:
        """The engine; raises `ApiError` 503 after it was closed."""
        if self._engine.closed:
            raise self.unavailable()
        return self._engine

    @property
    def alive(self) -> bool:
        """Whether its loop runs."""
        return bool(self._engine.alive)

    def retry_after_s(self, places: int = 1) -> int:
        """Seconds until so many requests will have ended, at the speed measured now."""
        rate = self.bridge.requests_s()
        if rate is not None:
            return retry_seconds(places / rate)
        return retry_seconds(self.bridge.first_end_s(self.engine.stats().output_tok_s))

    def _admit(self, num_prompts: int, num_texts: int) -> None:
        """Refuse texts for which there is no room: with 429 where there will be, with 400 where there never is."""
        count, limit = num_prompts * num_texts, self.engine.optimizations.max_num_seqs + self.config.max_queue
        for name, most in (("max_choices", self.config.max_choices), ("max_num_seqs + max_queue", limit)):
            if count > most:
                fits = f"n={most // num_prompts}" if num_prompts <= most else f"{most} prompts in a request, or n=1"
                raise bad(
                    f"{num_prompts} prompts x {num_texts} texts are {count}; at most {name}={most}, try {fits}", "n"
                )
        over = self.bridge.num_live + count - limit
        if over > 0:
            raise ApiError(
                429,
                f"{self.bridge.num_live} requests run or wait and {count} more would exceed max_num_seqs + max_queue = "
                f"{limit}; try again later",
                code="queue_full",
                retry_after_s=self.retry_after_s(over),
            )

    def reply(self, name: str, prompts: Sequence[Any], params: SamplingParams, priority: int, *, whole: bool) -> Reply:
        """Queue the texts of every prompt (token ids, or rows of embeddings), all of them or none.

        Raises `ApiError`: 400 for a request that can never be served, 429 for one that cannot be taken now.
        """
        engine = self.engine
        self._admit(len(prompts), params.num_choices)
        reply = Reply(self.bridge, engine, name, whole)
        try:
            for prompt in prompts:
                reply.add(prompt, params, priority)
        except RequestError as error:
            reply.close()
            raise of_request_error(error, self.retry_after_s()) from error
        except RuntimeError:
            reply.close()
            if engine.closed:
                raise self.unavailable() from None
            raise
        return reply

    async def compile(self, params: SamplingParams) -> None:
        """Compile the structure that is asked for, in a thread: a schema may take longer than a step."""
        if params.structured_outputs is not None:
            try:
                await asyncio.to_thread(self.engine.intake.compile, params)
            except RequestError as error:
                raise bad(str(error), "structured_outputs") from error

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt."""
        if not text:
            raise bad("prompt='' is empty; give at least one character, for example 'Hello'", "prompt")
        tokenizer = self.tokenizer("text")
        return await self._in_thread_if_long(
            len(text), lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )

    async def encode_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        """Token ids of a conversation."""
        tokenizer = self.tokenizer("chat messages")
        length = sum(len(m["content"]) for m in messages) + 100 * len(tools or ())
        return await self._in_thread_if_long(length, lambda: tokenizer.apply_chat_template(messages, tools=tools))

    def tokenizer(self, what: str) -> Any:
        """The model's tokenizer, or an error that says what to send instead."""
        if self.engine.tokenizer is None:
            raise bad(f"the prompt is {what} but this model has no tokenizer; give token ids, such as [1, 2, 3]")
        return self.engine.tokenizer

    async def _in_thread_if_long(self, length: int, work: Callable[[], T]) -> T:
        try:
            return work() if length <= INLINE_CHARACTERS else await asyncio.to_thread(work)
        except RequestError as error:
            raise bad(str(error)) from error

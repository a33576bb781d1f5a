"""What stands between the endpoints and the engine: its state, who gets in, and how a body becomes requests.

It knows no HTTP beyond its statuses and does no serialization. All of it runs in the event loop; what takes long
(tokenizing long texts, changing settings) runs in threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from strata_lab.sampling_params import RequestError, SamplingParams
from strata_lab.server.bridge import Bridge, Reply
from strata_lab.server.errors import ApiError, bad, of_request_error
from strata_lab.server.settings import ServerConfig
from strata_lab.server.translate import retry_seconds

State = Literal["loading", "ready", "draining", "failed"]
INLINE_CHARACTERS = 4096  # shorter texts are tokenized in the event loop: about a millisecond
LOADING_RETRY_S = 5

T = TypeVar("T")


class Service:
    """One engine as endpoints see it.

    Args:
        config: how to serve.
        model: as it was asked for; its name unless `served_model_name` says otherwise.

    Attributes:
        state: "loading" until `ready`; "draining" from `drain` on; "failed" if the model could not be loaded.
        progress: what is being loaded and the fraction done.
        failure: why it is "failed".
    """

    def __init__(self, config: ServerConfig, model: str) -> None:
        self.config = config
        self.names = config.served_model_name or (model,)
        self.state: State = "loading"
        self.progress: tuple[str, float] = ("starting", 0.0)
        self.failure = ""
        self.created = int(time.time())
        self._engine: Any = None
        self._bridge: Bridge | None = None

    # -- state --------------------------------------------------------------------------------------------------

    def ready(self, engine: Any) -> None:
        """The engine is there; called in the event loop."""
        engine.start()
        self._engine = engine
        self._bridge = Bridge(asyncio.get_running_loop(), self.config.max_stream_backlog)
        if self.state == "loading":
            self.state = "ready"

    def fail(self, reason: str) -> None:
        """The model could not be loaded."""
        self.state, self.failure = "failed", reason

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return 0 if self._bridge is None else self._bridge.num_live

    async def drain(self) -> int:
        """Take no more requests and wait for those that run, up to the limit; how many had to be ended."""
        self.state = "draining"
        if self._bridge is None:
            return 0
        try:
            await asyncio.wait_for(self._bridge.idle(), self.config.drain_timeout_s)
        except TimeoutError:
            return self._bridge.abort_all()
        return 0

    @property
    def engine(self) -> Any:
        """The engine; raises `ApiError` 503 before it is there."""
        if self._engine is None or self._engine.closed:
            raise self.unavailable()
        return self._engine

    @property
    def bridge(self) -> Bridge:
        """The bridge to it."""
        if self._bridge is None:
            raise self.unavailable()
        return self._bridge

    def unavailable(self) -> ApiError:
        """Why nothing is served now."""
        texts = {
            "loading": f"the model is loading ({self.progress[0]}, {self.progress[1]:.0%}); try again later",
            "failed": f"the model could not be loaded: {self.failure}",
        }
        text = texts.get(self.state, "the server is stopping; send the request to another one, or again later")
        return ApiError(503, text, code=self.state, retry_after_s=LOADING_RETRY_S)

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether it serves, and facts; never waits for the engine."""
        facts: dict[str, Any] = {"status": self.state, "model": self.names[0]}
        if self.state == "loading":
            facts |= {"task": self.progress[0], "fraction": self.progress[1]}
        if self.failure:
            facts["reason"] = self.failure
        facts["live_requests"] = self.num_live
        alive = self._engine is not None and self._engine.alive
        if self.state == "ready" and not alive:
            facts |= {"status": "failed", "reason": "the engine's thread has ended; restart the server"}
        return self.state == "ready" and alive, facts

    # -- requests -----------------------------------------------------------------------------------------------

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served."""
        if name is not None and name not in self.names:
            listed = ", ".join(map(repr, self.names))
            raise ApiError(
                404, f"model={name[:80]!r} is not served here; try {listed}", param="model", code="model_not_found"
            )

    def retry_after_s(self, places: int = 1) -> int:
        """Seconds until so many requests will have ended, at the speed measured now."""
        rate = self.bridge.requests_s()
        if rate is not None:
            return retry_seconds(places / rate)
        return retry_seconds(self.bridge.first_end_s(self.engine.stats().output_tok_s))

    def _admit(self, count: int) -> None:
        limit = self.engine.optimizations.max_num_seqs + self.config.max_queue
        over = self.bridge.num_live + count - limit
        if over > 0:
            raise ApiError(
                429,
                f"{self.bridge.num_live} requests run or wait and {count} more would exceed max_num_seqs + max_queue = "
                f"{limit}; try again later",
                code="queue_full",
                retry_after_s=self.retry_after_s(over),
            )

    def reply(
        self, name: str, prompts: Sequence[list[int]], params: SamplingParams, priority: int, *, whole: bool
    ) -> Reply:
        """Queue the texts of every prompt, all of them or none.

        Raises `ApiError`: 400 for a request that can never be served, 429 for one that cannot be taken now.
        """
        each, most = params.num_choices, self.config.max_choices
        count = len(prompts) * each
        if count > most:
            raise bad(f"{len(prompts)} prompts x {each} texts are {count}; at most max_choices={most}, try n=1", "n")
        engine = self.engine
        self._admit(count)
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

    def close(self) -> None:
        """End the engine."""
        if self._engine is not None:
            self._engine.close()

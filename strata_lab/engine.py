"""LLMEngine: what people call. Loads a model, takes requests, streams tokens, changes settings while it runs.

Work happens in `engine_loop.py`, objects are made in `build.py`; this file is the face of both, without decode logic.
"""

from __future__ import annotations

import atexit
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import torch

from strata_lab.apply import Fallback
from strata_lab.build import Builder, Parts
from strata_lab.config import DEFAULT_MODEL, EngineConfig, Optimizations, engine_config
from strata_lab.desk import EngineClosedError
from strata_lab.engine_loop import EngineLoop
from strata_lab.events import EventLog, ProgressEvent, StateEvent, StepEvent, TokenEvent
from strata_lab.expert_counts import WatchesExperts
from strata_lab.intake import Intake, Prompt
from strata_lab.kernels import bind
from strata_lab.live_settings import ChangesSettings
from strata_lab.request import RequestOutput, check_token_ids
from strata_lab.sampling_params import SamplingParams
from strata_lab.scheduler import Scheduler
from strata_lab.session import Inbox, Session, TokenStream, collect
from strata_lab.settings import RequestError
from strata_lab.stats import EngineStats
from strata_lab.telemetry.ceilings import Ceilings

__all__ = ["EngineClosedError", "EngineStats", "LLMEngine"]

_open_engines: weakref.WeakSet[LLMEngine] = weakref.WeakSet()


class LLMEngine(ChangesSettings, WatchesExperts):
    """A model, its KV cache and the loop that serves it.

    Example:
        >>> with LLMEngine("smollm2-135m") as engine:
        ...     print(engine.generate("The capital of France is")[0].text)

    Args:
        model: a known name, a preset, a .gguf file or a Hugging Face folder.
        optimizations: the toggles at start; `Optimizations()` by default.
        on_progress: called with (task, fraction) during long work; the same goes into `events`.
        **options: fields of `EngineConfig` and `Optimizations`, and the names `quantization`, `max_batch_size` and
            `max_seq_len` that other engines use.

    Raises:
        ConfigError: an option is unknown, wrong or impossible here.
        CheckpointError: the model cannot be read.
    """

    def __init__(
        self,
        model: Any = DEFAULT_MODEL,
        *,
        optimizations: Optimizations | None = None,
        on_progress: Callable[[str, float], None] | None = None,
        **options: Any,
    ) -> None:
        self.config: EngineConfig = engine_config(model, optimizations=optimizations, **options)
        self.events = EventLog()
        self._on_progress = on_progress
        self._apply_lock = threading.Lock()  # one change of settings at a time
        self._builder = Builder(self.config, self._progress)
        self.model_config, self.device = self._builder.model_config, self._builder.device
        self.tokenizer = self._builder.checkpoint.tokenizer()
        self._wish = self.config.optimizations  # as asked for, None where the engine decides
        parts = self._builder.parts(self._builder.resolve(self._wish))
        scheduler = Scheduler(
            self._builder.new_block_manager(parts),
            max_num_seqs=parts.optimizations.max_num_seqs,
            max_num_batched_tokens=parts.optimizations.max_num_batched_tokens,
            max_model_len=parts.max_model_len,
            admission=parts.admission,
            prefill=parts.prefill,
            lookahead=parts.runner.lookahead,
            order=parts.order,
            max_passes=parts.optimizations.max_passes,
            max_waiting=parts.optimizations.max_waiting,
            max_waiting_tokens=parts.optimizations.max_waiting_tokens,
            preemption=parts.preemption,
            watermark=parts.watermark,
        )
        self._loop = EngineLoop(parts, scheduler, self.model_config, self.events)
        self.intake = Intake(self.tokenizer, self.model_config, self.device, self._builder.on_done)
        _open_engines.add(self)

    # -- what it is ---------------------------------------------------------------------------------------------

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """What was asked for and cannot be done here, and what is done instead."""
        return tuple(self._builder.fallbacks)

    @property
    def ceilings(self) -> Ceilings | None:
        """Measured read bandwidth and launch costs of a CUDA card; None on a CPU, where `telemetry` is asked."""
        return self._builder.ceilings

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._loop.closed

    @property
    def alive(self) -> bool:
        """Whether the background loop runs."""
        return self._loop.alive

    @property
    def parts(self) -> Parts:
        """What serves requests now: weights, pool, runner and so on. To look at; a change of settings replaces it."""
        self._loop.check_open()
        return self._loop.parts

    def stats(self) -> EngineStats:
        """Counters and memory, as of now."""
        return self._loop.stats()

    def snapshot(self) -> StateEvent:
        """Where every unfinished request is, and whose the blocks are; microseconds per request."""
        return self._loop.snapshot()

    # -- requests -----------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        prompt_embeds: Any = None,
    ) -> str:
        """Queue a request and return its id; follow it with `output`, or with `step` when the loop does not run.

        Args:
            prompt: text, token ids, or chat messages ({"role", "content"} mappings).
            params: how to sample; `SamplingParams()` by default.
            request_id: a name of your own that is not in use.
            priority: who has the higher one is preempted last; with `scheduling_policy="priority"` it is also
                admitted first.
            prompt_embeds: instead of a prompt: [tokens, hidden] numbers that go into the first layer in the place of
                token embeddings, such as image patches; `embed` makes them of tokens, to put text around.

        Raises:
            RequestError: it is empty, too long, malformed, or the queue is full.
        """
        self._loop.check_open()
        session = self.intake.session(prompt, params or SamplingParams(), request_id, priority, prompt_embeds)
        self._loop.add(session)
        return session.request.request_id

    @torch.no_grad()  # no inference tensor: callers change what they get
    def embed(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The model's embeddings of some tokens, [T, hidden] float32: what `prompt_embeds` stand in place of."""
        ids = torch.tensor(check_token_ids(token_ids, self.model_config.vocab_size), device=self.device)
        return bind(self._builder.backend).embedding(ids, self.parts.weights.embedding).float()

    def follow(
        self, prompt: Prompt | None, params: SamplingParams, inbox: Inbox, *, request_id: str | None = None,
        priority: int = 0, prompt_embeds: Any = None,
    ) -> Session:  # fmt: skip
        """As `add_request`, with events that go to `inbox`, for many at once; needs `start`, `forget` in the end."""
        session = self.intake.session(prompt, params, request_id, priority, prompt_embeds, inbox)
        self._loop.add(session)
        return session

    def forget(self, request_id: str) -> None:
        """Drop a request and its output; an unfinished one is aborted, an unknown one is fine."""
        self._loop.forget(request_id)

    def abort(self, request_id: str) -> bool:
        """End a request now, in any state; its text so far is kept. False if it is unknown or has ended."""
        return self._loop.abort(request_id)

    def output(self, request_id: str) -> RequestOutput:
        """What a request has produced so far; raises `KeyError` for one that is not known."""
        return self._loop.session(request_id).output()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Generate for all prompts and return their outputs in order.

        They begin together, however many they are: what finds no room in the waiting queue waits here, and leaves half
        of the queue to those who cannot wait. A `timeout_s` counts from the call.

        Args:
            prompts: one prompt or a list of them.
            sampling_params: one for all, or one per prompt.
            priority: as in `add_request`; one for all, or one per prompt.
            progress: show a bar.

        Raises:
            RequestError: a prompt cannot be served; nothing of the call is left running.
            KeyboardInterrupt: the user stopped it; its requests are aborted and their blocks are free again.
        """
        self.start()
        wishes = self.intake.pair(prompts, sampling_params, priority)
        sessions = [self.intake.session(prompt, params, None, rank) for prompt, params, rank in wishes]
        self._loop.check_servable(sessions)
        try:
            return collect(sessions, self._loop.add_patiently, progress)
        finally:
            for session in sessions:
                self._loop.forget(session.request.request_id)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> RequestOutput:
        """Answer a conversation through the model's chat template; otherwise as `generate`."""
        return self.generate([list(messages)], sampling_params, priority=priority)[0]

    def stream(
        self,
        prompt: Prompt | None = None,
        sampling_params: SamplingParams | None = None,
        **options: Any,
    ) -> TokenStream:
        """Tokens of one request as they come. Closing the iterator aborts the request.

        With n texts their events come mixed, each with its `choice`, and the last event of each has a
        `finish_reason`.

        Args:
            prompt: text, token ids, or chat messages.
            sampling_params: how to sample.
            **options: `priority`, `request_id` and `prompt_embeds`, as in `add_request`.

        Raises:
            RequestError: as `add_request`, a full queue included; or more texts are asked for than are kept, since
                which are best is known at the end.
        """
        if sampling_params is not None and sampling_params.num_choices > sampling_params.n:
            raise RequestError(
                f"best_of={sampling_params.best_of} with n={sampling_params.n} cannot be streamed; use generate(), or "
                f"best_of={sampling_params.n}"
            )
        self.start()
        request_id = self.add_request(prompt, sampling_params, **options)
        return TokenStream(self._loop.session(request_id), lambda: self._loop.forget(request_id))

    def astream(
        self, prompt: Prompt | None = None, sampling_params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[TokenEvent]:
        """`stream` for asyncio (`async for`); never blocks the event loop."""
        return self.stream(prompt, sampling_params, **options)

    def step(self) -> StepEvent | None:
        """Run one step in the calling thread, when the background loop does not run; None without work."""
        return self._loop.step()

    def reset_prefix_cache(self) -> None:
        """Forget what the prefix cache holds, between two steps: for measurements that repeat a prompt."""
        self.between_steps(lambda scheduler: scheduler.blocks.drop_prefixes())

    def between_steps(self, work: Callable[[Scheduler], None]) -> None:
        """Run `work` where no step is in flight, and wait for it: for measurements on `parts` and on who serves whom.

        No request goes on meanwhile. What it raises comes out here; `EngineClosedError` after `close`.
        """
        self._loop.between_steps(lambda: work(self._loop.scheduler))

    def _progress(self, task: str, fraction: float) -> None:
        self.events.append(ProgressEvent(time.perf_counter(), task, fraction))
        if self._on_progress is not None:
            self._on_progress(task, fraction)

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the background loop; does nothing if it runs. `generate` and `stream` do it themselves."""
        self._loop.start()

    def close(self) -> None:
        """Stop the loop, end all requests and give the memory back. Safe to repeat."""
        if self._loop.closed:
            return
        self._loop.close()
        with self._apply_lock:  # a change that is being built ends first, refused by the closed loop
            self._builder.close()
            del self._loop.parts, self._loop.scheduler
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.optimizations.weight_format}, {self.device.type}"
        return f"LLMEngine({self.config.model!r}, {state})"


@atexit.register
def _close_all() -> None:
    for engine in list(_open_engines):
        engine.close()

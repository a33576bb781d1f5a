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

from strata_lab.apply import ApplyReport, Fallback, FieldResult, Status
from strata_lab.build import Builder, changed_fields
from strata_lab.config import DEFAULT_MODEL, EngineConfig, Optimizations, engine_config, toggles, why_bad
from strata_lab.desk import EngineClosedError
from strata_lab.engine_loop import EngineLoop
from strata_lab.events import EventLog, ProgressEvent, StateEvent, StepEvent, TokenEvent
from strata_lab.expert_counts import WatchesExperts
from strata_lab.explain import explain
from strata_lab.intake import Intake, Prompt
from strata_lab.kernels import bind
from strata_lab.prompt_embeds import checked, placeholder_ids
from strata_lab.request import RequestOutput, check_token_ids
from strata_lab.sampling_params import SamplingParams
from strata_lab.scheduler import Scheduler
from strata_lab.session import Inbox, Session, TokenStream, collect
from strata_lab.settings import ConfigError, RequestError
from strata_lab.stats import EngineStats
from strata_lab.telemetry.ceilings import Ceilings
from strata_lab.weight_exchange import exchange, room_for

__all__ = ["EngineClosedError", "EngineStats", "LLMEngine"]

_open_engines: weakref.WeakSet[LLMEngine] = weakref.WeakSet()


class LLMEngine(WatchesExperts):
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
        )
        self._loop = EngineLoop(parts, scheduler, self.model_config, self.events)
        self.intake = Intake(self.tokenizer, self.model_config)
        _open_engines.add(self)

    # -- what it is ---------------------------------------------------------------------------------------------

    @property
    def optimizations(self) -> Optimizations:
        """The toggles in force, every None decided."""
        self._loop.check_open()
        return self._loop.parts.optimizations

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

    def explain(self) -> dict[str, str]:
        """Toggle name to what it does on this machine, or why it has no effect."""
        texts = explain(self.device.type)
        reasons = {
            "cuda_graph": self._builder.why_not_captured(),
            "batch_invariant": self._builder.why_invariant_anyway(),
        }
        return texts | {name: f"No effect here: {reason}." for name, reason in reasons.items() if reason}

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
        if (prompt is None) == (prompt_embeds is None):
            raise RequestError(
                "give a prompt or prompt_embeds, one of them; for both, put embed(tokens) beside the rows"
            )
        embeds = None
        if prompt is None:
            embeds = checked(prompt_embeds, self.model_config.hidden_size, self.device)
            prompt = placeholder_ids(len(embeds))
        session = self.intake.session(prompt, params or SamplingParams(), request_id, priority, embeds)
        self._loop.add(session)
        return session.request.request_id

    @torch.no_grad()  # no inference tensor: callers change what they get
    def embed(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The model's embeddings of some tokens, [T, hidden] float32: what `prompt_embeds` stand in place of."""
        ids = torch.tensor(check_token_ids(token_ids, self.model_config.vocab_size), device=self.device)
        self._loop.check_open()
        parts = self._loop.parts
        return bind(self._builder.backend).embedding(ids, parts.weights.embedding).float()

    def follow(
        self, prompt: Prompt, params: SamplingParams, inbox: Inbox, *, request_id: str | None = None, priority: int = 0
    ) -> Session:
        """As `add_request`, with events that go to `inbox`, for many at once; needs `start`, `forget` in the end."""
        session = self.intake.session(prompt, params, request_id, priority, inbox=inbox)
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
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Generate for all prompts and return their outputs in order.

        Args:
            prompts: one prompt or a list of them.
            sampling_params: one for all, or one per prompt.
            progress: show a bar.

        Raises:
            RequestError: a prompt cannot be served; nothing of the call is left running.
            KeyboardInterrupt: the user stopped it; its requests are aborted and their blocks are free again.
        """
        self.start()
        sessions = [
            self.intake.session(prompt, params, None, 0)
            for prompt, params in self.intake.pair(prompts, sampling_params)
        ]
        try:
            for session in sessions:
                self._loop.add(session)
            return collect(sessions, progress)
        finally:
            for session in sessions:
                self._loop.forget(session.request.request_id)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], sampling_params: SamplingParams | None = None
    ) -> RequestOutput:
        """Answer a conversation through the model's chat template."""
        return self.generate([list(messages)], sampling_params)[0]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> TokenStream:
        """Tokens of one request as they come. Closing the iterator aborts the request.

        With n texts their events come mixed, each with its `choice`, and the last event of each has a
        `finish_reason`. Raises `RequestError` for more texts than are kept: which are best is known at the end.
        """
        if sampling_params is not None and sampling_params.num_choices > sampling_params.n:
            raise RequestError(
                f"best_of={sampling_params.best_of} with n={sampling_params.n} cannot be streamed; use generate(), or "
                f"best_of={sampling_params.n}"
            )
        self.start()
        request_id = self.add_request(prompt, sampling_params)
        return TokenStream(self._loop.session(request_id), lambda: self._loop.forget(request_id))

    def astream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> AsyncIterator[TokenEvent]:
        """`stream` for asyncio (`async for`); never blocks the event loop."""
        return self.stream(prompt, sampling_params)

    def step(self) -> StepEvent | None:
        """Run one step in the calling thread, when the background loop does not run; None without work."""
        return self._loop.step()

    def reset_prefix_cache(self) -> None:
        """Forget what the prefix cache holds, between two steps: for measurements that repeat a prompt."""
        self._loop.between_steps(lambda: self._loop.scheduler.blocks.drop_prefixes())

    # -- settings -----------------------------------------------------------------------------------------------

    def apply(self, **changes: Any) -> ApplyReport:
        """Change toggles of the running engine; returns when they are in force or refused.

        New weights, pools and captures are built in the calling thread while the engine goes on; the swap happens
        between two steps. Where memory does not hold old and new weights, requests wait while one replaces the other
        (`weight_exchange.py`). Unknown names, bad values and impossible combinations are refused with a reason, change
        nothing, and leave the engine serving. Requests in flight continue; with a new KV pool their tokens are
        computed again.
        """
        with self._apply_lock:
            before = self.optimizations
            refused = {name: reason for name in changes if (reason := why_bad(name, changes[name]))}
            wanted = {name: value for name, value in changes.items() if name not in refused}
            report = self._change(before, wanted) if wanted else ApplyReport({})
            answers = {name: FieldResult("refused", getattr(before, name, None), why) for name, why in refused.items()}
            return ApplyReport({**answers, **report.results}, report.build_ms, report.swap_ms)

    def _change(self, before: Optimizations, wanted: Mapping[str, Any]) -> ApplyReport:
        started = time.perf_counter()
        try:
            wish = self._wish.replace(wanted)
            after = self._builder.resolve(wish, self._loop.parts)
            if room_for(self._builder, after, self._loop.parts) == "in place":
                build_ms, swap_ms = 0.0, exchange(self._builder, self._loop, after)
            else:
                parts = self._builder.parts(after, self._loop.parts)
                build_ms = (time.perf_counter() - started) * 1e3
                swap_ms = self._loop.swap(parts, self._builder.new_block_manager, build_ms)
        except (ConfigError, MemoryError, torch.OutOfMemoryError) as error:
            return ApplyReport({n: FieldResult("refused", getattr(before, n), str(error)) for n in wanted})
        self._wish = wish
        moved, costs, texts = changed_fields(before, after), {t.name: t.cost for t in toggles()}, self.explain()
        answers = {}
        for name in wanted:
            status: Status = "unchanged" if name not in moved else "rebuilt" if costs[name] == "rebuild" else "applied"
            note = texts[name] if texts[name].startswith("No effect") else ""
            answers[name] = FieldResult(status, getattr(after, name), note)
        return ApplyReport(answers, build_ms, swap_ms)

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

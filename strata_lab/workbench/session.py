"""`Workbench`: an engine and the panel that drives it, in one notebook cell.

It loads the engine beside the notebook, shows what it does, and carries out what the panel asks for. Handlers of widget
messages only queue work, because a notebook runs them on a thread of its choosing. Numbers come from engine events
only; no figure is made here.
"""

from __future__ import annotations

import atexit
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from strata_lab.config import DEFAULT_MODEL, engine_config
from strata_lab.sampling_params import RequestError, SamplingParams
from strata_lab.telemetry import bandwidth
from strata_lab.workbench.feed import Feed
from strata_lab.workbench.ladder import stages_of
from strata_lab.workbench.lanes import MAX_LANES, Lane, Run
from strata_lab.workbench.loads import label, load_requests, send
from strata_lab.workbench.opening import OpensDetails
from strata_lab.workbench.panels import Panels
from strata_lab.workbench.recording import Recorder, Replay

_open: dict[str, Workbench] = {}  # by name: re-running a cell replaces its workbench
_batches = itertools.count(1)  # of all workbenches: an engine may outlive one and meet the next
_loading = threading.Lock()  # one model is read at a time, so that impatient re-runs do not pile up


def _load_engine(model: str, options: dict[str, Any], on_progress: Callable[[str, float], None]) -> Any:
    from strata_lab.engine import LLMEngine  # torch is imported here, beside the notebook

    return LLMEngine(model, on_progress=on_progress, **options)


class Workbench(OpensDetails):
    """A page for an engine: toggles, prompt, streamed text, live speed, the climb, and panels that say why.

    Args:
        engine_or_model: a running `LLMEngine`, which stays yours, or what `LLMEngine` takes as a model; it is then
            loaded in the background, shown as it loads, and closed with the workbench.
        name: a workbench replaces (and closes) the previous one of the same name.
        **engine_options: as `LLMEngine(...)` takes them.

    Raises:
        ConfigError: an engine option is unknown or wrong.
        ValueError: engine options beside an engine that exists already.
    """

    def __init__(self, engine_or_model: Any = DEFAULT_MODEL, *, name: str = "workbench", **engine_options: Any) -> None:
        given = None if isinstance(engine_or_model, str | Path) else engine_or_model
        if given is None:
            engine_config(engine_or_model, **engine_options)  # mistakes are told in the cell that made them
        elif engine_options:
            raise ValueError(f"options {sorted(engine_options)} need a model's name; this engine exists, use apply()")
        previous = _open.pop(name, None)
        if previous is not None:
            previous.retire()
        self.name = name
        self.model = str(engine_or_model) if given is None else given.config.model
        super().__init__(Panels(self.model))
        self._owns_engine = given is None or isinstance(given, Replay)
        self._problem: BaseException | None = None
        self._ready = threading.Event()
        self._requests = ThreadPoolExecutor(1, "strata-requests")  # add and abort
        panels = self.panels
        panels.prompt.on_generate(lambda fields: self._queue(self._requests, self._generate_asked, fields))
        panels.prompt.on_stop(lambda: self._queue(self._requests, self.stop))
        panels.loads.on_load(lambda name: self._queue(self._requests, self._load_asked, name))
        panels.loads.on_stop(lambda: self._queue(self._requests, self.stop))
        panels.details_bar.on_open_asked(
            lambda name, is_open: self._queue(self._requests, self._open_asked, name, is_open)
        )
        panels.climb.on_restart(lambda: self._queue(self._requests, self.restart_climb))
        panels.causes.gauge.on_measure(lambda: self._queue(self._settings, self.measure_bandwidth))
        _open[name] = self
        if given is None:
            loader = threading.Thread(
                target=self._load, args=(engine_or_model, engine_options), name="strata-load", daemon=True
            )
            loader.start()
        else:
            self._attach(given)

    # -- life ---------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Any:
        """The engine; waits until it is loaded. Raises what loading raised."""
        return self.wait_ready()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def wait_ready(self, timeout_s: float | None = None) -> Any:
        """The engine, once it is loaded. Raises what loading raised, or `TimeoutError`."""
        if not self._ready.wait(timeout_s):
            raise TimeoutError(f"{self.model} is still loading after {timeout_s} s; wait longer, or look at the panel")
        return self._live()[0]

    def _live(self) -> tuple[Any, Feed]:
        self._ready.wait()
        if self._problem is not None:
            raise self._problem
        with self._lock:
            if self._engine is None or self._feed is None:
                raise RuntimeError("this workbench was closed; make a new one with Workbench(...)")
            return self._engine, self._feed

    def _load(self, model: Any, options: dict[str, Any]) -> None:
        header = self.panels.header
        try:
            with _loading:
                if self._closed:
                    return
                engine = _load_engine(model, options, lambda task, share: header.push(task=task, fraction=share))
            self._attach(engine)
        except Exception as error:  # shown in the panel, and raised to whoever waits
            self._problem = error
            header.push(state="failed", task="", problem=f"{self.model} could not be loaded. {error}")
        finally:
            self._ready.set()

    def _attach(self, engine: Any) -> None:
        with self._lock:
            if self._closed:
                engine.close()
                return
            engine.start()
            self._engine = engine
            self._feed = Feed(engine, self.panels)
            can_chat = bool(getattr(engine.tokenizer, "chat_template", None))
            enabled = not isinstance(engine, Replay)
            self.panels.header.push(state="ready", task="", fraction=-1.0, badge="" if enabled else engine.badge)
            self.panels.toggles.push(enabled=enabled)
            self.panels.prompt.push(enabled=enabled, can_chat=can_chat)
            self.panels.loads.push(enabled=enabled)
            self.panels.offer_experts(engine.model_config.num_experts)
            self._feed.start()
            self._queue(self._settings, self._watch_experts)
            self._ready.set()

    def close(self) -> None:
        """Stop the threads, end the requests, close an engine that was loaded here. Safe to repeat; the panel stays."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            engine, self._engine, feed = self._engine, None, self._feed
        for workers in (self._requests, self._settings):
            workers.shutdown(wait=False, cancel_futures=True)
        if engine is not None and feed is not None:
            for lane in feed.unfinished():
                engine.abort(lane.request_id)
                lane.end("abort")
            feed.stop()
            if feed.recorder is not None:
                feed.recorder.stop()
            if self._owns_engine:
                engine.close()
            elif engine.model_config.num_experts:
                engine.watch_experts(False)
        for workers in (self._requests, self._settings):
            workers.shutdown(wait=True)
        if engine is not None and not engine.closed and engine.model_config.num_experts:
            engine.watch_experts(False)  # it outlives the panel; nothing that was queued switches it on again
        self._feed = None
        self._ready.set()
        self.panels.toggles.push(enabled=False, busy={})
        self.panels.prompt.push(enabled=False, num_unfinished=0)
        self.panels.loads.push(enabled=False, num_unfinished=0)
        self.panels.header.push(state="closed", task="", fraction=-1.0)
        self.panels.flush()

    def retire(self) -> None:
        """Close, and remove the panel from every page."""
        self.close()
        self.panels.close()
        if _open.get(self.name) is self:
            del _open[self.name]

    # -- requests -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str,
        *,
        num_streams: int = 1,
        max_tokens: int = 256,
        temperature: float = 0.7,
        chat: bool = True,
        ignore_eos: bool = False,
    ) -> Run:
        """Send a prompt, as the Generate button does, and return at once; the text appears in the panel.

        Args:
            prompt: what to say.
            num_streams: copies that run side by side, each with its own seed.
            max_tokens: most tokens per stream.
            temperature: 0 always takes the most likely token.
            chat: send it as a chat message, where the model has a template.
            ignore_eos: go on to `max_tokens` whatever the model says.

        Raises:
            RequestError: the prompt or a number cannot be served; nothing of the call is left running.
        """
        engine, feed = self._live()
        if isinstance(num_streams, bool) or not isinstance(num_streams, int) or not 1 <= num_streams <= MAX_LANES:
            raise RequestError(f"streams={num_streams!r} must be a whole number from 1 to {MAX_LANES}; try 4")
        if not prompt.strip():
            raise RequestError("the prompt is empty; write something, for example 'Hello'")
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=ignore_eos)
        use_chat = chat and bool(getattr(engine.tokenizer, "chat_template", None))
        message = [{"role": "user", "content": prompt}] if use_chat else prompt
        batch = f"wb{next(_batches)}"
        lanes = [Lane(f"{self.name}-{batch}-{i + 1}", f"Stream {i + 1}", prompt) for i in range(num_streams)]
        feed.open(lanes, lambda: send(engine, [(message, params, lane) for lane in lanes]))
        return Run(lanes)

    def load(self, name: str) -> Run:
        """Send a load, as its button does: "A", "B" or "C" for an article's workload, "long" or "users".

        Raises:
            ValueError: there is no load of that name.
            RequestError: the engine cannot serve it; nothing of it is left running.
        """
        engine, feed = self._live()
        requests = load_requests(name, engine)
        batch = f"load{next(_batches)}"
        lanes = [
            Lane(f"{self.name}-{batch}-{i + 1}", r.title, f"{len(r.prompt)} tokens of text")
            for i, r in enumerate(requests)
        ]
        sent = list(zip([r.prompt for r in requests], [r.params for r in requests], lanes, strict=True))
        feed.open(lanes, lambda: send(engine, sent))
        feed.mark(label(name))
        return Run(lanes)

    def stop(self) -> None:
        """End all requests on screen; their text stays."""
        feed, engine = self._feed, self._engine
        if feed is not None and engine is not None:
            for lane in feed.unfinished():
                engine.abort(lane.request_id)

    def _generate_asked(self, fields: dict[str, Any]) -> None:
        prompt = fields.pop("prompt", "")
        try:
            self.generate(str(prompt), **fields)
            answer = {"ok": True, "text": ""}
        except Exception as error:  # in words, in the panel; what was typed stays there
            answer = {"ok": False, "text": str(error) or type(error).__name__}
        self.panels.prompt.push(answer={"number": next(self._count), **answer})

    def _load_asked(self, name: str) -> None:
        try:
            run = self.load(name)
            answer = {"ok": True, "text": f"{label(name)}: {len(run.lanes)} request{'s' * (len(run.lanes) > 1)} sent"}
        except Exception as error:  # in words, in the panel
            answer = {"ok": False, "text": str(error) or type(error).__name__}
        self.panels.loads.push(answer={"number": next(self._count), **answer})

    # -- panels -------------------------------------------------------------------------------------------------

    def show_climb(self, records: Any) -> None:
        """Show a measured climb in place of the live one: records of `strata climb`, or the path of their file.

        Raises:
            ValueError: there is no stage of a single stream in them.
        """
        self._live()[1].show_ladder(stages_of(records))

    def restart_climb(self) -> None:
        """Begin the live climb anew; the present setting is its first column."""
        feed = self._feed
        if feed is not None:
            feed.restart_ladder()

    def measure_bandwidth(self) -> None:
        """Measure how fast this machine reads memory, about ten seconds, and keep it. Nothing should run meanwhile."""
        engine, feed = self._live()
        feed.context.measuring = True
        try:
            bandwidth.ceiling(str(engine.device), engine.stats().bytes_per_step)
        finally:
            feed.context.measuring = False
            feed.ceiling_measured()

    # -- recordings ---------------------------------------------------------------------------------------------

    def record(self, path: str | Path) -> Recorder:
        """Write everything that happens from now on to a file, until the recorder's `stop`, or `close`.

        Use it in a `with` statement, or call `stop()`. `Workbench.replay(path)` shows it again.

        Raises:
            RuntimeError: a recording is going on.
            OSError: the file cannot be written.
        """
        engine, feed = self._live()
        return feed.record(Recorder(path, engine, self.model, feed.context.ceiling))

    @classmethod
    def replay(cls, path: str | Path, *, name: str = "replay") -> Workbench:
        """Show a recording without an engine, at the pace at which it was made; the header says what it is.

        Raises:
            ValueError: the file is no recording, or of another version.
        """
        return cls(Replay(path), name=name)

    # -- display ------------------------------------------------------------------------------------------------

    def _repr_mimebundle_(self, **_: Any) -> Any:
        bundle = self.panels.box._repr_mimebundle_() or {}
        return {**bundle, "text/plain": repr(self)}

    def __repr__(self) -> str:
        return f"Workbench({self.model!r})"


@atexit.register
def _close_all() -> None:
    for workbench in list(_open.values()):
        workbench.close()

"""`Workbench`: an engine and the panel that drives it, in one notebook cell.

It loads the engine beside the notebook, shows what it does, and carries out what the panel asks for. Handlers of widget
messages only queue work, because a notebook runs them on a thread of its choosing. Numbers come from engine events
only; no figure is made here.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from strata_lab.apply import ApplyReport
from strata_lab.config import DEFAULT_MODEL, engine_config, toggles
from strata_lab.sampling_params import RequestError, SamplingParams
from strata_lab.workbench.feed import Feed
from strata_lab.workbench.lanes import MAX_LANES, Lane, Run
from strata_lab.workbench.panels import Panels, answer_text

_open: dict[str, Workbench] = {}  # by name: re-running a cell replaces its workbench
_loading = threading.Lock()  # one model is read at a time, so that impatient re-runs do not pile up


def _load_engine(model: str, options: dict[str, Any], on_progress: Callable[[str, float], None]) -> Any:
    from strata_lab.engine import LLMEngine  # torch is imported here, beside the notebook

    return LLMEngine(model, on_progress=on_progress, **options)


class Workbench:
    """A panel for an engine: toggles, prompt, streamed text, live speed.

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
        self.panels = Panels(self.model)
        self._engine: Any = None
        self._owns_engine = given is None
        self._feed: Feed | None = None
        self._problem: BaseException | None = None
        self._ready = threading.Event()
        self._lock = threading.RLock()
        self._closed = False
        self._busy: dict[str, Any] = {}
        self._answers: dict[str, dict[str, Any]] = {}
        self._count = itertools.count(1)
        self._requests = ThreadPoolExecutor(1, "strata-requests")  # add and abort
        self._settings = ThreadPoolExecutor(1, "strata-settings")  # apply, which can take long
        self.panels.toggles.on_change_asked(self._change_asked)
        self.panels.prompt.on_generate(lambda fields: self._queue(self._requests, self._generate_asked, fields))
        self.panels.prompt.on_stop(lambda: self._queue(self._requests, self.stop))
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
            self.panels.header.push(state="ready", task="", fraction=-1.0)
            self.panels.toggles.push(enabled=True)
            self.panels.prompt.push(enabled=True, can_chat=can_chat)
            self._feed.start()
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
            if self._owns_engine:
                engine.close()
        for workers in (self._requests, self._settings):
            workers.shutdown(wait=True)
        self._feed = None
        self._ready.set()
        self.panels.toggles.push(enabled=False, busy={})
        self.panels.prompt.push(enabled=False, num_unfinished=0)
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
    ) -> Run:
        """Send a prompt, as the Generate button does, and return at once; the text appears in the panel.

        Args:
            prompt: what to say.
            num_streams: copies that run side by side, each with its own seed.
            max_tokens: most tokens per stream.
            temperature: 0 always takes the most likely token.
            chat: send it as a chat message, where the model has a template.

        Raises:
            RequestError: the prompt or a number cannot be served; nothing of the call is left running.
        """
        engine, feed = self._live()
        if isinstance(num_streams, bool) or not isinstance(num_streams, int) or not 1 <= num_streams <= MAX_LANES:
            raise RequestError(f"streams={num_streams!r} must be a whole number from 1 to {MAX_LANES}; try 4")
        if not prompt.strip():
            raise RequestError("the prompt is empty; write something, for example 'Hello'")
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
        use_chat = chat and bool(getattr(engine.tokenizer, "chat_template", None))
        message = [{"role": "user", "content": prompt}] if use_chat else prompt
        batch = f"wb{next(self._count)}"
        lanes = [Lane(f"{self.name}-{batch}-{i + 1}", f"Stream {i + 1}", prompt) for i in range(num_streams)]
        feed.open(lanes, lambda: _send(engine, message, params, lanes))
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

    # -- settings -----------------------------------------------------------------------------------------------

    def apply(self, **changes: Any) -> ApplyReport:
        """Change toggles as the panel does, and wait for the answer."""
        self.wait_ready()
        with self._lock:
            self._busy.update(changes)
            self.panels.toggles.push(busy=dict(self._busy))
        report: ApplyReport = self._settings.submit(self._change, changes).result()
        return report

    def _change_asked(self, name: str, value: Any) -> None:
        with self._lock:
            if name in self._busy or self._closed:
                return  # the panel shows what it is busy with
            self._busy[name] = value
            self.panels.toggles.push(busy=dict(self._busy))
        self._queue(self._settings, self._change, {name: value})

    def _change(self, changes: dict[str, Any]) -> ApplyReport:
        feed, engine = self._feed, self._engine
        try:
            if feed is None or engine is None:
                raise RuntimeError("there is no engine, it is loading or closed")
            feed.rebuilding = any(toggle.cost == "rebuild" and toggle.name in changes for toggle in toggles())
            report: ApplyReport = engine.apply(**changes)
        except Exception as error:  # shown in the panel, and raised to whoever waits
            text = f"Failed, nothing was changed. {type(error).__name__}: {error}"
            self._answer(dict.fromkeys(changes, ("refused", text)))
            raise
        finally:
            if feed is not None:
                feed.change_ended()
        self._answer({name: (result.status, answer_text(result, report)) for name, result in report.results.items()})
        return report

    def _answer(self, answers: dict[str, tuple[str, str]]) -> None:
        with self._lock:
            for name, (status, text) in answers.items():
                self._busy.pop(name, None)
                self._answers[name] = {"status": status, "text": text, "number": next(self._count)}
            if self._feed is not None:
                with contextlib.suppress(RuntimeError):  # closed meanwhile: the last values stay
                    self._feed.show_settings()
            self.panels.toggles.push(busy=dict(self._busy), answers=dict(self._answers))

    def _queue(self, workers: ThreadPoolExecutor, work: Callable[..., Any], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # closed between the click and now: the panel says so
            workers.submit(work, *arguments)

    # -- display ------------------------------------------------------------------------------------------------

    def _repr_mimebundle_(self, **_: Any) -> Any:
        bundle = self.panels.box._repr_mimebundle_() or {}
        return {**bundle, "text/plain": repr(self)}

    def __repr__(self) -> str:
        return f"Workbench({self.model!r})"


def _send(engine: Any, message: Any, params: SamplingParams, lanes: list[Lane]) -> None:
    """Queue one request per lane; when one cannot be served, none is left running."""
    for i, lane in enumerate(lanes):
        lane.sent_s = time.perf_counter()
        try:
            engine.add_request(message, params, request_id=lane.request_id)
        except Exception:
            for sent in lanes[:i]:
                engine.abort(sent.request_id)
            raise


@atexit.register
def _close_all() -> None:
    for workbench in list(_open.values()):
        workbench.close()

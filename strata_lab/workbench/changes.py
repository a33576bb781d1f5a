"""Changes of settings that the panel or a cell asks for: one at a time, each with an answer that is shown.

It is the part of `Workbench` that talks to `engine.apply`; handlers only queue work, because a notebook runs them on a
thread of its choosing.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from strata_lab.apply import ApplyReport
from strata_lab.config import toggles
from strata_lab.workbench.feed import Feed
from strata_lab.workbench.panels import Panels, answer_text


class SettingChanges:
    """Applies changes and shows the answers.

    Attributes:
        panels: where they are shown.
    """

    def __init__(self, panels: Panels) -> None:
        self.panels = panels
        self._engine: Any = None
        self._feed: Feed | None = None
        self._lock = threading.RLock()
        self._closed = False
        self._busy: dict[str, Any] = {}
        self._answers: dict[str, dict[str, Any]] = {}
        self._count = itertools.count(1)
        self._settings = ThreadPoolExecutor(1, "strata-settings")  # apply, which can take long
        panels.toggles.on_change_asked(self._change_asked)

    def wait_ready(self, timeout_s: float | None = None) -> Any:
        """The engine, once there is one."""
        raise NotImplementedError

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

"""The base of every widget: strict keyword arguments, a stable repr, and coalesced pushes.

A notebook kernel silently drops widget messages when too many are sent, and a page falls behind long before that. So
nothing here sends directly: `push` collects state (latest value wins) and records (all of them, in order), which leave
together at most `FLUSHES_PER_S` times a second. Whatever was collected last is always sent, by a timer if nobody
pushes again. It does not decide what to show.
"""

from __future__ import annotations

import difflib
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anywidget

FLUSHES_PER_S = 10  # one flush is at most one state and one stream message, so at most 20 messages a second
_THEME = Path(__file__).parent / "_theme.css"
_IMPORT = re.compile(r'^import \{[^}]*\} from "(\.{1,2}/[\w./]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=function|const)", re.MULTILINE)


def load_view(folder: str | Path) -> str:
    """The ES module of the widget in `folder`, as one text.

    A front end gets each widget as a single module and cannot follow relative imports, so every `import {…} from
    "./x.js"` of `view.js` is replaced by the text of that file. Node tests import the files as they are.
    """
    path = Path(folder) / "view.js"
    view = path.read_text(encoding="utf-8")
    parts = [(path.parent / name).resolve().read_text(encoding="utf-8") for name in _IMPORT.findall(view)]
    return "\n".join([_EXPORT.sub("", _IMPORT.sub("", part)) for part in parts] + [_IMPORT.sub("", view)])


def load_style(folder: str | Path) -> str:
    """The colours and spacing that all widgets share, then the style sheet of the widget in `folder`."""
    return _THEME.read_text(encoding="utf-8") + "\n" + (Path(folder) / "style.css").read_text(encoding="utf-8")


class StrataWidget(anywidget.AnyWidget):
    """An anywidget whose synced traits are its interface.

    Raises:
        ValueError: for a keyword that is not a trait of the class, with the nearest name.
    """

    def __init__(self, **traits: Any) -> None:
        self._lock = threading.RLock()
        self._state: dict[str, Any] = {}
        self._records: list[tuple[dict[str, Any], Sequence[bytes]]] = []
        self._timer: threading.Timer | None = None
        self._last_flush_s = float("-inf")
        known = sorted(name for name in self.class_trait_names(sync=True) if not name.startswith("_"))
        for name in traits:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
                raise ValueError(f"{type(self).__name__} has no trait {name!r}; {hint}")
        super().__init__(**traits)

    def __repr__(self) -> str:
        """The class name only, so that saved outputs do not change from run to run."""
        return f"{type(self).__name__}()"

    def push(self, record: dict[str, Any] | None = None, buffers: Sequence[bytes] = (), **state: Any) -> None:
        """Set traits and send a record soon. Any thread may call it.

        A trait pushed again before the flush keeps only the later value. Records reach the views that are open at
        the time, in order and once.
        """
        with self._lock:
            self._state.update(state)
            if record is not None:
                self._records.append((record, buffers))
            self._flush_when_due()

    def flush(self) -> None:
        """Send what is waiting, now."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            state, self._state = self._state, {}
            records, self._records = self._records, []
            self._last_flush_s = time.monotonic()
            if self.comm is None:
                return
            if state:
                with self.hold_sync():
                    for name, value in state.items():
                        self.set_trait(name, value)
            if records:
                content = {"records": [record for record, _ in records], "buffers": [len(b) for _, b in records]}
                self.send(content, [buffer for _, buffers in records for buffer in buffers])

    def close(self) -> None:
        """Send what is waiting, then remove the widget from every page that shows it."""
        self.flush()
        if self.comm is not None:
            self.layout.close()  # a widget of its own, which its owner's close leaves behind
        super().close()

    def _on_kind(self, kind: str, handler: Callable[[dict[str, Any]], None]) -> None:
        """Call `handler(content)` for each message `{kind, ...}` from a page."""

        def receive(_widget: Any, content: Any, _buffers: Any) -> None:
            if isinstance(content, dict) and content.get("kind") == kind:
                handler(content)

        self.on_msg(receive)

    def _flush_when_due(self) -> None:
        wait_s = self._last_flush_s + 1 / FLUSHES_PER_S - time.monotonic()
        if wait_s <= 0:
            self.flush()
        elif self._timer is None:
            self._timer = threading.Timer(wait_s, self.flush)
            self._timer.daemon = True
            self._timer.start()

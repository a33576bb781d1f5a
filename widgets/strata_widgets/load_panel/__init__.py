"""Load at a click: the articles' workloads, a long prompt in the middle of everything, four users more."""

from __future__ import annotations

from collections.abc import Callable

import traitlets as t

from strata_widgets._base import StrataWidget, load_style, load_view


class LoadPanel(StrataWidget):
    """Buttons that send requests.

    Traits:
        loads: `{name, label, tip}` per button, in order.
        enabled: whether there is an engine to send to.
        num_unfinished: requests waiting or running; Stop ends them.
        answer: the last answer, `{number, ok, text}`: what was sent, or why nothing was.
    """

    _esm = load_view(__path__[0])
    _css = load_style(__path__[0])
    loads = t.List(t.Dict()).tag(sync=True)
    enabled = t.Bool(False).tag(sync=True)
    num_unfinished = t.Int(0).tag(sync=True)
    answer = t.Dict().tag(sync=True)

    def on_load(self, handler: Callable[[str], None]) -> None:
        """Call `handler(name)` when someone presses a button. It must return at once."""
        self._on_kind("load", lambda content: handler(str(content.get("name"))))

    def on_stop(self, handler: Callable[[], None]) -> None:
        """Call `handler()` when someone asks to stop."""
        self._on_kind("stop", lambda _content: handler())

"""A row of buttons, one per panel of details: which are open. What is closed is not on the page and gets no data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import traitlets as t

from strata_widgets._base import StrataWidget, load_style, load_view


class DetailBar(StrataWidget):
    """Opens and closes panels.

    Traits:
        panels: `{name, title, tip}` per panel, in order.
        shown: names of those that are open.
        note: what there is no panel for, and why.
    """

    _esm = load_view(__path__[0])
    _css = load_style(__path__[0])
    panels = t.List(t.Dict()).tag(sync=True)
    shown = t.List(t.Unicode()).tag(sync=True)
    note = t.Unicode("").tag(sync=True)

    def on_open_asked(self, handler: Callable[[str, bool], None]) -> None:
        """Call `handler(name, whether to open it)` when someone presses a button. It must return at once."""

        def receive(content: dict[str, Any]) -> None:
            if isinstance(content.get("name"), str):
                handler(content["name"], bool(content.get("open")))

        self._on_kind("open", receive)

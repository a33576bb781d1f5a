"""The settings of a running engine: one control per toggle, each showing the value in force.

The controls are made from plain descriptions, so this file names no toggle. A control never shows a wish: it changes
when the engine has answered, and goes back by itself when the engine refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import traitlets as t

from strata_widgets._base import StrataWidget, load_style, load_view


class TogglePanel(StrataWidget):
    """One control per toggle.

    Traits:
        toggles: one description per control, in order: `{name, topic, doc, kind, choices, minimum, maximum, optional,
            cost, lossless, off, default, value, effect}`. Those of the first topic are always on the page, the others
            folded under the names of theirs. `value` is the value in force; `effect` says what the toggle does on this
            machine, or why it has no effect. The rest is as in `strata_lab.config.Toggle`.
        busy: name to the value asked for, while the engine works on it.
        answers: name to the last answer, `{status, text, number}`; status is "applied", "rebuilt", "refused" or
            "unchanged"; `number` counts answers, the highest is the latest.
        enabled: whether there is an engine to change.
    """

    _esm = load_view(__path__[0])
    _css = load_style(__path__[0])
    toggles = t.List(t.Dict()).tag(sync=True)
    busy = t.Dict().tag(sync=True)
    answers = t.Dict().tag(sync=True)
    enabled = t.Bool(False).tag(sync=True)

    def on_change_asked(self, handler: Callable[[str, Any], None]) -> None:
        """Call `handler(name, value)` for each change that someone asks for. It must return at once."""

        def receive(content: dict[str, Any]) -> None:
            if isinstance(content.get("name"), str):
                handler(content["name"], content.get("value"))

        self._on_kind("set", receive)

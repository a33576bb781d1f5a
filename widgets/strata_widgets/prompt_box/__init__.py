"""Where a prompt is written and sent: text, number of streams, length, temperature, Generate and Stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import traitlets as t

from strata_widgets._base import StrataWidget, load_style, load_view


class PromptBox(StrataWidget):
    """A prompt and how to sample from it.

    Traits:
        prompt, num_streams, max_tokens, temperature, chat: what is in the fields. `chat` sends the prompt as a chat
            message in the model's own template.
        can_chat: whether the model has a chat template.
        enabled: whether there is an engine to send to.
        num_unfinished: requests waiting or running; Stop ends them.
        answer: the last answer, `{number, ok, text}`; `text` says in words what was wrong with what was asked.
    """

    _esm = load_view(__path__[0])
    _css = load_style(__path__[0])
    prompt = t.Unicode("").tag(sync=True)
    num_streams = t.Int(1).tag(sync=True)
    max_tokens = t.Int(256).tag(sync=True)
    temperature = t.Float(0.7).tag(sync=True)
    chat = t.Bool(True).tag(sync=True)
    can_chat = t.Bool(False).tag(sync=True)
    enabled = t.Bool(False).tag(sync=True)
    num_unfinished = t.Int(0).tag(sync=True)
    answer = t.Dict().tag(sync=True)

    def on_generate(self, handler: Callable[[dict[str, Any]], None]) -> None:
        """Call `handler(fields)` when someone asks to generate; `fields` holds the five fields above, unchecked."""
        self._on_kind("generate", lambda content: handler(dict(content.get("fields") or {})))

    def on_stop(self, handler: Callable[[], None]) -> None:
        """Call `handler()` when someone asks to stop."""
        self._on_kind("stop", lambda _content: handler())

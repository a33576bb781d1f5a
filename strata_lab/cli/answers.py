"""One streamed answer with its timing, as the terminal sees it.

The times are the client's: they include what the engine's own figures leave out, the hand-over of text between
threads. Prefill and decode are kept apart. It prints nothing; the caller says where text goes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from strata_lab.sampling_params import SamplingParams


@dataclasses.dataclass
class Answer:
    """What one streamed request gave, with client-side timing. Prefill and decode are kept apart.

    Attributes:
        prompt_tokens: how long the prompt was.
        sent_s, first_s, last_s: when it was sent and when the first and last token came.
    """

    prompt_tokens: int
    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None

    def figures(self) -> dict[str, float | None]:
        """TTFT, prefill tok/s and decode tok/s; None where there were too few tokens."""
        ttft, n = self.first_s - self.sent_s, len(self.token_ids)
        decode = (n - 1) / (self.last_s - self.first_s) if n > 1 and self.last_s > self.first_s else None
        if not n:
            return {"ttft_ms": None, "prefill_tok_s": None, "decode_tok_s": None}
        return {"ttft_ms": ttft * 1e3, "prefill_tok_s": self.prompt_tokens / ttft, "decode_tok_s": decode}

    def summary(self) -> str:
        """One line for people."""
        f = self.figures()
        parts = [f"prefill {self.prompt_tokens} tokens"]
        if f["ttft_ms"] is not None:
            parts[0] += f", {f['prefill_tok_s']:.0f} tok/s, first token after {f['ttft_ms']:.0f} ms"
        rate = f", {f['decode_tok_s']:.1f} tok/s" if f["decode_tok_s"] is not None else ""
        return " | ".join([*parts, f"decode {len(self.token_ids)} tokens{rate}", f"ended by {self.finish_reason}"])


def answer(engine: Any, prompt: Any, params: SamplingParams, show: Callable[[str], Any]) -> Answer:
    """Stream one request to `show`. Ctrl+C ends it and keeps the text so far (finish reason "abort")."""
    ids = engine.tokenizer.apply_chat_template(prompt) if isinstance(prompt, list) else engine.tokenizer.encode(prompt)
    result = Answer(len(ids), time.perf_counter())
    stream = engine.stream(prompt, params)
    try:
        for event in stream:
            now = time.perf_counter()
            if event.token_id >= 0:
                result.first_s = result.first_s or now
                result.last_s = now
                result.token_ids.append(event.token_id)
            result.text += event.text
            show(event.text)
            result.finish_reason, result.error = event.finish_reason, event.error
    except KeyboardInterrupt:
        stream.close()
        result.finish_reason = "abort"
    return result

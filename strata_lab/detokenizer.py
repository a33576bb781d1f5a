"""Turns one request's tokens into text as they come, never saying what it might have to take back.

Three things make a fresh token's text uncertain: a character whose bytes are spread over tokens, a decoder that looks
at the token before, and the beginning of a stop string. Each is held back exactly as long as needed, so the pieces put
together are the text that decoding all tokens at once gives, cut at the first stop string. Work per token does not grow
with the length of the text. Torch-free.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from strata_lab.sampling_params import SamplingParams
from strata_lab.tokenizer import Tokenizer

_CONTEXT_TOKENS = 8  # prompt tokens that a decoder may look back on (one would do for the decoders that exist)
_MAX_HELD_TOKENS = 8  # a character has at most 4 bytes, so at most 4 tokens


class _Decoder(Protocol):
    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class _ByteDecoder:
    """Byte-level tokens: their bytes through an incremental UTF-8 decoder, which keeps at most three bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """Any other decoder: decode the last few tokens with and without the new ones, and take the difference.

    `context` has been said, `fresh` has not. Byte-fallback tokens wait for the end of their run, since one bad byte
    changes how the whole run reads.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        tail = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._context = [] if tail and tokenizer.is_byte_token(tail[-1]) else tail  # never from inside a run of bytes
        self._fresh: list[int] = []

    def push(self, token_id: int) -> str:
        if self._tokenizer.backend.id_to_token(token_id) is None:
            return ""
        self._fresh.append(token_id)
        if self._tokenizer.is_byte_token(token_id):
            return ""
        text = self._difference()
        if text.endswith("\ufffd") and len(self._fresh) < _MAX_HELD_TOKENS:
            return ""
        # A first space that was stripped has no text, yet keeps the next one from being stripped.
        self._context = self._fresh if text else (self._context + self._fresh)[-_CONTEXT_TOKENS:]
        self._fresh = []
        return text

    def flush(self) -> str:
        text = self._difference()
        self._fresh = []
        return text

    def _difference(self) -> str:
        if not self._fresh:
            return ""
        said = self._tokenizer.decode(self._context, skip_special_tokens=False)
        return self._tokenizer.decode(self._context + self._fresh, skip_special_tokens=False)[len(said) :]


class Detokenizer:
    """The text of one request.

    Attributes:
        stopped: a stop string has been found. The text ends before it, or after it with `include_stop_str_in_output`.
            Of several, the one that is complete first counts (the longer one if two end together), however the text
            is cut into tokens. With `min_tokens` they are looked for in the text of the tokens from there on.
        stop_string: which one it was.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self.stopped = False
        self.stop_string: str | None = None
        self._decoder: _Decoder = (
            _ByteDecoder(tokenizer) if tokenizer.is_byte_level else _WindowDecoder(tokenizer, prompt_token_ids)
        )
        self._skipped = tokenizer.special_token_ids if params.skip_special_tokens else frozenset()
        self._stop = params.stop
        self._include_stop = params.include_stop_str_in_output
        self._not_yet = params.min_tokens - 1  # tokens before the one that may end the text
        self._held = ""  # decoded, but maybe the beginning of a stop string
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """What has been said so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, token_id: int) -> str:
        """Take the next output token and return the text that has become certain, often that token's, maybe ""."""
        early, self._not_yet = self._not_yet > 0, self._not_yet - 1
        if self.stopped or token_id in self._skipped:
            return ""
        text = self._decoder.push(token_id)
        return self._give(text) if early else self._say(text, final=False)

    def flush(self) -> str:
        """The output has ended: return what was held back. Half a character becomes U+FFFD."""
        if self.stopped:
            return ""
        return self._say(self._decoder.flush(), final=True)

    def _say(self, new: str, *, final: bool) -> str:
        if not self._stop:
            return self._give(new)
        buffer = self._held + new
        certain, self._held = self._cut(buffer)
        if final and not self.stopped:
            certain, self._held = buffer, ""
        return self._give(certain)

    def _give(self, certain: str) -> str:
        if certain:
            self._pieces.append(certain)
        return certain

    def _cut(self, buffer: str) -> tuple[str, str]:
        """Split into what is certain and what must wait; a complete stop string sets `stopped`."""
        matches = ((buffer.find(s), s) for s in self._stop)
        ends = [(start + len(s), start) for start, s in matches if start >= 0]
        if ends:
            self.stopped = True
            end, start = min(ends)
            self.stop_string = next(s for s in self._stop if buffer.startswith(s, start) and start + len(s) == end)
            return buffer[: end if self._include_stop else start], ""
        hold = min(_first_prefix(buffer, s) for s in self._stop)
        return buffer[:hold], buffer[hold:]


def _first_prefix(text: str, stop: str) -> int:
    """Where the longest ending of `text` that begins `stop` starts; len(text) if there is none."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return len(text) if start < 0 else start

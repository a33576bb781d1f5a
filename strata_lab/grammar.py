"""Holds a request's output to its structure: compiles what was asked for, and masks the logits of all other tokens.

Compiling happens in the caller's thread and is kept per structure; the engine's thread only advances matchers and
fills bit masks, some microseconds a row. A matcher is a function of the request's output tokens, so preemption, a new
runner or another sampler needs nothing saved: it is made again and reads the output. xgrammar is imported by the first
structure that is compiled.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strata_lab.request import Request
from strata_lab.settings import RequestError
from strata_lab.structured_outputs import StructuredOutputs, bad
from strata_lab.tokenizer import Tokenizer

MAX_KEPT = 256  # compiled structures; some 10 to 500 KB each
MAX_WHITESPACE = 32  # characters in a row where JSON allows any number: small models otherwise indent without end
BITS = 32  # tokens per word of a mask
_PLACE = re.compile(r"^\[[^]]*\] \S+:\d+: ")  # "[time] file:line: ", how xgrammar's messages begin
# Control characters other than a line feed, as they are and as byte-fallback tokens: JSON has none of them in a string,
# and xgrammar 0.2 lets them into those with a maxLength.
_CONTROL = re.compile(rb"[\x00-\x09\x0b-\x1f]|^<0x(0[0-9B-Fb-f]|1[0-9A-Fa-f])>$")


class Grammars:
    """Compiled structures for one tokenizer.

    Args:
        tokenizer: of the model.
        vocab_size: logits of a row.
        eos_token_ids: what ends a text that is complete.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self.tokenizer, self.vocab_size, self.eos_token_ids = tokenizer, vocab_size, eos_token_ids
        self._kept: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._compilers: dict[bool, Any] = {}  # by whether it is for JSON
        self._lock = threading.Lock()

    def compiled(self, wish: StructuredOutputs) -> Any:
        """What `TokenMatcher` follows; the same object for the same structure.

        Raises `RequestError` where the structure cannot be compiled, xgrammar is missing, or the model has no
        tokenizer or no end token.
        """
        with self._lock:
            found = self._kept.get(wish.key)
            if found is None:
                found = self._kept[wish.key] = self._compile(wish)
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(wish.key)
            return found

    def _compile(self, wish: StructuredOutputs) -> Any:
        for_json = wish.kind in ("json", "json_object")
        if for_json not in self._compilers:
            self._compilers[for_json] = self._new_compiler(for_json)
        compiler, source = self._compilers[for_json], getattr(wish, wish.kind)
        try:
            if wish.kind == "json":
                return compiler.compile_json_schema(source, max_whitespace_cnt=MAX_WHITESPACE)
            if wish.kind == "json_object":
                return compiler.compile_json_schema(
                    '{"type": "object"}', strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE
                )
            if wish.kind == "regex":
                return compiler.compile_regex(source)
            if wish.kind == "choice":
                source = "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in source)
            return compiler.compile_grammar(source)
        except (RuntimeError, ValueError) as error:  # xgrammar's own errors are both
            reason = _PLACE.sub("", str(error).strip()).rstrip(".")
            raise RequestError(bad(wish.kind, getattr(wish, wish.kind), f"cannot be compiled: {reason}")) from error

    def _new_compiler(self, for_json: bool) -> Any:
        try:
            import xgrammar
        except ImportError as error:
            raise RequestError(
                f"structured_outputs need the package xgrammar ({error}); install it with: "
                "pip install 'strata-lab[structured]', or leave structured_outputs out"
            ) from error
        if self.tokenizer is None:
            raise RequestError("structured_outputs need a tokenizer and this model has none; leave them out")
        if not self.eos_token_ids:
            raise RequestError("structured_outputs need an end token and this model names none; leave them out")
        words, kind = vocabulary(self.tokenizer)
        if for_json:
            words = [b"" if _CONTROL.search(word) else word for word in words]
        known = words[: self.vocab_size] + [b""] * (self.vocab_size - len(words))  # b"": never allowed
        info = xgrammar.TokenizerInfo(
            known, getattr(xgrammar.VocabType, kind), vocab_size=self.vocab_size,
            stop_token_ids=sorted(self.eos_token_ids),
        )  # fmt: skip
        return xgrammar.GrammarCompiler(info, max_threads=max(1, (os.cpu_count() or 2) // 2))


def vocabulary(tokenizer: Tokenizer) -> tuple[list[bytes], str]:
    """What each token id stands for, special tokens for nothing, and how that is written, in xgrammar's terms."""
    special, size = tokenizer.special_token_ids, tokenizer.vocab_size
    if tokenizer.is_byte_level:
        return [b"" if i in special else tokenizer.token_bytes(i) for i in range(size)], "RAW"
    names = (tokenizer.backend.id_to_token(i) or "" for i in range(size))
    return [b"" if i in special else name.encode() for i, name in enumerate(names)], "BYTE_FALLBACK"


class TokenMatcher:
    """Follows the output of one request.

    Attributes:
        error: why it cannot go on; None while it can.
    """

    def __init__(self, request: Request) -> None:
        import xgrammar

        self.request = request
        self.error: str | None = None
        self._matcher = xgrammar.GrammarMatcher(request.grammar)
        self._num_read = request.num_prompt_tokens

    def fill(self, mask: np.ndarray, row: int) -> None:
        """Read the tokens that are new, and write which may come next into a row of `mask` [R, V / 32] int32."""
        tokens = self.request.token_ids
        for position in range(self._num_read, len(tokens)):
            if not self._matcher.accept_token(tokens[position]):
                place = position - self.request.num_prompt_tokens
                self.error = f"token {tokens[position]} does not fit the structure at output position {place}"
                return
        self._num_read = len(tokens)
        if self._matcher.is_terminated():
            self.error = "the structure was complete and the request went on"
            return
        if not self._matcher.fill_next_token_bitmask(mask, row):
            mask[row] = -1  # every token may come


class GrammarMasks:
    """Keeps the matchers of the requests in the current batch, and applies their masks."""

    def __init__(self) -> None:
        self._matchers: dict[str, TokenMatcher] = {}

    def apply(self, logits: Tensor, requests: Sequence[tuple[int, Request]]) -> dict[int, str]:
        """Set what may not come next to -inf in rows of `logits` [B, V] float32; error texts by row.

        `requests` are the rows that have a grammar, with their numbers; all others are forgotten.
        """
        if not requests:
            self.clear()
            return {}
        matchers: dict[str, TokenMatcher] = {}
        errors: dict[int, str] = {}
        mask = np.full((len(requests), -(-logits.shape[1] // BITS)), -1, dtype=np.int32)
        for place, (row, request) in enumerate(requests):
            matcher = self._matchers.get(request.request_id)
            if matcher is None or matcher.request is not request:  # new, back from preemption, or an old name again
                matcher = TokenMatcher(request)
            matchers[request.request_id] = matcher
            matcher.fill(mask, place)
            if matcher.error:
                errors[row] = matcher.error
        self._matchers = matchers
        rows = torch.tensor([row for row, _ in requests], device=logits.device)
        words = torch.from_numpy(mask).to(logits.device)
        bits = words.unsqueeze(2) >> torch.arange(BITS, dtype=torch.int32, device=logits.device)  # [R, V / 32, 32]
        allowed = (bits & 1).flatten(1)[:, : logits.shape[1]].bool()
        logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)
        return errors

    def clear(self) -> None:
        """Forget all requests."""
        self._matchers = {}

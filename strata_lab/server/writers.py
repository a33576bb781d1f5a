"""Answers as bytes: completions and `/generate`, whole and streamed; the chat's are in `chat_writer.py`.

A stream's pieces are made of JSON that is ready but for the text, so a token costs one string encoding. Tokens that are
ready together and belong to one answer become one piece; counts of tokens are in `usage` and nowhere else.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from strata_lab.request import RequestOutput, TokenLogprobs
from strata_lab.server.bridge import Events, Reply
from strata_lab.server.errors import ApiError
from strata_lab.session import Session

DONE = b"data: [DONE]\n\n"
NULL = b"null"


def now() -> int:
    """Seconds since 1970, as OpenAI's `created`."""
    return int(time.time())


@dataclass(frozen=True)
class Envelope:
    """What all pieces of an answer share.

    Attributes:
        id, object, model: OpenAI's fields.
        created: seconds since 1970.
        usage_wanted: end a stream with the numbers of tokens.
        warnings: sentences about what had no effect.
    """

    id: str
    object: str
    model: str
    created: int
    usage_wanted: bool
    warnings: list[str]

    def as_dict(self) -> dict[str, Any]:
        """The beginning of a document."""
        shared = {"id": self.id, "object": self.object, "created": self.created, "model": self.model}
        return shared | ({"warnings": self.warnings} if self.warnings else {})


def around_piece(envelope: Envelope) -> tuple[bytes, bytes]:
    """What comes before the number of an answer in a piece of a stream, and what comes behind the answer."""
    head = b"data: " + orjson.dumps(envelope.as_dict())[:-1] + b',"choices":[{"index":'
    return head, b'}],"usage":null}\n\n' if envelope.usage_wanted else b"}]}\n\n"


@dataclass
class Piece:
    """New text of one answer: the events of one wake-up put together."""

    text: str
    finish_reason: str | None
    error: str | None
    logprobs: list[TokenLogprobs]
    token_ids: list[int]


def gathered(events: Events, sessions: list[Session]) -> dict[int, Piece]:
    """Events of a wake-up by answer."""
    pieces: dict[int, Piece] = {}
    for number, event in events:
        piece = pieces.get(number)
        if piece is None:
            piece = pieces[number] = Piece("", None, None, [], [])
        piece.text += event.text
        piece.finish_reason, piece.error = event.finish_reason, event.error
        if event.token_id >= 0:
            piece.token_ids.append(event.token_id)
            kept = sessions[number].request.logprobs
            if event.index < len(kept):
                piece.logprobs.append(kept[event.index])
    return pieces


def usage(reply: Reply) -> dict[str, Any]:
    """Numbers of tokens; a prompt counts once, however many answers it has."""
    firsts = [session.request for session in reply.firsts]
    prompt = sum(request.num_prompt_tokens for request in firsts)
    output = sum(session.request.num_output_tokens for session in reply.sessions)
    cached = sum(r.num_cached_tokens for r in firsts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def end_of_stream(envelope: Envelope, reply: Reply) -> bytes:
    """The last lines of a stream, with the numbers of tokens where they are wanted."""
    if not envelope.usage_wanted:
        return DONE
    last = envelope.as_dict() | {"choices": [], "usage": usage(reply)}
    return b"data: " + orjson.dumps(last) + b"\n\n" + DONE


def failure(reply: Reply) -> ApiError | None:
    """Why there is no whole answer to give; None if there is."""
    requests = [session.request for session in reply.sessions]
    if error := next((r.error or "the step failed" for r in requests if r.finish_reason == "error"), None):
        return ApiError(500, error, code="engine_error")
    if any(r.finish_reason == "abort" for r in requests):
        return ApiError(
            503, "the request was ended because the server stops; send it again", code="aborted", retry_after_s=5
        )
    if all(r.finish_reason == "timeout" and not r.num_output_tokens for r in requests):
        return ApiError(504, "the deadline passed before the first token; try a larger timeout_s", code="timeout")
    return None


def error_piece(error: ApiError) -> bytes:
    """An error inside a stream."""
    return b"data: " + orjson.dumps(error.body()) + b"\n\n"


def ending_error(reason: str | None, message: str | None) -> bytes:
    """What a stream says after an answer that did not end well; nothing for one that did."""
    if reason == "error":
        return error_piece(ApiError(500, message or "the step failed", code="engine_error"))
    if reason == "abort":
        return error_piece(ApiError(503, "the request was ended because the server stops", code="aborted"))
    return b""


class Writer(Protocol):
    """Turns events into an answer."""

    def piece(self, events: Events) -> bytes:
        """More of a stream; may be empty."""
        ...

    def end(self) -> bytes:
        """The end of a stream."""
        ...

    def whole(self) -> bytes:
        """The whole answer."""
        ...


class CompletionWriter:
    """`/v1/completions`.

    Args:
        envelope: what all pieces share.
        reply: whose answers.
        prompts: texts to begin with, by answer, for `echo`; None without.
        tokenizer: for the tokens of log probabilities.
    """

    def __init__(self, envelope: Envelope, reply: Reply, prompts: list[str] | None, tokenizer: Any) -> None:
        self._envelope, self._reply, self._prompts, self._tokenizer = envelope, reply, prompts, tokenizer
        self._head, self._tail = around_piece(envelope)
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}

    def piece(self, events: Events) -> bytes:
        """See `Writer`."""
        out = []
        for number, piece in gathered(events, self._reply.sessions).items():
            text = piece.text
            if self._prompts is not None and number not in self._begun:
                self._begun.add(number)
                text = self._prompts[number] + text
            if text or piece.finish_reason is not None or piece.logprobs:
                reason = NULL if piece.finish_reason is None else orjson.dumps(piece.finish_reason)
                out += [
                    self._head, b"%d" % number, b',"text":', orjson.dumps(text), b',"logprobs":',
                    self._logprobs(number, piece.logprobs), b',"finish_reason":', reason, self._tail,
                ]  # fmt: skip
            out.append(ending_error(piece.finish_reason, piece.error))
        return b"".join(out)

    def _logprobs(self, number: int, entries: list[TokenLogprobs]) -> bytes:
        if not entries:
            return NULL
        table = completion_logprobs(entries, self._tokenizer, self._offsets.get(number, 0))
        self._offsets[number] = table["text_offset"][-1] + len(table["tokens"][-1])
        return orjson.dumps(table)

    def end(self) -> bytes:
        """See `Writer`."""
        return end_of_stream(self._envelope, self._reply)

    def whole(self) -> bytes:
        """See `Writer`."""
        choices = []
        for number, output in enumerate(self._reply.outputs()):
            start, entries = "", list(output.logprobs)
            if self._prompts is not None:
                start = self._prompts[number]
                if entries:
                    entries = echoed_logprobs(output) + entries
            table = completion_logprobs(entries, self._tokenizer, 0) if entries else None
            choice = {"index": number, "text": start + output.text, "logprobs": table}
            choice |= {"finish_reason": output.finish_reason, **prompt_logprobs(output, self._tokenizer)}
            choices.append(choice)
        return orjson.dumps(self._envelope.as_dict() | {"choices": choices, "usage": usage(self._reply)})


def completion_logprobs(entries: list[TokenLogprobs], tokenizer: Any, offset: int) -> dict[str, Any]:
    """The older shape: parallel lists."""
    tokens = [token_text(tokenizer, e.token_id) for e in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [None if math.isnan(e.logprob) else e.logprob for e in entries],
        "top_logprobs": [{token_text(tokenizer, i): p for i, p in e.top.items()} or None for e in entries],
        "text_offset": offsets,
    }


def echoed_logprobs(output: RequestOutput) -> list[TokenLogprobs]:
    """Those of the prompt's tokens; the first one has none, which is written as nan."""
    pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    return [entry or TokenLogprobs(token_id, math.nan, {}) for token_id, entry in pairs]


def prompt_logprobs(output: RequestOutput, tokenizer: Any) -> dict[str, Any]:
    """vLLM's shape: per token of the prompt, ids to log probabilities; nothing where none were asked for."""
    if not output.prompt_logprobs:
        return {}
    listed: list[dict[str, Any] | None] = []
    for entry in output.prompt_logprobs:
        found = {} if entry is None else {entry.token_id: entry.logprob, **entry.top}
        shown = {str(i): {"logprob": p, "decoded_token": token_text(tokenizer, i)} for i, p in found.items()}
        listed.append(shown or None)
    return {"prompt_logprobs": listed}


def token_text(tokenizer: Any, token_id: int) -> str:
    """A token by a text of its own: bytes that are no character are written as numbers, as OpenAI does."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    text: str = tokenizer.token_text(token_id)
    if "\ufffd" in text and tokenizer.is_byte_level:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(token_id))
    return text


class GenerateWriter:
    """`/generate`: text, tokens and times of each answer, and nothing around them."""

    def __init__(self, envelope: Envelope, reply: Reply, tokenizer: Any) -> None:
        self._envelope, self._reply, self._tokenizer = envelope, reply, tokenizer
        self._held: dict[int, Piece] = {}  # tokens whose text is not certain yet

    def piece(self, events: Events) -> bytes:
        """See `Writer`."""
        out = []
        for number, piece in gathered(events, self._reply.sessions).items():
            if held := self._held.pop(number, None):
                piece.token_ids, piece.logprobs = held.token_ids + piece.token_ids, held.logprobs + piece.logprobs
            if not piece.text and piece.finish_reason is None and self._tokenizer is not None:
                self._held[number] = piece
                continue
            facts = {"index": number, "text": piece.text, "token_ids": piece.token_ids}
            if piece.logprobs:
                facts["logprobs"] = [e.logprob for e in piece.logprobs]
            if piece.finish_reason is not None:
                facts["finish_reason"] = piece.finish_reason
            out += [b"data: ", orjson.dumps(facts), b"\n\n", ending_error(piece.finish_reason, piece.error)]
        return b"".join(out)

    def end(self) -> bytes:
        """See `Writer`."""
        return b"data: " + orjson.dumps({"outputs": self._outputs(), **self._totals()}) + b"\n\n" + DONE

    def whole(self) -> bytes:
        """See `Writer`."""
        texts = [output.text for output in self._reply.outputs()]
        return orjson.dumps({"text": texts, "outputs": self._outputs(), **self._totals()})

    def _totals(self) -> dict[str, Any]:
        warnings = {"warnings": self._envelope.warnings} if self._envelope.warnings else {}
        return {"model": self._envelope.model, "usage": usage(self._reply), **warnings}

    def _outputs(self) -> list[dict[str, Any]]:
        return [
            {
                "text": o.text, "token_ids": list(o.token_ids), "finish_reason": o.finish_reason, "ttft_ms": o.ttft_ms,
                "tpot_ms": o.tpot_ms, "e2e_ms": o.e2e_ms, "logprobs": [e.logprob for e in o.logprobs] or None,
                **prompt_logprobs(o, self._tokenizer),
            }
            for o in self._reply.outputs()
        ]  # fmt: skip

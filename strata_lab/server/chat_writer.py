"""Chat answers as bytes: content, tool calls and log probabilities, whole and streamed."""

from __future__ import annotations

from typing import Any

import orjson

from strata_lab.request import TokenLogprobs
from strata_lab.server.bridge import Events, Reply
from strata_lab.server.tools import Call, CallFinder
from strata_lab.server.writers import (
    NULL,
    Envelope,
    Piece,
    around_piece,
    end_of_stream,
    ending_error,
    gathered,
    prompt_logprobs,
    token_text,
    usage,
)

ROLE = b'{"role":"assistant","content":""}'


class ChatWriter:
    """`/v1/chat/completions`.

    Args:
        envelope: what all pieces share.
        reply: whose answers.
        tokenizer: for the tokens of log probabilities.
        finders: where calls are looked for, by answer; empty where no tools were offered.
    """

    def __init__(self, envelope: Envelope, reply: Reply, tokenizer: Any, finders: list[CallFinder]) -> None:
        self._envelope, self._reply, self._tokenizer, self._finders = envelope, reply, tokenizer, finders
        self._head, self._tail = around_piece(envelope)
        self._begun: set[int] = set()

    def piece(self, events: Events) -> bytes:
        """See `Writer`."""
        out: list[bytes] = []
        for number, piece in gathered(events, self._reply.sessions).items():
            if number not in self._begun:
                self._begun.add(number)
                self._write(out, number, ROLE, NULL, NULL)
            self._write_piece(out, number, piece)
            out.append(ending_error(piece.finish_reason, piece.error))
        return b"".join(out)

    def _write_piece(self, out: list[bytes], number: int, piece: Piece) -> None:
        text = piece.text
        calls: list[Call] = []
        finder = self._finders[number] if self._finders else None
        if finder is not None:
            text, calls = finder.push(text)
            if piece.finish_reason is not None:
                more, last = finder.finish()
                text, calls = text + more, calls + last
        logprobs = orjson.dumps(chat_logprobs(piece.logprobs, self._tokenizer)) if piece.logprobs else NULL
        if text or (piece.logprobs and not calls):
            delta = b'{"content":' + orjson.dumps(text) + b"}" if text else b"{}"
            self._write(out, number, delta, logprobs, NULL)
            logprobs = NULL
        if calls and finder is not None:
            first = len(finder.calls) - len(calls)
            listed = [{"index": first + i, **call.as_dict()} for i, call in enumerate(calls)]
            self._write(out, number, orjson.dumps({"tool_calls": listed}), logprobs, NULL)
        if piece.finish_reason is not None:
            reason = finish_reason(piece.finish_reason, finder.calls if finder else [])
            self._write(out, number, b"{}", NULL, orjson.dumps(reason))

    def _write(self, out: list[bytes], number: int, delta: bytes, logprobs: bytes, reason: bytes) -> None:
        out += [
            self._head, b"%d" % number, b',"delta":', delta, b',"logprobs":', logprobs, b',"finish_reason":', reason,
            self._tail,
        ]  # fmt: skip

    def end(self) -> bytes:
        """See `Writer`."""
        return end_of_stream(self._envelope, self._reply)

    def whole(self) -> bytes:
        """See `Writer`."""
        choices = []
        for number, output in enumerate(self._reply.outputs()):
            message: dict[str, Any] = {"role": "assistant", "content": output.text}
            calls: list[Call] = []
            if self._finders:
                finder = self._finders[number]
                text = finder.push(output.text)[0]
                text += finder.finish()[0]
                calls = finder.calls
                message["content"] = text if text or not calls else None
            if calls:
                message["tool_calls"] = [call.as_dict() for call in calls]
            table = chat_logprobs(list(output.logprobs), self._tokenizer) if output.logprobs else None
            reason = finish_reason(output.finish_reason or "", calls)
            choice = {"index": number, "message": message, "logprobs": table, "finish_reason": reason}
            choices.append(choice | prompt_logprobs(output, self._tokenizer))
        return orjson.dumps(self._envelope.as_dict() | {"choices": choices, "usage": usage(self._reply)})


def finish_reason(reason: str, calls: list[Call]) -> str:
    """A text that ended by itself with calls in it ended for them."""
    return "tool_calls" if calls and reason == "stop" else reason


def chat_logprobs(entries: list[TokenLogprobs], tokenizer: Any) -> dict[str, Any]:
    """The newer shape: a list of tokens, each with its alternatives."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = token_text(tokenizer, token_id)
        exact = tokenizer.token_bytes(token_id) if tokenizer is not None and tokenizer.is_byte_level else text.encode()
        return {"token": text, "logprob": logprob, "bytes": list(exact)}

    return {
        "content": [
            {**entry(e.token_id, e.logprob), "top_logprobs": [entry(i, p) for i, p in e.top.items()]} for e in entries
        ]
    }

"""Text to tokens and back, and chat messages to tokens.

A thin layer over the `tokenizers` library that knows a model's special tokens, its beginning-of-text rule and its chat
template. One folder format serves Hugging Face checkpoints and our own cache: `tokenizer.json`, `tokenizer_config.json`
and maybe `chat_template.jinja`. Streaming text out is the detokenizer's job. Torch-free.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from strata_lab.sampling_params import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
_EXAMPLE = "[{'role': 'user', 'content': 'Hello'}]"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TokenizerError(ValueError):
    """A tokenizer folder cannot be used. The message names the file and the fix."""


class Tokenizer:
    """A model's tokenizer.

    Attributes:
        backend: the `tokenizers.Tokenizer` underneath.
        eos_token_ids: tokens that end a text, as the tokenizer's files say.
        bos_token_id: token that begins a text; None where there is none.
        add_bos: whether the files say outright that every text begins with it.
        chat_template: jinja2 source; None where the model has none.
        is_byte_level: every token is a run of bytes and text is their concatenation (GPT-2's scheme).
    """

    def __init__(
        self,
        backend: Backend,
        *,
        eos_token_ids: Iterable[int] = (),
        bos_token_id: int | None = None,
        add_bos: bool = False,
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.eos_token_ids = tuple(eos_token_ids)
        self.bos_token_id = bos_token_id
        self.add_bos = add_bos
        self.chat_template = chat_template
        self.is_byte_level = _is_byte_level(backend)
        self._bytes_of: dict[int, bytes] = {}  # of tokens that were asked for
        self._special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out."""
        return self._special

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written in the text are recognized.

        `add_special_tokens` adds what the model wants around every text (often a beginning token). Raises
        `RequestError` for anything but a string that UTF-8 can hold.
        """
        if not isinstance(text, str):
            raise RequestError(f"text must be a string, not {type(text).__name__}; try 'Hello'")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"text has the lone surrogate {text[error.start]!r} at position {error.start}, which is no character; "
                "decode the input as UTF-8 with errors='replace'"
            ) from error
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD, ids outside the vocabulary become nothing."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token for display; half a character shows as U+FFFD, an id outside the vocabulary as ""."""
        if self.is_byte_level:
            return self.token_bytes(token_id).decode("utf-8", "replace")
        return self.backend.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token of a byte-level tokenizer stands for; b"" for an id outside the vocabulary."""
        found = self._bytes_of.get(token_id)
        return self._spelled(token_id) if found is None else found

    def _spelled(self, token_id: int) -> bytes:
        assert self.is_byte_level
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        try:
            spelled = bytes(_BYTES[char] for char in token)
        except KeyError:  # an added token with a character outside the byte alphabet stands for itself
            spelled = token.encode()
        self._bytes_of[token_id] = spelled
        return spelled

    def is_byte_token(self, token_id: int) -> bool:
        """Whether this is a byte-fallback token such as "<0xE2>" (SentencePiece's scheme)."""
        token = self.backend.id_to_token(token_id)
        return token is not None and _BYTE_TOKEN.fullmatch(token) is not None

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text that the model's chat template makes of the messages, and of the tools it may be told of.

        Raises `RequestError` for malformed messages, for messages the template refuses, and where there is no template.
        """
        from strata_lab.chat_template import render

        check_messages(messages)
        if self.chat_template is None:
            raise RequestError("this model has no chat template; give the prompt as a string, for example 'Hello'")
        return render(
            self.chat_template,
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            bos_token=self._token(self.bos_token_id),
            eos_token=self._token(next(iter(self.eos_token_ids), None)),
        )

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of chat messages, ready to generate the answer. Errors as `render_chat`."""
        ids = self.encode(self.render_chat(messages, add_generation_prompt, tools), add_special_tokens=False)
        if self.add_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def _token(self, token_id: int | None) -> str:
        return "" if token_id is None else self.backend.id_to_token(token_id) or ""

    def save(self, folder: Path) -> None:
        """Write it into an existing folder, as `load` reads it; other libraries know one end token, the first."""
        ends = [self._token(i) for i in self.eos_token_ids]
        config = {
            "add_bos_token": self.add_bos,
            "bos_token": None if self.bos_token_id is None else self._token(self.bos_token_id),
            "eos_token": ends[0] if ends else None,
            "more_eos_tokens": ends[1:],
            "chat_template": self.chat_template,
        }
        self.backend.save(str(folder / "tokenizer.json"), pretty=False)
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read a folder with `tokenizer.json`; where there are only older files, `transformers` translates them.

        Raises `TokenizerError` for files that cannot be read.
        """
        config = _read_json(folder / "tokenizer_config.json")
        backend = _read_backend(folder)

        def ids(value: Any) -> list[int]:
            named = value if isinstance(value, list) else [value]
            texts = (v.get("content") if isinstance(v, dict) else v for v in named)
            found = (backend.token_to_id(text) for text in texts if isinstance(text, str))
            return [i for i in found if i is not None]

        return cls(
            backend,
            eos_token_ids=ids(config.get("eos_token")) + ids(config.get("more_eos_tokens")),
            bos_token_id=next(iter(ids(config.get("bos_token"))), None),
            add_bos=config.get("add_bos_token") is True,
            chat_template=_read_template(folder, config.get("chat_template")),
        )


def check_messages(messages: Any) -> None:
    """Raise `RequestError` unless `messages` is a list of at least one {"role": ..., "content": text}."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages must be a list, not {type(messages).__name__}; try {_EXAMPLE}")
    if not messages:
        raise RequestError(f"messages is empty; give at least one, for example {_EXAMPLE}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{i}]={message!r} must be a dict; try {_EXAMPLE}")
        if message.get("role") not in ROLES:
            raise RequestError(f"messages[{i}] has role {message.get('role')!r}; it must be one of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            content = message.get("content")
            raise RequestError(f"messages[{i}] has content {content!r}; it must be a string; try {_EXAMPLE}")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for their own byte, U+0100 and up for the others."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()


def _is_byte_level(backend: Backend) -> bool:
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    steps = decoder.get("decoders", [decoder])
    return [step.get("type") for step in steps] == ["ByteLevel"]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} must hold a JSON object, not {type(content).__name__}; fetch it again")
    return content


def _read_backend(folder: Path) -> Backend:
    path = folder / "tokenizer.json"
    try:
        if path.is_file():
            return Backend.from_file(str(path))
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True).backend_tokenizer
    except Exception as error:  # tokenizers raises plain Exception
        raise TokenizerError(f"{folder}: the tokenizer cannot be read ({error}); fetch tokenizer.json again") from error


def _read_template(folder: Path, inline: Any) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if isinstance(inline, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in inline if isinstance(entry, dict)}
        return named.get("default")
    return inline if isinstance(inline, str) else None

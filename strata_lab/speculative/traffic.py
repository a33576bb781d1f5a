"""Texts as token ids in a file: recorded requests, and texts that a model made to train a draft on.

A line is a JSON object: "prompt" and "output" (token ids) and "temperature". Recording is asked for by name
(`EngineConfig.record_traffic`) and stays in that local file, which only its owner may read; nothing else is kept of a
request. Torch-free.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from strata_lab.request import Request
from strata_lab.settings import ConfigError

OWNER_ONLY = 0o600


@dataclass(frozen=True, slots=True)
class Text:
    """One request and what came of it.

    Attributes:
        prompt, output: token ids.
        temperature: how the output was drawn; 0 is greedy.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    temperature: float


class TrafficFile:
    """Appends texts to a file, a line each; safe to call from several threads.

    Args:
        path: made if it is not there; its folder must be.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            _drop_cut_line(path)
            self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, OWNER_ONLY), "a")
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written ({error.strerror}); give a file in a folder that exists"
            ) from error

    def add(self, text: Text) -> None:
        """Append a text, whole or not at all as far as readers see; one without output is left out."""
        if not text.output:
            return
        line = {"prompt": list(text.prompt), "output": list(text.output), "temperature": text.temperature}
        with self._lock:
            if not self._file.closed:
                self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
                self._file.flush()

    def close(self) -> None:
        """Let go of the file. Safe to repeat."""
        with self._lock:
            self._file.close()


def _drop_cut_line(path: Path) -> None:
    """Take away a last line that an interruption cut off: the next text would become a part of it."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        whole = file.read() == b"\n"
    if not whole:
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


class Recorder:
    """Keeps the texts of an engine's requests: a thread of its own writes them, so that no step waits for a disk.

    Args:
        path: as for `TrafficFile`.
    """

    def __init__(self, path: Path) -> None:
        self._file = TrafficFile(path)
        self._queue: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="strata-traffic", daemon=True)
        self._thread.start()

    def add(self, request: Request) -> None:
        """A request has ended by itself; prompts given as embeddings have no tokens and are left out."""
        if request.prompt_embeds is None:
            self._queue.put(request)

    def close(self) -> None:
        """Write what is left. Safe to repeat."""
        self._queue.put(None)
        self._thread.join()
        self._file.close()

    def _write(self) -> None:
        while (request := self._queue.get()) is not None:
            prompt, output = tuple(request.prompt_token_ids), tuple(request.output_token_ids)
            self._file.add(Text(prompt, output, 0.0 if request.params.greedy else request.params.temperature))


def read_texts(path: Path, vocab_size: int) -> Iterator[Text]:
    """The texts of a file; a last line that was cut off is left out.

    Raises:
        ConfigError: it cannot be read, a line is none of ours, or a token is not one of the model's.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); give a file that record_traffic wrote") from error
    for number, line in enumerate(lines[:-1], 1):  # behind the last line break: nothing, or a line that was cut off
        if line.strip():
            yield _text(path, number, line, vocab_size)


def _text(path: Path, number: int, line: str, vocab_size: int) -> Text:
    try:
        found = json.loads(line)
        text = Text(tuple(found["prompt"]), tuple(found["output"]), float(found["temperature"]))
        inside = all(type(i) is int and 0 <= i < vocab_size for ids in (text.prompt, text.output) for i in ids)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}:{number} is no recorded text ({error!r}); a line is "
            '{"prompt": [ids], "output": [ids], "temperature": number}'
        ) from error
    if not inside or not text.prompt or not text.output:
        raise ConfigError(
            f"{path}:{number} must hold token ids from 0 to {vocab_size - 1}, in prompt and output; it was recorded "
            "with another model: record it again"
        )
    return text

"""What is measured: prompts from real text and the request mixes of the benchmarks and of the three source articles.

Prompts come from `text.txt` (written for this project: English and Chinese prose, a table, a little code), cut to a
number of tokens. Each request starts elsewhere in the text, so that no cache can answer for the model. A model
without a tokenizer (a preset with random weights) gets a fixed pattern of token ids of the same length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

TEXT_FILE = Path(__file__).with_name("text.txt")
MIN_TOKENS = 4  # what a scaled workload keeps at least
_OFFSET_TOKENS = 37  # how far apart in the text two requests start; prime, so that repeats of the text do not line up


class Encoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to token ids."""
        ...


@dataclass(frozen=True)
class Workload:
    """A mix of requests, all there at the start.

    Attributes:
        name: short, for tables and file names.
        doc: one line: where it comes from.
        prompt_tokens: length of every prompt, unless `prompt_characters` says otherwise.
        output_tokens: length of each request's output; the end token is ignored, so that every run does the same work.
        concurrency: most requests at the same time.
        prompt_characters: cut prompts by characters of the text instead.
    """

    name: str
    doc: str
    prompt_tokens: int
    output_tokens: tuple[int, ...]
    concurrency: int = 1
    prompt_characters: int | None = None

    def scaled(self, factor: float) -> Workload:
        """The same mix with prompts and outputs shortened by `factor`, for machines that are that much slower."""

        def shorter(n: int) -> int:
            return max(MIN_TOKENS, round(n * factor))

        characters = None if self.prompt_characters is None else shorter(self.prompt_characters)
        outputs = tuple(shorter(n) for n in self.output_tokens)
        return replace(
            self, prompt_tokens=shorter(self.prompt_tokens), output_tokens=outputs, prompt_characters=characters
        )

    def prompts(self, encoder: Encoder | None, vocab_size: int) -> list[list[int]]:
        """Token ids of every request's prompt."""
        if self.prompt_characters is not None and encoder is not None:
            text = TEXT_FILE.read_text(encoding="utf-8")
            starts = [i * self.prompt_characters for i in range(len(self.output_tokens))]
            doubled = text * (2 + starts[-1] // len(text))
            return [encoder.encode(doubled[s : s + self.prompt_characters], add_special_tokens=False) for s in starts]
        source = text_tokens(encoder, vocab_size)
        return [_cut(source, i * _OFFSET_TOKENS, self.prompt_tokens) for i in range(len(self.output_tokens))]


def text_tokens(encoder: Encoder | None, vocab_size: int) -> list[int]:
    """The whole text as token ids, or a fixed pattern of ids for a model without a tokenizer."""
    if encoder is None:
        return [(7 + 31 * i) % vocab_size for i in range(2048)]
    return encoder.encode(TEXT_FILE.read_text(encoding="utf-8"), add_special_tokens=False)


def _cut(source: Sequence[int], start: int, length: int) -> list[int]:
    return [source[(start + i) % len(source)] for i in range(length)]


def single_stream(prompt_tokens: int = 128, output_tokens: int = 128) -> Workload:
    """One request alone: what a person at the keyboard feels."""
    return Workload("single", "one request alone", prompt_tokens, (output_tokens,))


def batch(size: int = 8, prompt_tokens: int = 128, output_tokens: int = 128) -> Workload:
    """`size` equal requests at the same time."""
    return Workload(f"batch-{size}", f"{size} equal requests together", prompt_tokens, (output_tokens,) * size, size)


def uneven(concurrency: int = 4, prompt_tokens: int = 32, longest: int = 64) -> Workload:
    """Three times as many requests as fit at once, one in four long: what static batching is bad at."""
    lengths = tuple(longest if i % concurrency == 0 else max(MIN_TOKENS, longest // 4) for i in range(3 * concurrency))
    return Workload("uneven", "requests of uneven length, more than fit at once", prompt_tokens, lengths, concurrency)


ARTICLE_WORKLOADS = {
    "A": Workload("article-A", "article A: 4 prompts of 600 characters", 150, (256,) * 4, 4, prompt_characters=600),
    "B": Workload("article-B", "article B: 2048 tokens in, 512 out, single stream", 2048, (512,)),
    "C": Workload("article-C", "article C: 512 tokens in, 512 out, batch 8", 512, (512,) * 8, 8),
}


def article(letter: str, scale: float = 1.0) -> Workload:
    """An article's workload, shortened by `scale`; `ValueError` for an unknown one."""
    if letter not in ARTICLE_WORKLOADS:
        raise ValueError(f"workload {letter!r} must be one of {', '.join(ARTICLE_WORKLOADS)}; try 'A'")
    return ARTICLE_WORKLOADS[letter] if scale == 1.0 else ARTICLE_WORKLOADS[letter].scaled(scale)

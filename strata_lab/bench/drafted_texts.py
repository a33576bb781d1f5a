"""Ten kinds of text, from what nobody can guess to what copies itself: what speculation is measured on.

Twenty requests of each kind, made of the pieces in `drafted_texts.toml` and of the trainer's questions. They differ in
how much of the answer stands in the prompt or is said twice, which is all that a look-up can use. Nothing is measured
here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from strata_lab.intake import Prompt
from strata_lab.sampling_params import SamplingParams
from strata_lab.speculative.train.prompts import read_questions

PIECES_FILE = Path(__file__).with_name("drafted_texts.toml")
NUM_REQUESTS = 20
WORDS_PER_LIST = 8

Pieces = dict[str, list[str]]


@dataclass(frozen=True)
class TextKind:
    """One of the ten workloads.

    Attributes:
        name: short, for tables and records.
        doc: what is asked for.
        ask: the request of a number below `NUM_REQUESTS`, from the pieces.
        chat: whether it is said to an assistant; otherwise the model goes on where the text ends.
        copies: the answer repeats the prompt: of the set on which a look-up must pay.
        loops: made to go round in circles: never counted as a gain.
        temperature: 0 is greedy. Open tasks are drawn, as people do, and since a small model soon goes round otherwise;
            each request has its own seed, so its text is the same with and without drafts.
    """

    name: str
    doc: str
    ask: Callable[[Pieces, int], str]
    chat: bool = True
    copies: bool = False
    loops: bool = False
    temperature: float = 0.0

    def prompt(self, number: int) -> Prompt:
        """The request of that number, as the engine takes it; `ValueError` beyond the last."""
        if not 0 <= number < NUM_REQUESTS:
            raise ValueError(f"request {number} of {self.name!r} must be one of 0 to {NUM_REQUESTS - 1}")
        text = self.ask(pieces(), number)
        return [{"role": "user", "content": text}] if self.chat else text

    def params(self, number: int, max_tokens: int) -> SamplingParams:
        """How its text is chosen."""
        return SamplingParams(temperature=self.temperature, seed=number, max_tokens=max_tokens)


@cache
def pieces() -> Pieces:
    """What the requests are made of."""
    return tomllib.loads(PIECES_FILE.read_text(encoding="utf-8")) | {"questions": list(read_questions())}


def _pair(p: Pieces, many: str, few: str, number: int) -> tuple[str, str]:
    """Every element of a list of ten with every one of a list of two."""
    return p[many][number % len(p[many])].strip(), p[few][number // len(p[many])]


def _prose(p: Pieces, number: int) -> str:
    """A text that breaks off after its first or second sentence."""
    paragraph, sentences = p["paragraphs"][number % len(p["paragraphs"])], 1 + number // len(p["paragraphs"])
    return ". ".join(paragraph.split(". ")[:sentences]) + "."


def _repeat_code(p: Pieces, number: int) -> str:
    code, change = _pair(p, "functions", "refactorings", number)
    return f"{change} and repeat the whole code, otherwise unchanged:\n\n```\n{code}\n```"


def _edit(p: Pieces, number: int) -> str:
    paragraph, change = _pair(p, "paragraphs", "changes", number)
    return f"Change {change} in this text and repeat it, otherwise word for word:\n\n{paragraph}"


def _quote(p: Pieces, number: int) -> str:
    paragraph = p["paragraphs"][number % len(p["paragraphs"])]
    return f"Summarise this text by quoting its {('first', 'last')[number // 10]} two sentences exactly:\n\n{paragraph}"


def _extract(p: Pieces, number: int) -> str:
    notice, fields = _pair(p, "notices", "fields", number)
    return f"Extract {fields} from this message as a JSON object:\n\n{notice}"


def _translate(p: Pieces, number: int) -> str:
    first = number % 10 * WORDS_PER_LIST // 2
    words = ", ".join(p["words"][first : first + WORDS_PER_LIST])
    language = p["languages"][number // 10]
    return f"Translate these words into {language}: {words}.\n\n{p['examples'][number // 10].strip()}\n"


def _question(p: Pieces, number: int) -> str:
    document = "\n\n".join(p["paragraphs"][(number + i) % 10] for i in range(3))
    return f"{document}\n\nWhat does the {('first', 'last')[number // 10]} part of this document say, and why?"


TEXT_KINDS = (
    TextKind("chat", "everyday questions", lambda p, n: p["questions"][n], temperature=0.7),
    TextKind("prose", "a text goes on where it breaks off", _prose, chat=False, temperature=0.8),
    TextKind("code", "write a function", lambda p, n: f"Write a Python function that {p['tasks'][n]}."),
    TextKind("refactor", "repeat code with a small change", _repeat_code, copies=True),
    TextKind("edit", "repeat a paragraph with a small change", _edit, copies=True),
    TextKind("quote", "summarise by quoting", _quote, copies=True),
    TextKind("json", "extract fields from a message as JSON", _extract),
    TextKind("translate", "a list of words in two languages", _translate, chat=False, temperature=0.5),
    TextKind("question", "a question about three paragraphs", _question),
    TextKind(
        "loop",
        "texts that go round in circles",
        lambda p, n: p["chants"][n % 10] * (1 + n // 10),
        chat=False,
        loops=True,
    ),
)


def text_kind(name: str) -> TextKind:
    """The workload of that name; `ValueError` for an unknown one."""
    for kind in TEXT_KINDS:
        if kind.name == name:
            return kind
    raise ValueError(f"workload {name!r} must be one of {', '.join(k.name for k in TEXT_KINDS)}; try 'edit'")

"""What the target is asked, so that it writes texts to learn from: requests of many kinds, beginnings of texts.

`seed_prompts.txt` was written for this project: ways of asking, things to ask about, and first sentences. Few people
ask like that, so of a model that chats most of the requests are its own: it is given a chat up to where the user begins
to speak, says what it expects there, and is then asked that. Text of the user's own is cut into beginnings, which the
target continues. The order is random and the same for the same seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata_lab.settings import ConfigError

SEEDS_FILE = Path(__file__).with_name("seed_prompts.txt")
QUESTIONS_FILE = Path(__file__).with_name("questions.txt")
SECTIONS = ("requests", "topics", "openings")
OPENING_SHARE = 0.15  # of prompts that are the beginning of a text instead of a request
OWN_SHARE = 0.8  # of prompts that come from the user's text where there is one
THOUGHT_UP_SHARE = 0.7  # of the requests that the target thinks up itself, where it can
OWN_TOKENS = (24, 96)  # of a beginning cut out of the user's text, fewest and most

Prompt = str | list[int] | list[dict[str, str]]
SNOWMAN = "\u2603"  # stands for what the user says


@dataclass(frozen=True)
class UserTurn:
    """A chat up to where its user begins to speak: token ids."""

    token_ids: tuple[int, ...]


def user_turn(tokenizer: Any) -> UserTurn | None:
    """Of a model with a chat template; None where that does not show where the user speaks."""
    before, said, _ = tokenizer.render_chat([{"role": "user", "content": SNOWMAN}]).partition(SNOWMAN)
    ids = tokenizer.encode(before, add_special_tokens=False) if said else ()
    return UserTurn(tuple(ids)) if ids else None


@dataclass(frozen=True)
class Seeds:
    """Ways of asking with "{topic}" in them, topics, and beginnings of texts."""

    requests: tuple[str, ...]
    topics: tuple[str, ...]
    openings: tuple[str, ...]


def read_seeds(path: Path = SEEDS_FILE) -> Seeds:
    """The sections of a seed file, a line each; "#" begins a comment."""
    sections: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text.startswith("[") and text.endswith("]"):
            sections[text[1:-1]] = []
        elif text and not text.startswith("#"):
            next(reversed(sections.values())).append(text)
    assert tuple(sections) == SECTIONS, tuple(sections)
    return Seeds(*(tuple(sections[name]) for name in SECTIONS))


def read_questions(path: Path = QUESTIONS_FILE) -> tuple[str, ...]:
    """What chats are measured with, a line each; "#" begins a comment."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


def prompts(
    seed: int, seeds: Seeds, *, chats: bool, own: Sequence[Sequence[int]] = (), tokenizer: Any = None,
    turn: UserTurn | None = None,
) -> Iterator[Prompt | UserTurn]:  # fmt: skip
    """Prompts without end; a `UserTurn` asks for one.

    Args:
        seed: of the order.
        seeds: what to ask.
        chats: whether the model has a chat template; without one requests are plain text.
        own: the user's texts as token ids; most prompts are then pieces of them.
        tokenizer: None for a model without one, which then gets pieces of `own` alone.
        turn: where the model says what it is asked; None where it cannot.

    Raises:
        ConfigError: there is nothing to ask a model without a tokenizer.
    """
    if tokenizer is None and not own:
        raise ConfigError("a model without a tokenizer can be asked nothing; give data=[a file of recorded traffic]")
    chance = random.Random(seed)
    while True:
        if own and (tokenizer is None or chance.random() < OWN_SHARE):
            yield _piece(chance, own)
        elif chance.random() < OPENING_SHARE:
            yield chance.choice(seeds.openings)
        elif turn is not None and chance.random() < THOUGHT_UP_SHARE:
            yield turn
        else:
            text = chance.choice(seeds.requests).replace("{topic}", chance.choice(seeds.topics))
            yield [{"role": "user", "content": text}] if chats else text


def _piece(chance: random.Random, texts: Sequence[Sequence[int]]) -> list[int]:
    """Some tokens out of the middle of a text, each place as likely as any other."""
    text = chance.choices(texts, [len(t) for t in texts])[0]
    start = chance.randrange(max(1, len(text) - OWN_TOKENS[0]))
    return list(text[start : start + chance.randint(*OWN_TOKENS)])


def own_texts(files: Sequence[Path], tokenizer: Any) -> list[list[int]]:
    """The user's text files as token ids; `ConfigError` for one that cannot be read or is too short."""
    found = []
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read as UTF-8 text ({error}); give .txt or .jsonl files") from error
        if tokenizer is None:
            raise ConfigError(f"{path} is text and the model has no tokenizer; give recorded traffic (.jsonl)")
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) <= OWN_TOKENS[0]:
            raise ConfigError(
                f"{path} holds {len(ids)} tokens, fewer than a beginning takes ({OWN_TOKENS[0]}); add text"
            )
        found.append(ids)
    return found

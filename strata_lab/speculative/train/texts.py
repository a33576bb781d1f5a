"""Texts as rows to train on: which are kept for measuring, and batches of rows of like length.

Rows are padded behind their end, so causal attention needs no mask, and rows of a batch are of like length, so little
is padded. The order depends on the seed and the number of the batch alone: training goes on where it stopped.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strata_lab.settings import ConfigError
from strata_lab.speculative.traffic import Text

HELD_OUT = 40  # one prompt in so many is kept for measuring
MOST_HELD_OUT = 256  # texts
PAD_TO = 16  # lengths of rows are multiples of it


@dataclass(frozen=True)
class Rows:
    """A batch.

    Attributes:
        token_ids: [B, T] int64, 0 behind a row's end.
        learned: [B, T] bool: places whose next token is the target's own, so that the draft learns from them.
        there: [B, T] bool: all but what is behind a row's end.
        numbers: of the texts, [B] int64.
    """

    token_ids: Tensor
    learned: Tensor
    there: Tensor
    numbers: Tensor

    @classmethod
    def of(cls, texts: Sequence[Text], numbers: Sequence[int], most_tokens: int) -> Rows:
        """The texts of these numbers side by side, each cut to its first `most_tokens`."""
        cut = [(text := texts[number], (text.prompt + text.output)[:most_tokens]) for number in numbers]
        width = -(-max(len(ids) for _, ids in cut) // PAD_TO) * PAD_TO
        token_ids = torch.zeros(len(cut), width, dtype=torch.int64)
        learned, there = torch.zeros(2, len(cut), width, dtype=torch.bool)
        for row, (text, ids) in enumerate(cut):
            token_ids[row, : len(ids)] = torch.tensor(ids)
            learned[row, len(text.prompt) - 1 : len(ids) - 1] = True
            there[row, : len(ids)] = True
        return cls(token_ids, learned, there, torch.tensor(numbers))

    def to(self, device: torch.device) -> Rows:
        """A copy on another device."""
        parts = self.token_ids, self.learned, self.there, self.numbers
        return Rows(*(part.to(device, non_blocking=True) for part in parts))


def split(texts: Sequence[Text], most_tokens: int) -> tuple[list[Text], list[Text]]:
    """Texts to learn from, and some to measure with: no prompt is in both.

    Texts whose prompt fills `most_tokens` are left out. Greedy texts are measured with where there are any, because
    there what the target says next is certain.

    Raises:
        ConfigError: too few texts for both.
    """
    usable = [text for text in texts if len(text.prompt) < most_tokens]
    learned = [text for text in usable if not _is_held_out(text)]
    held = [text for text in usable if _is_held_out(text)]
    held = ([text for text in held if text.temperature == 0] or held)[:MOST_HELD_OUT]
    if not learned or not held:
        raise ConfigError(
            f"{len(texts)} texts are too few to learn from some and measure with others (one prompt in about "
            f"{HELD_OUT} is kept for measuring); make or record more"
        )
    return learned, held


def _is_held_out(text: Text) -> bool:
    return zlib.crc32(repr(text.prompt).encode()) % HELD_OUT == 0


def batches(texts: Sequence[Text], tokens: int, most_tokens: int, seed: int, start: int = 0) -> Iterator[Rows]:
    """Batches of about `tokens` places without end, from number `start` on; every text once a round."""
    number = 0
    for round_ in range(1 << 62):
        chance = random.Random(f"{seed} {round_}")
        order = list(range(len(texts)))
        chance.shuffle(order)  # so that texts of equal length meet others in every round
        groups = in_groups(texts, order, tokens, most_tokens)
        chance.shuffle(groups)
        for group in groups[max(0, start - number) :]:
            yield Rows.of(texts, group, most_tokens)
        number += len(groups)


def in_groups(texts: Sequence[Text], order: Iterable[int], tokens: int, most_tokens: int) -> list[list[int]]:
    """Numbers of texts in groups of like length, of about `tokens` places; texts of one length stay in their order."""
    lengths = {number: min(most_tokens, len(texts[number].prompt) + len(texts[number].output)) for number in order}
    groups: list[list[int]] = []
    group: list[int] = []
    for number in sorted(lengths, key=lengths.__getitem__):
        if group and (len(group) + 1) * lengths[number] > tokens:
            groups.append(group)
            group = []
        group.append(number)
    return [*groups, group] if group else groups

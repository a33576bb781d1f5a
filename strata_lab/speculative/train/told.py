"""What the target says of texts, asked once: its states, and what its probabilities are made of.

A text comes up many times in a training, and the target's own pass over it is half of a step's work. States and one
number per token (the logarithm of what its probabilities add up to) take a few kilobytes; where the memory for all of
them is missing, the target is asked again each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strata_lab.speculative.traffic import Text
from strata_lab.speculative.train.network import Teacher
from strata_lab.speculative.train.texts import Rows, in_groups
from strata_lab.telemetry import hardware

MEMORY_SHARE = 0.4  # of what is free, for what is remembered
TOKENS_AT_ONCE = 8192
BYTES_UNKNOWN = 2 << 30  # taken as free where the system does not say


@dataclass(frozen=True)
class Said:
    """Of a batch.

    Attributes:
        x: embedded tokens, [B, T, hidden].
        states: behind each of the layers that were asked for, [B, T, hidden] each; the last one before the final norm.
        wanted: log probabilities of the draft's tokens at the N learned places, [N, Vd] float32.
    """

    x: Tensor
    states: tuple[Tensor, ...]
    wanted: Tensor


class Told:
    """What a teacher says of texts.

    Args:
        teacher: the target.
        texts: batches of them are asked for, by their numbers.
        most_tokens: of a text.
        seen: how many layers lie below each of the states, ascending; the last one is all of them.
        free_bytes: memory that may be taken; None asks the device.
    """

    def __init__(
        self, teacher: Teacher, texts: Sequence[Text], most_tokens: int, seen: Sequence[int],
        free_bytes: int | None = None,
    ) -> None:  # fmt: skip
        self.teacher, self.seen = teacher, tuple(seen)
        assert self.seen[-1] == teacher.network.config.num_layers, self.seen
        head = teacher.network.head
        lengths = torch.tensor([min(most_tokens, len(text.prompt) + len(text.output)) for text in texts])
        self._starts = (lengths.cumsum(0) - lengths).to(head.device)
        total = int(lengths.sum())
        size = len(self.seen) * teacher.network.config.hidden_size * head.element_size() + 4
        free = MEMORY_SHARE * _free_bytes(head.device) if free_bytes is None else free_bytes
        self._states: tuple[Tensor, ...] = ()
        if total * size <= free:
            self._remember(texts, most_tokens, total)

    @torch.no_grad()
    def _remember(self, texts: Sequence[Text], most_tokens: int, total: int) -> None:
        head, hidden = self.teacher.network.head, self.teacher.network.config.hidden_size
        self._states = tuple(head.new_empty(total, hidden) for _ in self.seen)
        self._sums = torch.zeros(total, device=head.device)
        for numbers in in_groups(texts, range(len(texts)), TOKENS_AT_ONCE, most_tokens):
            rows = Rows.of(texts, numbers, most_tokens).to(head.device)
            states = self.teacher.states(self.teacher.embed(rows.token_ids), self.seen)
            places, there = self._places(rows), rows.there
            for kept, made in zip(self._states, states, strict=True):
                kept[places[there]] = made[there]
            self._sums[places[rows.learned]] = self.teacher.log_sums(states[-1][rows.learned])

    def _places(self, rows: Rows) -> Tensor:
        """Where the tokens of rows are remembered, [B, T]."""
        return self._starts[rows.numbers, None] + torch.arange(rows.token_ids.shape[1], device=self._starts.device)

    @torch.no_grad()
    def __call__(self, rows: Rows) -> Said:
        """What the target says of a batch that is on its device."""
        teacher, learned = self.teacher, rows.learned
        x = teacher.embed(rows.token_ids)
        if not self._states:
            states = teacher.states(x, self.seen)
            return Said(x, states, teacher.log_probabilities(states[-1][learned]))
        places = self._places(rows).clamp(max=self._sums.shape[0] - 1)  # of padding, which nobody looks at
        states = tuple(kept[places] for kept in self._states)
        return Said(x, states, teacher.log_probabilities(states[-1][learned], self._sums[places[learned]]))


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return hardware.cpu_info().available_memory_bytes or BYTES_UNKNOWN

"""What a draft of tokens learns, and how its guesses are counted. `features.py` has the lesson of the other kind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from strata_lab.models.draft_part import TOKENS
from strata_lab.speculative.train.network import NORM, Network, Teacher, first_draft
from strata_lab.speculative.train.texts import Rows

BEST_SHARE = 0.25  # of what is learned: the target's most likely token, beside its whole distribution


class Lesson(Protocol):
    """How one kind of draft is made, taught and examined.

    Attributes:
        kind: of the draft, as its folder says.
        teacher: the target.
    """

    kind: str
    teacher: Teacher

    def first(self, num_layers: int, batches: Iterable[Rows]) -> Network:
        """An untrained draft, which begins as parts of the target fitted to some batches."""
        ...

    def loss(self, draft: Network, rows: Rows, seed: int) -> tuple[Tensor, int]:
        """What there is to learn from a batch, nats per place, and from how many places; `seed` of what is random."""
        ...

    def runs(self, draft: Network, rows: Rows, best: Tensor) -> list[list[int]]:
        """For each text how many guesses in a row are `best` [N] from each of its learned places on.

        The draft's tensors are of the target's dtype.
        """
        ...


class TokenLesson:
    """`Lesson` of a draft that sees tokens only."""

    kind = TOKENS

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher

    @torch.no_grad()
    def first(self, num_layers: int, batches: Iterable[Rows]) -> Network:
        """The target's first layers, under a head fitted to their states."""
        teacher = self.teacher
        draft = first_draft(teacher.network, num_layers, teacher.to_target)
        embedded = ((rows, teacher.embed(rows.token_ids)) for rows in batches)
        pairs = (
            (draft.hidden(x.float())[rows.learned], teacher.network.hidden(x)[rows.learned]) for rows, x in embedded
        )
        teacher.fit_head(draft, pairs)
        return draft

    def loss(self, draft: Network, rows: Rows, seed: int) -> tuple[Tensor, int]:
        """Divergence from the target's probabilities."""
        x = self.teacher.embed(rows.token_ids)
        wanted = self.teacher.log_probabilities(self.teacher.states(x)[rows.learned])
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.device.type == "cuda"):
            logits = F.linear(draft.hidden(x.float())[rows.learned], draft.head)
        return distillation_loss(logits.float(), wanted), wanted.shape[0]

    def runs(self, draft: Network, rows: Rows, best: Tensor) -> list[list[int]]:
        """A guess behind true ones has seen the target's own text, so one guess for each place tells all windows."""
        states = draft.states(self.teacher.embed(rows.token_ids))
        right = places(rows.learned, guessed(self.teacher, draft, states[rows.learned]) == best)
        return [runs_in(row) for row in by_text(right, rows)]


def guessed(teacher: Teacher, draft: Network, states: Tensor) -> Tensor:
    """The draft's most likely tokens as the target's, from its states before the final norm [N, hidden]: [N]."""
    logits = F.linear(draft.norm(states, NORM), draft.head)
    return teacher.to_target[logits.float().argmax(dim=1)]


def places(where: Tensor, values: Tensor) -> Tensor:
    """[N] bools put in the N true places of [B, T]; the others are False."""
    return torch.zeros_like(where).masked_scatter(where, values)


def by_text(right: Tensor, rows: Rows) -> list[list[bool]]:
    """[B, T] bools as a list for each text, of its learned places."""
    return [row[own].tolist() for row, own in zip(right.cpu(), rows.learned.cpu(), strict=True)]


def runs_in(hits: list[bool]) -> list[int]:
    """From each place on, how many are true in a row."""
    runs, run = [], 0
    for hit in reversed(hits):
        run = run + 1 if hit else 0
        runs.append(run)
    return runs[::-1]


def distillation_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    """Divergence of the draft from what it is to say, nats, mean over places; 0 at best.

    Args:
        logits: of the draft, [N, Vd] float32.
        wanted: log probabilities of the target for these tokens, [N, Vd]; what it gives to others is missing, so places
            where it wants to say something else count less.
    """
    probabilities = wanted.exp()
    best = torch.zeros_like(wanted).scatter_(1, wanted.argmax(dim=1, keepdim=True), 1.0)
    weight = (1 - BEST_SHARE) * probabilities + BEST_SHARE * best * probabilities.sum(dim=1, keepdim=True)
    entropy = torch.special.entr(weight).sum(dim=1) - torch.special.entr(weight.sum(dim=1))
    return (-(weight * F.log_softmax(logits, dim=1)).sum(dim=1) - entropy).mean()

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
from strata_lab.speculative.train.told import Said

BEST_SHARE = 0.25  # of what is learned: the target's most likely token, beside its whole distribution


class Lesson(Protocol):
    """How one kind of draft is made, taught and examined.

    Attributes:
        kind: of the draft, as its folder says.
        teacher: the target.
        seen: behind how many of the target's layers lie the states that the draft sees, ascending, the last one behind
            all of them.
    """

    kind: str
    teacher: Teacher
    seen: tuple[int, ...]

    def first(self, num_layers: int, batches: Iterable[Rows]) -> Network:
        """An untrained draft, which begins as parts of the target fitted to some batches."""
        ...

    def loss(self, draft: Network, rows: Rows, said: Said, seed: int) -> Tensor:
        """What there is to learn from a batch, nats per place; `seed` of what is random."""
        ...

    def runs(self, draft: Network, rows: Rows, said: Said, best: Tensor) -> list[list[int]]:
        """For each text how many guesses in a row are `best` [N] from each of its learned places on.

        The draft's tensors are of the target's dtype.
        """
        ...


class TokenLesson:
    """`Lesson` of a draft that sees tokens only."""

    kind = TOKENS

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher
        self.seen: tuple[int, ...] = (teacher.network.config.num_layers,)

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

    def loss(self, draft: Network, rows: Rows, said: Said, seed: int) -> Tensor:
        """Divergence from the target's probabilities."""
        with torch.autocast(said.x.device.type, torch.bfloat16, enabled=said.x.device.type == "cuda"):
            logits = F.linear(draft.hidden(said.x.float())[rows.learned], draft.head)
        return distillation_loss(logits.float(), *shares(said.wanted))

    def runs(self, draft: Network, rows: Rows, said: Said, best: Tensor) -> list[list[int]]:
        """A guess behind true ones has seen the target's own text, so one guess for each place tells all windows."""
        states = draft.states(said.x)
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


def shares(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """What a draft is to say: a share of each of its tokens [N, Vd], and the least that a loss can be there, [N] nats.

    Args:
        wanted: log probabilities of the target for these tokens, [N, Vd]; what it gives to others is missing, so places
            where it wants to say something else count less.
    """
    share = wanted.exp()
    known, best = share.sum(dim=1), wanted.argmax(dim=1, keepdim=True)
    share = (share * (1 - BEST_SHARE)).scatter_add_(1, best, BEST_SHARE * known[:, None])
    return share, torch.special.entr(share).sum(dim=1) - torch.special.entr(known)


def distillation_loss(logits: Tensor, share: Tensor, least: Tensor) -> Tensor:
    """Divergence of the draft's logits [N, Vd] float32 from what it is to say (`shares`), nats, mean over places; 0 at
    best.
    """
    return (share.sum(dim=1) * logits.logsumexp(dim=1) - (share * logits).sum(dim=1) - least).mean()

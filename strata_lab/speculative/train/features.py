"""What a feature draft learns: to go on from the target's states, and behind the first guess from its own.

Such a draft's row at position p reads the token there and the target's states at p - 1, from the last of which the
token was chosen; it answers with a state of its own at p. In use the second guess of a window has no state of the
target to go on from, so the draft's own stands in; a guess sees the target's states up to the window and own ones in
it. It is trained just so: the batch goes through the draft once for each place of a window (`UNROLLED`), and rows of a
later place see those of the first up to where their window began, and one row of each place between
(`WindowAttention`). States that are not there, as of a prefix that was found in the cache, are zeros; some are left out
in training too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from strata_lab.models.draft_part import FEATURES, SEEN_NORM, SEEN_PROJ, STATE_NORM, STATE_PROJ, TOKEN_PROJ
from strata_lab.speculative.train.lessons import by_text, distillation_loss, guessed, places, shares
from strata_lab.speculative.train.measure import MOST_GUESSES
from strata_lab.speculative.train.network import HEAD, NORM, Network, Teacher, first_draft, learnable, least_squares
from strata_lab.speculative.train.texts import Rows
from strata_lab.speculative.train.told import Said

SEEN = (1 / 3, 2 / 3, 1.0)  # of the layers lie below each of the states that are seen
UNROLLED = 3  # guesses of a window that are learned
PLACE_FADE = 0.8  # what a guess counts of the one before it: it is asked for only where that one came true
ABSENT_SHARE = 0.15  # of texts of which a part comes without states


class FeatureNetwork(Network):
    """A draft whose rows are made of tokens and states: the target's, or in a window its own."""

    def of_target(self, states: Sequence[Tensor]) -> Tensor:
        """What rows get of the target's states before them, [B, T, hidden] each -> [B, T, hidden]."""
        parts = (
            F.linear(self.norm(state, SEEN_NORM.format(index)), self.tensors[SEEN_PROJ.format(index)])
            for index, state in enumerate(states)
        )
        return reduce(torch.add, parts)

    def of_own(self, states: Tensor) -> Tensor:
        """What rows get of the draft's own states before them, [B, T, hidden]."""
        return F.linear(self.norm(states, STATE_NORM), self.tensors[STATE_PROJ])

    def places(self, x: Tensor, states: Sequence[Tensor]) -> Iterator[Tensor]:
        """The draft's states at each place of a window in turn, before its final norm, [B, T, hidden].

        Args:
            x: embedded tokens of texts, [B, T, hidden].
            states: the target's at the same positions, behind each of the layers that the draft sees.
        """
        attend, tokens = WindowAttention(), F.linear(x, self.tensors[TOKEN_PROJ])
        seen = self.of_target([before(state) for state in states])
        while True:
            made = self.states(tokens + seen, attend=attend)
            yield made
            seen = self.of_own(before(made))


class WindowAttention:
    """`Attend` of rows that are computed again for each place of a window, with keys and values of their own.

    Row t of place s (from 0 on) is the s-th guess of a window that began behind position t - s. It sees rows of place 0
    up to there, and row t - s + i of each place i between; the first `s` rows of a place stand for no window.
    """

    def __init__(self) -> None:
        self._seen: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, prefix: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, H, T, D] of q; k and v have Hkv heads."""
        groups, length = q.shape[1] // k.shape[1], q.shape[2]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        seen = self._seen.setdefault(prefix, [])
        seen.append((k, v))
        place = len(seen) - 1
        if not place:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        texts, windows = seen[0], [tuple(_later(part, place - i) for part in seen[i]) for i in range(1, place + 1)]
        hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1 - place)
        scores = [(q @ texts[0].transpose(2, 3)).masked_fill(hidden, -torch.inf)]
        scores += [(q * key).sum(dim=-1, keepdim=True) for key, _ in windows]
        weights = (torch.cat(scores, dim=-1).float() * q.shape[-1] ** -0.5).softmax(dim=-1).to(v.dtype)
        out = weights[..., :length] @ texts[1]
        for i, (_, value) in enumerate(windows):
            out = out + weights[..., length + i, None] * value
        return out


def _later(rows: Tensor, count: int) -> Tensor:
    """Rows [B, H, T, D] where row t is what row t - count was; the first `count` repeat the last ones."""
    return rows.roll(count, dims=2) if count else rows


def before(states: Tensor) -> Tensor:
    """The state before each position, zeros before the first: [B, T, hidden]."""
    return F.pad(states[:, :-1], (0, 0, 1, 0))


def behind(learned: Tensor, place: int) -> Tensor:
    """Learned places [B, T] whose window, of which they are guess number `place`, began at a learned one too."""
    return learned & F.pad(learned[:, : learned.shape[1] - place], (place, 0))


class FeatureLesson:
    """`Lesson` of a draft that sees the target's states."""

    kind = FEATURES

    def __init__(self, teacher: Teacher) -> None:
        self.teacher, self.seen = teacher, seen_of(teacher.network.config.num_layers)

    @torch.no_grad()
    def first(self, num_layers: int, batches: Iterable[Rows]) -> Network:
        """The target's last layers, on rows that come as near as a linear map can to what these layers get there.

        They are made of tokens and of the last states; what others tell is learned from nothing.
        """
        teacher, target = self.teacher, self.teacher.network
        below, width = target.config.num_layers - num_layers, target.config.hidden_size
        dense = first_draft(target, num_layers, teacher.to_target, below)
        names = [STATE_NORM, *(SEEN_NORM.format(index) for index in range(len(self.seen)))]
        draft = FeatureNetwork(dense.config, dense.tensors | {n: learnable(target.tensors[NORM]) for n in names})

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for rows in batches:
                x = teacher.embed(rows.token_ids)
                wanted, last = (x, *teacher.states(x, [n for n in (below, self.seen[-1]) if n]))[-2:]
                given = torch.cat([x.float(), draft.norm(before(last).float(), STATE_NORM)], dim=-1)
                yield given[rows.learned], wanted[rows.learned]

        token, last = least_squares(pairs()).float().split(width)
        draft.tensors |= {TOKEN_PROJ: learnable(token.T), STATE_PROJ: learnable(last.T)}
        parts = [torch.zeros_like(last)] * (len(self.seen) - 1) + [last]
        draft.tensors |= {SEEN_PROJ.format(index): learnable(part.T) for index, part in enumerate(parts)}
        return draft

    def loss(self, draft: Network, rows: Rows, said: Said, seed: int) -> Tensor:
        """Divergence from the target's probabilities, over the places of a window; what its own states look like is the
        draft's business.
        """
        assert isinstance(draft, FeatureNetwork)
        share, least = shares(said.wanted)
        total, weights = said.x.new_zeros((), dtype=torch.float32), 0.0
        absent = absent_places(rows, seed)[..., None]
        with torch.autocast(said.x.device.type, torch.bfloat16, enabled=said.x.device.type == "cuda"):
            given = draft.places(said.x.float(), [state.float().masked_fill(absent, 0.0) for state in said.states])
            for place in range(UNROLLED):
                made, where = next(given), behind(rows.learned, place)
                logits = F.linear(draft.norm(made[where], NORM), draft.tensors[HEAD]).float()
                of = where[rows.learned]
                loss = distillation_loss(logits, share[of], least[of])
                total, weights = total + PLACE_FADE**place * loss, weights + PLACE_FADE**place
        return total / weights

    def runs(self, draft: Network, rows: Rows, said: Said, best: Tensor) -> list[list[int]]:
        """Guesses of every place of a window, each behind own states."""
        assert isinstance(draft, FeatureNetwork)
        given = draft.places(said.x, said.states)
        hits = []
        for _ in range(MOST_GUESSES):
            right = guessed(self.teacher, draft, next(given)[rows.learned]) == best
            hits.append(by_text(places(rows.learned, right), rows))
        return [window_runs(text) for text in zip(*hits, strict=True)]


def seen_of(num_layers: int) -> tuple[int, ...]:
    """Behind how many of a target's layers its states are seen."""
    return tuple(sorted({max(1, round(num_layers * part)) for part in SEEN}))


def window_runs(hits: Sequence[Sequence[bool]]) -> list[int]:
    """From each place of a text on how many guesses in a row are true; `hits[s][t]`: of the s-th of a window, at t."""
    length = len(hits[0])
    return [
        next((s for s in range(len(hits)) if t + s >= length or not hits[s][t + s]), len(hits)) for t in range(length)
    ]


def absent_places(rows: Rows, seed: int) -> Tensor:
    """[B, T] bools: of some texts a stretch, whose states the engine has not computed."""
    chance = torch.Generator().manual_seed(seed)
    batch, length = rows.token_ids.shape
    lacks = torch.rand(batch, 1, generator=chance) < ABSENT_SHARE
    ends = torch.randint(0, length + 1, (batch, 2), generator=chance).sort(dim=1).values
    at = torch.arange(length)[None]
    return (lacks & (at >= ends[:, :1]) & (at < ends[:, 1:])).to(rows.token_ids.device)

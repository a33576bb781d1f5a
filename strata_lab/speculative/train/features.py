"""What a feature draft learns: to go on from the target's states, and behind the first guess from its own.

Such a draft's row at position p reads the token there and the target's state at p - 1, from which the token was chosen;
it answers with a state in the manner of the target's at p. In use the second guess of a window has no state of the
target to go on from, so the draft's own stands in; a guess sees the target's states up to the window and own ones in
it. It is trained just so: the batch goes through the draft once for each place of a window (`UNROLLED`), and rows of a
later place see those of the first up to where their window began, and one row of each place between
(`WindowAttention`). States that are not there, as of a prefix that was found in the cache, are zeros; some are left out
in training too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from strata_lab.models.draft_part import FEATURES, STATE_NORM, STATE_PROJ, TOKEN_PROJ
from strata_lab.speculative.train.lessons import by_text, distillation_loss, guessed, places
from strata_lab.speculative.train.measure import MOST_GUESSES
from strata_lab.speculative.train.network import HEAD, NORM, Network, Teacher, first_draft, learnable, least_squares
from strata_lab.speculative.train.texts import Rows

UNROLLED = 3  # guesses of a window that are learned
PLACE_FADE = 0.8  # what a guess counts of the one before it: it is asked for only where that one came true
STATES_SHARE = 0.2  # of a state's distance from the target's, beside the divergence in nats
ABSENT_SHARE = 0.15  # of texts of which a part comes without states


class FeatureNetwork(Network):
    """A draft whose rows are made of tokens and states."""

    def rows(self, x: Tensor, states: Tensor) -> Tensor:
        """Embedded tokens and the states before them, [B, T, hidden] each -> what the layers get, [B, T, hidden]."""
        seen = F.linear(self.norm(states, STATE_NORM), self.tensors[STATE_PROJ])
        return F.linear(x, self.tensors[TOKEN_PROJ]) + seen

    def places(self, x: Tensor, states: Tensor) -> Iterator[Tensor]:
        """The draft's states at each place of a window in turn, before its final norm, [B, T, hidden].

        Args:
            x: embedded tokens of texts, [B, T, hidden].
            states: the target's at the same positions.
        """
        attend = WindowAttention()
        while True:
            states = self.states(self.rows(x, before(states)), attend=attend)
            yield states


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
        self.teacher = teacher

    @torch.no_grad()
    def first(self, num_layers: int, batches: Iterable[Rows]) -> Network:
        """The target's last layers, on rows that come as near as a linear map can to what these layers get there."""
        teacher, target = self.teacher, self.teacher.network
        all_layers = range(target.config.num_layers)
        below, above = all_layers[:-num_layers], all_layers[-num_layers:]
        dense = first_draft(target, num_layers, teacher.to_target, below.stop)
        norm = learnable(target.tensors[NORM])
        draft = FeatureNetwork(dense.config, dense.tensors | {STATE_NORM: norm})

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for rows in batches:
                x = teacher.embed(rows.token_ids)
                wanted = target.states(x, below)
                states = before(target.states(wanted, above)).float()
                given = torch.cat([x.float(), draft.norm(states, STATE_NORM)], dim=-1)
                yield given[rows.learned], wanted[rows.learned]

        width = target.config.hidden_size
        made = least_squares(pairs()).T.float()
        draft.tensors |= {TOKEN_PROJ: learnable(made[:, :width]), STATE_PROJ: learnable(made[:, width:])}
        return draft

    def loss(self, draft: Network, rows: Rows, seed: int) -> tuple[Tensor, int]:
        """Divergence from the target's probabilities and distance from its states, over the places of a window."""
        assert isinstance(draft, FeatureNetwork)
        teacher = self.teacher
        x = teacher.embed(rows.token_ids)
        states = teacher.states(x)
        probabilities = teacher.log_probabilities(states[rows.learned])
        total, weights = x.new_zeros((), dtype=torch.float32), 0.0
        given = draft.places(x.float(), without_some(states.float(), seed))
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.device.type == "cuda"):
            for place in range(UNROLLED):
                made, where = next(given), behind(rows.learned, place)
                logits = F.linear(draft.norm(made[where], NORM), draft.tensors[HEAD])
                loss = distillation_loss(logits.float(), probabilities[where[rows.learned]])
                loss = loss + STATES_SHARE * F.smooth_l1_loss(_unit(made[where]), _unit(states[where]))
                total, weights = total + PLACE_FADE**place * loss, weights + PLACE_FADE**place
        return total / weights, probabilities.shape[0]

    def runs(self, draft: Network, rows: Rows, best: Tensor) -> list[list[int]]:
        """Guesses of every place of a window, each behind own states."""
        assert isinstance(draft, FeatureNetwork)
        x = self.teacher.embed(rows.token_ids)
        given = draft.places(x, self.teacher.states(x))
        hits = []
        for _ in range(MOST_GUESSES):
            right = guessed(self.teacher, draft, next(given)[rows.learned]) == best
            hits.append(by_text(places(rows.learned, right), rows))
        return [window_runs(text) for text in zip(*hits, strict=True)]


def window_runs(hits: Sequence[Sequence[bool]]) -> list[int]:
    """From each place of a text on how many guesses in a row are true; `hits[s][t]`: of the s-th of a window, at t."""
    length = len(hits[0])
    return [
        next((s for s in range(len(hits)) if t + s >= length or not hits[s][t + s]), len(hits)) for t in range(length)
    ]


def without_some(states: Tensor, seed: int) -> Tensor:
    """States [B, T, hidden] of which some texts lack a stretch, which is zeros: what the engine has not computed."""
    chance = torch.Generator().manual_seed(seed)
    batch, length = states.shape[:2]
    lacks = torch.rand(batch, 1, generator=chance) < ABSENT_SHARE
    ends = torch.randint(0, length + 1, (batch, 2), generator=chance).sort(dim=1).values
    at = torch.arange(length)[None]
    absent = lacks & (at >= ends[:, :1]) & (at < ends[:, 1:])
    return states.masked_fill(absent[..., None].to(states.device), 0.0)


def _unit(states: Tensor) -> Tensor:
    """States of mean square 1: what a norm makes of them is learned from, not how long they are."""
    return F.rms_norm(states.float(), states.shape[-1:])

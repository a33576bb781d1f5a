"""Look-ups on the device: a text is its own draft, in cycles that need no host.

The device keeps each text by position. A cycle begins by finding the place most like the end of the text and guesses
what followed there; before it ends, the sampled tokens are written behind the text. The functions here are the
reference; those of a GPU are `kernels/gpu/look_up.py`. The rule is simpler than that of `ngram.py`, which has an index
for it: every place is compared, a few tokens back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strata_lab.device_sampling import send
from strata_lab.models.base import CausalLM
from strata_lab.request import Request
from strata_lab.speculative.guesses import Follow, Guess, Make
from strata_lab.speculative.window_state import WindowState

MOST_COMMON = 8  # tokens of a common past that are counted: a longer one hardly ever tells more


def look_up(texts: Tensor, state: WindowState, num_drafts: int) -> None:
    """Guess what followed the last time a text had these last tokens: into `report[0, 1:1 + num_drafts]`.

    Of all earlier places the one that has most of the last `MOST_COMMON` tokens in common, and of these the latest.
    Where a copy reaches the end of the text it goes on with what it has copied; where no place has even the last token,
    that one is repeated, since the rows of a cycle are there whether or not anything is found. Rows that pad get 0.

    Args:
        texts: [B, slots] int32, by position; what lies behind the token to feed is anything.
        state: of the cycle.
        num_drafts: guesses for each.
    """
    for row, last in enumerate(state.base.positions.tolist()):
        guesses = [0] * num_drafts
        if state.base.seq_lens[row] > 0:
            text = texts[row, : last + 1].tolist()
            guesses = (text[follows(text) :] * num_drafts)[:num_drafts]
        state.report[0, 1 : 1 + num_drafts, row] = torch.tensor(guesses)


def follows(text: list[int]) -> int:
    """Where what followed the best earlier place begins; the last token of the text where there is none."""
    last = best = len(text) - 1
    longest = 0
    for end in range(last):
        common = 0
        while common < min(MOST_COMMON, end + 1) and text[end - common] == text[last - common]:
            common += 1
        if common and common >= longest:
            best, longest = end + 1, common
    return best


def remember(texts: Tensor, state: WindowState, num_rows: int) -> None:
    """Write the `num_rows` tokens sampled in a window behind each text; it has not moved on yet.

    All of them: what is behind the accepted ones is overwritten by the next cycle, and read by none. Token 0 stands for
    one that only the host can tell, since what is in a text may become a guess.
    """
    base = state.base
    place = base.positions + torch.arange(1, num_rows + 1, device=texts.device)[:, None]  # [rows, B]
    there = (base.seq_lens > 0) & (place < texts.shape[1])
    row = torch.arange(texts.shape[0], device=texts.device).expand_as(place)
    texts[row[there], place[there]] = state.report[1, :num_rows][there].clamp(min=0).int()


@dataclass(frozen=True)
class LookUpOps:
    """`look_up` and `remember` of a device."""

    look_up: Callable[[Tensor, WindowState, int], None]
    remember: Callable[[Tensor, WindowState, int], None]


TORCH_LOOK_UPS = LookUpOps(look_up, remember)


class LookUpGuesses:
    """`Guesses` that copy from the request's own text.

    Args:
        model: the target's: what could be guessed are its tokens, at its positions.
        ops: of the device.
    """

    def __init__(self, model: CausalLM, ops: LookUpOps) -> None:
        self.model, self.ops = model, ops

    def empty(self, state: WindowState) -> Tensor:
        """Room for texts as long as the target's block tables, [B, slots] int32."""
        slots = state.rows.block_tables.shape[1] * state.block_size
        return torch.zeros(state.base.input_ids.shape[0], slots, dtype=torch.int32, device=state.report.device)

    def begin(self, kept: Tensor, requests: Sequence[Request]) -> None:
        """Their texts, up to the token that is fed."""
        for row, request in enumerate(requests):
            send(kept[row, : request.num_tokens], request.token_ids)

    def cycle(
        self, state: WindowState, kept: Tensor, window: Any, num_drafts: int, guess: Guess
    ) -> tuple[Make, Follow]:
        """One look-up; afterwards the text goes on."""
        make = partial(self.ops.look_up, kept, state, num_drafts)
        return make, lambda states: self.ops.remember(kept, state, 1 + num_drafts)


class LookUp:
    """What the host knows of look-ups on the device: nothing. In the place of a draft model in `ahead.py`."""

    name = "ngram"
    classes = (("any", 1),)
    look_is_work = False
    captures = 0

    def look(self, requests: Sequence[Request]) -> list[int]:
        """1 for each: whether there is anything to copy, the device finds out."""
        return [1] * len(requests)

    def fly(self, request: Request, num_tokens: int) -> list[int] | None:
        """No blocks are needed."""
        return []

    def land(self, request: Request) -> None:
        """Nothing is kept of a request."""

    def forget(self, request: Request) -> None:
        """Nothing is kept of a request."""

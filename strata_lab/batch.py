"""What one step computes: plain records that the scheduler makes and the runner reads.

They exist apart so that a runner depends on the shape of a step and not on the policy that chose it. Torch-free.
They are valid until the next `schedule`: block tables are the live lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from strata_lab.request import Request

TO_BE_GUESSED = -1
Pairs = Sequence[tuple[int, int]]  # (from, to): blocks of one pool, or of the pool and of host memory


# Not frozen: one is made per request and step, and freezing makes that five times as dear.
@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """The part of one request that a step computes: its tokens `[start, start + num_tokens)`, and drafts behind them.

    Attributes:
        request: whose tokens they are.
        start: tokens of the request that are in the KV cache already.
        num_tokens: tokens to compute, drafts included; their keys and values are written in this step.
        block_table: live list of the request's blocks; covers `start + num_tokens` tokens.
        samples: whether the step yields the request's next token (as of the moment the step was built).
        drafts: guesses at its next tokens, computed behind its last one to see which of them come true. `TO_BE_GUESSED`
            stands for one that the runner makes.
    """

    request: Request
    start: int
    num_tokens: int
    block_table: list[int]
    samples: bool = field(init=False)
    drafts: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.samples = self.start + self.num_tokens == self.request.num_tokens

    @property
    def token_ids(self) -> list[int]:
        """The tokens that it computes, drafts last."""
        stop = self.start + self.num_tokens - len(self.drafts)
        return [*self.request.token_ids[self.start : stop], *self.drafts]

    @property
    def num_rows(self) -> int:
        """Rows of logits that it needs: one behind its last token and one behind each draft."""
        return 1 + len(self.drafts) if self.samples else 0


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step.

    Attributes:
        items: what is computed, decodes first, then prompt slices.
        preempted: requests that lost their blocks to make room for it.
        num_decode_tokens: tokens of the decodes without their drafts, which is also their number.
        num_prefill_tokens: tokens of the prompt slices (recomputed output tokens included).
        copies: (block, block) of the pool: whose content a request needs in a block of its own (`Scheduler.fork`).
        swap_out: (block, host block): what requests that lost their blocks want back.
        swap_in: (host block, block): what they get back.

    The moves come before anything is computed, in this order: `copies`, then `swap_out`, then `swap_in`. Within each,
    everything is read before anything is written. A batch may have moves and no items.
    """

    items: list[ScheduledRequest]
    preempted: list[Request]
    num_decode_tokens: int
    num_prefill_tokens: int
    copies: Pairs = ()
    swap_out: Pairs = ()
    swap_in: Pairs = ()

    @property
    def has_moves(self) -> bool:
        """Whether blocks must be copied before it is computed."""
        return bool(self.copies or self.swap_out or self.swap_in)

    @property
    def num_draft_tokens(self) -> int:
        """Drafts that the decodes take along."""
        return sum(len(item.drafts) for item in self.items)

    def drop_drafts(self) -> None:
        """Compute it without the guesses."""
        for item in self.items:
            item.num_tokens -= len(item.drafts)
            item.drafts = ()

    def takers(self, counts: Sequence[int] | None) -> list[tuple[ScheduledRequest, bool]]:
        """Whose each sampled token is, and whether it was a draft: an item that samples gets one token, or its number
        of `counts`, of which all but the last were drafts.
        """
        sampling = [item for item in self.items if item.samples]
        if counts is None:
            return [(item, False) for item in sampling]
        return [(item, i < n - 1) for item, n in zip(sampling, counts, strict=True) for i in range(n)]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return self.num_decode_tokens + self.num_prefill_tokens + self.num_draft_tokens

    @property
    def is_decode_only(self) -> bool:
        """Whether each item is one decode token: the shape that can be captured and replayed."""
        return self.num_decode_tokens > 0 and not self.num_prefill_tokens and not self.num_draft_tokens

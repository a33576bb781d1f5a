"""Which tokens of a text attention sees, and so which blocks of its KV cache can be given back while it goes on.

`KeepAll` is full attention. `TopPages` keeps everything as well, but a token of an answer reads only some blocks
(docs/decisions/0030-sparse-pages.md). `SinksAndWindow` is the compression of StreamingLLM (Xiao et al. 2023): a token
sees the first `sinks` tokens, which attention rests on when it has nothing to look at, and the last `window` ones,
itself included. What lies between is seen by no later token, so its blocks are free as soon as they are behind the
window, and a request holds a bounded number of them however long it grows. Positions stay what they were: nothing is
rotated anew (docs/decisions/0016-long-context.md says why).

The mask itself is the kernels' (`kernels/paged_attention.py`); this is the books' side of it. Torch-free.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Protocol

LEAST_PAGES = 4  # that can be asked for: the first block, the last two, and one to choose
HOLE = -1  # in a block table: this block was given back, nobody sees its tokens any more


class Retention(Protocol):
    """What is kept of a text.

    Attributes:
        setting: distinguishes two of them; what one computes is not what another computes.
    """

    @property
    def setting(self) -> tuple[int, ...]:
        """Numbers that tell it from others; () for full attention."""
        ...

    def gone(self, num_computed: int, block_size: int) -> range:
        """Indexes of the blocks that no token from position `num_computed` on sees."""
        ...

    def most_blocks(self, block_size: int, step_tokens: int) -> int:
        """Most blocks that a request holds which computes up to `step_tokens` tokens in a step."""
        ...

    def seen(self, num_tokens: int, step_tokens: int) -> int:
        """How many of the first `num_tokens` tokens the last `step_tokens` of them see together."""
        ...

    def sure(self, num_prompt: int) -> int:
        """How many tokens of a text have the keys and values that they have in any text beginning so, if `num_prompt`
        of this one are its prompt. Others may find their blocks.
        """
        ...


@dataclass(frozen=True)
class KeepAll:
    """Full attention: every token sees all before it."""

    setting: tuple[int, ...] = ()

    def gone(self, num_computed: int, block_size: int) -> range:
        """Nothing."""
        return range(0)

    def most_blocks(self, block_size: int, step_tokens: int) -> int:
        """No bound."""
        return sys.maxsize

    def seen(self, num_tokens: int, step_tokens: int) -> int:
        """All."""
        return num_tokens

    def sure(self, num_prompt: int) -> int:
        """All."""
        return sys.maxsize


@dataclass(frozen=True)
class SinksAndWindow:
    """The first `sinks` tokens and the last `window`, at least 1.

    A block is given back when all of it lies between the two.
    """

    sinks: int
    window: int

    @property
    def setting(self) -> tuple[int, ...]:
        """The two numbers."""
        return self.sinks, self.window

    def gone(self, num_computed: int, block_size: int) -> range:
        """Full blocks behind the sinks and before the window of the token at `num_computed`."""
        first_kept = num_computed + 1 - self.window  # the oldest position in that token's window
        return range(-(-self.sinks // block_size), max(0, first_kept) // block_size)

    def most_blocks(self, block_size: int, step_tokens: int) -> int:
        """Those of the sinks, and those that `window` and `step_tokens` tokens touch, which may begin inside one."""
        return -(-self.sinks // block_size) + -(-(self.window + step_tokens - 1) // block_size) + 1

    def seen(self, num_tokens: int, step_tokens: int) -> int:
        """The sinks and a window that is longer by the step's other tokens."""
        return min(num_tokens, self.sinks + self.window + step_tokens - 1)

    def sure(self, num_prompt: int) -> int:
        """All."""
        return sys.maxsize


@dataclass(frozen=True)
class TopPages:
    """Everything is kept. A token of a prompt sees all before it, one of an answer at most `pages` blocks."""

    pages: int
    block_size: int

    @property
    def setting(self) -> tuple[int, ...]:
        """The number of blocks."""
        return (self.pages,)

    def gone(self, num_computed: int, block_size: int) -> range:
        """Nothing."""
        return range(0)

    def most_blocks(self, block_size: int, step_tokens: int) -> int:
        """No bound."""
        return sys.maxsize

    def seen(self, num_tokens: int, step_tokens: int) -> int:
        """For one token its blocks, and of every block the bounds, which are as much as one token's key and value."""
        most = self.pages * self.block_size
        return num_tokens if step_tokens > 1 or num_tokens <= most else most + num_tokens // self.block_size

    def sure(self, num_prompt: int) -> int:
        """The prompt, and what is so short that all of it is seen."""
        return max(num_prompt, self.pages * self.block_size)


def retention(sinks: int, window: int, pages: int, block_size: int) -> Retention:
    """What a setting keeps: a window or a number of pages, not both; 0 and 0 keep everything."""
    if pages:
        return TopPages(pages, block_size)
    return SinksAndWindow(sinks, window) if window else KeepAll()

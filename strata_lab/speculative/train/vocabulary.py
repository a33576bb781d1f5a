"""The draft's vocabulary: the tokens that the target uses most.

A head over 8,192 of 49,152 tokens costs a sixth and can say nearly every token of a usual text; where the target says
another one, the guess is wrong and nothing else happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from strata_lab.settings import ConfigError
from strata_lab.speculative.traffic import Text

FEWEST = 16
MULTIPLE = 16  # of tokens, so that the head's rows fill the kernels' tiles


def check_count(count: int) -> None:
    """`ConfigError` for a vocabulary that is too small or no multiple of 16."""
    if count < FEWEST or count % MULTIPLE:
        near = max(FEWEST, -(-count // MULTIPLE) * MULTIPLE)
        raise ConfigError(f"vocab={count} must be a multiple of {MULTIPLE} from {FEWEST} on; try {near}")


def most_used(texts: Iterable[Text], count: int, vocab_size: int, always: Sequence[int] = ()) -> Tensor:
    """Ids of the tokens to keep: [min(count, vocab_size)] int64, ascending.

    Args:
        texts: whose outputs are counted.
        count: how many, as `check_count` allows; what the texts do not fill is taken from the lowest ids, which merges
            of bytes give to the most frequent tokens.
        vocab_size: of the target.
        always: ids that are kept however seldom they are, such as the end tokens.
    """
    used = Counter(chain.from_iterable(text.output for text in texts))
    ranked = [token_id for token_id, _ in used.most_common()]
    chosen = dict.fromkeys(chain(always, ranked, range(vocab_size)))
    return torch.tensor(sorted(list(chosen)[: min(count, vocab_size)]), dtype=torch.int64)


def coverage(texts: Iterable[Text], to_target: Tensor) -> float:
    """Share of the texts' output tokens that are in the vocabulary, 0.0 to 1.0."""
    kept = set(to_target.tolist())
    tokens = list(chain.from_iterable(text.output for text in texts))
    return sum(token_id in kept for token_id in tokens) / max(1, len(tokens))

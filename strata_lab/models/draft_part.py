"""What a draft's folder says about the model it guesses for: the "draft" part of its manifest.

Such a folder has no embedding of its own and a head over some of the target's tokens (`speculative/train/`), so it can
do nothing without the target, and says so where somebody loads it alone. Torch-free.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from strata_lab.models.errors import CheckpointError

EMBEDDING = "model.embed_tokens.weight"  # the target's
TOKENS, FEATURES = KINDS = ("tokens", "features")  # what a draft sees: tokens alone, or the target's states as well
# Of a draft that sees states: how a row is made of a token and of its own state before it, which is normed first.
TOKEN_PROJ, STATE_PROJ, STATE_NORM = "model.token_proj.weight", "model.state_proj.weight", "model.state_norm.weight"
SEEN_PROJ, SEEN_NORM = "model.seen.{}.state_proj.weight", "model.seen.{}.state_norm.weight"  # of a target's state
PROBE = "The quick brown fox: 3.14, naïve café\n\tdef f(x): return x"  # what differs between tokenizers shows here


@dataclass(frozen=True)
class DraftPart:
    """Whose draft it is.

    Attributes:
        target: the model's name.
        vocab_size: tokens of the target.
        to_target: the draft's tokens as the target's ids, ascending.
        probe: how the target's tokenizer splits `PROBE`; None where it has no tokenizer.
        facts: how it was trained, and acceptance on texts it has not seen ("before", "after").
        kind: of `KINDS`.
        mark: of the target whose states it sees (`state_mark`); 0 for a draft of tokens.
        seen: how many of the target's layers lie below each of the states that it sees, ascending; none for a draft of
            tokens.
    """

    target: str
    vocab_size: int
    to_target: tuple[int, ...]
    probe: tuple[int, ...] | None
    facts: dict[str, Any]
    kind: str = TOKENS
    mark: int = 0
    seen: tuple[int, ...] = ()

    @classmethod
    def read(cls, path: Path, found: Any, vocab_size: int) -> DraftPart | None:
        """The part of a manifest; None where it has none.

        Raises:
            CheckpointError: it does not fit a draft of `vocab_size` tokens.
        """
        if found is None:
            return None
        try:
            probe = found["probe"]
            part = cls(
                str(found["target"]), int(found["vocab_size"]), tuple(found["to_target"]),
                None if probe is None else tuple(int(i) for i in probe), dict(found["facts"]),
                found.get("kind", TOKENS), int(found.get("mark", 0)), tuple(int(i) for i in found.get("seen", ())),
            )  # fmt: skip
            if part.kind not in KINDS:
                raise ValueError(f"kind={part.kind!r}")
            if (part.kind == FEATURES) != bool(part.seen) or any(a >= b for a, b in pairwise((0, *part.seen))):
                raise ValueError(f"seen={list(part.seen)} of kind={part.kind!r}")
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: the draft's part is damaged ({error!r}); train the draft again") from error
        ids = (-1, *part.to_target, part.vocab_size)
        if not all(type(i) is int for i in ids) or any(a >= b for a, b in pairwise(ids)):
            raise CheckpointError(
                f"{path}: to_target must be ascending token ids below {part.vocab_size}; train the draft again"
            )
        if len(part.to_target) != vocab_size:
            raise CheckpointError(
                f"{path}: to_target has {len(part.to_target)} tokens and the head {vocab_size}; train the draft again"
            )
        return part

    def own_tensors(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Name and shape of what such a draft has beside the tensors of a model of its geometry."""
        if self.kind != FEATURES:
            return {}
        square, norm = (hidden_size, hidden_size), (hidden_size,)
        own: dict[str, tuple[int, ...]] = {TOKEN_PROJ: square, STATE_PROJ: square, STATE_NORM: norm}
        for index in range(len(self.seen)):
            own |= {SEEN_PROJ.format(index): square, SEEN_NORM.format(index): norm}
        return own


def state_mark(final_norm: Any) -> int:
    """Tells models apart by the weight of their final norm, a tensor [hidden], alike in all formats."""
    return zlib.crc32(final_norm.bfloat16().float().numpy().tobytes())

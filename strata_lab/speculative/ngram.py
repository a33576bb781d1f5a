"""Prompt look-up: what followed the last time the text had these last tokens, in prompt or output. Torch-free.

An index per request maps the n-grams of two sizes to where they ended; each entry leads to the one before it. A new
token costs one entry per size, a look-up a few steps along such a chain: O(1) amortized, whatever the length of the
text. Of the places on the chain the one with the longest common past is taken; its length is the evidence that the text
is being repeated. There is nothing to train and nothing to load. It never looks into another request's text.
"""

from __future__ import annotations

from collections.abc import Sequence

from strata_lab.request import Request

SIZES = (4, 2)  # tokens; one that has the larger in common is worth more than all that have the smaller
HOPS = 6  # earlier places that are compared
MAX_MATCH = 24  # tokens of a common past that are counted
_TOKEN_BITS = 20  # of an n-gram's key; vocabularies have at most 2^19 tokens (`sampling_draw.MAX_VOCAB_SIZE`)


class NgramIndex:
    """Where the n-grams of one text ended.

    Args:
        token_ids: the text: the live list, which only grows.
    """

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self._num_read = 0
        self._key = 0  # the last tokens, `_TOKEN_BITS` each
        self._latest: tuple[dict[int, int], ...] = tuple({} for _ in SIZES)
        self._earlier: tuple[list[int], ...] = tuple([] for _ in SIZES)

    def read(self) -> None:
        """Take in the tokens that are new since the last call."""
        tokens, key = self.token_ids, self._key
        tables = [(n, _mask(n), self._latest[i], self._earlier[i]) for i, n in enumerate(SIZES)]
        for position in range(self._num_read, len(tokens)):
            for size, mask, latest, earlier in tables:
                gram = key & mask
                earlier.append(latest.get(gram, -1) if position >= size else -1)
                if position >= size:
                    latest[gram] = position  # what follows the n-gram
            key = (key << _TOKEN_BITS | tokens[position]) & _mask(SIZES[0])
        self._key, self._num_read = key, len(tokens)

    def find(self) -> tuple[int, int]:
        """Position behind the best earlier place like the end of the text, and their common length; (-1, 0) if none."""
        best, longest = -1, 0
        for size, latest, earlier in zip(SIZES, self._latest, self._earlier, strict=True):
            position = latest.get(self._key & _mask(size), -1) if self._num_read >= size else -1
            for _ in range(HOPS):
                if position < 0:
                    break
                length = self._common(position)
                if length > longest:
                    best, longest = position, length
                position = earlier[position]
            if best >= 0:
                break
        return best, longest

    def _common(self, position: int) -> int:
        """How many tokens before `position` are those at the end of the text."""
        tokens, end, length = self.token_ids, len(self.token_ids), 0
        most = min(MAX_MATCH, position)
        while length < most and tokens[position - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length

    def follow(self, position: int, count: int) -> list[int]:
        """The `count` tokens from `position` on; past the end of the text it goes on with what it has copied."""
        copied = self.token_ids[position : position + count]
        period = len(copied)
        return (copied * -(-count // period))[:count] if period < count else copied


def _mask(size: int) -> int:
    return (1 << _TOKEN_BITS * size) - 1


class NgramDrafter:
    """`Drafter` that copies from the request's own text."""

    name = "ngram"
    # Tokens in common. Ordinary prose repeats pairs by chance; code and lists repeat phrases; an edit copies sentences.
    classes = (("prose", SIZES[-1]), ("code", 5), ("repetition", 12))
    costs_time = look_is_work = False
    captures = 0

    def __init__(self) -> None:
        self._indexes: dict[Request, NgramIndex] = {}
        self._found: dict[Request, int] = {}

    def look(self, requests: Sequence[Request]) -> list[int]:
        """Length of the common past of the best place; 0 where there is none."""
        self._found = {}
        evidence = []
        for request in requests:
            index = self._indexes.get(request)
            if index is None:
                index = self._indexes[request] = NgramIndex(request.token_ids)
            index.read()
            self._found[request], length = index.find()
            evidence.append(length)
        if len(self._indexes) > 2 * len(requests) + 8:  # some ended without notice: aborted, for example
            for request in [r for r in self._indexes if r.finished]:
                self.forget(request)
        return evidence

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """What followed at the places that `look` found."""
        return [
            self._indexes[request].follow(self._found[request], count)
            for request, count in zip(requests, counts, strict=True)
        ]

    def forget(self, request: Request) -> None:
        """Drop its index."""
        self._indexes.pop(request, None)
        self._found.pop(request, None)

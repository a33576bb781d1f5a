"""Two settings of one engine in turns, a few tokens each: what tells a difference of 3% from a busy machine.

The same requests run twice in one engine, once under either setting, and only one copy of them is there at a time: a
few tokens under the first setting, then as many under the second, then the other way round. Two such segments compute
the same tokens behind texts of the same length, milliseconds apart, so what else the machine does meets both alike.
What it does to one of them alone is told by its time: pairs do not count in which one took far longer than others of
the same steps. It knows no workload and writes no record.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from strata_lab.batch import ScheduledBatch
from strata_lab.bench.measure import COUNTS_CAPTURES, RunFailed
from strata_lab.events import StepEvent
from strata_lab.intake import Prompt
from strata_lab.request import Request, RequestOutput
from strata_lab.sampling_params import SamplingParams

# Of each request in a segment. On a CPU as few as tell a step behind a step from one behind a pause. A card fills its
# queue of steps anew after each change of sides and forgets what it has queued, so there a segment is a whole answer.
SEGMENT_TOKENS = {"cpu": 2, "cuda": 256}
DISTURBED = 1.5  # times the median of segments of the same steps
RESAMPLES = 1000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Segment:
    """Steps of one side, one after the other.

    Attributes:
        sizes: tokens computed in each.
        ms: wall time.
        tokens: that the requests got, together.
        whole: all requests decoded in every step.
        captures: made in its steps.
    """

    sizes: tuple[int, ...]
    ms: float
    tokens: int
    whole: bool = True
    captures: int = 0


@dataclass(frozen=True)
class Pair:
    """The same piece of the same texts on both sides."""

    off: Segment
    on: Segment

    @property
    def ratio(self) -> float:
        """Speed with over speed without."""
        return speed_ratio([self])


def speed_ratio(pairs: Sequence[Pair]) -> float:
    """Tokens per second with over tokens per second without, over all pairs together."""
    on = sum(pair.on.tokens for pair in pairs) / sum(pair.on.ms for pair in pairs)
    return on * sum(pair.off.ms for pair in pairs) / sum(pair.off.tokens for pair in pairs)


def ratio_interval(pairs: Sequence[Pair], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Where `speed_ratio` lies if such pairs are drawn again: the middle `confidence` of resamples (bootstrap)."""
    dice = random.Random(len(pairs))
    found = sorted(speed_ratio(dice.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    cut = round((1 - confidence) / 2 * RESAMPLES)
    return found[cut], found[-1 - cut]


def undisturbed_pairs(pairs: Sequence[Pair]) -> list[Pair]:
    """Those in which neither segment took `DISTURBED` times what segments of the same sizes take, on whichever side.

    All of them, where none is left.
    """
    times: dict[tuple[int, ...], list[float]] = {}
    for pair in pairs:
        for segment in (pair.off, pair.on):
            times.setdefault(segment.sizes, []).append(segment.ms)
    most = {sizes: DISTURBED * statistics.median(ms) for sizes, ms in times.items()}
    calm = [p for p in pairs if p.off.ms <= most[p.off.sizes] and p.on.ms <= most[p.on.sizes]]
    return calm or list(pairs)


def run_all(engine: Any, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[RequestOutput]:
    """`generate` for an engine whose background loop does not run, and shall not."""
    names = [engine.add_request(prompt, wish) for prompt, wish in zip(prompts, params, strict=True)]
    while not all(engine.output(name).finish_reason for name in names):
        engine.step()
    outputs = [engine.output(name) for name in names]
    for name in names:
        engine.forget(name)
    if errors := [output.error for output in outputs if output.error is not None]:
        raise RunFailed(f"requests ended: {'; '.join(errors)}")
    return outputs


class Clocked:
    """`Speculation` whose work on the host is timed: `ms` of each step of decodes. Otherwise the inner one."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.ms: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def prepare(self, running: Callable[[], Sequence[Request]]) -> None:
        """Before a step."""
        started = time.perf_counter()
        self.inner.prepare(running)
        self.ms.append(_ms_since(started))

    def observe(self, batch: ScheduledBatch, counts: Sequence[int] | None, ms: float | None, began: bool) -> Any:
        """After a step."""
        started = time.perf_counter()
        observed = self.inner.observe(batch, counts, ms, began)
        self.ms[-1] += _ms_since(started)
        if batch.num_prefill_tokens:
            self.ms.pop()
        return observed


class Side:
    """A copy of a group of requests under one setting, in an engine whose background loop does not run.

    Args:
        engine: an open `LLMEngine`, stepped by nobody else.
        parts: of the setting (`EngineLoop.parts` while it is in force).
        prompts, params: of the requests.

    Attributes:
        steps: those of decodes, as they were made.
    """

    def __init__(self, engine: Any, parts: Any, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> None:
        self.engine, self.parts = engine, parts
        self.steps: list[StepEvent] = []
        self._running: list[Any] = []
        self._num_tokens = 0
        self._names = [engine.add_request(prompt, wish) for prompt, wish in zip(prompts, params, strict=True)]
        self._in_force()  # for the prompts too: a draft may see the target's states, and sees none of other prompts
        sessions = [engine._loop.session(name) for name in self._names]
        while not all(one.finished or one.request.is_decoding for one in sessions):
            self._num_tokens += len(self._step().tokens)
        self._leave()

    @property
    def texts(self) -> list[tuple[int, ...]]:
        """Token ids of each request, so far."""
        return [tuple(self.engine.output(name).token_ids) for name in self._names]

    @property
    def finished(self) -> bool:
        """Whether all requests have ended."""
        return not self._running

    def advance(self, until: int) -> Segment:
        """Step until the requests have `until` tokens on average, or have ended."""
        loop = self.engine._loop
        self._in_force()
        loop.scheduler.running[:] = self._running
        captures = loop.captures
        tokens, whole, sizes, started = 0, True, [], time.perf_counter()
        while self._num_tokens + tokens < until * len(self._names) and loop.scheduler.running:
            event = self._step()
            sizes.append(event.num_decode_tokens + sum(len(draft.token_ids) for draft in event.drafts))
            self.steps.append(event)
            tokens += len(event.tokens)
            whole = whole and event.num_decode_tokens == len(self._names)
        ms = _ms_since(started)
        self._num_tokens += tokens
        self._leave()
        return Segment(tuple(sizes), ms, tokens, whole and tokens > 0, loop.captures - captures)

    def forget(self) -> None:
        """Drop the requests."""
        for name in self._names:
            self.engine.forget(name)

    def _in_force(self) -> None:
        self.engine._loop.put_in_force(self.parts, self.engine._builder.new_block_manager, 0.0)

    def _step(self) -> StepEvent:
        event = self.engine.step()
        while event is None and self.engine._loop.scheduler.running:  # a prompt that is computed beside the steps
            event = self.engine.step()
        if event is None or any(token.error is not None for token in event.tokens):
            errors = [output.error for output in map(self.engine.output, self._names) if output.error is not None]
            raise RunFailed(f"requests ended: {'; '.join(errors) or 'no step was left for them'}")
        return event

    def _leave(self) -> None:
        """Take the requests out of the scheduler's sight; they keep their blocks."""
        running = self.engine._loop.scheduler.running
        self._running = list(running)
        running.clear()


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3


@dataclass
class Turns:
    """Both sides of a group, run to their ends.

    Attributes:
        off, on: the sides.
        pairs: segments in which all requests decoded on both sides.
        pairs_capturing: such that do not count, since something was captured in them (`COUNTS_CAPTURES`).
        off_ms, on_ms: wall time until the last request had ended.
    """

    off: Side
    on: Side
    pairs: list[Pair] = field(default_factory=list)
    pairs_capturing: int = 0
    off_ms: float = 0.0
    on_ms: float = 0.0

    def run(self) -> Turns:
        """Take turns until all have ended; the side that begins changes from pair to pair."""
        device = self.off.engine.device.type
        segment_tokens = SEGMENT_TOKENS[device]
        until, sides = segment_tokens, [self.off, self.on]
        while not (self.off.finished and self.on.finished):
            found = {id(side): side.advance(until) for side in sides}
            off, on = found[id(self.off)], found[id(self.on)]
            self.off_ms += off.ms
            self.on_ms += on.ms
            if off.whole and on.whole and (off.captures or on.captures) and not COUNTS_CAPTURES[device]:
                self.pairs_capturing += 1
            elif off.whole and on.whole:
                self.pairs.append(Pair(off, on))
            sides.reverse()
            until += segment_tokens
        return self

"""Drafting and verifying ahead of the host: the device guesses, verifies and goes on, and the host reads the tokens.

A cycle is captured whole: the guesses of a draft model or of a look-up in the text, the target's step over the last
token and the drafts, sampling, and moving each request on behind what came true (`window_state.py`). Two cycles are
queued, as `run_ahead.py` queues steps; how many drafts a cycle has is chosen when it is queued. Nobody waits for a
cycle but who reads its tokens, so a kernel follows a kernel.

The scheduler takes part as with any drafts: the guesses of a step stand in its items as `TO_BE_GUESSED`, and the runner
puts the device's in their place. What was queued is used while the scheduler asks for the same requests at the places
where they are; anything else lands the flight, and steps without drafts go the way of `RunAhead`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from strata_lab.batch import TO_BE_GUESSED, ScheduledBatch, ScheduledRequest
from strata_lab.capture import captured_width
from strata_lab.device_sampling import fill, send
from strata_lab.request import Request
from strata_lab.run_ahead import RunAhead, sampled_on_device
from strata_lab.runner import StepResult
from strata_lab.sampler import SampledTokens
from strata_lab.scheduler import most_slots
from strata_lab.speculative.cycles import MIN_WIDTH, REQUESTS, Captured, Cycles
from strata_lab.speculative.draft_model import DraftModel
from strata_lab.speculative.look_up import LookUp

CYCLES_AHEAD = 2  # queued at most: one that runs while the host books the one before


@dataclass
class _Unit:
    """A queued cycle: `report` of its state, readable once `done` has happened."""

    num_drafts: int
    report: Tensor
    done: Any


@dataclass
class _Flight:
    """The queued cycles of one batch.

    Attributes:
        captured: what is replayed.
        drawn: whether a request has a temperature.
        requests: by row.
        rows: request to row, by identity.
        tables: block table of each row; a request that lost its blocks and has others now is another matter.
        start: position of each row's token in the first unit.
        last: slots that each row can ever fill.
        known: blocks of each row that the device knows, of the target's pool and of the draft model's.
        started: event before the next unit.
        began: nothing of it was handed out yet.
    """

    captured: Captured
    drawn: bool
    requests: list[Request]
    rows: dict[int, int]
    tables: list[list[int]]
    start: list[int]
    last: list[int]
    known: list[tuple[int, int]]
    started: Any
    began: bool = True
    units: deque[_Unit] = field(default_factory=deque)


class AheadDrafter:
    """`Drafter` whose guesses are made by the device, in the cycle that verifies them.

    Args:
        model: knows which texts it has taken in; or a look-up.
    """

    name: str
    classes: tuple[tuple[str, int], ...]
    costs_time = False  # a cycle's cost has its drafts in it
    look_is_work: bool

    def __init__(self, model: DraftModel | LookUp) -> None:
        self.model, self.name, self.classes = model, model.name, model.classes
        self.look, self.forget, self.look_is_work = model.look, model.forget, model.look_is_work

    @property
    def captures(self) -> int:
        """Of the draft model's steps on the host, which take texts in."""
        return self.model.captures

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """Places for so many guesses."""
        return [[TO_BE_GUESSED] * count for count in counts]


class DraftAhead:
    """A `Runner` that drafts and verifies ahead of the host.

    Args:
        ahead: decodes without drafts, and has the target.
        model: the draft model; which texts it has taken in, and its blocks. Or a look-up, which has neither.
        cycles: of both, captured.
    """

    def __init__(self, ahead: RunAhead, model: DraftModel | LookUp, cycles: Cycles) -> None:
        self.ahead, self.model, self.cycles = ahead, model, cycles
        self.block_size, self.device = ahead.block_size, ahead.device
        self._flight: _Flight | None = None

    @property
    def lookahead(self) -> int:
        """Tokens that it wants blocks reserved for: a full queue of which everything comes true, and a cycle more."""
        return max(self.ahead.lookahead, (CYCLES_AHEAD + 1) * (1 + self.cycles.drafts[-1]))

    @property
    def max_model_len(self) -> int:
        """Longest request."""
        return self.ahead.max_model_len

    @max_model_len.setter
    def max_model_len(self, length: int) -> None:
        self.ahead.max_model_len = length

    @property
    def capture_bytes(self) -> int:
        """Device memory that captures took, those of steps without drafts included."""
        return self.cycles.recorder.capture_bytes + self.ahead.capture_bytes

    @property
    def captures(self) -> int:
        """As of `Runner`."""
        return self.cycles.recorder.captures + self.ahead.captures

    def run(self, batch: ScheduledBatch) -> StepResult:
        """Tokens of the batch; where it has drafts, those that the device made, verified."""
        if not batch.num_decode_tokens:  # prompts alone leave the queued cycles as they are
            return self.ahead.run(batch)
        wanted = max(len(item.drafts) for item in batch.items)
        flight = self._going_on(batch, wanted)
        plain = flight is None and self.ahead.goes_on(batch)  # steps without drafts that are queued are used up first
        if flight is None and not plain and wanted and self._eligible(batch):
            flight = self._take_off(batch.items, wanted)
        if flight is not None and flight.units and (result := self._next(flight, batch)) is not None:
            return result
        self._land()
        if not plain:
            batch.drop_drafts()
        return self.ahead.run(batch)

    def settle(self) -> None:
        """Wait for everything queued and forget it."""
        if self._flight is not None:
            for unit in self._flight.units:
                unit.done.synchronize()
        self._land()
        self.ahead.settle()

    # -- what was computed ahead ----------------------------------------------------------------------------------

    def _eligible(self, batch: ScheduledBatch) -> bool:
        return not batch.num_prefill_tokens and len(batch.items) <= REQUESTS[-1] and sampled_on_device(batch)

    def _going_on(self, batch: ScheduledBatch, wanted: int) -> _Flight | None:
        """The flight in the air, with cycles for this batch; None, and none is in the air, where it has none."""
        flight = self._flight
        if flight is not None and self._continues(flight, batch):
            if wanted and len(batch.items) == len(flight.requests):
                self._extend(flight, batch.items, wanted)
            if flight.units:
                return flight
        self._land()
        return None

    def _continues(self, flight: _Flight, batch: ScheduledBatch) -> bool:
        """Whether the next queued cycle begins where `batch` does (and perhaps has idle rows besides)."""
        if batch.num_prefill_tokens:
            return False
        for item in batch.items:
            row = flight.rows.get(id(item.request), -1)
            if row < 0 or item.block_table is not flight.tables[row] or item.start != flight.start[row]:
                return False
        return True

    def _next(self, flight: _Flight, batch: ScheduledBatch) -> StepResult | None:
        """Tokens of the first queued cycle; None where only the host can tell one of them."""
        unit = flight.units.popleft()
        unit.done.synchronize()  # SYNC: tokens and drafts to the host
        fed, sampled = unit.report.tolist()
        step_ms, flight.started = flight.started.elapsed_time(unit.done), unit.done
        began, flight.began = flight.began, False
        kept = [self._kept(flight, row, unit.num_drafts, fed, sampled) for row in range(len(flight.requests))]
        flight.start = [start + len(tokens) for start, (tokens, _) in zip(flight.start, kept, strict=True)]
        token_ids: list[int] = []
        counts: list[int] = []
        for item in batch.items:
            tokens, drafts = kept[flight.rows[id(item.request)]]
            if tokens[-1] < 0:
                return None
            item.drafts, item.num_tokens = drafts, 1 + len(drafts)
            token_ids += tokens
            counts.append(len(tokens))
        nothing: list[None] = [None] * len(token_ids)
        tokens_of = SampledTokens(token_ids, list(nothing), list(nothing), counts)
        return StepResult(tokens_of, step_ms, 0.0, queued=True, began=began)

    def _kept(
        self, flight: _Flight, row: int, num_drafts: int, fed: list[list[int]], sampled: list[list[int]]
    ) -> tuple[list[int], list[int]]:
        """A row's tokens, and its drafts that had a slot, as `close_window` counts them."""
        num_rows = max(1, min(1 + num_drafts, flight.last[row] - flight.start[row]))
        drafts = [fed[j][row] for j in range(1, num_rows)]
        count = 1
        while count < num_rows and sampled[count - 1][row] == drafts[count - 1]:
            count += 1
        return [sampled[j][row] for j in range(count)], drafts

    def _land(self) -> None:
        """Forget the queued cycles."""
        if self._flight is not None:
            for request in self._flight.requests:
                self.model.land(request)
            self._flight = None

    # -- queueing -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _extend(self, flight: _Flight, items: Sequence[ScheduledRequest], wanted: int) -> None:
        """Queue cycles while there are blocks for all that may come true, and requests that will need them."""
        num_drafts = max(count for count in self.cycles.drafts if count <= wanted)
        while len(flight.units) < CYCLES_AHEAD:
            ahead = sum(1 + unit.num_drafts for unit in flight.units)
            if not self._make_room(flight, items, ahead, 1 + num_drafts):
                return
            self._launch(flight, num_drafts)

    def _make_room(self, flight: _Flight, items: Sequence[ScheduledRequest], ahead: int, num_rows: int) -> bool:
        """Whether one more cycle behind `ahead` tokens lies in blocks that the device knows; it is told of new ones."""
        needed = False
        state = flight.captured.state
        widths = state.rows.block_tables.shape[1], state.draft_tables.shape[1]
        for item in items:
            row, start = flight.rows[id(item.request)], item.start + ahead
            reach = min(start + num_rows, flight.last[row])
            drafted = self.model.fly(item.request, reach)
            if drafted is None or len(drafted) > widths[1]:
                return False
            if reach > min(len(item.block_table), widths[0]) * self.block_size:
                return False
            needed = needed or start < flight.last[row]
            lengths = min(len(item.block_table), widths[0]), len(drafted)
            if lengths != flight.known[row]:
                flight.known[row] = lengths
                of_rows = state.rows.block_tables, item.block_table[: lengths[0]]
                for tables, known in (of_rows, (state.draft_tables, drafted)):
                    # From pinned memory: a copy from any other waits for the queued cycles.
                    pinned = torch.tensor(known, dtype=torch.int32, pin_memory=self.device.type == "cuda")
                    by_step = tables.view(-1, state.base.input_ids.shape[0], tables.shape[1])
                    by_step[:, row, : len(known)] = pinned.to(self.device, non_blocking=True)
        return needed

    def _launch(self, flight: _Flight, num_drafts: int) -> None:
        flight.captured.replays[num_drafts, flight.drawn]()
        report = flight.captured.state.report
        copy = torch.empty(report.shape, dtype=report.dtype, pin_memory=self.device.type == "cuda")
        copy.copy_(report, non_blocking=True)
        done = self.ahead.clock()
        done.record()
        flight.units.append(_Unit(num_drafts, copy, done))

    # -- a new batch ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _take_off(self, items: list[ScheduledRequest], wanted: int) -> _Flight | None:
        """Write the batch into a captured state and queue its first cycles, if there are blocks for one.

        None where the draft model has no room for the texts or does not know them.
        """
        started = self.ahead.clock()
        started.record()  # its first cycle takes as long as its inputs take to be there
        size, drawn = self.block_size, any(not item.request.params.greedy for item in items)
        last = [most_slots(item.request, self.max_model_len) for item in items]
        reach = [min(item.start + self.lookahead, end) for item, end in zip(items, last, strict=True)]
        tables = [self.model.fly(item.request, end) for item, end in zip(items, reach, strict=True)]
        known = [table for table in tables if table is not None]
        if len(known) < len(items):
            for item in items:
                self.model.land(item.request)
            return None
        blocks = max(*(-(-end // size) for end in reach), *(len(item.block_table) for item in items))
        num_seqs = next(count for count in REQUESTS if count >= len(items))
        widths = [max(MIN_WIDTH, captured_width(count)) for count in (blocks, max(map(len, known)))]
        captured = self.cycles.captured(num_seqs, *widths, drawn=drawn)
        state = captured.state
        fill(state.base, items, size, self.ahead.eager.model.config.vocab_size, self.max_model_len)
        padding = num_seqs - len(items)
        before = [item.request.token_ids[item.start - 1] for item in items]
        send(state.previous_ids, before + [0] * padding)
        send(state.drafts.max_seq_lens, [min(end, self.cycles.max_draft_len) for end in last] + [0] * padding)
        empty = [0] * widths[1]
        send(state.drafts.block_tables, [(t + empty)[: widths[1]] for t in known] + [empty] * padding)
        state.spread()
        self.cycles.guesses.begin(captured.kept, [item.request for item in items])
        self._flight = flight = _Flight(
            captured=captured,
            drawn=drawn,
            requests=[item.request for item in items],
            rows={id(item.request): row for row, item in enumerate(items)},
            tables=[item.block_table for item in items],
            start=[item.start for item in items],
            last=last,
            known=[(len(item.block_table), len(table)) for item, table in zip(items, known, strict=True)],
            started=started,
        )
        self._extend(flight, items, wanted)
        return flight

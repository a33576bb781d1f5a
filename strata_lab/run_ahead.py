"""Decoding ahead of the host: the device feeds its own tokens back, and the host reads them when they arrive.

A decode step is captured whole: model, sampling, and writing the next step's inputs (`DecodeState`). While the host
still books the last token, the following steps are queued already, so a step costs what the device needs and Python
nothing. How far ahead is bounded by the blocks that the scheduler reserved (`Scheduler.lookahead`).

What the device computed ahead is used only while it is what the scheduler asks for: same requests, same positions. A
request that ended leaves its row idle until the queued steps are used up; anything else (a prompt to compute, a row
that needs the host's sampler) drops the queued steps. Dropped steps leave nothing behind but keys and values in slots
that their requests own and will write again, or owned when the steps were queued: whatever a new owner does to them
comes later in the same stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from strata_lab.batch import ScheduledBatch, ScheduledRequest
from strata_lab.capture import MIN_TABLE_WIDTH, Recorder, captured_width
from strata_lab.device_sampling import DecodeState, DeviceSampling, fill, send
from strata_lab.request import Request
from strata_lab.runner import EagerStep, Runner, States, StepInputs, StepResult
from strata_lab.sampler import SampledTokens
from strata_lab.sampling_edits import edits_logits
from strata_lab.scheduler import most_slots

REPLAYS_AHEAD = 2  # queued at most: one that runs while the host books the one before; a new batch waits for both
STEPS_PER_REPLAY = 2  # at batch sizes up to SMALL_BATCH; halves the gaps between graphs where steps are short
SMALL_BATCH = 2
WARM_UP_REPLAYS = 3
LOOKAHEAD_TOKENS = 2 * REPLAYS_AHEAD * STEPS_PER_REPLAY  # blocks to reserve, so that a full queue never waits for one


@dataclass
class _Graph:
    """Captured steps of one (batch size, table width, steps, drawn or not).

    `states`: of its rows, step after step, valid until the next replay; none where nobody asked for them.
    """

    state: DecodeState
    steps: int
    replay: Callable[[], None]
    states: Sequence[States]


@dataclass
class _Unit:
    """One queued replay: rows of tokens, readable once `done` has happened, of which `popped` were handed out.

    `states`: of the rows, [steps, layers, B, hidden], in memory of its own; None where nobody asked for them.
    """

    tokens: Tensor
    done: Any
    states: Tensor | None
    values: list[list[int]] | None = None
    popped: int = 0


@dataclass
class _Flight:
    """The queued steps of one batch.

    Attributes:
        requests: by row.
        first: position of each row's token in the first step.
        rows: request to row, by identity.
        tables: block table of each row; a request that lost its blocks and has others now is another matter.
        table_lengths: blocks of each row that the device knows.
        popped, launched: steps handed out and queued since the beginning.
        started: event before the next unit, for its duration.
        step_ms: device milliseconds of a step of the unit that is being handed out.
    """

    graph: _Graph
    requests: list[Request]
    first: list[int]
    rows: dict[int, int]
    tables: list[list[int]]
    table_lengths: list[int]
    started: Any
    step_ms: float = 0.0
    popped: int = 0
    launched: int = 0
    units: deque[_Unit] = field(default_factory=deque)


class RunAhead:
    """A `Runner` that decodes ahead.

    Args:
        runner: computes everything else: prompts, mixed batches, rows that need the host's sampler.
        eager: the step that is captured.
        recorder: how this device captures, and the batch sizes it captures.
        sampling: the device's sampling.
        clock: makes the events that mark the end of a step.
        progress: called with a task and a fraction while a step is captured.
    """

    lookahead = LOOKAHEAD_TOKENS
    max_model_len = 0  # set by the builder

    def __init__(
        self,
        runner: Runner,
        eager: EagerStep,
        recorder: Recorder,
        sampling: DeviceSampling,
        *,
        clock: Callable[[], Any],
        progress: Callable[[str, float], None] = lambda task, fraction: None,
    ) -> None:
        self.runner, self.eager, self.recorder, self.sampling = runner, eager, recorder, sampling
        self.clock, self.progress = clock, progress
        self.block_size, self.device = runner.block_size, runner.device
        self._graphs: dict[tuple[int, int, bool], _Graph] = {}
        self._flight: _Flight | None = None

    @property
    def capture_bytes(self) -> int:
        """Device memory that captures took: the runner beneath has the same recorder."""
        return self.recorder.capture_bytes

    @property
    def captures(self) -> int:
        """As of `Runner`."""
        return self.recorder.captures + self.runner.captures

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture the greedy step of one request; others are captured when they are first needed."""
        self._graph(1, MIN_TABLE_WIDTH, drawn=False)

    def run(self, batch: ScheduledBatch) -> StepResult:
        """Tokens of the batch, in its order; computed ahead where possible."""
        if not batch.num_decode_tokens:  # prompts alone leave the queued steps as they are
            return self.runner.run(batch)
        if not self.goes_on(batch):
            self._flight = self._take_off(batch.items) if self._eligible(batch) else None
        flight = self._flight
        if flight is None:
            return self.runner.run(batch)
        if batch.num_draft_tokens:  # tokens that are on their way need no guess; those behind them are verified
            batch.drop_drafts()
        else:
            self._extend(flight, batch)
        began = flight.popped < flight.graph.steps  # all of a unit have the same time
        tokens, step_ms, kept = self._pop(flight, batch)
        if min(tokens) < 0:  # no best logit, or a draw outside of the head: the host decides and knows the reason
            self._flight = None
            return self.runner.run(batch)
        nothing: list[None] = [None] * len(tokens)
        sampled = SampledTokens(tokens, list(nothing), list(nothing))
        return StepResult(sampled, step_ms, 0.0, kept=kept, queued=True, began=began)

    def settle(self) -> None:
        """Wait for all queued steps and forget them."""
        if self._flight is not None:
            for unit in self._flight.units:
                unit.done.synchronize()
            self._flight = None

    @torch.inference_mode()
    def replay_ms(self, items: list[ScheduledRequest], replays: int) -> tuple[float, int]:
        """Device milliseconds per step of bare replays of these greedy items, without any host work in between.

        For benchmarks, on an idle engine: it writes keys and values into the items' blocks, which must cover
        `WARM_UP_REPLAYS + replays` replays. Also returns how many different tokens the rows fed in the last step.
        """
        graph = self._graph_for(items)
        fill(graph.state, items, self.block_size, self.eager.model.config.vocab_size, self.max_model_len)
        for _ in range(WARM_UP_REPLAYS):
            graph.replay()
        first, last = self.clock(), self.clock()
        first.record()
        for _ in range(replays):
            graph.replay()
        last.record()
        last.synchronize()
        fed = graph.state.input_ids[: len(items)].tolist()  # SYNC: for the record only
        return first.elapsed_time(last) / (replays * graph.steps), len(set(fed))

    # -- what was computed ahead ----------------------------------------------------------------------------------

    def goes_on(self, batch: ScheduledBatch) -> bool:
        """Whether the next queued step computes what `batch` asks for, drafts aside (and perhaps idle rows besides)."""
        flight = self._flight
        if flight is None or not flight.units or batch.num_prefill_tokens:
            return False
        for item in batch.items:
            row = flight.rows.get(id(item.request), -1)
            if row < 0 or item.block_table is not flight.tables[row]:
                return False
            if item.start != flight.first[row] + flight.popped:
                return False
        return True

    def _pop(self, flight: _Flight, batch: ScheduledBatch) -> tuple[list[int], float, Tensor | None]:
        """The next step's tokens for the batch's items, the device's milliseconds for the step, the items' states."""
        unit = flight.units[0]
        if unit.values is None:
            unit.done.synchronize()  # SYNC: token ids to the host
            unit.values = unit.tokens.tolist()
            flight.step_ms = flight.started.elapsed_time(unit.done) / len(unit.values)
            flight.started = unit.done
        tokens, states = unit.values[unit.popped], None if unit.states is None else unit.states[unit.popped]
        unit.popped += 1
        flight.popped += 1
        if unit.popped == len(unit.values):
            flight.units.popleft()
        rows = [flight.rows[id(item.request)] for item in batch.items]
        if states is not None and rows != list(range(states.shape[1])):
            states = torch.stack([states[:, row] for row in rows], dim=1)
        return [tokens[row] for row in rows], flight.step_ms, states

    @torch.inference_mode()
    def _extend(self, flight: _Flight, batch: ScheduledBatch) -> None:
        """Queue further steps while the same rows go on and their blocks are there."""
        if len(batch.items) < len(flight.requests):
            return
        while flight.launched - flight.popped <= (REPLAYS_AHEAD - 1) * flight.graph.steps:
            ahead = flight.launched - flight.popped
            if not self._has_room(batch.items, ahead, flight.graph):
                return
            self._refresh_tables(flight, batch.items)
            self._launch(flight)

    def _has_room(self, items: Sequence[ScheduledRequest], ahead: int, graph: _Graph) -> bool:
        """Whether `graph.steps` more steps, and the slot after them, lie in known blocks; and somebody needs them."""
        width, needed = graph.state.block_tables.shape[1], False
        for item in items:
            start, last = item.start + ahead, most_slots(item.request, self.max_model_len)
            reach = min(start + graph.steps + 1, last)
            if reach > min(len(item.block_table), width) * self.block_size:
                return False
            needed = needed or start < last
        return needed

    def _refresh_tables(self, flight: _Flight, items: Sequence[ScheduledRequest]) -> None:
        for item in items:
            row, table = flight.rows[id(item.request)], item.block_table
            if len(table) > flight.table_lengths[row]:
                flight.table_lengths[row] = len(table)
                width = flight.graph.state.block_tables.shape[1]
                send(flight.graph.state.block_tables[row, : len(table)], table[:width])

    def _launch(self, flight: _Flight) -> None:
        graph = flight.graph
        graph.replay()
        tokens = torch.empty(graph.state.out_tokens.shape, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        tokens.copy_(graph.state.out_tokens, non_blocking=True)
        layers = [rows for states in graph.states for rows in states]
        kept = torch.stack(layers).unflatten(0, (graph.steps, -1)) if layers else None
        done = self.clock()
        done.record()
        flight.units.append(_Unit(tokens, done, kept))
        flight.launched += graph.steps

    # -- a new batch ----------------------------------------------------------------------------------------------

    def _eligible(self, batch: ScheduledBatch) -> bool:
        """Whether the device can decode and sample all of the batch by itself."""
        return batch.is_decode_only and self.recorder.bucket(len(batch.items)) > 0 and sampled_on_device(batch)

    @torch.inference_mode()
    def _take_off(self, items: list[ScheduledRequest]) -> _Flight | None:
        """Write the batch into a captured state and queue its first steps; None where blocks for them are missing."""
        graph = self._graph_for(items)
        if not self._has_room(items, 0, graph):
            return None
        started = self.clock()
        started.record()  # its first step takes as long as its inputs take to be there
        fill(graph.state, items, self.block_size, self.eager.model.config.vocab_size, self.max_model_len)
        flight = _Flight(
            graph=graph,
            requests=[item.request for item in items],
            first=[item.start for item in items],
            rows={id(item.request): row for row, item in enumerate(items)},
            tables=[item.block_table for item in items],
            table_lengths=[len(item.block_table) for item in items],
            started=started,
        )
        self._launch(flight)
        return flight

    def _graph_for(self, items: Sequence[ScheduledRequest]) -> _Graph:
        tokens = max(item.start for item in items) + 1 + self.lookahead
        blocks = max(-(-tokens // self.block_size), *(len(item.block_table) for item in items))
        drawn = any(not item.request.params.greedy for item in items)
        return self._graph(self.recorder.bucket(len(items)), captured_width(blocks), drawn=drawn)

    def _graph(self, num_seqs: int, width: int, *, drawn: bool) -> _Graph:
        key = (num_seqs, width, drawn)
        if key not in self._graphs:
            task = f"capturing the step of {num_seqs} up to {width * self.block_size} tokens"
            self.progress(task, 0.0)
            self._graphs[key] = self.captured_by(self.recorder, num_seqs, width, drawn=drawn)
            self.progress(task, 1.0)
        return self._graphs[key]

    def captured_by(self, recorder: Recorder, num_seqs: int, width: int, *, drawn: bool) -> _Graph:
        """A capture of its own: an idle state, and the steps that work on it."""
        steps = STEPS_PER_REPLAY if num_seqs <= SMALL_BATCH else 1
        state = self.sampling.state(num_seqs, width, steps)
        inputs = decode_inputs(state)
        sample = self.sampling.drawn if drawn else self.sampling.greedy

        def work() -> list[States]:
            kept = []
            for step in range(steps):
                logits, states = self.eager.rows(inputs)
                sample(logits, state, step)
                kept.append(states if self.eager.seen else ())
            return kept

        replay, kept = recorder.record(work, self.device)
        return _Graph(state, steps, replay, kept)


def sampled_on_device(batch: ScheduledBatch) -> bool:
    """Whether every item gets a token, and the device's sampling can choose it."""
    return all(
        item.samples and item.request.params.logprobs is None and not edits_logits(item.request.params)
        for item in batch.items
    )


def decode_inputs(state: DecodeState) -> StepInputs:
    """A decode step that reads its inputs where the sampling of the step before writes them."""
    num_seqs, width = state.block_tables.shape
    return replace(
        StepInputs.idle(num_seqs, width, state.input_ids.device),
        input_ids=state.input_ids,
        positions=state.positions,
        slot_mapping=state.slot_mapping,
        block_tables=state.block_tables,
        seq_lens=state.seq_lens,
    )

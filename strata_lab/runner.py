"""A scheduled batch becomes tensors, logits and tokens.

The runner owns no policy: the scheduler says what to compute, a `Step` computes it (op by op, compiled or captured:
`graph_runner.py`), the sampler chooses. Host work here is a few small arrays per step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from strata_lab.batch import ScheduledBatch, ScheduledRequest
from strata_lab.kv_cache import KVCache
from strata_lab.layers.attention import StepContext
from strata_lab.models.base import CausalLM
from strata_lab.prompt_embeds import EmbeddedRows
from strata_lab.prompt_rows import prompt_rows, wanted_in
from strata_lab.request import Request, TokenLogprobs
from strata_lab.sampler import SampledTokens, Sampler
from strata_lab.speculative.verifier import sample_items


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens of one text that a step computes.

    Attributes:
        token_ids: the tokens.
        start: their first position.
        block_table: blocks of the text, up to its last token at least.
        num_rows: how many of the last tokens need logits.
        num_prompt: tokens of the text that are its prompt.
    """

    token_ids: list[int]
    start: int
    block_table: list[int]
    num_rows: int
    num_prompt: int = 0


@dataclass(frozen=True)
class StepInputs:
    """One step on the device.

    Attributes:
        input_ids, positions, slot_mapping: [T] int64.
        block_tables: [B, max_blocks] int32, padded with 0.
        seq_lens: tokens in the cache per request after this step's writes, [B] int32.
        cu_seqlens_q: [B + 1] int32.
        prompt_lens: tokens of each request that are its prompt, [B] int32.
        sample_rows: which of the T rows need logits, [S] int64.
        max_q_len: at least the tokens of any one request; 1 for a pure decode step.
        embedded: what takes the place of token embeddings; None nearly always.
        apart, together: as in `StepContext`.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    prompt_lens: Tensor
    sample_rows: Tensor
    max_q_len: int
    embedded: EmbeddedRows | None = None
    apart: bool = False
    together: int = 1

    @classmethod
    def of(cls, batch: ScheduledBatch, block_size: int, device: torch.device) -> StepInputs:
        """Gather what the scheduled requests need, in the batch's order."""
        parts = [
            Slice(item.token_ids, item.start, item.block_table, item.num_rows, item.request.num_prompt_tokens)
            for item in batch.items
        ]
        return cls.gather(parts, block_size, device, EmbeddedRows.of(batch, device))

    @classmethod
    def gather(
        cls, parts: Sequence[Slice], block_size: int, device: torch.device, embedded: EmbeddedRows | None = None
    ) -> StepInputs:
        """A step that computes these parts, in their order."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        seq_lens: list[int] = []
        cumulative = [0]
        samples: list[int] = []
        for part in parts:
            stop = part.start + len(part.token_ids)
            ids += part.token_ids
            positions += range(part.start, stop)
            table = part.block_table
            slots += [table[p // block_size] * block_size + p % block_size for p in range(part.start, stop)]
            seq_lens.append(stop)
            cumulative.append(len(ids))
            samples += range(len(ids) - part.num_rows, len(ids))
        if embedded is not None:
            ids = [max(0, token_id) for token_id in ids]
        width = max(2, *(-(-n // block_size) for n in seq_lens))  # inductor gives a width of 1 a graph of its own
        tables = [(part.block_table + [0] * width)[:width] for part in parts]
        return cls(
            input_ids=torch.tensor(ids, dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
            block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            cu_seqlens_q=torch.tensor(cumulative, dtype=torch.int32, device=device),
            prompt_lens=torch.tensor([part.num_prompt for part in parts], dtype=torch.int32, device=device),
            sample_rows=torch.tensor(samples, dtype=torch.int64, device=device),
            # 1 would ask for a captured step, which looks its tokens up
            max_q_len=max(1 if embedded is None else 2, *(len(part.token_ids) for part in parts)),
            embedded=embedded,
        )

    def one_by_one(self) -> StepInputs:
        """The same rows, each as a request of one token."""
        starts, num_rows = self.cu_seqlens_q, self.input_ids.shape[0]

        def by_row(x: Tensor) -> Tensor:
            if x.shape[0] == 1:
                return x.expand(num_rows, *x.shape[1:])
            return x.repeat_interleave((starts[1:] - starts[:-1]).long(), 0, output_size=num_rows)

        known: dict[str, Any] = {"block_tables": by_row(self.block_tables), "prompt_lens": by_row(self.prompt_lens)}
        return replace(self, **known, seq_lens=(self.positions + 1).int(), apart=True)

    @classmethod
    def idle(cls, num_seqs: int, num_blocks: int, device: torch.device) -> StepInputs:
        """A decode step that writes nowhere and reads one slot: for warming up and capturing."""

        def full(size: tuple[int, ...], value: int, dtype: torch.dtype) -> Tensor:
            return torch.full(size, value, dtype=dtype, device=device)

        return cls(
            input_ids=full((num_seqs,), 0, torch.int64),
            positions=full((num_seqs,), 0, torch.int64),
            slot_mapping=full((num_seqs,), -1, torch.int64),
            block_tables=full((num_seqs, num_blocks), 0, torch.int32),
            seq_lens=full((num_seqs,), 1, torch.int32),
            cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32, device=device),
            prompt_lens=full((num_seqs,), 0, torch.int32),
            sample_rows=torch.arange(num_seqs, dtype=torch.int64, device=device),
            max_q_len=1,
        )


States = tuple[Tensor, ...]
"""Hidden states of a step's rows, [T, hidden] or longer each: behind layers that somebody asked for, and last of all
before the final norm."""


class Step(Protocol):
    """Computes logits of a step."""

    @property
    def states(self) -> States:
        """Of the last step, valid until the next one; none where they are not kept."""
        ...

    def __call__(self, inputs: StepInputs) -> Tensor:
        """[S, V] float32 for the S rows in `sample_rows`."""
        ...


class EagerStep:
    """Every operator launched from Python, one after the other.

    Attributes:
        seen: behind how many layers states are kept, beside the last ones.
    """

    states: States = ()
    seen: tuple[int, ...] = ()

    def __init__(self, model: CausalLM, kv: KVCache, dtype: torch.dtype) -> None:
        self.model, self.kv, self.dtype = model, kv, dtype

    def __call__(self, inputs: StepInputs) -> Tensor:
        """[S, V] float32."""
        self.states = self.hidden(inputs)
        return self.model.logits(self.states[-1][inputs.sample_rows])

    def every_row(self, inputs: StepInputs) -> Tensor:
        """Logits of all T rows, [T, V] float32: what a capture records, whose rows cannot be chosen afterwards."""
        return self.rows(inputs)[0]

    def rows(self, inputs: StepInputs) -> tuple[Tensor, States]:
        """Logits of all T rows, and their states."""
        states = self.hidden(inputs)
        return self.model.logits(states[-1]), states

    def hidden(self, inputs: StepInputs) -> States:
        """Of all T rows."""
        x = self.model.embed(inputs.input_ids, self.dtype)
        return self.through(x if inputs.embedded is None else inputs.embedded.put(x), inputs)

    def through(self, x: Tensor, inputs: StepInputs) -> States:
        """Rows [T, hidden] through all layers."""
        model, ops = self.model, self.model.ops
        cos, sin = (ops.take_rows(table, inputs.positions) for table in model.rotary)
        step = StepContext(
            cos, sin, inputs.slot_mapping, inputs.block_tables, inputs.seq_lens, inputs.cu_seqlens_q, inputs.max_q_len,
            inputs.apart, inputs.prompt_lens, inputs.together,
        )  # fmt: skip
        kept = []
        for index, weights in enumerate(model.weights.layers):
            if index in self.seen:
                kept.append(x)
            x = model.layer(x, weights, step, self.kv.layer(index))
        return *kept, x


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens of a step and where the time went, host clock, milliseconds.

    `prompt_logprobs`: what it found out about prompts, where that was asked for (`prompt_rows.py`). `states`: hidden
    states of the batch's rows, as `Step.states`; none where nobody kept them. `kept`: the same of a queued step,
    [layers, rows, hidden] in memory of its own. `queued`: the device had the step before the host asked for it. Then
    `forward_ms` is its part of the device's time, and how long the host waited tells nothing: of two steps that arrive
    together it waits for both and then for none. `began`: it was queued with nothing before it, so that `forward_ms`
    has in it how long its inputs took to be there.
    """

    tokens: SampledTokens
    forward_ms: float
    sample_ms: float
    prompt_logprobs: Sequence[tuple[Request, list[TokenLogprobs]]] = ()
    states: States = ()
    kept: Tensor | None = None
    queued: bool = False
    began: bool = False


def captures_of(step: Step) -> int:
    """Captures that a step has made so far; 0 of one that makes none."""
    return getattr(getattr(step, "recorder", None), "captures", 0)


class Runner:
    """Runs scheduled batches through a `Step` and the sampler."""

    def __init__(self, step: Step, sampler: Sampler, block_size: int, device: torch.device) -> None:
        self.step, self.sampler, self.block_size, self.device = step, sampler, block_size, device

    lookahead = 0  # tokens that it wants blocks reserved for
    max_model_len = 0  # longest request, for runners that compute ahead of the scheduler

    @property
    def capture_bytes(self) -> int:
        """Device memory that captures of its step took."""
        return getattr(self.step, "capture_bytes", 0)

    @property
    def captures(self) -> int:
        """Captures made so far: a step in which that grows took longer than the next one like it."""
        return captures_of(self.step)

    def settle(self) -> None:
        """Wait until nothing of it runs on the device any more: there is nothing left behind between two steps."""

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> StepResult:
        """Compute the batch; the tokens are those of the items that sample, in the batch's order."""
        start = time.perf_counter()
        found: Sequence[tuple[Request, list[TokenLogprobs]]] = ()
        if batch.num_prefill_tokens and wanted_in(batch):
            rows = prompt_rows(batch, self._every_row)
            batch, found = rows.rest, rows.found
            if not batch.items:
                return StepResult(SampledTokens([], [], []), (time.perf_counter() - start) * 1e3, 0.0, found)
        logits = self.step(StepInputs.of(batch, self.block_size, self.device))
        middle = time.perf_counter()
        tokens = sample_items(self.sampler, logits, [item for item in batch.items if item.samples])
        end = time.perf_counter()
        states = () if found else self.step.states  # with prompt rows computed apart, the rest are other rows
        return StepResult(tokens, (middle - start) * 1e3, (end - middle) * 1e3, found, states)

    def _every_row(self, item: ScheduledRequest) -> Tensor:
        """Logits of all rows of a slice, [num_tokens, V] float32; valid until the next step."""
        inputs = StepInputs.of(ScheduledBatch([item], [], 0, item.num_tokens), self.block_size, self.device)
        return self.step(replace(inputs, sample_rows=torch.arange(item.num_tokens, device=self.device)))

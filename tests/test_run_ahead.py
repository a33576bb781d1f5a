"""Running ahead changes when tokens are computed and never which: against the plain runner, under random traffic.

The device is played by the CPU: a replay runs the captured work again, sampling is plain torch on the same state.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from strata_lab.admission import SplitPrefill
from strata_lab.config import Optimizations
from strata_lab.engine import LLMEngine
from strata_lab.events import StepEvent
from strata_lab.prefill_lane import Finished, LaneStream, PrefillLane
from strata_lab.request import RequestOutput
from strata_lab.run_ahead import REPLAYS_AHEAD, RunAhead
from strata_lab.runner import EagerStep, Runner
from strata_lab.sampler import Sampler
from strata_lab.sampling_draw import HEAD, Filters, best_token, draw
from strata_lab.sampling_params import SamplingParams
from strata_lab.sampling_random import uniforms
from tests.checkpoints import write_checkpoint

BLOCK_SIZE = 8
OFF = Optimizations.none().replace(
    {"weight_format": "fp32", "kv_cache_dtype": "fp32", "max_num_seqs": 4, "continuous_batching": True}
)


class Replays:
    """Captures by remembering the work; counts what is replayed."""

    capture_bytes = 0

    def __init__(self) -> None:
        self.count = self.captures = 0

    def bucket(self, num_seqs: int) -> int:
        return next((b for b in (1, 2, 4) if b >= num_seqs), 0)

    def record(self, work: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
        result = work()
        self.captures += 1

        def replay() -> None:
            self.count += 1
            for kept, made in zip(tree_leaves(result), tree_leaves(work()), strict=True):
                kept.copy_(made)  # a capture writes where it wrote before

        return replay, result


class Mark:
    """An event of a device that has always just finished."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: Mark) -> float:
        return 1.0


class TorchSampling:
    """What the Triton kernels do to the state, in plain torch."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def state(self, num_seqs: int, table_width: int, steps: int) -> Any:
        def full(value: float, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full((num_seqs,), value, dtype=dtype)

        return SimpleNamespace(
            input_ids=full(0), positions=full(0), seq_lens=full(0, torch.int32), max_seq_lens=full(0, torch.int32),
            slot_mapping=full(-1), block_tables=torch.zeros(num_seqs, table_width, dtype=torch.int32),
            inverse_temperature=full(0, torch.float64), top_k=full(self.vocab_size), top_p=full(1, torch.float64),
            min_p=full(0, torch.float64), seed_keys=full(0), output_positions=full(0),
            out_tokens=torch.zeros(steps, num_seqs, dtype=torch.int64), to_target=None,
        )  # fmt: skip

    def greedy(self, logits: Tensor, state: Any, step: int) -> None:
        self._advance(best_token(logits)[1], state, step)

    def drawn(self, logits: Tensor, state: Any, step: int) -> None:
        best, tokens = best_token(logits)
        filters = Filters(
            torch.where(state.inverse_temperature > 0, state.inverse_temperature, 1.0)[:, None],
            state.top_k[:, None].clamp(max=self.vocab_size), state.top_p[:, None], state.min_p[:, None],
            all_top_k=False,
        )  # fmt: skip
        keys = state.seed_keys.numpy().view(np.uint64)
        uniform = torch.from_numpy(uniforms(keys, state.output_positions.tolist()))
        drawn = draw(logits, best, filters, uniform, min(HEAD, self.vocab_size))
        self._advance(torch.where(state.inverse_temperature > 0, drawn, tokens), state, step)

    def _advance(self, tokens: Tensor, state: Any, step: int) -> None:
        live = state.seq_lens > 0
        if state.to_target is not None:
            tokens = state.to_target[tokens.clamp(min=0)]
        state.out_tokens[step] = torch.where(live, tokens, 0)
        goes_on = live & (state.seq_lens < state.max_seq_lens)
        state.input_ids.copy_(torch.where(goes_on, tokens.clamp(min=0), 0))
        state.positions.copy_(torch.where(goes_on, state.positions + 1, 0))
        state.seq_lens.copy_(torch.where(goes_on, state.seq_lens + 1, 0))
        state.output_positions.add_(live.long())
        width = state.block_tables.shape[1]
        block = (state.positions // BLOCK_SIZE).clamp(max=width - 1)
        slots = state.block_tables.gather(1, block[:, None])[:, 0].long() * BLOCK_SIZE + state.positions % BLOCK_SIZE
        state.slot_mapping.copy_(torch.where(goes_on, slots, -1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")[0]


def engine(
    folder: Any, *, ahead: bool, blocks: int = 64, lane: bool = False, **toggles: Any
) -> tuple[LLMEngine, Replays]:  # fmt: skip
    """An engine with everything off; with `ahead`, its runner decodes ahead; with `lane`, prompts run beside it."""
    options = {"max_model_len": 96, "block_size": BLOCK_SIZE, "num_kv_blocks": blocks, **toggles}
    made = LLMEngine(folder, device="cpu", optimizations=OFF, **options)
    recorder = Replays()
    if ahead:
        parts = made._loop.parts
        step = parts.runner.step
        assert isinstance(step, EagerStep)
        plain = Runner(step, Sampler(), BLOCK_SIZE, made.device)
        sampling = TorchSampling(made.model_config.vocab_size)
        runner = RunAhead(plain, step, recorder, sampling, clock=Mark)
        runner.max_model_len = 96
        made._loop.parts = dataclasses.replace(parts, runner=runner)
        made._loop.scheduler.configure(lookahead=runner.lookahead)
    if lane:
        step = made._loop.parts.runner.runner.step
        side = PrefillLane(Runner(step, Sampler(), BLOCK_SIZE, made.device))
        made._loop.parts = dataclasses.replace(made._loop.parts, lane=side)
        made._loop.scheduler.configure(prefill=SplitPrefill(8, decode_steps=0))
    return made, recorder


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randint(3, 250, (5 + 3 * i,), generator=generator).tolist() for i in range(count)]


@pytest.fixture(scope="module")
def plain(folder: Any) -> Iterator[LLMEngine]:
    with engine(folder, ahead=False)[0] as made:
        yield made


def alone(plain: LLMEngine, prompt: list[int], params: SamplingParams) -> RequestOutput:
    return plain.generate([prompt], params)[0]


def test_one_request_gets_the_same_tokens_from_one_queue_of_replays(folder: Any, plain: LLMEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    expected = alone(plain, prompts(1)[0], params)
    made, recorder = engine(folder, ahead=True)
    with made:
        output = made.generate(prompts(1), params)[0]
    assert output.token_ids == expected.token_ids
    assert recorder.count >= 24, "two steps a replay, the first token comes from the prompt"
    assert recorder.count <= 25 + REPLAYS_AHEAD, "nothing is computed that no request asked for"


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_requests_of_different_lengths_get_what_they_get_alone(
    folder: Any, plain: LLMEngine, temperature: float
) -> None:
    params = [
        SamplingParams(temperature=temperature, max_tokens=n, seed=n, ignore_eos=True, top_p=0.9)
        for n in (3, 40, 17, 1, 25, 60)
    ]
    expected = [alone(plain, p, q).token_ids for p, q in zip(prompts(6), params, strict=True)]
    made, recorder = engine(folder, ahead=True)
    with made:
        outputs = made.generate(prompts(6), params)
    assert [o.token_ids for o in outputs] == expected
    assert recorder.count > 20


def test_a_stop_token_ends_one_request_and_the_queued_steps_of_the_other_are_used(
    folder: Any, plain: LLMEngine
) -> None:
    free = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    first = alone(plain, prompts(2)[0], free).token_ids
    stop = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=[first[20]])
    expected = [alone(plain, p, q) for p, q in zip(prompts(2), (stop, free), strict=True)]
    made, _ = engine(folder, ahead=True)
    with made:
        outputs = made.generate(prompts(2), [stop, free])
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert [o.finish_reason for o in outputs] == [o.finish_reason for o in expected]


def test_rows_that_need_the_hosts_sampler_take_the_other_way(folder: Any, plain: LLMEngine) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, frequency_penalty=0.5),
        SamplingParams(seed=3, max_tokens=20, structured_outputs={"regex": "[a-z]{30}"}),
        SamplingParams(seed=4, max_tokens=20, min_tokens=20),
    ]
    expected = [alone(plain, p, q) for p, q in zip(prompts(4), params, strict=True)]
    made, recorder = engine(folder, ahead=True)
    with made:
        outputs = made.generate(prompts(4), params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert [len(o.logprobs or ()) for o in outputs] == [len(o.logprobs or ()) for o in expected]
    assert recorder.count == 0


@pytest.mark.parametrize("lane", [False, True])
def test_several_texts_of_a_prompt_go_on_ahead_of_the_host(folder: Any, plain: LLMEngine, lane: bool) -> None:
    params = SamplingParams(seed=5, max_tokens=30, ignore_eos=True, n=4, prompt_logprobs=0)
    expected = [o.token_ids for o in plain.generate([prompts(4)[3]], params)[0].outputs]
    made, recorder = engine(folder, ahead=True, lane=lane)
    with made:
        output = made.generate([prompts(4)[3]], params)[0]
    assert [o.token_ids for o in output.outputs] == expected and len(set(expected)) == 4
    assert len(output.prompt_logprobs) == len(prompts(4)[3])
    assert recorder.count >= 28


@pytest.mark.parametrize("lane", [False, True])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "toggles", [{}, {"prefix_cache": True, "scheduling_policy": "priority"}], ids=["off", "cached"]
)
def test_random_traffic_in_a_small_pool_changes_no_token(
    folder: Any, plain: LLMEngine, seed: int, lane: bool, toggles: dict[str, Any]
) -> None:
    """Requests come, end and are aborted at random while the pool is so small that some are preempted.

    Most prompts have their beginning in common, so that with a prefix cache they share blocks.
    """
    dice = random.Random(seed)
    jobs = []
    common = [dice.randrange(3, 250) for _ in range(24)]
    for index in range(10):
        own = [dice.randrange(3, 250) for _ in range(dice.randrange(1, 30))]
        prompt = (common[: dice.randrange(0, 25)] + own)[:29]
        temperature = dice.choice([0.0, 0.0, 0.9])
        params = SamplingParams(
            temperature=temperature, max_tokens=dice.randrange(1, 50), seed=index, ignore_eos=dice.random() < 0.7
        )
        jobs.append((prompt, params, dice.random() < 0.2))
    made, recorder = engine(folder, ahead=True, blocks=14, lane=lane, **toggles)
    with made:
        names, queue, aborted = {}, list(enumerate(jobs)), set()
        while queue or made.stats().num_running or made.stats().num_waiting:
            if queue and dice.random() < 0.25:
                index, (prompt, params, _) = queue.pop(0)
                names[index] = made.add_request(prompt, params, priority=index % 3)
            for index, name in names.items():
                if jobs[index][2] and dice.random() < 0.05 and made.abort(name):
                    aborted.add(index)
            made.step()
        outputs = {index: made.output(name) for index, name in names.items()}
        assert made.stats().kv_blocks_used == 0
        assert (made.stats().prefix_hit_tokens > 0) == bool(toggles)
    for index, (prompt, params, _) in enumerate(jobs):
        expected = alone(plain, prompt, params).token_ids
        got = outputs[index].token_ids
        assert got == (expected[: len(got)] if index in aborted else expected), index
    assert recorder.count > 10


def test_guesses_of_the_host_wait_for_the_tokens_that_are_on_their_way(folder: Any, plain: LLMEngine) -> None:
    """Guesses come for eight steps of twelve, two of three right: queued steps are used up, then they are verified."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    expected = alone(plain, prompts(1)[0], params).token_ids
    made, recorder = engine(folder, ahead=True)
    with made:
        name = made.add_request(prompts(1)[0], params)
        request = made._loop.session(name).request
        for number in range(80):
            if request.is_decoding and number % 12 >= 4:
                done = request.num_output_tokens
                request.draft_token_ids = [*expected[done : done + 2], 5]
            if not made.step():
                break
        assert made.output(name).token_ids == expected
        steps = [e for e in made.events.since(0)[0] if isinstance(e, StepEvent)]
        assert made.stats().kv_blocks_used == 0
    assert max(len(e.tokens) for e in steps) >= 3, "some were verified"
    assert recorder.count > 5, "and some steps were computed ahead"


def test_prompts_in_the_lane_are_booked_while_streams_decode(folder: Any, plain: LLMEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    long = [(3 + 7 * i) % 250 + 3 for i in range(50)]
    expected = [alone(plain, p, params).token_ids for p in (prompts(1)[0], long)]
    made, _ = engine(folder, ahead=True, lane=True)
    with made:
        first = made.add_request(prompts(1)[0], params)
        made.step()
        second = made.add_request(long, params)
        while made.step():
            pass
        assert [made.output(name).token_ids for name in (first, second)] == expected
        steps = [e for e in made.events.since(0)[0] if isinstance(e, StepEvent)]
    assert all(not (e.num_prefill_tokens and e.num_decode_tokens) for e in steps)
    assert max(e.num_prefill_tokens for e in steps[1:]) <= 8


def test_a_lanes_step_has_been_computed_before_anything_of_it_is_asked_for() -> None:
    """A copy to the host that waits for its stream keeps every other thread from launching."""
    order: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: order.append("waited"))
    logits = torch.zeros(1, 3)

    def step(inputs: Any) -> torch.Tensor:
        order.append("launched")
        return logits

    step.capture_bytes = 7  # type: ignore[attr-defined]
    finished = Finished(step, LaneStream(stream))  # type: ignore[arg-type]
    assert Runner(finished, Sampler(), BLOCK_SIZE, torch.device("cpu")).capture_bytes == 7
    assert finished(None) is logits  # type: ignore[arg-type]
    assert order == ["launched", "waited"]


def test_a_failing_prompt_in_the_lane_ends_its_request_alone(folder: Any, plain: LLMEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = alone(plain, prompts(1)[0], params).token_ids
    made, _ = engine(folder, ahead=True, lane=True)
    with made:
        first = made.add_request(prompts(1)[0], params)
        made.step()
        lane = made._loop.parts.lane
        assert lane is not None
        lane.runner = SimpleNamespace(capture_bytes=0)  # type: ignore[assignment]
        second = made.add_request(prompts(2)[1], params)
        while made.step() or made.stats().num_running:
            pass
        assert made.output(first).token_ids == expected
        assert made.output(second).finish_reason == "error"
        assert made.stats().kv_blocks_used == 0

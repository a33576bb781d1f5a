"""Drafting and verifying ahead of the host changes when tokens are computed and never which.

The device is played by the CPU, as in `tests/test_run_ahead.py`: a replay runs the captured work again.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor

from strata_lab.engine import LLMEngine
from strata_lab.events import StepEvent
from strata_lab.run_ahead import RunAhead
from strata_lab.runner import EagerStep, Runner
from strata_lab.sampler import Sampler
from strata_lab.sampling_params import SamplingParams
from strata_lab.speculative.ahead import AheadDrafter, DraftAhead
from strata_lab.speculative.cycles import Cycles
from strata_lab.speculative.feature_draft import FeatureDraft
from strata_lab.speculative.follow_rows import place_rows
from strata_lab.speculative.forecast import layers_seen
from strata_lab.speculative.guesses import FeatureGuesses, TokenGuesses
from strata_lab.speculative.look_up import TORCH_LOOK_UPS, LookUp, LookUpGuesses, follows
from strata_lab.speculative.make import listener
from strata_lab.speculative.speculator import Speculator
from strata_lab.speculative.window_state import TORCH_WINDOWS
from tests.checkpoints import VOCAB, write_checkpoint
from tests.drafts import write_feature_draft
from tests.test_run_ahead import BLOCK_SIZE, OFF, Mark, Replays, TorchSampling, alone, prompts

MAX_LEN = 96
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


class Narrow:
    """A draft model whose head has only some of the vocabulary."""

    def __init__(self, eager: EagerStep, kept: Tensor) -> None:
        self.model, self._eager, self._kept = eager.model, eager, kept

    def every_row(self, inputs: Any) -> Tensor:
        return self._eager.every_row(inputs)[:, self._kept]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The target, which drafts for itself, another model, and a draft that sees the target's states."""
    models = [
        write_checkpoint(tmp_path_factory.mktemp(name), family)[0]
        for name, family in (("llama", "llama"), ("other", "qwen2"))
    ]
    return [*models, write_feature_draft(models[0], tmp_path_factory.mktemp("drafts") / "features")]


@pytest.fixture(scope="module")
def plain(folders: list[Any]) -> Iterator[LLMEngine]:
    options = {"max_model_len": MAX_LEN, "block_size": BLOCK_SIZE, "num_kv_blocks": 64}
    with LLMEngine(folders[0], device="cpu", optimizations=OFF, **options) as made:
        yield made


def engine(
    folders: list[Any], *, draft: int | None = 0, blocks: int = 64, most: int = 3, kept: Tensor | None = None,
    **toggles: Any,
) -> tuple[LLMEngine, Replays, Replays]:  # fmt: skip
    """An engine that drafts ahead, by look-up if `draft` is None, with the replays of its cycles and plain steps."""
    made = LLMEngine(
        folders[0], device="cpu", optimizations=OFF, draft_model=folders[draft or 0], max_model_len=MAX_LEN,
        block_size=BLOCK_SIZE, num_kv_blocks=blocks, **toggles,
    )  # fmt: skip
    parts, cycles, steps = made._loop.parts, Replays(), Replays()
    step, vocab_size = parts.runner.step, made.model_config.vocab_size
    ahead = RunAhead(
        Runner(step, Sampler(), BLOCK_SIZE, made.device), step, steps, TorchSampling(vocab_size), clock=Mark
    )
    ahead.max_model_len = MAX_LEN
    model: Any = LookUp()
    to_target, sampling = None, TorchSampling(vocab_size)
    guesses: Any = LookUpGuesses(step.model, TORCH_LOOK_UPS)
    if draft is not None:
        model = made._builder._draft_model(parts.optimizations, parts.weights)
        eager: Any = getattr(model.step, "eager", model.step)
        if kept is not None:
            model.to_target, eager = kept, Narrow(eager, kept)
        to_target = model.to_target
        sampling = TorchSampling(vocab_size if to_target is None else len(to_target))
        step.seen = layers_seen(str(folders[draft]), "cpu")
        guesses = FeatureGuesses(model, place_rows) if isinstance(model, FeatureDraft) else TokenGuesses(eager)
    captured = Cycles(ahead, guesses, sampling, to_target, TORCH_WINDOWS, cycles, most)
    runner = DraftAhead(ahead, model, captured)
    speculation = Speculator(AheadDrafter(model), None, most, runner=runner, hear=listener(model))
    made._loop.parts = dataclasses.replace(parts, runner=runner, speculation=speculation)
    made._loop.scheduler.configure(lookahead=runner.lookahead)
    return made, cycles, steps


def steps_of(made: LLMEngine) -> list[StepEvent]:
    return [event for event in made.events.since(0)[0] if isinstance(event, StepEvent)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_target_that_drafts_for_itself_keeps_every_guess(
    folders: list[Any], plain: LLMEngine, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=41, ignore_eos=True, seed=2, top_p=0.95)
    expected = alone(plain, prompts(1)[0], params)
    made, cycles, steps = engine(folders)
    with made:
        output = made.generate(prompts(1), params)[0]
        stats = made.stats()
        assert output.token_ids == expected.token_ids
        assert stats.num_drafted_tokens == stats.num_accepted_tokens
        if temperature:  # where the head does not settle a draw, the host samples a step of its own
            assert stats.num_accepted_tokens >= 20
        else:
            assert stats.num_accepted_tokens == 30, "10 windows of 3, and the token behind each"
            assert (cycles.count, steps.count) == (10, 0), "nothing is computed that no request asked for"
        assert stats.kv_blocks_used == 0
        assert made._loop.parts.speculation.drafter.model.blocks.num_used == 0


@pytest.mark.parametrize("draft", [0, 1, 2, None])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_requests_of_different_lengths_get_what_they_get_alone(
    folders: list[Any], plain: LLMEngine, temperature: float, draft: int | None
) -> None:
    params = [
        SamplingParams(temperature=temperature, max_tokens=n, seed=n, ignore_eos=True, top_p=0.9)
        for n in (3, 40, 17, 1, 25, 60)
    ]
    expected = [alone(plain, p, q).token_ids for p, q in zip(prompts(6), params, strict=True)]
    made, cycles, _ = engine(folders, draft=draft)
    with made:
        outputs = made.generate(prompts(6), params)
        stats = made.stats()
    assert [o.token_ids for o in outputs] == expected
    assert cycles.count > 10
    assert (stats.acceptance_rate > 0.9) == (draft == 0)


def test_a_head_of_some_of_the_vocabulary_drafts_in_the_targets_tokens(folders: list[Any], plain: LLMEngine) -> None:
    expected = alone(plain, prompts(1)[0], GREEDY).token_ids
    kept = torch.tensor(sorted({*expected[:30], *range(0, VOCAB, 9)}))
    made, _, _ = engine(folders, kept=kept)
    with made:
        output, stats = made.generate(prompts(1), GREEDY)[0], made.stats()
        windows = [window for step in steps_of(made) for window in step.drafts]
    assert output.token_ids == expected
    assert stats.num_accepted_tokens >= 20
    assert {token for window in windows for token in window.token_ids} <= set(kept.tolist())


def test_a_stop_in_the_middle_of_accepted_guesses_ends_the_text_there(folders: list[Any], plain: LLMEngine) -> None:
    first = alone(plain, prompts(2)[0], GREEDY).token_ids
    place = next(i for i in range(10, 40) if first[i] not in first[:i] and i % 4 == 2)
    stop = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=[first[place]])
    expected = [alone(plain, p, q) for p, q in zip(prompts(2), (stop, GREEDY), strict=True)]
    made, _, _ = engine(folders)
    with made:
        outputs = made.generate(prompts(2), [stop, GREEDY])
    assert outputs[0].token_ids == first[: place + 1]
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert [o.finish_reason for o in outputs] == ["stop", "length"]


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_max_tokens_in_the_middle_of_a_window_is_kept_to(folders: list[Any], plain: LLMEngine, max_tokens: int) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=max_tokens)
    made, _, _ = engine(folders)
    with made:
        output = made.generate(prompts(1), params)[0]
    assert output.token_ids == alone(plain, prompts(1)[0], params).token_ids
    assert output.finish_reason == "length"


def test_a_text_may_reach_the_longest_there_is(folders: list[Any], plain: LLMEngine) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=500)
    made, _, _ = engine(folders)
    with made:
        output = made.generate(prompts(1), params)[0]
    assert output.token_ids == alone(plain, prompts(1)[0], params).token_ids
    assert len(prompts(1)[0]) + len(output.token_ids) == MAX_LEN


def test_rows_that_need_the_hosts_sampler_get_no_guesses_and_their_tokens(folders: list[Any], plain: LLMEngine) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, frequency_penalty=0.5),
        SamplingParams(seed=3, max_tokens=20, structured_outputs={"regex": "[a-z]{30}"}),
        SamplingParams(temperature=0, max_tokens=36, ignore_eos=True),
    ]
    expected = [alone(plain, p, q) for p, q in zip(prompts(4), params, strict=True)]
    made, cycles, _ = engine(folders)
    with made:
        outputs = made.generate(prompts(4), params)
        assert made.stats().num_drafted_tokens > 0, "the last one, when the others have ended"
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert [len(o.logprobs or ()) for o in outputs] == [len(o.logprobs or ()) for o in expected]
    assert cycles.count > 0


def test_guesses_that_are_wanted_no_more_end_the_flight_when_its_cycles_are_used(
    folders: list[Any], plain: LLMEngine
) -> None:
    """The policy rests for a while in the middle of a text; what the draft model has missed it takes in afterwards."""
    expected = alone(plain, prompts(1)[0], GREEDY).token_ids
    made, _, steps = engine(folders)
    with made:
        name = made.add_request(prompts(1)[0], GREEDY)
        speculation = made._loop.parts.speculation
        for number in range(60):
            speculation.most = 0 if 5 <= number < 15 else 3
            if not made.step():
                break
        assert made.output(name).token_ids == expected
        assert made.stats().acceptance_rate == 1.0
        windows = [sum(len(w.token_ids) for w in step.drafts) for step in steps_of(made)]
    assert steps.count > 2
    assert windows[1] == 3 and 0 in windows[6:14] and 3 in windows[15:]


def test_windows_follow_what_is_wanted_from_cycle_to_cycle(folders: list[Any], plain: LLMEngine) -> None:
    expected = alone(plain, prompts(1)[0], GREEDY).token_ids
    made, _, steps = engine(folders, draft=1, most=5)
    with made:
        name = made.add_request(prompts(1)[0], GREEDY)
        for number in range(60):
            made._loop.parts.speculation.most = 1 + number % 5
            if not made.step():
                break
        assert made.output(name).token_ids == expected
        lengths = {len(w.token_ids) for step in steps_of(made) for w in step.drafts}
    assert lengths >= {1, 2, 3, 5}
    assert steps.count <= 1, "for a last token, which leaves no room for a guess"


@pytest.mark.parametrize(("draft", "seed"), [(draft, seed) for draft in (0, 1, None) for seed in range(3)] + [(2, 0)])
def test_random_traffic_in_a_small_pool_changes_no_token(
    folders: list[Any], plain: LLMEngine, seed: int, draft: int | None
) -> None:
    """Requests of every kind come, end and are aborted at random, some are preempted, the policy changes its mind."""
    dice = random.Random(seed)
    jobs = []
    common = [dice.randrange(3, 250) for _ in range(24)]
    for index in range(10):
        own = [dice.randrange(3, 250) for _ in range(dice.randrange(1, 30))]
        prompt = (common[: dice.randrange(0, 25)] + own)[:29]
        params = SamplingParams(
            temperature=dice.choice([0.0, 0.0, 0.9]), max_tokens=dice.randrange(1, 50), seed=index,
            ignore_eos=dice.random() < 0.7, frequency_penalty=dice.choice([0.0] * 5 + [0.7]),
        )  # fmt: skip
        jobs.append((prompt, params, dice.random() < 0.2))
    made, cycles, _ = engine(folders, draft=draft, blocks=14, most=5, prefix_cache=seed % 2 == 0)
    with made:
        names: dict[int, str] = {}
        queue, aborted = list(enumerate(jobs)), set()
        while queue or made.stats().num_running or made.stats().num_waiting:
            made._loop.parts.speculation.most = dice.choice([0, 1, 3, 4, 5])
            if queue and dice.random() < 0.2:
                index, (prompt, params, _) = queue.pop(0)
                names[index] = made.add_request(prompt, params)
            for index, name in names.items():
                if jobs[index][2] and dice.random() < 0.05 and made.abort(name):
                    aborted.add(index)
            made.step()
        outputs = {index: made.output(name) for index, name in names.items()}
        stats = made.stats()
        assert stats.kv_blocks_used == 0
        assert stats.num_accepted_tokens > 0 or draft != 0
    for index, (prompt, params, _) in enumerate(jobs):
        expected = alone(plain, prompt, params).token_ids
        got = outputs[index].token_ids
        assert got == (expected[: len(got)] if index in aborted else expected), index
    assert cycles.count > 3


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_device_guesses_from_states_what_the_host_guesses(folders: list[Any], temperature: float) -> None:
    """Window by window: the states of accepted tokens, and behind guesses the draft's own, are the same in both."""
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True, seed=4, top_k=40)
    windows = []
    made, cycles, _ = engine(folders, draft=2)
    with made:
        made.generate(prompts(1), params)
        windows.append([window.token_ids for step in steps_of(made) for window in step.drafts])
    options = {"max_model_len": MAX_LEN, "block_size": BLOCK_SIZE, "num_kv_blocks": 64}
    with LLMEngine(folders[0], device="cpu", optimizations=OFF, draft_model=folders[2], **options) as host:
        assert host.apply(speculative="draft", num_draft_tokens=3).ok
        host._loop.parts.speculation.policy = None
        host.generate(prompts(1), params)
        windows.append([window.token_ids for step in steps_of(host) for window in step.drafts])
    assert cycles.count > 8
    assert len({guess for window in windows[0] for guess in window}) > 5
    assert windows[0][:-2] == windows[1][: len(windows[0]) - 2], "the last ones are cut where the text ends"


def test_steps_that_are_queued_without_guesses_hand_over_their_states_too(folders: list[Any]) -> None:
    """What is guessed behind them is what is guessed where every step waits for the host."""
    guesses: list[dict[int, tuple[int, ...]]] = []
    made, cycles, steps = engine(folders, draft=2)
    options = {"max_model_len": MAX_LEN, "block_size": BLOCK_SIZE, "num_kv_blocks": 64, "speculative": "draft"}
    host = LLMEngine(folders[0], device="cpu", optimizations=OFF, draft_model=folders[2], **options)
    for each in (made, host):
        with each:
            speculation: Any = each._loop.parts.speculation
            speculation.policy, speculation.most = None, 0
            names = [each.add_request(prompt, GREEDY) for prompt in prompts(2)]
            while min(each._loop.session(name).request.num_output_tokens for name in names) < 15:
                each.step()
            speculation.most = 3
            for _ in range(9):
                each.step()
            drafter = getattr(speculation.drafter, "model", speculation.drafter)
            assert {follower.sure for follower in drafter._followers.values()} == {inf}, "no row lacks its state"
            windows = [window for step in steps_of(each) for window in step.drafts if window.request_id == names[0]]
            guesses.append({window.index: window.token_ids for window in windows})
    assert steps.count > 4 and cycles.count > 4
    alike = guesses[0].keys() & guesses[1].keys()
    assert len(alike) > 2 and all(guesses[0][index] == guesses[1][index] for index in alike)


def test_a_draft_model_without_room_leaves_plain_steps(folders: list[Any], plain: LLMEngine) -> None:
    expected = alone(plain, prompts(1)[0], GREEDY).token_ids
    made, cycles, steps = engine(folders)
    with made:
        blocks = made._loop.parts.speculation.drafter.model.blocks
        blocks.grow("someone else", (blocks.num_free - 3) * BLOCK_SIZE)
        assert made.generate(prompts(1), GREEDY)[0].token_ids == expected
    assert cycles.count > 0 and steps.count > 0


def test_what_it_costs_is_measured_for_every_window(folders: list[Any]) -> None:
    made, _, _ = engine(folders, most=4)
    with made:
        runner = made._loop.parts.runner
        costs = runner.cycles.costs()
        points = costs.points()
        assert costs.most_tokens == 4 * (1 + 3), "four requests may have as many drafts each as one"
        assert sorted(points["window"]) == [2, 3, 4]
        assert points["plain"] == {1: 0.5}, "a replay of two steps takes 1 ms here"


def test_guesses_are_looked_up_in_the_text_as_it_is_when_its_cycle_begins(folders: list[Any], plain: LLMEngine) -> None:
    phrase = prompts(1)[0]
    made, cycles, _ = engine(folders, draft=None)
    params = dataclasses.replace(GREEDY, max_tokens=60)
    with made:
        outputs = made.generate([phrase * 3, phrase], params)
        windows = [window for step in steps_of(made) for window in step.drafts]
        stats = made.stats()
    assert [o.token_ids for o in outputs] == [alone(plain, p, params).token_ids for p in (phrase * 3, phrase)]
    texts = {o.request_id: (o.prompt_token_ids, o.token_ids) for o in outputs}
    for window in windows:
        prompt, output = texts[window.request_id]
        known = [*prompt, *output[: window.index]]
        assert list(window.token_ids) == (known[follows(known) :] * 3)[: len(window.token_ids)]
    assert len(windows) > 20 and cycles.count > 10
    assert stats.num_accepted_tokens > 5, "greedy texts of a small model go round"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_text_that_is_looked_up_may_reach_the_longest_there_is(
    folders: list[Any], plain: LLMEngine, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=500, seed=5, ignore_eos=True, top_k=3)
    made, _, _ = engine(folders, draft=None, most=7)
    with made:
        output = made.generate(prompts(1), params)[0]
    assert output.token_ids == alone(plain, prompts(1)[0], params).token_ids
    assert len(prompts(1)[0]) + len(output.token_ids) == MAX_LEN


def test_look_ups_are_timed_with_their_cycles(folders: list[Any]) -> None:
    made, _, _ = engine(folders, draft=None, most=4)
    with made:
        points = made._loop.parts.runner.cycles.costs().points()
    assert sorted(points["window"]) == [2, 3, 4]

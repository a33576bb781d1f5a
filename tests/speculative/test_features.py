"""A draft that sees the target's states: it is taught as it is used, guesses in the engine, and changes no text."""

from __future__ import annotations

import dataclasses
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from strata_lab.engine import LLMEngine
from strata_lab.graph_prompts import PROMPT_TOKENS, padded
from strata_lab.models.draft_part import FEATURES, TOKEN_PROJ
from strata_lab.models.errors import CheckpointError
from strata_lab.models.loader import open_checkpoint
from strata_lab.runner import Slice, StepInputs
from strata_lab.sampling_params import SamplingParams
from strata_lab.settings import ConfigError
from strata_lab.speculative.draft_model import CATCH_UP_TOKENS
from strata_lab.speculative.feature_draft import MOST_STATES, FeatureDraft, States
from strata_lab.speculative.traffic import Text
from strata_lab.speculative.train.features import (
    FeatureLesson,
    FeatureNetwork,
    WindowAttention,
    before,
    behind,
    window_runs,
)
from strata_lab.speculative.train.measure import HeldOut
from strata_lab.speculative.train.network import Teacher, read_network
from strata_lab.speculative.train.recipe import Trained, train_draft
from strata_lab.speculative.train.settings import Recipe
from strata_lab.speculative.train.texts import Rows
from tests.checkpoints import VOCAB, write_checkpoint

CPU = torch.device("cpu")
RECIPE = Recipe(
    kind=FEATURES, vocab=160, make_tokens=2000, output_tokens=24, streams=16, steps=40, batch_tokens=512, device="cpu",
    learning_rate=3e-3,
)  # fmt: skip
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=5, max_tokens=20, ignore_eos=True, top_k=30),
    SamplingParams(temperature=1.0, seed=6, max_tokens=17, ignore_eos=True, repetition_penalty=1.2),
    SamplingParams(temperature=0, max_tokens=21, ignore_eos=True, logprobs=2),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), "llama")[0]


@pytest.fixture(scope="module")
def trained(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    recipe = dataclasses.replace(RECIPE, target=str(target))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("strata_lab.speculative.train.texts.HELD_OUT", 6)  # of few texts enough to measure with
        patch.setattr("strata_lab.speculative.train.writing.user_turn", lambda tokenizer: None)  # it would ask noise
        return train_draft(recipe, tmp_path_factory.mktemp("drafts") / "tiny", progress=lambda task, fraction: None)


def prompts(count: int = 4) -> list[list[int]]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(3, 300, (6 + 5 * (i % 4),), generator=generator).tolist() for i in range(count)]


def always(engine: LLMEngine) -> FeatureDraft:
    """Guess whether it pays or not."""
    speculation: Any = engine._loop.parts.speculation
    speculation.policy = None
    assert isinstance(speculation.drafter, FeatureDraft)
    return speculation.drafter


def kept_states(engine: LLMEngine) -> int:
    """Of a step of the target."""
    return len(engine._loop.parts.runner.step.states)


# -- training ---------------------------------------------------------------------------------------------------------


def test_training_raises_acceptance_at_every_place_that_is_unrolled(trained: Trained) -> None:
    assert trained.after.by_position[0] > trained.before.by_position[0] + 0.03
    assert trained.after.tokens_per_step[2] > trained.before.tokens_per_step[2] + 0.05
    assert trained.course.loss is not None


def test_guesses_are_measured_in_answers_to_the_benchs_questions_too(trained: Trained) -> None:
    steps, measured = zip(*trained.course.answered, strict=True)
    assert steps == tuple(step for step, _ in trained.course.measured) and len(steps) > 2
    assert trained.answers == measured[-1] and measured[-1].places > 100
    facts = open_checkpoint(str(trained.folder)).draft.facts
    assert facts["answers"][-1]["by_position"] == list(measured[-1].by_position)
    share = f"{measured[-1].by_position[0]:.1%}"
    assert f"guesses 1 to 5 were true in {share}" in (trained.folder / "README.md").read_text()


def test_rows_of_a_later_place_see_what_a_guess_sees_in_use(target: Path) -> None:
    """The s-th guess of a window, computed alone: true rows up to the window, then own ones, one behind the other."""
    network = read_network(open_checkpoint(str(target)), CPU, torch.float32)
    lesson = FeatureLesson(Teacher(network, torch.arange(VOCAB)))
    draft = lesson.first(2, [Rows.of([Text((5, 6), tuple(range(7, 60)), 0.0)], [0], 64)])
    assert isinstance(draft, FeatureNetwork) and len(lesson.seen) == 2
    ids = torch.randint(3, 300, (1, 9), generator=torch.Generator().manual_seed(2))
    x = lesson.teacher.embed(ids)
    states = lesson.teacher.states(x, lesson.seen)
    with torch.no_grad():
        places = list(islice(draft.places(x, states), 4))
        for begin in (2, 4):
            given = draft.of_target([before(state)[:, : begin + 1] for state in states])
            for place in range(4):  # an ordinary causal pass over the text as far as this guess knows it
                rows = F.linear(x[:, : begin + 1 + place], draft.tensors[TOKEN_PROJ]) + given
                own = draft.states(rows)[:, -1:]
                torch.testing.assert_close(places[place][:, begin + place, None], own, atol=1e-5, rtol=1e-4)
                given = torch.cat([given, draft.of_own(own)], dim=1)


def test_a_guess_is_learned_where_its_window_began_in_the_output() -> None:
    learned = torch.tensor([[False, True, True, True, False]])
    assert behind(learned, 0).tolist() == learned.tolist()
    assert behind(learned, 2).tolist() == [[False, False, False, True, False]]


def test_runs_follow_the_windows_places_to_the_end_of_the_text() -> None:
    yes, no = True, False
    assert window_runs([[yes, yes, no], [no, yes, yes]]) == [2, 2, 0]
    assert window_runs([[yes, yes, yes], [yes, yes, no]]) == [2, 1, 1]


def test_window_attention_starts_as_plain_attention() -> None:
    q, k, v = torch.randn(3, 1, 4, 5, 8).unbind()
    keys, values = (part[:, :2].repeat_interleave(2, 1) for part in (k, v))
    plain = torch.nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=True)
    torch.testing.assert_close(WindowAttention()("layer", q, k[:, :2], v[:, :2]), plain)


# -- guessing ---------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "captured": {},
    "eager": {"cuda_graph": False},
    "few-blocks": {"block_size": 8, "num_kv_blocks": 7, "max_model_len": 56},
    "small-budget": {"max_num_batched_tokens": 7, "pd_split": True},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_texts_are_those_without_guesses(setting: str, trained: Trained, target: Path) -> None:
    options = {"device": "cpu", "max_model_len": 128} | SETTINGS[setting]
    with LLMEngine(target, draft_model=str(trained.folder), **options) as engine:
        plain = [engine.generate([p], s)[0] for p, s in zip(prompts(), PARAMS, strict=True)]
        assert kept_states(engine) == 1, "no more than without such a draft"
        assert engine.apply(speculative="draft", num_draft_tokens=3).ok
        drafter = always(engine)
        for _ in range(2):  # the second time prompts lie in the prefix cache, and nobody computes their states
            assert [o.token_ids for o in engine.generate(prompts(), PARAMS)] == [o.token_ids for o in plain]
        stats = engine.stats()
        assert kept_states(engine) == 2
        assert 0 < stats.num_accepted_tokens < stats.num_drafted_tokens
        if setting == "few-blocks":
            assert stats.num_preemptions > 0
        engine.generate([[1, 2, 3]], PARAMS[0])
        assert len(drafter._heard) <= 1 and len(drafter.own) <= 1, "states of ended requests are dropped"


def test_the_engine_guesses_what_the_trainer_reckons(trained: Trained, target: Path) -> None:
    """Rows of steps, with a cache and states handed over, against whole texts in plain torch."""
    with LLMEngine(target, device="cpu", draft_model=str(trained.folder), speculative="draft", num_draft_tokens=3) as e:
        always(e)
        outputs = e.generate(prompts(12), PARAMS[0])
        stats = e.stats()
    draft = open_checkpoint(str(trained.folder))
    plain = read_network(draft, CPU, torch.float32)
    teacher = Teacher(
        read_network(open_checkpoint(str(target)), CPU, torch.float32), torch.tensor(draft.draft.to_target)
    )
    texts = [Text(o.prompt_token_ids, o.token_ids, 0.0) for o in outputs]
    measured = HeldOut(FeatureLesson(teacher), texts, 256, CPU).measure(FeatureNetwork(plain.config, plain.tensors))
    windows = stats.drafted_by_position[0]
    assert windows > 80
    assert 1 + stats.num_accepted_tokens / windows == pytest.approx(measured.tokens_per_step[2], rel=0.06)


def test_the_next_turn_is_guessed_as_well_as_if_nothing_of_it_were_found(trained: Trained, target: Path) -> None:
    """The target finds the last turn in its prefix cache, so that nobody computes its states; the draft has its own."""
    accepted: dict[bool, int] = {}
    for found in (False, True):
        options = {"device": "cpu", "block_size": 8, "max_model_len": 128, "prefix_cache": found}
        with LLMEngine(
            target, draft_model=str(trained.folder), speculative="draft", num_draft_tokens=3, **options
        ) as e:
            drafter = always(e)
            first = e.generate(prompts(32), PARAMS[0])
            before = e.stats().num_accepted_tokens
            e.generate([[*o.prompt_token_ids, *o.token_ids, 5, 6, 7] for o in first], PARAMS[0])
            accepted[found] = e.stats().num_accepted_tokens - before
            assert (e.stats().prefix_hit_tokens > 0) == found
            assert drafter.blocks.num_hit_tokens > 32 * 16, "with the guesses that came true"
    assert accepted[True] >= 0.9 * accepted[False] > 20


def test_a_draft_for_another_target_of_the_same_width_is_refused(trained: Trained, tmp_path: Path) -> None:
    other, _ = write_checkpoint(tmp_path / "other", "llama", seed=7)
    with pytest.raises(ConfigError, match="sees the states"):
        LLMEngine(other, device="cpu", draft_model=str(trained.folder), speculative="draft")


def test_a_draft_that_does_not_say_what_it_sees_is_damaged(trained: Trained, tmp_path: Path) -> None:
    for name in trained.folder.iterdir():
        (tmp_path / name.name).write_bytes(name.read_bytes())
    manifest = json.loads((trained.folder / "manifest.json").read_text())
    assert manifest["draft"]["seen"] == [1, 2]
    for wrong in ([], [2, 1], [0, 2], None):
        manifest["draft"]["seen"] = wrong
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match="train the draft again"):
            open_checkpoint(str(tmp_path))


def test_states_are_found_again_and_old_ones_are_let_go() -> None:
    def found(start: int, count: int, spared: int = -1) -> tuple[list[float], int]:
        (first, second), known = states.between(start, torch.zeros(2, count, 2), spared)
        assert torch.equal(second, 10 * first), "each layer's"
        return first[:, 0].tolist(), known

    def of(count: int, value: float) -> tuple[torch.Tensor, int, int]:
        """They lie in the middle of a step of three requests."""
        rows = torch.full((2, count + 2, 2), value) * torch.tensor([1.0, 10.0])[:, None, None]
        rows[:, 0] = rows[:, -1] = torch.nan
        return rows, 1, count

    states = States()
    states.add(0, *of(4, 1.0))
    states.add(6, *of(3, 2.0))
    assert found(-1, 9) == ([0, 1, 1, 1, 1, 0, 0, 2, 2], 5), "before the first position there is none: none is missed"
    for position in range(4, 9):  # one by one, as queued steps hand them over
        states.add(position, *of(1, 3.0))
    assert found(2, 7) == ([1, 1, 3, 3, 3, 3, 3], 7), "the newest counts"
    states.forget(4)
    assert found(2, 4) == ([0, 0, 3, 3], 0)
    assert found(3, 3, spared=3) == ([0, 3, 3], 3), "one is spared"
    states.add(9, *of(MOST_STATES, 4.0))
    assert found(8, 3) == ([0, 4, 4], 0), "so many tokens are kept, the newest"


def test_warming_up_takes_in_every_size_that_texts_are_taken_in_with(trained: Trained, target: Path) -> None:
    told: list[tuple[str, float]] = []
    with LLMEngine(target, device="cpu", draft_model=str(trained.folder), speculative="draft") as engine:
        drafter = always(engine)
        sizes: list[int] = []
        hidden = drafter.features.hidden

        def seen(inputs: Any, states: Any) -> torch.Tensor:
            sizes.append(inputs.input_ids.shape[0])
            assert {len(rows) for rows in states} == {sizes[-1]}
            return hidden(inputs, states)

        drafter.features.hidden = seen  # type: ignore[method-assign]
        before = drafter.blocks.num_free
        drafter.warm_up(lambda task, fraction: told.append((task, fraction)))
        assert sizes == [1, *(n for n in PROMPT_TOKENS if n <= CATCH_UP_TOKENS)] and drafter.blocks.num_free == before
        assert told[0][1] == 0.0 and told[-1][1] == 1.0
        drafter.features.hidden = hidden  # type: ignore[method-assign]


def test_a_padded_step_says_of_its_rows_what_the_step_says(trained: Trained, target: Path) -> None:
    with LLMEngine(target, device="cpu", draft_model=str(trained.folder), speculative="draft") as engine:
        drafter = always(engine)
        parts = [Slice([5, 6, 7, 8, 9], 0, [1], 1), Slice([40, 41, 42], 0, [2], 1)]
        inputs = StepInputs.gather(parts, drafter.blocks.block_size, CPU)
        states = torch.randn(drafter.features.num_seen, 8, drafter.features.model.config.hidden_size)
        expected = drafter._of_texts(inputs, states)
        whole = padded(inputs)
        assert whole.input_ids.shape[0] == PROMPT_TOKENS[0]
        found = drafter.features.hidden(whole, F.pad(states, (0, 0, 0, PROMPT_TOKENS[0] - 8)).unbind())
        torch.testing.assert_close(found[:8], expected, atol=1e-5, rtol=1e-4)

"""Training of a draft: it learns, goes on where it stopped, and what it writes is what the engine guesses with."""

from __future__ import annotations

import dataclasses
import json
from itertools import accumulate, islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from strata_lab import cli
from strata_lab.engine import LLMEngine
from strata_lab.models.errors import CheckpointError
from strata_lab.models.loader import open_checkpoint
from strata_lab.quant.forward import sequence_logits
from strata_lab.sampling_params import SamplingParams
from strata_lab.settings import ConfigError
from strata_lab.speculative.forecast import draft_memory
from strata_lab.speculative.traffic import Text, TrafficFile
from strata_lab.speculative.train.features import FeatureLesson
from strata_lab.speculative.train.lessons import BEST_SHARE, TokenLesson, distillation_loss, runs_in, shares
from strata_lab.speculative.train.making import before_loop, make_texts
from strata_lab.speculative.train.measure import HeldOut, acceptance
from strata_lab.speculative.train.network import Network, Teacher, first_draft, read_network
from strata_lab.speculative.train.prompts import prompts, read_seeds, user_turn
from strata_lab.speculative.train.recipe import train_draft
from strata_lab.speculative.train.settings import Recipe
from strata_lab.speculative.train.texts import Rows, batches, split
from strata_lab.speculative.train.told import Told
from strata_lab.speculative.train.training import Schedule, Training
from strata_lab.speculative.train.vocabulary import coverage, most_used
from tests.checkpoints import VOCAB, write_checkpoint

CPU = torch.device("cpu")
RECIPE = Recipe(
    layers=1, vocab=128, make_tokens=6000, output_tokens=24, streams=16, steps=60, batch_tokens=512, device="cpu",
    learning_rate=5e-3,
)  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("target"), "llama")[0]


@pytest.fixture(scope="module")
def trained(target, tmp_path_factory):
    recipe = dataclasses.replace(RECIPE, target=str(target))
    tasks: list[str] = []
    out = tmp_path_factory.mktemp("drafts") / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "strata_lab.speculative.train.writing.user_turn", lambda tokenizer: None
        )  # what a random model asks is noise
        return train_draft(recipe, out, progress=lambda task, fraction: tasks.append(task)), tasks


def texts(count: int = 200, seed: int = 0) -> list[Text]:
    """Texts in which a token says which one follows."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for start, step, length in torch.randint(2, 30, (count, 3), generator=generator).tolist():
        ids = [(7 * start + step * (i + 1)) % VOCAB for i in range(length + 4)]
        found.append(Text(tuple(ids[:3]), tuple(ids[3:]), 0.0))
    return found


# -- the whole way ----------------------------------------------------------------------------------------------------


def test_training_lowers_the_loss_and_raises_acceptance(trained) -> None:
    done, tasks = trained
    losses = [float(task.split("loss ")[1].split(",")[0]) for task in tasks if task.startswith("step ")]
    assert len(losses) == RECIPE.steps == done.course.step
    assert losses[-1] < 0.85 * losses[0]
    assert done.after.by_position[0] > done.before.by_position[0] + 0.03
    assert done.after.tokens_per_step[3] > done.before.tokens_per_step[3] + 0.03


def test_the_engine_guesses_with_it_as_often_right_as_was_measured(trained, target) -> None:
    """Through the engine's own step, in int8, with a cache: on prompts that it has not learned from."""
    done, _ = trained
    asked = prompts(77, read_seeds(), chats=True, tokenizer=open_checkpoint(str(target)).tokenizer())
    wanted = list(islice(asked, 8))
    with LLMEngine(target, device="cpu", max_model_len=200, draft_model=str(done.folder)) as engine:
        plain = engine.generate(wanted, GREEDY)
        assert engine.apply(speculative="draft", num_draft_tokens=4).ok
        engine._loop.parts.speculation.policy = None
        assert [o.token_ids for o in engine.generate(wanted, GREEDY)] == [o.token_ids for o in plain]
        stats = engine.stats()
        drafter = engine._loop.parts.speculation.drafter
        assert drafter.to_target.shape == (RECIPE.vocab,)
        parts, made = engine._loop.parts, getattr(drafter.step, "eager", drafter.step)
        assert made.model.weights.embedding is parts.weights.embedding, "no second embedding in memory"
        promised = draft_memory(str(done.folder), "cpu", max_num_seqs=16, max_model_len=200, block_size=16)
        assert promised.kv_bytes == made.kv.nbytes
        own = made.model.weights.nbytes - made.model.weights.embedding.nbytes
        assert promised.weights_bytes == pytest.approx(own, rel=0.05)
        first = stats.accepted_by_position[0] / stats.drafted_by_position[0]
    assert stats.num_drafted_tokens > 50
    assert abs(first - done.after.by_position[0]) < 0.25


def test_the_folder_says_where_it_comes_from_and_is_no_model(trained, target) -> None:
    done, _ = trained
    card = (done.folder / "README.md").read_text()
    assert f"{done.course.step} steps" in card and "seed: 0" in card
    assert f"| 1 | {done.before.by_position[0]:.1%} | {done.after.by_position[0]:.1%} |" in card
    with pytest.raises(CheckpointError, match="draft_model"):
        LLMEngine(done.folder, device="cpu")
    assert not list(done.folder.parent.glob(".*")), "nothing is left of the training"


def test_a_draft_for_another_model_is_refused(trained, tmp_path) -> None:
    done, _ = trained
    other, _ = write_checkpoint(tmp_path / "wide", "llama", hidden_size=96)
    with pytest.raises(ConfigError, match="64 wide"):
        LLMEngine(other, device="cpu", draft_model=str(done.folder), speculative="draft")


def test_a_damaged_vocabulary_is_a_named_error(trained, tmp_path) -> None:
    done, _ = trained
    for name in done.folder.iterdir():
        (tmp_path / name.name).write_bytes(name.read_bytes())
    manifest = json.loads((done.folder / "manifest.json").read_text())
    for wrong, message in (([5, 3], "ascending"), ([1, 2], "head"), ("x", "ascending")):
        manifest["draft"]["to_target"] = wrong
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(str(tmp_path))


# -- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_plain_network_computes_what_the_reference_computes(family, tmp_path) -> None:
    checkpoint = open_checkpoint(str(write_checkpoint(tmp_path, family)[0]))
    network = read_network(checkpoint, CPU, torch.float32)
    ids = torch.randint(0, VOCAB, (2, 19), generator=torch.Generator().manual_seed(1))
    everything = Teacher(network, torch.arange(VOCAB))
    found = everything.log_probabilities(everything.states(everything.embed(ids), (2,))[0].flatten(0, 1))
    wanted = torch.cat([sequence_logits(checkpoint)(row.tolist()).log_softmax(1) for row in ids])
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


def test_a_mixture_of_experts_is_refused_before_it_writes_texts(tmp_path) -> None:
    folder, _ = write_checkpoint(tmp_path / "moe", "qwen3_moe")
    with pytest.raises(ConfigError, match="mixture"):
        train_draft(dataclasses.replace(RECIPE, target=str(folder)), tmp_path / "d", progress=lambda task, done: None)
    assert list(tmp_path.iterdir()) == [folder]


def training(target, state, seed: int = 0, kind=TokenLesson) -> Training:
    network = read_network(open_checkpoint(str(target)), CPU, torch.float32)
    to_target = most_used(texts(), 64, VOCAB)
    lesson = kind(Teacher(network, to_target))
    learned, held = split(texts(), 64)
    schedule = Schedule(steps=12, seconds=600, batch_tokens=256, most_tokens=64, seed=seed)
    draft = lesson.first(1, [Rows.of(learned, range(40), 64)])
    return Training(lesson, draft, learned, HeldOut(lesson, held, 64, CPU), schedule, state)


@pytest.mark.parametrize("kind", [TokenLesson, FeatureLesson])
def test_training_goes_on_exactly_where_it_was_interrupted(kind, target, tmp_path) -> None:
    through = training(target, tmp_path / "through.pt", kind=kind)
    through.run(lambda task, fraction: None)
    broken = training(target, tmp_path / "state.pt", kind=kind)

    def interrupt(task: str, fraction: float) -> None:
        if broken.course.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken.run(interrupt)
    again = training(target, tmp_path / "state.pt", kind=kind)
    assert again.course.step == 5
    again.run(lambda task, fraction: None)
    assert again.course.loss == through.course.loss
    for name, value in through.draft.tensors.items():
        torch.testing.assert_close(again.draft.tensors[name], value, atol=0, rtol=0)
    with pytest.raises(ConfigError, match="another training"):
        training(target, tmp_path / "state.pt", seed=1, kind=kind)


def test_the_loss_is_zero_for_a_draft_that_says_what_it_is_to_say() -> None:
    wanted = torch.tensor([[0.5, 0.2, 0.1], [0.01, 0.03, 0.02]]).log()  # the rest is on tokens that it does not know
    best = torch.nn.functional.one_hot(wanted.argmax(1), 3)
    share = wanted.exp() * (1 - BEST_SHARE) + BEST_SHARE * best * wanted.exp().sum(1, keepdim=True)
    found, least = shares(wanted)
    torch.testing.assert_close(found, share)
    assert distillation_loss(share.log(), found, least).item() == pytest.approx(0.0, abs=1e-6)
    assert distillation_loss(torch.zeros(2, 3), found, least) > 0.05


@pytest.mark.parametrize("kind", [TokenLesson, FeatureLesson])
def test_what_is_remembered_of_the_target_is_what_it_says_when_asked_again(kind, target) -> None:
    lesson = kind(Teacher(read_network(open_checkpoint(str(target)), CPU, torch.float32), torch.arange(0, VOCAB, 3)))
    some = texts(60)
    kept = Told(lesson.teacher, some, 24, lesson.seen)
    again = Told(lesson.teacher, some, 24, lesson.seen, free_bytes=0)
    for rows in islice(batches(some, 128, 24, seed=2), 8):
        found, expected = kept(rows), again(rows)
        assert len(found.states) == len(expected.states) == len(lesson.seen)
        for state, wanted in zip(found.states, expected.states, strict=True):
            torch.testing.assert_close(state[rows.there], wanted[rows.there], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found.wanted, expected.wanted, atol=1e-4, rtol=1e-4)
    assert not again._states and sum(map(len, kept._states)) > 0


def test_acceptance_is_what_walking_through_windows_gives() -> None:
    yes, no = True, False
    texts = [no, yes, yes, no, yes], [yes, no, yes]  # the first place of each is its prompt's
    found = acceptance([runs_in(text) for text in texts])
    assert found.places == 6
    assert found.by_position[0] == 4 / 6
    assert found.by_position[1] == 1 / 2, "behind a true guess, where the text goes on"
    # windows of 1: [T T] [F] [T] and [F] [T]; of 2: [T T F] [T] and [F] [T]
    assert found.tokens_per_step[:2] == (6 / 5, 6 / 4)


def test_no_prompt_is_both_learned_from_and_measured_with() -> None:
    many = texts(300) + texts(300)
    learned, held = split(many, 64)
    assert held
    assert not {t.prompt for t in learned} & {t.prompt for t in held}
    with pytest.raises(ConfigError, match="too few"):
        split(many[:1], 64)


def test_every_text_comes_once_a_round_and_batches_can_be_skipped() -> None:
    some = texts(50)
    everything = list(islice(batches(some, 128, 64, seed=1), 40))
    assert [b.token_ids.tolist() for b in islice(batches(some, 128, 64, seed=1, start=7), 33)] == [
        b.token_ids.tolist() for b in everything[7:]
    ]
    assert all(b.token_ids.numel() <= 128 + 16 * len(b.token_ids) for b in everything)
    learned = [int(b.learned.sum()) for b in everything]
    assert sum(len(t.output) for t in some) in accumulate(learned), "a round ends when every token was learned once"


def test_places_learned_from_are_those_before_an_output_token() -> None:
    rows = Rows.of([Text((5, 6), (7, 8, 9), 0.0), Text((1,), (2,), 0.0)], [0, 1], 64)
    assert rows.token_ids.shape == (2, 16)
    assert rows.learned.nonzero().tolist() == [[0, 1], [0, 2], [0, 3], [1, 0]]


def test_the_vocabulary_holds_the_most_used_tokens_and_the_ends() -> None:
    some = [Text((1,), (40,) * 5 + (50,) * 4 + (60,), 0.0)]
    found = most_used(some, 16, VOCAB, always=[300])
    assert found.tolist() == [*range(12), 40, 50, 60, 300]
    assert coverage([Text((1,), (40, 41), 0.0)], found) == 0.5


def test_texts_are_cut_where_they_go_round_in_circles() -> None:
    start = tuple(range(100, 130))
    cut = before_loop(start + (1, 2, 3) * 40)
    assert start[:20] == cut[:20]
    assert len(cut) <= len(start) + 3
    assert before_loop(start) == start


def test_prompts_are_many_and_the_same_for_a_seed() -> None:
    seeds = read_seeds()
    first, again, other = (list(islice(prompts(s, seeds, chats=True, tokenizer=1), 400)) for s in (1, 1, 2))
    assert first == again != other
    assert len({json.dumps(p) for p in first}) > 350
    pieces = list(islice(prompts(1, seeds, chats=False, own=[list(range(200))]), 50))
    assert all(p == list(range(p[0], p[0] + len(p))) for p in pieces)
    with pytest.raises(ConfigError, match="without a tokenizer"):
        next(prompts(1, seeds, chats=False))


def test_most_of_a_chats_requests_are_what_the_model_expects_to_be_asked(target, tmp_path) -> None:
    tokenizer = open_checkpoint(str(target)).tokenizer()
    turn = user_turn(tokenizer)
    assert turn is not None
    whole = tokenizer.render_chat([{"role": "user", "content": "Hello"}])
    assert tokenizer.decode(turn.token_ids, skip_special_tokens=False) == whole.split("Hello")[0]
    asked = list(islice(prompts(1, read_seeds(), chats=True, tokenizer=tokenizer, turn=turn), 400))
    assert 0.5 < sum(prompt is turn for prompt in asked) / 400 < 0.7
    assert user_turn(SimpleNamespace(render_chat=lambda messages: "says nothing")) is None

    class Thinking:
        """Answers at once; it says "Why?" where the user is to speak."""

        optimizations = SimpleNamespace(max_num_seqs=2)

        def __init__(self) -> None:
            self.asked: dict[str, Any] = {}

        def start(self) -> None: ...

        def follow(self, prompt, params, inbox):
            name = f"r{len(self.asked)}"
            self.asked[name] = prompt, params
            inbox.put(SimpleNamespace(request_id=name, finish_reason="stop", error=None))
            return SimpleNamespace(request=SimpleNamespace(request_id=name))

        def output(self, name):
            thinks = self.asked[name][0] == list(turn.token_ids)
            return SimpleNamespace(prompt_token_ids=(1,), token_ids=(5, 6, 7), text=" Why? " if thinks else "So.")

        def forget(self, name) -> None: ...

    engine, file = Thinking(), TrafficFile(tmp_path / "made.jsonl")
    wanted: Any = iter([turn, "Once upon a time", turn, *["More"] * 99])
    made = make_texts(
        engine, wanted, file, tokens=12, seconds=60.0, output_tokens=3, seed=4, progress=lambda task, done: None
    )
    file.close()
    said = [prompt for prompt, _ in engine.asked.values()]
    assert said.count([{"role": "user", "content": "Why?"}]) == 2
    assert said.count(list(turn.token_ids)) == 2
    assert made.texts == len(said) - 2 and made.tokens == 3 * made.texts, "what it is asked is not learned from"
    assert all(params.temperature == 1.0 for prompt, params in engine.asked.values() if prompt == list(turn.token_ids))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "9"], "layers=9"),
        (["--vocab", "100"], "try 112"),
        (["--weights", "int3"], "try 'int8'"),
        (["--data", "missing.txt"], "missing.txt"),
        (["--out", "."], "exists already"),
    ],
)
def test_mistakes_are_one_line(target, tmp_path, monkeypatch, options, message) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["train-draft", "--target", str(target), "--out", "new", "--device", "cpu", *options]
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 2
    assert message in result.output
    assert list(tmp_path.iterdir()) == [], "found before anything was made"


def test_a_fitted_head_makes_more_of_an_untrained_draft(target) -> None:
    network = read_network(open_checkpoint(str(target)), CPU, torch.float32)
    lesson, rows = TokenLesson(Teacher(network, torch.arange(VOCAB))), Rows.of(texts(100, seed=1), range(100), 64)
    held_out, draft = HeldOut(lesson, texts(40), 64, CPU), first_draft(network, 1, torch.arange(VOCAB))
    fitted = lesson.first(1, [rows])
    assert held_out.measure(fitted).by_position[0] > 1.3 * held_out.measure(draft).by_position[0]


def test_an_untrained_draft_of_all_layers_and_tokens_is_the_target(target) -> None:
    network = read_network(open_checkpoint(str(target)), CPU, torch.float32)
    lesson = TokenLesson(Teacher(network, torch.arange(VOCAB)))
    draft = first_draft(network, network.config.num_layers, torch.arange(VOCAB))
    assert isinstance(draft, Network)
    assert HeldOut(lesson, texts(20), 64, CPU).measure(draft).by_position[0] == 1.0

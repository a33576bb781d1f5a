"""All of it, one phase after the other: texts, vocabulary, training, folder.

What has been made lies beside the new folder until that is finished (`.NAME.training`): the texts that the target wrote
and the state of the training. `resume` goes on from there.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from strata_lab.models.draft_part import FEATURES, TOKENS
from strata_lab.models.loader import open_model
from strata_lab.resolve import device_named
from strata_lab.settings import ConfigError
from strata_lab.speculative.traffic import Text, read_texts
from strata_lab.speculative.train.export import write_draft
from strata_lab.speculative.train.features import FeatureLesson
from strata_lab.speculative.train.lessons import Lesson, TokenLesson
from strata_lab.speculative.train.measure import Acceptance, HeldOut
from strata_lab.speculative.train.network import Teacher, check_layers, read_network
from strata_lab.speculative.train.settings import TRAFFIC_SUFFIX, Recipe
from strata_lab.speculative.train.texts import batches, split
from strata_lab.speculative.train.training import Course, Progress, Schedule, Training
from strata_lab.speculative.train.vocabulary import check_count, coverage, most_used
from strata_lab.speculative.train.writing import PROMPT_TOKENS, write_answers, write_texts
from strata_lab.telemetry import hardware

LESSONS: dict[str, Callable[[Teacher], Lesson]] = {TOKENS: TokenLesson, FEATURES: FeatureLesson}
STATE, ANSWERS = "state.pt", f"answers{TRAFFIC_SUFFIX}"
BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}  # of a training step
FIT_BATCHES = 4  # from which the untrained draft gets its head


@dataclass(frozen=True)
class Trained:
    """What came of it.

    Attributes:
        folder: give it as `draft_model`.
        nbytes: of its tensors.
        before, after: acceptance on texts that it has not learned from, untrained and trained.
        answers: after training, on greedy answers to the bench's questions (`questions.txt`); None for a model
            that does not chat.
        course: of the training.
    """

    folder: Path
    nbytes: int
    before: Acceptance
    after: Acceptance
    answers: Acceptance | None
    course: Course


def train_draft(recipe: Recipe, out: Path, *, resume: bool = False, progress: Progress) -> Trained:
    """Train a draft and write it to the new folder `out`.

    Args:
        recipe: what to train.
        out: must not exist; its parent must.
        resume: go on with an interrupted call of the same recipe.
        progress: called with what is being done and the fraction done of it.

    Raises:
        ConfigError: a setting, a file or the folder is wrong; CheckpointError: the target cannot be read.
    """
    schedule, device = schedule_of(recipe), device_named(recipe.device)
    _check(recipe)
    work = _work_folder(out, resume)
    texts, answers = gather(recipe, work, progress), ask(recipe, work, progress)
    checkpoint = open_model(recipe.target)
    try:
        config = checkpoint.config
        learned, held = split(texts, schedule.most_tokens)
        ends = [i for i in (*config.eos_token_ids, *_ends(checkpoint.tokenizer())) if i < config.vocab_size]
        to_target = most_used(learned, recipe.vocab, config.vocab_size, ends)
        progress("reading the target", 0.0)
        network = read_network(checkpoint, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        lesson = LESSONS[recipe.kind](Teacher(network, to_target.to(device)))
        first = islice(batches(learned, schedule.batch_tokens, schedule.most_tokens, schedule.seed), FIT_BATCHES)
        draft = lesson.first(recipe.num_layers, (rows.to(device) for rows in first))
        progress("asking the target about the texts kept for measuring", 0.0)
        held_out = HeldOut(lesson, held, schedule.most_tokens, device)
        asked = HeldOut(lesson, answers, schedule.most_tokens, device) if answers else None
        training = Training(lesson, draft, learned, held_out, schedule, work / STATE, asked)
        course = training.run(progress)
        before, after = course.measured[0][1], course.measured[-1][1]
        covered = {"coverage": coverage(held, to_target), "answers_coverage": coverage(answers, to_target)}
        facts = _facts(recipe, learned, covered, course)
        nbytes = write_draft(out, draft, to_target, checkpoint, recipe.weights, recipe.kind, facts, lesson.seen)
    finally:
        checkpoint.close()
    shutil.rmtree(work)
    return Trained(out, nbytes, before, after, course.answered[-1][1] if course.answered else None, course)


def gather(recipe: Recipe, work: Path, progress: Progress) -> list[Text]:
    """The texts to learn from: recorded ones, and those that the target writes into the folder `work`.

    Once training has begun no more are written: it goes on with the same ones.
    """
    made = work / f"texts{TRAFFIC_SUFFIX}"
    recorded = [path for path in recipe.data if path.suffix == TRAFFIC_SUFFIX]
    checkpoint = open_model(recipe.target)
    vocab_size = checkpoint.config.vocab_size
    checkpoint.close()
    texts = [text for path in recorded for text in read_texts(path, vocab_size)]
    written = list(read_texts(made, vocab_size)) if made.is_file() else []
    missing = recipe.make_tokens - sum(len(text.output) for text in written)
    if missing > 0 and not (work / STATE).is_file():
        write_texts(recipe, made, missing, recipe.seed + len(written), progress)
        written = list(read_texts(made, vocab_size))
    return texts + written


def ask(recipe: Recipe, work: Path, progress: Progress) -> list[Text]:
    """The target's answers to the bench's questions, which nobody learns from; none of a model that does not chat."""
    checkpoint = open_model(recipe.target)
    tokenizer, vocab_size = checkpoint.tokenizer(), checkpoint.config.vocab_size
    checkpoint.close()
    if tokenizer is None or tokenizer.chat_template is None:
        return []
    path = work / ANSWERS
    if not path.is_file():
        part = path.with_suffix(".part")
        part.unlink(missing_ok=True)
        write_answers(recipe, part, progress)
        part.rename(path)
    return list(read_texts(path, vocab_size))


def schedule_of(recipe: Recipe) -> Schedule:
    """Of the training."""
    return Schedule(
        steps=recipe.steps, seconds=recipe.seconds, learning_rate=recipe.learning_rate, seed=recipe.seed,
        batch_tokens=recipe.batch_tokens or BATCH_TOKENS[device_named(recipe.device).type],
        most_tokens=PROMPT_TOKENS + recipe.output_tokens,
    )  # fmt: skip


def _check(recipe: Recipe) -> None:
    """What would be wrong an hour later: `ConfigError`, or `CheckpointError` for a target that cannot be read."""
    check_count(recipe.vocab)
    missing = [str(path) for path in recipe.data if not path.is_file()]
    if missing:
        raise ConfigError(f"data={missing[0]!r} is no file; give texts (UTF-8) or recorded traffic ({TRAFFIC_SUFFIX})")
    checkpoint = open_model(recipe.target)
    try:
        check_layers(recipe.num_layers, checkpoint.config)
    finally:
        checkpoint.close()


def _work_folder(out: Path, resume: bool) -> Path:
    if out.exists():
        raise ConfigError(f"{out} exists already; give another name, or remove it first")
    if not out.parent.is_dir():
        raise ConfigError(f"the folder {out.parent} does not exist; make it first")
    work = out.parent / f".{out.name}.training"
    if work.exists() and not resume:
        raise ConfigError(f"{work} is left of an interrupted training; go on with resume, or remove it")
    work.mkdir(exist_ok=True)
    return work


def _ends(tokenizer: Any) -> tuple[int, ...]:
    return () if tokenizer is None else tuple(tokenizer.eos_token_ids)


def _facts(recipe: Recipe, learned: list[Text], covered: dict[str, float], course: Course) -> dict[str, Any]:
    """What the card says."""
    shown = asdict(recipe) | {"data": [path.name for path in recipe.data], "target": Path(recipe.target).name}
    return {
        "recipe": shown, "texts": len(learned), "tokens": sum(len(text.output) for text in learned),
        "greedy": sum(text.temperature == 0 for text in learned) / len(learned), **covered,
        "steps": course.step, "places": course.tokens, "seconds": course.seconds, "loss": course.loss,
        "hardware": _hardware(device_named(recipe.device)),
        "before": course.measured[0][1].as_dict(), "after": course.measured[-1][1].as_dict(),
        "answers": [{"step": step} | measured.as_dict() for step, measured in course.answered],
        "history": [{"step": step} | measured.as_dict() for step, measured in course.measured],
    }  # fmt: skip


def _hardware(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else hardware.cpu_info().name

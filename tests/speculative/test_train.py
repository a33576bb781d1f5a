"""Training of a draft: it learns, goes on where it stopped, and what it writes is what the engine guesses with."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from strata_lab.engine import LLMEngine
from strata_lab.models.loader import CheckpointError, open_checkpoint
from strata_lab.quant.forward import sequence_logits
from strata_lab.sampling_params import SamplingParams
from strata_lab.settings import ConfigError
from strata_lab.speculative.train.measure import MOST_GUESSES, acceptance
from strata_lab.speculative.train.network import Teacher, first_draft, read_target
from strata_lab.speculative.train.recipe import train_draft, write_texts
from strata_lab.speculative.train.settings import Recipe
from strata_lab.speculative.train.texts import Rows, batches, split
from strata_lab.speculative.train.training import Schedule, Training
from strata_lab.speculative.train.vocabulary import coverage, most_used
from strata_lab.speculative.traffic import Text, TrafficFile, read_texts
from tests.checkpoints import FAMILIES, VOCAB, write_checkpoint

CPU = torch.device("cpu")
RECIPE = Recipe(
    layers=1, vocab=128, make_tokens=6000, output_tokens=24, streams=16, steps=60, batch_tokens=512, device="cpu",
    learning_rate=5e-3, weights="int8",
)  # fmt: skip


def ignore(task: str, fraction: float) -> None:
    pass


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("target"), "llama")[0]


@pytest.fixture(scope="module")
def trained(target, tmp_path_factory):
    recipe = dataclasses.replace(RECIPE, target=str(target))
    tasks: list[str] = []
    out = tmp_path_factory.mktemp("drafts") / "tiny"
    return train_draft(recipe, out, progress=lambda task, fraction: tasks.append(task)), tasks


def test_training_lowers_the_loss_and_raises_acceptance(trained) -> None:
    done, tasks = trained
    losses = [float(task.split("loss ")[1].split(",")[0]) for task in tasks if task.startswith("step ")]
    print(losses[0], losses[-1], done.before, done.after)
    assert losses[-1] < 0.7 * losses[0]
    assert done.after.by_position[0] > done.before.by_position[0] + 0.1
    assert done.after.tokens_per_step[3] > done.before.tokens_per_step[3]

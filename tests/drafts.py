"""Writes drafts for tests that need one and no training."""

from __future__ import annotations

from pathlib import Path

import torch

from strata_lab.models.draft_part import FEATURES
from strata_lab.models.loader import open_checkpoint
from strata_lab.speculative.traffic import Text
from strata_lab.speculative.train.export import write_draft
from strata_lab.speculative.train.features import FeatureLesson
from strata_lab.speculative.train.measure import acceptance
from strata_lab.speculative.train.network import Teacher, read_network
from strata_lab.speculative.train.texts import Rows
from tests.checkpoints import VOCAB


def write_feature_draft(target: Path, folder: Path) -> Path:
    """A feature draft as training begins with it, over two thirds of the tokens."""
    checkpoint = open_checkpoint(str(target))
    kept = torch.arange(VOCAB)[torch.arange(VOCAB) % 3 != 1]
    lesson = FeatureLesson(Teacher(read_network(checkpoint, torch.device("cpu"), torch.float32), kept))
    some = torch.randint(3, 250, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    draft = lesson.first(1, [Rows.of([Text(tuple(some[:2]), tuple(some[2:]), 0.0)], [0], 64)])
    facts = {"recipe": {}, "texts": 1, "tokens": 38, "greedy": 1.0, "coverage": 1.0, "steps": 0, "places": 0,
             "seconds": 0.0, "loss": 0.0, "hardware": "", "before": acceptance([]).as_dict(),
             "after": acceptance([]).as_dict()}  # fmt: skip
    write_draft(folder, draft, kept, checkpoint, "int8", FEATURES, facts, lesson.seen)
    return folder

"""The draft that comes with the default model: found by name, small, and what its card says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from strata_lab.config import DEFAULT_MODEL
from strata_lab.engine import LLMEngine
from strata_lab.models import shipped
from strata_lab.models.hub import find_model
from strata_lab.models.loader import open_checkpoint
from strata_lab.sampling_params import SamplingParams
from strata_lab.speculative.traffic import Text
from strata_lab.speculative.train.features import FeatureLesson, FeatureNetwork
from strata_lab.speculative.train.measure import HeldOut
from strata_lab.speculative.train.network import Teacher, read_network

NAME = f"{DEFAULT_MODEL}-draft"
MAX_BYTES = 25_000_000  # in the wheel
here = pytest.mark.skipif(shipped.find_shipped(NAME) is None, reason=f"{NAME} is not in this checkout")


def test_a_shipped_draft_is_found_by_its_name_alone(tmp_path: Path) -> None:
    (tmp_path / "some-model-draft").mkdir()
    assert shipped.find_shipped("Some-Model-draft", tmp_path) == tmp_path / "some-model-draft"
    assert shipped.draft_for("Some-Model", tmp_path) == "some-model-draft"
    assert shipped.draft_for("other", tmp_path) is None
    assert shipped.find_shipped("../some-model-draft", tmp_path) is None
    assert shipped.find_shipped(NAME, tmp_path / "nothing") is None


@here
def test_the_shipped_draft_is_small_and_says_where_it_comes_from() -> None:
    folder = shipped.find_shipped(NAME)
    assert folder is not None
    assert sum(path.stat().st_size for path in folder.iterdir()) < MAX_BYTES
    draft = open_checkpoint(NAME)
    part = draft.draft
    draft.close()
    assert part.target == DEFAULT_MODEL
    assert len(part.to_target) == draft.config.vocab_size
    first = part.facts["after"]["by_position"][0]
    assert f"| {first:.1%} |" in (folder / "README.md").read_text()


@here
@pytest.mark.skipif(find_model(DEFAULT_MODEL) is None, reason=f"{DEFAULT_MODEL} is not installed; run `make model`")
def test_the_default_model_guesses_with_it_as_well_as_training_measures() -> None:
    """The same text, walked through by the engine's windows and by the trainer's arithmetic."""
    chat = [{"role": "user", "content": "Why do leaves change their colour in autumn?"}]
    params = SamplingParams(temperature=0, max_tokens=48)
    with LLMEngine(device="cpu", max_model_len=256, num_kv_blocks=32) as engine:
        plain = engine.generate([chat], params)[0]
        assert engine.apply(speculative="draft", num_draft_tokens=3).ok
        engine._loop.parts.speculation.policy = None
        before = engine.stats().num_steps
        assert engine.generate([chat], params)[0].token_ids == plain.token_ids
        stats = engine.stats()
    draft = open_checkpoint(NAME)
    head = torch.tensor(draft.draft.to_target)
    network = read_network(draft, torch.device("cpu"), torch.float32)
    target = read_network(open_checkpoint(DEFAULT_MODEL), torch.device("cpu"), torch.float32)
    text = Text(plain.prompt_token_ids, plain.token_ids, 0.0)
    expected = HeldOut(FeatureLesson(Teacher(target, head)), [text], 256, torch.device("cpu")).measure(
        FeatureNetwork(network.config, network.tensors)
    )
    found = len(plain.token_ids) / (stats.num_steps - before)
    assert found == pytest.approx(expected.tokens_per_step[2], rel=0.15)
    assert sum(stats.accepted_by_position) > 0

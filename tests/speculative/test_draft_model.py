"""A draft model follows the texts, agrees with a target that is itself, and never changes what the target says."""

from __future__ import annotations

import pytest
import torch

from strata_lab.block_manager import BlockManager
from strata_lab.engine import LLMEngine
from strata_lab.prefix_cache import PrefixCache
from strata_lab.request import Request
from strata_lab.sampling_params import SamplingParams
from strata_lab.settings import ConfigError
from strata_lab.speculative.draft_model import CATCH_UP_TOKENS, DraftModel
from tests.checkpoints import write_checkpoint

OPTIONS = {"device": "cpu", "max_model_len": 128}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
VOCAB = 40


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models of one vocabulary, and one of another."""
    return [
        write_checkpoint(tmp_path_factory.mktemp(name), family)[0]
        for name, family in (("target", "llama"), ("other", "qwen2"))
    ]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(3, 300, (5 + 7 * i,), generator=generator).tolist() for i in range(3)]


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_target_that_drafts_for_itself_accepts_everything(folders, params) -> None:
    """Drawn texts too: the draft model draws with the target's random numbers."""
    with LLMEngine(folders[0], draft_model=folders[0], **OPTIONS) as engine:
        plain = engine.generate(prompts(), params)
        assert engine.apply(speculative="draft", num_draft_tokens=4).ok
        speculation = engine._loop.parts.speculation
        speculation.policy = None  # it is as slow as the target: the policy would rightly not use it
        assert [o.token_ids for o in engine.generate(prompts(), params)] == [o.token_ids for o in plain]
        stats = engine.stats()
        assert stats.num_drafted_tokens > 30
        assert stats.acceptance_rate == 1.0
        engine.generate([[1, 2, 3]], GREEDY)
        assert speculation.drafter.blocks.num_used <= 1, "blocks of ended requests are free again"


def test_another_model_changes_no_text(folders) -> None:
    with LLMEngine(folders[0], draft_model=folders[1], **OPTIONS) as engine:
        plain = engine.generate(prompts(), GREEDY)
        assert engine.apply(speculative="draft").ok
        engine._loop.parts.speculation.policy = None
        assert [o.token_ids for o in engine.generate(prompts(), GREEDY)] == [o.token_ids for o in plain]
        stats = engine.stats()
        assert stats.num_drafted_tokens > 30
        assert stats.acceptance_rate < 0.5


def test_a_draft_model_of_another_vocabulary_is_refused_and_nothing_changes(folders) -> None:
    with LLMEngine(folders[0], draft_model="qwen3.8-flash@0.05", **OPTIONS) as engine:
        report = engine.apply(speculative="draft")
        assert "tokens" in report.results["speculative"].reason
        assert engine.optimizations.speculative == "none"
        assert len(engine.generate(prompts()[:1], GREEDY)[0].token_ids) == 20
    with pytest.raises(ConfigError):
        LLMEngine(folders[0], draft_model="qwen3.8-flash@0.05", speculative="draft", **OPTIONS)


class FakeStep:
    """Says that token t is followed by t + 1, and remembers what it was asked to compute."""

    def __init__(self) -> None:
        self.computed: list[tuple[list[int], list[int]]] = []

    def __call__(self, inputs):
        ids = inputs.input_ids.tolist()
        self.computed.append((ids, inputs.positions.tolist()))
        logits = torch.zeros(inputs.sample_rows.shape[0], VOCAB)
        for row, place in enumerate(inputs.sample_rows.tolist()):
            logits[row, (ids[place] + 1) % VOCAB] = 9.0
        return logits


def drafter(num_blocks: int = 64) -> DraftModel:
    return DraftModel(FakeStep(), BlockManager(num_blocks, 8), torch.device("cpu"), "fake")


def decoding(prompt: list[int]) -> Request:
    request = Request("r", prompt, GREEDY)
    request.append(prompt[-1] + 1, 0.0)
    return request


def test_only_what_is_new_or_was_guessed_wrong_is_computed_again() -> None:
    d, r = drafter(), decoding([1, 2, 3])
    assert d.look([r]) == [1]
    assert d.draft([r], [3]) == [[5, 6, 7]]
    assert d.step.computed == [([1, 2, 3], [0, 1, 2]), ([4], [3]), ([5], [4]), ([6], [5])]
    d.step.computed.clear()
    for token_id in (5, 20):  # the second guess was wrong
        r.append(token_id, 0.0)
    assert d.look([r]) == [1]
    assert d.draft([r], [2]) == [[21, 22]]
    assert d.step.computed == [([20], [5]), ([21], [6])]


def test_a_long_text_is_taken_in_over_several_steps() -> None:
    d, r = drafter(num_blocks=80), decoding([1] * (2 * CATCH_UP_TOKENS))
    looks = []
    for _ in range(2):
        looks += d.look([r])
    assert looks == [0, 1]
    assert max(len(ids) for ids, _ in d.step.computed) <= CATCH_UP_TOKENS
    assert d.draft([r], [2]) == [[3, 4]]


def test_the_next_turn_of_a_chat_goes_on_behind_what_the_last_one_left() -> None:
    d = DraftModel(FakeStep(), BlockManager(8, 8, PrefixCache(8)), torch.device("cpu"), "fake")
    first = decoding(list(range(1, 17)))
    d.look([first])
    assert d.draft([first], [3]) == [[18, 19, 20]]
    first.append(33, 0.0)  # no guess came true
    d.forget(first)
    second = decoding([*first.token_ids, 3, 4])
    second.request_id = "second"
    d.step.computed.clear()
    d.look([second])
    assert d.draft([second], [1]) == [[6]]
    asked = [place for ids, places in d.step.computed for place in places]
    assert asked == [*range(16, 21)], "two full blocks are found, and nothing that was guessed"
    d.forget(second)
    assert d.blocks.num_used == 0


def test_a_request_without_blocks_goes_without_guesses() -> None:
    d, r = drafter(num_blocks=2), decoding([1] * 30)
    assert d.look([r]) == [0]
    short = decoding([1, 2])
    short.request_id = "s"
    assert d.look([short]) == [1]
    assert d.draft([short], [16]) == [list(range(4, 18))], "as many as its blocks hold"

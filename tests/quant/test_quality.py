"""Laws of the measures of quality, on logits whose numbers are known, and of the texts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from strata_lab.quant.quality import compare, divergence, greedy, perplexity
from strata_lab.quant.texts import text, windows

VOCAB = 11


def uniform(tokens: Sequence[int]) -> Tensor:
    return torch.zeros(len(tokens), VOCAB)


def successor(tokens: Sequence[int], sureness: float = 50.0) -> Tensor:
    """Sure that each token is followed by the next number."""
    return sureness * torch.nn.functional.one_hot((torch.tensor(tokens) + 1) % VOCAB, VOCAB).float()


def scores(tokens: Sequence[int], seed: int = 0) -> Tensor:
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
    return table[torch.tensor(tokens)]


def test_perplexity_of_knowing_nothing_is_the_vocabulary() -> None:
    assert perplexity(uniform, [[1, 2, 3], [4, 5, 6, 7]]) == pytest.approx(VOCAB)


def test_perplexity_of_knowing_everything_is_one() -> None:
    assert perplexity(successor, [[1, 2, 3, 4]]) == pytest.approx(1.0)
    assert perplexity(successor, [[1, 2, 4]]) > 1e9


def test_perplexity_weighs_tokens_and_not_sequences() -> None:
    one, two = [3, 1], [5, 6, 7, 8, 2, 2]
    log_p = [torch.log_softmax(scores(s).double(), -1)[range(len(s) - 1), s[1:]] for s in (one, two)]
    assert perplexity(scores, [one, two, [4]]) == pytest.approx(math.exp(-torch.cat(log_p).mean().item()), rel=1e-6)


def test_comparison_is_the_definition_in_float64() -> None:
    text_ids = [[3, 1, 9, 9, 0], [2, 7, 7]]
    found = compare(scores, lambda t: scores(t, 1), text_ids)
    p, q = (torch.log_softmax(torch.cat([scores(s, seed)[:-1] for s in text_ids]).double(), -1) for seed in (0, 1))
    assert found.tokens == 6
    assert found.mean_kl == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-5)
    assert found.top1_agreement == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
    assert found.reference_perplexity == pytest.approx(perplexity(scores, text_ids))
    assert found.perplexity == pytest.approx(perplexity(lambda t: scores(t, 1), text_ids))


def test_a_model_beside_itself_differs_in_nothing() -> None:
    found = compare(scores, scores, [[1, 2, 3]])
    assert (found.mean_kl, found.top1_agreement) == (0.0, 1.0)
    assert found.perplexity == found.reference_perplexity


def test_impossible_tokens_of_the_reference_cost_no_nan() -> None:
    def masked(tokens: Sequence[int]) -> Tensor:
        return scores(tokens).index_fill(1, torch.tensor([VOCAB - 1]), -math.inf)

    assert math.isfinite(compare(masked, scores, [[1, 2, 3]]).mean_kl)


def test_greedy_follows_the_likeliest_and_divergence_finds_the_first_step_aside() -> None:
    assert greedy(successor, [3], 4) == [4, 5, 6, 7]

    def wrong_after_six(tokens: Sequence[int]) -> Tensor:
        logits = successor(tokens)
        logits[torch.tensor(tokens) == 6] = 0.0
        return logits

    assert divergence(successor, [2, 3], [4, 5, 6, 7]) is None
    assert divergence(wrong_after_six, [2, 3], [4, 5, 6, 7, 8]) == 3
    assert divergence(wrong_after_six, [6], [7]) == 0


def test_nothing_to_predict_is_refused() -> None:
    with pytest.raises(ValueError, match="2 sequences, none with 2 tokens"):
        perplexity(scores, [[1], []])
    with pytest.raises(ValueError, match="prompt of 0, continuation of 1 tokens"):
        divergence(scores, [], [1])


def test_the_texts_share_no_sentence_and_hold_both_languages() -> None:
    parts = [
        {line.strip() for line in text(name).replace(". ", "\n").replace("。", "\n").splitlines() if len(line) > 25}
        for name in ("calibration", "evaluation")
    ]
    assert not parts[0] & parts[1]
    for name in ("calibration", "evaluation"):
        whole = text(name)
        chinese = sum("\u4e00" <= c <= "\u9fff" for c in whole)
        assert len(whole.encode()) > 12_000
        assert 0.03 < chinese / len(whole) < 0.5
        assert "def " in whole


def test_windows_cut_evenly_and_keep_a_short_text() -> None:
    assert windows(list(range(10)), 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert windows([1, 2], 4) == [[1, 2]]
    with pytest.raises(ValueError, match="length=1 must be at least 2"):
        windows([1, 2], 1)

"""The default model quantized: what each format and method may cost, on the evaluation text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from strata_lab.models.hub import find_model
from strata_lab.models.loader import open_checkpoint
from strata_lab.quant import convert, get_grid_format
from strata_lab.quant.calibrate import quantize_model
from strata_lab.quant.forward import sequence_logits
from strata_lab.quant.overlay import Overlay
from strata_lab.quant.quality import Comparison, compare
from strata_lab.quant.texts import text, windows

MODEL = "smollm2-135m"
HEAD = "model.embed_tokens.weight"  # tied: embedding and head

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_model(MODEL) is None, reason=f"{MODEL} is not installed; run `make model`"),
]


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[Any]:
    opened = open_checkpoint(MODEL)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def evaluation(checkpoint: Any) -> list[list[int]]:
    return windows(checkpoint.tokenizer().encode(text("evaluation"), add_special_tokens=False), 512)[:2]


@pytest.fixture(scope="module")
def reference(checkpoint: Any, evaluation: list[list[int]]) -> Callable[[Sequence[int]], Tensor]:
    logits = sequence_logits(checkpoint)
    known = {tuple(sequence): logits(sequence) for sequence in evaluation}
    return lambda sequence: known[tuple(sequence)]


def rounded(checkpoint: Any, name: str, granularity: str | None, layers: int | None = None) -> Overlay:
    """All matrices, or those of the first layers, to nearest; the head as it is stored (int8 in groups)."""
    overlay = Overlay(checkpoint)
    for one in quantize_model(checkpoint, [], get_grid_format(name, granularity), "rtn"):
        if layers is not None and int(one.name.split(".")[2]) == layers:
            break
        overlay.put(one.name, one.value)
    return overlay


@pytest.mark.parametrize(("granularity", "share"), [("group32", 0.005), ("channel", 0.015)])
def test_int8_to_nearest_costs_little_perplexity(
    granularity: str, share: float, checkpoint: Any, evaluation: list[list[int]], reference: Any
) -> None:
    """Half a percent is what groups of 32 must keep to; the other bound only says that nothing got worse.

    What each variant costs, calibrated methods included: `docs/results/quality_cpu.json`.
    """
    found = _loss(reference, rounded(checkpoint, "int8", granularity), evaluation)
    assert found.perplexity / found.reference_perplexity - 1 < share


def test_fp8_costs_little_perplexity_and_in_the_head_more_than_in_all_layers(
    checkpoint: Any, evaluation: list[list[int]], reference: Any
) -> None:
    """The head is the embedding too, and what it rounds goes straight into the logits."""
    overlay = Overlay(checkpoint)
    overlay.put(HEAD, convert(checkpoint.linear(HEAD), "fp8"))
    layers = _loss(reference, rounded(checkpoint, "fp8", "channel"), evaluation)
    assert layers.perplexity / layers.reference_perplexity - 1 < 0.02, "nothing got worse"
    assert _loss(reference, overlay, evaluation).mean_kl > layers.mean_kl


def test_gptq_takes_more_than_half_off_the_loss_of_four_bits(
    checkpoint: Any, evaluation: list[list[int]], reference: Any
) -> None:
    """The first three layers in groups of 64, calibrated on the other text: mean KL against the stored model."""
    layers, fmt = 3, get_grid_format("int4", "group64")
    tokens = windows(checkpoint.tokenizer().encode(text("calibration"), add_special_tokens=False), 512)[::4]
    overlay = Overlay(checkpoint)
    for one in quantize_model(checkpoint, tokens, fmt, "gptq"):
        if int(one.name.split(".")[2]) == layers:
            break
        overlay.put(one.name, one.value)
    nearest, gptq = (_loss(reference, o, evaluation) for o in (rounded(checkpoint, "int4", "group64", layers), overlay))
    assert gptq.mean_kl < 0.5 * nearest.mean_kl
    assert gptq.top1_agreement > nearest.top1_agreement


def _loss(reference: Any, overlay: Overlay, evaluation: list[list[int]]) -> Comparison:
    with torch.inference_mode():
        return compare(reference, sequence_logits(overlay), evaluation)

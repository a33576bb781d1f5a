"""What weights take in memory is what the arithmetic says, within three percent."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata_lab.engine import LLMEngine
from strata_lab.models.loader import open_checkpoint
from strata_lab.quant.convert_model import ConvertSettings, convert_checkpoint
from strata_lab.telemetry.roofline import forecast
from tests.checkpoints import write_checkpoint

SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3}  # scales weigh as they do in real models


@pytest.mark.parametrize("weight_format", ["bf16", "fp8", "int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_loaded_weights_are_as_large_as_forecast(family: str, weight_format: str, tmp_path: Path) -> None:
    sizes = SIZES | ({"moe_intermediate_size": 128} if family == "qwen3_moe" else {})
    model = write_checkpoint(tmp_path / "model", family, **sizes)[0]
    with LLMEngine(str(model), device="cpu", weight_format=weight_format) as engine:
        expected = forecast(engine.model_config, weight_format, "bf16").stored_bytes
        assert engine.stats().weight_bytes == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("weights", "granularity", "bits"), [("int4", "group64", 4.25), ("int8", "channel", 8.02)])
def test_files_are_as_large_as_their_bits(weights: str, granularity: str, bits: float, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "llama", **SIZES | {"hidden_size": 1024})[0]
    source = open_checkpoint(str(model))
    done = convert_checkpoint(source, tmp_path / "made", ConvertSettings(weights, granularity))
    layers = 3 * (1024 * (1024 + 2 * 512) + 1024 * 1024 + 3 * 1024 * 768)
    head = 2 * 320 * 1024 * (8 + 16 / 32)
    assert done.bytes_after * 8 == pytest.approx(layers * bits + head, rel=0.03)

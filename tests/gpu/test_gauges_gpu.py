"""What the gauges say of a real card: memory as forecast, sensors that answer, pauses that rest the device."""

from __future__ import annotations

import time

import pytest
import torch

from strata_lab.bench.measure import until_none_captured
from strata_lab.engine import LLMEngine
from strata_lab.events import GovernorEvent
from strata_lab.models.presets import preset_config
from strata_lab.sampling_params import SamplingParams
from strata_lab.telemetry.memcheck import Plan, check
from strata_lab.telemetry.monitor import source_for
from tests.gpu.card_memory import reserved

pytestmark = pytest.mark.gpu
TOLERANCE = 0.05
MODEL = "qwen3.8-flash-dense"
GREEDY = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True)


@pytest.mark.parametrize("weight_format", ["fp8", "int4"])
def test_the_memory_forecast_is_within_5_percent_of_what_an_engine_takes(weight_format: str) -> None:
    before, total = reserved(), torch.cuda.mem_get_info()[1]
    blocks = 8000
    made = check(
        Plan(
            config=preset_config(MODEL), device="cuda", memory_bytes=total, weight_format=weight_format,
            kv_cache_dtype="fp8", max_num_seqs=16, max_num_batched_tokens=2048, num_kv_blocks=blocks,
        )
    )  # fmt: skip
    options = {"weight_format": weight_format, "kv_cache_dtype": "fp8", "num_kv_blocks": blocks}
    with LLMEngine(MODEL, device="cuda", max_num_seqs=16, max_num_batched_tokens=2048, **options) as engine:
        engine.generate([[7 + i] * 500 for i in range(16)], GREEDY)
        torch.cuda.empty_cache()  # cuBLAS' workspaces count: the forecast has an allowance for libraries
        taken = torch.cuda.memory_reserved() - before
    assert made.kv_bytes + made.weights_bytes < taken
    assert abs((made.total_bytes - made.context_bytes) / taken - 1) < TOLERANCE


def test_the_card_answers() -> None:
    source = source_for("cuda:0")
    reading = source.read()
    source.close()
    if reading.note:
        pytest.skip(reading.note)
    assert reading.name == torch.cuda.get_device_name(0)
    assert reading.core_c is not None and 10 < reading.core_c < 110
    assert (
        reading.memory_bytes is not None
        and reading.memory_bytes > torch.cuda.get_device_properties(0).total_memory * 0.9
    )


def test_pacing_halves_the_rate_and_keeps_the_tokens() -> None:
    prompt = [11] * 64
    with LLMEngine(MODEL, device="cuda", max_model_len=2048, max_num_seqs=2, thermal_governor="pace") as engine:
        # A prompt's shape is captured when it is met again.
        until_none_captured(lambda: engine.generate([prompt], GREEDY), lambda: engine._loop.captures, 4)
        governor = engine._loop.parts.governor
        governor.stop()  # no reading interferes with what is set here

        def seconds(share: float) -> tuple[float, tuple[int, ...]]:
            governor.pacer._stop.clear()
            governor.pacer.idle_share = share
            start = time.perf_counter()
            output = engine.generate([prompt], GREEDY)[0]
            return time.perf_counter() - start, output.token_ids

        free, expected = seconds(0.0)
        paced, tokens = seconds(0.5)
        events = [e for e in engine.events.since(0)[0] if isinstance(e, GovernorEvent)]
    assert tokens == expected
    assert 1.7 < paced / free < 2.6
    assert all(e.policy == "pace" for e in events)

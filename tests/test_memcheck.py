"""Laws of `strata memcheck`: the forecast is what an engine takes, and the change it names is enough."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from strata_lab import cli
from strata_lab.models.presets import PRESETS, preset_config
from strata_lab.resolve import CPU_POOL_BYTES
from strata_lab.telemetry import memcheck
from strata_lab.telemetry.memcheck import GIB, Plan, check, rows

MOE = PRESETS["qwen3.8-flash"]
SMALL = "qwen3.8-flash-dense@0.3"
TOLERANCE = 0.05
# What a process has taken, with everything loaded that any engine loads and freed memory given back to the system.
MEASURE = """
import ctypes, gc, json, sys
import torch
from strata_lab.engine import LLMEngine
from strata_lab.sampling_params import SamplingParams

def taken():
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

def made(model, blocks):
    engine = LLMEngine(model, device="cpu", weight_format=sys.argv[2], num_kv_blocks=blocks, max_num_seqs=4,
                       max_num_batched_tokens=256)
    engine.generate([[5] * 60 for _ in range(4)], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    for pool in (engine._loop.parts.kv._k, engine._loop.parts.kv._v):
        pool.zero_()  # a pool that nobody has written to has addresses and no memory yet
    return engine

torch.set_num_threads(1)
made("qwen3.8-flash-dense@0.05", 70).close()
before = taken()
engine = made(sys.argv[1], int(sys.argv[3]))
stats = engine.stats()
print(json.dumps({"taken": taken() - before, "weights": stats.weight_bytes, "kv": stats.kv_bytes}))
"""


def plan(**changes: Any) -> Plan:
    base: dict[str, Any] = {
        "config": MOE, "device": "cuda", "memory_bytes": 48 * GIB, "weight_format": "fp8", "kv_cache_dtype": "fp8",
        "max_num_seqs": 8, "max_model_len": 4096,
    }  # fmt: skip
    return Plan(**(base | changes))


def test_a_draft_model_takes_its_part_of_the_memory() -> None:
    without, with_draft = check(plan()), check(plan(draft_bytes=3 * GIB))
    assert with_draft.total_bytes - with_draft.kv_bytes == without.total_bytes - without.kv_bytes + 3 * GIB
    assert ("draft model", 3 * GIB) in [row[:2] for row in rows(with_draft)]
    assert check(plan(draft_bytes=48 * GIB)).verdict == "too small"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells what a process has taken")
@pytest.mark.parametrize("weight_format", ["int8", "bf16"])
def test_the_forecast_is_within_5_percent_of_what_an_engine_takes(weight_format: str) -> None:
    command = [sys.executable, "-c", MEASURE, SMALL, weight_format, "1600"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    made = check(
        plan(
            config=preset_config(SMALL), device="cpu", weight_format=weight_format, kv_cache_dtype="fp32",
            num_kv_blocks=1600, max_num_seqs=4, max_num_batched_tokens=256,
        )
    )  # fmt: skip
    assert abs(made.total_bytes / found["taken"] - 1) < TOLERANCE
    assert made.kv_bytes == found["kv"]
    assert abs(made.weights_bytes / found["weights"] - 1) < 0.01


def test_on_a_cpu_the_pool_is_bounded_as_in_the_engine() -> None:
    assert memcheck.CPU_POOL_BYTES == CPU_POOL_BYTES
    made = check(plan(device="cpu", config=preset_config(SMALL), max_model_len=None, max_num_seqs=1024))
    assert CPU_POOL_BYTES - made.kv_bytes < plan(config=preset_config(SMALL)).block_bytes
    assert (made.captures_bytes, made.context_bytes) == (0, 0)


def test_the_parts_add_up_and_the_pool_takes_what_is_left() -> None:
    made = check(plan(max_model_len=None, max_num_seqs=1024))
    parts = [size for name, size, _ in rows(made)]
    assert sum(parts[:6]) == parts[6] == made.total_bytes
    assert 0 <= made.limit_bytes - made.total_bytes < plan().block_bytes
    assert made.limit_bytes == int(0.9 * 48 * GIB)


CASES = [
    # bf16 weights on 24 GB: no share of the card is enough, fp8 is still too much, int4 is enough
    ({"weight_format": "bf16", "memory_bytes": 24 * GIB}, "too small", "weight_format", "int4"),
    ({"weight_format": "bf16", "memory_bytes": 30 * GIB}, "too small", "weight_format", "fp8"),
    # the weights fit, a request does not; half the bytes per token are enough, or not
    (
        {"kv_cache_dtype": "bf16", "memory_bytes": 26 * GIB, "max_model_len": 32768},
        "too small",
        "kv_cache_dtype",
        "fp8",
    ),
    ({"memory_bytes": 25 * GIB, "max_model_len": 40960}, "too small", "max_model_len", None),
    ({"memory_bytes": 24 * GIB}, "too small", "gpu_memory_utilization", 0.95),
    ({"num_kv_blocks": 10**6}, "too small", "num_kv_blocks", None),
    ({"max_num_seqs": 200}, "tight", "max_num_seqs", None),
    ({"kv_cache_dtype": "bf16", "max_num_seqs": 100}, "tight", "kv_cache_dtype", "fp8"),
    ({"memory_bytes": 4 * GIB}, "too small", "model", None),
]


@pytest.mark.parametrize(("changes", "verdict", "setting", "value"), CASES)
def test_the_change_that_is_named_is_enough(changes: dict[str, Any], verdict: str, setting: str, value: Any) -> None:
    before = plan(**changes)
    made = check(before)
    assert (made.verdict, made.setting) == (verdict, setting)
    assert value is None or made.value == value
    if setting == "model":
        return
    after = check(dataclasses.replace(before, **{setting: made.value}))
    assert after.verdict == "fits" or (verdict == "too small" and after.verdict == "tight")


def test_what_fits_needs_no_change() -> None:
    made = check(plan())
    assert (made.verdict, made.setting, made.value) == ("fits", "", None)
    assert made.full_requests >= 8


def test_swap_space_is_pinned_on_the_host_and_not_on_the_card() -> None:
    without, with_swap = check(plan()), check(plan(swap_bytes=4 * GIB))
    assert with_swap.host_pinned_bytes == 4 * GIB
    assert with_swap.total_bytes == without.total_bytes


def test_the_command_answers_in_its_exit_code_without_loading_anything() -> None:
    run = CliRunner().invoke
    fits = run(cli.app, ["memcheck", "qwen3.8-flash", "--card", "h200", "--weight-format", "fp8", "--json"])
    found = json.loads(fits.stdout)
    assert fits.exit_code == 0 and found["verdict"] == "fits" and found["device"] == "cuda"
    small = run(cli.app, ["memcheck", "qwen3.8-flash", "--card", "rtx4090"])
    assert small.exit_code == 1 and "change first: --weight-format int4" in small.stdout
    small = run(cli.app, ["memcheck", "qwen3.8-flash", "--card", "rtx4090", "--memory-gb", "96"])
    assert small.exit_code == 0
    cpu = json.loads(run(cli.app, ["memcheck", SMALL, "--card", "cpu", "--json"]).stdout)
    assert cpu["device"] == "cpu" and cpu["context_bytes"] == 0
    for arguments, message in ((["--card", "rtx9090"], "try 'rtx4090-48g'"), (["--memory-gb", "-1"], "try 48")):
        wrong = run(cli.app, ["memcheck", "qwen3.8-flash", *arguments])
        assert wrong.exit_code == 2 and message in wrong.output

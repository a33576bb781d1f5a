"""Whole models on the Triton operators: the same logits and tokens as on the references, step by step and captured.

In the interpreter a replay runs the captured work again; on a GPU `tests/gpu` does the same with real graphs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from strata_lab import kernel_lab
from strata_lab.build import Builder
from strata_lab.config import Optimizations, engine_config
from strata_lab.device_sampling import GpuSampling
from strata_lab.engine import LLMEngine
from strata_lab.kernels import bind
from strata_lab.lessons.kernels import row_operator
from strata_lab.models.base import CausalLM
from strata_lab.run_ahead import RunAhead
from strata_lab.runner import EagerStep, Runner, StepInputs
from strata_lab.sampler import Sampler
from strata_lab.sampling_params import SamplingParams
from tests.checkpoints import FAMILIES, write_checkpoint
from tests.test_run_ahead import Mark, Replays

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
BLOCK_SIZE = 8
PROMPT, DECODES = 6, 2
EXACT = Optimizations.none().replace({"weight_format": "fp32", "kv_cache_dtype": "fp32"})


def logits(folder: Any, backend: str, device: torch.device, *, fused: bool, weight_format: str) -> torch.Tensor:
    """Logits of a prompt and of a few tokens after it, one request."""
    options = EXACT.replace({"weight_format": weight_format})
    config = engine_config(
        folder, device=device.type, dtype="float32", optimizations=options, max_model_len=64, block_size=BLOCK_SIZE,
        num_kv_blocks=8,
    )  # fmt: skip
    builder = Builder(config, lambda task, fraction: None)
    builder.backend = "reference"  # layout "rows"
    parts = builder.parts(builder.resolve(options))
    model = CausalLM(builder.model_config, parts.weights, bind(backend), builder.rotary, fused=fused)
    step = EagerStep(model, parts.kv, torch.float32)
    ids = torch.randint(3, 250, (PROMPT + DECODES,), generator=torch.Generator().manual_seed(0)).to(device)
    out = []
    with torch.inference_mode():
        for start, stop in [(0, PROMPT), *((n, n + 1) for n in range(PROMPT, PROMPT + DECODES))]:
            positions = torch.arange(start, stop, device=device)
            inputs = StepInputs(
                input_ids=ids[start:stop], positions=positions, slot_mapping=positions + BLOCK_SIZE,
                block_tables=torch.tensor([[1, 2, 3]], dtype=torch.int32, device=device),
                seq_lens=torch.tensor([stop], dtype=torch.int32, device=device),
                prompt_lens=torch.tensor([PROMPT], dtype=torch.int32, device=device),
                cu_seqlens_q=torch.tensor([0, stop - start], dtype=torch.int32, device=device),
                sample_rows=torch.arange(stop - start, device=device), max_q_len=stop - start,
            )  # fmt: skip
            out.append(step(inputs))
    builder.close()
    return torch.cat(out)


@pytest.mark.parametrize(
    ("family", "fused", "weight_format"),
    [
        ("qwen2", False, "fp8"),
        ("qwen3", True, "int4"),
        *(  # minutes in the interpreter
            pytest.param(family, fused, weight_format, marks=pytest.mark.gpu)
            for family in FAMILIES
            for fused in (False, True)
            for weight_format in ("bf16", "fp8", "int8", "int4")
        ),
    ],
)
def test_logits_equal_the_references(
    family: str, fused: bool, weight_format: str, tmp_path: Any, device: torch.device
) -> None:
    folder, _ = write_checkpoint(tmp_path, family)
    expected = logits(folder, "reference", device, fused=False, weight_format=weight_format)
    ours = logits(folder, "triton", device, fused=fused, weight_format=weight_format)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "temperature"),
    [("llama", 1.0), *(pytest.param("qwen3_moe", t, marks=pytest.mark.gpu) for t in (0.0, 1.0))],
)
def test_tokens_of_captured_steps_with_device_sampling_equal_the_references(
    family: str, temperature: float, tmp_path: Any, device: torch.device
) -> None:
    """Two requests through the engine: reference operators and host sampler against Triton all the way."""
    folder, _ = write_checkpoint(tmp_path, family)
    params = [SamplingParams(temperature=temperature, max_tokens=n, seed=n, ignore_eos=True) for n in (2, 5)]
    options = {
        "device": device.type, "dtype": "float32", "optimizations": EXACT.replace({"weight_format": "bf16"}),
        "max_model_len": 64, "block_size": BLOCK_SIZE, "num_kv_blocks": 32,
    }  # fmt: skip
    prompts = [[5, 9, 200], [7] * 5]
    tokens = {}
    for backend in ("reference", "triton"):
        with LLMEngine(folder, **options) as engine:
            engine._builder.backend = backend
            parts = engine._builder.parts(engine.optimizations)
            if backend == "triton":
                model = CausalLM(engine.model_config, parts.weights, bind("triton"), engine._builder.rotary, fused=True)
                eager = EagerStep(model, parts.kv, torch.float32)
                sampling = GpuSampling(BLOCK_SIZE, engine.model_config.vocab_size, device)
                plain = Runner(eager, Sampler(), BLOCK_SIZE, device)
                clock: Any = Mark if device.type == "cpu" else partial(torch.cuda.Event, enable_timing=True)
                runner = RunAhead(plain, eager, recorder := Replays(), sampling, clock=clock)
                runner.max_model_len = 64
                object.__setattr__(parts, "runner", runner)
            engine._loop.parts = parts
            engine._loop.scheduler.configure(lookahead=parts.runner.lookahead)
            tokens[backend] = [o.token_ids for o in engine.generate(prompts, params)]
    assert tokens["triton"] == tokens["reference"]
    assert recorder.count >= 2


@triton.jit
def _norm(x, weight, y, eps, D, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    at, inside = tl.program_id(0) * D + columns, columns < D
    row = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=inside, other=0.0) / tl.sqrt(tl.sum(row * row) / D + eps)
    tl.store(y + at, row * scale, mask=inside)


@triton.jit
def _norm_of_all_but_one(x, weight, y, eps, D, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    at, inside = tl.program_id(0) * D + columns, columns < D - 1
    row = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=inside, other=0.0) / tl.sqrt(tl.sum(row * row) / D + eps)
    tl.store(y + at, row * scale, mask=columns < D)


def test_a_triton_kernel_of_a_reader_runs_among_triton_operators_and_a_wrong_one_does_not(
    tmp_path: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_lab, "SLOWEST_MS", 1e6)  # the interpreter's time says nothing
    if device.type == "cpu":
        monkeypatch.setattr(Builder, "_backend", lambda builder: "triton")
        monkeypatch.setattr(Builder, "_ceilings", lambda builder: None)
    folder, _ = write_checkpoint(tmp_path, "llama")
    greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    options = {"dtype": "float32", "max_model_len": 64, "block_size": BLOCK_SIZE, "num_kv_blocks": 8}
    with LLMEngine(folder, device=device.type, optimizations=EXACT, **options) as engine:
        before = engine.generate([[5, 9, 200, 31]], greedy)[0].token_ids
        norm = row_operator(_norm)
        report = engine.swap_op("rms_norm", norm)
        assert report.status == "applied" and report.calls_per_step > 0, report
        assert engine.generate([[5, 9, 200, 31]], greedy)[0].token_ids == before
        refused = engine.swap_op("rms_norm", row_operator(_norm_of_all_but_one))
        assert refused.status == "refused" and refused.difference is not None
        assert engine.swapped_ops == {"rms_norm": norm}, "what kept its contract goes on"
        assert engine.swap_op("rms_norm", None).status == "applied"

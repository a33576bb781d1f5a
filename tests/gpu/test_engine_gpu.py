"""The engine on a real GPU: logits equal transformers', captured steps give the same tokens, memory comes back."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from strata_lab.bench.evidence import randomize
from strata_lab.config import WEIGHT_FORMATS
from strata_lab.engine import LLMEngine
from strata_lab.graph_prompts import CapturedPrompts
from strata_lab.graph_runner import CudaRecorder
from strata_lab.runner import Slice, StepInputs
from strata_lab.sampling_params import SamplingParams
from tests.checkpoints import FAMILIES, write_checkpoint
from tests.gpu.card_memory import allocated, reserved
from tests.test_models import our_logits

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randint(3, 300, (9 + i,), generator=generator).tolist() for i in range(count)]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_on_the_gpu(family, tmp_path) -> None:
    folder, reference = write_checkpoint(tmp_path, family)
    tokens = torch.randint(0, reference.config.vocab_size, (37,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(tokens[None]).logits[0]
    ours = our_logits(folder, tokens.tolist(), slices=(20, 1, 9, *[1] * 7), device="cuda", cuda_graph=False)
    assert (ours.cpu() - expected).abs().max().item() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_and_fused_steps_give_the_same_greedy_tokens(family, tmp_path) -> None:
    folder, _ = write_checkpoint(tmp_path, family)
    with LLMEngine(
        folder, device="cuda", dtype="float32", max_model_len=128, cuda_graph=False, fused_kernels=False
    ) as engine:
        alone = [engine.generate([p], GREEDY)[0].token_ids for p in prompts(5)]
        for changes in ({"cuda_graph": True}, {"fused_kernels": True}, {"continuous_batching": False}):
            report = engine.apply(**changes)
            assert report.ok, str(report)
            assert [o.token_ids for o in engine.generate(prompts(5), GREEDY)] == alone, changes
        assert engine.fallbacks == ()


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
def test_every_format_runs_captured(weight_format, kv_format) -> None:
    options = {"weight_format": weight_format, "kv_cache_dtype": kv_format, "max_model_len": 256}
    with LLMEngine("qwen3.8-flash@0.05", device="cuda", **options) as engine:
        outputs = engine.generate(prompts(3), GREEDY)
    assert [o.error for o in outputs] == [None] * 3
    assert [len(o.token_ids) for o in outputs] == [64] * 3


@pytest.mark.parametrize("model", ["qwen3.8-flash@0.05", "qwen3.8-flash-dense@0.05"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_captured_prompts_have_the_states_of_uncaptured_ones(model, batch_invariant) -> None:
    """Alone and beside decodes, over a cache that other steps wrote; bit for bit where the mode promises that."""
    options = {"weight_format": "fp8", "kv_cache_dtype": "bf16", "batch_invariant": batch_invariant}
    shapes = [[(100, 40)], [(17, 0), (1, 63)], [(1, 20), (1, 31), (60, 4)], [(500, 12)]]  # tokens, their beginning
    with LLMEngine(model, device="cuda", max_model_len=1024, num_kv_blocks=256, **options) as engine:
        parts, size = engine._loop.parts, engine.config.block_size
        randomize(parts.kv, list(range(parts.kv.num_blocks)), engine.device)  # something to attend to
        eager, prompts = parts.runner.eager, CapturedPrompts(parts.runner.eager, CudaRecorder(), pytest.fail)
        with torch.inference_mode():
            for shape in shapes * 3:
                slices = [
                    Slice(torch.randint(3, 300, (n,)).tolist(), start, [40 * i + j for j in range(40)], 1)
                    for i, (n, start) in enumerate(shape)
                ]
                inputs = StepInputs.gather(slices, size, engine.device)
                expected = eager.hidden(inputs)[-1].float()
                found = prompts.hidden(inputs)[-1].float()
                if batch_invariant:
                    assert torch.equal(found, expected), shape
                else:
                    close = torch.nn.functional.cosine_similarity(found, expected, dim=1)
                    assert close.min() > 0.99, (shape, close.min())
        assert [shape.replay is not None for shape in prompts._shapes.values()] == [True] * len(shapes)


def test_close_gives_the_memory_back() -> None:
    with LLMEngine("qwen3.8-flash-dense@0.05", device="cuda", max_model_len=256, num_kv_blocks=256) as engine:
        engine.generate(prompts(2), GREEDY)  # libraries load once and stay
    held, tensors = reserved(), allocated()
    for _ in range(3):
        with LLMEngine("qwen3.8-flash-dense@0.05", device="cuda", max_model_len=256, num_kv_blocks=4096) as engine:
            engine.generate(prompts(2), GREEDY)
            assert torch.cuda.memory_allocated() > tensors + engine.stats().kv_bytes // 2
    assert allocated() - tensors < 4 * 2**20, "counters of kernels, which stay with their streams"
    assert reserved() - held < 32 * 2**20, "and the segments that these are in"


def test_a_capture_keeps_what_its_work_refers_to() -> None:
    """Nobody else holds the tensor; its memory would be given to the next one of its size."""
    out = torch.zeros(1 << 16, device="cuda")

    def recorded() -> Any:
        held = torch.full_like(out, 3.0)
        return CudaRecorder().record(lambda: out.copy_(held), out.device)[0]

    replay = recorded()
    gc.collect()
    others = [torch.full_like(out, 5.0) for _ in range(16)]
    out.zero_()
    replay()
    torch.cuda.synchronize()
    assert bool((out == 3.0).all()) and len(others) == 16

"""The engine on Triton kernels, captured and running ahead, against plain torch operators step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from strata_lab.build import Builder
from strata_lab.engine import LLMEngine
from strata_lab.run_ahead import RunAhead
from strata_lab.sampling_params import SamplingParams
from tests.checkpoints import FAMILIES, write_checkpoint
from tests.gpu.card_memory import reserved
from tests.gpu.test_engine_gpu import prompts

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
SETTINGS = {"device": "cuda", "dtype": "float32", "max_model_len": 128, "num_kv_blocks": 128}


def tokens(folder: Any, params: Any, **options: Any) -> list[list[int]]:
    """Of one request alone, then of five together."""
    with LLMEngine(folder, **SETTINGS, **options) as engine:
        outputs = engine.generate(prompts(1), params)
        outputs += engine.generate(prompts(5), params)
    assert [o.error for o in outputs] == [None] * 6
    return [list(o.token_ids) for o in outputs]


COMING = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 60, 17, 1, 44, 30, 9, 52)]


def one_by_one(engine: LLMEngine) -> list[Any]:
    """Tokens of eight requests of different lengths, each alone."""
    return [engine.generate([p], q)[0].token_ids for p, q in zip(prompts(8), COMING, strict=True)]


def check_coming_and_going(engine: LLMEngine, expected: list[Any], steps_between: int) -> None:
    """The same requests, one by one into a running batch, the second aborted on the way, get the same tokens."""
    names = []
    for index, (prompt, one) in enumerate(zip(prompts(8), COMING, strict=True)):
        names.append(engine.add_request(prompt, one))
        for _ in range(steps_between):
            engine.step()
        if index == 4:
            engine.abort(names[1])
    while engine.step():
        pass
    got = [engine.output(name).token_ids for name in names]
    assert engine.stats().kv_blocks_used == 0
    assert got[1] == expected[1][: len(got[1])]
    assert [t for i, t in enumerate(got) if i != 1] == [t for i, t in enumerate(expected) if i != 1]


@pytest.mark.parametrize("weight_format", ["bf16", "fp8", "int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_64_greedy_tokens_equal_the_reference_path(
    family: str, weight_format: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = write_checkpoint(tmp_path, family)
    options = {"weight_format": weight_format, "kv_cache_dtype": "fp32"}
    ours = tokens(folder, GREEDY, **options)
    plain = tokens(folder, GREEDY, **options, fused_kernels=False, cuda_graph=False)
    monkeypatch.setattr(Builder, "_gpu_backend", lambda self: "reference")
    reference = tokens(folder, GREEDY, **options, fused_kernels=False, cuda_graph=False)
    assert plain == reference
    assert ours == reference


def test_drawn_tokens_equal_the_hosts_sampler(tmp_path: Any) -> None:
    folder, _ = write_checkpoint(tmp_path, "qwen3")
    params = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, max_tokens=40, seed=3, ignore_eos=True)
    options = {"weight_format": "bf16", "kv_cache_dtype": "fp32"}
    assert tokens(folder, params, **options) == tokens(folder, params, **options, cuda_graph=False)


def test_steps_are_computed_ahead_and_toggling_back_captures_nothing_again(tmp_path: Any) -> None:
    folder, _ = write_checkpoint(tmp_path, "llama")
    with LLMEngine(folder, **SETTINGS) as engine:
        runner = engine._loop.parts.runner
        assert isinstance(runner, RunAhead)
        first = engine.generate(prompts(1), GREEDY)[0].token_ids
        captures = dict(runner._graphs)
        assert engine.apply(cuda_graph=False).ok
        assert engine.generate(prompts(1), GREEDY)[0].token_ids == first
        assert engine.apply(cuda_graph=True).ok
        assert engine._loop.parts.runner is runner
        assert engine.generate(prompts(1), GREEDY)[0].token_ids == first
        assert runner._graphs == captures
        assert engine.stats().capture_bytes > 0


def test_requests_that_come_go_and_are_aborted_while_steps_are_queued_get_their_tokens(tmp_path: Any) -> None:
    folder, _ = write_checkpoint(tmp_path, "qwen3_moe")
    options = {"weight_format": "bf16", "kv_cache_dtype": "fp32"}
    with LLMEngine(folder, **SETTINGS, **options, cuda_graph=False) as engine:
        expected = one_by_one(engine)
    with LLMEngine(folder, **SETTINGS, **options, max_num_seqs=3) as engine:
        check_coming_and_going(engine, expected, steps_between=4)


def test_what_the_engine_takes_stays_within_its_share_of_the_cards_memory() -> None:
    before = reserved()
    free, total = torch.cuda.mem_get_info()
    share = (total - free) / total + 0.2
    with LLMEngine(
        "qwen3.8-flash-dense@0.3", device="cuda", weight_format="fp8", kv_cache_dtype="bf16",
        gpu_memory_utilization=share, max_num_seqs=1024,  # all of whose texts would fill more than that
    ) as engine:  # fmt: skip
        engine.generate(prompts(5), GREEDY)
        torch.cuda.empty_cache()
        taken = (torch.cuda.memory_reserved() - before) / total
        assert taken <= 0.2
        assert taken >= 0.16, "and the pool uses what there is"


@pytest.mark.parametrize("model", ["qwen3.8-flash-dense", "qwen3.8-flash@0.3"])
def test_nobody_reads_what_lay_in_an_fp8_cache_before(model: str) -> None:
    """At the reference geometry; a byte of it may mean NaN."""
    options = {"weight_format": "fp8", "kv_cache_dtype": "bf16", "prefix_cache": False, "num_kv_blocks": 600}
    with LLMEngine(model, device="cuda", max_num_seqs=8, **options) as engine:
        engine.generate([[7 + i] * 128 for i in range(8)], GREEDY)
        assert engine.apply(kv_cache_dtype="fp8").ok
        for many in (8, 4, 1):
            for _ in range(2):  # the second time prompts are captured
                kv = engine.parts.kv
                for part in (kv._k, kv._v):
                    part.view(torch.uint8).fill_(0x7F)
                outputs = engine.generate([[7 + i] * (120 + i) for i in range(many)], GREEDY)
                assert [o.error for o in outputs] == [None] * many


def test_experts_are_counted_inside_of_graphs_and_padding_is_not(tmp_path: Any) -> None:
    folder, _ = write_checkpoint(tmp_path, "qwen3_moe")
    # A cache that rounds would let the last bit, in which sums of eager and captured attention differ, choose experts.
    options = {"weight_format": "fp8", "kv_cache_dtype": "fp32", "prefix_cache": False}
    with LLMEngine(folder, **SETTINGS, **options) as engine:

        def counted(many: int) -> list[int]:
            torch.cuda.synchronize()  # steps that were queued beyond the end of requests count as well
            before = engine.experts()
            engine.generate(prompts(many), GREEDY)
            torch.cuda.synchronize()
            after = engine.experts()
            assert before is not None and after is not None
            return [now - then for now, then in zip(after.counts, before.counts, strict=True)]

        plain = engine.generate(prompts(9), GREEDY)
        engine.watch_experts()
        assert isinstance(engine._loop.parts.runner, RunAhead)
        assert [o.token_ids for o in engine.generate(prompts(9), GREEDY)] == [o.token_ids for o in plain]
        captured = counted(9)  # in a capture of 10
        assert engine.apply(cuda_graph=False).ok
        eager = counted(9)
        config = engine.model_config
        assert sum(eager) % (config.num_layers * config.num_experts_per_tok) == 0
        ahead = sum(captured) - sum(eager)  # tokens that were computed ahead of their requests' end
        assert 0 <= ahead <= 9 * 4 * config.num_layers * config.num_experts_per_tok
        assert all(now >= then for now, then in zip(captured, eager, strict=True))

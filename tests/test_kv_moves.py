"""Laws of moving blocks: bytes arrive whatever the format, all is read before it is overwritten, memory counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import strata_lab.scheduler as scheduler_module
from strata_lab.batch import ScheduledBatch
from strata_lab.engine import LLMEngine
from strata_lab.kv_cache import KV_DTYPES, HostBlocks, KVCache, block_bytes
from strata_lab.model_config import ModelConfig
from strata_lab.models.presets import PRESETS
from strata_lab.preemption import SwapToHost
from strata_lab.sampling_params import SamplingParams
from strata_lab.settings import ConfigError
from tests.checkpoints import write_checkpoint

CPU = torch.device("cpu")


def geometry() -> ModelConfig:
    return next(iter(PRESETS.values()))


def filled(kv_format: str, num_blocks: int = 9, bounds: bool = True) -> tuple[KVCache, torch.Tensor]:
    """A pool of random bits, and what each block holds."""
    config = ModelConfig(**{**vars(geometry()), "num_layers": 3, "num_kv_heads": 2, "head_dim": 8})
    kv = KVCache(config, num_blocks, 8, kv_format, CPU)
    kv = kv.with_bounds() if bounds else kv
    content = torch.randint(-(2**62), 2**62, (num_blocks, *kv.block_words))
    kv.write_blocks(range(num_blocks), content)
    return kv, content


def batch(**moves: Any) -> ScheduledBatch:
    return ScheduledBatch([], [], 0, 0, **moves)


@pytest.mark.parametrize("bounds", [False, True])
@pytest.mark.parametrize("kv_format", KV_DTYPES)
def test_a_block_is_its_slots_in_every_layer_and_its_bounds(kv_format: str, bounds: bool) -> None:
    kv, content = filled(kv_format, bounds=bounds)
    for layer in range(3):
        mine = kv.layer(layer)
        parts = [mine.k, mine.v, *([] if mine.bounds is None else [mine.bounds])]
        assert len(parts) == 2 + bounds
        for block in range(9):
            words = torch.cat([part[block].flatten().view(torch.int64) for part in parts])
            assert torch.equal(words, content[block, layer])
    assert torch.equal(kv.read_blocks([4, 1]), content[[4, 1]])


def test_room_for_bounds_is_made_once_and_leaves_keys_and_values_where_they_are() -> None:
    kv, _ = filled("bf16", bounds=False)
    more = kv.with_bounds()
    assert more.with_bounds() is more and not kv.has_bounds
    assert more.layer(1).k.data_ptr() == kv.layer(1).k.data_ptr()
    assert more.layer(1).bounds.shape == (9, 2, 2, 8)
    assert (more.nbytes - kv.nbytes) * 8 == kv.nbytes, "a key and a value more for a block of 8"
    config = ModelConfig(**{**vars(geometry()), "num_layers": 3, "num_kv_heads": 2, "head_dim": 8})
    assert [block_bytes(config, 8, "bf16", on) * 9 for on in (False, True)] == [kv.nbytes, more.nbytes]


@pytest.mark.parametrize("kv_format", KV_DTYPES)
def test_copies_read_everything_before_they_write_and_touch_nothing_else(kv_format: str) -> None:
    kv, content = filled(kv_format)
    HostBlocks(kv, 0).perform(batch(copies=[(0, 1), (1, 2), (0, 5)]))
    assert torch.equal(kv.read_blocks(range(9)), content[[0, 0, 1, 3, 4, 0, 6, 7, 8]])


@pytest.mark.parametrize("kv_format", KV_DTYPES)
def test_blocks_come_back_from_host_memory_bit_for_bit_in_other_places(kv_format: str) -> None:
    kv, content = filled(kv_format)
    host = HostBlocks(kv, 6)
    assert host.nbytes == kv.nbytes * 6 // 9
    host.perform(batch(swap_out=[(2, 0), (7, 1), (3, 4), (8, 3)]))
    kv.write_blocks(range(9), torch.zeros_like(content))
    host.perform(batch(swap_in=[(4, 0), (1, 8), (0, 3)]))
    empty = torch.zeros_like(content[0])
    expected = torch.stack([content[3], empty, empty, content[2], empty, empty, empty, empty, content[7]])
    assert torch.equal(kv.read_blocks(range(9)), expected)


def test_one_batch_copies_first_then_saves_then_restores() -> None:
    kv, content = filled("fp32")
    host = HostBlocks(kv, 2)
    host.perform(batch(swap_out=[(0, 0)]))
    host.perform(batch(copies=[(1, 2)], swap_out=[(2, 1)], swap_in=[(0, 2)]))
    assert torch.equal(kv.read_blocks([1, 2]), content[[1, 0]])
    host.perform(batch(swap_in=[(1, 3)]))
    assert torch.equal(kv.read_blocks([3]), content[[1]])


# -- the books of host memory -----------------------------------------------------------------------------------------


def test_what_does_not_fit_is_the_end_of_the_text() -> None:
    host = SwapToHost(5)
    assert host.save("a", [10, 11], 7, 4) == 7
    assert host.save("b", [20, 21, 22, 23, 24], 18, 4) == 12
    assert host.save("c", [30], 3, 4) == 0
    assert (host.take_moves()[0], host.num_used) == ([(10, 0), (11, 1), (20, 2), (21, 3), (22, 4)], 5)
    assert (host.drop("a"), host.saved("b"), host.num_used) == (7, 12, 3)
    host.check()


def test_a_host_block_is_free_again_only_after_the_step_that_reads_it() -> None:
    host = SwapToHost(1)
    host.save("a", [5], 4, 4)
    host.take_moves()
    host.load("a", [7], 0)
    assert host.save("b", [6], 4, 4) == 0
    assert host.take_moves() == ([], [(0, 7)])
    assert host.save("b", [6], 4, 4) == 4


def test_who_comes_back_and_is_gone_again_in_one_step_keeps_its_copy() -> None:
    host = SwapToHost(3)
    host.save("a", [5, 6, 7], 10, 4)
    host.take_moves()
    host.load("a", [0, 1, 2], 1)
    assert host.save("a", [0, 1, 2], 10, 4) == 10
    assert not host.has_moves and host.take_moves() == ([], [])
    host.load("a", [3, 4, 5], 1)
    assert host.take_moves() == ([], [(1, 4), (2, 5)])
    host.check()


# -- the engine -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_checkpoint(tmp_path_factory.mktemp("moves"), "llama")[0]


def test_swap_space_is_bounded_counted_and_given_back(folder: Any) -> None:
    options = {"device": "cpu", "num_kv_blocks": 12, "max_model_len": 100}
    with LLMEngine(folder, preemption="swap", **options) as engine:
        stats = engine.stats()
        assert (stats.swap_blocks_total, stats.swap_bytes) == (12, stats.kv_bytes), "as much as the pool"
        assert engine.apply(preemption="recompute").results["preemption"].status == "applied"
        assert engine.stats().swap_bytes == 0
    with LLMEngine(folder, preemption="swap", swap_space=4 * 16384 / 2**30, **options) as engine:
        assert engine.stats().swap_bytes <= 4 * 16384
        assert engine.stats().swap_blocks_total == 4 * 16384 // (stats.kv_bytes // 12)
    with LLMEngine(folder, preemption="swap", swap_space=0, **options) as engine:
        assert "computed again" in next(f.reason for f in engine.fallbacks if f.feature == "preemption")
    with pytest.raises(ConfigError, match=r"swap_space=1000000.0 GiB is more than the .* GiB of main memory .*; try"):
        LLMEngine(folder, preemption="swap", swap_space=1e6, **options)
    with pytest.raises(ConfigError, match=r"swap_space=-1 must be a number of GiB, at least 0; try 4"):
        LLMEngine(folder, swap_space=-1)


def test_a_copy_that_fails_ends_its_requests_and_the_engine_goes_on(
    folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    prompts = [[5 + i, 6, 7, 8] for i in range(4)]
    monkeypatch.setattr(scheduler_module, "GROWTH_BLOCKS", 0)
    with LLMEngine(folder, device="cpu", num_kv_blocks=8, preemption="swap", max_model_len=100) as engine:
        expected = engine.generate([[9, 8, 7]], params)[0].token_ids

        def broken(*_: Any) -> None:
            raise MemoryError("no memory for the copy")

        with monkeypatch.context() as patch:
            patch.setattr(KVCache, "read_blocks", broken)
            outputs = engine.generate(prompts, params)
        assert "no memory for the copy" in str([o.error for o in outputs])
        assert (engine.stats().kv_blocks_used, engine.stats().swap_blocks_used) == (0, 0)
        assert engine.generate([[9, 8, 7]], params)[0].token_ids == expected

"""Attention sinks and a window: a wide one changes nothing, a small one is its mask, and what fell out is free."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strata_lab.block_manager import BlockManager
from strata_lab.kernels import bind
from strata_lab.kernels.paged_attention import paged_attention_ref, paged_inputs
from strata_lab.kv_retention import HOLE, KeepAll, SinksAndWindow
from strata_lab.prefix_cache import PrefixCache
from strata_lab.sampling_params import SamplingParams
from strata_lab.settings import ConfigError
from tests.checkpoints import write_checkpoint
from tests.long_texts import GREEDY, engine, evicted_thrice, prompts, tokens

SMALL: dict[str, Any] = {"kv_sinks": 3, "kv_window": 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama on disk."""
    return write_checkpoint(tmp_path_factory.mktemp("window"), "llama")[0]


# -- the mask ---------------------------------------------------------------------------------------------------------


def masked(inputs: dict[str, Any], sinks: int, window: int) -> Tensor:
    """Float64 attention of the first request's queries, one key at a time: the definition."""
    q, table, size = inputs["q"].double(), inputs["block_tables"][0].tolist(), inputs["k_cache"].shape[1]
    count = int(inputs["cu_seqlens_q"][1])
    group = q.shape[1] // inputs["k_cache"].shape[2]
    out = torch.zeros(count, *q.shape[1:], dtype=torch.float64)
    for i in range(count):
        position = int(inputs["seq_lens"][0]) - count + i
        seen = [j for j in range(position + 1) if j < sinks or position - j < window]
        k, v = (
            torch.stack([inputs[cache][table[j // size], j % size] for j in seen]).double()
            for cache in ("k_cache", "v_cache")
        )
        for head in range(q.shape[1]):
            weights = torch.softmax(k[:, head // group] @ q[i, head] * inputs["scale"], dim=0)
            out[i, head] = weights @ v[:, head // group]
    return out


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 200), count=st.integers(1, 40), sinks=st.sampled_from([0, 1, 4, 8, 70]),
    window=st.integers(1, 100), block_size=st.sampled_from([8, 16]), threads=st.sampled_from([1, 2]),
)  # fmt: skip
def test_any_window_is_its_mask_and_what_lies_outside_never_leaks(
    length: int, count: int, sinks: int, window: int, block_size: int, threads: int
) -> None:
    """Slots outside are NaN and blocks outside are -1; C++, reference and by-row agree with float64."""
    count = min(count, length)
    inputs = paged_inputs(
        [(count, length), (1, 33)], (4, 2, 16), block_size=block_size, kept=(sinks, window), seed=length
    )
    expected = masked(inputs, sinks, window)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for attend in (
            bind("cpu").paged_attention,
            paged_attention_ref,
            bind("reference", invariant=True).paged_attention,
        ):
            torch.testing.assert_close(attend(**inputs)[:count].double(), expected, rtol=1e-5, atol=2e-6)
    finally:
        torch.set_num_threads(before)


@settings(max_examples=30, deadline=None)
@given(length=st.integers(1, 200), count=st.integers(1, 70), sinks=st.integers(0, 80))
def test_a_window_over_everything_gives_the_bits_of_none(length: int, count: int, sinks: int) -> None:
    inputs = paged_inputs([(min(count, length), length), (1, 90)], (4, 2, 16), seed=count)
    attend = bind("cpu").paged_attention
    assert torch.equal(attend(**inputs, sinks=sinks, window=max(length, 90)), attend(**inputs))


@settings(max_examples=30, deadline=None)
@given(length=st.integers(2, 160), sinks=st.integers(0, 9), window=st.integers(1, 80), cut=st.integers(1, 159))
def test_a_query_gets_the_same_bits_in_every_slice(length: int, sinks: int, window: int, cut: int) -> None:
    """So chunked prefill, decode and recompute agree with a window too."""
    cut = min(cut, length - 1)
    inputs = paged_inputs([(length, length)], (4, 2, 16), seed=length) | {"sinks": sinks, "window": window}
    attend, whole = bind("cpu").paged_attention, bind("cpu").paged_attention(**inputs)
    rest = inputs | {"q": inputs["q"][cut:], "cu_seqlens_q": torch.tensor([0, length - cut], dtype=torch.int32)}
    assert torch.equal(attend(**rest), whole[cut:])


# -- the books --------------------------------------------------------------------------------------------------------


@given(
    sinks=st.integers(0, 20),
    window=st.integers(1, 40),
    size=st.sampled_from([1, 3, 8]),
    slices=st.lists(st.integers(1, 9), min_size=1),
)
@settings(deadline=None)
def test_blocks_that_fell_out_are_free_and_those_in_sight_are_held(
    sinks: int, window: int, size: int, slices: list[int]
) -> None:
    kept = SinksAndWindow(sinks, window)
    blocks, computed = BlockManager(400, size, PrefixCache(size), kept), 0
    text = list(range(sum(slices)))
    for count in slices:
        blocks.grow("a", computed + count)
        blocks.check()
        assert blocks.num_held("a") <= kept.most_blocks(size, count)
        computed += count
        blocks.commit("a", text, computed)
        blocks.check()
        table = blocks.table("a")
        for position in range(computed):
            if position < sinks or computed - position < window:  # seen by the token at `computed`
                assert table[position // size] != HOLE
        hidden = [i for i in range(len(table)) if i * size >= sinks and (i + 1) * size - 1 <= computed - window]
        assert [i for i, block in enumerate(table) if block == HOLE] == hidden
        assert blocks.num_used == blocks.num_held("a") == len(table) - len(hidden)
    blocks.free("a")
    blocks.check()
    assert blocks.num_free == 400


def test_full_attention_keeps_every_block() -> None:
    assert list(KeepAll().gone(10**6, 8)) == []
    assert KeepAll().most_blocks(8, 1) > 10**9


def test_a_long_text_runs_in_a_pool_that_full_attention_cannot_use(folder) -> None:
    """12 blocks of 8 tokens; the text is 120. Every step's held blocks are counted."""
    options = {"num_kv_blocks": 12, "max_num_batched_tokens": 16, "max_num_seqs": 2}
    with pytest.raises(ConfigError, match=r"max_model_len=120 needs 15 KV blocks .* the pool has 12 .*or a kv_window"):
        engine(folder, max_model_len=120, **options)
    wanted = tokens(folder, prompts(), max_model_len=120, **SMALL)
    with engine(folder, max_model_len=120, prefix_cache=False, **options, **SMALL) as e:
        names = [e.add_request(p, GREEDY) for p in prompts()]
        most = 0
        while e.step() is not None:
            blocks = e._loop.scheduler.blocks
            blocks.check()
            most = max(most, *(blocks.num_held(r.request_id) for r in e._loop.scheduler.running), 0)
        assert [e.output(n).token_ids for n in names] == wanted
        assert 0 < most <= SinksAndWindow(3, 20).most_blocks(8, 16)
        assert e.stats().kv_blocks_used == 0


# -- the engine -------------------------------------------------------------------------------------------------------


def test_a_window_over_everything_gives_the_tokens_of_none(folder) -> None:
    assert tokens(folder, prompts(), kv_window=128) == tokens(folder, prompts())


@pytest.mark.parametrize(
    "options",
    [
        {"cuda_graph": False}, {"fused_kernels": False, "cuda_graph": False}, {"max_num_batched_tokens": 5},
        {"pd_split": True}, {"prefix_cache": False}, {"num_kv_blocks": 9, "max_num_batched_tokens": 8},
    ],
    ids=str,
)  # fmt: skip
def test_how_the_text_is_computed_does_not_matter(folder, options: dict[str, Any]) -> None:
    """Captured or not, chunked, beside others, in a small pool: the tokens are those of each prompt alone."""
    with engine(folder, cuda_graph=False, prefix_cache=False, **SMALL) as e:
        alone = [e.generate([p], GREEDY)[0].token_ids for p in prompts()]
    assert alone != tokens(folder, prompts()), "the window is seen in the tokens"
    with engine(folder, **SMALL | options) as e:
        assert [o.token_ids for o in e.generate(prompts(), GREEDY)] == alone


@pytest.mark.parametrize("options", [{}, {"preemption": "swap"}, {"preemption": "swap", "prefix_cache": True}], ids=str)
def test_a_preempted_request_goes_on_under_its_window(folder, options: dict[str, Any]) -> None:
    wanted = tokens(folder, prompts(), **SMALL)
    with engine(folder, **{"prefix_cache": False, "max_num_batched_tokens": 24} | SMALL | options) as e:
        found = evicted_thrice(e, prompts())
        assert e.stats().num_preemptions > 4
        assert bool(e.stats().num_swapped_in) == ("preemption" in options)
        assert e.stats().swap_blocks_used == 0
        assert found == wanted


def test_texts_of_one_prompt_keep_their_windows_apart(folder) -> None:
    def texts(n: int, **options: Any) -> list[tuple[int, ...]]:
        params = SamplingParams(temperature=1.0, seed=3, n=n, max_tokens=30, ignore_eos=True)
        with engine(folder, **SMALL | options) as e:
            found = [o.token_ids for o in e.generate([prompts()[3]], params)[0].outputs]
            e._loop.scheduler.blocks.check()
            assert e.stats().kv_blocks_used == 0
        return found

    assert texts(3) == texts(3, prefix_cache=False, max_num_seqs=1)
    assert texts(3)[:1] == texts(1)


def test_a_prefix_is_shared_under_the_same_window_only(folder) -> None:
    texts = prompts(2, shared=48)
    wanted = {name: tokens(folder, texts, prefix_cache=False, **o) for name, o in (("all", {}), ("some", SMALL))}
    with engine(folder) as e:

        def run(text: list[int]) -> tuple[tuple[int, ...], int]:
            out = e.generate([text], GREEDY)[0]
            return out.token_ids, out.num_cached_tokens

        assert run(texts[0]) == (wanted["all"][0], 0)
        assert e.apply(**SMALL).ok
        assert run(texts[0]) == (wanted["some"][0], 0), "what full attention computed is not found"
        assert run(texts[1]) == (wanted["some"][1], 48)
        assert e.apply(kv_window=0).ok
        assert run(texts[1]) == (wanted["all"][1], 48), "the names of full attention are still there"


def test_a_window_is_set_while_requests_run(folder) -> None:
    """They are computed again under it: the rest of their text is that of an engine that always had it."""
    with engine(folder) as e:
        name = e.add_request(prompts()[3], GREEDY)
        for _ in range(12):
            e.step()
        report = e.apply(**SMALL)
        assert report.results["kv_window"].status == "applied"
        said = list(e.output(name).token_ids)
        while e.step() is not None:
            e._loop.scheduler.blocks.check()
        rest = e.output(name).token_ids[len(said) :]
    more = SamplingParams(temperature=0, max_tokens=len(rest), ignore_eos=True)
    with engine(folder, **SMALL) as e:
        assert e.generate([prompts()[3] + said], more)[0].token_ids == rest


def test_the_window_is_not_taken_away_from_a_request_that_needs_it(folder) -> None:
    with engine(folder, num_kv_blocks=12, max_num_batched_tokens=16, max_model_len=120, **SMALL) as e:
        e.add_request(prompts()[3], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        e.step()
        before = e.optimizations
        assert e.apply(kv_window=0).results["kv_window"].status == "refused"
        assert e.optimizations == before
        while e.step() is not None:
            pass
        assert e.stats().kv_blocks_used == 0

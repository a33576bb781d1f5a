"""Pages that promise most: enough of them change nothing, few are their definition, and no way of computing matters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strata_lab.block_manager import BlockManager
from strata_lab.kernels import bind
from strata_lab.kernels.sparse_attention import sparse_inputs
from strata_lab.kv_retention import HOLE, TopPages
from strata_lab.prefix_cache import PrefixCache
from strata_lab.sampling_params import SamplingParams
from strata_lab.settings import ConfigError
from tests.checkpoints import write_checkpoint
from tests.long_texts import GREEDY, engine, evicted_thrice, prompts, tokens

FEW: dict[str, Any] = {"sparse_pages": 4}  # of 8 tokens: 32 of up to 91


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama on disk."""
    return write_checkpoint(tmp_path_factory.mktemp("pages"), "llama")[0]


@pytest.fixture(scope="module")
def dense(folder) -> list[tuple[int, ...]]:
    """What each prompt gets when its answer attends everything."""
    return tokens(folder, prompts())


@pytest.fixture(scope="module")
def alone(folder, dense) -> list[tuple[int, ...]]:
    """What each prompt gets by itself, op by op, with few pages."""
    with engine(folder, cuda_graph=False, prefix_cache=False, **FEW) as e:
        found = [e.generate([p], GREEDY)[0].token_ids for p in prompts()]
    assert found != dense, "the choice is seen in the tokens"
    return found


# -- the definition ---------------------------------------------------------------------------------------------------


def defined(inputs: dict[str, Any], b: int) -> Tensor:
    """Float64 attention of a request's queries, one head and key at a time, over the blocks its definition names."""
    size, pages, prompt = inputs["k_cache"].shape[1], inputs["pages"], int(inputs["prompt_lens"][b])
    first, last = inputs["cu_seqlens_q"][b : b + 2].tolist()
    q, table = inputs["q"][first:last].double(), inputs["block_tables"][b].tolist()
    length, heads = int(inputs["seq_lens"][b]), inputs["k_cache"].shape[2]
    keys, values = (
        torch.cat([inputs[cache][block].double() for block in table])[:length] for cache in ("k_cache", "v_cache")
    )
    out = torch.zeros_like(q)
    for i in range(last - first):
        position = length - (last - first) + i
        blocks = list(range(position // size + 1))
        for head in range(heads):
            group = q[i].unflatten(0, (heads, -1))[head]
            chosen = blocks
            if position >= prompt and len(blocks) > pages:
                promise = dict.fromkeys(blocks[1:-2], 0.0)
                for n in promise:
                    page = keys[n * size : (n + 1) * size, head]
                    low, high = page.amin(0), page.amax(0)
                    promise[n] = float(sum(torch.maximum(x * low, x * high).sum() for x in group))
                best = sorted(promise, key=lambda n: -promise[n])[: pages - 3]
                chosen = [0, *best, *blocks[-2:]]
            seen = [j for n in sorted(chosen) for j in range(n * size, min((n + 1) * size, position + 1))]
            weights = torch.softmax(group @ keys[seen, head].T * inputs["scale"], dim=-1)
            out[i].unflatten(0, (heads, -1))[head] = weights @ values[seen, head]
    return out


@settings(max_examples=20, deadline=None)
@given(
    length=st.integers(1, 150), count=st.integers(1, 8), prompt=st.integers(0, 150), pages=st.integers(4, 9),
    block_size=st.sampled_from([8, 16]), threads=st.sampled_from([1, 2]),
)  # fmt: skip
def test_any_number_of_pages_is_its_definition_and_what_is_not_chosen_is_never_read(
    length: int, count: int, prompt: int, pages: int, block_size: int, threads: int
) -> None:
    """Bounds of the last blocks are NaN, as are slots outside; C++ and the reference agree with float64."""
    lengths = [(min(count, length), length), (1, 77)]
    inputs = sparse_inputs(lengths, [prompt, 5], (4, 2, 16), pages, block_size=block_size, seed=length)
    expected = torch.cat([defined(inputs, 0), defined(inputs, 1)])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for backend in ("cpu", "reference"):
            out = bind(backend).sparse_attention(**inputs)
            torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-6)
    finally:
        torch.set_num_threads(before)


@settings(max_examples=30, deadline=None)
@given(length=st.integers(1, 200), count=st.integers(1, 70), prompt=st.integers(0, 200))
def test_pages_for_everything_give_the_bits_of_dense_attention(length: int, count: int, prompt: int) -> None:
    lengths = [(min(count, length), length), (1, 90)]
    inputs = sparse_inputs(lengths, [prompt, 3], (4, 2, 16), max(6, -(-length // 16)))
    dense = {n: x for n, x in inputs.items() if n not in ("bounds_cache", "prompt_lens", "pages")}
    ops = bind("cpu")
    assert torch.equal(ops.sparse_attention(**inputs), ops.paged_attention(**dense))


@settings(max_examples=20, deadline=None)
@given(writes=st.lists(st.tuples(st.integers(1, 11), st.integers(0, 4)), min_size=1, max_size=12))
def test_bounds_are_those_of_the_keys_that_are_there_whatever_was_written_before(
    writes: list[tuple[int, int]],
) -> None:
    """A text grows in slices, some of whose last tokens turn out wrong and are written again."""
    ops, size, generator = bind("cpu"), 8, torch.Generator().manual_seed(len(writes))
    keys, bounds, length = torch.full((20, size, 2, 8), torch.nan), torch.full((20, 2, 2, 8), torch.nan), 0
    for count, wrong in writes:
        slots = torch.arange(length, min(length + count, 20 * size))
        keys[slots // size, slots % size] = torch.randn(len(slots), 2, 8, generator=generator)
        ops.page_bounds(keys, bounds, slots)
        length = max(int(slots[-1]) + 1 if len(slots) else length, 1) - min(wrong, max(0, len(slots) - 1))
    for block in range(-(-length // size)):
        there = keys[block][: length - block * size] if (block + 1) * size > length else keys[block]
        if (block + 1) * size <= length:  # the last one is not chosen by its bounds
            assert torch.equal(bounds[block], torch.stack((there.amin(0), there.amax(0)), dim=1))


# -- the books --------------------------------------------------------------------------------------------------------


def test_of_an_answer_others_find_only_what_was_computed_as_in_a_prompt() -> None:
    text, blocks = list(range(100)), BlockManager(64, 8, PrefixCache(8), TopPages(4, 8))
    for name, prompt, found in (("long", 50, 48), ("short", 9, 32)):
        blocks.drop_prefixes()
        blocks.grow(name, 90)
        blocks.commit(name, text, 90, prompt)
        assert len(blocks.find("another", text)) * 8 == found, "the prompt, or what is seen whole"
        assert HOLE not in blocks.table(name)
        blocks.free(name)
        blocks.check()


# -- the engine -------------------------------------------------------------------------------------------------------


def test_pages_for_every_block_give_the_tokens_of_none(folder, dense) -> None:
    assert tokens(folder, prompts(), sparse_pages=16) == dense


@pytest.mark.parametrize(
    "options",
    [
        {}, {"fused_kernels": False}, {"pd_split": True}, {"speculative": "ngram"},
        {"num_kv_blocks": 24, "max_num_batched_tokens": 8},
    ],
    ids=str,
)  # fmt: skip
def test_how_the_text_is_computed_does_not_matter(folder, alone, options: dict[str, Any]) -> None:
    """Captured, chunked, verified, beside others, in a small pool: the tokens are those of each prompt alone."""
    with engine(folder, **FEW | options) as e:
        assert [o.token_ids for o in e.generate(prompts(), GREEDY)] == alone
        again = e.generate(prompts(), GREEDY)
        assert [o.token_ids for o in again] == alone
        assert all(o.num_cached_tokens > 0 for o in again) or "num_kv_blocks" in options


@pytest.mark.parametrize("options", [{}, {"preemption": "swap", "prefix_cache": True}], ids=str)
def test_a_preempted_request_goes_on_with_its_pages(folder, alone, options: dict[str, Any]) -> None:
    with engine(folder, **{"prefix_cache": False, "max_num_batched_tokens": 24} | FEW | options) as e:
        found = evicted_thrice(e, prompts())
        assert e.stats().num_preemptions > 4
        assert bool(e.stats().num_swapped_in) == ("preemption" in options)
        assert found == alone


def test_texts_of_one_prompt_choose_their_own_pages(folder) -> None:
    def texts(n: int, **options: Any) -> list[tuple[int, ...]]:
        params = SamplingParams(temperature=1.0, seed=3, n=n, max_tokens=30, ignore_eos=True)
        with engine(folder, **FEW | options) as e:
            found = [o.token_ids for o in e.generate([prompts()[3]], params)[0].outputs]
            assert e.stats().kv_blocks_used == 0
        return found

    assert texts(3) == texts(3, prefix_cache=False, max_num_seqs=1)


def test_a_pool_of_another_size_takes_the_bounds_along(folder, alone, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(folder, max_num_batched_tokens=24, gpu_memory_utilization=0.5, **FEW) as e:
        names = [e.add_request(p, GREEDY) for p in prompts()]
        for _ in range(20):
            e.step()
        before, kv = e.stats().num_preemptions, e._loop.parts.kv
        monkeypatch.setattr(e._builder, "num_kv_blocks", lambda resolved, current: kv.num_blocks // 2)
        assert e.apply(gpu_memory_utilization=0.4).ok
        assert e._loop.parts.kv is not kv and e._loop.parts.kv.has_bounds
        while e.step() is not None:
            pass
        assert e.stats().num_preemptions == before, "nothing was computed again"
        assert [e.output(n).token_ids for n in names] == alone


def test_pages_are_set_and_taken_back_while_requests_run(folder, alone, dense) -> None:
    """Who is in flight goes on to its end; whoever comes later gets what the setting in force gives."""
    with engine(folder) as e:
        assert e._loop.parts.kv.has_bounds is False
        name = e.add_request(prompts()[3], GREEDY)
        for _ in range(12):
            e.step()
        assert e.apply(**FEW).results["sparse_pages"].status == "applied"
        said = len(e.output(name).token_ids)
        while e.step() is not None:
            e._loop.scheduler.blocks.check()
        output = e.output(name)
        assert (output.token_ids[:said], len(output.token_ids)) == (dense[3][:said], 40)
        assert [o.token_ids for o in e.generate(prompts(), GREEDY)] == alone
        assert e.apply(sparse_pages=0).ok
        assert [o.token_ids for o in e.generate(prompts(), GREEDY)] == dense
        assert e.apply(**FEW).ok
        found = e.generate(prompts(), GREEDY)
        assert [o.token_ids for o in found] == alone
        assert all(o.num_cached_tokens for o in found), "blocks of then are found, with their bounds"


def test_bytes_of_a_step_are_those_of_its_pages(folder) -> None:
    assert TopPages(4, 8).seen(32, 1) == 32
    assert TopPages(4, 8).seen(100, 1) == 32 + 12
    assert TopPages(4, 8).seen(100, 50) == 100
    with engine(folder, **FEW) as e:
        stats, kv = e.stats(), e._loop.parts.kv
        assert stats.kv_bytes == kv.num_blocks * (8 + 1) * stats.kv_bytes_per_token


def test_what_makes_no_sense_with_pages_is_refused(folder) -> None:
    with pytest.raises(ConfigError, match=r"sparse_pages=3 must be 0 or at least 4"):
        engine(folder, sparse_pages=3)
    with pytest.raises(ConfigError, match=r"kv_window=20 gives most of them back; try kv_window=0, or sparse_pages=0"):
        engine(folder, sparse_pages=8, kv_window=20)
    with engine(folder, sparse_pages=8) as e:
        report = e.apply(kv_window=20)
        assert report.results["kv_window"].status == "refused"
        assert e.apply(sparse_pages=2).results["sparse_pages"].status == "refused"
        assert e.apply(kv_window=20, sparse_pages=0).ok

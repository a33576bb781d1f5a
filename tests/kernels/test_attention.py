"""What the C++ attention and append operators promise beyond closeness: bits, number formats, tracing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from strata_lab.kernels import bind
from strata_lab.kernels.kv_append import FP8_MAX
from strata_lab.kernels.paged_attention import paged_inputs
from strata_lab.kernels.rope import rotation

KV_DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]
LENGTHS = [(1, 200), (40, 40), (1, 3), (5, 129), (1, 64)]


def alone(inputs: dict[str, Any], b: int) -> dict[str, Any]:
    """Request b of a batch by itself, with a table as short as it may be."""
    start, stop = inputs["cu_seqlens_q"][b : b + 2].tolist()
    blocks = -(-int(inputs["seq_lens"][b]) // inputs["k_cache"].shape[1])
    return inputs | {
        "q": inputs["q"][start:stop],
        "block_tables": inputs["block_tables"][b : b + 1, :blocks],
        "seq_lens": inputs["seq_lens"][b : b + 1],
        "cu_seqlens_q": torch.tensor([0, stop - start], dtype=torch.int32),
        "max_q_len": stop - start,
    }


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 80)], ids=str)
def test_a_request_gets_the_same_bits_alone_and_in_a_batch(cpu_ops: Any, heads: Any, kv_dtype: torch.dtype) -> None:
    inputs = paged_inputs(LENGTHS, heads, kv_dtype=kv_dtype, scales=(0.02, 0.03))
    batch = cpu_ops.paged_attention(**inputs)
    rows = [cpu_ops.paged_attention(**alone(inputs, b)) for b in range(len(LENGTHS))]
    assert torch.equal(batch, torch.cat(rows))


@pytest.mark.parametrize("lengths", [[(1, 1000)], LENGTHS], ids=["chunks-as-tasks", "requests-as-tasks"])
def test_the_number_of_threads_changes_no_bit(cpu_ops: Any, lengths: list[tuple[int, int]]) -> None:
    inputs, before = paged_inputs(lengths, (9, 3, 64)), torch.get_num_threads()
    outputs = []
    try:
        for threads in (1, 2, 3, 16):
            torch.set_num_threads(threads)
            outputs.append(cpu_ops.paged_attention(**inputs))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(out, outputs[0]) for out in outputs)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_attention_reads_every_code_as_torch_does(ops: Any, kv_dtype: torch.dtype) -> None:
    """A request of one token returns its value unchanged: softmax over one key is 1."""
    bits = 16 if kv_dtype == torch.bfloat16 else 8
    codes = torch.arange(2**bits, dtype=torch.int32).to(torch.int16 if bits == 16 else torch.uint8).view(kv_dtype)
    v_cache = codes.view(-1, 1, 1, 64)  # one block per 64 codes
    tokens = v_cache.shape[0]
    out = ops.paged_attention(
        torch.zeros(tokens, 1, 64), torch.zeros_like(v_cache), v_cache,
        torch.arange(tokens, dtype=torch.int32)[:, None], torch.ones(tokens, dtype=torch.int32),
        torch.arange(tokens + 1, dtype=torch.int32), max_q_len=1, scale=1.0,
    )  # fmt: skip
    torch.testing.assert_close(out.flatten(), codes.float().flatten(), rtol=0, atol=0, equal_nan=True)


def float32_sample() -> Tensor:
    """[1024, 1, 128]: every sign, exponent and leading seven mantissa bits, with the low bits at and beside ties."""
    high = torch.arange(2**16, dtype=torch.int64)[:, None] << 16
    low = torch.tensor([0, 0x8000])
    return (high + low).to(torch.uint32).view(torch.float32).view(1024, 1, 128)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_append_stores_what_torch_converts_to(ops: Any, kv_dtype: torch.dtype, scale: float) -> None:
    x = float32_sample()
    caches = [torch.zeros(1024, 1, 1, 128).to(kv_dtype) for _ in range(2)]
    ops.kv_append(x, -x, *caches, torch.arange(1024), scale, scale)
    for sign, cache in zip((1, -1), caches, strict=True):
        expected = sign * x / scale
        if kv_dtype == torch.float8_e4m3fn:
            expected = expected.clamp(-FP8_MAX, FP8_MAX)
        expected = expected.to(kv_dtype).float()
        torch.testing.assert_close(cache[:, 0].float(), expected, rtol=0, atol=0, equal_nan=True)


def test_fp8_storage_saturates_and_keeps_nan(ops: Any) -> None:
    row = torch.tensor([447, 448, 449, 464.1, 480, 1e30, torch.inf, -torch.inf, torch.nan, 2**-10, 1.5 * 2**-10, 0.0])
    cache = torch.zeros(1, 8, 1, 12).to(torch.float8_e4m3fn)
    ops.kv_append(row.view(1, 1, 12), row.view(1, 1, 12), cache, cache.clone(), torch.tensor([5]))
    stored = cache[0, 5, 0].float()
    assert stored[8].isnan()
    # 2^-10 is half the smallest subnormal and ties to even: zero
    assert stored[[0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11]].tolist() == [448] * 7 + [-448, 0, 2**-9, 0]


def test_a_nan_in_sight_reaches_only_the_queries_that_see_it(cpu_ops: Any) -> None:
    inputs = paged_inputs([(100, 100)], (2, 1, 64))
    block, offset = int(inputs["block_tables"][0, 70 // 16]), 70 % 16
    inputs["v_cache"][block, offset, 0, 5] = torch.nan
    assert cpu_ops.paged_attention(**inputs).isnan().any(dim=-1).any(dim=-1).tolist() == [False] * 70 + [True] * 30
    inputs["k_cache"][block, offset] = torch.nan
    assert cpu_ops.paged_attention(**inputs)[69:71].isnan().flatten(1).all(dim=1).tolist() == [False, True]


def test_extreme_scores_neither_overflow_nor_lose_their_sum(ops: Any) -> None:
    """Scores far apart over several chunks: the last key wins by e^640 and takes all the weight."""
    inputs = paged_inputs([(1, 150)], (1, 1, 64), poison=0.0)
    inputs["q"][:] = 1.0
    inputs["k_cache"][:] = -5.0
    last = (int(inputs["block_tables"][0, 149 // 16]), 149 % 16)
    inputs["k_cache"][last] = 5.0
    out = ops.paged_attention(**inputs | {"scale": 1.0})
    torch.testing.assert_close(out[0, 0], inputs["v_cache"][last][0], rtol=1e-6, atol=1e-6)


def step(
    ops: Any, qkv: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, tables: Tensor, lens: Tensor
) -> Tensor:
    """The operators of this file in the order of a decode step."""
    tokens = qkv.shape[0]
    cos, sin = rotation(lens - 1, 64)
    x = ops.rms_norm(qkv, torch.ones(qkv.shape[1]), 1e-5)
    q = ops.qkv_rope_append(x, cos, sin, None, None, 0.0, k_cache, v_cache, slots, 3, 1, 1.0, 1.0)
    ops.kv_append(q[:, :1] + 1, q[:, 1:2], k_cache, v_cache, slots - 1, 1.0, 1.0)
    starts = torch.arange(tokens + 1, dtype=torch.int32)
    return ops.paged_attention(q, k_cache, v_cache, tables, lens, starts, max_q_len=1, scale=0.125)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
def test_a_traced_step_writes_the_same_caches_and_gives_the_same_bits(ops: Any, kv_dtype: torch.dtype) -> None:
    def arguments() -> tuple[Tensor, ...]:
        inputs = paged_inputs([(1, 20), (1, 9)], (3, 1, 64), kv_dtype=kv_dtype, seed=3)
        table, lens = inputs["block_tables"], inputs["seq_lens"]
        slots = torch.tensor([int(table[b, (n - 1) // 16]) * 16 + (n - 1) % 16 for b, n in enumerate(lens.tolist())])
        qkv = torch.randn(2, 5 * 64, generator=torch.Generator().manual_seed(0))
        return qkv, inputs["k_cache"], inputs["v_cache"], slots, table, lens

    eager, traced = arguments(), arguments()
    expected = step(ops, *eager)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=False)
    assert torch.equal(compiled(ops, *traced), expected)
    for a, b in zip(eager[1:3], traced[1:3], strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    torch._dynamo.reset()


def test_a_replay_sees_new_lengths_and_leaves_nothing_stale(cpu_ops: Any) -> None:
    strata, inputs = torch.ops.strata, paged_inputs([(1, 20), (1, 9), (2, 30)], (3, 1, 64))
    handle = strata.capture_begin()
    out = cpu_ops.paged_attention(**inputs)
    strata.capture_end()
    inputs["seq_lens"].copy_(torch.tensor([0, 7, 12]))
    inputs["cu_seqlens_q"].copy_(torch.tensor([0, 1, 2, 3]))  # the last row belongs to nobody now
    strata.replay(handle)
    strata.capture_free(handle)
    assert torch.equal(out, cpu_ops.paged_attention(**inputs))
    assert out.flatten(1).any(dim=1).tolist() == [False, True, True, False]


def test_a_replay_refuses_a_slot_outside_the_cache(cpu_ops: Any) -> None:
    strata, cache, rows, slots = torch.ops.strata, torch.zeros(2, 8, 1, 16), torch.ones(1, 1, 16), torch.tensor([3])
    handle = strata.capture_begin()
    cpu_ops.kv_append(rows, rows, cache, cache.clone(), slots)
    strata.capture_end()
    slots.fill_(16)
    with pytest.raises(ValueError, match="slot 16 of token 0 lies outside"):
        strata.replay(handle)
    strata.capture_free(handle)


OPCHECKS = ("test_schema", "test_faketensor")  # the operators have no gradients to check


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16], ids=str)  # torch's checker cannot compare float8
def test_schemas_and_fakes_tell_the_truth(cpu_ops: Any, kv_dtype: torch.dtype) -> None:
    inputs = paged_inputs([(1, 20), (3, 9)], (3, 1, 64), kv_dtype=torch.float32, poison=0.0)
    k_cache, v_cache = inputs["k_cache"].to(kv_dtype), inputs["v_cache"].to(kv_dtype)
    names = ("block_tables", "seq_lens", "cu_seqlens_q", "scale", "k_scale", "v_scale")
    strata, slots = torch.ops.strata, torch.tensor([0, 9, -1, 4])
    kv, qkv, turn = torch.randn(2, 4, 1, 64), torch.randn(4, 5 * 64), rotation(torch.arange(4), 64)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (strata.paged_attention.default, (inputs["q"], k_cache, v_cache, *(inputs[n] for n in names))),
        (strata.kv_append.default, (*kv, k_cache, v_cache, slots, 0.5, 0.5)),
        (strata.qkv_rope_append.default, (qkv, *turn, None, None, 0.0, k_cache, v_cache, slots, 3, 1, 1.0, 1.0)),
        (strata.rms_norm.default, (qkv, torch.ones(320), 1e-5)),
    ]
    for op, arguments in calls:
        torch.library.opcheck(op, arguments, test_utils=OPCHECKS)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("max_q_len", [1, 2])
def test_the_reference_step_can_be_captured_in_a_cuda_graph(max_q_len: int, kv_dtype: torch.dtype) -> None:
    """Nothing in it waits for the host: a replay after the inputs changed equals an eager call."""
    ops = bind("reference")
    inputs = paged_inputs([(1, 40), (1, 9), (1, 0)], (3, 1, 64), kv_dtype=kv_dtype, device="cuda")
    qkv, slots = torch.zeros(3, 5 * 64, device="cuda"), torch.tensor([3, -1, 9], device="cuda")
    cos, sin = rotation(torch.arange(3, device="cuda"), 64)

    def run() -> Tensor:
        caches = inputs["k_cache"], inputs["v_cache"]
        q = ops.qkv_rope_append(qkv, cos, sin, None, None, 0.0, *caches, slots, 3, 1, 1.0, 1.0)
        return ops.paged_attention(**inputs | {"q": q, "max_q_len": max_q_len})

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run()
    qkv.normal_()
    slots.copy_(slots.roll(1))
    graph.replay()
    assert torch.equal(replayed, run())
    assert not replayed.isnan().any()

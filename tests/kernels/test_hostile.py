"""Operators on inputs made to break them: odd sizes, poisoned memory, ragged batches, strides, arguments that lie."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from strata_lab.kernels.paged_attention import paged_inputs
from strata_lab.kernels.rope import rotation

KV_DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]
RAGGED = [(1, 1), (1, 17), (3, 64), (1, 65), (20, 90)]


def dense_attention(inputs: dict[str, Any]) -> Tensor:
    """Attention in float64, one query and one head at a time, reading the cache slot by slot."""
    q, k_cache, v_cache = (inputs[n].double() for n in ("q", "k_cache", "v_cache"))
    out = torch.zeros_like(q)
    group, block_size = q.shape[1] // k_cache.shape[2], k_cache.shape[1]
    starts, seq_lens = inputs["cu_seqlens_q"].tolist(), inputs["seq_lens"].tolist()
    for b, seq_len in enumerate(seq_lens):
        for row in range(starts[b], starts[b + 1]):
            position = seq_len - (starts[b + 1] - row)
            slots = [(int(inputs["block_tables"][b, p // block_size]), p % block_size) for p in range(position + 1)]
            for head in range(q.shape[1]) if slots else ():
                k = torch.stack([k_cache[block, offset, head // group] for block, offset in slots]) * inputs["k_scale"]
                v = torch.stack([v_cache[block, offset, head // group] for block, offset in slots]) * inputs["v_scale"]
                out[row, head] = torch.softmax(k @ q[row, head] * inputs["scale"], dim=0) @ v
    return out


def assert_near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("heads", [(3, 3), (3, 1), (8, 1)], ids=["gqa1", "gqa3", "gqa8"])
def test_attention_equals_a_loop_over_slots(ops: Any, heads: tuple[int, int], head_dim: int, block_size: int) -> None:
    inputs = paged_inputs([(1, 67), (2, 9)], (*heads, head_dim), block_size=block_size)
    assert_near(ops.paged_attention(**inputs), dense_attention(inputs))


@pytest.mark.parametrize("num_requests", [1, 2, 3, 4, 5])
def test_attention_of_a_ragged_batch_equals_a_loop_over_slots(ops: Any, num_requests: int) -> None:
    inputs = paged_inputs(RAGGED[:num_requests], (3, 1, 64), block_size=8)
    assert_near(ops.paged_attention(**inputs), dense_attention(inputs))


@pytest.mark.parametrize("poison", [float("nan"), 1e4, float("inf")])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [RAGGED, [(1, 1), (1, 7), (1, 70)]], ids=["mixed", "decode"])
def test_what_unused_slots_hold_changes_no_bit(
    ops: Any, lengths: list[tuple[int, int]], kv_dtype: torch.dtype, poison: float
) -> None:
    clean, poisoned = (
        ops.paged_attention(**paged_inputs(lengths, (3, 1, 80), block_size=8, kv_dtype=kv_dtype, poison=p))
        for p in (0.0, poison)
    )
    assert not poisoned.isnan().any()
    assert torch.equal(clean, poisoned)


@pytest.mark.parametrize("junk", [-1, 10**6])
def test_table_entries_past_the_last_block_are_not_read(ops: Any, junk: int) -> None:
    inputs = paged_inputs([(1, 9), (4, 40)], (3, 1, 64), block_size=8)
    expected = ops.paged_attention(**inputs)
    inputs["block_tables"] = torch.nn.functional.pad(inputs["block_tables"], (0, 3), value=junk)
    inputs["block_tables"][0, 2:] = junk
    assert torch.equal(ops.paged_attention(**inputs), expected)


@pytest.mark.parametrize("max_q_len", [1, 2])
def test_a_request_without_tokens_gets_zeros_and_disturbs_nobody(ops: Any, max_q_len: int) -> None:
    inputs = paged_inputs([(1, 20), (1, 0), (1, 3)], (2, 2, 64)) | {"max_q_len": max_q_len}
    out = ops.paged_attention(**inputs)
    assert torch.equal(out[1], torch.zeros(2, 64))
    assert_near(out, dense_attention(inputs))


def test_rows_past_the_last_request_get_zeros(ops: Any) -> None:
    inputs = paged_inputs([(2, 20), (3, 3)], (2, 2, 64))
    out = ops.paged_attention(**inputs | {"q": torch.nn.functional.pad(inputs["q"], (0, 0, 0, 0, 0, 4), value=7.0)})
    assert_near(out[:5], dense_attention(inputs))
    assert torch.equal(out[5:], torch.zeros(4, 2, 64))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
def test_a_chunked_prompt_equals_one_prefilled_at_once(ops: Any, backend: str, kv_dtype: torch.dtype) -> None:
    whole = paged_inputs([(130, 130)], (3, 1, 64), kv_dtype=kv_dtype)
    expected = ops.paged_attention(**whole)
    for start, stop in itertools.pairwise([0, 1, 17, 64, 65, 129, 130]):
        part = whole | {
            "q": whole["q"][start:stop],
            "seq_lens": torch.tensor([stop], dtype=torch.int32),
            "cu_seqlens_q": torch.tensor([0, stop - start], dtype=torch.int32),
            "max_q_len": stop - start,
        }
        out = ops.paged_attention(**part)
        assert_near(out, expected[start:stop])
        assert backend != "cpu" or torch.equal(out, expected[start:stop])  # the C++ kernel promises every bit


def test_decode_equals_the_last_row_of_prefill(ops: Any, backend: str) -> None:
    prefill = paged_inputs([(71, 71), (16, 16)], (8, 1, 80), block_size=8)
    last = prefill["cu_seqlens_q"][1:].long() - 1
    decode = prefill | {"q": prefill["q"][last], "cu_seqlens_q": torch.arange(3, dtype=torch.int32), "max_q_len": 1}
    out, expected = ops.paged_attention(**decode), ops.paged_attention(**prefill)[last]
    assert_near(out, expected)
    assert backend != "cpu" or torch.equal(out, expected)


def test_strides_change_no_bit(ops: Any) -> None:
    inputs = paged_inputs([(3, 40), (1, 9)], (3, 3, 64), block_size=8)
    expected = ops.paged_attention(**inputs)
    strided = dict(inputs)
    for name in ("k_cache", "v_cache"):  # heads outside blocks, as another cache layout would have it
        strided[name] = inputs[name].transpose(1, 2).contiguous().transpose(1, 2)
    for last_dim_apart, name in ((False, "q"), (True, "q"), (True, "block_tables"), (True, "seq_lens")):
        x = inputs[name]
        strided[name] = (
            x.repeat_interleave(2, -1)[..., ::2] if last_dim_apart else torch.cat([x, x], 1)[:, : x.shape[1]]
        )
        assert torch.equal(ops.paged_attention(**strided), expected), name


@pytest.mark.parametrize("width", [1, 7, 8, 9, 33, 576])
def test_rms_norm_of_a_strided_row_is_that_of_the_row(ops: Any, width: int) -> None:
    table = torch.randn(5, 3 * width)
    x, weight = table[:, width : 2 * width], torch.randn(2 * width)[::2]
    out = ops.rms_norm(x, weight, 1e-5)
    assert_near(out, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight)
    assert torch.equal(out, torch.cat([ops.rms_norm(row[None].clone(), weight, 1e-5) for row in x]))


def test_no_tokens_give_an_empty_result(ops: Any) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert ops.rms_norm(torch.zeros(0, 64), torch.ones(64), 1e-5).shape == (0, 64)
    assert ops.rope(torch.zeros(0, 3, 64), *rotation(none, 64)).shape == (0, 3, 64)
    assert ops.silu_mul(torch.zeros(0, 64), torch.zeros(0, 64)).shape == (0, 64)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("slots", [[3, -1, 0, -1, 30], [-1, 31], [-1, -1], [0], [-1]], ids=str)
def test_only_named_slots_are_written(ops: Any, slots: list[int], kv_dtype: torch.dtype) -> None:
    new = torch.randn(2, len(slots), 2, 24)
    caches = [torch.full((4, 8, 2, 24), 3.0).to(kv_dtype) for _ in range(2)]
    ops.kv_append(*new, *caches, torch.tensor(slots))
    for rows, cache in zip(new, caches, strict=True):
        expected = torch.full((32, 2, 24), 3.0).to(kv_dtype)
        for row, slot in zip(rows, slots, strict=True):
            if slot >= 0:
                expected[slot] = row.to(kv_dtype)
        assert torch.equal(cache.flatten(0, 1).float(), expected.float())


def test_append_into_a_strided_cache_writes_the_same_slots(ops: Any) -> None:
    k, v = torch.randn(3, 4, 3, 40).transpose(0, 1)[:, 1:].unbind(1)  # [T, Hkv, D] with tokens apart
    slots = torch.tensor([9, 2, -1, 15])
    plain = [torch.zeros(2, 8, 3, 40) for _ in range(2)]
    strided = [torch.zeros(2, 3, 8, 40).transpose(1, 2) for _ in range(2)]
    ops.kv_append(k, v, *plain, slots)
    ops.kv_append(k, v, *strided, slots)
    assert all(torch.equal(a, b) for a, b in zip(plain, strided, strict=True))
    assert torch.equal(plain[0][1, 1], k[0])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("heads", [(9, 3, 64), (2, 2, 20), (8, 1, 128)], ids=str)
def test_the_fused_operator_equals_its_parts(ops: Any, heads: Any, qk_norm: bool, kv_dtype: torch.dtype) -> None:
    num_q, num_kv, dim = heads
    tokens, positions = 3, torch.tensor([5, 0, 300])
    qkv = torch.randn(tokens, 2 * (num_q + 2 * num_kv) * dim)[:, : (num_q + 2 * num_kv) * dim].clone()
    cos, sin = rotation(positions, dim)
    weights = (torch.rand(dim) + 0.5, torch.rand(dim) + 0.5) if qk_norm else (None, None)
    fused, parts = ([torch.zeros(2, 8, num_kv, dim).to(kv_dtype) for _ in range(2)] for _ in range(2))
    slots = torch.tensor([7, 8, -1])
    out = ops.qkv_rope_append(qkv, cos, sin, *weights, 1e-6, *fused, slots, num_q, num_kv, 0.5, 2.0)
    q, k, v = qkv.view(tokens, -1, dim).split([num_q, num_kv, num_kv], dim=1)
    if qk_norm:
        q, k = (ops.rms_norm(x, w, 1e-6) for x, w in zip((q, k), weights, strict=True))
    ops.kv_append(ops.rope(k, cos, sin), v, *parts, slots, 0.5, 2.0)
    assert_near(out, ops.rope(q, cos, sin))
    # a rotation rounded differently in its last bit may land on the neighbouring code
    step = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float8_e4m3fn: 2**-3}[kv_dtype]
    torch.testing.assert_close(fused[0].float(), parts[0].float(), rtol=step, atol=2e-3)
    assert torch.equal(fused[1].float(), parts[1].float())


LIES = {
    "block 9 of request 0": {"block_tables": torch.tensor([[9, 9]], dtype=torch.int32)},
    "seq_len 70, which needs 5 blocks": {"seq_lens": torch.tensor([70], dtype=torch.int32)},
    "cu_seqlens_q must rise to at most 2": {"cu_seqlens_q": torch.tensor([0, 3], dtype=torch.int32)},
    "seq_lens must be int32": {"seq_lens": torch.tensor([20])},
    "q must be float32": {"q": torch.zeros(2, 2, 64, dtype=torch.float64)},
    "with H a multiple of 2": {"q": torch.zeros(2, 3, 64)},
    "must have one dtype": {"v_cache": torch.zeros(4, 16, 2, 64, dtype=torch.bfloat16)},
    "multiple of 8": {
        "q": torch.zeros(2, 2, 12), "k_cache": torch.zeros(4, 16, 2, 12), "v_cache": torch.zeros(4, 16, 2, 12)
    },
    "float32, bfloat16 or float8_e4m3fn": {
        "k_cache": torch.zeros(4, 16, 2, 64).half(), "v_cache": torch.zeros(4, 16, 2, 64).half()
    },
}  # fmt: skip


@pytest.mark.parametrize("message", LIES)
def test_attention_refuses_what_would_read_elsewhere(cpu_ops: Any, message: str) -> None:
    inputs = paged_inputs([(2, 20)], (2, 2, 64))
    with pytest.raises(ValueError, match=message):
        cpu_ops.paged_attention(**inputs | LIES[message])


def test_append_refuses_a_slot_outside_the_cache(cpu_ops: Any) -> None:
    cache, row = torch.zeros(2, 8, 1, 16), torch.ones(1, 1, 16)
    with pytest.raises(ValueError, match="slot 16 of token 0 lies outside the cache's 16 slots"):
        cpu_ops.kv_append(row, row, cache, cache.clone(), torch.tensor([16]))
    assert not cache.any()


def test_page_bounds_refuse_a_slot_outside_the_cache_before_any_thread_writes(cpu_ops: Any) -> None:
    keys, bounds, slots = torch.ones(32, 16, 2, 64), torch.zeros(32, 2, 2, 64), torch.arange(512)
    slots[300] = 512
    with pytest.raises(ValueError, match="slot 512 of token 300 lies outside the cache's 512 slots"):
        cpu_ops.page_bounds(keys, bounds, slots)
    assert not bounds.any()


def test_a_refusal_is_its_sentence_and_takes_no_stack_trace(cpu_ops: Any) -> None:
    """Though torch is asked for one; a trace walks frames that are none of an operator's business."""
    code = (
        "import torch; from strata_lab.kernels import bind, prepare; prepare('cpu'); x = torch.zeros(2, 3)\n"
        "try: torch.ops.strata.take_rows(x, torch.tensor([1, 2]))\n"
        "except IndexError as error: print(error)\n"
        "try: torch.ops.strata.add(x, x.double()[:, :0])\n"
        "except ValueError as error: print(error)\n"
    )
    environment = os.environ | {"TORCH_SHOW_CPP_STACKTRACES": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    told = ["id 2 is not a row of a table of 2 rows", "y must be float32 [2, 3], not Double [2, 0]"]
    assert done.stdout.splitlines() == told

"""Attention in Triton against the references: ragged batches, splits, the fused decode step, poison, padding, bits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from strata_lab.kernels.gpu import launch
from strata_lab.kernels.gpu.attention import paged_attention_triton, qkv_attention_triton
from strata_lab.kernels.gpu.attention_config import DecodeConfig
from strata_lab.kernels.gpu.attention_decode import decode, decode_fused
from strata_lab.kernels.gpu.attention_prefill import PrefillConfig, prefill
from strata_lab.kernels.gpu.kv_write import qkv_rope_append_triton
from strata_lab.kernels.paged_attention import SPEC, paged_attention_ref, paged_inputs
from strata_lab.kernels.qkv_rope_append import qkv_rope_append_ref
from strata_lab.kernels.rope import rotation
from strata_lab.kernels.spec import Case

TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 2e-6}
LARGE: dict[str, Any] = {"rtol": 1e-5, "atol": 5e-6}  # sums of thousands
NARROW: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2}  # the interpreter truncates results to bfloat16
KV_DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def reference(inputs: dict[str, Any]) -> Tensor:
    return paged_attention_ref(**inputs | {"q": inputs["q"].double()})


def decode_arguments(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in inputs.items() if name not in ("cu_seqlens_q", "max_q_len")}


def check(actual: Tensor, expected: Tensor, **tolerance: Any) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), **(tolerance or TOLERANCE))


@pytest.mark.parametrize("case", list(SPEC.cases()), ids=lambda case: case.name)
def test_attention_keeps_its_spec(case: Case, device: torch.device) -> None:
    inputs = case.make(device)
    check(paged_attention_triton(**inputs), reference(inputs))


@pytest.mark.parametrize("splits", [1, 2, 16])
@pytest.mark.parametrize(
    ("heads", "block_size"), [((3, 1, 64), 8), ((2, 2, 80), 16), ((16, 1, 16), 32)], ids=["gqa", "mha-80", "group-16"]
)
def test_decode_does_not_care_how_it_is_split(
    heads: tuple[int, int, int], block_size: int, splits: int, device: torch.device
) -> None:
    inputs = paged_inputs([(1, 1), (1, 0), (1, 97)], heads, block_size=block_size, device=device)
    check(decode(**decode_arguments(inputs), config=DecodeConfig(32, splits)), reference(inputs))


@pytest.mark.parametrize("config", [PrefillConfig(16, 32, 4, 1), PrefillConfig(64, 64, 4, 2)], ids=str)
@pytest.mark.parametrize(("heads", "block_size"), [((6, 2, 32), 8), ((5, 1, 80), 16), ((2, 2, 16), 32)], ids=str)
def test_prefill_of_slices_decodes_and_rows_of_nobody(
    heads: tuple[int, int, int], block_size: int, config: PrefillConfig, device: torch.device
) -> None:
    inputs = paged_inputs([(3, 3), (1, 50), (0, 0), (1, 0), (9, 40)], heads, block_size=block_size, device=device)
    expected = reference(inputs)
    spare = torch.full((20, *heads[::2]), torch.nan, device=device)
    out = prefill(**inputs | {"q": torch.cat((inputs["q"], spare))}, config=config)
    check(out[:-20], expected)
    assert not out[-20:].any()


def test_prefill_of_no_one_is_zero(device: torch.device) -> None:
    inputs = paged_inputs([(2, 20)], (2, 1, 16), device=device)
    inputs["cu_seqlens_q"].zero_()
    assert not paged_attention_triton(**inputs).any()


@pytest.mark.parametrize("max_q_len", [1, 3])
@pytest.mark.parametrize("poison", [float("nan"), 1e4])
def test_what_no_query_may_see_changes_no_bit(poison: float, max_q_len: int, device: torch.device) -> None:
    lengths = [(max_q_len, 33), (max_q_len, 6)]
    clean, dirty = (paged_inputs(lengths, (3, 1, 16), poison=p, device=device) for p in (0.0, poison))
    assert torch.equal(paged_attention_triton(**dirty), paged_attention_triton(**clean))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("max_q_len", [1, 4])
def test_16_bit_activations(max_q_len: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device) -> None:
    lengths = [(max_q_len, 70), (1, 9)]
    inputs = paged_inputs(lengths, (4, 2, 32), kv_dtype=kv_dtype, scales=(0.02, 0.03), device=device)
    inputs["q"] = inputs["q"].to(dtype)
    out = paged_attention_triton(**inputs)
    assert out.dtype == dtype
    check(out, reference(inputs), **NARROW)


def test_extreme_scores_neither_overflow_nor_lose_their_sum(device: torch.device) -> None:
    """The last key wins by e^640 and takes all the weight."""
    inputs = paged_inputs([(1, 150)], (1, 1, 64), poison=0.0, device=device)
    inputs["q"][:], inputs["k_cache"][:] = 1.0, -5.0
    last = (int(inputs["block_tables"][0, 149 // 16]), 149 % 16)
    inputs["k_cache"][last] = 5.0
    out = decode(**decode_arguments(inputs) | {"scale": 1.0}, config=DecodeConfig(32, 3))
    torch.testing.assert_close(out[0, 0], inputs["v_cache"][last][0], rtol=1e-6, atol=1e-6)


def fused_inputs(
    lengths: list[int],
    heads: tuple[int, int, int],
    device: torch.device,
    *,
    norms: bool = True,
    seed: int = 0,
    **more: Any,
) -> dict[str, Any]:
    """Arguments of `qkv_attention_triton` for a decode step; the slot of the new token is poisoned, as all unused."""
    num_q, num_kv, width = heads
    inputs = paged_inputs([(1, n) for n in lengths], heads, device=device, seed=seed, **more)
    block_size, tables = inputs["k_cache"].shape[1], inputs["block_tables"].tolist()
    last = [n - 1 for n in lengths]
    slots = [tables[b][p // block_size] * block_size + p % block_size if p >= 0 else -1 for b, p in enumerate(last)]
    for name in ("k_cache", "v_cache"):
        for slot in (s for s in slots if s >= 0):
            inputs[name][slot // block_size, slot % block_size] = torch.nan
    generator = torch.Generator().manual_seed(seed + 1)
    qkv = torch.randn(len(lengths), (num_q + 2 * num_kv) * width, generator=generator)
    qkv[[n == 0 for n in lengths]] = torch.nan  # padding may hold anything
    weights = [1 + 0.1 * torch.randn(width, generator=generator).to(device) if norms else None for _ in range(2)]
    cos, sin = rotation(torch.tensor([max(p, 0) for p in last], device=device), width)
    kept = {n: x for n, x in inputs.items() if n != "q"}
    return kept | {
        "qkv": qkv.to(device), "cos": cos, "sin": sin, "q_norm_weight": weights[0], "k_norm_weight": weights[1],
        "eps": 1e-6, "slot_mapping": torch.tensor(slots, device=device), "num_q_heads": num_q, "num_kv_heads": num_kv,
    }  # fmt: skip


def composed(inputs: dict[str, Any], append: Any, attend: Any) -> Tensor:
    """The same step, one operator after the other; caches are changed."""
    a = inputs
    q = append(
        a["qkv"], a["cos"], a["sin"], a["q_norm_weight"], a["k_norm_weight"], a["eps"], a["k_cache"], a["v_cache"],
        a["slot_mapping"], a["num_q_heads"], a["num_kv_heads"], a["k_scale"], a["v_scale"],
    )  # fmt: skip
    names = ("k_cache", "v_cache", "block_tables", "seq_lens", "cu_seqlens_q")
    scales = {n: a[n] for n in ("max_q_len", "scale", "k_scale", "v_scale")}
    return attend(q, *(a[n] for n in names), **scales).flatten(1)


def wide(inputs: dict[str, Any]) -> dict[str, Any]:
    floating = ("qkv", "cos", "sin", "q_norm_weight", "k_norm_weight")
    return {n: x.double() if n in floating and x is not None else x for n, x in inputs.items()}


def fused(inputs: dict[str, Any], splits: int) -> Tensor:
    skipped = ("cu_seqlens_q", "max_q_len", "num_kv_heads")
    arguments = {n: x for n, x in inputs.items() if n not in skipped}
    return decode_fused(**arguments, config=DecodeConfig(32, splits))


def together_inputs(
    texts: list[tuple[int, int]], count: int, heads: tuple[int, int, int], device: torch.device, **more: Any
) -> dict[str, Any]:
    """Rows of texts of (tokens in the cache, new ones): row j * B + i is new token j of text i, or padding.

    Slots that are written in the step are poisoned, as all unused, and so are rows that pad.
    """
    inputs = fused_inputs([old + new for old, new in texts], heads, device, **more)
    block_size, tables = inputs["k_cache"].shape[1], inputs["block_tables"]
    of_text, step = torch.arange(len(texts)).repeat(count), torch.arange(count).repeat_interleave(len(texts))
    old, new = torch.tensor(texts)[of_text].unbind(1)
    live, position = step < new, torch.where(step < new, old + step, 0)
    slots = tables.cpu()[of_text, position // block_size].long() * block_size + position % block_size
    for name in ("k_cache", "v_cache"):
        inputs[name].flatten(0, 1)[slots[live].to(device)] = torch.nan
    num_q, num_kv, width = heads
    generator = torch.Generator().manual_seed(count)
    qkv = torch.randn(len(slots), (num_q + 2 * num_kv) * width, generator=generator)
    qkv[~live] = torch.nan
    cos, sin = rotation(position.to(device), width)
    return inputs | {
        "qkv": qkv.to(device), "cos": cos, "sin": sin, "slot_mapping": torch.where(live, slots, -1).to(device),
        "block_tables": tables[of_text.to(device)], "seq_lens": torch.where(live, position + 1, 0).int().to(device),
        "cu_seqlens_q": torch.arange(len(slots) + 1, dtype=torch.int32, device=device),
    }  # fmt: skip


TOGETHER: list[Any] = [
    ([(35, 2)], 2, (9, 3, 64)),
    ([(62, 3), (40, 1), (0, 3)], 3, (8, 2, 80)),  # on both sides of a tile's end; padding; nothing but new tokens
    ([(0, 0), (66, 8)], 8, (4, 1, 32)),
    ([(66, 7), (0, 0), (30, 3)], 8, (8, 1, 32)),  # more heads than a program takes of all tokens
]


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("view", [{}, {"sinks": 3, "window": 33}], ids=["all", "window"])
@pytest.mark.parametrize(("texts", "count", "heads"), TOGETHER)
def test_tokens_that_are_new_together_see_each_other(
    device: torch.device, texts: list[tuple[int, int]], count: int, heads: tuple[int, int, int], view: dict[str, int],
    splits: int,
) -> None:  # fmt: skip
    """As if all had been written first; yet nobody reads a slot of this step."""
    inputs, other = (together_inputs(texts, count, heads, device) for _ in range(2))
    live = inputs["seq_lens"] > 0
    expected = composed(wide(other), qkv_rope_append_ref, partial(paged_attention_ref, **view))[live]
    found = fused(inputs | view | {"together": count}, splits)
    check(found[live], expected)
    check(found[~live], torch.zeros_like(found[~live]))
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(inputs[name], other[name], rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_tokens_that_are_new_together_are_used_as_they_are_stored(device: torch.device, kv_dtype: torch.dtype) -> None:
    arguments: dict[str, Any] = {"kv_dtype": kv_dtype, "scales": (0.02, 0.03), "block_size": 8}
    inputs, other = (together_inputs([(37, 3)], 3, (6, 2, 32), device, **arguments) for _ in range(2))
    for x in (inputs, other):
        x["qkv"] = x["qkv"].bfloat16()
    found = qkv_attention_triton(**inputs, together=3)
    check(found, composed(other, qkv_rope_append_triton, paged_attention_triton), **NARROW)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(inputs[name].view(torch.uint8), other[name].view(torch.uint8))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("heads", "norms"), [((3, 1, 64), False), ((2, 1, 80), True), ((16, 1, 16), True), ((1, 1, 128), True)], ids=str
)
def test_fused_decode_is_the_composition_of_the_references(
    heads: tuple[int, int, int], norms: bool, splits: int, device: torch.device
) -> None:
    """Lengths that begin a tile, a block, a cache; the slot of a padded row is -1 and its numbers are NaN."""
    lengths = [1, 0, 33, 75]
    inputs, other = (fused_inputs(lengths, heads, device, norms=norms) for _ in range(2))
    expected = composed(wide(other), qkv_rope_append_ref, paged_attention_ref)
    expected[1] = 0.0  # the reference multiplies the NaN of the padded row by zeros
    check(fused(inputs, splits), expected)
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(inputs[name], other[name], rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_decode_stores_and_answers_what_the_two_kernels_do(
    dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> None:
    arguments: dict[str, Any] = {"kv_dtype": kv_dtype, "scales": (0.02, 0.03), "block_size": 8}
    inputs, other = (fused_inputs([40, 9], (6, 2, 32), device, **arguments) for _ in range(2))
    for x in (inputs, other):
        x["qkv"] = x["qkv"].to(dtype)
    out = qkv_attention_triton(**inputs)
    assert out.dtype == dtype
    expected = composed(other, qkv_rope_append_triton, paged_attention_triton)
    for name in ("k_cache", "v_cache"):
        if kv_dtype == torch.float32:  # a compiler may fuse products and sums of two kernels unlike
            torch.testing.assert_close(inputs[name], other[name], rtol=2e-6, atol=2e-6, equal_nan=True)
        else:
            assert torch.equal(inputs[name].view(torch.uint8), other[name].view(torch.uint8))
    check(out, expected, **(TOLERANCE if dtype == torch.float32 else NARROW))


def test_without_a_slot_the_cache_is_read_and_not_written(device: torch.device) -> None:
    inputs = fused_inputs([40], (2, 1, 16), device)
    slot = int(inputs["slot_mapping"][0])
    for name in ("k_cache", "v_cache"):
        inputs[name][slot // 16, slot % 16] = 0.5
    inputs["slot_mapping"].fill_(-1)
    before = [inputs[name].clone() for name in ("k_cache", "v_cache")]
    check(fused(inputs, 2), composed(wide(inputs), qkv_rope_append_ref, paged_attention_ref))
    for name, old in zip(("k_cache", "v_cache"), before, strict=True):
        torch.testing.assert_close(inputs[name], old, rtol=0, atol=0, equal_nan=True)


def test_a_prompt_goes_through_both_kernels(device: torch.device) -> None:
    inputs, other = (fused_inputs([6], (3, 1, 32), device) for _ in range(2))
    for x in (inputs, other):
        x["qkv"] = torch.randn(4, 5 * 32, generator=torch.Generator().manual_seed(0)).to(device)
        x["cos"], x["sin"] = rotation(torch.arange(2, 6, device=device), 32)
        x["slot_mapping"] = x["slot_mapping"] + torch.arange(-3, 1, device=device)
        x["cu_seqlens_q"], x["max_q_len"] = torch.tensor([0, 4], dtype=torch.int32, device=device), 4
    expected = composed(wide(other), qkv_rope_append_ref, paged_attention_ref)
    check(qkv_attention_triton(**inputs), expected)


def test_a_second_call_gives_the_same_bits_and_counters_stay_zero(device: torch.device) -> None:
    inputs = fused_inputs([75, 33], (4, 2, 16), device)
    first = fused(inputs, 3)
    assert torch.equal(fused(inputs, 3), first)
    assert not launch.counters(device, 4).any()


@pytest.mark.parametrize("max_q_len", [1, 2])
def test_a_request_does_not_know_its_batch_mates(max_q_len: int, device: torch.device) -> None:
    """Same shapes, other neighbours: the same bits."""
    mates = [paged_inputs([(max_q_len, n), (1, 70)], (4, 2, 16), device=device, seed=n) for n in (5, 90)]
    table = mates[1]["block_tables"]
    for name in ("k_cache", "v_cache"):
        mates[1][name] = torch.cat((mates[1][name], mates[0][name]))  # request 1 of the first batch joins the second
    rows = mates[0]["block_tables"][1] + mates[1]["k_cache"].shape[0] - mates[0]["k_cache"].shape[0]
    mates[1]["block_tables"] = torch.cat(
        (table[:1], torch.nn.functional.pad(rows, (0, table.shape[1] - len(rows)))[None])
    )
    mates[1]["q"][-1] = mates[0]["q"][-1]
    width = max(m["block_tables"].shape[1] for m in mates)
    outs = []
    for m in mates:
        tables = torch.nn.functional.pad(m["block_tables"], (0, width - m["block_tables"].shape[1])).int()
        outs.append(paged_attention_triton(**m | {"block_tables": tables})[-1])
    assert torch.equal(*outs)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [[512], [32768], [4000, 1, 0, 517, 64, 65, 2048, 9]], ids=["512", "32k", "ragged"])
def test_decode_at_real_sizes(lengths: list[int], dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    scales = (0.02, 0.03) if kv_dtype == torch.float8_e4m3fn else (1.0, 1.0)
    inputs, other = (fused_inputs(lengths, (32, 4, 128), device, kv_dtype=kv_dtype, scales=scales) for _ in range(2))
    for x in (inputs, other):
        x["qkv"] = x["qkv"].to(dtype)
    out = [qkv_attention_triton(**inputs) for _ in range(2)]
    assert torch.equal(*out)
    qkv_rope_append_ref(
        *(wide(other)[n] for n in ("qkv", "cos", "sin", "q_norm_weight", "k_norm_weight", "eps")),
        *(
            other[n]
            for n in ("k_cache", "v_cache", "slot_mapping", "num_q_heads", "num_kv_heads", "k_scale", "v_scale")
        ),
    )
    for name in ("k_cache", "v_cache"):
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float8_e4m3fn: 0.3}[kv_dtype]
        torch.testing.assert_close(
            inputs[name].float(), other[name].float(), rtol=tolerance, atol=tolerance * 0.1, equal_nan=True
        )

    def rounded(q: Tensor, *cache: Tensor, **scales: Any) -> Tensor:  # as the kernel rounds q, then exactly
        return paged_attention_ref(q.to(dtype).double(), *cache, **scales)

    unwritten = wide(inputs) | {"slot_mapping": torch.full_like(inputs["slot_mapping"], -1)}
    expected = composed(unwritten, qkv_rope_append_ref, rounded)
    expected[[n == 0 for n in lengths]] = 0.0
    check(out[0], expected, **(LARGE if dtype == torch.float32 else {"rtol": 1e-2, "atol": 4e-3}))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(32, 4, 128), (9, 3, 64)], ids=str)
def test_prefill_at_real_sizes(heads: tuple[int, int, int], dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    scales = (0.02, 0.03) if kv_dtype == torch.float8_e4m3fn else (1.0, 1.0)
    lengths = [(300, 300), (1, 700), (17, 1000), (2, 2)]
    inputs = paged_inputs(lengths, heads, kv_dtype=kv_dtype, scales=scales, device="cuda")
    inputs["q"] = inputs["q"].to(dtype)
    out = paged_attention_triton(**inputs)
    check(out, reference(inputs), **(LARGE if dtype == torch.float32 else {"rtol": 1e-2, "atol": 8e-3}))


@pytest.mark.gpu
@pytest.mark.parametrize("max_q_len", [1, 2])
def test_a_captured_step_follows_new_lengths(max_q_len: int) -> None:
    inputs = fused_inputs([300, 9, 0], (8, 2, 64), torch.device("cuda")) | {"max_q_len": max_q_len}
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        qkv_attention_triton(**inputs)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        out = qkv_attention_triton(**inputs)
    inputs["qkv"].normal_()
    inputs["seq_lens"].copy_(torch.tensor([290, 0, 0]))
    inputs["slot_mapping"].fill_(-1)
    for _ in range(3):
        graph.replay()
    assert torch.equal(out, qkv_attention_triton(**inputs))
    assert out.flatten(1).any(dim=1).tolist() == [True, False, False]
    assert not launch.INTERPRETED

"""Laws of the weight formats: what rounding may cost, what GGUF says bit for bit, how weights are cut and joined."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf import quants as gguf_quants
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strata_lab.config import WEIGHT_FORMATS
from strata_lab.quant import FORMATS, convert, get_format, head_format
from strata_lab.quant.base import LinearWeight, concat_rows
from strata_lab.settings import ConfigError

Peer = Callable[[np.ndarray], tuple[LinearWeight, np.ndarray]]
ALL = sorted(FORMATS)
SHAPES = [(1, 1), (3, 31), (5, 32), (7, 33), (4, 48), (9, 576), (300, 1000)]


def matrix(n: int, k: int, seed: int = 0) -> Tensor:
    """Normal numbers with per-row sizes from 2^-6 to 2^6: [n, k] float32."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-6, 7, (n, 1), generator=generator).float())
    return torch.randn(n, k, generator=generator) * sizes


def same(a: LinearWeight, b: LinearWeight) -> bool:
    """Whether two weights are equal bit for bit."""
    bits = [[t.contiguous().view(torch.uint8) for t in w.tensors] for w in (a, b)]
    kinds = [(w.format, w.shape, w.group_size, w.layout, len(w.tensors)) for w in (a, b)]
    return kinds[0] == kinds[1] and all(torch.equal(x, y) for x, y in zip(*bits, strict=True))


def group_view(w: Tensor) -> Tensor:
    """[n, K] -> [n, groups, 32] float64, a ragged last group filled with its last column."""
    fill = w[:, -1:].expand(-1, -w.shape[1] % 32)
    return torch.cat([w, fill], dim=1).double().unflatten(1, (-1, 32))


def half_error(x: Tensor) -> Tensor:
    """Most that rounding `x` to float16 can move it: 2^-11 of it, or 2^-25 among the subnormals."""
    return (x.abs() * 2**-11).clamp(min=2**-25)


def error_bound(w: Tensor, name: str) -> Tensor:
    """The documented bound on |w - dequantize(quantize(w))|, element by element in float64.

    A code is the nearest one (half a scale), and scale and minimum are moved by their rounding to float16, which the
    largest code multiplies. 1 + 2^-12 covers the float32 arithmetic on the way.
    """
    slack, x = 1 + 2**-12, w.double()
    if name == "fp32":
        return torch.zeros_like(x)
    if name == "bf16":
        return (x.abs() * 2**-8).clamp(min=2**-134)  # half the smallest subnormal
    if name == "fp8":
        scale = x.abs().amax(dim=1, keepdim=True) / 448
        return torch.maximum(x.abs() * 2**-4, (scale * 2**-10).expand_as(x)) * slack + 2**-126
    groups = group_view(w)
    if name == "int8":
        scale = groups.abs().amax(dim=-1, keepdim=True) / 127
        bound = scale / 2 + 127 * half_error(scale)
    else:
        lowest = groups.amin(dim=-1, keepdim=True)
        scale = (groups.amax(dim=-1, keepdim=True) - lowest) / 15
        bound = scale / 2 + 15 * half_error(scale) + half_error(lowest) + groups.abs().amax(-1, keepdim=True) * 2**-22
    return bound.expand_as(groups).flatten(1)[:, : w.shape[1]] * slack


def assert_within_bound(w: Tensor, name: str) -> None:
    """Round trip `w` and compare with `error_bound`."""
    fmt = get_format(name)
    back = fmt.dequantize(fmt.quantize(w))
    assert back.dtype == torch.float32
    assert back.shape == w.shape
    excess = (back.double() - w.double()).abs() - error_bound(w, name)
    assert excess.max().item() <= 0, f"{name} exceeds its bound by {excess.max().item():g}"


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", SHAPES)
def test_round_trip_error_stays_within_the_stated_bound(name: str, shape: tuple[int, int]) -> None:
    assert_within_bound(matrix(*shape), name)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [1e-30, 1e-8, 1e-6, 1e-3, 1.0, 1e3, 6e4])
def test_bound_holds_for_tiny_and_huge_weights(name: str, size: float) -> None:
    w = matrix(4, 70)
    assert_within_bound(w / w.abs().max() * size, name)


@pytest.mark.parametrize("name", ALL)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_bound_holds_for_any_float32_matrix(name: str, data: st.DataObject) -> None:
    n, k = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 70))
    numbers = st.floats(-6e4, 6e4, width=32)
    values = data.draw(st.lists(numbers, min_size=n * k, max_size=n * k))
    assert_within_bound(torch.tensor(values, dtype=torch.float32).reshape(n, k), name)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("k", [32, 50])
def test_zero_groups_come_back_as_zero_among_others(name: str, k: int) -> None:
    w = matrix(6, k)
    w[1] = 0
    w[3, :32] = 0
    fmt = get_format(name)
    weight = fmt.quantize(w)
    back = fmt.dequantize(weight)
    assert torch.equal(back[1], torch.zeros(k))
    assert torch.equal(back[3, :32], torch.zeros(32))
    assert all(t.float().isfinite().all() for t in weight.tensors)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [0.5, -0.375, 96.0])
def test_constant_groups_of_half_precision_numbers_are_exact(name: str, value: float) -> None:
    """int8 stores value/127 as a float16 scale, so it alone is off by the rounding of the scale."""
    fmt = get_format(name)
    back = fmt.dequantize(fmt.quantize(torch.full((2, 40), value)))
    allowed = abs(value) * 2**-11 if name == "int8" else 0.0
    assert (back - value).abs().max().item() <= allowed


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_weights_are_refused_naming_the_first(name: str, bad: float) -> None:
    w = matrix(5, 40)
    w[2, 7] = bad
    w[4, 0] = math.nan
    with pytest.raises(ValueError, match=rf"w\[2, 7\]={bad:g} cannot be stored as {name}.*2 of 200"):
        get_format(name).quantize(w)


@pytest.mark.parametrize(
    ("name", "value"), [("int8", 9e6), ("int4", -7e4), ("bf16", 3.4e38), ("fp8", 1e39), ("fp32", 1e39)]
)
def test_weights_beyond_the_format_are_refused(name: str, value: float) -> None:
    w = matrix(2, 40).double()
    w[1, 3] = value
    with pytest.raises(ValueError, match=r"w\[1, 3\]"):
        get_format(name).quantize(w)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("w", [torch.zeros(3), torch.zeros(0, 4), torch.zeros(2, 3, dtype=torch.int32)])
def test_only_float_matrices_are_quantized(name: str, w: Tensor) -> None:
    with pytest.raises(ValueError, match="non-empty 2-D floating-point"):
        get_format(name).quantize(w)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_float_dtypes_and_strides_give_what_float32_gives(name: str, dtype: torch.dtype) -> None:
    w = matrix(33, 20).to(dtype).t()
    fmt = get_format(name)
    assert same(fmt.quantize(w), fmt.quantize(w.float().contiguous()))


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_quantizing_the_dequantized_changes_no_bit(name: str, shape: tuple[int, int]) -> None:
    fmt = get_format(name)
    once = fmt.quantize(matrix(*shape))
    assert same(fmt.quantize(fmt.dequantize(once)), once)


def test_fp8_requantized_keeps_codes_and_moves_scales_by_at_most_one_step() -> None:
    """448 * scale is rounded to float32 before it is divided by 448 again, so the scale may move by one ulp."""
    fmt = get_format("fp8")
    once = fmt.quantize(matrix(500, 40))
    again = fmt.quantize(fmt.dequantize(once))
    assert torch.equal(again.data.view(torch.uint8), once.data.view(torch.uint8))
    assert once.scales is not None
    assert again.scales is not None
    assert (again.scales.view(torch.int32) - once.scales.view(torch.int32)).abs().max().item() <= 1


def gguf_int8(w: np.ndarray) -> tuple[LinearWeight, np.ndarray]:
    """The gguf package's Q8_0 of `w`, taken apart, and its own dequantization."""
    raw = gguf_quants.quantize(w, GGMLQuantizationType.Q8_0)
    blocks = raw.reshape(w.shape[0], -1, 34)  # float16 scale, 32 codes
    scales = torch.from_numpy(blocks[..., :2].copy().view(np.float16)[..., 0])
    data = torch.from_numpy(blocks[..., 2:].copy().view(np.int8)).flatten(1)
    back = gguf_quants.dequantize(raw, GGMLQuantizationType.Q8_0)
    return LinearWeight("int8", w.shape, data, scales, group_size=32), back


def gguf_int4(w: np.ndarray) -> tuple[LinearWeight, np.ndarray]:
    """The gguf package's Q4_1 of `w`, taken apart, and its own dequantization."""
    raw = gguf_quants.quantize(w, GGMLQuantizationType.Q4_1)
    blocks = raw.reshape(w.shape[0], -1, 20)  # float16 scale, float16 minimum, 16 bytes of codes
    halves = torch.from_numpy(blocks[..., :4].copy().view(np.float16))
    data = torch.from_numpy(blocks[..., 4:].copy()).flatten(1)
    back = gguf_quants.dequantize(raw, GGMLQuantizationType.Q4_1)
    return LinearWeight("int4", w.shape, data, halves[..., 0], halves[..., 1], group_size=32), back


@pytest.mark.parametrize(("name", "peer"), [("int8", gguf_int8), ("int4", gguf_int4)])
@pytest.mark.parametrize("size", [1e-3, 0.05, 1.0, 100.0])
def test_int8_and_int4_equal_ggufs_own_q8_0_and_q4_1_bit_for_bit(name: str, peer: Peer, size: float) -> None:
    w = matrix(64, 576) * size
    w[0], w[1, :32], w[2] = 0, 1.25, w[2].half().float()  # zeros, a constant group, many ties
    w[3] = torch.arange(576) / 2  # halves in the codes' own units: the rounding direction shows
    expected, expected_back = peer(w.numpy())
    weight = get_format(name).quantize(w)
    assert same(weight, expected)
    assert np.array_equal(get_format(name).dequantize(weight).numpy().view(np.uint32), expected_back.view(np.uint32))


@pytest.mark.parametrize(("name", "peer"), [("int8", gguf_int8), ("int4", gguf_int4)])
def test_groups_whose_scale_vanishes_mean_what_ggufs_do_with_codes_of_zero(name: str, peer: Peer) -> None:
    w = torch.linspace(-1e-8, 1e-8, 64).reshape(2, 32)
    weight = get_format(name).quantize(w)
    assert not weight.data.any()
    assert np.array_equal(get_format(name).dequantize(weight).numpy(), peer(w.numpy())[1])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("k", [32, 45])
def test_rows_and_concat_rows_are_inverse_and_commute_with_dequantize(name: str, k: int) -> None:
    fmt = get_format(name)
    whole = fmt.quantize(matrix(12, k))
    parts = [whole.rows(0, 5), whole.rows(5, 6), whole.rows(6, 12)]
    assert [p.shape for p in parts] == [(5, k), (1, k), (6, k)]
    assert torch.equal(fmt.dequantize(parts[2]), fmt.dequantize(whole)[6:])
    assert parts[0].data.data_ptr() == whole.data.data_ptr()
    assert same(concat_rows(parts), whole)


@pytest.mark.parametrize("name", ALL)
def test_rows_are_quantized_independently_of_their_neighbours(name: str) -> None:
    """Enough rows for several chunks: the last one alone gives the same bits."""
    w = matrix(300, 1000)
    fmt = get_format(name)
    assert same(fmt.quantize(w).rows(299, 300), fmt.quantize(w[299:]))


BITS_PER_WEIGHT = {"fp32": 32.0, "bf16": 16.0, "fp8": 8.0, "int8": 8 + 16 / 32, "int4": 4 + 2 * 16 / 32}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(64, 576), (8, 1536), (16, 1000)])
def test_nbytes_are_what_the_bits_per_weight_say(name: str, shape: tuple[int, int]) -> None:
    expected = shape[0] * shape[1] * BITS_PER_WEIGHT[name] / 8
    assert get_format(name).quantize(matrix(*shape)).nbytes == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("name", ALL)
def test_stored_shapes_follow_the_weight_contract(name: str) -> None:
    weight = get_format(name).quantize(matrix(6, 45))
    columns, groups = {"int4": (32, 2), "int8": (45, 2), "fp8": (45, 1)}.get(name, (45, 0))
    assert weight.data.shape == (6, columns)
    assert weight.shape == (6, 45)
    assert (weight.scales is None) == (groups == 0)
    assert weight.scales is None or weight.scales.shape == (6, groups)
    assert (weight.mins is None) == (name != "int4")
    assert weight.group_size == (32 if name in ("int8", "int4") else 0)


def test_int4_nibble_order_is_ggufs() -> None:
    weight = get_format("int4").quantize(torch.arange(32.0).div(2).floor().unsqueeze(0))
    low, high = weight.data & 0x0F, weight.data >> 4
    assert low[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]  # columns 0..15
    assert high[0].tolist() == [8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15]  # columns 16..31


@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize("source", ALL)
def test_convert_equals_quantizing_what_the_source_means(source: str, target: str) -> None:
    weight = get_format(source).quantize(matrix(6, 45))
    converted = convert(weight, target)
    if source == target:
        assert converted is weight
    else:
        assert same(converted, get_format(target).quantize(get_format(source).dequantize(weight)))


def test_registry_has_the_formats_of_the_config_and_refuses_others() -> None:
    assert set(FORMATS) == set(WEIGHT_FORMATS)
    assert all(get_format(name).name == name for name in FORMATS)
    rule = "weight_format='int3' must be one of bf16, fp32, fp8, int8, int4; try 'bf16'"
    with pytest.raises(ConfigError, match=rule):
        get_format("int3")
    with pytest.raises(ConfigError, match="int3"):
        convert(get_format("fp32").quantize(matrix(2, 2)), "int3")


def test_head_takes_eight_bits_beside_four_bit_layers() -> None:
    assert {name: head_format(name) for name in ALL} == {
        "fp32": "fp32", "bf16": "bf16", "fp8": "fp8", "int8": "int8", "int4": "int8",
    }  # fmt: skip


def test_consecutive_rows_of_one_weight_are_joined_without_a_copy_and_others_with_one() -> None:
    whole = get_format("int4").quantize(torch.randn(24, 64))
    parts = [whole.rows(0, 8), whole.rows(8, 12), whole.rows(12, 20)]
    joined = concat_rows(parts)
    assert joined.shape == (20, 64)
    for ours, theirs in zip(joined.tensors, whole.tensors, strict=True):
        assert ours.data_ptr() == theirs.data_ptr()
        assert torch.equal(ours, theirs[:20])
    swapped = concat_rows([parts[1], parts[0]])
    assert torch.equal(swapped.data, torch.cat([whole.data[8:12], whole.data[:8]]))
    apart = concat_rows([whole.rows(0, 8), replace(whole.rows(8, 12), data=whole.data[8:12].clone())])
    assert torch.equal(apart.data, whole.data[:12])

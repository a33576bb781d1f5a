"""Laws of the formats' variants: error bounds, exact round trips, refused numbers, ragged groups, exact conversions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf import quants as gguf_quants
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strata_lab.quant import convert, get_format, get_grid_format, granularities, variant_of
from strata_lab.quant.base import LinearWeight, concat_rows
from strata_lab.quant.grid import Grid
from strata_lab.quant.groups import grouped
from strata_lab.settings import ConfigError

VARIANTS = [(name, v) for name in ("fp8", "int8", "int4") for v in granularities(name)]
SYMMETRIC = ["group32", "group64", "group128"]
SHAPES = [(1, 1), (3, 31), (5, 64), (7, 129), (4, 200), (9, 576), (300, 700)]


def matrix(n: int, k: int, seed: int = 0) -> Tensor:
    """Normal numbers with per-row sizes from 2^-6 to 2^6: [n, k] float32."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-6, 7, (n, 1), generator=generator).float())
    return torch.randn(n, k, generator=generator) * sizes


def bits(weight: LinearWeight) -> list[Tensor]:
    return [t.contiguous().view(torch.uint8) for t in weight.tensors]


def same(a: LinearWeight, b: LinearWeight) -> bool:
    kinds = [(w.format, w.shape, w.group_size, w.layout, w.mins is None) for w in (a, b)]
    return kinds[0] == kinds[1] and all(torch.equal(x, y) for x, y in zip(bits(a), bits(b), strict=True))


def sharing(w: Tensor, granularity: str) -> Tensor:
    """Elements that share a scale with each element of w, along a new last dimension: [n, k, m] float64.

    Written as loops over elements' groups: slow, and independent of the formats.
    """
    n, k = w.shape
    if granularity == "tensor":
        return w.double().flatten().expand(n, k, n * k)
    columns = {"channel": k, "block128": 128}.get(granularity) or int(granularity.removeprefix("group").split("-")[0])
    rows = 128 if granularity == "block128" else 1
    out = torch.empty(n, k, rows * columns, dtype=torch.float64)
    for r in range(0, n, rows):
        for c in range(0, k, columns):
            block = w[r : r + rows, c : c + columns].double().flatten()
            filled = torch.cat([block, block[-1:].expand(rows * columns - block.numel())])
            out[r : r + rows, c : c + columns] = filled
    return out


def error_bound(w: Tensor, name: str, granularity: str) -> Tensor:
    """The documented bound on |w - dequantize(quantize(w))| in float64, element by element."""
    slack, x, peers = 1 + 2**-12, w.double(), sharing(w, granularity)
    amax = peers.abs().amax(-1)
    if name == "fp8":
        return torch.maximum(x.abs() * 2**-4, amax / 448 * 2**-10) * slack + 2**-126
    if name == "int8":
        scale = amax / 127
        rounding = scale * 2**-24 if granularity == "channel" else (scale * 2**-11).clamp(min=2**-25)
        return (scale / 2 + 127 * rounding) * slack + 2**-126
    if granularity.endswith("asym"):
        low, high = peers.amin(-1), peers.amax(-1)
        scale = (high - low) / 15
        halves = 15 * (scale * 2**-11).clamp(min=2**-25) + (low.abs() * 2**-11).clamp(min=2**-25)
        return (scale / 2 + halves + amax * 2**-22) * slack
    scale = amax / 8
    largest = peers.gather(-1, peers.abs().argmax(-1, keepdim=True)).squeeze(-1)
    reach = torch.where(x * largest.sign() >= 0, scale / 2, (x.abs() - 7 * scale).clamp(min=0).maximum(scale / 2))
    return (reach + 8 * (scale * 2**-11).clamp(min=2**-25)) * slack


@pytest.mark.parametrize("shape", SHAPES[:-1])
@pytest.mark.parametrize(("name", "granularity"), VARIANTS)
def test_round_trip_error_stays_within_the_stated_bound(name: str, granularity: str, shape: tuple[int, int]) -> None:
    w = matrix(*shape)
    fmt = get_format(name, granularity)
    back = fmt.dequantize(fmt.quantize(w))
    assert back.dtype == torch.float32
    excess = (back.double() - w.double()).abs() - error_bound(w, name, granularity)
    assert excess.max().item() <= 0


@pytest.mark.parametrize(("name", "granularity"), VARIANTS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_quantizing_the_dequantized_changes_no_code_and_no_scale(
    name: str, granularity: str, data: st.DataObject
) -> None:
    """Scales in float32 may move by one unit in the last place; asymmetric groups that sit far from zero are excluded
    by the range of the numbers (see int4.py)."""
    n, k = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 140))
    whole = st.integers(-1000, 1000)
    values = data.draw(st.lists(whole, min_size=n * k, max_size=n * k))
    step = data.draw(st.sampled_from([2.0**-20, 0.001, 1.0, 60.0]))
    fmt = get_format(name, granularity)
    once = fmt.quantize(torch.tensor(values, dtype=torch.float32).reshape(n, k) * step)
    again = fmt.quantize(fmt.dequantize(once))
    assert once.scales is not None
    assert again.scales is not None
    assert torch.equal(again.data.view(torch.uint8), once.data.view(torch.uint8))
    if once.scales.dtype == torch.float32:
        assert (again.scales.view(torch.int32) - once.scales.view(torch.int32)).abs().max().item() <= 1
    else:
        assert same(again, once)


@pytest.mark.parametrize(("name", "granularity"), VARIANTS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_finite_float16_matrix_comes_back_finite(name: str, granularity: str, data: st.DataObject) -> None:
    n, k = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 70))
    numbers = st.floats(-65504, 65504, width=16)
    w = torch.tensor(data.draw(st.lists(numbers, min_size=n * k, max_size=n * k))).reshape(n, k)
    fmt = get_format(name, granularity)
    weight = fmt.quantize(w)
    assert all(t.float().isfinite().all() for t in weight.tensors)
    excess = (fmt.dequantize(weight).double() - w.double()).abs() - error_bound(w, name, granularity)
    assert excess.max().item() <= 0


@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
def test_symmetric_groups_of_32_equal_ggufs_q4_0_bit_for_bit(size: float) -> None:
    w = matrix(64, 576) * size
    w[1, :32], w[2] = 1.25, w[2].half().float()
    w[3] = torch.arange(576) / 2
    raw = gguf_quants.quantize(w.numpy(), GGMLQuantizationType.Q4_0)
    blocks = raw.reshape(64, -1, 18)  # float16 scale, 16 bytes of codes
    scales = torch.from_numpy(blocks[..., :2].copy().view(np.float16)[..., 0])
    data = torch.from_numpy(blocks[..., 2:].copy()).flatten(1)
    fmt = get_format("int4", "group32")
    assert same(fmt.quantize(w), LinearWeight("int4", (64, 576), data, scales, group_size=32))
    expected = gguf_quants.dequantize(raw, GGMLQuantizationType.Q4_0)
    assert np.array_equal(fmt.dequantize(fmt.quantize(w)).numpy(), expected)


@pytest.mark.parametrize(("name", "granularity"), VARIANTS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_refused_naming_the_first(name: str, granularity: str, bad: float) -> None:
    w = matrix(5, 200)
    w[2, 150] = bad
    w[4, 0] = math.nan
    with pytest.raises(ValueError, match=rf"w\[2, 150\]={bad:g} cannot be stored as {name}.*2 of 1000"):
        get_format(name, granularity).quantize(w)


@pytest.mark.parametrize(("name", "granularity"), VARIANTS)
def test_numbers_beyond_the_format_are_refused(name: str, granularity: str) -> None:
    w = matrix(2, 40).double()
    w[1, 3] = {"fp8": 1e39, "int4": 7e4}.get(name, 1e39 if granularity == "channel" else 9e6)
    with pytest.raises(ValueError, match=r"w\[1, 3\]"):
        get_format(name, granularity).quantize(w)


@pytest.mark.parametrize(("name", "granularity"), VARIANTS)
@pytest.mark.parametrize("shape", [(6, 45), (130, 300)])
def test_stored_shapes_follow_the_contract(name: str, granularity: str, shape: tuple[int, int]) -> None:
    n, k = shape
    weight = get_format(name, granularity).quantize(matrix(n, k))
    size = {"channel": 0, "tensor": 0, "block128": 128}.get(granularity)
    size = int(granularity.removeprefix("group").split("-")[0]) if size is None else size
    groups = -(-k // size) if size else 1
    assert weight.scales is not None
    assert (weight.shape, weight.group_size, weight.layout) == ((n, k), size, "rows")
    assert weight.data.shape == ((n, -(-k // 32) * 16) if name == "int4" else (n, k))
    assert weight.scales.shape == (n, groups)
    assert weight.scales.dtype == (torch.float16 if name == "int4" or granularity == "group32" else torch.float32)
    assert (weight.mins is not None) == granularity.endswith("asym")
    assert all(t.is_contiguous() for t in weight.tensors)
    assert variant_of(weight) == ("channel" if granularity == "tensor" else granularity)


def test_blocks_share_one_scale_and_the_tensor_another() -> None:
    w = matrix(300, 300)
    block = get_format("fp8", "block128").quantize(w).scales
    tensor = get_format("fp8", "tensor").quantize(w).scales
    assert block is not None
    assert tensor is not None
    for r, c in ((0, 0), (128, 1), (256, 2)):
        rows = slice(r, r + 128)
        assert (block[rows, c] == w[rows, c * 128 : (c + 1) * 128].abs().max() / 448).all()
    assert (tensor == w.abs().max() / 448).all()


@pytest.mark.parametrize(("name", "granularity"), VARIANTS)
def test_many_chunks_of_rows_give_what_one_gives(name: str, granularity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w = matrix(300, 700)
    fmt = get_format(name, granularity)
    whole = fmt.quantize(w)
    monkeypatch.setattr("strata_lab.quant.groups.CHUNK_ELEMENTS", 700 * 10)
    assert same(fmt.quantize(w), whole)


@pytest.mark.parametrize(("name", "granularity"), VARIANTS)
def test_grid_steps_agree_with_dequantize(name: str, granularity: str) -> None:
    """fit, encode, decode and assemble: what decode says is what the assembled weight means, bit for bit."""
    fmt = get_grid_format(name, granularity)
    w = matrix(130, 200)
    x = grouped(w, fmt.group_size)
    for shrink in fmt.shrinks:
        grid = fmt.fit(x, shrink)
        codes = fmt.encode(x, grid)
        weight = fmt.assemble(codes.flatten(1)[:, :200], grid)
        assert torch.equal(fmt.dequantize(weight), fmt.decode(codes, grid).flatten(1)[:, :200])
        assert same(weight, fmt.assemble(codes.flatten(1)[:, :200], Grid(grid.scale, grid.low)))
    best = fmt.dequantize(fmt.quantize(w))
    grid = fmt.fit(x)
    ours = fmt.decode(fmt.encode(x, grid), grid).flatten(1)[:, :200]
    assert (ours - w).square().sum() <= 1.001 * (best - w).square().sum()  # nearest on the stored scales


@pytest.mark.parametrize(("name", "granularity"), VARIANTS)
@pytest.mark.parametrize("k", [64, 150])
def test_rows_and_concat_rows_are_inverse(name: str, granularity: str, k: int) -> None:
    fmt = get_format(name, granularity)
    whole = fmt.quantize(matrix(12, k))
    parts = [whole.rows(0, 5), whole.rows(5, 6), whole.rows(6, 12)]
    assert torch.equal(fmt.dequantize(parts[2]), fmt.dequantize(whole)[6:])
    assert same(concat_rows(parts), whole)


def test_weights_with_and_without_minima_are_not_stacked() -> None:
    parts = [get_format("int4", g).quantize(matrix(4, 64)) for g in ("group32", "group32-asym")]
    with pytest.raises(AssertionError, match="int4"):
        concat_rows(parts)


@pytest.mark.parametrize(("name", "granularity"), VARIANTS)
def test_every_instance_of_a_format_reads_every_variant(name: str, granularity: str) -> None:
    weight = get_format(name, granularity).quantize(matrix(5, 150))
    expected = get_format(name, granularity).dequantize(weight)
    for other in granularities(name):
        assert torch.equal(get_format(name, other).dequantize(weight), expected)


@pytest.mark.parametrize(("name", "granularity"), VARIANTS)
def test_convert_leaves_what_is_there_and_makes_what_is_not(name: str, granularity: str) -> None:
    w = matrix(6, 150)
    weight = get_format(name, granularity).quantize(w)
    assert convert(weight, name) is weight
    assert convert(weight, name, granularity) is weight
    plain = get_format("fp32").quantize(w)
    assert same(convert(plain, name, granularity), weight)
    for other in granularities(name):
        if {granularity, other} != {granularity} and other != "channel":
            expected = get_format(name, other).quantize(get_format(name).dequantize(weight))
            assert same(convert(weight, name, other), expected)


def test_unknown_variants_are_refused_with_one_that_works() -> None:
    with pytest.raises(ConfigError, match=r"granularity='group64' of fp8 must be one of channel.*; try 'channel'"):
        get_format("fp8", "group64")
    with pytest.raises(ConfigError, match=r"granularity='tensor' of int4 .*try 'group32-asym'"):
        get_format("int4", "tensor")
    with pytest.raises(ConfigError, match="granularity='channel': bf16 has no scales"):
        get_format("bf16", "channel")
    with pytest.raises(ConfigError, match="weight_format='int3' must be one of"):
        get_format("int3", "channel")
    with pytest.raises(ConfigError, match="weight_format='bf16' has no scales to choose"):
        get_grid_format("bf16")
    assert granularities("fp8") == ("channel", "tensor", "block128")
    assert set(granularities("int8")) == {"group32", "channel"}
    assert set(granularities("int4")) == {*SYMMETRIC, *(f"{g}-asym" for g in SYMMETRIC)}
    assert granularities("fp32") == ()

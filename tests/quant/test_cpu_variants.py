"""Every variant of every format runs on the CPU kernels, and multiplies as the stored numbers say."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from strata_lab.kernels.cpu import build
from strata_lab.kernels.cpu.packing import pack, unpack
from strata_lab.kernels.cpu.packing_variants import change_of, readable
from strata_lab.kernels.embedding import embedding, embedding_ref
from strata_lab.kernels.linear import linear, linear_ref, round_activations
from strata_lab.quant import get_format, granularities
from strata_lab.quant.base import LinearWeight

VARIANTS = [(name, v) for name in ("fp8", "int8", "int4") for v in granularities(name)]
SHAPES = [(8, 32), (20, 72), (33, 130), (64, 576), (5, 7), (140, 300)]
RTOL = 2e-5  # of |x| @ |w|: minima of 8 scales cancel against codes, so rounding errors are up to twice as large


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    try:
        build.load()
    except build.CpuKernelsUnavailable as reason:
        pytest.skip(str(reason))


def made(name: str, granularity: str, n: int, k: int) -> LinearWeight:
    return get_format(name, granularity).quantize(torch.randn(n, k))


def meaning(weight: LinearWeight) -> Tensor:
    return get_format(weight.format).dequantize(weight)


def run(isa: build.Isa, x: Tensor, w: LinearWeight) -> Tensor:
    return build.load(isa).linear(x, w.data, w.scales, w.mins, w.shape[0], None, None, 0.0, None, False)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "granularity"), VARIANTS)
def test_packing_changes_no_number(name: str, granularity: str, shape: tuple[int, int]) -> None:
    weight = made(name, granularity, *shape)
    packed = pack(weight)
    assert packed.layout == "panels"
    assert torch.equal(meaning(unpack(packed)), meaning(weight))
    assert (change_of(weight) == "") == (readable(weight) is weight)


@pytest.mark.parametrize("isa", get_args(build.Isa))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "granularity"), VARIANTS)
def test_product_agrees_with_float64(name: str, granularity: str, shape: tuple[int, int], isa: build.Isa) -> None:
    weight = made(name, granularity, *shape)
    packed, w = pack(weight), meaning(weight).double()
    for rows in (1, 3, 8, 13, 30):
        x = torch.randn(rows, shape[1])
        seen = round_activations(x.double()) if packed.format in ("int8", "int4") else x.double()
        error = (run(isa, x, packed).double() - seen @ w.T).abs()
        assert (error <= RTOL * (seen.abs() @ w.abs().T)).all(), rows


@pytest.mark.parametrize(("name", "granularity"), VARIANTS)
def test_the_reference_multiplies_every_variant(name: str, granularity: str) -> None:
    weight = made(name, granularity, 40, 300)
    x = torch.randn(4, 300)
    expected = x.double() @ meaning(weight).double().T
    assert ((linear(x, weight).double() - expected).abs() <= RTOL * (x.abs() @ meaning(weight).abs().T)).all()
    torch.testing.assert_close(linear_ref(x.double(), weight), expected)


@pytest.mark.parametrize(("name", "granularity"), VARIANTS)
def test_a_row_does_not_depend_on_batch_or_build(name: str, granularity: str) -> None:
    packed = pack(made(name, granularity, 52, 584))
    x = torch.randn(150, 584)
    alone = torch.cat([linear(row[None], packed) for row in x])
    for rows in (2, 5, 8, 9, 13, 30, 150):
        for isa in get_args(build.Isa):
            assert torch.equal(run(isa, x[:rows], packed), alone[:rows]), (rows, isa)


@pytest.mark.parametrize("isa", get_args(build.Isa))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "granularity"), VARIANTS)
def test_embedding_is_exactly_the_dequantized_rows(
    name: str, granularity: str, shape: tuple[int, int], isa: build.Isa
) -> None:
    weight = made(name, granularity, *shape)
    packed = pack(weight)
    ids = torch.randint(shape[0], (11,))
    expected = meaning(weight)[ids]
    assert torch.equal(build.load(isa).embedding(ids, packed.data, packed.scales, packed.mins, *shape), expected)
    assert torch.equal(embedding_ref(ids, weight), expected)
    assert torch.equal(embedding(ids, weight), expected)


@pytest.mark.parametrize(("name", "granularity"), VARIANTS)
def test_rows_of_a_packed_variant_are_a_weight_and_the_gate_is_fused(name: str, granularity: str) -> None:
    packed = pack(made(name, granularity, 48, 200))
    x, norm = torch.randn(3, 200), torch.rand(200) + 0.5
    whole = linear(x, packed)
    assert torch.equal(linear(x, packed.rows(16, 48)), whole[:, 16:])
    gate, up = whole.chunk(2, dim=-1)
    torch.testing.assert_close(
        linear(x, packed, silu_mul=True), torch.nn.functional.silu(gate) * up, rtol=1e-6, atol=1e-6
    )
    normed = torch.nn.functional.rms_norm(x, (200,), norm, 1e-5)
    fused = linear(x, packed, norm_weight=norm, norm_eps=1e-5)
    torch.testing.assert_close(fused, linear(normed, packed), rtol=1e-4, atol=2e-2)  # a code may round the other way


def test_scales_whose_minimum_float16_cannot_hold_become_fp32_and_say_so() -> None:
    weight = made("int4", "group64", 8, 64)
    assert weight.scales is not None
    scales = weight.scales.clone()
    scales[3] = 9000.0
    weight = replace(weight, scales=scales)
    packed = pack(weight)
    assert packed.format == "fp32"
    assert torch.equal(meaning(unpack(packed)), meaning(weight))
    assert "its largest scale, 9000, times -8 is beyond float16" in change_of(weight)
    assert "groups of 32 with minima (18% more bytes)" in change_of(made("int4", "group64", 8, 64))


def test_negative_scales_are_scales() -> None:
    """Files and symmetric groups bring them: the largest magnitude may be positive while its code is the lowest."""
    for name, granularity in (("int4", "group64"), ("int8", "group32"), ("int8", "channel"), ("fp8", "block128")):
        weight = made(name, granularity, 16, 130)
        assert weight.scales is not None
        weight = replace(weight, scales=-weight.scales)
        x = torch.randn(2, 130)
        seen = round_activations(x.double()) if name != "fp8" else x.double()
        expected = seen @ meaning(weight).double().T
        torch.testing.assert_close(linear(x, pack(weight)).double(), expected, rtol=0, atol=1e-3)


def test_a_group_size_without_a_meaning_is_refused() -> None:
    with pytest.raises(ValueError, match="group_size=48 of int4 must be a multiple of 32"):
        pack(replace(made("int4", "group64", 8, 64), group_size=48))
    with pytest.raises(ValueError, match="group_size=64 of fp8 has no kernel; requantize with 0"):
        pack(replace(made("fp8", "channel", 8, 64), group_size=64))

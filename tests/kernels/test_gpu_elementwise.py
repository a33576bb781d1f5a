"""The small Triton operators against their references: every SPEC case, odd strides, other dtypes, untouched memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from strata_lab.kernels import SPECS
from strata_lab.kernels.gpu import elementwise, launch
from strata_lab.kernels.kv_append import FP8_MAX, kv_append_ref
from strata_lab.kernels.qkv_rope_append import qkv_rope_append_ref
from strata_lab.kernels.rms_norm import rms_norm_ref
from strata_lab.kernels.rope import rope_ref, rotation
from strata_lab.kernels.spec import Case, KernelSpec
from strata_lab.quant import FORMATS, get_format
from tests.kernels import weight_variants
from tests.kernels.weight_variants import VARIANTS

OPERATORS = ("rms_norm", "rope", "silu_mul", "add", "take_rows", "embedding", "kv_append", "qkv_rope_append")
SPEC_OF = {spec.name: spec for spec in SPECS() if spec.name in OPERATORS}
GRID = [
    pytest.param(spec, case, id=f"{spec.name}-{case.name}")
    for spec in SPEC_OF.values()
    if spec.name != "embedding"  # its cases are packed for the CPU where a compiler is at hand
    for case in spec.cases()
]


def triton_of(name: str) -> Any:
    return getattr(elementwise, f"{name}_triton")


def exact(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same numbers in float64; caches keep the dtype whose rounding is part of the contract."""
    return {
        name: x.double() if isinstance(x, Tensor) and x.is_floating_point() and not name.endswith("_cache") else x
        for name, x in inputs.items()
    }


def compare(actual: Tensor, expected: Tensor, tolerance: tuple[float, float]) -> None:
    rtol, atol = tolerance
    torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize(("spec", "case"), GRID)
def test_operator_keeps_its_spec(spec: KernelSpec, case: Case, device: torch.device) -> None:
    inputs, other = case.make(device), case.make(device)
    got = triton_of(spec.name)(**inputs)
    expected = spec.ref(**exact(other))
    if got is not None:
        compare(got, expected, spec.tolerance[got.dtype])
    for name in (n for n in inputs if n.endswith("_cache")):
        cache = inputs[name]
        if launch.INTERPRETED and cache.dtype != torch.float32:
            assert torch.equal(cache.isnan(), other[name].isnan())  # the interpreter rounds these stores wrongly
        else:
            compare(cache, other[name], spec.tolerance[cache.dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["rms_norm", "rope", "silu_mul", "add"])
def test_16_bit_activations_stay_16_bit(name: str, dtype: torch.dtype, device: torch.device) -> None:
    for case in SPEC_OF[name].cases():
        if case.name in ("large-values", "small-values"):
            continue
        inputs = {k: x.to(dtype) if k in "x y gate up" else x for k, x in case.make(device).items()}
        got = triton_of(name)(**inputs)
        assert got.dtype == dtype
        compare(got, SPEC_OF[name].ref(**exact(inputs)), (8e-3, 1e-2))  # the interpreter truncates to bfloat16


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [(20, 72), (8, 32), (5, 1027)], ids=str)
def test_embedding_is_exact_in_every_format(fmt: str, shape: tuple[int, int], device: torch.device) -> None:
    weight = get_format(fmt).quantize(torch.randn(shape)).to(device)
    ids = torch.tensor([shape[0] - 1, 0, 3, 3], device=device)
    got = elementwise.embedding_triton(ids, weight)
    assert torch.equal(got, SPEC_OF["embedding"].ref(ids, weight))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("shape", [(20, 200), (8, 600), (5, 33)])
def test_embedding_is_exact_with_groups_of_every_size(name: str, shape: tuple[int, int], device: torch.device) -> None:
    """Products with integer codes are exact, so nothing rounds twice."""
    ids = torch.tensor([shape[0] - 1, 0, 3, 3], device=device)
    weight = weight_variants.make(name, *shape, device)
    got = elementwise.embedding_triton(ids, weight)
    assert torch.equal(got, weight_variants.exact(weight)[ids].float())


def test_take_rows_copies_bits_of_any_dtype(device: torch.device) -> None:
    for dtype in (torch.float32, torch.float16):
        table = torch.randn(9, 33, device=device).to(dtype)
        table[4, 5] = torch.nan
        ids = torch.tensor([8, 4, 0, 4], device=device)
        got = elementwise.take_rows_triton(table, ids)
        assert torch.equal(got.view(torch.uint8), table[ids].view(torch.uint8))


def test_strided_inputs_are_read_where_they_lie(device: torch.device) -> None:
    wide = torch.randn(5, 4, 3, 80, device=device)
    x = wide[:, 1]  # [5, 3, 80], rows apart
    turn = rotation(torch.arange(5, device=device), 80)
    compare(elementwise.rope_triton(x, *turn), rope_ref(x.double(), *turn), (2e-6, 1e-6))
    weight = torch.randn(80, device=device)
    compare(elementwise.rms_norm_triton(x, weight, 1e-5), rms_norm_ref(x.double(), weight.double(), 1e-5), (2e-6, 1e-6))
    columns = torch.randn(80, 6, device=device).T
    expected = rms_norm_ref(columns.double(), weight.double(), 1e-5)
    compare(elementwise.rms_norm_triton(columns, weight, 1e-5), expected, (2e-6, 1e-6))
    caches = [torch.full((3, 8, 3, 80), torch.nan, device=device) for _ in range(4)]
    slots = torch.tensor([3, -1, 20, 0, 7], device=device)
    elementwise.kv_append_triton(x, wide[:, 2], caches[0], caches[1], slots, 0.3, 0.7)
    kv_append_ref(x, wide[:, 2], caches[2], caches[3], slots, 0.3, 0.7)
    for got, expected in zip(caches[:2], caches[2:], strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_a_row_does_not_know_its_neighbours(device: torch.device) -> None:
    x, weight = torch.randn(3, 576, device=device), torch.randn(576, device=device)
    together = elementwise.rms_norm_triton(x, weight, 1e-5)
    assert torch.equal(together[1:2], elementwise.rms_norm_triton(x[1:2], weight, 1e-5))


@pytest.mark.parametrize("norms", [(True, False), (False, True)], ids=["q-only", "k-only"])
def test_one_norm_without_the_other(norms: tuple[bool, bool], device: torch.device) -> None:
    qkv, caches = torch.randn(2, 5 * 16, device=device), torch.zeros(4, 2, 8, 1, 16, device=device)
    weights = [torch.rand(16, device=device) + 0.5 if norm else None for norm in norms]
    cos, sin = rotation(torch.tensor([3, 9], device=device), 16)
    slots = torch.tensor([5, 11], device=device)
    got = elementwise.qkv_rope_append_triton(
        qkv, cos, sin, weights[0], weights[1], 1e-5, caches[0], caches[1], slots, 3, 1
    )
    wide = [None if w is None else w.double() for w in weights]
    expected = qkv_rope_append_ref(qkv.double(), cos, sin, wide[0], wide[1], 1e-5, caches[2], caches[3], slots, 3, 1)
    compare(got, expected, (2e-6, 2e-6))
    compare(caches[:2], caches[2:], (2e-6, 2e-6))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_append_stores_what_torch_converts_to(kv_dtype: torch.dtype, scale: float) -> None:
    """Every sign, exponent and leading seven mantissa bits, with the low bits at and beside ties."""
    high = torch.arange(2**16, dtype=torch.int64)[:, None] << 16
    bits = high + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001])
    x = bits.to(torch.uint32).view(torch.float32).reshape(-1, 1, 128).cuda()
    caches = [torch.zeros(x.shape[0], 1, 1, 128, device="cuda").to(kv_dtype) for _ in range(2)]
    elementwise.kv_append_triton(x, -x, caches[0], caches[1], torch.arange(x.shape[0], device="cuda"), scale, scale)
    for sign, cache in zip((1, -1), caches, strict=True):
        expected = sign * x / torch.full((), scale, device="cuda")
        if kv_dtype == torch.float8_e4m3fn:
            expected = expected.clamp(-FP8_MAX, FP8_MAX)
        expected = expected.to(kv_dtype).float()
        torch.testing.assert_close(cache[:, 0].float(), expected, rtol=0, atol=0, equal_nan=True)

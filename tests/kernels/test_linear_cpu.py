"""The packed products: layout, exactness, independence from batch and instruction set, and what is fused with them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from strata_lab.kernels.cpu import build
from strata_lab.kernels.cpu.packing import PANEL_FORMATS, pack, unpack
from strata_lab.kernels.embedding import embedding, embedding_ref
from strata_lab.kernels.linear import linear, linear_ref, round_activations
from strata_lab.quant import FORMATS, get_format
from strata_lab.quant.base import LinearWeight

pytestmark = pytest.mark.host
FLOATS = ["fp32", "bf16", "fp8"]
INTEGERS = ["int8", "int4"]
SHAPES = [(8, 32), (20, 72), (33, 130), (64, 576), (5, 7)]  # panels and groups whole, and ragged in every way
RTOL = 1e-5  # of |x| @ |w|, the sum's own scale: fp32 rounding of up to 576 terms stays below


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    try:
        build.load()
    except build.CpuKernelsUnavailable as reason:
        pytest.skip(str(reason))


def made(name: str, n: int, k: int, scale: float = 1.0) -> LinearWeight:
    """A random weight in layout "rows"."""
    return get_format(name).quantize(scale * torch.randn(n, k))


def run(isa: build.Isa, x: Tensor, weight: LinearWeight, bias: Tensor | None = None, **options: Any) -> Tensor:
    """`linear` with the operators of one build."""
    defaults: dict[str, Any] = {"norm_weight": None, "norm_eps": 0.0, "residual": None, "silu_mul": False}
    op = build.load(isa).linear
    return op(x, weight.data, weight.scales, weight.mins, weight.shape[0], bias, **(defaults | options))


def product_in_float64(x: Tensor, weight: LinearWeight) -> tuple[Tensor, Tensor]:
    """x @ w.T with x as the kernel sees it, and |x| @ |w|.T, the scale of its rounding errors."""
    w = get_format(weight.format).dequantize(unpack(weight)).double()
    x = round_activations(x.double()) if weight.format in INTEGERS else x.double()
    return x @ w.T, x.abs() @ w.abs().T


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_unpacking_gives_back_the_packed_bits(name: str, shape: tuple[int, int]) -> None:
    weight = made(name, *shape)
    packed = pack(weight)
    back = unpack(packed)
    assert packed.layout == "panels"
    assert {t.shape[0] for t in packed.tensors} == {-(-shape[0] // 8)}
    assert (back.format, back.shape, back.group_size, back.layout) == (name, shape, weight.group_size, "rows")
    for part, original in zip(back.tensors, weight.tensors, strict=True):
        assert part.dtype == original.dtype
        assert torch.equal(part.contiguous().view(torch.uint8), original.contiguous().view(torch.uint8))
    assert pack(packed) is packed
    assert unpack(weight) is weight


@pytest.mark.parametrize("isa", get_args(build.Isa))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_product_agrees_with_float64(name: str, shape: tuple[int, int], isa: build.Isa) -> None:
    packed = pack(made(name, *shape))
    for rows in (1, 3, 8, 13, 30):
        x = torch.randn(rows, shape[1])
        expected, scale = product_in_float64(x, packed)
        error = (run(isa, x, packed).double() - expected).abs()
        assert (error <= RTOL * scale).all(), (rows, (error / scale).max())


@pytest.mark.parametrize("name", INTEGERS)
def test_rounding_activations_costs_at_most_half_a_code(name: str) -> None:
    """|x - rounded x| <= amax / 254 per column, so the product is off by at most that times the sum of |w|."""
    weight = made(name, 40, 96)
    x = torch.randn(4, 96)
    w = get_format(name).dequantize(weight).double()
    half_code = x.double().abs().view(4, 3, 32).amax(-1) / 254
    bound = half_code @ w.abs().view(40, 3, 32).sum(-1).T
    error = (linear(x, pack(weight)).double() - x.double() @ w.T).abs()
    assert (error <= bound * (1 + RTOL)).all()
    assert error.max() > 0


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_does_not_depend_on_batch_or_build(name: str) -> None:
    """Bitwise, across the small kernels (T to 8), their remainder (9), and the tiled kernel for many rows."""
    packed = pack(made(name, 52, 584))  # 7 panels: the kernels that take several at once have a remainder; 3 depths
    x = torch.randn(150, 584)
    alone = torch.cat([linear(row[None], packed) for row in x])
    for rows in (*range(1, 10), 11, 12, 13, 17, 150):
        for isa in get_args(build.Isa):
            assert torch.equal(run(isa, x[:rows], packed), alone[:rows]), (rows, isa)


@pytest.mark.parametrize("isa", get_args(build.Isa))
@pytest.mark.parametrize(("name", "code"), [("int8", -128), ("int8", 127), ("int8", -127), ("int4", 15), ("int4", 0)])
def test_extreme_codes_do_not_saturate(name: str, code: int, isa: build.Isa) -> None:
    """Every weight and every activation at the end of its range: integers far inside fp32, so the sum is exact."""
    weight = made(name, 8, 64)
    stored = code if name == "int8" else code * 0x11
    ones = [None if t is None else torch.ones_like(t) for t in (weight.scales, weight.mins)]
    weight = replace(weight, data=torch.full_like(weight.data, stored), scales=ones[0], mins=ones[1])
    value = code + (1 if name == "int4" else 0)
    for sign in (1.0, -1.0):
        x = torch.full((9, 64), sign * 127.0)
        assert torch.equal(run(isa, x, pack(weight)), torch.full((9, 8), sign * 127.0 * value * 64))


@pytest.mark.parametrize("name", FORMATS)
def test_large_and_tiny_activations_keep_their_precision(name: str) -> None:
    packed = pack(made(name, 16, 64))
    for magnitude in (1e30, 1e-30):
        x = magnitude * torch.randn(2, 64)
        expected, scale = product_in_float64(x, packed)
        assert ((linear(x, packed).double() - expected).abs() <= RTOL * scale).all()
    assert torch.equal(linear(torch.full((1, 64), 1e-40), packed), torch.zeros(1, 16)) or name in FLOATS
    assert torch.equal(linear(torch.zeros(3, 64), packed), torch.zeros(3, 16))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", FORMATS)
def test_a_bad_activation_spoils_its_row_and_no_other(name: str, bad: float) -> None:
    packed = pack(made(name, 16, 96))
    for rows in (3, 20):
        x = torch.randn(rows, 96)
        clean = linear(x, packed)
        x[1, 40] = bad
        y = linear(x, packed)
        assert not y[1].isfinite().any()
        others = torch.arange(rows) != 1
        assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("name", FORMATS)
def test_norm_bias_gate_and_residual_are_the_separate_steps(name: str) -> None:
    weight = pack(made(name, 48, 72, scale=0.2))
    bias, norm_weight = torch.randn(48), torch.rand(72) + 0.5
    for rows in (1, 9, 20):
        x = 3 * torch.randn(rows, 72)
        normed = torch.nn.functional.rms_norm(x, (72,), norm_weight, 1e-5)
        plain = linear(normed, weight)
        tolerance = {"rtol": 1e-4, "atol": 1e-3 if name in INTEGERS else 1e-5}  # a code may round the other way
        torch.testing.assert_close(linear(x, weight, norm_weight=norm_weight, norm_eps=1e-5), plain, **tolerance)
        exact = linear(x, weight, norm_weight=norm_weight, norm_eps=1e-5)
        assert torch.equal(linear(x, weight, bias, norm_weight=norm_weight, norm_eps=1e-5), exact + bias)
        gate, up = (linear(x, weight) + bias).chunk(2, dim=-1)
        residual = torch.randn(rows, 24)
        expected = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(linear(x, weight, bias, silu_mul=True), expected, rtol=1e-6, atol=1e-6)
        both = linear(x, weight, bias, silu_mul=True, residual=residual)
        assert torch.equal(both, linear(x, weight, bias, silu_mul=True) + residual)


def test_gating_works_where_gate_and_up_share_a_panel() -> None:
    weight = made("fp32", 20, 32)
    x, residual = torch.randn(5, 32), torch.randn(5, 10)
    expected = linear_ref(x, weight, silu_mul=True, residual=residual)
    torch.testing.assert_close(linear(x, pack(weight), silu_mul=True, residual=residual), expected)


def test_the_gate_is_right_over_its_whole_range() -> None:
    weight = get_format("fp32").quantize(torch.ones(16, 1))
    gates = torch.cat([torch.linspace(-100, 100, 4001), torch.tensor([0.0, 1e-20, -1e4, 1e4])])
    y = linear(gates[:, None], pack(weight), silu_mul=True)[:, 0]
    exact = torch.nn.functional.silu(gates.double()) * gates.double()
    torch.testing.assert_close(y.double(), exact, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_a_packed_weight_are_a_weight(name: str) -> None:
    packed = pack(made(name, 44, 96))
    x, ids = torch.randn(2, 96), torch.tensor([3, 0, 15])
    whole = linear(x, packed)
    for start, stop in ((0, 8), (8, 24), (16, 44)):
        assert torch.equal(linear(x, packed.rows(start, stop)), whole[:, start:stop])
    assert torch.equal(embedding(ids, packed.rows(16, 40)), embedding(ids + 16, packed))


@pytest.mark.parametrize("isa", get_args(build.Isa))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_embedding_is_exactly_the_dequantized_rows(name: str, shape: tuple[int, int], isa: build.Isa) -> None:
    weight = made(name, *shape)
    packed = pack(weight)
    ids = torch.randint(shape[0], (11,))
    op = build.load(isa).embedding
    expected = get_format(name).dequantize(weight)[ids]
    assert torch.equal(op(ids, packed.data, packed.scales, packed.mins, *shape), expected)
    assert torch.equal(embedding_ref(ids, weight), expected)
    assert torch.equal(embedding(ids, weight), expected)


def test_embedding_refuses_ids_outside_the_table() -> None:
    packed = pack(made("int8", 20, 32))
    for bad in (20, -1):
        with pytest.raises(IndexError, match=f"id {bad} is not a row of a table of 20 rows"):
            embedding(torch.tensor([0, bad]), packed)


def test_layout_rows_is_the_reference() -> None:
    weight, x = made("int4", 16, 64), torch.randn(2, 64)
    assert torch.equal(linear(x, weight, silu_mul=True), linear_ref(x, weight, silu_mul=True))


def test_no_rows_give_no_rows() -> None:
    assert linear(torch.empty(0, 32), pack(made("int4", 16, 32)), silu_mul=True).shape == (0, 8)


def test_wrong_arguments_are_named() -> None:
    packed, x = pack(made("int8", 16, 64)), torch.randn(2, 64)
    with pytest.raises(ValueError, match=r"does not hold \[16, 63\]|does not hold \[16, 31\]"):
        linear(x[:, :31], packed)
    with pytest.raises(ValueError, match="bias must be contiguous float32 with 16 elements"):
        linear(x, packed, torch.zeros(15))
    with pytest.raises(ValueError, match="x must be float32"):
        linear(x.double(), packed)
    with pytest.raises(ValueError, match="scales or mins are missing"):
        linear(x, replace(packed, scales=None))
    with pytest.raises(ValueError, match="group_size=64 of int8 has no kernel; requantize with 32"):
        pack(replace(made("int8", 16, 64), group_size=64))
    with pytest.raises(ValueError, match="format='int3' has no panel layout"):
        pack(replace(made("int8", 16, 64), format="int3"))
    with pytest.raises(ValueError, match="isa='sse' is unknown"):
        build.load("sse")  # type: ignore[arg-type]


def test_every_format_has_a_panel_layout() -> None:
    assert PANEL_FORMATS.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", ["fp32", "int4"])
def test_a_compiled_step_traces_whole(name: str) -> None:
    packed, table = pack(made(name, 32, 64)), pack(made(name, 24, 64))
    norm_weight = torch.ones(64)

    def step(ids: Tensor) -> Tensor:
        x = embedding(ids, table)
        return linear(x, packed, norm_weight=norm_weight, norm_eps=1e-5, silu_mul=True)

    ids = torch.tensor([1, 5, 9])
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        assert torch.equal(compiled(ids), step(ids))


def test_fakes_and_schemas_are_sound() -> None:
    packed = pack(made("int4", 32, 64))
    parts = (packed.data, packed.scales, packed.mins)
    x, residual = torch.randn(3, 64), torch.randn(3, 16)
    checks = ("test_schema", "test_faketensor")
    op = torch.ops.strata.linear.default
    torch.library.opcheck(op, (x, *parts, 32, None, torch.ones(64), 1e-5, residual, True), test_utils=checks)
    op = torch.ops.strata.embedding.default
    torch.library.opcheck(op, (torch.tensor([1, 2]), *parts, 32, 64), test_utils=checks)


def test_several_threads_give_the_same_bits_as_one() -> None:
    packed, x = pack(made("int4", 200, 96)), torch.randn(300, 96)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = linear(x, packed)
        torch.set_num_threads(3)
        assert torch.equal(linear(x, packed), alone)
    finally:
        torch.set_num_threads(before)


def test_without_a_compiler_the_reason_says_so(tmp_path: Path) -> None:
    code = (
        "from strata_lab.kernels.cpu import build\ntry: build.load()\nexcept build.CpuKernelsUnavailable as e: print(e)"
    )
    environment = os.environ | {"CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path)}
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert "no C++ compiler: 'no-such-compiler' not found; install g++ or clang++" in answer.stdout


def test_a_failed_build_carries_the_compilers_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "SOURCE_FOLDER", tmp_path)
    monkeypatch.setattr(build, "_TORCH_HEADERS", ())  # they take ten seconds to read
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(build, "_failed", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "broken.cpp").write_text("#error these are the words")
    for _ in range(2):  # remembered, not built again
        with pytest.raises(build.CpuKernelsUnavailable, match="these are the words"):
            build.load()
        (tmp_path / "broken.cpp").unlink(missing_ok=True)
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_a_processor_without_avx2_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(build, "_failed", {})
    monkeypatch.setattr(build, "_MARCH", {"native": ["-march=x86-64"]})
    with pytest.raises(build.CpuKernelsUnavailable, match="this processor lacks AVX2, FMA, F16C"):
        build.load()

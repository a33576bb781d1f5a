"""The Triton product against the definition in float64, for every format, kernel, epilogue and kind of x."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from strata_lab.kernels.gpu import gemm, gemv, gemv_int, gemv_mma_config, launch
from strata_lab.kernels.gpu.linear import linear_triton, lm_head_triton
from strata_lab.kernels.linear import linear_ref
from strata_lab.quant import get_format
from strata_lab.quant.base import LinearWeight
from tests.kernels.weight_variants import VARIANTS, exact, make

FORMATS = ("bf16", "fp8", "int8", "int4")
ALL = ("bias", "norm", "residual", "gate")
EPS = 1e-5
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # largest relative error of one
SIGMAS = 6.0  # Hoeffding: a sum of independent errors of mean 0, at most c_k each, exceeds this many times the root of
# the sum of c_k^2 with a chance of 2 exp(-SIGMAS^2 / 2) = 3e-8
EXACT = 1e-5  # of the largest result of a row: float32 all the way
NARROW = 1e-3  # the same with one 16-bit row of x (`gemv_math.py`)


def _exact(weight: LinearWeight) -> LinearWeight:
    return LinearWeight("fp32", weight.shape, exact(weight))


def _quantized(name: str, n: int, k: int, device: torch.device) -> LinearWeight:
    if name in VARIANTS:
        return make(name, n, k, device)
    return get_format(name).quantize(torch.randn(n, k, device=device) / k**0.5)


def _inputs(name: str, t: int, n: int, k: int, parts: tuple[str, ...], device: torch.device, dtype: torch.dtype) -> Any:
    """Keyword arguments; the weight has n rows, gated 2 n."""
    rows = 2 * n if "gate" in parts else n
    inputs: dict[str, Any] = {
        "x": torch.randn(t, k, device=device).to(dtype),
        "weight": _quantized(name, rows, k, device),
        "silu_mul": "gate" in parts,
    }
    if "bias" in parts:
        inputs["bias"] = torch.randn(rows, device=device).to(dtype)
    if "norm" in parts:
        inputs |= {"norm_weight": torch.randn(k, device=device).to(dtype), "norm_eps": EPS}
    if "residual" in parts:
        inputs["residual"] = torch.randn(t, n, device=device).to(dtype)
    return inputs


def _expected(inputs: dict[str, Any]) -> Tensor:
    double: dict[str, Any] = {k: v.double() if isinstance(v, Tensor) else v for k, v in inputs.items()}
    return linear_ref(**double | {"weight": _exact(inputs["weight"])})


def _assert_close(result: Tensor, expected: Tensor, tolerance: float) -> None:
    assert result.shape == expected.shape
    error = (result.double() - expected).abs().amax(dim=1) / expected.abs().amax(dim=1)
    assert bool((error <= tolerance).all()), error.max()  # NaN fails


def _assert_rounded(result: Tensor, inputs: dict[str, Any], operands: int) -> None:
    """The result of a product of which `operands` per term were rounded to the dtype of x, nothing else to 16 bits.

    With u the largest relative error of a rounding, term k of a sum is off by at most u * operands * |w_k * x_k|, with
    changing signs: see `SIGMAS`. The gate passes on at most 1.1 times an error of its argument. Then the result is
    rounded to its own dtype (the interpreter cuts bfloat16 off: twice as much).
    """
    double: dict[str, Any] = {k: v.double() if isinstance(v, Tensor) else v for k, v in inputs.items()}
    expected = linear_ref(**double | {"weight": _exact(inputs["weight"])})
    assert result.shape == expected.shape
    w, x = _exact(inputs["weight"]).data.double(), double["x"]
    if "norm_weight" in double:
        x = x * (x.square().mean(dim=1, keepdim=True) + inputs["norm_eps"]).rsqrt() * double["norm_weight"]
    y = x @ w.T
    u = ROUNDING[inputs["x"].dtype]
    bound = SIGMAS * u * operands * (x.square() @ w.T.square()).sqrt()
    bound += (NARROW if operands == 0 else EXACT) * y.abs().amax(dim=1, keepdim=True)
    if x.shape[0] > gemm.MAX_ROWS:  # cuBLAS rounds its own result
        bound += u * (y.abs() + bound)
    if inputs["silu_mul"]:
        if inputs.get("bias") is not None:
            y = y + double["bias"]
        (gate, up), (gate_bound, up_bound) = y.chunk(2, dim=1), bound.chunk(2, dim=1)
        silu = torch.nn.functional.silu(gate)
        bound = (silu.abs() + 1.1 * gate_bound) * up_bound + 1.1 * gate_bound * up.abs()
    last = ROUNDING[result.dtype] * (2 if launch.INTERPRETED and result.dtype == torch.bfloat16 else 1)
    bound = bound + last * (expected.abs() + bound)
    error = (result.double() - expected).abs()
    assert bool((error <= bound).all()), ((error - bound).max(), (error / bound).max())  # NaN fails


def _operands(inputs: dict[str, Any]) -> int:
    """How many factors of a term the default path rounds to the dtype of x."""
    x, weight = inputs["x"], inputs["weight"]
    normalized = inputs.get("norm_weight") is not None
    if x.shape[0] > 1 and gemv_mma_config.supports(x, weight, inputs.get("norm_weight")):
        return int(normalized)
    if x.shape[0] <= gemv.MAX_ROWS:
        return 0
    return int(normalized) + int(weight.group_size > 0 or x.shape[0] > gemm.MAX_ROWS)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("t", "n", "k", "parts"),
    [
        (1, 20, 72, ALL),
        (2, 33, 576, ("norm",)),
        (4, 20, 72, ("bias", "residual")),
        (5, 33, 576, ALL),
        (9, 20, 72, ()),
        (17, 40, 72, ("norm", "gate", "residual")),
        (130, 20, 72, ALL),
    ],
)
def test_product_equals_definition_in_float32(
    name: str, t: int, n: int, k: int, parts: tuple[str, ...], device: torch.device
) -> None:
    inputs = _inputs(name, t, n, k, parts, device, torch.float32)
    _assert_close(linear_triton(**inputs), _expected(inputs), EXACT)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("dtype", "t", "parts"),
    [
        (torch.bfloat16, 1, ALL),
        (torch.bfloat16, 3, ()),
        (torch.bfloat16, 7, ALL),
        (torch.float16, 2, ("norm",)),
        (torch.float16, 20, ("norm", "gate")),
        (torch.bfloat16, 130, ("norm", "bias")),
    ],
)
def test_product_rounds_once_or_twice_in_half_precision(
    name: str, dtype: torch.dtype, t: int, parts: tuple[str, ...], device: torch.device
) -> None:
    if launch.INTERPRETED and t > gemm.MAX_ROWS:
        pytest.skip("expands the weight to bfloat16, which the interpreter stores wrongly")
    inputs = _inputs(name, t, 20, 96, parts, device, dtype)
    result = linear_triton(**inputs)
    assert result.dtype == dtype
    _assert_rounded(result, inputs, _operands(inputs))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    ("t", "n", "k", "parts"),
    [(1, 20, 200, ALL), (3, 33, 72, ("norm",)), (7, 20, 300, ("bias", "gate")), (18, 33, 200, ALL), (130, 20, 150, ())],
)
def test_groups_may_be_ragged_in_every_kernel_in_float32(
    name: str, t: int, n: int, k: int, parts: tuple[str, ...], device: torch.device
) -> None:
    inputs = _inputs(name, t, n, k, parts, device, torch.float32)
    _assert_close(linear_triton(**inputs), _expected(inputs), EXACT)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    ("dtype", "t", "k", "parts"),
    [
        (torch.bfloat16, 1, 200, ALL),
        (torch.bfloat16, 3, 160, ()),
        (torch.float16, 4, 168, ("residual",)),
        (torch.bfloat16, 7, 160, ALL),
        (torch.float16, 20, 200, ("norm", "gate")),
    ],
)
def test_groups_may_be_ragged_in_every_kernel_in_half_precision(
    name: str, dtype: torch.dtype, t: int, k: int, parts: tuple[str, ...], device: torch.device
) -> None:
    inputs = _inputs(name, t, 20, k, parts, device, dtype)
    _assert_rounded(linear_triton(**inputs), inputs, _operands(inputs))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("share", [False, True])
def test_groups_in_a_gemv_of_either_kind(name: str, share: bool, device: torch.device) -> None:
    """Shared 16-bit x is multiplied in integers, by integer codes; rows that start off 16 bytes are not."""
    for k in (272, 290):
        inputs = _inputs(name, 2, 9, k, ("norm",), device, torch.bfloat16)
        out = torch.full((2, 9), torch.nan, device=device)
        config = gemv.GemvConfig(8, 256, 2, 1, share=share)
        gemv.gemv(inputs["x"], inputs["weight"], None, inputs["norm_weight"], EPS, None, False, out, config)
        _assert_close(out, _expected(inputs), NARROW if share else EXACT)


@pytest.mark.parametrize("name", ["int4g128", "int4g64-min", "fp8g128"])
def test_steps_of_a_product_may_be_shorter_than_a_group(name: str, device: torch.device) -> None:
    inputs = _inputs(name, 18, 20, 200, ALL, device, torch.float32)
    _assert_close(linear_triton(**inputs, config=gemm.DotConfig(16, 32, 32, 2, 4, 2)), _expected(inputs), EXACT)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("t", [1, 6, 20])
def test_logits_are_float32_whatever_x_is(name: str, t: int, device: torch.device) -> None:
    inputs = _inputs(name, t, 50, 96, ("norm",), device, torch.bfloat16)
    logits = lm_head_triton(inputs["x"], inputs["weight"], inputs["norm_weight"], EPS)
    assert logits.dtype == torch.float32
    _assert_rounded(logits, inputs, _operands(inputs))


@pytest.mark.parametrize("name", ["fp8", "int4"])
@pytest.mark.parametrize(
    "config",
    [gemv.GemvConfig(1, 1024, 2, 1), gemv.GemvConfig(8, 128, 6, 2), gemv.GemvConfig(2, 2048, 2, 3, share=True)],
    ids=str,
)
def test_every_cut_of_a_gemv_gives_the_product(name: str, config: gemv.GemvConfig, device: torch.device) -> None:
    inputs = _inputs(name, 2, 13, 1056, ALL, device, torch.float32)
    _assert_close(linear_triton(**inputs, config=config), _expected(inputs), EXACT)


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 3e4])
def test_narrow_products_keep_to_a_thousandth_whatever_the_range_of_x(
    name: str, scale: float, device: torch.device
) -> None:
    """x with outliers a hundred times its size, as residual streams have; a row of zeros; more chunks than a chain."""
    inputs = _inputs(name, 2, 8, 1184, (), device, torch.float32)
    inputs["x"][0, 5::300] *= 100
    inputs["x"][1] = 0
    inputs["x"] = (inputs["x"] * scale).bfloat16()
    out = torch.full((2, 8), torch.nan, device=device)
    config = gemv.GemvConfig(8, 128, 1, 2, share=True)
    gemv.gemv(inputs["x"], inputs["weight"], None, None, 0.0, None, False, out, config)
    _assert_close(out[:1], _expected(inputs)[:1], 1e-3)
    assert torch.equal(out[1], torch.zeros(8, device=device))


@pytest.mark.parametrize(("name", "parts"), [("fp8", ALL), ("int4", ("residual",))])
def test_split_products_are_added_up_and_can_be_repeated(
    name: str, parts: tuple[str, ...], device: torch.device
) -> None:
    """Twice: the first product must leave the counters as it found them."""
    config = gemm.DotConfig(16, 16, 32, 3, 4, 2)
    for t in (3, 18):
        inputs = _inputs(name, t, 20, 136, parts, device, torch.float32)
        _assert_close(linear_triton(**inputs, config=config), _expected(inputs), EXACT)


def test_rows_of_a_larger_tensor_and_no_rows_at_all(device: torch.device) -> None:
    inputs = _inputs("fp8", 2, 20, 64, (), device, torch.float32)
    expected = _expected(inputs)
    wide = torch.full((2, 100), torch.nan, device=device)
    wide[:, :64] = inputs["x"]
    _assert_close(linear_triton(wide[:, :64], inputs["weight"]), expected, EXACT)
    assert linear_triton(wide[:0, :64], inputs["weight"]).shape == (0, 20)


def test_float32_weights_take_the_plain_product(device: torch.device) -> None:
    inputs = _inputs("fp32", 3, 20, 72, ALL, device, torch.float32)
    _assert_close(linear_triton(**inputs), _expected(inputs), EXACT)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [4, 16, 64])
def test_a_row_alone_equals_the_row_in_a_batch(name: str, rows: int, device: torch.device) -> None:
    """Within one kernel and configuration, to the last bit."""
    inputs = _inputs(name, rows, 256, 2560, ("norm", "residual"), device, torch.bfloat16)
    config: Any = gemv.GemvConfig(4, 512, 2, 2) if rows <= gemv.MAX_ROWS else gemm.DotConfig(64, 64, 64, 2, 4, 3)
    together = linear_triton(**inputs, config=config)
    for t in range(rows if rows <= gemm.FUSED_NORM_ROWS else 0):
        one = {k: v[t : t + 1] if k in ("x", "residual") else v for k, v in inputs.items()}
        assert torch.equal(linear_triton(**one, config=config)[0], together[t])
    assert torch.equal(linear_triton(**inputs, config=config), together)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*FORMATS, *VARIANTS])
@pytest.mark.parametrize(
    ("t", "n", "k"), [(1, 5120, 2560), (4, 2560, 9728), (8, 2560, 4096), (100, 960, 576), (300, 960, 576)]
)
def test_reference_shapes(name: str, t: int, n: int, k: int, device: torch.device) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        inputs = _inputs(name, t, n, k, ("norm", "residual"), device, dtype)
        if dtype == torch.float32:
            _assert_close(linear_triton(**inputs), _expected(inputs), EXACT)
        else:
            _assert_rounded(linear_triton(**inputs), inputs, _operands(inputs))


_COMPILE = """
import json, re
from strata_lab.kernels.gpu import aot, linear
wanted = {"fp8-qkv-moe-1", "fp8-down-64", "int8-down-1", "int4-gate-up-1", "int4-odd-1", "bf16-down-64"}
launches = []
for name, call in linear.aot_cases():
    if name in wanted:
        with aot.caught(launches):
            call()
reports, runs = [], []
for launch in launches:
    report = aot.report(launch.kernel.__name__, launch, 89)
    reports.append([report.case, report.spilled_bytes, report.shared_bytes <= aot.MAX_SHARED_BYTES])
    text = aot.compiled(launch, 89).asm["ttgir"]
    per_thread = dict(re.findall(r"(#\\w+) = #ttg.blocked<.sizePerThread = \\[1, (\\d+)\\]", text))
    for line in text.splitlines():
        if "dp4a" in line:
            runs.append(int(per_thread[re.findall(r"xi8, (#\\w+)>", line)[0]]))
print(json.dumps([reports, runs]))
"""


@pytest.mark.host  # compiles for a card that need not be there
@pytest.mark.slow
def test_kernels_compile_for_a_card_that_is_not_there_without_spills_and_with_words_of_a_row_kept_whole() -> None:
    """The integer dot products take four columns in a row for a word: so the compiler must have laid them out."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", _COMPILE]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    reports, runs = json.loads(run.stdout)
    assert {case for case, *_ in reports} == {"gemv_kernel", "gemv_int_kernel", "codes_kernel", "dot_kernel"}
    assert all(spilled == 0 and fits for _, spilled, fits in reports), reports
    assert runs
    assert all(columns % 4 == 0 for columns in runs), runs


@pytest.mark.parametrize("name", ["int8", "int4", "int4g64", "int4g128", "int4g128-min"])
@pytest.mark.parametrize("config", [gemv_int.IntConfig(4, 256, 2, 1), gemv_int.IntConfig(1, 512, 4, 3)])
def test_every_cut_of_an_integer_gemv_gives_the_product(
    name: str, config: gemv_int.IntConfig, device: torch.device
) -> None:
    for parts, k in ((("norm", "gate"), 288), (("bias", "residual"), 672)):
        inputs = _inputs(name, 1, 22, k, parts, device, torch.float16)
        _assert_rounded(linear_triton(**inputs, config=config), inputs, 0)

"""Products on tensor cores from registers: asm executed by hand, the kernel around it, every row count on a card."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from strata_lab.bench.linear_candidates import exact_weight, random_weight
from strata_lab.kernels.gpu import gemv, gemv_mma, gemv_mma_config, mma_asm
from strata_lab.kernels.gpu.linear import Config, linear_triton, lm_head_triton
from strata_lab.kernels.linear import linear_ref
from tests.kernels import ptx_warp
from tests.kernels.ptx_warp import LANES, G, Q, execute, halves, words_of
from tests.kernels.test_gpu_linear import EXACT, FORMATS, NARROW, ROUNDING, SIGMAS, _assert_rounded, _inputs, _operands
from tests.kernels.weight_variants import VARIANTS

ALL = ("bias", "norm", "residual", "gate")
ZERO_FLOATS = torch.zeros(LANES, dtype=torch.float64)


def _tile(rows: Tensor) -> list[Tensor]:
    """[8, 16] words as a warp loads them: four registers."""
    return [rows[G, 4 * Q + i] for i in range(4)]


def _words(raw: Tensor) -> Tensor:
    """Bytes [..., 4 n] -> little-endian words."""
    quads = raw.long().unflatten(-1, (-1, 4))
    return quads[..., 0] | quads[..., 1] << 8 | quads[..., 2] << 16 | quads[..., 3] << 24


def _unpacked(name: str, half: bool, zero: int, words: list[Tensor]) -> list[Tensor]:
    """Registers of the tiles that `codes_as_pairs` makes of one tile, tile by tile."""
    if name == "bf16":
        return words
    outs = 4 if name == "int4" else 2
    results = [execute(mma_asm._unpack(name, half, zero), {outs: word}) for word in words]
    return [result[i] for i in range(outs) for result in results]


def _numbers(name: str, raw: Tensor, zero: int) -> Tensor:
    """What bytes [16, 64] stand for, in the order of the columns, float64."""
    if name == "bf16":
        return raw.view(torch.bfloat16).double()
    if name == "fp8":
        return raw.view(torch.float8_e4m3fn).double()
    if name == "int8":
        return raw.view(torch.int8).double()
    blocks = raw.long().unflatten(1, (4, 16))
    return torch.cat([blocks & 15, blocks >> 4], dim=2).flatten(1).double() - zero


@pytest.mark.parametrize("has_high", [False, True])
@pytest.mark.parametrize(
    ("name", "half", "zero"),
    [("bf16", False, 0), *((n, h, 0) for n in ("fp8", "int8", "int4") for h in (False, True)), ("int4", False, 8),
     ("int4", True, 8)],
)  # fmt: skip
def test_asm_multiplies_what_lanes_hold_for_the_columns_they_hold(
    name: str, half: bool, zero: int, has_high: bool
) -> None:
    """Every code of every format, through the instructions as the PTX ISA defines them."""
    raw = torch.randperm(1024).to(torch.uint8).view(16, 64)  # every byte four times
    if name == "fp8":
        raw[(raw & 0x7F) == 0x7F] = 0  # not a number
    if name == "bf16":
        raw = torch.randn(16, 32).bfloat16().view(torch.uint8)
    cols = {"bf16": 32, "int4": 128}.get(name, 64)
    lane, tiles = cols // 4, cols // 32
    x = words_of(torch.randn(8, cols // 2, 2), half)
    loaded = [[x[G, Q * (lane // 2) + 4 * i + j] for j in range(4)] for i in range(tiles)]
    if name == "bf16":
        xs = loaded[0]
    else:
        xs = []
        for i in range(0, tiles, 2):
            given = dict(enumerate([ZERO_FLOATS.long()] * 8 + loaded[i] + loaded[i + 1]))
            done = execute(mma_asm._paired(), given)
            xs += [done[j] for j in range(8)]
    words = _words(raw)
    low = _unpacked(name, half, zero, _tile(words[:8]))
    high = _unpacked(name, half, zero, _tile(words[8:])) if has_high else []
    operands = [ZERO_FLOATS] * 4 + low + high + xs + [torch.full_like(ZERO_FLOATS, float(i)) for i in range(4)]
    done = execute(mma_asm._chain(tiles // 2, half, has_high), dict(enumerate(operands)))
    expected = _numbers(name, raw, zero) @ halves(x, half).flatten(1).T
    if not has_high:
        expected[8:] = 0
    for i in range(4):
        assert torch.allclose(done[i], expected[G + 8 * (i // 2), 2 * Q + i % 2] + i, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("half", [False, True])
def test_asm_of_sums_and_squares(half: bool) -> None:
    x = words_of(torch.randn(8, 32, 2), half)
    tiles = [x[G, Q * 8 + i] for i in range(8)]
    values = halves(x, half).flatten(1)
    operands = dict(enumerate([ZERO_FLOATS] * 4 + tiles + [ZERO_FLOATS] * 4))
    sums = execute(mma_asm._self_chain(2, half, ones=True), operands)
    squares = execute(mma_asm._self_chain(2, half, ones=False), operands)
    gram = values @ values.T
    for i in range(4):
        assert torch.allclose(sums[i], values.sum(dim=1)[2 * Q + i % 2])
        assert torch.allclose(squares[i], gram[G, 2 * Q + i % 2] if i < 2 else ZERO_FLOATS)


def test_the_hand_made_warp_rounds_and_permutes_as_the_isa_says() -> None:
    ones = torch.ones(LANES, dtype=torch.int64)
    run = execute("prmt.b32 $0, $1, $2, 0x7632;", {1: ones * 0x44332211, 2: ones * 0x88776655})
    assert int(run[0][0]) == 0x88774433
    one, tiny = 0x3F80, 0x3B80  # 1 and 2^-8, half a unit in the last place of 1
    run = execute("fma.rn.bf16x2 $0, $1, $2, $3;", {1: ones * one, 2: ones * one, 3: ones * (tiny | tiny << 16)})
    assert ptx_warp.halves(run[0], False)[0].tolist() == [1.0, 2**-8]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("t", "n", "k", "parts", "config"),
    [
        (1, 20, 96, ("norm", "bias"), gemv_mma_config.MmaConfig(1, 1, 1)),
        (3, 21, 160, ALL, gemv_mma_config.MmaConfig(2, 2, 1, ahead=1)),
        (9, 17, 192, ("residual",), gemv_mma_config.MmaConfig(4, 2, 2)),
        (11, 13, 320, ("norm", "gate"), gemv_mma_config.MmaConfig(4, 2, 2, block=8)),
        (16, 9, 288, ("norm",), gemv_mma_config.MmaConfig(2, 2, 8, ahead=4)),
    ],
)
def test_every_cut_gives_the_product(
    name: str, dtype: torch.dtype, t: int, n: int, k: int, parts: tuple[str, ...], config: Any, device: torch.device
) -> None:
    """Rounded is only x times the norm's weight: without a norm the result is that of float32."""
    inputs = _inputs(name, t, n, k, parts, device, dtype)
    if name == "bf16" and dtype == torch.float16:
        assert not gemv_mma_config.supports(inputs["x"], inputs["weight"], inputs.get("norm_weight"))
        return
    out = torch.full((t, n), torch.nan, device=device)
    arguments = [inputs.get(key) for key in ("x", "weight", "bias", "norm_weight")]
    gemv_mma.gemv_mma(*arguments, EPS, inputs.get("residual"), inputs["silu_mul"], out, config)  # type: ignore[arg-type]
    inputs |= {"norm_eps": EPS}
    if "norm" in parts:
        _assert_rounded(out, inputs, operands=1)
    else:
        double = {key: v.double() if isinstance(v, Tensor) else v for key, v in inputs.items()}
        expected = linear_ref(**double | {"weight": exact_weight(inputs["weight"])})
        error = (out.double() - expected).abs().amax(dim=1) / expected.abs().amax(dim=1)
        assert bool((error <= EXACT).all()), error


@pytest.mark.parametrize("name", ["int4g32", "int4g64", "int4g128", "int4g64-min", "int4g128-min", "int8row"])
@pytest.mark.parametrize(
    ("t", "n", "k", "parts", "config"),
    [
        (2, 20, 96, ("norm", "bias"), gemv_mma_config.MmaConfig(2, 1, 1)),
        (9, 17, 160, ("residual", "gate"), gemv_mma_config.MmaConfig(4, 2, 2, block=8)),
    ],
)
def test_groups_of_every_size_give_the_product(
    name: str, t: int, n: int, k: int, parts: tuple[str, ...], config: Any, device: torch.device
) -> None:
    inputs = _inputs(name, t, n, k, parts, device, torch.bfloat16)
    assert gemv_mma_config.supports(inputs["x"], inputs["weight"], inputs.get("norm_weight"))
    _assert_rounded(linear_triton(**inputs, config=config), inputs, operands=int("norm" in parts))


def test_fp8_in_groups_is_left_to_others(device: torch.device) -> None:
    inputs = _inputs("fp8g128", 2, 8, 128, (), device, torch.bfloat16)
    assert not gemv_mma_config.supports(inputs["x"], inputs["weight"], None)


EPS = 1e-5
GROUP_128: list[tuple[int, torch.dtype, Config | None]] = [
    (1, torch.bfloat16, None),
    (1, torch.bfloat16, gemv.GemvConfig(8, 256, 2, 2)),
    (1, torch.bfloat16, gemv_mma_config.MmaConfig(2, 2, 2)),
    (2, torch.float32, None),
    (12, torch.bfloat16, None),
    (20, torch.bfloat16, None),
]


@pytest.mark.parametrize(("t", "dtype", "config"), GROUP_128)
def test_int4_without_minima_has_codes_about_eight(
    t: int, dtype: torch.dtype, config: Config | None, device: torch.device
) -> None:
    weight = random_weight("int4g128", 24, 384, device)
    x = torch.randn(t, 384, device=device).to(dtype)
    result = linear_triton(x, weight, config=config)
    w = exact_weight(weight).data.double()
    expected = x.double() @ w.T
    bound = (EXACT if dtype == torch.float32 else NARROW) * expected.abs().amax(dim=1, keepdim=True)
    if dtype != torch.float32:
        bound = bound + 2 * ROUNDING[dtype] * expected.abs()
        bound += SIGMAS * ROUNDING[dtype] * (x.double().square() @ w.T.square()).sqrt() if t > 16 else 0.0
    assert bool(((result.double() - expected).abs() <= bound).all())


def test_what_is_not_aligned_takes_another_path(device: torch.device) -> None:
    """Loads of 16 bytes are what the asm relies on."""
    inputs = _inputs("fp8", 2, 8, 64, (), device, torch.bfloat16)
    assert gemv_mma_config.supports(inputs["x"], inputs["weight"], None)
    shifted = torch.empty(2 * 64 + 1, dtype=torch.bfloat16, device=device)[1:].view(2, 64)
    assert not gemv_mma_config.supports(shifted.copy_(inputs["x"]), inputs["weight"], None)
    assert torch.isfinite(linear_triton(shifted, inputs["weight"])).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*FORMATS, *VARIANTS])
@pytest.mark.parametrize(
    ("n", "k", "parts"),
    [
        (5120, 2560, ("norm",)),
        (1000, 2560, ("norm", "gate")),
        (2560, 9728, ("residual",)),
        (100, 576, ALL),
        (33, 72, ALL),
    ],
)
def test_every_default_for_every_number_of_rows(
    name: str, n: int, k: int, parts: tuple[str, ...], device: torch.device
) -> None:
    for dtype in (torch.bfloat16, torch.float16) if k == 576 else (torch.bfloat16,):
        for t in range(1, 18):
            inputs = _inputs(name, t, n, k, parts, device, dtype)
            _assert_rounded(linear_triton(**inputs), inputs, _operands(inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("t", [1, 8, 11, 17])
def test_heads_of_every_default(name: str, t: int, device: torch.device) -> None:
    inputs = _inputs(name, t, 40000, 2560, ("norm",), device, torch.bfloat16)
    logits = lm_head_triton(inputs["x"], inputs["weight"], inputs["norm_weight"], EPS)
    _assert_rounded(logits, inputs, _operands(inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_alone_equals_the_row_among_sixteen(name: str, device: torch.device) -> None:
    inputs = _inputs(name, 16, 256, 2560, ("norm", "residual"), device, torch.bfloat16)
    together = linear_triton(**inputs)
    for t in range(16):
        one = {k: v[t : t + 1] if k in ("x", "residual") else v for k, v in inputs.items()}
        config = gemv_mma_config.default_config(inputs["weight"], 16)
        assert torch.equal(linear_triton(**one, config=config)[0], together[t])
    assert torch.equal(linear_triton(**inputs), together)


_COMPILE = """
import json, re
from strata_lab.kernels.gpu import aot, linear
launches = []
for name, call in linear.aot_cases():
    if name in {"fp8-qkv-moe-4", "int8-gate-up-16", "int4-down-4", "bf16-o-16", "fp8-smollm-gate-up-4"}:
        with aot.caught(launches):
            call()
found = []
for launch in launches:
    report = aot.report(launch.kernel.__name__, launch, 90)
    text = aot.compiled(launch, 90).asm["ttgir"]
    layouts = dict(re.findall(r"^(#\\w+) = #ttg.blocked<{(.*)}>", text, re.M))
    lines = [line for line in text.splitlines() if "elementwise_inline_asm" in line]
    used = {layouts.get(name, name) for line in lines for name in re.findall(r"tensor<[^>]*, ([^>]*)>", line)}
    found.append([report.case, report.spilled_bytes, sum("mma.sync" in line for line in lines), sorted(used)])
print(json.dumps(found))
"""


@pytest.mark.host  # compiles for a card that need not be there
@pytest.mark.slow
def test_lanes_hold_what_the_asm_relies_on() -> None:
    """Of every tile that meets asm: eight rows by four lanes to a warp, four words a thread; and nothing spills."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", _COMPILE]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    found = json.loads(run.stdout)
    assert len(found) == 5
    for kernel, spilled, products, layouts in found:
        assert kernel == "gemv_mma_kernel"
        assert spilled == 0, found
        assert products > 0
        assert all(re.fullmatch(mma_asm.LAYOUT, layout) for layout in layouts), layouts

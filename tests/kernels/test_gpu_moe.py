"""Mixture of experts in Triton: routing, experts and the fused layer half, against float64 compositions."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from strata_lab.expert_counts import Tally
from strata_lab.kernels.gpu import launch, meta, moe, moe_config, moe_half, moe_half_int4, moe_half_int8, moe_step
from strata_lab.kernels.gpu.moe import moe_block_triton, moe_mlp_triton, router_topk_triton
from strata_lab.quant import get_format
from strata_lab.quant.base import LinearWeight
from tests.kernels import ptx_warp
from tests.kernels.weight_variants import VARIANTS, exact, make

FORMATS = ("fp8", "bf16", "int8", "int4")
EXPERTS, TOP_K, EPS = 8, 2, 1e-6
WIDE: dict[str, Any] = {
    "gate_tiles": 1, "gate_warps": 32, "shared_tiles": 1, "shared_warps": 32, "down_tiles": 1, "down_warps": 32,
    "one_rows": 8,
}  # fmt: skip
TUNED = dict(moe.CONFIGS)  # what a card runs
# Of the largest element of the row, with float32 activations: nothing is rounded below float32. On tensor cores an
# activation is the sum of three bfloat16 numbers, which is exact (3 x 8 bits), and so is its product with a code; two
# would leave 2^-18 of it, which K products, silu and a second product with cancellation make 1e-5 of a row and more.
RELATIVE = 1e-5
# float16 activations, products in float16: the norm and h are rounded once each (2^-12), products of four are added in
# float16 (2^-12 of a sum, twice: gate and up, and down), the result is rounded (2^-12). Independent and over K columns
# they add up to about 2^-11 of a typical element, and twice that of a row's largest is never seen.
HALF_RELATIVE = 2**-9


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 32 rows in the interpreter, where a program costs milliseconds however little it does."""
    if launch.INTERPRETED:
        wide = {name: dataclasses.replace(c, **WIDE) for name, c in moe.CONFIGS.items()}
        monkeypatch.setattr(moe, "CONFIGS", wide)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a kernel forgets to write, or reads unwritten, shows."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(t: Tensor) -> Tensor:
        return t.fill_(float("nan") if t.is_floating_point() else 1 << 24) if t.element_size() > 1 else t

    monkeypatch.setattr(moe_step.torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(moe_step.torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))


def _weights(name: str, hidden: int, width: int, device: torch.device, experts: int = EXPERTS) -> dict[str, Any]:

    def quantized(n: int, k: int) -> LinearWeight:
        if name in VARIANTS:
            return make(name, n, k, device)
        return get_format(name).quantize(torch.randn(n, k) / k**0.5).to(device)

    return {
        "norm_weight": (1 + 0.1 * torch.randn(hidden)).to(device),
        "router": (2 * torch.randn(experts, hidden) / hidden**0.5).to(device),
        "gate_up": quantized(experts * 2 * width, hidden),
        "down": quantized(experts * hidden, width),
    }


def _exact_route(x: Tensor, router: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """float64; a stable sort gives ties to the lower expert."""
    probs = torch.softmax(x.double() @ router.double().t(), dim=-1)
    ids = torch.sort(probs, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = probs.gather(1, ids)
    return (weights / weights.sum(dim=-1, keepdim=True) if normalize else weights), ids


def _exact_experts(x: Tensor, gate_up: LinearWeight, down: LinearWeight, weights: Tensor, ids: Tensor) -> Tensor:
    hidden, width = x.shape[1], down.shape[1]
    wide = exact(gate_up).view(-1, 2 * width, hidden)
    narrow = exact(down).view(-1, hidden, width)
    gate, up = torch.einsum("tknh,th->tkn", wide[ids], x.double()).chunk(2, dim=-1)
    y = torch.einsum("tkhw,tkw->tkh", narrow[ids], torch.nn.functional.silu(gate) * up)
    return (y * weights.double()[..., None]).sum(dim=1)


def _exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPS) * weight.double()


def _exact_block(x: Tensor, w: dict[str, Any], top_k: int = TOP_K, normalize: bool = True) -> Tensor:
    h = _exact_norm(x, w["norm_weight"])
    return x.double() + _exact_experts(h, w["gate_up"], w["down"], *_exact_route(h, w["router"], top_k, normalize))


def _block(x: Tensor, w: dict[str, Any], top_k: int = TOP_K, normalize: bool = True, **rest: Any) -> Tensor:
    return moe_block_triton(
        x, w["norm_weight"], EPS, w["router"], w["gate_up"], w["down"], top_k=top_k, normalize=normalize, **rest
    )


def _assert_close(actual: Tensor, exact: Tensor, relative: float = RELATIVE) -> None:
    assert actual.isfinite().all()
    error = (actual.double() - exact).abs().amax(dim=-1)
    assert (error <= relative * exact.abs().amax(dim=-1)).all(), (error / exact.abs().amax(dim=-1)).max()


@pytest.mark.parametrize("tokens", [1, 2, 16, 17])
def test_the_block_of_fp8_experts_is_the_composition_at_every_batch_size(tokens: int, device: torch.device) -> None:
    w = _weights("fp8", 32, 16, device)
    x = torch.randn(tokens, 32, device=device)
    _assert_close(_block(x, w), _exact_block(x, w))


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
@pytest.mark.parametrize(("tokens", "hidden", "width"), [(1, 48, 40), (2, 36, 16), (17, 48, 40)])
def test_the_block_of_every_format_is_the_composition_at_odd_widths(
    name: str, tokens: int, hidden: int, width: int, device: torch.device
) -> None:
    w = _weights(name, hidden, width, device)
    x = torch.randn(tokens, hidden, device=device)
    _assert_close(_block(x, w), _exact_block(x, w))


@pytest.mark.parametrize(("name", "tokens"), [("fp8", 1), ("fp8", 2), ("bf16", 1), ("int8", 1), ("int4", 1)])
def test_the_tiles_that_a_card_runs(name: str, tokens: int, device: torch.device) -> None:
    w = _weights(name, 20, 18, device)
    x = torch.randn(tokens, 20, device=device)
    _assert_close(_block(x, w, config=TUNED[moe_config.config_name(w["gate_up"])]), _exact_block(x, w))


@pytest.mark.parametrize(
    ("name", "tokens", "hidden", "width"),
    [
        ("int4g128", 1, 140, 130),  # ragged groups of both products
        ("int4g128", 2, 160, 40),
        ("int4g128", 17, 150, 40),
        ("int4g64", 1, 100, 40),
        ("int4g64", 17, 100, 40),
        ("int4g32", 2, 50, 40),
        ("int4g128-min", 1, 150, 40),
        ("int4g64-min", 2, 100, 70),
        ("int4g128-min", 17, 150, 40),
        ("int8row", 1, 50, 21),
        ("int8row", 2, 50, 21),
        ("int8row", 17, 50, 21),
        ("fp8g128", 1, 150, 40),
        ("fp8g128", 2, 140, 130),
        ("fp8g128", 17, 150, 40),
    ],
)
def test_groups_of_every_size_and_scales_of_rows(
    name: str, tokens: int, hidden: int, width: int, device: torch.device
) -> None:
    w = _weights(name, hidden, width, device)
    x = torch.randn(tokens, hidden, device=device)
    _assert_close(_block(x, w), _exact_block(x, w))


@pytest.mark.parametrize(("name", "tokens"), [("int4g128", 1), ("fp8g128", 1), ("fp8g128", 2), ("int8row", 2)])
def test_groups_in_the_tiles_that_a_card_runs(name: str, tokens: int, device: torch.device) -> None:
    w = _weights(name, 140, 18, device)
    x = torch.randn(tokens, 140, device=device)
    _assert_close(_block(x, w, config=TUNED[moe_config.config_name(w["gate_up"])]), _exact_block(x, w))


@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_sizes_that_divide_nothing(tokens: int, device: torch.device) -> None:
    w = _weights("fp8", 50, 21, device, experts=5)
    x = torch.randn(tokens, 50, device=device)
    _assert_close(_block(x, w, top_k=3), _exact_block(x, w, top_k=3))


@pytest.mark.parametrize("name", ["fp8", "int4"])
@pytest.mark.parametrize("tokens", [1, 3, 33])
def test_experts_of_given_ids(name: str, tokens: int, device: torch.device) -> None:
    w = _weights(name, 32, 16, device)
    x = torch.randn(tokens, 32, device=device)
    weights = torch.rand(tokens, 3, device=device)
    ids = torch.stack([torch.randperm(EXPERTS)[:3] for _ in range(tokens)]).to(device)
    y = moe_mlp_triton(x, w["gate_up"], w["down"], weights, ids)
    _assert_close(y, _exact_experts(x, w["gate_up"], w["down"], weights, ids))


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "normalize"),
    [(1, 64, 8, True), (1, 8, 2, False), (5, 13, 5, False), (17, 64, 8, True), (40, 13, 5, False)],
)
def test_router_weights_and_experts(
    tokens: int, experts: int, top_k: int, normalize: bool, device: torch.device
) -> None:
    x, router = torch.randn(tokens, 40, device=device), torch.randn(experts, 40, device=device)
    weights, ids = router_topk_triton(x, router, top_k, normalize)
    exact_weights, exact_ids = _exact_route(x, router, top_k, normalize)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int64)
    assert torch.equal(ids, exact_ids)
    torch.testing.assert_close(weights.double(), exact_weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 4, 19])
def test_equal_logits_go_to_the_lower_expert(tokens: int, device: torch.device) -> None:
    x = torch.randint(-3, 4, (tokens, 32), device=device).float()
    router = torch.randint(-3, 4, (4, 32), device=device).float().repeat(3, 1)  # experts e, e + 4 and e + 8 are equal
    _, ids = router_topk_triton(x, router, 5, True)
    assert torch.equal(ids, _exact_route(x, router, 5, True)[1])
    _, ids = router_topk_triton(x, torch.zeros_like(router), 5, True)
    assert torch.equal(ids, torch.arange(5, device=device).expand(tokens, 5))


@pytest.mark.parametrize("tokens", [1, 5, 19])
def test_choices_are_counted_as_they_are_made_and_padding_is_not(tokens: int, device: torch.device) -> None:
    logits = torch.randint(-3, 4, (tokens, 13), device=device).float()
    slots = torch.arange(tokens, device=device) * torch.where(torch.arange(tokens, device=device) % 3 == 2, -1, 1)
    counts = torch.full((13,), 7, device=device)
    moe_step.count_choices(logits, slots, counts, 5)
    weights, ids = moe_step.empty_routing(logits, 5, torch.int64)
    moe_step.select(logits, weights, ids, True)
    assert torch.equal(counts, 7 + torch.bincount(ids[slots >= 0].flatten(), minlength=13))


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_block_tells_its_choices_to_whoever_counts(tokens: int, device: torch.device) -> None:
    w, x, tally = _weights("fp8", 32, 16, device), torch.randn(tokens, 32, device=device), Tally()
    whole = {"dtype": torch.int64, "device": device}
    tally.row, tally.slots = torch.zeros(EXPERTS, **whole), torch.zeros(tokens, **whole)
    assert torch.equal(_block(x, w, tally=tally), _block(x, w))
    h = torch.nn.functional.rms_norm(x, (32,), w["norm_weight"], EPS)
    ids = _exact_route(h, w["router"], TOP_K, True)[1]
    assert torch.equal(tally.row, torch.bincount(ids.flatten(), minlength=EXPERTS))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("tokens", [1, 2, 19])
def test_a_token_of_nan_is_nan_and_harms_no_other(tokens: int, device: torch.device) -> None:
    w = _weights("fp8", 32, 16, device)
    x = torch.randn(tokens, 32, device=device)
    x[0] = float("nan")
    y = _block(x, w)
    assert y[0].isnan().all()
    if tokens > 1:
        _assert_close(y[1:], _exact_block(x[1:], w))


@pytest.mark.parametrize("tokens", [7, 40])
def test_all_tokens_may_choose_the_same_experts(tokens: int, device: torch.device) -> None:
    w = _weights("fp8", 32, 16, device)
    x = torch.randn(1, 32, device=device) + 1e-4 * torch.randn(tokens, 32, device=device)
    assert _exact_route(_exact_norm(x, w["norm_weight"]), w["router"], TOP_K, True)[1].unique().numel() == TOP_K
    _assert_close(_block(x, w), _exact_block(x, w))


@pytest.mark.parametrize("tokens", [1, 3])
def test_weights_that_are_not_normalized(tokens: int, device: torch.device) -> None:
    w = _weights("fp8", 32, 16, device)
    x = torch.randn(tokens, 32, device=device)
    _assert_close(_block(x, w, normalize=False), _exact_block(x, w, normalize=False))


@pytest.mark.parametrize("tokens", [1, 3])
def test_calls_repeat_bit_for_bit(tokens: int, device: torch.device) -> None:
    w = _weights("int8", 32, 16, device)
    x = torch.randn(tokens, 32, device=device)
    assert torch.equal(_block(x, w), _block(x, w))


def test_a_token_computes_the_same_alone_as_among_others_without_the_fused_down(device: torch.device) -> None:
    w = _weights("fp8", 32, 16, device)
    config = dataclasses.replace(moe.CONFIGS["fp8"], fuse_down=False)
    x = torch.randn(2, 32, device=device)
    together = _block(x, w, config=config)
    assert torch.equal(together, torch.cat([_block(row[None], w, config=config) for row in x]))


@pytest.mark.parametrize("tokens", [2, 18])
def test_strided_rows_are_read_in_place(tokens: int, device: torch.device) -> None:
    w = _weights("fp8", 32, 16, device)
    wide = torch.full((tokens, 96), float("nan"), device=device)
    wide[:, 32:64] = torch.randn(tokens, 32, device=device)
    x = wide[:, 32:64]
    _assert_close(_block(x, w), _exact_block(x, w))


@pytest.mark.parametrize("tokens", [2, 20])
def test_narrow_activations_keep_their_dtype(tokens: int, device: torch.device) -> None:
    w = _weights("fp8", 32, 16, device)
    for dtype, relative in ((torch.float16, 4e-3), (torch.bfloat16, 4e-2)):
        # a router that is far from a tie: rounding x must not change the experts
        router = torch.zeros(EXPERTS, 32)
        router[torch.arange(EXPERTS), torch.arange(EXPERTS)] = 4.0
        x = torch.randn(tokens, 32)
        x[:, :EXPERTS] = torch.stack([torch.randperm(EXPERTS) for _ in range(tokens)]).float() - 3.5
        narrow = w | {"router": router.to(device, dtype), "norm_weight": torch.ones(32, dtype=dtype, device=device)}
        y = _block(x.to(device, dtype), narrow)
        assert y.dtype == dtype
        _assert_close(y, _exact_block(x.to(device, dtype), narrow), relative)


def _clear_of_ties(tokens: int, hidden: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """float16 tokens and a router that agree on the experts however they are rounded."""
    router = torch.zeros(EXPERTS, hidden)
    router[torch.arange(EXPERTS), torch.arange(EXPERTS)] = 4.0
    x = torch.randn(tokens, hidden)
    x[:, :EXPERTS] = torch.stack([torch.randperm(EXPERTS) for _ in range(tokens)]).float() - 3.5
    return x.to(device, torch.float16), router.to(device, torch.float16)


@pytest.mark.parametrize(
    ("name", "tokens", "hidden", "width"),
    [
        ("fp8", 1, 48, 40),
        ("fp8", 1, 50, 21),
        ("fp8", 3, 50, 21),
        ("fp8g128", 1, 150, 40),
        ("fp8g128", 3, 150, 40),
        ("int4g128", 1, 140, 132),
        ("int4g128", 3, 160, 40),
        ("int4g32", 1, 68, 44),
        ("int8row", 1, 50, 21),
        ("int8row", 3, 50, 21),
        ("int8", 1, 68, 40),
        ("int8", 3, 68, 40),
    ],
)
def test_products_in_float16_round_no_more_than_that(
    name: str, tokens: int, hidden: int, width: int, device: torch.device
) -> None:
    w = _weights(name, hidden, width, device)
    x, w["router"] = _clear_of_ties(tokens, hidden, device)
    w["norm_weight"] = torch.ones(hidden, dtype=torch.float16, device=device)
    y = _block(x, w)
    _assert_close(y, _exact_block(x, w), HALF_RELATIVE)
    late = dataclasses.replace(moe.CONFIGS["fp8"], one_late=False)
    if tokens == 1:
        assert torch.equal(y, _block(x, w, config=late))


def test_float16_products_of_codes_about_eight_are_those_of_the_columns() -> None:
    """The asm, instruction by instruction, on a chunk of 32 columns per lane."""
    raw = torch.randint(0, 256, (ptx_warp.LANES, 4, 4))
    columns = torch.cat([raw & 15, raw >> 4], dim=1).flatten(1).double() - 8  # [lanes, 32]
    x = torch.randn(ptx_warp.LANES, 32).half().double()
    quads = x.unflatten(1, (8, 2, 2)).transpose(2, 3).reshape(ptx_warp.LANES, 16, 2)  # as they are stored
    words = {16 + i: (raw[:, i] << torch.tensor([0, 8, 16, 24])).sum(dim=1) for i in range(4)}
    words |= {20 + i: ptx_warp.words_of(quads[:, i], True) for i in range(16)}
    run = ptx_warp.execute(moe_half_int4._sums(), words)
    got = torch.stack([run[4 * i] for i in range(4)], dim=1)
    expected = (columns * x).unflatten(1, (4, 8))
    assert bool(((got - expected.sum(dim=2)).abs() <= 2**-9 * expected.abs().sum(dim=2)).all())


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_float16_products_of_codes_of_a_byte_are_those_of_the_columns(name: str) -> None:
    """The asm, instruction by instruction, on a chunk of 16 columns per lane."""
    raw = torch.randint(0, 256, (ptx_warp.LANES, 16), dtype=torch.uint8)
    raw[0] = torch.tensor([0, 1, 127, 128, 129, 255, 254, 126] * 2)
    if name == "fp8":
        raw[raw & 127 == 127] = 0  # NaN
    columns = raw.view(torch.int8 if name == "int8" else torch.float8_e4m3fn).double()
    x = torch.randn(ptx_warp.LANES, 16).half().double()
    shifts = torch.tensor([0, 8, 16, 24])
    words = {16 + i: (raw[:, 4 * i : 4 * i + 4].long() << shifts).sum(dim=1) for i in range(4)}
    words |= {20 + i: ptx_warp.words_of(x[:, 2 * i : 2 * i + 2], True) for i in range(8)}
    text = moe_half_int8.INT8_SUMS if name == "int8" else moe_half.FP8_SUMS
    run = ptx_warp.execute(text.value, words)
    got = torch.stack([run[0], run[8]], dim=1)
    expected = (columns * x).unflatten(1, (2, 8))
    assert bool(((got - expected.sum(dim=2)).abs() <= 2**-9 * expected.abs().sum(dim=2)).all())
    one = words | {20 + i: torch.full_like(words[16], 0x3C00 if i == 0 else 0) for i in range(8)}
    assert torch.equal(ptx_warp.execute(text.value, one)[0], columns[:, 0])  # codes themselves are exact


@pytest.mark.parametrize(
    ("name", "halves"),
    [("fp8", True), ("int8", True), ("int8row", True), ("int4g32", True), ("int4", False), ("bf16", False)],
)
def test_experts_take_float16_products_where_their_codes_are_exact_in_it(
    name: str, halves: bool, device: torch.device
) -> None:
    wide, experts = 1024, 4  # rows that fill the tiles of a card
    x, norm = torch.randn(1, wide, device=device), torch.ones(wide, device=device)
    gate_up, down = meta.weight(name, experts * 2 * wide, wide), meta.weight(name, experts * wide, wide)
    for given, expected in ((x.bfloat16(), halves), (x, False)):
        step = moe_step.Step(given, gate_up, down, experts, moe.config_of(gate_up))
        step.norm_logits(norm, EPS, torch.randn(experts, wide, device=device))
        assert (step.x.dtype == torch.float16) == expected
        assert (step.unit is not None) == expected


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("tokens", [1, 2])
def test_hidden_activations_beyond_float16_are_divided_first(tokens: int, device: torch.device) -> None:
    w = _weights("fp8", 48, 40, device)
    x, w["router"] = _clear_of_ties(tokens, 48, device)
    w["norm_weight"] = torch.ones(48, dtype=torch.float16, device=device)
    w["gate_up"] = dataclasses.replace(w["gate_up"], scales=w["gate_up"].scales * 2.0**10)  # h up to 2^22
    w["down"] = dataclasses.replace(w["down"], scales=w["down"].scales * 2.0**-20)
    _assert_close(_block(x, w), _exact_block(x, w), HALF_RELATIVE)


_LAYOUTS = """
import json, re
from strata_lab.kernels.gpu import aot, moe
runs = []
for name, call in moe.aot_cases():
    if re.fullmatch("block-(fp8|int4g128|int8row)-[18]", name):
        launches = []
        with aot.caught(launches):
            call()
        for launch in launches:
            text = aot.compiled(launch, 90).asm["ttgir"]
            layouts = dict(re.findall(r"(#\\w+) = #ttg.blocked<.sizePerThread = \\[([0-9, ]+)\\]", text))
            for line in text.splitlines():
                if "e4m3x2" in line or "0x2c002c00" in line or "0x64646464" in line:
                    (layout,) = set(re.findall(r"x16xf\\w+, (#\\w+)>", line))
                    runs.append([launch.kernel.__name__, layouts[layout]])
print(json.dumps(runs))
"""


@pytest.mark.slow
def test_a_thread_holds_the_sixteen_columns_that_the_assembly_multiplies() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", _LAYOUTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)
    assert {kernel for kernel, _ in runs} == {"expert_kernel", "down_one_kernel"}
    assert {layout for _, layout in runs} == {"1, 1, 16"}


def test_limits_of_registers_hold_only_where_they_were_measured() -> None:
    gate_up, down = meta.weight("fp8", 8 * 1024, 512), meta.weight("fp8", 4 * 512, 1024)
    for x, limit in ((meta.tensor(1, 512), 168), (torch.zeros(1, 512).bfloat16(), None)):
        step = moe_step.Step(x, gate_up, down, 2, TUNED["fp8"])
        assert step._options(4, 168, early=False).get("maxnreg") is None, "float32 products need more"
        step.unit = x[0]
        assert step._options(4, 168, early=False).get("maxnreg") == limit


def test_fp32_weights_take_the_plain_composition(device: torch.device) -> None:
    w = _weights("fp32", 48, 16, device)
    x = torch.randn(3, 48, device=device)
    _assert_close(_block(x, w), _exact_block(x, w))


@pytest.mark.parametrize("tokens", [5, 20])
def test_no_tokens_and_many_pairs_to_an_entry(tokens: int, device: torch.device) -> None:
    w = _weights("fp8", 32, 16, device)
    assert _block(torch.zeros(0, 32, device=device), w).shape == (0, 32)
    x = torch.randn(tokens, 32, device=device)
    config = dataclasses.replace(moe.CONFIGS["fp8"], pairs=4)
    _assert_close(_block(x, w, config=config), _exact_block(x, w))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*FORMATS, *VARIANTS])
@pytest.mark.parametrize("tokens", [1, 2, 8, 16, 64, 512])
def test_the_reference_geometry_on_the_card(name: str, tokens: int, device: torch.device) -> None:
    hidden, width, experts, top_k = 2560, 1024, 16, 8
    w = _weights(name, hidden, width, device, experts)
    x = torch.randn(tokens, hidden, device=device)
    _assert_close(_block(x, w, top_k), _chunked_block(x, w, top_k))
    narrow = w | {k: w[k].bfloat16() for k in ("norm_weight", "router")}
    x = x.bfloat16()
    y = _block(x, narrow, top_k)
    assert torch.equal(y, _block(x, narrow, top_k))
    logits = _exact_norm(x, narrow["norm_weight"]) @ narrow["router"].double().t()
    best = logits.topk(top_k + 1, dim=-1).values
    clear = best[:, -2] - best[:, -1] > 0.05  # rounding the norm to bfloat16 cannot change the experts
    assert clear.any()
    _assert_close(y[clear], _chunked_block(x[clear], narrow, top_k), 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8", "int8row", "int8"])
@pytest.mark.parametrize("tokens", [1, 8, 16])
def test_float16_products_of_the_reference_geometry_are_those_in_float32(
    name: str, tokens: int, device: torch.device
) -> None:
    w = _weights(name, 2560, 1024, device, 16)
    x = torch.randn(tokens, 2560, device=device).half()
    w = w | {k: w[k].half() for k in ("norm_weight", "router")}
    half = moe.config_of(w["gate_up"])
    wide = _block(x, w, 8, config=dataclasses.replace(half, half=False)).double()
    for config in (half, dataclasses.replace(half, one_registers=96, one_late=False, pairs=1, shared_programs=3)):
        _assert_close(_block(x, w, 8, config=config), wide, HALF_RELATIVE)


def _chunked_block(x: Tensor, w: dict[str, Any], top_k: int) -> Tensor:
    """`_exact_block` expert by expert: gathering them all in float64 would need more memory than a card has."""
    h = _exact_norm(x, w["norm_weight"])
    weights, ids = _exact_route(h, w["router"], top_k, True)
    out = x.double()
    width = w["down"].shape[1]
    for e in range(w["router"].shape[0]):
        share = (weights * (ids == e)).sum(dim=-1, keepdim=True)
        wide, narrow = w["gate_up"].rows(e * 2 * width, (e + 1) * 2 * width), w["down"].rows(e * 2560, (e + 1) * 2560)
        gate, up = (h @ exact(wide).t()).chunk(2, dim=-1)
        out = out + share * ((torch.nn.functional.silu(gate) * up) @ exact(narrow).t())
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 40])
def test_a_graph_replays_with_the_routing_of_new_tokens(tokens: int, device: torch.device) -> None:
    w = _weights("fp8", 256, 128, device, 16)
    x = torch.randn(tokens, 256, device=device)
    _block(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = _block(x, w)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        _assert_close(y, _exact_block(x, w))
    assert launch.num_sms(device) > 0

"""The batch-invariant operators: a row's result is the same to the last bit, alone, in slices and among others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from strata_lab.kernels import Ops, bind
from strata_lab.kernels.gpu import launch
from strata_lab.kernels.linear import case_weight, linear_ref
from strata_lab.kernels.paged_attention import paged_attention_ref, paged_inputs
from strata_lab.quant import FORMATS, get_format

ROWS = 21
SLICES = ([1] * ROWS, [2, 5, 14], [17, 4], [ROWS])
FEW_SLICES = ([1, 1, 19], [ROWS])  # a launch takes the interpreter a tenth of a second


@pytest.fixture(scope="module")
def ops() -> Callable[[str], Ops]:
    def made(backend: str, *, invariant: bool = True) -> Ops:
        return bind(backend, invariant=invariant)

    return made


def placed(backend: str, device: torch.device) -> torch.device:
    return device if backend == "triton" else torch.device("cpu")


def same_in_all_slices(run: Callable[[int, int], Tensor], backend: str = "") -> bool:
    """Whether `run(first, stop)` gives the rows first:stop the same bits however 0:ROWS is cut up."""
    results = []
    for counts in FEW_SLICES if backend == "triton" and launch.INTERPRETED else SLICES:
        starts = [sum(counts[:i]) for i in range(len(counts))]
        results.append(torch.cat([run(s, s + n).cpu() for s, n in zip(starts, counts, strict=True)]))
    return all(torch.equal(results[0], other) for other in results[1:])


def blas_tells_rows_apart() -> bool:
    """Whether a row's bits depend on its place in numpy's products, by which the interpreter computes `tl.dot`."""
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(shape, dtype=np.float32) for shape in ((16, 32), (32, 64)))
    return not np.array_equal(np.roll(a @ b, 1, axis=0), np.roll(a, 1, axis=0) @ b)


def linear_inputs(name: str, device: torch.device, backend: str) -> dict[str, Any]:
    k = 160 if backend == "triton" and launch.INTERPRETED else 576
    generator = torch.Generator().manual_seed(5)
    w = torch.randn(64, k, generator=generator) / k**0.5
    weight = case_weight(name, w) if backend == "cpu" else get_format(name).quantize(w.to(device))
    x, norm = torch.randn(ROWS, k, generator=generator), 1 + torch.randn(k, generator=generator) / 8
    residual = torch.randn(ROWS, 32, generator=generator)
    return {"x": x.to(device), "weight": weight, "norm": norm.to(device), "residual": residual.to(device)}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
def test_a_product_gives_each_row_the_same_bits(backend: str, name: str, ops: Any, device: torch.device) -> None:
    parts = linear_inputs(name, placed(backend, device), backend)
    x, weight, norm, residual = (parts[p] for p in ("x", "weight", "norm", "residual"))
    o = ops(backend)

    def product(first: int, stop: int) -> Tensor:
        rows = slice(first, stop)
        return o.linear(
            x[rows], weight, norm_weight=norm, norm_eps=1e-5, residual=residual[rows].contiguous(), silu_mul=True
        )

    assert same_in_all_slices(product, backend)
    if backend != "triton" or name == "fp8":
        assert same_in_all_slices(lambda first, stop: o.lm_head(x[first:stop], weight, norm, 1e-5), backend)


def test_without_the_mode_torch_gives_a_row_other_bits_among_others(ops: Any, device: torch.device) -> None:
    """The inverse: what the mode is for. Plain torch (products, routing) does differ."""
    parts = linear_inputs("fp32", torch.device("cpu"), "reference")
    x, weight = parts["x"], parts["weight"]
    off = ops("reference", invariant=False)
    assert not same_in_all_slices(lambda first, stop: off.linear(x[first:stop], weight))
    router = torch.randn(24, x.shape[1], generator=torch.Generator().manual_seed(6))
    for backend in ("reference", "cpu"):
        off = ops(backend, invariant=False)
        assert not same_in_all_slices(lambda first, stop, o=off: o.router_topk(x[first:stop], router, 3, True)[0])


@pytest.mark.parametrize("backend", ["cpu"])
def test_the_cpu_operators_of_dense_models_need_no_mode(backend: str, ops: Any) -> None:
    """Why the mode has no effect there: it would bind the very same functions."""
    on, off = ops(backend), ops(backend, invariant=False)
    different = {name for name in vars(on) if getattr(on, name) is not getattr(off, name)}
    assert different == {"router_topk", "moe_block"}


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
def test_experts_give_each_row_the_same_bits(backend: str, ops: Any, device: torch.device) -> None:
    place, generator = placed(backend, device), torch.Generator().manual_seed(7)
    hidden, width, experts = 64, 32, 8

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    name = "fp8" if backend == "triton" else "fp32"
    pack = (lambda w: case_weight(name, w)) if backend == "cpu" else (lambda w: get_format(name).quantize(w.to(place)))
    gate_up, down = pack(rand(experts * 2 * width, hidden) / 8), pack(rand(experts * hidden, width) / 8)
    x, norm, router = rand(ROWS, hidden).to(place), rand(hidden).to(place), rand(experts, hidden).to(place)
    o = ops(backend)

    def block(first: int, stop: int) -> Tensor:
        return o.moe_block(x[first:stop], norm, 1e-6, router, gate_up, down, top_k=2, normalize=True)

    assert same_in_all_slices(block, backend)
    assert same_in_all_slices(lambda first, stop: o.router_topk(x[first:stop], router, 2, True)[0], backend)
    weights, ids = o.router_topk(x, router, 2, True)
    assert same_in_all_slices(lambda a, b: o.moe_mlp(x[a:b], gate_up, down, weights[a:b], ids[a:b]), backend)


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
def test_a_query_gets_the_same_bits_in_every_slice_and_batch(backend: str, ops: Any, device: torch.device) -> None:
    """Decoded token by token, as one prompt, sliced, and beside others: what recompute after preemption needs."""
    if backend == "triton" and launch.INTERPRETED and blas_tells_rows_apart():
        pytest.skip("numpy gives a row other bits in another place on this processor; a GPU does not")
    place, total = placed(backend, device), 70
    inputs = paged_inputs([(ROWS, total), (3, 40), (1, 90)], (6, 2, 32), device=place)
    q = inputs["q"]
    attend = ops(backend).paged_attention
    together = attend(**inputs)[:ROWS].cpu()

    def alone(first: int, stop: int) -> Tensor:
        seen = total - ROWS + stop
        blocks = -(-seen // 16)
        own = {
            "q": q[first:stop], "block_tables": inputs["block_tables"][:1, :blocks],
            "seq_lens": torch.tensor([seen], dtype=torch.int32, device=place),
            "cu_seqlens_q": torch.tensor([0, stop - first], dtype=torch.int32, device=place),
            "max_q_len": stop - first,
        }  # fmt: skip
        return attend(**inputs | own)

    assert same_in_all_slices(alone)
    assert torch.equal(torch.cat([alone(t, t + 1).cpu() for t in range(ROWS)]), together)
    expected = paged_attention_ref(**inputs | {"q": q.double()})[:ROWS]
    torch.testing.assert_close(together.double(), expected.cpu(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_the_triton_product_is_right(name: str, ops: Any, device: torch.device) -> None:
    parts = linear_inputs(name, device, "triton")
    actual = ops("triton").linear(parts["x"], parts["weight"], norm_weight=parts["norm"], norm_eps=1e-5)
    wide = linear_ref(parts["x"].double(), parts["weight"], norm_weight=parts["norm"].double(), norm_eps=1e-5)
    torch.testing.assert_close(actual.double(), wide, rtol=1e-4, atol=1e-4)

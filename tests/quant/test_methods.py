"""Laws of the quantizers that look at activations: what they gain, what they must survive, what stays exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strata_lab.quant import awq, get_format, get_grid_format, gptq, granularities, rtn
from strata_lab.quant.base import LinearWeight
from strata_lab.quant.stats import InputStats

VARIANTS = [(name, v) for name in ("fp8", "int8", "int4") for v in granularities(name)]
INT4 = granularities("int4")


def correlated(tokens: int, columns: int, seed: int = 0) -> Tensor:
    """Inputs of low effective rank with a few large columns, as those of transformers are: [tokens, columns]."""
    g = torch.Generator().manual_seed(seed)
    rank = max(2, columns // 8)
    x = torch.randn(tokens, rank, generator=g) @ torch.randn(rank, columns, generator=g)
    x = x + 0.3 * torch.randn(tokens, columns, generator=g)
    sizes = torch.exp(torch.randn(columns, generator=g))
    return x * sizes


def stats_of(x: Tensor) -> InputStats:
    stats = InputStats(x.shape[1], torch.float64)
    stats.add(x)
    return stats


def normal(n: int, k: int, seed: int = 1) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def meaning(weight: LinearWeight) -> Tensor:
    return get_format(weight.format).dequantize(weight)


def output_error(w: Tensor, weight: LinearWeight, x: Tensor) -> float:
    """Mean |x @ (w - q).T|^2 from the inputs themselves, in float64."""
    return ((x.double() @ (w.double() - meaning(weight).double()).T) ** 2).sum(dim=1).mean().item()


# -- statistics -------------------------------------------------------------------------------------------------------


def test_statistics_are_those_of_all_inputs_however_they_are_cut() -> None:
    x = correlated(101, 40)
    stats = InputStats(40, torch.float64)
    for part in (x[:1], x[1:50], x[50:50], x[50:]):
        stats.add(part)
    assert stats.count == 101
    torch.testing.assert_close(stats.gram, x.double().T @ x.double())
    torch.testing.assert_close(stats.mean_abs, x.abs().mean(dim=0))
    torch.testing.assert_close(stats.mean_square, x.square().mean(dim=0))
    w = normal(7, 40)
    weight = get_format("int4").quantize(w)
    assert stats.output_error(meaning(weight) - w) == pytest.approx(output_error(w, weight, x), rel=1e-9)


def test_statistics_of_scaled_inputs_are_the_scaled_statistics() -> None:
    x, scale = correlated(50, 24), torch.exp2(torch.arange(24) % 5 - 2.0)
    ours, expected = stats_of(x).scaled(scale), stats_of(x / scale)
    torch.testing.assert_close(ours.gram, expected.gram)
    torch.testing.assert_close(ours.mean_abs, expected.mean_abs)
    assert ours.count == 50


def test_bad_inputs_are_named_and_not_counted() -> None:
    stats = InputStats(8)
    x = torch.ones(3, 8)
    x[1, 5] = float("nan")
    with pytest.raises(ValueError, match=r"x\[1, 5\]=nan: calibration inputs must be finite"):
        stats.add(x)
    assert stats.count == 0
    assert not stats.gram.any()
    with pytest.raises(ValueError, match=r"inputs of shape \(3, 7\) do not fit; give \[T, 8\]"):
        stats.add(x[:, :7])
    with pytest.raises(ValueError, match="columns=0 must be positive"):
        InputStats(0)


# -- round to nearest -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "granularity"), VARIANTS)
def test_without_clipping_it_is_the_formats_own_rounding(name: str, granularity: str) -> None:
    fmt, w = get_grid_format(name, granularity), normal(9, 150)
    ours = rtn.quantize(w, None, fmt)
    assert all(torch.equal(a, b) for a, b in zip(ours.tensors, fmt.quantize(w).tensors, strict=True))


@pytest.mark.parametrize(("name", "granularity"), [v for v in VARIANTS if v[0] != "fp8"])
@pytest.mark.parametrize("k", [128, 150])
def test_clipping_never_costs_and_helps_int4(name: str, granularity: str, k: int) -> None:
    """The law is about the error it minimizes, sum of h (w - q)^2, group by group; shrink 1 is among the candidates."""
    fmt, w, x = get_grid_format(name, granularity), normal(20, k), correlated(400, k)
    h = x.double().square().mean(dim=0)
    stats = stats_of(x)
    plain, clipped = (
        ((meaning(rtn.quantize(w, stats, fmt, clip=clip)).double() - w) ** 2 * h).sum().item() for clip in (False, True)
    )
    assert clipped <= plain * 1.001  # codes of the plain one are found with the float32 scale
    if name == "int4":
        assert clipped < 0.92 * plain


def test_many_chunks_clip_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fmt, w = get_grid_format("int4", "group64"), normal(50, 150)
    whole = rtn.quantize(w, None, fmt, clip=True)
    monkeypatch.setattr("strata_lab.quant.groups.CHUNK_ELEMENTS", 150 * 7)
    assert all(
        torch.equal(a, b) for a, b in zip(rtn.quantize(w, None, fmt, clip=True).tensors, whole.tensors, strict=True)
    )


# -- GPTQ -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("name", "granularity"), VARIANTS)
@pytest.mark.parametrize("k", [256, 300])
def test_gptq_loses_less_than_half_of_what_rounding_loses(name: str, granularity: str, act_order: bool, k: int) -> None:
    fmt, w, x = get_grid_format(name, granularity), normal(140, k), correlated(2000, k)
    stats = stats_of(x)
    nearest = output_error(w, rtn.quantize(w, stats, fmt, clip=True), x)
    assert output_error(w, gptq.quantize(w, stats, fmt, act_order=act_order), x) < 0.5 * nearest


def test_columns_with_large_inputs_first_is_no_worse() -> None:
    ratios = []
    for seed in range(6):
        fmt, w, x = get_grid_format("int4", "group64"), normal(64, 256, seed), correlated(1500, 256, seed)
        errors = [
            output_error(w, gptq.quantize(w, stats_of(x), fmt, act_order=order, clip=False), x)
            for order in (True, False)
        ]
        ratios.append(errors[0] / errors[1])
    assert sum(ratios) / len(ratios) < 1.0


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("name", "granularity"), VARIANTS)
def test_every_sweep_lowers_the_error(name: str, granularity: str, act_order: bool) -> None:
    """Of the damped inputs, which is what it minimizes: rows of sqrt(damping) are added to X."""
    fmt, w, x = get_grid_format(name, granularity), normal(70, 150), correlated(800, 150)
    d = 0.01 * x.double().square().sum(dim=0).mean()
    damped = torch.cat([x.double(), torch.eye(150) * d.sqrt()])
    weights = [gptq.quantize(w, stats_of(x), fmt, act_order=act_order, sweeps=n) for n in (0, 1, 3)]
    errors = [output_error(w, weight, damped) for weight in weights]
    assert errors[1] < 0.98 * errors[0]
    assert errors[2] <= errors[1] * (1 + 1e-6)
    assert all(torch.equal(a.scales, weights[0].scales) for a in weights if a.scales is not None)


def test_gptq_equals_the_textbook_update() -> None:
    """One column at a time, the inverse of H recomputed for the columns that are left: slow, and without factors."""
    k = 200
    w, x, fmt = normal(5, k).double(), correlated(500, k), get_grid_format("int8", "channel")
    weight = gptq.quantize(w, stats_of(x), fmt, act_order=False, clip=False, sweeps=0)
    h = x.double().T @ x.double()
    h += 0.01 * h.diagonal().mean() * torch.eye(k)
    left = w.clone()
    scale = (w.float().abs().amax(dim=1) / 127).double()
    q = torch.empty_like(w)
    for column in range(k):
        q[:, column] = (left[:, column] / scale).round().clamp(-127, 127) * scale
        inverse = torch.linalg.inv(h[column:, column:])
        error = (left[:, column] - q[:, column]) / inverse[0, 0]
        left[:, column:] -= error[:, None] * inverse[0]
    different = (meaning(weight).double() - q).abs() > 0.01 * scale[:, None]
    assert different.double().mean().item() < 0.01  # a tie may break the other way in float32, and then others follow


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("granularity", INT4)
def test_a_column_no_input_uses_is_rounded_to_nearest(granularity: str, act_order: bool) -> None:
    fmt, w, x = get_grid_format("int4", granularity), normal(8, 200), correlated(700, 200)
    x[:, [0, 77, 199]] = 0
    weight = gptq.quantize(w, stats_of(x), fmt, act_order=act_order, clip=False)
    assert all(t.float().isfinite().all() for t in weight.tensors)
    assert weight.scales is not None
    steps = weight.scales.float().abs().repeat_interleave(fmt.group_size, dim=1)[:, :200]
    off = ((meaning(weight) - w).abs() / steps)[:, [0, 77, 199]]
    assert off.median() <= 0.5  # clipped at the far end of a symmetric grid, or where the group's range has moved
    nearest = rtn.quantize(w, None, fmt)
    if act_order:  # the scales are those of the original weights, so the columns are exactly the nearest codes
        limit = 1.0 if "asym" not in granularity else 0.51
        assert off.max() <= limit
    assert output_error(w, weight, x) < 0.6 * output_error(w, nearest, x)


@pytest.mark.parametrize("act_order", [False, True])
def test_fewer_inputs_than_columns_are_survived(act_order: bool) -> None:
    fmt, w, x = get_grid_format("int4", "group64"), normal(16, 256), correlated(20, 256)
    x[:, 100:120] = x[:, :20]  # and columns that are copies of each other
    weight = gptq.quantize(w, stats_of(x), fmt, act_order=act_order)
    assert all(t.float().isfinite().all() for t in weight.tensors)
    assert output_error(w, weight, x) < 0.1 * output_error(w, rtn.quantize(w, None, fmt), x)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("name", "granularity"), VARIANTS)
def test_without_inputs_gptq_rounds_to_nearest(name: str, granularity: str, act_order: bool) -> None:
    fmt, w = get_grid_format(name, granularity), normal(130, 150)
    weight = gptq.quantize(w, InputStats(150), fmt, act_order=act_order, clip=False)
    expected = fmt.decode(fmt.encode(grouped := _groups(w, fmt.group_size), fmt.fit(grouped)), fmt.fit(grouped))
    torch.testing.assert_close(meaning(weight), expected.flatten(1)[:, :150], rtol=0, atol=1e-6)


def _groups(w: Tensor, size: int) -> Tensor:
    size = size or w.shape[1]
    return torch.cat([w, w[:, -1:].expand(-1, -w.shape[1] % size)], dim=1).unflatten(1, (-1, size))


@given(
    n=st.integers(1, 4), k=st.integers(1, 140), tokens=st.integers(0, 30), variant=st.sampled_from(VARIANTS),
    size=st.sampled_from([1e-6, 1.0, 1e3]), order=st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_any_shape_gives_a_valid_weight(
    n: int, k: int, tokens: int, variant: tuple[str, str], size: float, order: bool
) -> None:
    fmt, w = get_grid_format(*variant), normal(n, k, k) * size
    stats = InputStats(k)
    stats.add(correlated(tokens, k, n) * size)
    weight = gptq.quantize(w, stats, fmt, act_order=order)
    like = fmt.quantize(w)
    assert [(t.shape, t.dtype) for t in weight.tensors] == [(t.shape, t.dtype) for t in like.tensors]
    assert (weight.shape, weight.group_size) == (like.shape, like.group_size)
    assert meaning(weight).isfinite().all()


def test_wrong_arguments_are_named() -> None:
    fmt, w = get_grid_format("int4"), normal(4, 64)
    with pytest.raises(ValueError, match="statistics of 32 columns do not belong to a matrix of 64"):
        gptq.quantize(w, InputStats(32), fmt)
    with pytest.raises(ValueError, match=r"damping=0 must be positive; try 0\.01"):
        gptq.quantize(w, InputStats(64), fmt, damping=0)
    w[2, 3] = float("inf")
    for call in (gptq.quantize, rtn.quantize, awq.quantize):
        with pytest.raises(ValueError, match=r"w\[2, 3\]=inf cannot be stored as int4"):
            call(w, InputStats(64), fmt)


# -- AWQ --------------------------------------------------------------------------------------------------------------


def scaled_error(w: Tensor, folded: awq.Folded, x: Tensor) -> float:
    difference = (x.double() / folded.scale) @ meaning(folded.weight).double().T - x.double() @ w.double().T
    return difference.square().sum(dim=1).mean().item()


@pytest.mark.parametrize("granularity", INT4)
def test_scaling_loses_three_quarters_of_what_rounding_loses_or_less(granularity: str) -> None:
    fmt, w, x = get_grid_format("int4", granularity), normal(64, 256), correlated(1000, 256)
    x[:, 10] *= 30
    stats = stats_of(x)
    ours = scaled_error(w, awq.quantize(w, stats, fmt, inner=rtn.quantize), x)
    assert ours < 0.75 * output_error(w, rtn.quantize(w, None, fmt), x)
    assert scaled_error(w, awq.quantize(w, stats, fmt), x) < 1.02 * ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fold_into_a_norm_leaves_the_model_as_it_is(dtype: torch.dtype) -> None:
    """The rounding of the folded norm weight comes back in the scale: what is left is float32's, not bfloat16's."""
    w, x = normal(16, 64), correlated(300, 64)
    norm = (torch.randn(64) + 1).to(dtype)
    scale = awq.search(w, stats_of(x * norm.float()), get_grid_format("int4", "group32"))
    assert scale.max() / scale.min() > 2
    folded, exact = awq.fold_norm(norm, scale)
    assert folded.dtype == dtype
    assert torch.equal(folded.to(torch.bfloat16).to(dtype), folded)
    torch.testing.assert_close(exact, scale, rtol=2**-8, atol=0)
    before = (x.double() * norm.double()) @ w.double().T
    after = (x.double() * folded.double()) @ (w * exact).double().T
    size = (x.double() * norm.double()).abs() @ w.double().abs().T
    assert ((after - before).abs() <= 2**-22 * size).all()


def test_a_fold_into_a_norm_of_zeros_and_tiny_numbers_is_none() -> None:
    norm = torch.tensor([0.0, 1e-45, 3e38, -2.0])
    folded, scale = awq.fold_norm(norm, torch.tensor([4.0, 256.0, 2.0**-8, 4.0]))
    assert folded.tolist() == [0.0, norm[1].item(), norm[2].item(), -0.5]
    assert scale.tolist() == [1.0, 1.0, 1.0, 4.0]


def test_a_fold_into_the_matrix_before_leaves_the_model_as_it_is() -> None:
    up, down, x = normal(64, 24, 5), normal(16, 64), correlated(300, 24)
    bias = normal(1, 64, 6)[0]
    scale = awq.search(down, stats_of(x @ up.T + bias), get_grid_format("int4", "group32"))
    before = (x.double() @ up.double().T + bias) @ down.double().T
    hidden = x.double() @ awq.fold_rows(up, scale).double().T + awq.fold_rows(bias, scale)
    after = hidden @ (down * scale).double().T
    size = ((x.double().abs() @ up.double().abs().T) + bias.abs()) @ down.double().abs().T
    assert ((after - before).abs() <= 2**-22 * size).all()


def test_where_scaling_cannot_help_nothing_is_scaled() -> None:
    w = normal(8, 64)
    assert torch.equal(awq.search(w, InputStats(64), get_grid_format("int4")), torch.ones(64))
    alike = InputStats(64)
    alike.add(torch.eye(64))
    assert torch.equal(awq.search(w, alike, get_grid_format("int4")), torch.ones(64))


def test_columns_without_inputs_and_tied_columns_get_their_scales() -> None:
    w, x = normal(16, 64), correlated(300, 64)
    x[:, 5] = 0
    x[:, 6] *= 1e6
    stats = stats_of(x)
    scale = awq.search(w, stats, get_grid_format("int4", "group32"))
    assert scale.isfinite().all()
    assert scale.max() <= awq.LARGEST_SCALE
    pairs = awq.search(
        w, stats, get_grid_format("int4", "group32"),
        tied=lambda size: size.view(-1, 2).amax(dim=1).repeat_interleave(2),
    )  # fmt: skip
    assert torch.equal(pairs[::2], pairs[1::2])


def test_gptq_may_round_what_awq_scaled() -> None:
    fmt, w, x = get_grid_format("int4", "group64"), normal(64, 256), correlated(1000, 256)
    stats = stats_of(x)
    ours = scaled_error(w, awq.quantize(w, stats, fmt, inner=gptq.quantize), x)
    assert ours < 0.5 * output_error(w, rtn.quantize(w, stats, fmt, clip=True), x)

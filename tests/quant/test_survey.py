"""The survey's numbers against direct computations in float64, and figures that hold exactly what they were given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from strata_lab.engine import LLMEngine
from strata_lab.lessons import quant_charts as charts
from strata_lab.lessons.figures import table
from strata_lab.models.checkpoint import is_linear
from strata_lab.models.loader import open_checkpoint
from strata_lab.quant import get_format, head_format, survey
from strata_lab.quant.base import concat_rows
from strata_lab.quant.forward import sequence_logits
from strata_lab.settings import ConfigError
from tests.checkpoints import VOCAB, write_checkpoint

TEXT = [[(7 * i + 3 * j) % VOCAB for i in range(24)] for j in range(2)]


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def source(request: Any, tmp_path_factory: Any) -> Any:
    folder, _ = write_checkpoint(tmp_path_factory.mktemp("m") / request.param, request.param)
    opened: Any = open_checkpoint(str(folder))
    opened.folder = folder
    yield opened
    opened.close()


def relative(matrix: Tensor, made: Tensor) -> float:
    wide = matrix.double()
    return float((made.double() - wide).norm() / wide.norm())


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_int8_by_rows_rounds_as_worked_out_by_hand() -> None:
    """The scale of a row is its largest magnitude over 127."""
    matrix = torch.randn(6, 96)
    made = survey.rounded(matrix, "int8/channel")
    scale = matrix.double().abs().amax(dim=1, keepdim=True) / 127
    error = (matrix.double() / scale).round() * scale - matrix.double()
    assert made.variant == "int8/channel" and made.weight.shape == (6, 96)
    assert torch.allclose(made.error.double(), error, atol=1e-6)
    assert made.relative == pytest.approx(float(error.norm() / matrix.double().norm()), rel=1e-4)


@pytest.mark.parametrize("variant", ["fp8", "fp8/block128", "int8", "int4", "int4/group64", "int4/group32-asym"])
def test_a_rounded_matrix_is_the_format_s_own_and_its_error_is_the_difference(variant: str) -> None:
    matrix = torch.randn(8, 128)
    made = survey.rounded(matrix, variant)
    name, _, granularity = variant.partition("/")
    expected = get_format(name, granularity or None).quantize(matrix)
    values = get_format(name).dequantize(expected)
    assert torch.equal(made.weight.data, expected.data) and made.weight.group_size == expected.group_size
    assert torch.equal(made.error, values - matrix)
    assert made.relative == pytest.approx(relative(matrix, values), rel=1e-5)


def test_a_matrix_of_zeros_has_no_error() -> None:
    assert survey.rounded(torch.zeros(4, 64), "int8").relative == 0.0


@pytest.mark.parametrize("variant", ["int3", "int4/group7", "bf16/channel"])
def test_an_unknown_variant_is_named(variant: str) -> None:
    with pytest.raises(ConfigError, match=variant.partition("/")[2] or variant):
        survey.rounded(torch.zeros(4, 64), variant)


def test_the_error_of_a_layer_is_the_mean_over_its_matrices(source: Any) -> None:
    found = survey.errors_by_layer(source, ["int8", "int4/group32"], [1])
    mlp = "mlp.experts.0" if source.config.num_experts else "mlp"
    names = ("self_attn.q_proj", "self_attn.o_proj", f"{mlp}.gate_proj", f"{mlp}.down_proj")
    assert list(found) == ["int8", "int4/group32"]
    for variant, by_layer in found.items():
        name, _, granularity = variant.partition("/")
        errors = []
        for matrix in (source.linear(f"model.layers.1.{n}.weight").data for n in names):
            made = get_format(name, granularity or None).quantize(matrix)
            errors.append(relative(matrix, get_format(name).dequantize(made)))
        assert by_layer == {1: pytest.approx(sum(errors) / 4, rel=1e-5)}


def test_all_layers_are_looked_at_unless_some_are_named(source: Any) -> None:
    assert list(survey.errors_by_layer(source, ["fp8"])["fp8"]) == [0, 1]


def test_an_overlay_holds_the_named_matrices_rounded_and_nothing_else(source: Any) -> None:
    names = ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"]
    made = survey.in_variant(source, names, "int8/channel")
    assert list(made.replaced) == names[:1]
    assert made.linear(names[0]).format == "int8" and made.linear(names[0]).group_size == 0
    assert torch.equal(made.tensor(names[1]), source.tensor(names[1]))


def test_the_matrices_of_the_layers_are_all_but_embedding_and_head(source: Any) -> None:
    found = survey.layer_matrices(source.names())
    left = {name for name in source.names() if is_linear(name)} - set(found)
    assert left == {"model.embed_tokens.weight", "lm_head.weight"}
    assert len(found) == 2 * (4 + 3 * max(1, source.config.num_experts))


def test_quality_is_the_divergence_of_the_two_models_probabilities(source: Any) -> None:
    changed = survey.in_variant(source, survey.layer_matrices(source.names()), "int4/group32")
    found = survey.quality(source, changed, TEXT)
    kl, tokens = 0.0, 0
    for ids in TEXT:
        p, q = (sequence_logits(s)(ids)[:-1].double().log_softmax(-1) for s in (source, changed))
        kl += float((p.exp() * (p - q)).sum())
        tokens += len(ids) - 1
    assert found.tokens == tokens
    assert found.mean_kl == pytest.approx(kl / tokens, rel=1e-3) and found.mean_kl > 1e-3


def test_quality_of_the_source_itself_is_perfect(source: Any) -> None:
    found = survey.quality(source, source, TEXT)
    assert (found.mean_kl, found.top1_agreement) == (0.0, 1.0)
    assert found.perplexity == found.reference_perplexity


def test_bits_count_codes_and_scales() -> None:
    matrix = torch.randn(8, 256)
    bits = {v: survey.rounded(matrix, v).bits for v in ("int8", "int4/group64-asym", "int4/group128", "fp8")}
    assert bits == {"int8": 8.5, "int4/group64-asym": 4.5, "int4/group128": 4.125, "fp8": 8 + 32 / 256}


def test_stored_formats_are_counted_most_frequent_first(source: Any) -> None:
    changed = survey.in_variant(source, ["model.layers.0.self_attn.q_proj.weight"], "int8/channel")
    found = survey.stored_formats(changed, source.names())
    matrices = sum(map(is_linear, source.names()))
    assert list(found.items()) == [("fp32", matrices - 1), ("int8/channel", 1)]


def test_error_by_size_puts_each_error_with_the_size_of_its_weight() -> None:
    """Four weights in two halves: the errors of the small two, then those of the large two."""
    matrix = torch.tensor([[4.0, -0.5], [0.1, -8.0]])
    made = survey.Rounded("x", survey.rounded(matrix, "int8/channel").weight, torch.tensor([[3.0, 0.3], [0.4, 4.0]]), 0)
    size = (matrix.double().square().mean().sqrt()).item()
    expected = [(0.125) ** 0.5 / size, (12.5) ** 0.5 / size]
    assert survey.error_by_size(matrix, made, parts=2) == pytest.approx(expected)


def test_the_mean_square_of_the_parts_is_that_of_the_whole() -> None:
    matrix = torch.randn(32, 320)
    made = survey.rounded(matrix, "fp8")
    parts = survey.error_by_size(matrix, made)
    assert len(parts) == 10 and parts == sorted(parts)
    assert sum(p * p for p in parts) / 10 == pytest.approx(made.relative**2, rel=1e-4)


@pytest.mark.parametrize("weight_format", ["bf16", "fp8", "int8", "int4"])
def test_an_overlay_is_what_the_engine_makes_of_the_checkpoint(source: Any, weight_format: str) -> None:
    """Packed by the same function, the first layer's qkv and the head are bit for bit the engine's own."""
    with LLMEngine(str(source.folder), device="cpu", weight_format=weight_format) as engine:
        weights, pack = engine._loop.parts.weights, engine._builder._pack()
        overlay = survey.as_engine_holds(source, source.names(), weight_format, "cpu")
        qkv = concat_rows([overlay.linear(f"model.layers.0.self_attn.{p}_proj.weight") for p in "qkv"])
        expected = pack(qkv)
        found = weights.layers[0].attention.qkv
        assert all(torch.equal(a, b) for a, b in zip(found.tensors, expected.tensors, strict=True))
        head = pack(overlay.linear("lm_head.weight"))
        assert head.format == head_format(weight_format)
        assert all(torch.equal(a, b) for a, b in zip(weights.head.tensors, head.tensors, strict=True))


def test_what_the_file_stores_in_a_format_stays_and_a_gpu_gets_groups_of_128(source: Any) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    stored = survey.in_variant(source, [name], "int4/group32")
    on_gpu = survey.as_engine_holds(stored, stored.names(), "int4", "cuda")
    assert on_gpu.linear(name).data is stored.linear(name).data
    assert on_gpu.linear("model.layers.1.self_attn.q_proj.weight").group_size == 128
    assert on_gpu.linear("lm_head.weight").format == "int8"


def test_calibration_changes_the_first_layers_only_and_beats_rounding_there(source: Any) -> None:
    found = survey.calibrated(source, TEXT, "int4/group32", 1)
    assert found.replaced and all(name.startswith("model.layers.0.") for name in found.replaced)
    assert {w.group_size for w in found.replaced.values()} == {32}
    nearest = survey.in_variant(source, list(found.replaced), "int4/group32")
    assert survey.quality(source, found, TEXT).mean_kl < survey.quality(source, nearest, TEXT).mean_kl


def test_distance_is_the_change_of_all_named_matrices_over_their_size(source: Any) -> None:
    names = survey.layer_matrices(source.names())[:3]
    changed = survey.in_variant(source, names[:2], "int4/group32")
    before = torch.cat([source.linear(n).data.flatten() for n in names])
    after = torch.cat([survey.matrix_of(changed, n).flatten() for n in names])
    assert survey.distance(source, changed, names) == pytest.approx(relative(before, after), rel=1e-5)
    assert survey.distance(source, source, names) == 0.0


def test_remembered_logits_are_computed_once_and_for_these_sequences_alone() -> None:
    asked: list[tuple[int, ...]] = []

    def logits(sequence: Any) -> Tensor:
        asked.append(tuple(sequence))
        return torch.tensor([float(len(sequence))])

    found = survey.remembered(logits, [[1, 2], [3]])
    assert [float(found(s)) for s in ([3], [1, 2], [3])] == [1.0, 2.0, 1.0]
    assert asked == [(1, 2), (3,)]
    with pytest.raises(KeyError):
        found([4])


def test_a_speed_is_measured_after_warming_up_and_for_the_time_asked_for() -> None:
    engine = FakeEngine([50.0, 20.0])  # ms per token: 20 tok/s while warming up, then 50
    assert survey.decode_tok_s(engine, 3.0) == 50.0
    assert engine.asked == [survey.WARM_TOKENS, 60]
    hurried = FakeEngine([0.1, 0.1])
    survey.decode_tok_s(hurried, 3.0)
    assert hurried.asked[1] == survey.MOST_TOKENS
    slow = FakeEngine([1000.0, 1000.0])
    survey.decode_tok_s(slow, 1.0)
    assert slow.asked[1] == survey.WARM_TOKENS


class FakeEngine:
    """Answers with the times per token it was given."""

    def __init__(self, tpot_ms: list[float]) -> None:
        self.tpot_ms, self.asked = tpot_ms, []

    def generate(self, prompt: str, params: Any) -> list[Any]:
        assert params.ignore_eos and params.temperature == 0.0
        self.asked.append(params.max_tokens)
        return [SimpleNamespace(tpot_ms=self.tpot_ms[len(self.asked) - 1])]


# -- figures ----------------------------------------------------------------------------------------------------------


def test_the_histogram_counts_the_numbers_of_the_matrix_and_the_errors_of_each_variant() -> None:
    matrix = torch.randn(16, 128).clamp(-3, 3)
    made = [survey.rounded(matrix, variant) for variant in ("fp8", "int8", "int4/group128")]
    figure = charts.weight_histogram(matrix, made)
    bars, *lines = figure.data
    assert [line.name for line in lines] == [f"{one.variant} ({one.relative:.1%})" for one in made]
    assert sum(bars.y) == matrix.numel() and len(bars.x) == charts.BINS
    step = bars.x[1] - bars.x[0]
    for x, count in zip(bars.x[::17], bars.y[::17], strict=True):
        assert count == int(((matrix >= x - step / 2) & (matrix < x + step / 2)).sum())
    for line, one in zip(lines, made, strict=True):
        width = line.x[1] - line.x[0]
        mean_square = float(np.average(np.square(line.x), weights=line.y)) - width**2 / 12  # Sheppard's correction
        assert mean_square == pytest.approx(float(one.error.square().mean()), rel=0.1)
    assert figure.layout.yaxis.type == figure.layout.yaxis2.type == "log"


def test_error_by_layer_draws_a_line_per_variant() -> None:
    errors = {"int8": {0: 0.005, 3: 0.006}, "int4": {0: 0.08, 3: 0.09}}
    figure = charts.error_by_layer(errors)
    assert {t.name: dict(zip(t.x, t.y, strict=True)) for t in figure.data} == errors
    assert figure.layout.yaxis.type == "log" and figure.layout.xaxis.title.text == "layer"


def test_error_by_size_is_drawn_at_the_middle_of_each_part() -> None:
    (trace,) = charts.error_by_size({"fp8": [0.001, 0.01, 0.02, 0.04]}).data
    assert list(zip(trace.x, trace.y, strict=True)) == [(0.125, 0.001), (0.375, 0.01), (0.625, 0.02), (0.875, 0.04)]
    assert trace.name == "fp8"


def test_a_variant_has_the_same_colour_in_every_figure() -> None:
    matrix = torch.randn(8, 64)
    made = [survey.rounded(matrix, v) for v in ("fp8", "int8")]
    lines = charts.weight_histogram(matrix, made).data[1:]
    by_size = charts.error_by_size({one.variant: survey.error_by_size(matrix, one) for one in made})
    assert [line.line.color for line in lines] == list(by_size.layout.colorway[:2])


def test_a_table_has_a_row_for_each_and_no_cell_breaks_it() -> None:
    text = table(("weights", "KL"), [("int8", "0.1"), ("a|b", "2")]).data
    assert text.splitlines() == ["| weights | KL |", "| --- | ---: |", "| int8 | 0.1 |", "| a&#124;b | 2 |"]


POINTS = [
    charts.Point("bf16", 20.0, 0.0, 0.27), charts.Point("int8", 40.0, 0.001, 0.14),
    charts.Point("fp8", 30.0, 0.01, 0.135), charts.Point("int4", 60.0, 0.3, 0.08),
]  # fmt: skip


def test_pareto_places_every_point_where_it_was_measured() -> None:
    (trace,) = charts.pareto(POINTS).data
    assert list(zip(trace.text, trace.x, trace.y, strict=True)) == [(p.label, p.tok_s, p.mean_kl) for p in POINTS]
    sizes = list(trace.marker.size)
    assert sorted(sizes, reverse=True) == sizes and sizes[0] == 44
    assert list(trace.customdata) == ["0.270 GB", "0.140 GB", "0.135 GB", "0.080 GB"]


def test_the_frontier_leaves_out_what_is_slower_and_worse() -> None:
    assert [p.label for p in charts.frontier(POINTS)] == ["bf16", "int8", "int4"]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_a_point_is_on_the_frontier_unless_another_is_at_least_as_good_in_both(pairs: list[tuple[int, int]]) -> None:
    points = [charts.Point(str(i), float(speed), float(kl), 1.0) for i, (speed, kl) in enumerate(pairs)]
    found = charts.frontier(points)
    best = {
        (s, k) for s, k in pairs if not any(a >= s and b <= k and (a, b) != (s, k) for a, b in pairs)
    }  # fmt: skip
    assert [(p.tok_s, p.mean_kl) for p in found] == sorted(best)


def test_figures_are_self_contained_json() -> None:
    matrix = torch.randn(8, 64)
    figures = [
        charts.weight_histogram(matrix, [survey.rounded(matrix, "int8")]), charts.error_by_layer({"a": {0: 0.1}}),
        charts.pareto(POINTS),
    ]  # fmt: skip
    assert all("http" not in figure.to_json() for figure in figures)

"""Laws of the walk through a model: every matrix comes once, inputs are the right ones, errors stop growing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strata_lab.models.loader import open_checkpoint
from strata_lab.quant import convert, get_format, get_grid_format, variant_of
from strata_lab.quant.base import LinearWeight
from strata_lab.quant.calibrate import METHODS, Quantized, quantize_model
from strata_lab.quant.folding import fold_scales
from strata_lab.quant.forward import Forward, sequence_logits
from strata_lab.quant.overlay import Overlay
from strata_lab.quant.quality import compare
from strata_lab.quant.sites import Recorder, layer_sites, owned
from strata_lab.settings import ConfigError
from tests.checkpoints import FAMILIES, VOCAB, write_checkpoint

INT4 = get_grid_format("int4", "group32")


def sequences(count: int, length: int = 48, seed: int = 0) -> list[list[int]]:
    return torch.randint(VOCAB, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    folder, reference = write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    checkpoint = open_checkpoint(str(folder))
    yield checkpoint, reference
    checkpoint.close()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder, _ = write_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=3)
    checkpoint = open_checkpoint(str(folder))
    yield checkpoint
    checkpoint.close()


def quantized(source: Any, method: str, text: Sequence[Sequence[int]], **options: Any) -> Overlay:
    overlay = Overlay(source)
    for one in quantize_model(source, text, options.pop("format", INT4), method, **options):
        overlay.put(one.name, one.value)
    return overlay


def test_whole_sequences_give_transformers_logits(family: tuple[Any, Any]) -> None:
    checkpoint, reference = family
    tokens = sequences(1, 37)[0]
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    ours = sequence_logits(checkpoint)(tokens)
    assert (ours - expected).abs().max().item() < 1e-4
    for wrong in ([], [0] * 257):
        with pytest.raises(ValueError, match=f"a sequence of {len(wrong)} tokens must have 1 to 256"):
            sequence_logits(checkpoint)(wrong)


@pytest.mark.parametrize("method", METHODS)
def test_every_matrix_of_every_layer_comes_once_in_the_format(family: tuple[Any, Any], method: str) -> None:
    checkpoint, _ = family
    made: list[Quantized] = list(quantize_model(checkpoint, sequences(3), INT4, method))
    names = [one.name for one in made]
    assert len(names) == len(set(names))
    matrices = {one.name: one.value for one in made if isinstance(one.value, LinearWeight)}
    expected = {n for n in checkpoint.names() if n.startswith("model.layers.") and n.endswith("_proj.weight")}
    assert set(matrices) == expected
    for name, weight in matrices.items():
        assert (weight.shape, weight.format, variant_of(weight)) == (checkpoint.linear(name).shape, "int4", "group32")
    plain = {one.name for one in made} - set(matrices)
    assert plain <= set(checkpoint.names())
    assert bool(plain) == METHODS[method].folds
    progress = [one.progress for one in made]
    assert progress == sorted(progress)
    assert progress[-1] == 1.0


@pytest.mark.parametrize("granularity", ["tensor", "block128", "channel"])
def test_formats_whose_rows_share_scales_keep_matrices_apart(llama: Any, granularity: str) -> None:
    fmt = get_grid_format("fp8", granularity)
    made = {one.name: one.value for one in quantize_model(llama, sequences(2), fmt, "rtn")}
    for name, weight in made.items():
        expected = convert(llama.linear(name), "fp8", granularity)
        assert torch.equal(weight.data.view(torch.uint8), expected.data.view(torch.uint8)), name
        assert torch.equal(weight.scales, expected.scales), name


def test_rounding_to_nearest_runs_no_text(llama: Any) -> None:
    made = {one.name: one.value for one in quantize_model(llama, [], INT4, "rtn")}
    assert all(torch.equal(w.data, INT4.quantize(llama.linear(n).data.float()).data) for n, w in made.items())


def test_the_inputs_counted_are_those_of_the_quantized_layers_before(llama: Any) -> None:
    """Replays the walk by hand: the last layer's statistics are of what the quantized first two produce."""
    text, seen = sequences(3), {}

    def spy(w: Tensor, stats: Any, format: Any) -> LinearWeight:
        seen[w.shape, len(seen)] = stats.gram.clone()
        return INT4.quantize(w)

    original = METHODS["rtn-clip"]
    METHODS["rtn-clip"] = type(original)(spy)
    try:
        overlay = quantized(llama, "rtn-clip", text)
    finally:
        METHODS["rtn-clip"] = original
    inputs: dict[str, list[Tensor]] = {}
    forward = Forward(overlay, overrides={"linear": lambda x, w, b=None: _spied(inputs, x, w)})
    layers = [forward.load_layer(i) for i in range(3)]
    for sequence in text:
        x = forward.embed(sequence)
        for index, layer in enumerate(layers):
            inputs.clear()
            x = forward.layer(x, layer) if index < 2 else x
    last = Forward(llama, overrides={"linear": lambda x, w, b=None: _spied(grams, x, w)})
    grams: dict[str, list[Tensor]] = {}
    unquantized = last.load_layer(2)
    for sequence in text:
        x = forward.embed(sequence)
        for layer in layers[:2]:
            x = forward.layer(x, layer)
        last.layer(x, unquantized)
    expected = torch.cat(grams["96x64"][::2])  # what gate reads; up reads the same
    (_, _), gram = list(seen.items())[-2]
    torch.testing.assert_close(gram, expected.T @ expected, rtol=1e-4, atol=1e-3)


def _spied(found: dict[str, list[Tensor]], x: Tensor, w: LinearWeight) -> Tensor:
    found.setdefault(f"{w.shape[0]}x{w.shape[1]}", []).append(x)
    return torch.nn.functional.linear(x, w.data)


@pytest.mark.parametrize("method", ["gptq", "awq", "awq-gptq"])
def test_methods_lose_less_than_rounding(llama: Any, method: str) -> None:
    """On random weights and the calibration text itself: mean KL against the original model."""
    text = sequences(24)
    reference = sequence_logits(llama)
    loss = {
        m: compare(reference, sequence_logits(quantized(llama, m, text)), text[:6]).mean_kl for m in ("rtn", method)
    }
    assert loss[method] < {"gptq": 0.6, "awq": 1.0, "awq-gptq": 0.6}[method] * loss["rtn"]


def test_folding_leaves_the_model_as_it_is(family: tuple[Any, Any]) -> None:
    """A layer after `fold_scales`, unquantized, computes what it computed before."""
    checkpoint, _ = family
    recorder = Recorder()
    forward = Forward(checkpoint, overrides={"linear": recorder.linear, "moe_mlp": recorder.moe_mlp})
    x = forward.embed(sequences(1)[0])
    layer = owned(forward.load_layer(0))
    before = forward.layer(x, layer)
    sites = layer_sites("model.layers.0.", checkpoint.config, layer)
    recorder.watch(sites)
    forward.layer(x, layer)
    recorder.rest()
    originals = [site.weight.clone() for site in sites]
    changed = dict(fold_scales("model.layers.0.", checkpoint.config, layer, sites, INT4, lambda name: False))
    assert any(not torch.equal(site.weight, old) for site, old in zip(sites, originals, strict=True))
    torch.testing.assert_close(forward.layer(x, layer), before, rtol=1e-4, atol=1e-4)
    for name, value in changed.items():
        assert not torch.equal(value, checkpoint.tensor(name))


def test_experts_that_no_token_chose_are_rounded_to_nearest(tmp_path: Path) -> None:
    folder, _ = write_checkpoint(tmp_path, "qwen3_moe", num_experts=32)
    checkpoint = open_checkpoint(str(folder))
    overlay = quantized(checkpoint, "gptq", sequences(1, 3))  # 3 tokens reach at most 6 of 32 experts
    names = [n for n in checkpoint.names() if "layers.0" in n and n.endswith("down_proj.weight")]
    untouched = 0
    for name in names:
        w = checkpoint.linear(name).data.float()
        ours = get_format("int4").dequantize(overlay.linear(name))
        nearest = get_format("int4").dequantize(METHODS["rtn-clip"].round(w, None, INT4))  # type: ignore[arg-type]
        untouched += torch.allclose(ours, nearest)
    assert 26 <= untouched < 32
    checkpoint.close()


def test_finished_layers_are_run_and_not_made_again(llama: Any) -> None:
    text = sequences(4)
    for method in ("gptq", "awq"):
        whole = list(quantize_model(llama, text, INT4, method))
        first = {one.name: one.value for one in whole if one.name.startswith("model.layers.0.")}

        def over(source: Any, values: dict[str, Any] = first) -> Overlay:
            overlay = Overlay(source)
            overlay.replaced.update(values)
            return overlay

        rest = list(quantize_model(llama, text, INT4, method, finished=[over]))
        expected = [one for one in whole if one.name not in first]
        assert [one.name for one in rest] == [one.name for one in expected]
        for ours, theirs in zip(rest, expected, strict=True):
            if isinstance(theirs.value, LinearWeight):
                assert isinstance(ours.value, LinearWeight)
                assert torch.equal(ours.value.data, theirs.value.data), ours.name


@pytest.mark.parametrize("method", METHODS)
def test_matrices_left_out_stay_and_nothing_is_folded_into_them(llama: Any, method: str) -> None:
    left = ("k_proj", "down_proj")
    made = list(
        quantize_model(llama, sequences(24), INT4, method, left_out=lambda name: any(part in name for part in left))
    )
    names = {one.name for one in made}
    assert not any(part in name for name in names for part in left)
    assert sum(name.endswith("_proj.weight") for name in names) == 3 * 5
    assert not any(name.endswith("input_layernorm.weight") for name in names)  # its scale would change k
    overlay = Overlay(llama)
    for one in made:
        overlay.put(one.name, one.value)
    text = sequences(2, seed=1)
    kl = compare(sequence_logits(llama), sequence_logits(overlay), text).mean_kl
    nearest = compare(sequence_logits(llama), sequence_logits(quantized(llama, "rtn", [])), text).mean_kl
    assert kl < nearest  # a fold that k had missed would cost far more than rounding


def test_the_checkpoint_is_not_written(llama: Any) -> None:
    """float32 tensors of a checkpoint are mapped from its file; a fold into them would change the model on disk."""
    before = {name: llama.linear(name).data.clone() for name in llama.names() if name.endswith("_proj.weight")}
    list(quantize_model(llama, sequences(2), INT4, "awq-gptq"))
    assert all(torch.equal(llama.linear(name).data, data) for name, data in before.items())


def test_gradients_stay_on_for_the_caller(llama: Any) -> None:
    for _ in quantize_model(llama, sequences(1), INT4, "gptq"):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()


def test_wrong_arguments_are_refused_before_any_work(llama: Any) -> None:
    with pytest.raises(ConfigError, match="method='magic' must be one of rtn, rtn-clip, gptq, awq.*; try 'gptq'"):
        quantize_model(llama, sequences(1), INT4, "magic")
    with pytest.raises(ValueError, match="calibration needs text"):
        quantize_model(llama, [], INT4, "gptq")
    with pytest.raises(ValueError, match="a sequence of 300 tokens must have 1 to 256; try 256"):
        quantize_model(llama, [[0] * 300], INT4, "gptq")


def test_an_overlay_refuses_other_shapes_and_shows_the_rest(llama: Any) -> None:
    overlay = Overlay(llama)
    name = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(ValueError, match=r"down_proj.weight has shape \(64, 96\), so \(64, 64\) cannot replace it"):
        overlay.put(name, get_format("fp32").quantize(torch.ones(64, 64)))
    assert overlay.linear(name) is not None
    assert overlay.names() == llama.names()
    overlay.put("model.norm.weight", torch.zeros(64))
    assert not overlay.tensor("model.norm.weight").any()
    assert llama.tensor("model.norm.weight").any()

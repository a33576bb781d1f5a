"""Laws of published quantizations: the file's codes are the weight's codes, and the model computes with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from strata_lab.models.awq import AwqReader
from strata_lab.models.checkpoint import is_linear
from strata_lab.models.compressed_tensors import CompressedTensorsReader
from strata_lab.models.fp8_block import Fp8Reader
from strata_lab.models.gptq import GptqReader
from strata_lab.models.loader import CheckpointError, open_checkpoint
from strata_lab.models.merge import alike
from strata_lab.models.packed import Notes
from strata_lab.models.quant_parts import Settings
from strata_lab.models.safetensors_io import DTYPES
from strata_lab.quant import get_format
from tests.checkpoints import write_checkpoint
from tests.models import published as pub
from tests.models.cases import CASES, WIDE, in_groups
from tests.test_models import our_logits


@pytest.mark.parametrize("case", CASES)
def test_the_codes_of_the_file_are_the_codes_of_the_weight(case, folder) -> None:
    config, make, form, group_size, has_mins = CASES[case]
    expected = pub.write_quantized(folder, config, make)
    plain = load_file(folder / "model.safetensors")
    checkpoint = open_checkpoint(str(folder))
    assert len(expected) == 14 and expected.keys() < set(checkpoint.names())
    assert checkpoint.stored_format == ("bf16" if form == "fp32" else form)
    for name, values in expected.items():
        weight = checkpoint.linear(name)
        assert (weight.format, weight.group_size, weight.mins is not None, weight.layout) == (
            form, group_size, has_mins, "rows",
        ), name  # fmt: skip
        assert weight.data.is_contiguous() and weight.shape == values.shape
        off = np.abs(pub.as_float64(weight) - values)
        assert (off <= pub.rounding_of_minima(weight)).all(), (name, off.max())
        ours = get_format(weight.format).dequantize(weight).double().numpy()
        assert np.allclose(ours, values, rtol=2**-22, atol=(off + 2**-24).max()), name
    for name in set(checkpoint.names()) - expected.keys():
        stored = checkpoint.linear(name).data if is_linear(name) else checkpoint.tensor(name)
        assert torch.equal(stored, plain[name]), name
    assert bool(checkpoint.notes()) == (has_mins or form == "fp32")


@pytest.mark.parametrize("case", CASES)
def test_a_quantized_model_computes_what_its_dequantized_copy_does(case, folder, tmp_path_factory) -> None:
    """Logits in float32 through the engine, against transformers with the float64 values rounded to float32."""
    config, make, *_ = CASES[case]
    expected = pub.write_quantized(folder, config, make)
    model = write_checkpoint(tmp_path_factory.mktemp("again"), "llama", tokenizer=False, **WIDE)[1]
    state = {name: torch.from_numpy(values).float() for name, values in expected.items()}
    assert not model.load_state_dict(model.state_dict() | state).missing_keys
    tokens = torch.randint(0, 320, (21,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        reference = model(tokens[None]).logits[0]
    ours = our_logits(folder, tokens.tolist(), slices=(17, 1, 3), cuda_graph=False)
    bound = 2e-4 if not CASES[case][4] else 0.01 * reference.abs().max().item()  # the rounded minima
    assert (ours - reference).abs().max().item() < bound


@pytest.mark.parametrize(
    "case",
    [
        "gptq sym",
        "gptq 128",
        "gptq desc_act",
        "gptq 8 bit rows",
        "awq",
        "fp8 block",
        "fp8 tensor",
        "ct int8",
        "ct int4 128",
    ],
)
def test_a_quantized_model_generates_in_the_format_it_is_stored_in(case, folder) -> None:
    from strata_lab.engine import LLMEngine
    from strata_lab.sampling_params import SamplingParams

    config, make, *_ = CASES[case]
    pub.write_quantized(folder, config, make)
    with LLMEngine(folder, device="cpu", max_model_len=64, cuda_graph=False) as engine:
        assert engine.optimizations.weight_format == open_checkpoint(str(folder)).stored_format
        out = engine.generate([[1, 5, 9]], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))[0]
    assert len(out.token_ids) == 6


def test_modules_that_the_quantizer_left_alone_stay_plain(folder) -> None:
    skip = ("layers.0.", "o_proj")
    plain = load_file(folder / "model.safetensors")
    expected = pub.write_quantized(folder, pub.AWQ_CONFIG | {"modules_to_not_convert": list(skip)}, pub.awq, skip=skip)
    checkpoint = open_checkpoint(str(folder))
    assert len(expected) == 6 and checkpoint.stored_format == "fp32"  # 8 of 14 are plain
    for name in plain:
        if name.endswith("_proj.weight"):
            assert checkpoint.linear(name).format == ("int4" if name in expected else "fp32")
    left = "model.layers.1.self_attn.o_proj.weight"
    assert torch.equal(checkpoint.linear(left).data, plain[left])


def test_projections_that_differ_in_zero_points_or_groups_are_merged_without_changing_a_value(folder) -> None:
    """q symmetric in groups of 128, k with zero points in groups of 64, v symmetric in groups of 32."""
    config, rng, state = in_groups(4, 128, True), np.random.default_rng(5), load_file(folder / "model.safetensors")
    weights_of = {size: in_groups(4, size, size != 64)["config_groups"]["group_0"] for size in (128, 64, 32)}
    config["config_groups"] = {f"group_{size}": group for size, group in weights_of.items()}
    names, values = [f"model.layers.0.self_attn.{p}_proj" for p in "qkv"], []
    for name, size in zip(names, weights_of, strict=True):
        made, expected = pub.packed(tuple(state.pop(f"{name}.weight").shape), rng, group_size=size, sym=size != 64)
        values.append(expected)
        state |= {f"{name}.{part}": tensor for part, tensor in made.items()}
    save_file(state, folder / "model.safetensors")
    pub.edit(folder, quantization_config=config)
    checkpoint = open_checkpoint(str(folder))
    weights = [checkpoint.linear(f"{name}.weight") for name in names]
    assert [(w.group_size, w.mins is not None) for w in weights] == [(128, False), (64, True), (32, False)]
    for weight, merged, expected in zip(weights, alike(weights, "int4"), values, strict=True):
        assert (merged.group_size, merged.mins is not None) == (32, True)
        assert np.array_equal(pub.as_float64(weight), pub.as_float64(merged))
        assert (np.abs(pub.as_float64(merged) - expected) <= pub.rounding_of_minima(weight)).all()


def test_experts_are_read_each_from_its_own_tensors(tmp_path) -> None:
    write_checkpoint(tmp_path, "qwen3_moe", tokenizer=False)
    expected = pub.write_quantized(tmp_path, pub.AWQ_CONFIG, pub.awq)
    checkpoint = open_checkpoint(str(tmp_path))
    experts = [name for name in expected if ".experts." in name]
    assert len(experts) == 2 * 6 * 3
    for name in experts:
        weight = checkpoint.linear(name)
        assert (np.abs(pub.as_float64(weight) - expected[name]) <= pub.rounding_of_minima(weight)).all()
    assert checkpoint.tensor("model.layers.0.mlp.gate.weight").shape == (6, 64)


def test_biases_of_zeros_that_a_quantizer_added_are_ignored_and_others_are_not(folder) -> None:
    pub.write_quantized(folder, pub.gptq_config(), pub.gptq)
    state, bias = load_file(folder / "model.safetensors"), "model.layers.1.self_attn.o_proj.bias"
    save_file(state | {bias: torch.zeros(160, dtype=torch.float16)}, folder / "model.safetensors")
    assert bias not in open_checkpoint(str(folder)).names()
    save_file(state | {bias: torch.full((160,), 0.5, dtype=torch.float16)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"o_proj.bias' is not part of"):
        open_checkpoint(str(folder))


def test_scales_that_float16_cannot_hold_are_rounded_or_dequantized_and_noted(folder) -> None:
    """bfloat16 1e-6 loses digits in float16; 1e-9 vanishes and 1e5 overflows."""
    pub.write_quantized(folder, in_groups(4, 32, True), pub.packed)
    names = [f"model.layers.0.self_attn.{p}_proj.weight" for p in "qkv"]
    state = load_file(folder / "model.safetensors")
    for name, value in zip(names, (1.03e-6, 1e-9, 1e5), strict=True):
        raw = f"{name}_scale"
        state[raw] = torch.full_like(state[raw], value, dtype=torch.float32)
    save_file(state, folder / "model.safetensors")
    checkpoint = open_checkpoint(str(folder))
    assert [checkpoint.linear(name).format for name in names] == ["int4", "fp32", "fp32"]
    assert any("scales were rounded to float16" in note and names[0] in note for note in checkpoint.notes())
    assert checkpoint.linear(names[2]).data.abs().max().item() == pytest.approx(8e5)


@pytest.mark.parametrize("config", ["fp8 block", "ct fp8 block"])
@pytest.mark.parametrize("shape", [(4, 512), (100, 120), (256, 130)])
def test_a_block_scale_is_never_taken_for_a_row_scale(config, shape) -> None:
    """[4, 512] has four blocks and four rows; [100, 120] a single block."""
    settings, make, *_ = CASES[config]
    made, values = make(shape, np.random.default_rng(0))
    files = InMemory({f"model.layers.0.mlp.up_proj.{part}": tensor for part, tensor in made.items()})
    reader = (CompressedTensorsReader if config.startswith("ct") else Fp8Reader)(files, Settings("here", settings))
    weight = reader.linear("model.layers.0.mlp.up_proj.weight", Notes())
    assert (weight.format, weight.group_size) == ("fp8", 128)
    assert np.array_equal(pub.as_float64(weight), values)


@pytest.mark.parametrize("shape", [(24, 40), (16, 200), (8, 72)])
@pytest.mark.parametrize("case", ["gptq v1", "gptq sym", "gptq 128", "gptq 8 bit", "awq", "ct int4", "ct int4 asym"])
def test_columns_that_fill_no_block_of_32_are_read_too(case, shape) -> None:
    settings, make, form, *_ = CASES[case]
    made, values = make(shape, np.random.default_rng(0))
    files = InMemory({f"model.layers.0.mlp.up_proj.{part}": tensor for part, tensor in made.items()})
    reader = {"g": GptqReader, "a": AwqReader, "c": CompressedTensorsReader}[case[0]](files, Settings("here", settings))
    weight = reader.linear("model.layers.0.mlp.up_proj.weight", Notes())
    assert weight.format == form
    if form == "int4":
        assert weight.data.shape == (shape[0], -(-shape[1] // 32) * 16)
    assert (np.abs(pub.as_float64(weight) - values) <= pub.rounding_of_minima(weight)).all()
    assert np.allclose(get_format(form).dequantize(weight).numpy(), pub.as_float64(weight), rtol=1e-6, atol=1e-7)


class InMemory:
    """Raw tensors without files."""

    def __init__(self, tensors) -> None:
        self.tensors = tensors
        self.shapes = {name: tuple(t.shape) for name, t in tensors.items()}
        self.dtypes = {name: {t: n for n, t in DTYPES.items()}[tensor.dtype] for name, tensor in tensors.items()}

    def get(self, name):
        return self.tensors[name]

    def where(self, name):
        return "memory"

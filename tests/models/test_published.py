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
from strata_lab.models.packed import Notes
from strata_lab.models.quant_parts import Settings
from strata_lab.models.safetensors_io import DTYPES
from strata_lab.quant import get_format
from tests.checkpoints import write_checkpoint
from tests.models import published as pub
from tests.test_models import our_logits

WIDE = {"hidden_size": 160, "intermediate_size": 288}  # 160 = 128 + 32: ragged in groups and blocks of 128
SCATTER = np.random.default_rng(3)


def scattered(shape, rng):
    return pub.gptq(shape, rng, order=SCATTER.permutation(shape[1]))


def in_swapped_groups(shape, rng):
    """Whole groups of 32 columns in another order: `desc_act` with groups fixed beforehand."""
    order = np.arange(shape[1]).reshape(-1, 32)[::-1].reshape(-1)
    return pub.gptq(shape, rng, order=order)


def row_scales(form, kind, bits, **more):
    return pub.ct_config(form, num_bits=bits, type=kind, strategy="channel", symmetric=True, **more)


def in_groups(bits, size, symmetric):
    return pub.ct_config(
        "pack-quantized", num_bits=bits, type="int", strategy="group", group_size=size, symmetric=symmetric
    )


def with_options(maker, **options):
    return lambda shape, rng: maker(shape, rng, **options)


# name -> (config, maker, format, group size, has minima)
CASES = {
    "gptq v1": (pub.gptq_config(), pub.gptq, "int4", 32, True),
    "gptq v2": (pub.gptq_config(checkpoint_format="gptq_v2"), with_options(pub.gptq, v2=True), "int4", 32, True),
    "gptq sym": (pub.gptq_config(sym=True), with_options(pub.gptq, sym=True), "int4", 32, False),
    "gptq 64": (pub.gptq_config(group_size=64), with_options(pub.gptq, group_size=64), "int4", 64, True),
    "gptq 128": (pub.gptq_config(group_size=128), with_options(pub.gptq, group_size=128), "int4", 128, True),
    "gptq rows": (pub.gptq_config(group_size=-1), with_options(pub.gptq, group_size=-1), "int4", 128, True),
    "gptq groups swapped": (pub.gptq_config(desc_act=True), in_swapped_groups, "int4", 32, True),
    "gptq desc_act": (pub.gptq_config(desc_act=True), scattered, "fp32", 0, False),
    "gptq 8 bit": (pub.gptq_config(bits=8, sym=True), with_options(pub.gptq, bits=8, sym=True), "int8", 32, False),
    "gptq 8 bit rows": (
        pub.gptq_config(bits=8, group_size=-1, sym=True), with_options(pub.gptq, bits=8, group_size=-1, sym=True),
        "int8", 0,
        False,
    ),
    "gptq 8 bit asym": (pub.gptq_config(bits=8), with_options(pub.gptq, bits=8), "fp32", 0, False),
    "awq": (pub.AWQ_CONFIG, pub.awq, "int4", 32, True),
    "awq 64": (pub.AWQ_CONFIG | {"group_size": 64}, with_options(pub.awq, group_size=64), "int4", 64, True),
    "fp8 block": (pub.FP8_CONFIG, pub.fp8, "fp8", 128, False),
    "fp8 tensor": (
        pub.FP8_CONFIG | {"weight_block_size": None}, with_options(pub.fp8, kind="tensor", scale="weight_scale"), "fp8",
        0, False,
    ),
    "ct fp8 channel": (
        row_scales("float-quantized", "float", 8), with_options(pub.fp8, kind="channel", scale="weight_scale"), "fp8",
        0, False,
    ),
    "ct fp8 block": (
        pub.ct_config("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
        with_options(pub.fp8, scale="weight_scale"), "fp8", 128, False,
    ),
    "ct int4": (in_groups(4, 32, True), pub.packed, "int4", 32, False),
    "ct int4 asym": (in_groups(4, 64, False), with_options(pub.packed, group_size=64, sym=False), "int4", 64, True),
    "ct int4 128": (in_groups(4, 128, True), with_options(pub.packed, group_size=128), "int4", 128, False),
    "ct int4 rows": (
        row_scales("pack-quantized", "int", 4), with_options(pub.packed, group_size=-1), "int4", 128, False,
    ),
    "ct int8 packed": (in_groups(8, 32, True), with_options(pub.packed, bits=8), "int8", 32, False),
    "ct int8": (row_scales("int-quantized", "int", 8), pub.int8, "int8", 0, False),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A small Llama whose widths are no multiples of 128, as tensors and config."""
    folder, _ = write_checkpoint(tmp_path_factory.mktemp("plain"), "llama", **WIDE)
    return folder


@pytest.fixture
def folder(plain, tmp_path):
    for path in plain.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


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
    from strata_lab.request import SamplingParams

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
    """q symmetric, k and v not; gate in groups of 64 and up of 32: the merged matrix means the same numbers."""
    from strata_lab.models.merge import alike

    rng = np.random.default_rng(5)
    pub.write_quantized(folder, pub.gptq_config(), pub.gptq)
    open_checkpoint(str(folder))
    makers = [
        with_options(pub.packed, group_size=size, sym=sym) for size, sym in ((128, True), (64, False), (32, True))
    ]
    weights, values = [], []
    state = load_file(folder / "model.safetensors")
    state = {n: t for n, t in state.items() if "self_attn" not in n and "mlp" not in n}
    names = [f"model.layers.0.self_attn.{p}_proj" for p in "qkv"]
    write_mixed(folder, state, names, makers, rng, values)
    checkpoint = open_checkpoint(str(folder))
    weights = [checkpoint.linear(f"{name}.weight") for name in names]
    assert [w.group_size for w in weights] == [128, 64, 32]
    for weight, merged, expected in zip(weights, alike(weights, "int4"), values, strict=True):
        assert (merged.group_size, merged.mins is not None) == (32, True)
        assert np.array_equal(pub.as_float64(weight), pub.as_float64(merged))
        assert (np.abs(pub.as_float64(merged) - expected) <= pub.rounding_of_minima(weight)).all()


def write_mixed(folder, state, names, makers, rng, values) -> None:
    """All matrices plain but `names`, each made by its own maker under a config with three schemes."""
    plain = write_checkpoint(folder / "again", "llama", tokenizer=False, **WIDE)[1].state_dict()
    for name, make in zip(names, makers, strict=True):
        made, expected = make(tuple(plain.pop(f"{name}.weight").shape), rng)
        values.append(expected)
        state |= {f"{name}.{part}": tensor for part, tensor in made.items()}
    save_file({**plain, **state}, folder / "model.safetensors")
    config = in_groups(4, 128, True)
    config["config_groups"] |= {
        f"group_{size}": {"targets": ["re:.*"], "weights": {"num_bits": 4, "type": "int", "strategy": "group",
                                                           "group_size": size, "symmetric": size != 64}}
        for size in (64, 32)
    }  # fmt: skip
    pub.edit(folder, quantization_config=config)


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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported; supported are awq, compressed-tensors"),
        ({"quant_method": ["gptq"]}, r"method \['gptq'\] is not supported"),
        ({}, "method None is not supported"),
        ("gptq", "quantization_config='gptq' must be an object"),
        (pub.gptq_config(bits=3), "bits=3; supported are 4, 8"),
        (pub.gptq_config(bits=True), "bits=True; supported are 4, 8"),
        (pub.gptq_config(checkpoint_format="marlin"), "checkpoint_format='marlin'; supported are 'gptq', 'gptq_v2'"),
        (pub.gptq_config(group_size="128"), "group_size='128'; it must be -1"),
        (pub.gptq_config(group_size=64), "scales' has 9 groups, but 288 columns in groups of 64 are 5"),
        (pub.AWQ_CONFIG | {"version": "gemv"}, "version='gemv'; supported are 'gemm'"),
        (pub.AWQ_CONFIG, "qweight' has shape|qzeros' has shape|scales' has shape"),
        (pub.FP8_CONFIG | {"weight_block_size": [64, 64]}, r"weight_block_size=\[64, 64\]; supported are \[128, 128\]"),
        (pub.ct_config("nvfp4-pack-quantized"), "format='nvfp4-pack-quantized'; supported are 'pack-quantized'"),
        (pub.ct_config("pack-quantized") | {"config_groups": None}, "needs 'config_groups'"),
        (pub.ct_config("pack-quantized", num_bits=2, type="int", strategy="group"), "num_bits=2; supported are 4, 8"),
        (in_groups(4, 32, True) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparse-24-bitmask'; only"),
        (None, r"'model.layers.0.self_attn.q_proj.weight' is missing|q_proj.weight' is missing"),
    ],
)  # fmt: skip
def test_settings_that_are_not_supported_say_what_is(config, message, folder) -> None:
    pub.write_quantized(folder, pub.gptq_config(), pub.gptq)
    pub.edit(folder, quantization_config=config)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(folder))


def damage(part, change):
    """A change of one tensor of layer 1's k projection."""

    def apply(state) -> None:
        name = f"model.layers.1.self_attn.k_proj.{part}"
        changed = change(state.pop(name))
        if changed is not None:
            state[name] = changed

    return apply


def nan_in(tensor):
    tensor[0, 0] = float("nan")
    return tensor


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("gptq v1", damage("scales", nan_in), "1 of 400 scales of .*k_proj.weight' are NaN or infinite"),
        ("gptq v1", damage("g_idx", lambda t: t + 2**30), r"g_idx' names groups 1073741824..1073741828, but .* are 5"),
        ("gptq v1", damage("g_idx", lambda t: t - 1), r"g_idx' names groups -1..3, but there are 5"),
        ("gptq v1", damage("g_idx", lambda t: t[:-8]), "g_idx' has 152 columns, but qweight has room for 160"),
        ("gptq v1", damage("qzeros", lambda t: None), "qzeros' is missing"),
        ("gptq v1", damage("qweight", lambda t: t.float()), "qweight' has dtype F32 and must be I32"),
        ("awq", damage("scales", nan_in), "scales of .*k_proj.weight' are NaN"),
        ("awq", damage("qzeros", lambda t: t[:1]), r"qzeros' has shape \[1, .*\] and must have \[5, "),
        ("fp8 block", damage("weight_scale_inv", nan_in), "scales of .*k_proj.weight' are NaN"),
        ("fp8 block", damage("weight_scale_inv", lambda t: t[:, :1]), r"weight_scale_inv' has shape \[1, 1\]"),
        ("fp8 block", damage("weight_scale_inv", lambda t: None), "weight_scale_inv' is missing"),
        ("ct int4", damage("weight_shape", lambda t: t * 0 - 5), r"weight_shape' says \[-5, -5\]"),
        ("ct int4", damage("weight_shape", lambda t: torch.tensor([80, 2**62])), "fits no entry of config_groups"),
        ("ct int4", damage("weight_scale", lambda t: t[:, :2]), "fits no entry of config_groups"),
        ("ct int8", damage("weight_scale", lambda t: t * float("inf")), "are NaN or infinite"),
    ],
)  # fmt: skip
def test_a_damaged_module_is_named_with_what_is_wrong(case, change, message, folder) -> None:
    config, make, *_ = CASES[case]
    pub.write_quantized(folder, config, make)
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(folder)).linear("model.layers.1.self_attn.k_proj.weight")


def test_a_quantized_router_and_a_matrix_stored_twice_are_refused(folder) -> None:
    pub.write_quantized(folder, pub.AWQ_CONFIG, pub.awq)
    state = load_file(folder / "model.safetensors")
    for name, message in (
        ("model.layers.0.mlp.gate.qweight", "only projections, the embedding and the LM head may be"),
        ("model.layers.0.mlp.up_proj.weight", "which exists too; one of them must go"),
    ):
        save_file(state | {name: torch.zeros(8, 8, dtype=torch.int32)}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(str(folder))


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


def test_fp8_without_a_quantization_config_is_not_taken_for_plain_weights(folder) -> None:
    pub.write_quantized(folder, pub.FP8_CONFIG, pub.fp8)
    pub.edit(folder, quantization_config=None)
    with pytest.raises(CheckpointError, match="not part of|dtype F8_E4M3"):
        open_checkpoint(str(folder))

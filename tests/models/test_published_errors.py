"""Published quantizations that cannot be read say which setting or tensor is wrong, and what would work."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from strata_lab.models.loader import CheckpointError, open_checkpoint
from tests.models import published as pub
from tests.models.cases import CASES, in_groups


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


def test_fp8_without_a_quantization_config_is_not_taken_for_plain_weights(folder) -> None:
    pub.write_quantized(folder, pub.FP8_CONFIG, pub.fp8)
    pub.edit(folder, quantization_config=None)
    with pytest.raises(CheckpointError, match="not part of|dtype F8_E4M3"):
        open_checkpoint(str(folder))

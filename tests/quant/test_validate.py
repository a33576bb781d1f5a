"""`strata validate`: every line on good checkpoints of each family, and the one line that each kind of damage turns."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from strata_lab.models.errors import CheckpointError
from strata_lab.models.hub import find_model
from strata_lab.models.loader import open_checkpoint
from strata_lab.quant.convert_model import ConvertSettings, convert_checkpoint
from strata_lab.quant.validate import SUSPICIOUS, Line, StructuralIncompatibilityError, validate
from tests.checkpoints import FAMILIES, byte_level_backend, write_checkpoint, write_gguf

QUESTIONS = [
    "architecture", "tensors", "precision", "RoPE", "heads", "fused QKV", "causal mask", "gated MLP", "cache blocks",
    "row alignment", "groups", "tokenizer", "values", "largest weight",
]  # fmt: skip
HEAD = "int8 group32"  # what a conversion to 8 bits or fewer makes of embedding and head
Q0 = "model.layers.0.self_attn.q_proj.weight"
DOWN1 = "model.layers.1.mlp.down_proj.weight"


def lines_of(path: Path | str, **options: Any) -> list[Line]:
    checkpoint = open_checkpoint(str(path), **options)
    try:
        return validate(checkpoint)
    finally:
        checkpoint.close()


def by_name(lines: list[Line]) -> dict[str, Line]:
    assert len({line.name for line in lines}) == len(lines)
    return {line.name: line for line in lines}


def only(lines: list[Line], verdict: str) -> Line:
    """The one line that is not ok, which must have that verdict and say what to do."""
    (found,) = [line for line in lines if line.verdict != "ok"]
    assert found.verdict == verdict and found.fix
    return found


def damaged(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """Change the tensors of a plain checkpoint folder in place."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    return folder


def converted(source: Path, destination: Path, **settings: Any) -> Path:
    checkpoint = open_checkpoint(str(source))
    try:
        return convert_checkpoint(checkpoint, destination, ConvertSettings(**settings)).folder
    finally:
        checkpoint.close()


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "llama", "llama")[0]


# -- good checkpoints -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_good_checkpoint_answers_every_question_with_ok(family: str, tmp_path: Path) -> None:
    folder, model = write_checkpoint(tmp_path / family, family)
    lines = lines_of(folder)
    assert [line.name for line in lines] == QUESTIONS
    assert [line for line in lines if line.verdict != "ok" or line.fix] == []
    said = by_name(lines)
    c, dim = model.config, getattr(model.config, "head_dim", None) or 16
    experts = getattr(c, "num_experts", 0)
    assert said["architecture"].value.startswith(f"{family}, 2 layers, {'6 experts' if experts else 'dense'}")
    matrices = 2 * (4 + 3 * (experts or 1)) + (1 if c.tie_word_embeddings else 2)
    assert said["precision"].value == f"{matrices} matrices fp32"
    assert said["RoPE"].value == "real-valued, theta 10000, plain, up to position 256"
    assert said["heads"].value == f"4 query heads share 2 key/value heads of {dim}"
    assert said["gated MLP"].value.endswith(f"width {32 if experts else 96}")
    assert said["cache blocks"].value == f"16 tokens x 2 heads x {dim} = {32 * dim} numbers"
    assert said["tokenizer"].value == "265 tokens of 320, text survives"
    largest = max(p.detach().abs().max().item() for p in model.parameters())
    assert said["largest weight"].value.startswith(f"{largest:.3g} in ")


def test_progress_names_every_tensor_and_only_grows(llama: Path) -> None:
    seen: list[tuple[str, float]] = []
    checkpoint = open_checkpoint(str(llama))
    validate(checkpoint, lambda text, done: seen.append((text, done)))
    assert [text for text, _ in seen] == [f"reading {name}" for name in checkpoint.names()]
    fractions = [done for _, done in seen]
    assert fractions == sorted(fractions) and fractions[0] >= 0 and fractions[-1] < 1
    checkpoint.close()


@pytest.mark.parametrize(
    ("settings", "label"),
    [
        ({"weights": "fp8"}, "fp8 channel"),
        ({"weights": "int8", "granularity": "channel"}, "int8 channel"),
        ({"weights": "int4", "granularity": "group32-asym"}, "int4 group32-asym"),
        ({"weights": "int4", "granularity": "group32"}, "int4 group32"),
    ],
)
def test_a_converted_checkpoint_is_ok_and_its_formats_are_counted(
    settings: dict[str, Any], label: str, llama: Path, tmp_path: Path
) -> None:
    lines = by_name(lines_of(converted(llama, tmp_path / "made", **settings)))
    assert {line.verdict for line in lines.values()} == {"ok"}
    counted = (f"14 matrices {label}", f"2 matrices {HEAD}")
    assert lines["precision"].value in (", ".join(counted), ", ".join(counted[::-1]))


def test_a_negative_scale_of_symmetric_int4_is_no_damage(tmp_path: Path) -> None:
    """Its sign says on which side of zero the eighth code lies: half of the groups of any Q4_0 file have one."""
    model = write_checkpoint(tmp_path / "m", "llama")[1]
    write_gguf(tmp_path / "m.gguf", model, kind="Q4_0")
    checkpoint = open_checkpoint(str(tmp_path / "m.gguf"), cache_dir=tmp_path / "cache")
    scales = checkpoint.linear(Q0).scales
    assert scales is not None and bool((scales < 0).any())
    assert {line.verdict for line in validate(checkpoint)} == {"ok"}
    checkpoint.close()


@pytest.mark.slow
@pytest.mark.skipif(find_model("smollm2-135m") is None, reason="smollm2-135m is not installed; run `make model`")
def test_the_default_model_is_ok_and_its_tokenizer_keeps_every_script() -> None:
    lines = lines_of("smollm2-135m")
    assert [line.name for line in lines] == QUESTIONS
    assert {line.verdict for line in lines} == {"ok"}
    said = by_name(lines)
    assert said["tokenizer"].value == "49152 tokens of 49152, text survives"
    assert "210 matrices int4 group32-asym" in said["precision"].value


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_named_with_its_place(bad: float, llama: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[DOWN1][3, 7] = bad

    line = only(lines_of(damaged(llama, change)), "fail")
    assert line.name == "values" and line.value.startswith(f"{DOWN1}: found a value of {bad} at [3, 7]")
    assert "again" in line.fix


def test_a_norm_that_is_not_finite_is_named(llama: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"][5] = math.nan

    assert "model.norm.weight: found a value of nan at [5]" in only(lines_of(damaged(llama, change)), "fail").value


def test_a_nan_in_the_first_layer_does_not_accuse_the_causal_mask(llama: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[Q0][0, 0] = math.nan

    failed = [line for line in lines_of(damaged(llama, change)) if line.verdict == "fail"]
    assert [line.name for line in failed] == ["attention", "values"]
    assert "layer 0: found results that are not finite" in failed[0].value and failed[0].fix == "see the line on values"
    assert Q0 in failed[1].value


@pytest.mark.parametrize(
    ("settings", "bad", "words"),
    [
        ({"weights": "int8"}, math.nan, "a scale of nan at [0, 0]"),
        ({"weights": "int8"}, math.inf, "a scale of inf at [0, 0]"),
        ({"weights": "int8"}, -0.25, "a scale of -0.25"),
        ({"weights": "fp8"}, -0.25, "a scale of -0.25"),
        ({"weights": "int4", "granularity": "group32-asym"}, -0.25, "a scale of -0.25"),
        ({"weights": "int4", "granularity": "group32"}, math.nan, "a scale of nan at [0, 0]"),
    ],
)
def test_a_bad_scale_fails(settings: dict[str, Any], bad: float, words: str, llama: Path, tmp_path: Path) -> None:
    made = converted(llama, tmp_path / "made", **settings)
    _rewrite(made / "layer-00001.safetensors", "mlp.down", ".scales", bad)
    line = only(lines_of(made), "fail")
    assert line.name == "values" and line.value.startswith(f"{DOWN1}: found {words}")
    assert "convert" in line.fix


def test_a_bad_minimum_fails(llama: Path, tmp_path: Path) -> None:
    made = converted(llama, tmp_path / "made", weights="int4", granularity="group32-asym")
    _rewrite(made / "layer-00001.safetensors", "mlp.down", ".mins", math.nan)
    assert f"{DOWN1}: found a minimum of nan at [0, 0]" in only(lines_of(made), "fail").value


def _rewrite(path: Path, owner: str, part: str, value: float) -> None:
    """Set the first number of one stored part."""
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    (name,) = [name for name in tensors if owner in name and name.endswith(part)]
    tensors[name][0, 0] = value
    save_file(tensors, path)


def test_zeros_and_huge_values_are_warnings(llama: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[DOWN1].zero_()
        tensors["model.layers.1.mlp.up_proj.weight"][2, 2] = 3 * SUSPICIOUS

    lines = by_name(lines_of(damaged(llama, change)))
    assert lines["values"].verdict == "ok"
    assert lines["empty tensors"].verdict == lines["largest weight"].verdict == "warn"
    assert lines["empty tensors"].value == f"1 hold nothing but zeros, first {DOWN1}"
    assert lines["largest weight"].value == "30000 in model.layers.1.mlp.up_proj.weight"


# -- shapes and formats -----------------------------------------------------------------------------------------------


def test_gate_and_up_of_different_shapes_cannot_be_opened_at_all(llama: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name][:64].contiguous()

    with pytest.raises(CheckpointError, match=r"up_proj\.weight' has shape \[64, 64\], .* \[96, 64\]"):
        open_checkpoint(str(damaged(llama, change)))


def test_groups_that_do_not_divide_a_row_are_a_warning(llama: Path, tmp_path: Path) -> None:
    """96 columns in groups of 64: the last group is a part of one."""
    line = only(lines_of(converted(llama, tmp_path / "made", weights="int4", granularity="group64")), "warn")
    assert line.name == "groups"
    assert line.value == "2 matrices end with a part of a group, first model.layers.0.mlp.down_proj.weight"
    assert "32" in line.fix


def test_rows_off_the_width_of_a_load_are_a_warning(tmp_path: Path) -> None:
    """36 bytes of int8 are not a multiple of 16."""
    source = write_checkpoint(tmp_path / "odd", "llama", intermediate_size=36)[0]
    line = only(lines_of(converted(source, tmp_path / "made", weights="int8", granularity="channel")), "warn")
    assert line.name == "row alignment"
    assert line.value == "2 matrices with rows off 16 bytes, first model.layers.0.mlp.down_proj.weight"


def test_matrices_that_are_fused_but_differ_are_warnings(llama: Path, tmp_path: Path) -> None:
    keep = ("*.v_proj.weight=fp8", "*.up_proj.weight=bf16")
    lines = by_name(lines_of(converted(llama, tmp_path / "made", weights="int8", keep=keep)))
    assert lines["fused QKV"].verdict == lines["gated MLP"].verdict == "warn"
    assert "fp8 channel" in lines["fused QKV"].value and "differ in format" in lines["gated MLP"].value
    assert {line.verdict for name, line in lines.items() if name not in ("fused QKV", "gated MLP")} == {"ok"}


# -- tokenizer --------------------------------------------------------------------------------------------------------


def test_a_model_without_tokenizer_is_a_warning(tmp_path: Path) -> None:
    line = only(lines_of(write_checkpoint(tmp_path / "m", "llama", tokenizer=False)[0]), "warn")
    assert (line.name, line.value) == ("tokenizer", "none")


def test_the_tokenizer_of_a_larger_model_fails(llama: Path) -> None:
    backend = byte_level_backend()
    backend.add_tokens([f"extra{i}" for i in range(100)])
    backend.save(str(llama / "tokenizer.json"))
    line = only(lines_of(llama), "fail")
    assert line.name == "tokenizer" and line.value == "tokenizer: found 365 tokens, expected at most the model's 320"
    assert "one place" in line.fix


def test_a_tokenizer_that_loses_text_is_a_warning(llama: Path) -> None:
    rules = json.loads((llama / "tokenizer.json").read_text())
    rules["normalizer"] = {"type": "Lowercase"}
    (llama / "tokenizer.json").write_text(json.dumps(rules))
    line = only(lines_of(llama), "warn")
    assert line.name == "tokenizer" and "grüße" in line.value


def test_a_damaged_tokenizer_is_a_line_and_the_others_are_still_asked(llama: Path) -> None:
    (llama / "tokenizer.json").write_text("{}")
    lines = lines_of(llama)
    assert only(lines, "fail").name == "tokenizer" and [line.name for line in lines] == QUESTIONS


# -- the error --------------------------------------------------------------------------------------------------------


def test_a_structural_error_keeps_its_parts_and_is_a_checkpoint_error() -> None:
    error = StructuralIncompatibilityError("a.weight", "shape [1]", "[2]", "fetch it again")
    assert isinstance(error, CheckpointError)
    assert (error.tensor, error.found, error.expected, error.fix) == ("a.weight", "shape [1]", "[2]", "fetch it again")
    assert str(error) == "a.weight: found shape [1], expected [2]; fetch it again"


def test_attention_that_looks_ahead_is_noticed(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from strata_lab.quant import validate as module

    class LooksAhead(module.Forward):
        def layer(self, x: Tensor, weights: Any) -> Tensor:
            return super().layer(x.flip(0), weights).flip(0)

    monkeypatch.setattr(module, "Forward", LooksAhead)
    line = only(lines_of(llama), "fail")
    assert line.name == "attention" and "causal mask: found a later token that moves earlier results" in line.value

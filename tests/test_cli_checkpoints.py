"""Laws of `strata convert` and `strata validate`: what they print, how they fail, that an interrupt loses little."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from strata_lab import cli
from strata_lab.cli import checkpoints
from strata_lab.models.loader import open_checkpoint
from strata_lab.models.strata_folder import StrataCheckpoint
from strata_lab.settings import ConfigError
from tests.checkpoints import write_checkpoint

DOWN1 = "model.layers.1.mlp.down_proj.weight"


def strata(*arguments: Any) -> Result:
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


def error_of(result: Result, code: int = 2) -> str:
    """The one line of a mistake, which must be all there is."""
    assert result.exit_code == code and result.stdout == "", result.output
    (line,) = [text for text in result.stderr.splitlines() if text.startswith("error: ")]
    assert "Traceback" not in result.stderr
    return line


@pytest.fixture(scope="module")
def source(tmp_path_factory: Any) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("cli") / "source", "llama", num_hidden_layers=3)[0]


@pytest.fixture(scope="module")
def int8(source: Path) -> Path:
    assert strata("convert", source, source.parent / "int8").exit_code == 0
    return source.parent / "int8"


@pytest.fixture
def damaged(int8: Path, tmp_path: Path) -> Path:
    """A converted folder with one negative scale."""
    for path in int8.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = {name: tensor.clone() for name, tensor in load_file(tmp_path / "layer-00001.safetensors").items()}
    (name,) = [name for name in tensors if "mlp.down" in name and name.endswith(".scales")]
    tensors[name][0, 0] = -0.5
    save_file(tensors, tmp_path / "layer-00001.safetensors")
    return tmp_path


# -- convert ----------------------------------------------------------------------------------------------------------


def test_convert_says_where_how_large_and_what_next(source: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    result = strata("convert", source, made, "--weights", "int4", "--granularity", "group32")
    assert result.exit_code == 0, result.output
    first, second = result.stdout.splitlines()
    assert first.startswith(f"{made}: ") and " MiB, from " in first and "already" not in first
    assert second == f"next: strata validate {made} --deep --source {source}"
    opened = StrataCheckpoint(made)
    assert opened.stored_format == "int4" and opened.linear(DOWN1).group_size == 32
    opened.close()


def test_convert_json_is_one_document_with_the_sizes(source: Path, tmp_path: Path) -> None:
    result = strata("convert", source, tmp_path / "made", "--json")
    found = json.loads(result.stdout)
    assert found["folder"] == str(tmp_path / "made")
    assert (found["layers"], found["resumed"]) == (3, 0)
    assert found["bytes_after"] == sum(p.stat().st_size for p in (tmp_path / "made").glob("*.safetensors"))
    assert found["bytes_after"] < found["bytes_before"] / 3
    assert found["seconds"] > 0


def test_a_calibrated_conversion_reads_a_text_even_where_the_model_has_few_positions(
    source: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("hello world, hello again. " * 200)
    options = ("--weights", "int4", "--granularity", "group32", "--method", "gptq", "--kv-scales", "--sequences", "2")
    result = strata("convert", source, tmp_path / "made", *options, "--calibration", tmp_path / "text.txt")
    assert result.exit_code == 0, result.output
    manifest = json.loads((tmp_path / "made" / "manifest.json").read_text())
    assert manifest["method"] == "gptq" and manifest["calibration"]["tokens"] == 2 * 256
    assert len(manifest["kv_scales"]) == 3


def test_the_projects_own_text_calibrates_where_none_is_given(source: Path) -> None:
    opened = open_checkpoint(str(source))
    found = checkpoints.calibration_tokens(opened, None, 3)
    assert [len(sequence) for sequence in found] == [256] * 3
    assert max(map(max, found)) < opened.config.vocab_size
    opened.close()


def test_an_interrupted_conversion_says_how_much_was_there_already(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strata_lab.quant import convert_model

    real, written = convert_model.write_tensors, []

    def stops(path: Path, values: Any) -> Any:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path.name)
        return real(path, values)

    monkeypatch.setattr(convert_model, "write_tensors", stops)
    assert strata("convert", source, tmp_path / "made").exit_code == 130
    assert not (tmp_path / "made").exists()
    monkeypatch.setattr(convert_model, "write_tensors", real)
    result = strata("convert", source, tmp_path / "made")
    assert result.exit_code == 0 and ", 2 of 3 layers were there already" in result.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"made"}


def test_rules_and_head_reach_the_conversion(source: Path, tmp_path: Path) -> None:
    options = ("--keep", "*.down_proj.weight", "--keep", "*.o_proj.weight=bf16", "--head", "fp8")
    assert strata("convert", source, tmp_path / "made", *options).exit_code == 0
    opened = StrataCheckpoint(tmp_path / "made")
    names = (DOWN1, "model.layers.1.self_attn.o_proj.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight")
    assert [opened.linear(name).format for name in names] == ["fp32", "bf16", "fp8", "int8"]
    opened.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--weights", "int3"], "weight_format='int3' must be one of"),
        (["--weights", "int8", "--granularity", "group7"], "granularity='group7' of int8 must be one of"),
        (["--method", "magic"], "method='magic' must be one of rtn"),
        (["--weights", "bf16", "--method", "gptq"], "has no scales to choose"),
        (["--keep", "*.nothing"], "fits no matrix"),
        (["--method", "gptq", "--calibration", "no/such.txt"], "calibration='no/such.txt' cannot be read"),
    ],
)
def test_a_bad_option_of_convert_is_one_line(options: list[str], said: str, source: Path, tmp_path: Path) -> None:
    assert said in error_of(strata("convert", source, tmp_path / "made", *options))
    assert list(tmp_path.iterdir()) == []


def test_convert_refuses_what_it_cannot_read_or_would_overwrite(source: Path, tmp_path: Path) -> None:
    assert "no/such/model" in error_of(strata("convert", "no/such/model", tmp_path / "made"))
    assert "exists already" in error_of(strata("convert", source, tmp_path))
    assert "does not exist" in error_of(strata("convert", source, tmp_path / "a" / "b"))
    (tmp_path / "empty.txt").write_text("")
    empty = strata("convert", source, tmp_path / "made", "--method", "gptq", "--calibration", tmp_path / "empty.txt")
    assert "holds no text" in error_of(empty)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    latin = strata("convert", source, tmp_path / "made", "--method", "gptq", "--calibration", tmp_path / "latin.txt")
    assert "cannot be read as UTF-8" in error_of(latin)


def test_a_model_without_tokenizer_cannot_be_calibrated_by_text(tmp_path: Path) -> None:
    bare = write_checkpoint(tmp_path / "bare", "llama", tokenizer=False)[0]
    assert "use method='rtn'" in error_of(strata("convert", bare, tmp_path / "made", "--method", "gptq"))
    opened = open_checkpoint(str(bare))
    with pytest.raises(ConfigError, match="no tokenizer"):
        checkpoints.calibration_tokens(opened, None, 1)
    opened.close()


# -- validate ---------------------------------------------------------------------------------------------------------


def test_validate_prints_a_line_per_question_and_leaves_with_0(int8: Path) -> None:
    result = strata("validate", int8)
    assert result.exit_code == 0, result.output
    for words in ("architecture", "RoPE", "causal mask", "real-valued", "group32", "largest weight"):
        assert words in result.stdout
    assert not any(line.startswith(("warn", "fail")) for line in result.stdout.splitlines())


def test_validate_json_holds_the_same_lines(int8: Path) -> None:
    result = strata("validate", int8, "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["ok"] is True and "quality" not in found
    assert {line["verdict"] for line in found["lines"]} == {"ok"}
    assert len(found["lines"]) == 14
    assert set(found["lines"][0]) == {"name", "value", "verdict", "fix"}


def test_a_checkpoint_that_fails_leaves_with_1_and_says_which_tensor(damaged: Path) -> None:
    result = strata("validate", damaged)
    assert result.exit_code == 1
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("fail")]
    assert DOWN1 in line and "a scale of -0.5" in line
    assert "does not fit; see the lines marked fail" in result.stderr
    found = strata("validate", damaged, "--json")
    assert found.exit_code == 1 and json.loads(found.stdout)["ok"] is False


def test_a_warning_is_no_failure(source: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    assert strata("convert", source, made, "--weights", "int4", "--granularity", "group64").exit_code == 0
    result = strata("validate", made)
    assert result.exit_code == 0
    assert any(line.startswith("warn") and "part of a group" in line for line in result.stdout.splitlines())


def test_deep_needs_to_know_what_to_compare_with(int8: Path) -> None:
    assert "name it with --source" in error_of(strata("validate", int8, "--deep"))


def test_what_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    assert "convert the model again" in error_of(strata("validate", tmp_path))


def test_deep_prints_the_quality_and_writes_a_page(source: Path, int8: Path, tmp_path: Path) -> None:
    page = tmp_path / "deep" / "page.html"
    result = strata("validate", int8, "--deep", "--source", source, "--html", page)
    assert result.exit_code == 0, result.output
    for language in ("English", "Chinese"):
        (line,) = [line for line in result.stdout.splitlines() if line.startswith(f"{language}: ")]
        assert "perplexity" in line and "mean KL 0.00" in line and "top-1" in line
    assert f"page: {page}" in result.stderr
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and "http" not in text and int8.name in text


def test_deep_json_holds_numbers_and_answers(source: Path, int8: Path, tmp_path: Path) -> None:
    result = strata("validate", int8, "--deep", "--source", source, "--html", tmp_path / "page.html", "--json")
    found = json.loads(result.stdout)["quality"]
    assert set(found["languages"]) == {"English", "Chinese"}
    assert 0 <= found["languages"]["English"]["mean_kl"] < 0.01
    assert len(found["answers"]) == 8 and (tmp_path / "page.html").is_file()


def test_deep_does_not_compare_what_does_not_fit(source: Path, damaged: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = strata("validate", damaged, "--deep", "--source", source, "--html", page)
    assert result.exit_code == 1 and not page.exists() and "perplexity" not in result.stdout

"""Fuzzed folders of `strata convert`: any manifest and any file is read or a `CheckpointError`; nothing stays open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata_lab.models.checkpoint import is_linear
from strata_lab.models.errors import CheckpointError
from strata_lab.models.loader import open_checkpoint
from strata_lab.models.strata_folder import MANIFEST, StrataCheckpoint
from strata_lab.quant import get_format
from strata_lab.quant.convert_model import ConvertSettings, convert_checkpoint
from strata_lab.quant.forward import sequence_logits
from tests.checkpoints import write_checkpoint
from tests.models.test_hostile_files import JUNK, NAMES, SIZES, assert_nothing_is_open, join, split
from tests.models.watch import copy_of, watched

FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
FAMILIES = {
    "llama": ConvertSettings("int4", "group32-asym"),
    "qwen2": ConvertSettings("fp8", "block128"),
    "qwen3_moe": ConvertSettings("int8", "channel", keep=("*.v_proj.weight=bf16",)),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: Any) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("good")
    for family, wanted in FAMILIES.items():
        source = open_checkpoint(str(write_checkpoint(root / "source" / family, family)[0]))
        convert_checkpoint(source, root / family, wanted)
        source.close()
    return {family: root / family for family in FAMILIES}


def read_everything(folder: Path) -> bool:
    """Open a folder, read every tensor and run the model; whether that worked. Other errors escape."""
    try:
        checkpoint = open_checkpoint(str(folder))
    except CheckpointError:
        return False
    try:
        for name in checkpoint.names():
            if is_linear(name):
                weight = checkpoint.linear(name)
                assert get_format(weight.format).dequantize(weight).shape == weight.shape
                del weight
            else:
                checkpoint.tensor(name)
        with torch.inference_mode():
            assert sequence_logits(checkpoint)([1, 2]).shape == (2, checkpoint.config.vocab_size)
        checkpoint.tokenizer()
    finally:
        checkpoint.close()
    return True


def test_the_good_folders_read(good: dict[str, Path]) -> None:
    for folder in good.values():
        assert read_everything(folder)
        assert_nothing_is_open(folder)


@pytest.mark.parametrize("family", FAMILIES)
@FUZZ
@given(data=st.data())
def test_a_tensor_s_line_of_the_manifest_is_read_or_refused(family: str, good: dict[str, Path], data: Any) -> None:
    with copy_of(good[family]) as folder:
        manifest = json.loads((folder / MANIFEST).read_text())
        name = data.draw(st.sampled_from(sorted(manifest["tensors"])))
        entry = manifest["tensors"][name]
        change = data.draw(st.sampled_from([*entry, "drop", "entry", "rename"]))
        if change == "drop":
            del manifest["tensors"][name]
        elif change == "entry":
            manifest["tensors"][name] = data.draw(JUNK)
        elif change == "rename":
            manifest["tensors"][data.draw(st.text(max_size=20))] = manifest["tensors"].pop(name)
        else:
            other = manifest["tensors"][data.draw(st.sampled_from(sorted(manifest["tensors"])))].get(change)
            sizes = st.lists(SIZES, max_size=3)
            entry[change] = data.draw(JUNK | sizes | st.just(other) | st.sampled_from(["fp8", "int4", "fp32", 0, 64]))
        (folder / MANIFEST).write_text(json.dumps(manifest))
        worked = read_everything(folder)
        assert not worked or change not in ("drop", "entry")
        assert_nothing_is_open(folder)


@pytest.mark.parametrize("family", FAMILIES)
@FUZZ
@given(data=st.data())
def test_the_rest_of_the_manifest_is_read_or_refused(family: str, good: dict[str, Path], data: Any) -> None:
    with copy_of(good[family]) as folder:
        manifest = json.loads((folder / MANIFEST).read_text())
        inside = manifest if data.draw(st.booleans()) else manifest["config"]
        key = data.draw(st.sampled_from(sorted(inside)))
        if data.draw(st.booleans()):
            inside[key] = data.draw(JUNK | SIZES | st.lists(st.lists(st.floats(), min_size=2, max_size=2), max_size=3))
        elif data.draw(st.booleans()):
            inside[data.draw(st.text(max_size=8))] = data.draw(JUNK)
        else:
            del inside[key]
        (folder / MANIFEST).write_text(json.dumps(manifest))
        read_everything(folder)
        assert_nothing_is_open(folder)


@FUZZ
@given(raw=st.binary(max_size=40) | st.text(max_size=40).map(str.encode) | JUNK.map(lambda j: json.dumps(j).encode()))
def test_a_manifest_of_any_bytes_is_refused(good: dict[str, Path], raw: bytes) -> None:
    with copy_of(good["llama"]) as folder:
        (folder / MANIFEST).write_bytes(raw)
        assert not read_everything(folder)
        assert_nothing_is_open(folder)


@pytest.mark.parametrize("family", FAMILIES)
@FUZZ
@given(data=st.data())
def test_a_cut_file_is_refused_and_a_damaged_header_no_more_than_that(
    family: str, good: dict[str, Path], data: Any
) -> None:
    with copy_of(good[family]) as folder:
        files = sorted([*folder.glob("*.safetensors"), folder / MANIFEST])
        path = data.draw(st.sampled_from(files))
        raw = path.read_bytes()
        action = data.draw(st.sampled_from(["cut", "remove", "folder", "shape", "dtype", "swap"]))
        if path.name == MANIFEST and action in ("shape", "dtype", "swap"):
            action = "cut"
        if action == "cut":
            path.write_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
        elif action == "swap":
            path.write_bytes(data.draw(st.sampled_from(files[:-1])).read_bytes())
        elif action in ("remove", "folder"):
            path.unlink()
            if action == "folder":
                path.mkdir()
        else:
            header, body = split(raw)
            entry = header[data.draw(st.sampled_from(sorted(n for n in header if n != "__metadata__")))]
            shapes = st.just(entry["shape"][::-1]) | st.lists(SIZES, max_size=3)
            dtypes = st.sampled_from(["F32", "F16", "BF16", "I8", "U8", "F8_E4M3", "I64", "X"])
            entry[action] = data.draw(shapes if action == "shape" else dtypes)
            path.write_bytes(join(json.dumps(header), body))
        worked = read_everything(folder)
        assert not worked or action in ("shape", "dtype", "swap")
        assert_nothing_is_open(folder)


@FUZZ
@given(file=NAMES)
def test_a_manifest_can_name_files_of_its_own_folder_only(file: str, good: dict[str, Path]) -> None:
    with copy_of(good["llama"]) as folder:
        manifest = json.loads((folder / MANIFEST).read_text())
        for entry in manifest["tensors"].values():
            entry["file"] = file
        (folder / MANIFEST).write_text(json.dumps(manifest))
        with watched() as seen:
            assert not read_everything(folder)
        opened = [str(arguments[0]) for event, arguments in seen if event == "open"]
        assert [p for p in opened if (p.endswith(".safetensors") and Path(p).parent != folder) or "passwd" in p] == []
        assert_nothing_is_open(folder)


def test_reading_after_close_is_an_error_that_says_so(good: dict[str, Path]) -> None:
    checkpoint = StrataCheckpoint(good["llama"])
    kept = checkpoint.linear("model.layers.0.mlp.down_proj.weight")
    checkpoint.close()
    assert get_format(kept.format).dequantize(kept).isfinite().all()
    with pytest.raises(CheckpointError, match="is closed"):
        checkpoint.linear("model.layers.0.mlp.down_proj.weight")
    with pytest.raises(CheckpointError, match="there is no tensor 'x'"):
        checkpoint.tensor("x")

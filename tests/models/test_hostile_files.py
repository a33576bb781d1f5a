"""Fuzzed checkpoints: whatever a file holds, reading it works or raises `CheckpointError`, and leaves nothing open.

Every example damages one good folder (or GGUF file) in a random way, opens it and reads every tensor.
"""

from __future__ import annotations

import gc
import io
import json
import os
import shutil
import struct
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from strata_lab.models.checkpoint import is_linear
from strata_lab.models.conversion import open_gguf
from strata_lab.models.loader import CheckpointError, open_checkpoint
from tests.checkpoints import write_checkpoint, write_gguf
from tests.models import published as pub
from tests.models.watch import copy_of, open_descriptors, runs_code, watched

FUZZ = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
KINDS = {
    "gptq": (pub.gptq_config(desc_act=True), pub.gptq),
    "awq": (pub.AWQ_CONFIG, pub.awq),
    "fp8": (pub.FP8_CONFIG, pub.fp8),
    "ct": (pub.ct_config("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=False),
           lambda shape, rng: pub.packed(shape, rng, sym=False)),
    "ct int8": (pub.ct_config("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True), pub.int8),
}  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> dict[str, Path]:
    """Kind to a good folder; "plain" and "bin" are unquantized, "gguf" holds m.gguf."""
    root = tmp_path_factory.mktemp("good")
    folders = {}
    for kind, (config, make) in KINDS.items():
        folders[kind], _ = write_checkpoint(root / kind, "llama", tokenizer=False)
        pub.write_quantized(root / kind, config, make)
    folders["plain"], _ = write_checkpoint(root / "plain", "llama", tokenizer=False)
    folders["bin"], _ = write_checkpoint(root / "bin", "llama", tokenizer=False)
    torch.save(load_file(root / "bin" / "model.safetensors"), root / "bin" / "pytorch_model.bin")
    (root / "bin" / "model.safetensors").unlink()
    return folders


def read_everything(path: Path, cache: Path | None = None) -> bool:
    """Open and read a checkpoint; whether that worked. Anything but `CheckpointError` escapes."""
    try:
        checkpoint = open_gguf(path, cache_dir=cache) if cache else open_checkpoint(str(path))
        for name in checkpoint.names():
            if not is_linear(name):
                checkpoint.tensor(name)
                continue
            weight = checkpoint.linear(name)
            assert weight.scales is None or bool(torch.isfinite(weight.scales.float()).all()), name
            del weight
        checkpoint.close()
    except CheckpointError:
        return False
    return True


def assert_nothing_is_open(folder: Path) -> None:
    if sys.platform != "linux":
        return
    if list(open_descriptors(folder)):
        gc.collect()  # an exception's traceback may hold them until its cycle is found
    assert list(open_descriptors(folder)) == []


def split(raw: bytes) -> tuple[dict, bytes]:
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def join(header: str, data: bytes) -> bytes:
    return struct.pack("<Q", len(header.encode())) + header.encode() + data


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
SIZES = st.sampled_from([-1, 0, 1, 2**31, 2**63, 2**64, 7, 32])


@pytest.mark.parametrize("kind", [*KINDS, "plain"])
@FUZZ
@given(data=st.data())
def test_a_damaged_safetensors_header_is_an_error_and_no_more(kind, good, data) -> None:
    """Entries with other shapes, dtypes, offsets, names, twice the same name; headers that lie about their length."""
    with copy_of(good[kind]) as folder:
        path = folder / "model.safetensors"
        header, body = split(path.read_bytes())
        name = data.draw(st.sampled_from(sorted(n for n in header if n != "__metadata__")))
        entry = header[name]
        change = data.draw(st.sampled_from(["shape", "dtype", "offsets", "junk", "drop", "rename", "twice", "length"]))
        if change == "shape":
            entry["shape"] = data.draw(st.lists(SIZES, max_size=3) | st.just(entry["shape"][::-1]) | JUNK)
        elif change == "dtype":
            entry["dtype"] = data.draw(st.sampled_from(["F32", "F16", "F8_E4M3", "I32", "I8", "U8", "F64", "X", "I64"]))
        elif change == "offsets":
            entry["data_offsets"] = data.draw(st.lists(SIZES, min_size=2, max_size=2) | JUNK)
        elif change == "junk":
            header[name] = data.draw(JUNK)
        elif change == "drop":
            del header[name]
        elif change == "rename":
            header[
                data.draw(st.text(max_size=30) | st.sampled_from(["a.weight", "lm_head.qweight", "../x.weight"]))
            ] = header.pop(name)
        text = json.dumps(header)
        if change == "twice":
            text = text[:-1] + f", {json.dumps(name)}: {json.dumps(entry)}}}"
        raw = join(text, body)
        if change == "length":
            raw = struct.pack("<Q", data.draw(st.integers(0, 2**64 - 1) | st.integers(0, 5000))) + raw[8:]
        path.write_bytes(raw)
        worked = read_everything(folder)
        assert not worked or change in ("shape", "dtype", "drop", "length", "rename", "offsets", "junk")
        assert_nothing_is_open(folder)


@pytest.mark.parametrize("kind", [*KINDS, "plain", "bin"])
@FUZZ
@given(data=st.data())
def test_a_truncated_or_flipped_file_is_an_error_or_still_reads(kind, good, data) -> None:
    with copy_of(good[kind]) as folder:
        path = folder / ("pytorch_model.bin" if kind == "bin" else "model.safetensors")
        raw = bytearray(path.read_bytes())
        if data.draw(st.booleans()):
            path.write_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
            assert not read_everything(folder)
        else:
            for _ in range(data.draw(st.integers(1, 8))):
                raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
            path.write_bytes(raw)
            read_everything(folder)
        assert_nothing_is_open(folder)


@pytest.mark.parametrize("kind", KINDS)
@FUZZ
@given(data=st.data())
def test_any_numbers_in_scales_zeros_and_group_indices_are_read_or_refused(kind, good, data) -> None:
    """NaN and infinite scales are refused; every other bit pattern is a number or an error."""
    with copy_of(good[kind]) as folder:
        path = folder / "model.safetensors"
        header, body = split(path.read_bytes())
        ends = ("scales", "weight_scale", "weight_scale_inv", "qzeros", "g_idx", "weight_shape", "weight_zero_point")
        name = data.draw(st.sampled_from(sorted(n for n in header if n.endswith(ends))))
        start, end = header[name]["data_offsets"]
        noise = np.random.default_rng(data.draw(st.integers(0, 2**32))).integers(0, 256, end - start).astype(np.uint8)
        pattern = data.draw(st.sampled_from(["noise", "ones", "nan", "zero", "max"]))
        fill = {"ones": b"\xff", "nan": b"\x00\x7e", "zero": b"\0", "max": b"\xff\xff\xff\x7f"}.get(pattern)
        new = noise.tobytes() if fill is None else (fill * (end - start))[: end - start]
        changed = bytearray(body)
        changed[start:end] = new
        path.write_bytes(join(json.dumps(header), bytes(changed)))
        worked = read_everything(folder)
        if pattern == "ones" and name.endswith(("scales", "weight_scale", "weight_scale_inv")):
            assert not worked
        assert_nothing_is_open(folder)


@pytest.mark.parametrize("kind", [*KINDS, "plain"])
@FUZZ
@given(data=st.data())
def test_a_config_of_any_json_is_read_or_refused(kind, good, data) -> None:
    with copy_of(good[kind]) as folder:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        inside = config
        while True:  # a key at any depth
            key = data.draw(st.sampled_from(sorted(inside)))
            if isinstance(inside[key], dict) and inside[key] and data.draw(st.booleans()):
                inside = inside[key]
                continue
            break
        inside[key] = data.draw(JUNK | SIZES)
        path.write_text(json.dumps(config))
        read_everything(folder)
        assert_nothing_is_open(folder)


NAMES = st.text(max_size=12) | st.sampled_from(
    ["../../etc/passwd", "/etc/passwd", "..", ".", "", "a\0b.safetensors", "model.safetensors",
     "x" * 5000 + ".safetensors",
     "\ud800.safetensors", "../m/model.safetensors", "./model.safetensors", "model.safetensors/", "C:\\a.safetensors"]
)  # fmt: skip


@FUZZ
@given(weight_map=st.dictionaries(st.text(max_size=8), NAMES | JUNK, max_size=4) | JUNK, pickled=st.booleans())
def test_an_index_can_name_files_of_its_own_folder_only(weight_map, pickled, good) -> None:
    with copy_of(good["bin" if pickled else "plain"]) as folder:
        stem = "pytorch_model.bin" if pickled else "model.safetensors"
        (folder / f"{stem}.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with watched() as seen:
            worked = read_everything(folder)
        opened = [arguments[0] for event, arguments in seen if event == "open" and isinstance(arguments[0], str)]
        assert not worked or set(weight_map.values()) == {stem}
        assert all(Path(p).parent == folder for p in opened if p.endswith((".bin", ".safetensors")) or "etc" in p), (
            opened
        )
        assert_nothing_is_open(folder)


OPCODES = [
    bytes([op])
    for op in b"(.0123459:;<=>?@ABCDFGHIJKLMNPQRSTUVXabcdeghijlopqrstu}]()\x80\x81\x82\x85\x86\x87\x88\x93\x94"
]
GLOBALS = [b"cos\nsystem\n", b"cbuiltins\neval\n", b"ctorch._utils\n_rebuild_tensor_v2\n",
           b"ccollections\nOrderedDict\n",
           b"cbuiltins\nbytearray\n", b"X\x05\x00\x00\x00touch", b"ctorch\nload\n", b"c__main__\nX\n"]  # fmt: skip


def test_the_watcher_sees_code_that_runs() -> None:
    with watched() as seen:
        eval("1 + 1")
        os.system("true")
    assert [event for event, arguments in seen if runs_code(event, arguments)] == ["exec", "os.system"]


@FUZZ
@given(program=st.lists(st.sampled_from(OPCODES + GLOBALS) | st.binary(max_size=4), max_size=25), damage=st.booleans())
def test_a_random_pickle_program_runs_nothing_and_is_an_error(program, damage, good) -> None:
    """Programs from nothing, and pieces of them written into a good one."""
    with copy_of(good["bin"]) as folder:
        path = folder / "pytorch_model.bin"
        with zipfile.ZipFile(path) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        code = b"".join(program)
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as archive:
            for name, content in entries.items():
                if name.endswith("data.pkl"):
                    at = len(code) * 31 % len(content)
                    content = content[:at] + code + content[at + len(code) :] if damage else b"\x80\x02" + code + b"."
                archive.writestr(name, content)
        read_everything(folder)  # what torch imports late is imported now: namedtuples in it are run from text
        repr(torch.ones(1))  # its errors print tensors
        path.write_bytes(made.getvalue())
        with watched() as seen:
            read_everything(folder)
        assert [event for event, arguments in seen if runs_code(event, arguments)] == []
        assert_nothing_is_open(folder)


@pytest.fixture(scope="module")
def ggufs(tmp_path_factory) -> dict[str, bytes]:
    root = tmp_path_factory.mktemp("gguf")
    wide = write_checkpoint(root / "w", "llama", hidden_size=256, intermediate_size=256, tokenizer=False)[1]
    small = write_checkpoint(root / "s", "qwen3_moe", tokenizer=False)[1]
    made = {}
    for kind, model in (("Q4_0", small), ("Q8_0", small), ("Q4_1", small), ("Q4_K", wide), ("Q6_K", wide)):
        write_gguf(root / "m.gguf", model, kind=kind, tokenizer=None)
        made[kind] = (root / "m.gguf").read_bytes()
    return made


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_1", "Q4_K", "Q6_K"])
@FUZZ
@given(data=st.data())
def test_a_damaged_gguf_is_an_error_or_still_reads(kind, ggufs, data) -> None:
    root = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        raw, path = bytearray(ggufs[kind]), root / "m.gguf"
        header = raw.index(b"output_norm.weight") if data.draw(st.booleans()) else len(raw)
        action = data.draw(st.sampled_from(["cut", "flip", "number", "nan"]))
        if action == "cut":
            raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
        elif action == "flip":
            for _ in range(data.draw(st.integers(1, 6))):
                raw[data.draw(st.integers(4, min(header, len(raw)) - 1))] = data.draw(st.integers(0, 255))
        elif action == "number":
            at = data.draw(st.integers(4, min(header, 6000)))
            raw[at : at + 8] = data.draw(SIZES).to_bytes(16, "little", signed=True)[:8]
        else:
            raw[len(raw) // 2 :] = b"\xff" * (len(raw) - len(raw) // 2)
        path.write_bytes(raw)
        worked = read_everything(path, root / "cache")
        assert not (worked and action in ("cut", "nan"))
        assert_nothing_is_open(root)
        left = [p.name for p in (root / "cache").iterdir()] if (root / "cache").exists() else []
        assert len(left) == worked
    finally:
        shutil.rmtree(root)

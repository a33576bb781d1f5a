"""Laws of `pytorch_model.bin`: tensors are read like safetensors, and nothing in the file is ever executed."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from strata_lab.models.loader import CheckpointError, open_checkpoint
from tests.checkpoints import write_checkpoint
from tests.models import published as pub
from tests.models.watch import open_descriptors
from tests.test_models import our_logits


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("plain"), "qwen2")[0]


@pytest.fixture
def folder(plain, tmp_path) -> Path:
    """A private folder without weights."""
    for path in plain.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.fixture
def state(plain):
    return load_file(plain / "model.safetensors")


def test_a_pickled_folder_gives_the_tensors_and_logits_of_its_safetensors_twin(folder, state, plain) -> None:
    torch.save(OrderedDict(state), folder / "pytorch_model.bin")
    ours, twin = open_checkpoint(str(folder)), open_checkpoint(str(plain))
    assert (ours.config, ours.names(), ours.stored_format) == (twin.config, twin.names(), twin.stored_format)
    for name in state:
        read = ours.linear(name).data if name.endswith("_proj.weight") else ours._files.get(name)
        assert torch.equal(read, state[name]), name
    tokens = list(range(3, 14))
    pair = [our_logits(f, tokens, slices=(11,), cuda_graph=False) for f in (folder, plain)]
    assert torch.equal(*pair)


def test_shards_of_pickles_are_read_by_their_index(folder, state) -> None:
    names = sorted(state)
    weight_map = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        half = {n: state[n].half() if "proj" in n else state[n] for n in names if weight_map[n] == shard}
        torch.save(half, folder / shard)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = open_checkpoint(str(folder))
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(checkpoint.linear(name).data, state[name].half().float())


def test_safetensors_come_first_and_the_pickle_beside_them_is_not_opened(folder, plain) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    (folder / "model.safetensors").write_bytes((plain / "model.safetensors").read_bytes())
    assert open_checkpoint(str(folder)).stored_format == "fp32"


def test_a_pickle_is_mapped_and_let_go(folder, state) -> None:
    torch.save(state, folder / "pytorch_model.bin")
    checkpoint = open_checkpoint(str(folder))
    weight, start = checkpoint.linear("lm_head.weight"), None
    ranges = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    for line in ranges:
        low, high = (int(x, 16) for x in line.split()[0].split("-"))
        start = low if low <= weight.data.data_ptr() < high else start
    assert start is not None
    checkpoint.close()
    with pytest.raises(CheckpointError, match="is closed; open the checkpoint again"):
        checkpoint.linear("lm_head.weight")
    assert torch.equal(weight.data, state["lm_head.weight"])
    del weight, checkpoint
    assert list(open_descriptors(folder)) == []


def test_a_quantized_pickle_is_read_like_a_quantized_safetensors_file(tmp_path) -> None:
    write_checkpoint(tmp_path, "llama", tokenizer=False)
    expected = pub.write_quantized(
        tmp_path, pub.gptq_config(sym=True), lambda s, r: pub.gptq(s, r, sym=True), file="pytorch_model.bin"
    )
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.stored_format == "int4"
    for name, values in expected.items():
        assert (pub.as_float64(checkpoint.linear(name)) == values).all()


class Touch:
    """What a hostile checkpoint holds: unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


class TouchByState(torch.nn.Parameter):
    """The same, hidden behind a tensor's own reducer."""

    target: Path

    def __reduce_ex__(self, protocol):
        return eval, (f"open({str(self.target)!r}, 'w').close()",)


@pytest.mark.parametrize("where", ["value", "key", "whole", "metadata", "nested", "legacy", "bare"])
def test_a_hostile_pickle_is_refused_and_touches_nothing(where, folder, state) -> None:
    target = folder / "touched"
    bomb = Touch(target)
    hidden = TouchByState(torch.ones(2))
    hidden.target = target
    content = {
        "value": state | {"x": bomb},
        "key": {**state, ("x", bomb): torch.ones(1)},
        "whole": bomb,
        "metadata": OrderedDict(state),
        "nested": state | {"lm_head.weight": hidden},
        "legacy": state | {"x": bomb},
        "bare": state | {"x": bomb},
    }[where]
    if where == "metadata":
        content._metadata = bomb
    path = folder / "pytorch_model.bin"
    if where == "bare":
        path.write_bytes(pickle.dumps(bomb))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=where != "legacy")
    with pytest.raises(
        CheckpointError, match=r"pytorch_model.bin is a pickle: opening it could run any code.*safetens"
    ):
        open_checkpoint(str(folder))
    assert not target.exists()
    (pickle.loads(pickle.dumps(bomb)), target.unlink())  # the bomb itself works


def test_the_old_format_of_torch_save_is_refused_with_its_reason(folder, state) -> None:
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"it is no zip archive as torch.save writes since 1.6"):
        open_checkpoint(str(folder))


def test_an_archive_that_unfolds_is_refused_before_it_is_read(folder, state) -> None:
    path = folder / "pytorch_model.bin"
    torch.save(state, path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data + bytes(50_000_000) if name.endswith(".pkl") else data)
    with pytest.raises(CheckpointError, match=r"data.pkl' is compressed or larger than the file"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(4, 4).to_sparse(), "is a Tensor that is no plain tensor"),
        (torch.ones(4, device="meta"), "is a Tensor that is no plain tensor"),
        (3, "is a int that is no plain tensor"),
        ([torch.ones(3)], "is a list that is no plain tensor"),
    ],
)
def test_what_is_no_plain_tensor_is_refused_by_name(value, message, folder, state) -> None:
    torch.save(state | {"odd": value}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=f"'odd' {message}|weights_only reader refuses"):
        open_checkpoint(str(folder))


def test_a_view_beyond_its_storage_is_refused(folder, state) -> None:
    """The size of a tensor in data.pkl is raised by hand; the storage behind it stays as small as it was."""
    path = folder / "pytorch_model.bin"
    torch.save(state | {"model.norm.weight": torch.arange(61, dtype=torch.float32)}, path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    pkl = next(name for name in entries if name.endswith("data.pkl"))
    assert entries[pkl].count(b"K=\x85") == 1  # the tuple (61,)
    entries[pkl] = entries[pkl].replace(b"K=\x85", b"K\xfb\x85")
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    with pytest.raises(CheckpointError, match="out of bounds|no plain tensor|refuses"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("shard", ["../x.bin", "/etc/x.bin", "a/b.bin", "model.safetensors", "..", None])
def test_a_pickled_shard_outside_the_folder_is_refused(shard, folder) -> None:
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))
    with pytest.raises(CheckpointError, match=r"must be the plain name of a \.bin file"):
        open_checkpoint(str(folder))


def test_a_name_in_two_shards_is_refused(folder, state) -> None:
    for shard in ("a.bin", "b.bin"):
        torch.save(state, folder / shard)
    index = {"weight_map": {"lm_head.weight": "a.bin", "model.norm.weight": "b.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"b.bin: tensor .* is in a.bin too; a name must be in one file"):
        open_checkpoint(str(folder))

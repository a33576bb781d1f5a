"""Converting: what is written is what a direct conversion gives, whole or not at all, a layer at a time."""

from __future__ import annotations

import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from strata_lab import quant
from strata_lab.engine import LLMEngine
from strata_lab.models.checkpoint import is_linear
from strata_lab.models.errors import CheckpointError
from strata_lab.models.loader import checkpoint_files, open_checkpoint
from strata_lab.models.strata_folder import StrataCheckpoint
from strata_lab.quant import convert, get_format
from strata_lab.quant.convert_model import ConvertSettings, convert_checkpoint
from strata_lab.sampling_params import SamplingParams
from strata_lab.settings import ConfigError
from tests.checkpoints import VOCAB, write_checkpoint

TEXT = [[(7 * i + 3 * j) % VOCAB for i in range(48)] for j in range(3)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", params=["qwen2", "qwen3_moe"])
def source(request: Any, tmp_path_factory: Any) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source") / request.param, request.param, num_hidden_layers=3)[0]


def test_no_module_of_the_package_hides_a_function_of_the_same_name() -> None:
    """Importing `package.name` binds `name` in the package: whoever imports the function later would get the module."""
    modules = {module.name for module in pkgutil.iter_modules(quant.__path__)}
    functions = {name for name, value in vars(quant).items() if inspect.isfunction(value)}
    assert "convert" in functions and modules & functions == set()


def run(source: Path, destination: Path, progress: Any = None, **settings: Any) -> Any:
    checkpoint = open_checkpoint(str(source))
    calibrated = settings.get("method", "rtn") != "rtn" or settings.get("kv_scales")
    try:
        return convert_checkpoint(
            checkpoint, destination, ConvertSettings(**settings), files=checkpoint_files(str(source)),
            calibration=TEXT if calibrated else (), **({"progress": progress} if progress else {}),
        )  # fmt: skip
    finally:
        checkpoint.close()


@pytest.mark.parametrize(
    ("weights", "granularity"), [("fp8", None), ("int8", "channel"), ("int4", "group32"), ("int4", "group64-asym")]
)
def test_every_matrix_is_what_a_direct_conversion_gives(
    source: Path, tmp_path: Path, weights: str, granularity: str | None
) -> None:
    run(source, tmp_path / "made", weights=weights, granularity=granularity)
    before, after = open_checkpoint(str(source)), open_checkpoint(str(tmp_path / "made"))
    assert isinstance(after, StrataCheckpoint) and after.stored_format == weights
    assert sorted(after.names()) == sorted(before.names())
    for name in before.names():
        if not is_linear(name):
            assert torch.equal(after.tensor(name), before.tensor(name)), name
            continue
        kept = "embed" in name or "head" in name
        expected = convert(before.linear(name), "int8" if kept else weights, None if kept else granularity)
        found = after.linear(name)
        assert (found.format, found.shape, found.group_size) == (expected.format, expected.shape, expected.group_size)
        assert torch.equal(get_format(found.format).dequantize(found), get_format(expected.format).dequantize(expected))


def test_the_engine_says_the_same_with_the_converted_checkpoint(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "made", weights="int8")
    prompt = list(range(3, 12))
    with LLMEngine(str(source), device="cpu", weight_format="int8") as engine:
        expected = engine.generate([prompt], GREEDY)[0].token_ids
    with LLMEngine(str(tmp_path / "made"), device="cpu") as engine:
        assert engine.optimizations.weight_format == "int8"
        assert engine.generate([prompt], GREEDY)[0].token_ids == expected


def test_experts_lie_in_one_piece_in_the_order_of_the_kernels(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "moe", "qwen3_moe")[0]
    run(source, tmp_path / "made", weights="int8")
    made = StrataCheckpoint(tmp_path / "made")
    prefix = "model.layers.1.mlp.experts."
    wide = [made.linear(f"{prefix}{e}.{p}_proj.weight") for e in range(6) for p in ("gate", "up")]
    starts = [w.data.data_ptr() for w in wide]
    assert starts == [starts[0] + i * 32 * 64 for i in range(12)]
    assert made.manifest["expert_count"] == 6


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_an_interrupted_conversion_goes_on_and_ends_the_same(source: Path, tmp_path: Path, method: str) -> None:
    settings = {"weights": "int4", "granularity": "group32", "method": method}
    run(source, tmp_path / "whole", **settings)

    def stop(text: str, fraction: float) -> None:
        if text.startswith("layer 2") and (tmp_path / ".made.converting" / "layer-00001.safetensors").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "made", stop, **settings)
    assert not (tmp_path / "made").exists()
    with pytest.raises(CheckpointError):
        open_checkpoint(str(tmp_path / ".made.converting"))
    assert run(source, tmp_path / "made", **settings).resumed == 2
    for path in sorted((tmp_path / "whole").iterdir()):
        assert path.read_bytes() == (tmp_path / "made" / path.name).read_bytes(), path.name
    assert not (tmp_path / ".made.converting").exists()


def test_other_settings_start_anew(source: Path, tmp_path: Path) -> None:
    def stop(text: str, fraction: float) -> None:
        if text.startswith("layer 3"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "made", stop, weights="int8")
    assert run(source, tmp_path / "made", weights="fp8").resumed == 0


def test_rules_keep_matrices_as_stored_or_in_another_format(source: Path, tmp_path: Path) -> None:
    keep = ("model.layers.0.*", "*.down_proj.weight=int8")
    run(source, tmp_path / "made", weights="int4", granularity="group32", method="gptq", keep=keep, head="bf16")
    made = StrataCheckpoint(tmp_path / "made")
    formats = {name: made.linear(name).format for name in made.names() if is_linear(name)}
    for name, found in formats.items():
        first, down = name.startswith("model.layers.0."), "down_proj" in name
        head = "embed" in name or "head" in name
        assert found == ("fp32" if first else "int8" if down else "bf16" if head else "int4"), name
    assert made.manifest["precision"]["0"] == ["fp32"]
    with LLMEngine(str(tmp_path / "made"), device="cpu") as engine:
        assert len(engine.generate([[5, 6, 7]], GREEDY)[0].token_ids) == 12


def test_cache_scales_are_calibrated_and_used(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "made", weights="int8", kv_scales=True)
    made = StrataCheckpoint(tmp_path / "made")
    assert made.kv_scales is not None and len(made.kv_scales) == 3
    with LLMEngine(str(tmp_path / "made"), device="cpu", kv_cache_dtype="fp8") as engine:
        engine.generate([[5, 6, 7]], GREEDY)
        assert engine._loop.parts.kv.scales == made.kv_scales


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"weights": "int3"}, "int3"),
        ({"weights": "int4", "granularity": "channel"}, "granularity='channel'"),
        ({"weights": "int8", "method": "magic"}, "method='magic'"),
        ({"weights": "int8", "keep": ("*.nothing",)}, "fits no matrix"),
        ({"weights": "int8", "keep": ("=int8",)}, "PATTERN=FORMAT"),
        ({"weights": "int8", "head": "int5"}, "int5"),
    ],
)
def test_bad_settings_name_the_value(tmp_path: Path, source: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("*", r"\*")):
        run(source, tmp_path / "made", **settings)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_and_text_is_asked_for(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists already"):
        run(source, tmp_path, weights="int8")
    with pytest.raises(ConfigError, match="does not exist"):
        run(source, tmp_path / "no" / "made", weights="int8")
    with pytest.raises(ConfigError, match="needs a calibration text"):
        convert_checkpoint(open_checkpoint(str(source)), tmp_path / "made", ConvertSettings("int8", method="gptq"))


def test_a_manifest_cannot_point_elsewhere_or_lie_about_shapes(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "made", weights="int8")
    path = tmp_path / "made" / "manifest.json"
    good = json.loads(path.read_text())
    name = "model.layers.0.self_attn.q_proj.weight"
    for change in (
        {"file": "../source/model.safetensors"}, {"rows": [0, 10**9]}, {"rows": [-4, 60]}, {"format": "int4"},
        {"group_size": 7}, {"tensor": "nothing"}, {"file": "gone.safetensors"}, {"shape": [1, 2]}, {"rows": "x"},
    ):  # fmt: skip
        bad = json.loads(path.read_text())
        bad["tensors"] = good["tensors"] | {name: good["tensors"][name] | change}
        path.write_text(json.dumps(bad))
        with pytest.raises(CheckpointError):
            StrataCheckpoint(tmp_path / "made")
        path.write_text(json.dumps(good))
    for text in ("", "[]", "{}", '{"strata_checkpoint": 99}', '{"strata_checkpoint": 1}', "[" * 100_000):
        path.write_text(text)
        with pytest.raises(CheckpointError):
            StrataCheckpoint(tmp_path / "made")


_WATCHED = """
import sys, threading, time
from pathlib import Path
import torch
from strata_lab.models.loader import open_checkpoint
from strata_lab.quant.convert_model import ConvertSettings, convert_checkpoint
torch.set_num_threads(1)

def anonymous():  # memory of its own: pages of the mapped source can be dropped at any time
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

peak, done = 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.002)

source = open_checkpoint(sys.argv[1])
before = anonymous()
thread = threading.Thread(target=watch)
thread.start()
convert_checkpoint(source, Path(sys.argv[2]), ConvertSettings("int8"))
done = True
thread.join()
print(peak - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's count of a process's own memory")
def test_a_conversion_takes_the_memory_of_a_layer_not_of_the_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 24, "initializer_range": 0.02}
    source, _ = write_checkpoint(tmp_path / "large", "llama", dtype=torch.bfloat16, tokenizer=False, **sizes)
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    command = [sys.executable, "-c", _WATCHED, str(source), str(tmp_path / "made")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert size > 80_000_000
    assert int(done.stdout) < size / 2, (done.stdout, size)

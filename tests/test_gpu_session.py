"""The stages of a GPU session, without a card: commands that exist, limits that hold, a note after every stage."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from strata_lab.bench import gpu_session
from strata_lab.bench.gpu_session import Stage, stages
from strata_lab.bench.harness import REPOSITORY


def test_every_stage_is_a_command_that_knows_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    found = stages(tmp_path, 0.5, 0.25)
    assert [stage.name for stage in found if stage.name.startswith("climb")] == ["climb-A", "climb-B", "climb-C"]
    for stage in found:
        if stage.words[0] == "pytest":
            assert Path(stage.words[1]).exists()
            continue
        monkeypatch.setattr(sys, "argv", [stage.words[0], "--help"])
        with pytest.raises(SystemExit):
            importlib.import_module(stage.words[0]).main()
        help_text = capsys.readouterr().out
        assert all(word in help_text for word in stage.words if word.startswith("--")), stage.words


def test_a_session_runs_every_test_of_a_card_and_none_of_the_processors_operators(tmp_path: Path) -> None:
    """A test may have `cpu` in its name and need a card: it is the operator that counts."""
    files = ["tests/gpu/test_sampler_gpu.py", "tests/kernels/test_attention.py", "tests/kernels/test_invariant.py"]
    (stage,) = [stage for stage in stages(tmp_path, 1.0, 1.0) if stage.words[1].endswith(files[0])]
    choice = stage.words[2 : stage.words.index("--junitxml")]
    command = [sys.executable, "-m", "pytest", *files, *choice, "--collect-only"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    chosen = {name.partition("::")[2] for name in done.stdout.splitlines() if "::" in name}
    assert {"test_quantizing_on_cuda_gives_the_cpus_bits[int8]", "test_the_triton_product_is_right[int8]"} <= chosen
    assert {name.partition("[")[0] for name in chosen if "captured_in_a_cuda_graph" in name}
    assert not [name for name in chosen if "refuses" in name or "[cpu" in name or "[reference" in name]
    makefile = (REPOSITORY / "Makefile").read_text()
    assert f'tests/gpu tests/kernels {choice[1]} "{choice[2]}"' in makefile


def test_a_stage_that_takes_too_long_is_ended_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = [f"import pathlib; pathlib.Path({str(tmp_path / name)!r}).touch()" for name in ("first", "last")]
    (tmp_path / "sleeper.py").write_text(f"{marks[0]}\nimport time\ntime.sleep(600)")
    (tmp_path / "broken.py").write_text("raise SystemExit(3)")
    (tmp_path / "good.py").write_text(marks[1])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    few = [Stage("slow", ("sleeper",), 3.0), Stage("wrong", ("broken",), 60.0), Stage("good", ("good",), 60.0)]
    monkeypatch.setattr(gpu_session, "stages", lambda *options: few)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    start = time.monotonic()
    assert gpu_session.main(["--out", str(tmp_path / "out")]) == 1
    assert time.monotonic() - start < 300
    told = json.loads((tmp_path / "out" / "session.json").read_text())
    outcomes = [(one["stage"], one["outcome"]) for one in told]
    assert outcomes == [("slow", "ended at its limit of 3 s"), ("wrong", "failed with exit code 3"), ("good", "passed")]
    assert (tmp_path / "last").exists()


def test_where_there_is_no_card_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_session.main(["--out", str(tmp_path / "out")]) == 2
    assert "need a CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert gpu_session.main(["--list", "--only", "climb"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3

"""Laws of the doctor: every line has a verdict, every bad one a fix, and the exit code tells."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from strata_lab import cli
from strata_lab.config import toggles
from strata_lab.telemetry import bandwidth, doctor, hardware
from strata_lab.telemetry.bandwidth import Bandwidth
from strata_lab.telemetry.checks import Check
from strata_lab.telemetry.doctor import examine
from strata_lab.telemetry.hardware import CpuInfo

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a gigabyte several times has its own test."""
    monkeypatch.setattr(bandwidth, "ceiling", lambda *a, **k: Bandwidth(25e9, 1, "memory", "test"))


def named(checks: list[Check]) -> dict[str, Check]:
    return {c.name: c for c in checks}


def test_every_section_is_there_and_every_bad_line_has_a_fix() -> None:
    checks = examine()
    assert list(dict.fromkeys(c.section for c in checks)) == [
        "software",
        "processor",
        "memory",
        "gpu",
        "model",
        "toggles",
    ]
    assert all(c.value for c in checks)
    assert [c for c in checks if c.verdict != "ok" and not c.fix] == []
    assert named(checks)["bandwidth"].value.startswith("25.0 GB/s")


def test_every_toggle_says_what_it_does_here() -> None:
    lines = {c.name: c.value for c in examine() if c.section == "toggles"}
    assert set(lines) == {t.name for t in toggles()}
    assert all(len(text) > 20 for text in lines.values())


@pytest.mark.parametrize(
    ("torch_version", "triton_version", "verdict"),
    [
        ("2.13.0+cpu", "3.7.1", "ok"), ("2.11.0+cu130", "3.6.0", "ok"), ("2.13.0", "3.6.0", "warn"),
        ("2.12.0", "3.7.0", "warn"), ("2.13.0+cpu", None, "ok"),
    ],
)  # fmt: skip
def test_only_pairs_that_were_run_together_are_called_proven(
    torch_version: str, triton_version: str | None, verdict: str
) -> None:
    check = doctor._pair(torch_version, triton_version)
    assert check.verdict == verdict
    assert ("torch 2.13 with triton 3.7" in check.fix) == (verdict == "warn")


def test_a_missing_model_fails_with_the_command_that_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from strata_lab.models import hub

    monkeypatch.setattr(hub, "find_model", lambda name: None)
    (line,) = [c for c in examine() if c.section == "model"]
    assert line.verdict == "fail"
    assert "make lab" in line.fix


def test_models_are_found_by_path_and_preset_and_typos_are_named(tmp_path: Any) -> None:
    assert named(examine(str(tmp_path)))[str(tmp_path)].verdict == "ok"
    assert "random weights" in named(examine("qwen3.8-flash@0.05"))["qwen3.8-flash@0.05"].value
    line = named(examine("smollm2-135"))["smollm2-135"]
    assert line.verdict == "fail"
    assert "did you mean 'smollm2-135m'" in line.value


def cpu(**changes: Any) -> CpuInfo:
    base: dict[str, Any] = {
        "name": "test", "flags": ("avx2", "fma", "f16c"), "usable_cores": 64, "last_level_cache_bytes": 32 << 20,
        "memory_bytes": 16 * GIB, "available_memory_bytes": 8 * GIB, "governor": "performance", "clock_mhz": 3000.0,
    }  # fmt: skip
    return CpuInfo(**(base | changes))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"flags": ("avx2",)}, "model"), ({"governor": "powersave"}, "governor"), ({"usable_cores": 0}, "threads"),
        ({"available_memory_bytes": GIB}, "main memory"),
    ],
)  # fmt: skip
def test_slow_processors_are_warned_of_and_healthy_ones_are_not(
    changes: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> Check:
        return next(c for c in examine() if c.name == line and c.section in ("processor", "memory"))

    monkeypatch.setattr(hardware, "cpu_info", cpu)
    assert found().verdict == "ok"
    monkeypatch.setattr(hardware, "cpu_info", lambda: cpu(**changes))
    assert found().verdict == "warn"
    assert found().fix


def test_a_busy_machine_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "cpu_info", lambda: cpu(usable_cores=2))
    monkeypatch.setattr(hardware, "load_average", lambda: 1.5)
    assert named(examine())["load"].verdict == "warn"
    monkeypatch.setattr(hardware, "load_average", lambda: 0.2)
    assert named(examine())["load"].verdict == "ok"


def test_missing_cpu_kernels_say_why_and_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    from strata_lab.kernels.cpu import build

    def unavailable() -> None:
        raise build.CpuKernelsUnavailable("no C++ compiler: 'g++' not found\nmore words")

    monkeypatch.setattr(build, "load", unavailable)
    line = named(examine())["cpu kernels"]
    assert (line.verdict, line.value) == ("warn", "no C++ compiler: 'g++' not found")
    assert "install a C++ compiler" in line.fix


def test_a_check_that_breaks_is_a_line_and_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("no such file")

    monkeypatch.setattr(doctor, "_memory", broken)
    checks = examine()
    assert Check("memory", "check", "OSError: no such file", "fail", checks[-1].fix) in [
        Check(c.section, c.name, c.value, c.verdict, checks[-1].fix) for c in checks
    ]
    assert [c for c in checks if c.section == "toggles"], "the sections after it are still there"


def test_this_machine_is_described() -> None:
    info = hardware.cpu_info()
    assert info.name
    assert info.usable_cores >= 1
    assert hardware.machine_key() == hardware.machine_key()
    assert hardware.machine_key() != hardware.machine_key("cuda")


@pytest.mark.parametrize(("verdicts", "code"), [(["ok", "warn"], 0), (["ok", "fail", "warn"], 1)])
def test_the_exit_code_is_1_exactly_when_something_fails(
    verdicts: list[Any], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = [Check("s", f"n{i}", "value [of] things", v, "" if v == "ok" else "do it") for i, v in enumerate(verdicts)]
    monkeypatch.setattr(doctor, "examine", lambda model: checks)
    for arguments in ([], ["--json"]):
        result = CliRunner().invoke(cli.app, ["doctor", *arguments])
        assert result.exit_code == code
    found = json.loads(result.stdout)
    assert found["ok"] == (code == 0)
    assert [c["verdict"] for c in found["checks"]] == verdicts
    shown = CliRunner().invoke(cli.app, ["doctor"]).stdout
    assert shown.count("value [of] things") == len(verdicts)
    assert "do it" in shown

"""Laws of the doctor's look at cards, containers and engines: the order of the triage, a cause and a fix each."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from strata_lab import cli
from strata_lab.config import Optimizations, engine_config
from strata_lab.engine import LLMEngine
from strata_lab.events import HardwareEvent
from strata_lab.resolve import Resolver
from strata_lab.telemetry import container, doctor, doctor_gpu, hardware, nvml
from strata_lab.telemetry.checks import Check
from strata_lab.telemetry.container import Limits, limits
from strata_lab.telemetry.doctor_engine import examine_engine
from strata_lab.telemetry.hardware import GpuInfo, gpus
from strata_lab.telemetry.triage import slowest, triage
from tests.checkpoints import write_checkpoint
from tests.fake_nvml import GIB, consumer, datacentre

HEALTHY = nvml.NvmlSource("cuda:0", nvml=datacentre()).read()


def named(checks: list[Check]) -> dict[str, Check]:
    return {c.name: c for c in checks}


def after(**changes: Any) -> HardwareEvent:
    return dataclasses.replace(HEALTHY, **changes)


# -- triage -------------------------------------------------------------------------------------------------------


def test_lines_come_in_the_articles_order_and_a_healthy_card_has_no_finding() -> None:
    lines = triage(HEALTHY, loaded=True)
    order = ["core temperature", "memory temperature", "power", "utilization", "clocks", "link", "memory errors"]
    assert [c.name for c in lines] == order
    assert slowest(lines) is None
    assert named(lines)["core temperature"].value == "71 C, slows down at 87 C"
    assert named(lines)["power"].value == "402 W of 450 W"


HOT = "hot: the driver lowers the clocks"


@pytest.mark.parametrize(
    ("changes", "loaded", "line", "cause"),
    [
        ({"core_c": 84}, False, "core temperature", "about to slow down"),
        ({"throttle": (HOT, "power: the limit is reached"), "gpu_percent": 30}, True, "core temperature", "slows down"),
        ({"memory_c": 92}, False, "memory temperature", "about to slow down"),
        ({"power_w": 449.0}, False, "power", "power limit"),
        ({"throttle": ("power: the limit is reached",)}, False, "power", "power limit"),
        ({"gpu_percent": 40}, True, "utilization", "waits for the host"),
        ({"throttle": ("clocks fixed for a display",)}, False, "clocks", "display"),
        ({"pcie_width": 4}, False, "link", "fewer lanes"),
        ({"pcie_gen": 1}, True, "link", "stays slow"),
        ({"ecc_errors": 3}, False, "memory errors", "lost bits"),
    ],
)  # fmt: skip
def test_every_symptom_names_its_cause_and_its_fix(
    changes: dict[str, Any], loaded: bool, line: str, cause: str
) -> None:
    found = slowest(triage(after(**changes), loaded=loaded))
    assert found is not None and found.name == line
    assert cause in found.cause and found.fix


@pytest.mark.parametrize("changes", [{"gpu_percent": 0}, {"pcie_gen": 1}])
def test_a_card_at_rest_may_idle_and_slow_its_link(changes: dict[str, Any]) -> None:
    assert slowest(triage(after(**changes))) is None


def test_a_card_that_cannot_be_read_says_why() -> None:
    (line,) = triage(HardwareEvent(t_s=0, device="cuda:0", name="x", note="no sensor: no NVML"))
    assert (line.verdict, line.value) == ("warn", "no sensor: no NVML") and line.fix


def test_a_consumer_card_says_that_its_memory_does_not_tell() -> None:
    assert "does not tell" in named(triage(nvml.NvmlSource("c", nvml=consumer()).read()))["memory temperature"].value


# -- cards --------------------------------------------------------------------------------------------------------


def card(**changes: Any) -> GpuInfo:
    reading = dataclasses.replace(HEALTHY, name="Test GPU", memory_bytes=48 * GIB, memory_used_bytes=GIB)
    return dataclasses.replace(GpuInfo(0, "580", reading, driver_cuda="13.0"), **changes)


def test_a_full_card_is_warned_of_and_the_first_finding_says_to_begin_there() -> None:
    assert {c.verdict for c in doctor_gpu.one_gpu(card())} == {"ok"}
    full = card(reading=after(memory_bytes=48 * GIB, memory_used_bytes=47 * GIB))
    assert named(list(doctor_gpu.one_gpu(full)))["gpu 0"].verdict == "warn"
    lines = named(list(doctor_gpu.one_gpu(card(reading=after(throttle=(HOT,), power_w=450.0)))))
    assert lines["gpu 0 core temperature"].fix.startswith("begin here: ")
    assert lines["gpu 0 power"].verdict == "warn" and not lines["gpu 0 power"].fix.startswith("begin here")


@pytest.mark.parametrize(
    ("torch_cuda", "driver", "verdict"),
    [
        ("13.0", "13.0", "ok"),
        ("12.8", "13.0", "ok"),
        ("13.0", "12.4", "fail"),
        ("13.2", "13.0", "ok"),
        ("13.0", None, "ok"),
    ],
)
def test_a_driver_older_than_torchs_cuda_fails(torch_cuda: str, driver: str | None, verdict: str) -> None:
    line = doctor_gpu.match(torch_cuda, card(driver_cuda=driver), 1)
    assert line.verdict == verdict
    assert bool(line.fix) == bool(line.cause) == (verdict == "fail")


def test_a_gpu_that_torch_cannot_use_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(nvml, "open_nvml", consumer)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (line,) = doctor_gpu.gpu_checks()
    assert line.verdict == "fail" and "CUDA build" in line.fix and "RTX 4090" in line.value


def test_recorded_answers_become_a_whole_report(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(nvml, "open_nvml", lambda: datacentre(nvmlDeviceGetCurrentClocksThrottleReasons=0x20))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(doctor_gpu, "pinned_copy", lambda torch, gpu: Check("gpu", "pinned memory", "55.0 GB/s"))
    lines = named(list(doctor_gpu.gpu_checks()))
    assert lines["driver and CUDA"].verdict == "ok" and "13.0" in lines["driver and CUDA"].value
    assert lines["gpu 0"].value == "NVIDIA H200, driver 580.159.04, 18.0 of 48.0 GiB free"
    assert lines["gpu 0 core temperature"].cause == "it slows down for heat now"
    assert gpus()[0].driver_cuda == "13.0"


@pytest.mark.parametrize(("seconds", "verdict"), [(0.0025, "ok"), (0.02, "warn")])
def test_locked_memory_is_held_against_the_link(seconds: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)

    class Buffer:
        def copy_(self, other: Any, non_blocking: bool) -> None:
            clock.now += seconds

    fake = SimpleNamespace(empty=lambda *a, **k: Buffer(), uint8=None, cuda=SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(doctor_gpu.time, "perf_counter", lambda: clock.now)
    line = doctor_gpu.pinned_copy(fake, card())
    assert line.verdict == verdict and line.value.endswith("the link carries 31.5")


# -- containers ---------------------------------------------------------------------------------------------------


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


CGROUPS = [
    # version 2, the group itself is limited
    ("0::/a/b\n", {"a/b/memory.max": "4294967296\n", "a/b/memory.current": "1000\n", "a/b/cpu.max": "150000 100000\n"},
     Limits(4 << 30, 1000, 1.5)),
    # what was read from files and not used since is dropped when memory is short
    ("0::/a\n",
     {"a/memory.max": "5000\n", "a/memory.current": "4000\n", "a/memory.stat": "anon 900\ninactive_file 3000\n"},
     Limits(5000, 1000, None)),
    # version 2, a parent is tighter; inside a container the group's path does not exist here
    ("0::/x\n", {"memory.max": "2147483648\n", "memory.current": "5\n", "cpu.max": "max 100000\n"},
     Limits(2 << 30, 5, None)),
    ("0::/\n", {"memory.max": "max\n", "cpu.max": "max 100000\n"}, Limits()),
    # version 1
    ("4:memory:/g\n2:cpu,cpuacct:/\n",
     {"memory/g/memory.limit_in_bytes": "1073741824", "memory/g/memory.usage_in_bytes": "7",
      "cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, Limits(1 << 30, 7, 0.5)),
    ("4:memory:/\n1:cpu:/\n", {"memory/memory.limit_in_bytes": str((1 << 63) - 4096), "cpu/cpu.cfs_quota_us": "-1"},
     Limits()),
    ("", {}, Limits()),
]  # fmt: skip


@pytest.mark.parametrize(("membership", "files", "expected"), CGROUPS)
def test_the_tightest_group_around_the_process_counts(membership: str, files: Any, expected: Limits, tmp_path) -> None:
    (tmp_path / "self").write_text(membership)
    assert limits(tree(tmp_path / "fs", files), tmp_path / "self") == expected


def test_an_engine_in_a_container_takes_its_share_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system shows the whole machine there; the kernel would end the process."""

    def budget() -> int:
        resolver = Resolver(engine_config("qwen3.8-flash-dense@0.05", device="cpu"), lambda task, done: None)
        return resolver._memory_budget(Optimizations(gpu_memory_utilization=0.5), None)

    monkeypatch.setattr(container, "limits", Limits)
    outside = hardware.cpu_info()
    monkeypatch.setattr(container, "limits", lambda: Limits(300 << 20, 100 << 20))
    inside = hardware.cpu_info()
    assert (inside.memory_bytes, inside.available_memory_bytes) == (300 << 20, 200 << 20)
    assert outside.memory_bytes is not None and outside.memory_bytes > 300 << 20
    assert budget() == 100 << 20
    monkeypatch.setattr(container, "limits", lambda: Limits(300 << 20, 400 << 20))
    assert hardware.cpu_info().available_memory_bytes == 0 == budget()


def test_a_tight_container_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "limits", lambda: Limits(3 << 30, 2 << 30, 0.5))
    lines = named(list(doctor._container()))
    assert lines["container memory"].verdict == "warn" and "without a message" in lines["container memory"].cause
    assert "OMP_NUM_THREADS=1" in lines["container processors"].fix
    monkeypatch.setattr(container, "limits", Limits)
    assert {c.verdict for c in doctor._container()} == {"ok"}


# -- what is really in force --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("doctor"), "llama")[0]


def test_formats_are_counted_by_bytes_and_not_believed(folder) -> None:
    with LLMEngine(folder, device="cpu", weight_format="int8", max_model_len=64) as engine:
        lines = named(examine_engine(engine))
        assert "int8" in lines["weights in force"].value and lines["weights in force"].verdict == "ok"
        assert 8.0 < float(lines["bits per weight"].value.split(",")[0]) < 9.5
        assert lines["cache in force"].value.startswith("fp32, ")
        assert lines["thermal governor"].value == "off"
        assert lines["fallbacks"].verdict == "ok"
        parts = engine._loop.parts
        lying = dataclasses.replace(parts, optimizations=parts.optimizations.replace({"weight_format": "int4"}))
        engine._loop.parts = lying
        line = named(examine_engine(engine))["weights in force"]
        engine._loop.parts = parts
    assert line.verdict == "warn" and line.cause == "int4 is set, but layers are int8"


def test_hidden_fallbacks_and_the_governor_are_shown(folder) -> None:
    with LLMEngine(folder, device="cpu", dtype="bfloat16", thermal_governor="pace", max_model_len=64) as engine:
        lines = named(examine_engine(engine))
    assert lines["fallback: dtype"].verdict == lines["fallback: thermal_governor"].verdict == "warn"
    assert lines["thermal governor"].value.startswith("pace, resting 0% of the time, 16 seats")


def test_the_command_loads_a_model_only_when_asked(folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda model: [Check("s", "n", "v", "warn", "do it", "because")])
    run = CliRunner().invoke
    assert "engine" not in run(cli.app, ["doctor", "-m", str(folder)]).stdout
    found = json.loads(run(cli.app, ["doctor", "-m", str(folder), "--load", "--json"]).stdout)
    assert {"engine", "s"} == {c["section"] for c in found["checks"]}
    assert found["checks"][0]["cause"] == "because"
    assert "because: do it" in run(cli.app, ["doctor", "-m", str(folder)]).stdout

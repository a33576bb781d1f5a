"""Laws of the sensors: every answer has its unit, what a card lacks is None, and reading never meets the engine."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from strata_lab.events import HardwareEvent
from strata_lab.telemetry import hardware, nvml
from strata_lab.telemetry.monitor import NO_CPU_SENSOR, CpuSource, Monitor, source_for
from tests.fake_nvml import GIB, FakeNvml, consumer, datacentre

WAIT_S = 10.0


def test_a_reading_has_all_sensors_in_their_units() -> None:
    reading = nvml.NvmlSource("cuda:0", "12345678-abcd", datacentre()).read()
    assert (reading.name, reading.device, reading.note) == ("NVIDIA H200", "cuda:0", "")
    assert (reading.core_c, reading.core_limit_c, reading.memory_c, reading.memory_limit_c) == (71, 87, 62, 95)
    assert (reading.sm_mhz, reading.sm_max_mhz, reading.memory_mhz, reading.memory_max_mhz) == (
        2520,
        3120,
        10501,
        10501,
    )
    assert (reading.power_w, reading.power_limit_w) == (402.5, 450.0)
    assert (reading.gpu_percent, reading.memory_percent) == (97, 88)
    assert (reading.memory_used_bytes, reading.memory_bytes) == (30 * GIB, 48 * GIB)
    assert (reading.pcie_gen, reading.pcie_gen_max, reading.pcie_width, reading.pcie_width_max) == (4, 4, 16, 16)
    assert reading.ecc_errors == 0
    assert reading.throttle == ()


def test_what_a_consumer_card_does_not_tell_is_none() -> None:
    reading = nvml.NvmlSource("cuda:0", nvml=consumer()).read()
    assert reading.memory_c is None and reading.memory_limit_c is None and reading.ecc_errors is None
    assert reading.core_limit_c == 90


def test_a_card_without_any_sensor_is_still_a_reading() -> None:
    reading = nvml.NvmlSource("cuda:0", nvml=FakeNvml()).read()
    values = [getattr(reading, f) for f in HardwareEvent.__slots__ if f not in ("t_s", "device", "name", "note")]
    assert {v for v in values if v != ()} == {None}


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (0, ()), (1 | 2, ()), (4, ("power: the limit is reached",)),
        (4 | 0x40, ("hot: the hardware cuts the clocks", "power: the limit is reached")),
        (0x20, ("hot: the driver lowers the clocks",)), (8, ("hardware slowdown: heat or the power supply",)),
    ],
)  # fmt: skip
def test_throttle_reasons_are_words_with_heat_first_and_idling_is_none(mask: int, words: tuple[str, ...]) -> None:
    assert nvml.throttle_words(consumer(), mask) == words
    assert nvml.NvmlSource("c", nvml=consumer(nvmlDeviceGetCurrentClocksThrottleReasons=mask)).read().throttle == words


def test_a_card_that_nvml_does_not_know_says_so_and_lets_nvml_go() -> None:
    fake = consumer()
    with pytest.raises(LookupError, match="NVML does not know cuda:3"):
        nvml.NvmlSource("cuda:3", "99999999-ffff", fake)
    assert not fake.is_open


def test_without_nvml_there_is_no_sensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "open_nvml", lambda: None)
    with pytest.raises(LookupError, match="no sensor: NVML cannot be opened"):
        nvml.NvmlSource("cuda:0")
    assert hardware.gpus() == []


def test_doctor_and_benchmarks_see_the_same_card(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = consumer()
    monkeypatch.setattr(nvml, "open_nvml", lambda: fake)
    (card,) = hardware.gpus()
    assert (card.name, card.driver) == ("NVIDIA GeForce RTX 4090", "580.159.04")
    assert card.reading.core_c == 71 and (card.reading.pcie_gen, card.reading.pcie_width) == (4, 16)
    assert card.memory_bytes == card.reading.memory_bytes
    assert not fake.is_open


def test_nothing_that_is_asked_for_changes_the_card() -> None:
    fake = datacentre()
    nvml.NvmlSource("cuda:0", nvml=fake).read()
    assert fake.asked and all(name.startswith("nvmlDeviceGet") for name in fake.asked)


def test_a_cpu_has_no_sensor_and_says_so() -> None:
    reading = source_for("cpu").read()
    assert (reading.device, reading.note) == ("cpu", NO_CPU_SENSOR)
    assert reading.name and reading.power_w is None
    assert reading.memory_bytes is None or reading.memory_bytes > (reading.memory_used_bytes or 0)


@pytest.mark.parametrize(("zones", "hottest"), [({}, None), ({"0": "41000", "1": "68500", "2": "bad"}, 68.5)])
def test_the_hottest_thermal_zone_is_shown(zones: dict[str, str], hottest: float | None, tmp_path, monkeypatch) -> None:
    for name, text in zones.items():
        (tmp_path / f"thermal_zone{name}").mkdir()
        (tmp_path / f"thermal_zone{name}" / "temp").write_text(text)
    original = hardware.Path
    monkeypatch.setattr(hardware, "Path", lambda p: tmp_path if p == "/sys/class/thermal" else original(p))
    assert hardware.thermal_zone_c() == hottest


class Counting(CpuSource):
    def __init__(self, fail_at: int = 0) -> None:
        super().__init__()
        self.reads, self.closed, self.fail_at = 0, threading.Event(), fail_at

    def read(self) -> HardwareEvent:
        self.reads += 1
        if self.reads == self.fail_at:
            raise OSError("GPU is lost")
        return HardwareEvent(t_s=float(self.reads), device="x", name="counting")

    def close(self) -> None:
        assert not self.closed.is_set(), "closed twice"
        self.closed.set()


def test_a_monitor_reads_in_a_thread_of_its_own_until_it_is_stopped() -> None:
    source, three, threads, seen = Counting(), threading.Event(), set(), []

    def report(event: HardwareEvent) -> None:
        threads.add(threading.current_thread().name)
        seen.append(event.t_s)
        if len(seen) >= 3:
            three.set()

    monitor = Monitor(source, report, interval_s=0.001)
    monitor.start()
    monitor.start()
    assert three.wait(WAIT_S)
    monitor.stop()
    monitor.stop()
    assert source.closed.wait(WAIT_S)
    assert threads == {"strata-monitor"}
    assert seen[:3] == [1.0, 2.0, 3.0]
    assert monitor.latest is not None and monitor.latest.t_s == source.reads


def test_a_card_that_is_lost_ends_the_readings_with_a_word() -> None:
    source, seen = Counting(fail_at=2), []
    Monitor(source, seen.append, interval_s=0.001).start()
    assert source.closed.wait(WAIT_S)
    assert [e.note for e in seen] == ["", "no sensor: reading it failed: OSError: GPU is lost"]
    assert (source.reads, seen[1].name) == (2, "counting")


def test_a_monitor_that_never_started_still_lets_its_source_go() -> None:
    source = Counting()
    monitor = Monitor(source, lambda event: None)
    monitor.stop()
    monitor.start()
    assert source.closed.is_set() and source.reads == 0


@pytest.mark.parametrize("interval", [0, -1.0])
def test_an_interval_must_be_positive(interval: Any) -> None:
    with pytest.raises(ValueError, match=r"must be more than 0; try 1\.0"):
        Monitor(CpuSource(), lambda event: None, interval)

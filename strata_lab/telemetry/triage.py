"""Why is it slow? A reading of a card's sensors in the order of the source articles: temperature, power, utilization.

The first line that is not ok is where to begin: a hot card also lowers its power and its clocks, a card at its power
limit also shows full utilization. The link comes last; it matters for loading and swapping, not for decoding.
"""

from __future__ import annotations

from strata_lab.events import HardwareEvent
from strata_lab.telemetry.checks import Check, Verdict
from strata_lab.telemetry.heat import NEAR_C, limit_c

FULL_POWER = 0.97  # of the limit
BUSY_PERCENT = 80  # a decoding card below this waits for its host
GOVERN = (
    "improve cooling, or let thermal_governor=pace rest it; lowering the limit costs little: sudo nvidia-smi -pl WATTS"
)


def triage(reading: HardwareEvent, *, loaded: bool = False) -> list[Check]:
    """Lines in the order in which to look.

    Args:
        reading: of the sensors.
        loaded: whether it decodes right now, so that idling is a finding.
    """
    if reading.note:
        return [
            Check(reading.device, "sensors", reading.note, "warn", "pip install nvidia-ml-py", "nothing can be read")
        ]
    lines = [_temperature(reading, "core"), _temperature(reading, "memory"), _power(reading), _use(reading, loaded)]
    lines += [_clocks(reading), _link(reading, loaded), _ecc(reading)]
    return [line for line in lines if line is not None]


def slowest(lines: list[Check]) -> Check | None:
    """The line to begin with; None when all are ok."""
    return next((line for line in lines if line.verdict != "ok"), None)


def _temperature(r: HardwareEvent, sensor: str) -> Check | None:
    value, named = (r.core_c, r.core_limit_c) if sensor == "core" else (r.memory_c, r.memory_limit_c)
    if value is None:
        if sensor == "core":
            return None
        return Check(r.device, "memory temperature", "this card does not tell it (consumer cards do not)")
    limit = limit_c(r, sensor)
    slowed = sensor == "core" and any(word.startswith(("hot", "hardware slowdown")) for word in r.throttle)
    hot = slowed or value >= limit - NEAR_C
    text = f"{value:g} C, slows down at {limit:g} C" + ("" if named else " (usual: its driver names no limit)")
    cause = "it slows down for heat now" if slowed else "it is about to slow down for heat" if hot else ""
    return Check(r.device, f"{sensor} temperature", text, "warn" if hot else "ok", GOVERN if hot else "", cause)


def _power(r: HardwareEvent) -> Check | None:
    if r.power_w is None:
        return None
    at_limit = any(word.startswith("power") for word in r.throttle)
    at_limit = at_limit or (r.power_limit_w is not None and r.power_w >= FULL_POWER * r.power_limit_w)
    text = f"{r.power_w:.0f} W" + (f" of {r.power_limit_w:.0f} W" if r.power_limit_w else "")
    cause = "the power limit holds the clocks down" if at_limit else ""
    fix = "expected under full load; if cooling allows, raise it: sudo nvidia-smi -pl WATTS" if at_limit else ""
    return Check(r.device, "power", text, "warn" if at_limit else "ok", fix, cause)


def _use(r: HardwareEvent, loaded: bool) -> Check | None:
    if r.gpu_percent is None:
        return None
    text = f"{r.gpu_percent}% of the time a kernel runs"
    if r.memory_percent is not None:
        text += f", {r.memory_percent}% memory is busy"
    waits = loaded and r.gpu_percent < BUSY_PERCENT
    cause = "the card waits for the host between steps" if waits else ""
    fix = "turn cuda_graph on, and look at the processor's lines above" if waits else ""
    return Check(r.device, "utilization", text, "warn" if waits else "ok", fix, cause)


def _clocks(r: HardwareEvent) -> Check | None:
    if r.sm_mhz is None:
        return None
    text = f"{r.sm_mhz} of {r.sm_max_mhz} MHz, memory {r.memory_mhz} of {r.memory_max_mhz} MHz"
    held = [w for w in r.throttle if not w.startswith(("hot", "power", "hardware slowdown"))]
    fix = "nvidia-smi -q -d PERFORMANCE names who asked for it" if held else ""
    return Check(r.device, "clocks", text, "warn" if held else "ok", fix, "; ".join(held))


def _link(r: HardwareEvent, loaded: bool) -> Check | None:
    if r.pcie_gen is None or r.pcie_width is None:
        return None
    text = f"gen{r.pcie_gen} x{r.pcie_width} (of gen{r.pcie_gen_max} x{r.pcie_width_max})"
    narrow = r.pcie_width < (r.pcie_width_max or 0)
    slow = loaded and r.pcie_gen < (r.pcie_gen_max or 0)  # an idle card lowers it by itself
    verdict: Verdict = "warn" if narrow or slow else "ok"
    cause = (
        "the slot gives fewer lanes than the card has" if narrow else "the link stays slow under load" if slow else ""
    )
    fix = "another slot, no riser, or the board's settings; loading and swapping are slower, decoding is not"
    return Check(r.device, "link", text, verdict, fix if cause else "", cause)


def _ecc(r: HardwareEvent) -> Check | None:
    if r.ecc_errors is None:
        return None
    bad = r.ecc_errors > 0
    cause = "memory has lost bits that could not be repaired" if bad else ""
    fix = "restart the driver; if they come back, the card is failing" if bad else ""
    text = f"{r.ecc_errors} uncorrected memory errors"
    return Check(r.device, "memory errors", text, "fail" if bad else "ok", fix, cause)

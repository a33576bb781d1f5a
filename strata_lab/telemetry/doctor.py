"""What is here, what is missing, what each toggle does on this machine, and how to mend what is wrong.

`examine` asks the machine and returns plain lines; the CLI prints them. It loads no model and changes nothing, except
that the CPU kernels are built if they have not been, because "would build" is not an answer. A line that fails means
that `strata generate` would fail; a warning means slower or unproven.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from importlib import metadata

from strata_lab.config import DEFAULT_MODEL, toggles
from strata_lab.explain import explain
from strata_lab.telemetry import container, hardware
from strata_lab.telemetry.checks import Check
from strata_lab.telemetry.doctor_gpu import gpu_checks

# torch release -> triton release that were run together; others may work and are unproven.
SUPPORTED_PAIRS = {"2.11": "3.6", "2.13": "3.7"}
MIN_PYTHON = (3, 11)
LOW_MEMORY_BYTES = 2 << 30  # a 135M model with its pool and a compiler run fit into this
BUSY_LOAD = 0.5  # runnable processes per core from which timings are worth little
NOTEBOOK_PACKAGES = ("jupyterlab", "ipywidgets", "anywidget", "plotly")
GIB = 1 << 30


def examine(model: str = DEFAULT_MODEL) -> list[Check]:
    """Look at everything. A check that itself breaks becomes a failing line, so the report is always whole."""
    checks: list[Check] = []
    sections: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("software", _software),
        ("processor", _processor),
        ("memory", _memory),
        ("gpu", gpu_checks),
        ("model", lambda: _model(model)),
        ("toggles", _toggles),
    ]
    for section, look in sections:
        try:
            checks.extend(look())
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            checks.append(Check(section, "check", text, "fail", "this is a defect of strata doctor; please report it"))
    return checks


def _software() -> Iterator[Check]:
    python = platform.python_version()
    old = sys.version_info < MIN_PYTHON
    yield Check("software", "python", python, "fail" if old else "ok", "install Python 3.11 or later" if old else "")
    torch_version, triton_version = _version("torch"), _version("triton")
    if torch_version is None:
        yield Check("software", "torch", "not installed", "fail", "make setup")
        return
    yield Check("software", "torch", torch_version)
    yield _pair(torch_version, triton_version)
    for package in ("transformers", "safetensors", "tokenizers", "numpy", "gguf"):
        version = _version(package)
        missing = version is None
        yield Check(
            "software",
            package,
            version or "not installed",
            "fail" if missing else "ok",
            "make setup" if missing else "",
        )
    missing_lab = [p for p in NOTEBOOK_PACKAGES if _version(p) is None]
    if missing_lab:
        fix = "make setup, or pip install 'strata-lab[lab]'"
        yield Check("software", "notebook", f"not installed: {', '.join(missing_lab)}", "warn", fix)
    else:
        yield Check("software", "notebook", ", ".join(f"{p} {_version(p)}" for p in NOTEBOOK_PACKAGES))


def _pair(torch_version: str, triton_version: str | None) -> Check:
    """Whether this torch and this triton were run together."""
    release = ".".join(torch_version.split(".")[:2])
    wanted = SUPPORTED_PAIRS.get(release)
    if triton_version is None:
        return Check("software", "triton", "not installed; only GPU kernels need it")
    if wanted is not None and triton_version.startswith(f"{wanted}."):
        return Check("software", "triton", f"{triton_version}, proven with torch {release}")
    pairs = ", ".join(f"torch {a} with triton {b}" for a, b in SUPPORTED_PAIRS.items())
    return Check(
        "software", "triton", f"{triton_version} with torch {release}: not proven", "warn", f"proven are {pairs}"
    )


def _processor() -> Iterator[Check]:
    import torch

    cpu = hardware.cpu_info()
    fast = {"avx2", "fma", "f16c"} <= set(cpu.flags)
    yield Check(
        "processor", "model", f"{cpu.name} ({', '.join(cpu.flags) or 'no vector extensions known'})",
        "ok" if fast else "warn", "" if fast else "the fast kernels need AVX2, FMA and F16C; plain torch runs",
    )  # fmt: skip
    threads, cores = torch.get_num_threads(), cpu.usable_cores
    even = threads <= cores
    fix = "" if even else f"more threads than cores wait for each other; start with OMP_NUM_THREADS={cores}"
    yield Check("processor", "threads", f"{threads} on {cores} usable cores", "ok" if even else "warn", fix)
    slow = cpu.governor == "powersave"
    fix = "sudo cpupower frequency-set -g performance" if slow else ""
    yield Check("processor", "governor", cpu.governor or "not shown by this system", "warn" if slow else "ok", fix)
    load = hardware.load_average()
    if load is not None:
        busy = load > BUSY_LOAD * cores
        fix = "close other programs before measuring; figures would be too low" if busy else ""
        yield Check("processor", "load", f"{load:g} over the last minute", "warn" if busy else "ok", fix)
    yield _cpu_kernels()


def _cpu_kernels() -> Check:
    from strata_lab.kernels.cpu.build import CpuKernelsUnavailable, load

    try:
        load()
    except CpuKernelsUnavailable as reason:
        fix = "install a C++ compiler (g++ or clang++); until then plain torch runs, slower, and no step is compiled"
        return Check("processor", "cpu kernels", str(reason).splitlines()[0], "warn", fix)
    from torch.utils.cpp_extension import get_cxx_compiler

    return Check("processor", "cpu kernels", f"built and loaded ({get_cxx_compiler()})")


def _memory() -> Iterator[Check]:
    from strata_lab.telemetry.bandwidth import ceiling

    cpu = hardware.cpu_info()
    if cpu.available_memory_bytes is not None and cpu.memory_bytes is not None:
        low = cpu.available_memory_bytes < LOW_MEMORY_BYTES
        value = f"{cpu.available_memory_bytes / GIB:.1f} of {cpu.memory_bytes / GIB:.1f} GiB available"
        yield Check("memory", "main memory", value, "warn" if low else "ok", "close other programs" if low else "")
    yield from _container()
    top = ceiling("cpu", fresh=True)  # a kept value may come from a busier hour
    value = f"{top.bytes_s / 1e9:.1f} GB/s read, measured; the roofline of decode"
    yield Check("memory", "bandwidth", value)


def _container() -> Iterator[Check]:
    """Limits of a control group: what the kernel enforces while the system shows the whole machine."""
    found, cores = container.limits(), hardware.usable_cores()
    left = found.memory_left_bytes
    if left is None or found.memory_bytes is None:
        yield Check("memory", "container memory", "no limit below the machine's")
    else:
        low = left < LOW_MEMORY_BYTES
        fix = "start the container with more (docker run --memory 8g), or lower gpu_memory_utilization" if low else ""
        value = f"{left / GIB:.1f} of {found.memory_bytes / GIB:.1f} GiB left"
        cause = "beyond it the kernel ends the process without a message" if low else ""
        yield Check("memory", "container memory", value, "warn" if low else "ok", fix, cause)
    if found.cpus is not None and found.cpus < cores:
        fix = f"start with OMP_NUM_THREADS={max(1, int(found.cpus))}, or give the container {cores} processors"
        cause = "more threads than that are stopped in turns, in the middle of a step"
        value = f"{found.cpus:g} processors' time, {cores} shown"
        yield Check("memory", "container processors", value, "warn", fix, cause)
    else:
        yield Check("memory", "container processors", "no limit below the machine's")


def _model(model: str) -> Iterator[Check]:
    from strata_lab.models import hub
    from strata_lab.models.errors import CheckpointError
    from strata_lab.models.presets import preset_config

    if preset_config(model) is not None:
        yield Check("model", model, "a preset: random weights, nothing to find")
        return
    path = hub.find_model(model)
    if path is not None:
        yield Check("model", model, str(path))
        yield from _stored(model)
        return
    try:
        hub.known_model(model)
        yield Check("model", model, "not installed", "fail", hub.how_to_get(model))
    except CheckpointError as error:
        yield Check("model", model, str(error), "fail", f"give the path of a model, or {hub.how_to_get()}")


def _stored(model: str) -> Iterator[Check]:
    """What the file holds, and what is read otherwise than it is stored."""
    from strata_lab.models.loader import open_model

    opened = open_model(model)
    try:
        fix = "`strata doctor --load` shows what an engine makes of it"
        yield Check("model", "stored as", f"{opened.stored_format}; {fix}")
        for note in opened.notes():
            yield Check("model", "note", note)
    finally:
        opened.close()


def _toggles() -> Iterator[Check]:
    import torch

    texts = explain("cuda" if torch.cuda.is_available() else "cpu")
    for t in toggles():
        nothing = texts[t.name].startswith("No effect")
        wrong = nothing and t.default != t.off
        fix = "leave it off here" if wrong else ""
        yield Check("toggles", t.name, texts[t.name], "warn" if wrong else "ok", fix)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

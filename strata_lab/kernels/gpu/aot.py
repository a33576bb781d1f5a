"""Compile kernels for cards that are not in this machine, and read back what the compiler made of them.

`python -m strata_lab.kernels.gpu.aot [module ...] [--arch 89 90 120]` prints, for every launch that a module's
`aot_cases()` makes: registers per thread, spilled bytes, shared memory. A case calls the ordinary Python function on
`meta` tensors; its launches are caught, not run. Needs no driver. Must run without `TRITON_INTERPRET`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

ARCHITECTURES = (89, 90, 120)  # RTX 4090, H100/H200, RTX 5090
MEASURED_ARCHITECTURE = 90  # for which alone limits of registers hold (`launch.has_measured_limits`)
MAX_SHARED_BYTES = 99 * 1024  # what one program may have on an RTX 3090, 4090 and 5090
MODULES = (
    "linear",
    "attention_decode",
    "attention_prefill",
    "sparse_attention",
    "elementwise",
    "moe",
    "sampling",
    "invariant",
    "window_state",
    "look_up",
    "follow_rows",
)
_ALIGNMENT = 16
# (case, architecture) to bytes: swept on an H200 at a limit of registers that two programs to a multiprocessor need
ACCEPTED_SPILLS = {("moe/block-bf16-8", 90): 8}


@dataclass(frozen=True)
class Report:
    """One kernel of one launch, compiled.

    Attributes:
        case: name of the case.
        kernel: function name.
        arch: 89 for sm_89.
        registers: per thread.
        spilled_bytes: stores and loads to local memory, per thread.
        shared_bytes: per program.
    """

    case: str
    kernel: str
    arch: int
    registers: int
    spilled_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Launch:
    """A caught launch: the kernel, its arguments by name, and the launcher's options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


@contextmanager
def caught(launches: list[Launch]) -> Iterator[None]:
    """Append every Triton launch inside the block to `launches` instead of running it."""
    original = JITFunction.run

    def catch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = self.arg_names
        options = {k: v for k, v in kwargs.items() if k not in names}
        arguments = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
        launches.append(Launch(self, arguments, options))

    JITFunction.run = catch
    try:
        yield
    finally:
        JITFunction.run = original


def compiled(launch: Launch, arch: int) -> Any:
    """The launch's kernel compiled for sm_`arch`."""
    constants, signature, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments.get(parameter.name, parameter.default)
        kind = "constexpr" if parameter.is_constexpr else _kind(value)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[parameter.name] = value if not isinstance(value, torch.dtype) else _tl_dtype(value)
        elif kind.startswith("*") or (isinstance(value, int) and value % _ALIGNMENT == 0):
            attributes[(index,)] = [["tt.divisibility", _ALIGNMENT]]
    if "PDL" in constants:  # decided by the card at hand, which is not the one compiled for
        constants["PDL"] = arch == 90
    kept = ("num_warps", "num_stages", *(("maxnreg",) if arch == MEASURED_ARCHITECTURE else ()))
    options = {k: v for k, v in launch.options.items() if k in kept}
    source = ASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def report(case: str, launch: Launch, arch: int) -> Report:
    """Compile one launch and ask `ptxas` what it needs."""
    kernel = compiled(launch, arch)
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    ptxas = tools / ("ptxas-blackwell" if arch >= 100 else "ptxas")
    suffix = "a" if arch >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(kernel.asm["ptx"])
        command = [str(ptxas), "-v", f"-arch=sm_{arch}{suffix}", str(source), "-o", str(Path(folder, "kernel.cubin"))]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", text))
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", text))
    return Report(case, launch.kernel.__name__, arch, registers, spills, int(kernel.metadata.shared))


def module_cases(module: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, call) for each case of `strata_lab.kernels.gpu.<module>`."""
    yield from import_module(f"strata_lab.kernels.gpu.{module}").aot_cases()


def reports(modules: tuple[str, ...], architectures: tuple[int, ...], only: str = "") -> Iterator[Report]:
    """Every launch of every case whose "module/name" `only` matches somewhere, for every architecture."""
    for module in modules:
        for name, call in module_cases(module):
            if not re.search(only, f"{module}/{name}"):
                continue
            launches: list[Launch] = []
            with caught(launches):
                call()
            assert launches, f"case {name!r} of {module} launched nothing"
            for launch in launches:
                for arch in architectures:
                    yield report(f"{module}/{name}", launch, arch)


def _kind(value: Any) -> str:
    """Triton's name for the type of an argument; None and 1 are constants, as in a real launch."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value == 1):
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return "*" + _POINTEES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i1" if isinstance(value, bool) else "i32" if abs(value) < 2**31 else "i64"


_POINTEES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv", torch.int8: "i8", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


def _tl_dtype(dtype: torch.dtype) -> Any:
    return getattr(triton.language, str(dtype).removeprefix("torch."))


def main() -> None:
    """Print a table, or JSON lines with `--json`; exit code 1 for spills or too much shared memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("modules", nargs="*", default=list(MODULES), help="files of kernels/gpu (default: all)")
    parser.add_argument("--arch", nargs="+", type=int, default=list(ARCHITECTURES), help="compute capabilities")
    parser.add_argument("--only", default="", help="regular expression that a case's name must contain")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    bad = 0
    for r in reports(tuple(options.modules), tuple(options.arch), options.only):
        wrong = r.spilled_bytes > ACCEPTED_SPILLS.get((r.case, r.arch), 0) or r.shared_bytes > MAX_SHARED_BYTES
        bad += wrong
        line = f"{r.case:50} {r.kernel:28} sm_{r.arch:<4}{r.registers:4} regs {r.spilled_bytes:6} spilled "
        text = json.dumps(asdict(r)) if options.json else f"{line}{r.shared_bytes:7} shared{'  <-' if wrong else ''}"
        print(text, flush=True)
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()

"""Builds and loads the C++ operators of this folder, once per machine, source and torch.

Every `*.cpp` here is compiled and linked into one shared library, and registers its operators with
`TORCH_LIBRARY_FRAGMENT(STRATA_NAMESPACE, m)`. The library lies in the user's cache folder under a name that hashes all
it depends on, so a change of source, compiler, processor or torch builds anew and nothing is ever stale. No Python
headers and no build tool are needed: only the C++ compiler that torch's own inductor needs.

It decides nothing: a caller that can do without asks `load()` and reads the reason of `CpuKernelsUnavailable`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import torch

Isa = Literal["native", "avx2"]

SOURCE_FOLDER = Path(__file__).parent
REQUIRED_MACROS = ("__AVX2__", "__FMA__", "__F16C__")  # what every kernel here assumes, in the compiler's words
_MARCH: dict[Isa, list[str]] = {"native": ["-march=native"], "avx2": ["-mavx2", "-mfma", "-mf16c"]}
_NAMESPACE: dict[Isa, str] = {"native": "strata", "avx2": "strata_avx2"}  # two builds may live in one process
# No -ffast-math: sums keep their order, so results do not depend on the batch, and NaN stays NaN.
_FLAGS = ["-O3", "-std=c++20", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-DNDEBUG"]

_TORCH_HEADERS = ("torch/library.h", "ATen/Parallel.h", "ATen/ops/empty.h", "ATen/ops/zeros.h")

_loaded: dict[Isa, Any] = {}
_failed: dict[Isa, CpuKernelsUnavailable] = {}
_fakes: list[Callable[[str], None]] = []


class CpuKernelsUnavailable(RuntimeError):
    """The C++ operators cannot be had on this machine; the message says why and what would help."""


def fakes(register: Callable[[str], None]) -> Callable[[str], None]:
    """Decorator: `register(namespace)` gives the operators of that namespace their fake (shape-only) versions.

    It runs when a library is loaded, and at once for those already loaded.
    """
    _fakes.append(register)
    for isa in _loaded:
        register(_NAMESPACE[isa])
    return register


def load(isa: Isa = "native") -> Any:
    """The namespace of the operators, `torch.ops.strata` (`torch.ops.strata_avx2` for isa "avx2").

    Builds the library if the cache has none (half a minute), and remembers the outcome, failures included.

    Raises:
        ValueError: unknown isa.
        CpuKernelsUnavailable: no compiler, a processor without AVX2, or a failed build.
    """
    if isa not in get_args(Isa):
        raise ValueError(f"isa={isa!r} is unknown; choose one of {get_args(Isa)}")
    if isa in _failed:
        raise _failed[isa]
    if isa not in _loaded:
        try:
            torch.ops.load_library(str(_library(isa)))
        except CpuKernelsUnavailable as reason:
            _failed[isa] = reason
            raise
        for register in _fakes:
            register(_NAMESPACE[isa])
        _loaded[isa] = getattr(torch.ops, _NAMESPACE[isa])
    return _loaded[isa]


def _library(isa: Isa) -> Path:
    """Path of the built library, building it if need be."""
    try:
        import platformdirs
        from torch.utils.cpp_extension import get_cxx_compiler  # imports setuptools: only when asked for
    except ImportError as error:
        raise CpuKernelsUnavailable(f"{error.name} is not installed; pip install {error.name}") from None

    compiler = get_cxx_compiler()
    macros = _predefined_macros(compiler, _MARCH[isa])
    missing = [name for name in REQUIRED_MACROS if f"#define {name} " not in macros]
    if missing:
        raise CpuKernelsUnavailable(f"this processor lacks {', '.join(m.strip('_') for m in missing)}")
    sources = sorted(SOURCE_FOLDER.glob("*.cpp"))
    key = hashlib.sha256(f"{torch.__version__}|{compiler}|{_FLAGS}|{_NAMESPACE[isa]}|{macros}".encode())
    for path in sorted([*sources, *SOURCE_FOLDER.glob("*.h")]):
        key.update(path.name.encode() + path.read_bytes())
    folder = Path(platformdirs.user_cache_dir("strata_lab")) / "kernels"
    library = folder / f"{_NAMESPACE[isa]}-{key.hexdigest()[:20]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with open(library.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits for the first one's library
            if not library.exists():
                _build(compiler, sources, [*_MARCH[isa], f"-DSTRATA_NAMESPACE={_NAMESPACE[isa]}"], library)
    return library


def _predefined_macros(compiler: str, march: list[str]) -> str:
    """What the compiler defines for these flags: its version and the instruction sets it would use."""
    command = [compiler, *march, "-dM", "-E", "-x", "c++", "/dev/null"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise CpuKernelsUnavailable(f"no C++ compiler: {compiler!r} not found; install g++ or clang++") from None
    except subprocess.CalledProcessError as error:
        raise CpuKernelsUnavailable(f"{compiler} refuses {' '.join(march)}: {error.stderr.strip()[-300:]}") from None


def _build(compiler: str, sources: list[Path], flags: list[str], library: Path) -> None:
    """Compile the sources side by side, link, and move the library into place in one step."""
    from torch.utils.cpp_extension import include_paths, library_paths

    includes = [f"-isystem{path}" for path in include_paths()]
    compile_ = [compiler, *_FLAGS, *flags, *includes]
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        # torch's headers take ten seconds to read, so they are read once for all sources
        Path(f"{scratch}/torch.h").write_text("".join(f"#include <{header}>\n" for header in _TORCH_HEADERS))
        _run_all([[*compile_, "-x", "c++-header", f"{scratch}/torch.h", "-o", f"{scratch}/torch.h.gch"]])
        objects = [f"{scratch}/{source.stem}.o" for source in sources]
        _run_all(
            [
                [*compile_, "-include", f"{scratch}/torch.h", "-c", str(source), "-o", out]
                for source, out in zip(sources, objects, strict=True)
            ]
        )
        built = f"{scratch}/{library.name}"
        # libgomp comes with torch under the same name: one thread pool for torch and for these operators
        search = [f"-L{path}" for path in library_paths()]
        _run_all([[compiler, "-shared", "-fopenmp", *objects, "-o", built, *search, "-ltorch_cpu", "-ltorch", "-lc10"]])
        os.replace(built, library)


def _run_all(commands: list[list[str]]) -> None:
    """Run the commands at the same time; raise with the first one's last words if any fails."""
    pipe = subprocess.PIPE
    jobs = [subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True) for command in commands]
    outputs = [job.communicate()[0] for job in jobs]
    for job, output in zip(jobs, outputs, strict=True):
        if job.returncode:
            raise CpuKernelsUnavailable(f"building the CPU kernels failed: {output.strip()[-2000:]}")

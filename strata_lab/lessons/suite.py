"""Every notebook from top to bottom on a device, timed: `python -m strata_lab.lessons.suite --device cuda`.

A notebook that fails or takes too long does not stop the others; what its cell raised goes into the record. The first
one runs alone, because it compiles kernels and measures the machine for all. The pages of those that ran are made by
`gallery.py`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from strata_lab.bench.harness import Environment, Record, write_results
from strata_lab.lessons.gallery import NOTEBOOKS, QUICK, NotebookFailed, execute
from strata_lab.resolve import device_named

SCRIPT = "python -m strata_lab.lessons.suite"
LIMIT_S = 300.0
BAR_S = 60.0  # what a notebook may take, kernel start included


@dataclass(frozen=True)
class Outcome:
    """What became of a notebook.

    Attributes:
        name: of its file, without ".ipynb".
        seconds: until it ended, kernel start included.
        slowest_cell_s: of its cells that ended; None where none did.
        error: empty where it ran to its end; else which cell failed, and how.
    """

    name: str
    seconds: float
    slowest_cell_s: float | None
    error: str


def outcome(path: Path, folder: Path, values: dict[str, Any], limit_s: float) -> Outcome:
    """Run one; the executed copy, as far as it came, goes to `folder`."""
    copy = folder / path.name
    copy.unlink(missing_ok=True)  # of an earlier run, which would speak for this one
    started, error = time.perf_counter(), ""
    try:
        execute(path, folder, values, limit_s)
    except subprocess.TimeoutExpired:
        error = f"not at its end after {limit_s:g} s"
    except NotebookFailed as problem:
        error = failed_cell(copy) or str(problem).strip().splitlines()[-1]
    return Outcome(path.stem, time.perf_counter() - started, slowest_cell_s(copy), error)


def _cells(copy: Path) -> list[Any]:
    import nbformat

    return list(nbformat.read(copy, as_version=4).cells) if copy.is_file() else []


def failed_cell(copy: Path) -> str:
    """First line of the cell of an executed copy that raised, and its error; empty where none did."""
    for cell in _cells(copy):
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                return f"{cell.source.splitlines()[0]}: {output.ename}: {output.evalue}"
    return ""


def slowest_cell_s(copy: Path) -> float | None:
    """Seconds of the slowest cell of an executed copy that ended; None where none did."""
    told = (cell.metadata.get("papermill", {}).get("duration") for cell in _cells(copy))
    return max((seconds for seconds in told if seconds is not None), default=None)


def run(paths: Sequence[Path], folder: Path, values: dict[str, Any], jobs: int, limit_s: float) -> Iterator[Outcome]:
    """The first notebook alone, then the others, `jobs` at a time; outcomes in order, as they are known."""
    one = partial(outcome, folder=folder, values=values, limit_s=limit_s)
    yield from map(one, paths[:1])
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(one, paths[1:])


def record(environment: Environment, one: Outcome, values: dict[str, Any], jobs: int) -> Record:
    """An outcome as a record."""
    measured = {} if one.slowest_cell_s is None else {"slowest_cell_s": one.slowest_cell_s}
    return environment.record(
        f"notebooks/{one.name}",
        script=f"{SCRIPT} --device {values['device']}",
        conditions={**values, "notebooks_at_a_time": jobs},
        metrics={"passed": not one.error, "total_s": one.seconds, **measured},
        note=one.error or "from top to bottom, kernel start included; its assertions about measured effects held",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: 0 where every notebook ran to its end, 1 where one did not."""
    parser = argparse.ArgumentParser(prog=SCRIPT, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="what the notebooks get as their parameter: auto, cpu or cuda")
    parser.add_argument("--seconds", type=float, default=QUICK["seconds"], help="how long a measurement may take")
    parser.add_argument("--only", default="", help="notebooks whose names begin so, for example 03")
    parser.add_argument("--jobs", type=int, default=1, help="at a time; more than one disturb each other's figures")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds that a notebook may take")
    parser.add_argument("--out", type=Path, default=Path("artifacts/notebooks"), help="folder of the executed copies")
    parser.add_argument("--name", help="results file; none is written by default")
    parser.add_argument("--results", help="folder of the results file (default: docs/results)")
    given = parser.parse_args(arguments)
    paths = sorted(NOTEBOOKS.glob(f"{given.only}*.ipynb"))
    if not paths:
        sys.stderr.write(f"--only {given.only}: no notebook in {NOTEBOOKS} begins so; try --only 01\n")
        return 1
    values = {**QUICK, "seconds": given.seconds, "device": given.device}
    environment, done = Environment.now(device_named(given.device).type), list[Outcome]()
    for one in run(paths, given.out, values, given.jobs, given.limit_s):
        done.append(one)
        told = one.error or ("passed" if one.seconds < BAR_S else f"passed, and took more than {BAR_S:g} s")
        sys.stdout.write(f"{one.seconds:6.1f} s  {one.name}: {told}\n")
        sys.stdout.flush()
        if given.name:
            write_results(given.name, [record(environment, o, values, given.jobs) for o in done], given.results)
    return int(any(one.error for one in done))


if __name__ == "__main__":
    raise SystemExit(main())

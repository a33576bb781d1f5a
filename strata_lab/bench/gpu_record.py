"""When the GPU tests last passed, and on what: `python -m strata_lab.bench.gpu_record JUNIT_XML...`, for `make gpu`.

CI has no GPU, so `docs/results/gpu_tests.json` is how a reader sees what was proven. It runs no test itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from strata_lab.bench.harness import Environment, Record, write_results


def record(reports: Sequence[Path], environment: Environment) -> Record:
    """One record of pytest runs: how many tests passed, failed and were skipped, by file, and which failed."""
    outcomes: Counter[str] = Counter()
    files: Counter[str] = Counter()
    failures: list[str] = []
    for case in chain.from_iterable(ElementTree.parse(path).getroot().iter("testcase") for path in reports):
        bad = case.find("failure") is not None or case.find("error") is not None
        outcome = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
        outcomes[outcome] += 1
        if outcome == "passed":
            files[case.get("classname", "")] += 1
        elif bad:
            failures.append(f"{case.get('classname')}::{case.get('name')}")
    return environment.record(
        "gpu_tests",
        script="make gpu",
        conditions={},
        metrics={
            **{k: outcomes[k] for k in ("passed", "failed", "skipped")},
            "passed_by_file": dict(sorted(files.items())),
            "failures": sorted(failures),
        },
        note="correctness only; no speed is measured here",
    )


def main() -> None:
    """Write `docs/results/gpu_tests.json` (or into --results) from pytest's JUnit report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reports", type=Path, nargs="+", help="what pytest --junitxml wrote; missing ones are named")
    parser.add_argument("--results", type=Path, help="folder; default docs/results")
    args = parser.parse_args()
    made = record([path for path in args.reports if path.is_file()], Environment.now("cuda"))
    if missing := [path.stem for path in args.reports if not path.is_file()]:  # cut by a time limit, or crashed
        made = dataclasses.replace(made, note=f"{made.note}; no report of {', '.join(missing)}")
    write_results("gpu_tests", [made], args.results)


if __name__ == "__main__":
    main()

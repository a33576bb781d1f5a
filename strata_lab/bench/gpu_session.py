"""The project's GPU figures on the card at hand, one stage after the other: `make gpu-figures`.

Correctness comes first, each file of tests in its own process, then sweeps, then figures. A stage that takes longer
than its limit is ended and the next one begins; each writes its files into the folder at once, so a run that is cut has
lost no more than its last stage. Nothing is measured here: `--list` prints the commands.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strata_lab.bench.harness import REPOSITORY

SCRIPT = "python -m strata_lab.bench.gpu_session"
MIXTURE, DENSE = "qwen3.8-flash", "qwen3.8-flash-dense"
CLIMBS = {"A": MIXTURE, "B": MIXTURE, "C": DENSE}  # C is about weight formats
SKIPPED = 5  # pytest's exit code where no test was selected


@dataclass(frozen=True)
class Stage:
    """A command of `python -m`, and the seconds it may take."""

    name: str
    words: tuple[str, ...]
    limit_s: float


def stages(folder: Path, size: float, scale: float) -> list[Stage]:
    """All of them in order: `folder` for their files, `size` of the models (1.0 as they are), `scale` of climbs."""
    shrunk = "" if size == 1.0 else f"@{size:g}"

    def tests(name: str, path: str, chosen: str, limit_s: float) -> Stage:
        report = str(folder / f"tests-{name}.xml")
        words = ("pytest", path, "-q", "-m", "not host", "-k", chosen, "--junitxml", report)
        return Stage(f"tests-{name}", words, limit_s)

    files = [*sorted(REPOSITORY.glob("tests/gpu/test_*.py")), *sorted(REPOSITORY.glob("tests/kernels/test_*.py"))]
    found = [tests(path.stem.removeprefix("test_"), str(path), "not memory", 300) for path in files]
    found.append(tests("memory", str(REPOSITORY / "tests/gpu"), "memory", 300))
    out, reports = str(folder), [stage.words[-1] for stage in found]

    def bench(name: str, module: str, limit_s: float, *words: str) -> None:
        found.append(Stage(name, (f"strata_lab.bench.{module}", *words), limit_s))

    bench("tests-record", "gpu_record", 30, *reports, "--results", out)
    moe, linear = f"{out}/sweep-moe.json", f"{out}/sweep-linear.json"
    bench("sweep-moe", "sweep_moe", 300, "--formats", "int8", "int4", "--seconds", "240", "--json", moe)
    wide = ("--formats", "int4g128", "--tokens", "16", "--products", "qkv-dense", "o", "gate-up", "down")
    bench("sweep-linear", "sweep_linear", 180, *wide, "--seconds", "120", "--json", linear)
    bench("fixed-costs", "fixed_costs", 180, "--results", out)
    for name, weights, batches in ((MIXTURE, "fp8 int8 int4", "1 4 8 16"), (DENSE, "int8 int4", "8 16")):
        cells = ("--weights", *weights.split(), "--batch", *batches.split(), "--name", f"evidence-{name}")
        bench(f"evidence-{name}", "evidence", 400, "--model", name + shrunk, *cells, "--results", out)
    for letter, name in CLIMBS.items():
        workload = ("--model", name + shrunk, "--workload", letter, "--scale", f"{scale:g}", "--rounds", "1")
        written = ("--results", f"{out}/climb-{letter}.json", "--html", f"{out}/climb-{letter}.html")
        bench(f"climb-{letter}", "climb", 400, *workload, *written)
    fp8 = ("--model", MIXTURE + shrunk, "--weights", "fp8")
    bench("interference", "interference", 200, *fp8, "--results", out)
    bench("overload", "overload", 300, *fp8, "--seconds", "8", "--results", out)
    bench("heat", "heat_trace", 240, "--model", DENSE + shrunk, "--weights", "bf16", "--results", out)
    bench("stress", "stress", 150, "--device", "cuda", "--seconds", "60", "--results", out)
    pages = ("--part", "speed", "--device", "cuda", "--speed-length", "8000")  # the default model from here on
    bench("pages", "long_context", 200, *pages, "--results", out)
    bench("cycles", "cycle_costs", 90, "--drafter", "ngram", "draft", "--kernels", "--results", out)
    for drafter in ("ngram", "draft"):
        guesses = ("--drafter", drafter, "--device", "cuda", "--weights", "bf16", "--batches", "1,4")
        kept = ("--place-s", "4", "--tokens", "256", "--limit-s", "330", "--name", "speculation_gpu", "--results", out)
        bench(f"speculation-{drafter}", "speculation", 400, *guesses, *kept)
    return found


def run(stage: Stage) -> dict[str, object]:
    """Run one to its end or its limit; its output goes to the terminal and is not kept."""
    started, command = time.monotonic(), [sys.executable, "-m", *stage.words]
    with subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True) as process:
        try:
            code = process.wait(stage.limit_s)
            outcome = "passed" if code in (0, SKIPPED) else f"failed with exit code {code}"
        except BaseException as problem:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
            if not isinstance(problem, subprocess.TimeoutExpired):
                raise
            outcome = f"ended at its limit of {stage.limit_s:g} s"
    seconds = round(time.monotonic() - started, 1)
    return {"stage": stage.name, "outcome": outcome, "seconds": seconds, "command": shlex.join(command[1:])}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: 0 where every stage passed, 1 where one did not, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(prog=SCRIPT, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("artifacts/gpu"), help="folder for the stages' files")
    parser.add_argument("--only", default="", help="regular expression that a stage's name must contain")
    parser.add_argument("--size", type=float, default=1.0, help="of the models: 0.25 for a card of 24 GB")
    parser.add_argument("--scale", type=float, default=0.25, help="of the climbs' workloads")
    parser.add_argument("--list", action="store_true", help="print the stages and run none")
    options = parser.parse_args(arguments)
    folder = options.out.absolute()
    chosen = [stage for stage in stages(folder, options.size, options.scale) if re.search(options.only, stage.name)]
    if options.list:
        for stage in chosen:
            print(f"{stage.name}, at most {stage.limit_s:g} s: python -m {shlex.join(stage.words)}")
        return 0
    import torch

    if not torch.cuda.is_available():
        print("these figures need a CUDA device and torch sees none; on a CPU try `make climb`", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    done: list[dict[str, object]] = []
    for stage in chosen:
        print(f"== {stage.name}, at most {stage.limit_s:g} s", flush=True)
        done.append(run(stage))
        print(f"== {stage.name}: {done[-1]['outcome']} after {done[-1]['seconds']} s", flush=True)
        (folder / "session.json").write_text(json.dumps(done, indent=1))
    return int(any(one["outcome"] != "passed" for one in done))


if __name__ == "__main__":
    raise SystemExit(main())

"""Compare this engine with transformers and llama.cpp: same machine, same run, same prompts, interleaved.

Every engine gets its turn in every round and the order turns around from round to round; each figure is the best of
its rounds, because on a shared machine what interferes only slows down. Peers run as worker processes under an
interpreter of their own choice, so that their packages never meet ours. A peer that is not installed is left out and
named. Whatever comes out is recorded, also when it is a loss.

    python -m strata_lab.bench.compare --llama-python /path/to/venv/bin/python
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from strata_lab.bench.harness import Environment, Record, Spread, interleave, wait_until_quiet, write_results
from strata_lab.bench.measure import run
from strata_lab.bench.workloads import Workload, batch, single_stream
from strata_lab.config import CAPTURES, DEFAULT_MODEL

FOLDER = Path(__file__).parent
LLAMA_FILE_TYPES = ("shipped", "q8_0", "f16")
Figures = dict[str, float]  # "decode x1", "decode x8", "prefill" -> tok/s


@dataclass(frozen=True)
class Sizes:
    """What everybody decodes.

    Attributes:
        prompt_tokens, output_tokens: per request.
        batch: requests of the batched figure.
        rounds: turns of every engine.
        threads: CPU threads of every engine.
    """

    prompt_tokens: int = 128
    output_tokens: int = 128
    batch: int = 8
    rounds: int = 3
    threads: int = 2

    @property
    def workloads(self) -> dict[str, Workload]:
        """Figure name to workload."""
        one = single_stream(self.prompt_tokens, self.output_tokens)
        return {"decode x1": one, f"decode x{self.batch}": batch(self.batch, self.prompt_tokens, self.output_tokens)}


class Peer:
    """A worker process that speaks the protocol of `peer_llama_cpp.py`.

    Args:
        name: engine and variant, for example "llama.cpp q8_0".
        command: how to start it.
        prompts: figure name to token ids.
        output_tokens: per request.
    """

    def __init__(
        self, name: str, command: Sequence[str], prompts: Mapping[str, list[list[int]]], output_tokens: int
    ) -> None:
        self.name, self.prompts, self.output_tokens = name, prompts, output_tokens
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.version = str(self._answer()["version"])

    def measure(self) -> Figures:
        """One turn: every figure once."""
        found = {}
        for figure, prompts in self.prompts.items():
            seconds = self._ask("decode", prompts)
            found[figure] = len(prompts) * (self.output_tokens - 1) / seconds
        alone = self.prompts["decode x1"]
        found["prefill"] = len(alone[0]) / self._ask("prefill", alone)
        return found

    def _ask(self, op: str, prompts: list[list[int]]) -> float:
        assert self._process.stdin is not None
        request = {"op": op, "prompts": prompts, "output_tokens": self.output_tokens}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with exit code {self._process.wait()}; its messages are above")
        return json.loads(line)

    def close(self) -> None:
        """End the worker."""
        self._process.communicate()


class Ours:
    """This engine in one weight format."""

    def __init__(self, engine: Any, weight_format: str, sizes: Sizes) -> None:
        self.engine, self.weight_format, self.sizes = engine, weight_format, sizes
        self.name = f"strata_lab {weight_format}"

    def measure(self) -> Figures:
        """One turn: every figure once, after a short warm-up."""
        self.engine.apply(weight_format=self.weight_format)
        run(self.engine, single_stream(self.sizes.prompt_tokens, 4))
        runs = {figure: run(self.engine, workload) for figure, workload in self.sizes.workloads.items()}
        found = {figure: r.decode_tok_s or 0.0 for figure, r in runs.items()}
        return found | {"prefill": runs["decode x1"].prefill_tok_s}


def peers(
    model: Path, prompts: Mapping[str, list[list[int]]], sizes: Sizes, llama_python: str | None, scratch: Path
) -> tuple[list[Peer], list[str]]:
    """Start every peer that is installed.

    Returns:
        The peers, and a sentence for each one left out.
    """
    started, missing = [], []
    common = ["--model", str(model), "--threads", str(sizes.threads)]
    worker = [sys.executable, "-m", "strata_lab.bench.peer_transformers", *common]
    started.append(Peer("transformers fp32", worker, prompts, sizes.output_tokens))
    if llama_python is None and importlib.util.find_spec("llama_cpp") is not None:
        llama_python = sys.executable
    if llama_python is None:
        missing.append("llama.cpp: llama_cpp is not importable; name an interpreter that has it with --llama-python")
    elif model.suffix != ".gguf":
        missing.append(f"llama.cpp: it reads .gguf files, and {model} is none")
    else:
        length = sizes.prompt_tokens + sizes.output_tokens
        script = [llama_python, str(FOLDER / "peer_llama_cpp.py"), *common, "--length", str(length)]
        for kind in LLAMA_FILE_TYPES:
            command = [*script, "--file-type", kind, "--scratch", str(scratch)]
            started.append(Peer(f"llama.cpp {kind}", command, prompts, sizes.output_tokens))
    return started, missing


def compare(
    engine: Any, formats: Sequence[str], others: Sequence[Peer], sizes: Sizes
) -> tuple[dict[str, list[Figures]], float]:
    """Interleave everybody, each turn as soon as the machine is quiet.

    Returns:
        Name to the figures of each round, and the largest share of the processors that other programs used before
        a turn.
    """
    everybody: list[Ours | Peer] = [Ours(engine, weight_format, sizes) for weight_format in formats]
    everybody += others
    busy: list[float] = []

    def turn(who: Ours | Peer) -> Figures:
        busy.append(wait_until_quiet())
        return who.measure()

    return interleave({who.name: partial(turn, who) for who in everybody}, sizes.rounds), max(busy)


def records(
    results: Mapping[str, list[Figures]],
    versions: Mapping[str, str],
    model: str,
    sizes: Sizes,
    environment: Environment,
    busy: float = 0.0,
) -> list[Record]:
    """One record per figure and peer engine: our best variant against the peer's best."""
    made = []
    engines = sorted({name.split()[0] for name in results} - {"strata_lab"})
    for figure in next(iter(results.values()))[0]:
        best = {name: max(f[figure] for f in rounds) for name, rounds in results.items()}
        mine = max((n for n in best if n.startswith("strata_lab ")), key=lambda n: best[n])
        for engine in engines:
            theirs = max((n for n in best if n.startswith(f"{engine} ")), key=lambda n: best[n])
            values = [f[figure] for f in results[mine]]
            metric = "prefill_tok_s" if figure == "prefill" else "output_tok_s"
            ratio = best[mine] / best[theirs]
            made.append(
                environment.record(
                    f"compare/{figure}/{engine}",
                    script="python -m strata_lab.bench.compare",
                    conditions={
                        "model": model,
                        "weight_format": mine.split()[1],
                        "batch": sizes.batch if figure == f"decode x{sizes.batch}" else 1,
                        "prompt_tokens": sizes.prompt_tokens,
                        "output_tokens": sizes.output_tokens,
                        "context": sizes.prompt_tokens + sizes.output_tokens // 2,
                    },
                    metrics={
                        metric: best[mine],
                        "ratio_to_peer": ratio,
                        "all_rounds": {name: [f[figure] for f in rounds] for name, rounds in results.items()},
                    },
                    spread=Spread.of(values),
                    peer={
                        "name": theirs,
                        "version": versions[theirs],
                        "metrics": {
                            metric: best[theirs],
                            "median": statistics.median(f[figure] for f in results[theirs]),
                        },
                    },
                    note=f"{ratio:.2f}x; best of {sizes.rounds} interleaved rounds for both sides; "
                    f"other programs used up to {busy:.0%} of the processors before a turn",
                )
            )
    return made


def table(results: Mapping[str, list[Figures]]) -> Any:
    """A `rich` table: best, and (slowest) of the rounds."""
    from rich.table import Table

    figures = list(next(iter(results.values()))[0])
    made = Table("engine", *(f"{f} tok/s" for f in figures), title="best (slowest) of the rounds")
    for name, rounds in results.items():
        cells = [f"{max(r[f] for r in rounds):.1f} ({min(r[f] for r in rounds):.1f})" for f in figures]
        made.add_row(name, *cells)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m strata_lab.bench.compare`; 0 whoever wins."""
    parser = argparse.ArgumentParser(prog="python -m strata_lab.bench.compare", description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--formats", default="int8,int4", help="our weight formats, with commas")
    parser.add_argument("--llama-python", help="interpreter of an environment with llama-cpp-python")
    parser.add_argument("--prompt-tokens", type=int, default=Sizes.prompt_tokens)
    parser.add_argument("--output-tokens", type=int, default=Sizes.output_tokens)
    parser.add_argument("--batch", type=int, default=Sizes.batch)
    parser.add_argument("--rounds", type=int, default=Sizes.rounds)
    parser.add_argument("--threads", type=int, default=Sizes.threads)
    parser.add_argument("--capture", default="replay", choices=CAPTURES, help="how our step is captured")
    parser.add_argument("--results", type=Path, default=Path("artifacts"), help="folder for compare.json")
    args = parser.parse_args(arguments)
    sizes = Sizes(args.prompt_tokens, args.output_tokens, args.batch, args.rounds, args.threads)

    import torch
    from platformdirs import user_cache_path
    from rich.console import Console

    from strata_lab.engine import LLMEngine
    from strata_lab.models.hub import find_model

    torch.set_num_threads(sizes.threads)
    console, log = Console(), Console(stderr=True)
    formats = args.formats.split(",")
    environment = Environment.now("cpu", sizes.threads)
    scratch = user_cache_path("strata_lab", ensure_exists=True)
    options = {"device": "cpu", "weight_format": formats[0], "capture": args.capture}
    with LLMEngine(args.model, max_num_batched_tokens=max(512, sizes.prompt_tokens), **options) as engine:
        path = find_model(args.model)
        assert path is not None, "the engine has just opened it"
        vocabulary = engine.model_config.vocab_size
        prompts = {f: w.prompts(engine.tokenizer, vocabulary) for f, w in sizes.workloads.items()}
        others, missing = peers(path, prompts, sizes, args.llama_python, scratch)
        for sentence in missing:
            log.print(f"left out: {sentence}")
        try:
            results, busy = compare(engine, formats, others, sizes)
        finally:
            for peer in others:
                peer.close()
    made = records(results, {p.name: p.version for p in others}, args.model, sizes, environment, busy)
    console.print(table(results))
    for record in made:
        console.print(f"{record.name}: {record.note}")
    log.print(f"records: {write_results('compare', made, args.results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What each format and method costs in quality: perplexity, KL and agreement beside the source, as a results file.

`python -m strata_lab.bench.quality [--variants gptq:int4:group64 ...]` quantizes a model in memory and compares it with
its source on two texts: the project's evaluation text, on which methods were developed, and the benchmarks' prose, on
which nobody tuned anything. Embedding and head stay as they are stored.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from strata_lab.bench.harness import Environment, Record, write_results
from strata_lab.bench.workloads import TEXT_FILE
from strata_lab.config import DEFAULT_MODEL
from strata_lab.settings import ConfigError

SCRIPT = "python -m strata_lab.bench.quality"
VARIANTS = (
    "rtn:int8:group32", "rtn:int8:channel", "gptq:int8:channel", "rtn:fp8:channel", "gptq:fp8:channel",
    "kv:fp8:unit", "kv:fp8:scaled", "rtn:int4:group128", "rtn:int4:group64", "awq:int4:group64", "gptq:int4:group64",
    "gptq:int4:group64-asym",
)  # fmt: skip
WINDOW, WINDOWS, CALIBRATION = 512, 8, 18  # tokens of a sequence; sequences of each text; of the calibration


class Judge:
    """A model, the text to calibrate on and the texts to judge by; what the source predicts is computed once.

    Attributes:
        source: the checkpoint.
        calibration: token ids of `CALIBRATION` sequences at most.
        texts: name to sequences: "evaluation" and "unseen".
    """

    def __init__(self, model: str, windows_of_each: int = WINDOWS) -> None:
        import torch

        from strata_lab.models.loader import open_checkpoint
        from strata_lab.quant.forward import sequence_logits
        from strata_lab.quant.texts import text, windows

        self.source: Any = open_checkpoint(model)
        tokenizer = self.source.tokenizer()
        if tokenizer is None:
            raise ConfigError(f"{model} has no tokenizer, so there is no text to judge by; try {DEFAULT_MODEL}")

        def cut(content: str, most: int) -> list[list[int]]:
            return windows(tokenizer.encode(content, add_special_tokens=False), WINDOW)[:most]

        self.texts = {
            "evaluation": cut(text("evaluation"), windows_of_each),
            "unseen": cut(TEXT_FILE.read_text(encoding="utf-8"), windows_of_each),
        }
        self.calibration = cut(text("calibration"), CALIBRATION)
        with torch.inference_mode():
            plain = sequence_logits(self.source)
            self._known = {tuple(s): plain(s) for sequences in self.texts.values() for s in sequences}

    def metrics(self, changed: Any) -> dict[str, Any]:
        """What a changed checkpoint does to each text."""
        import torch

        from strata_lab.quant.forward import sequence_logits
        from strata_lab.quant.quality import compare

        metrics: dict[str, Any] = {}
        with torch.inference_mode():
            logits = sequence_logits(changed)
            for name, sequences in self.texts.items():
                found = compare(lambda s: self._known[tuple(s)], logits, sequences)
                metrics |= found.figures(name)
        return metrics


def measure(model: str, variants: Sequence[str], windows_of_each: int) -> Iterator[Record]:
    """A record per variant, as soon as it is there."""
    environment, judge = Environment.now("cpu"), Judge(model, windows_of_each)
    for variant in variants:
        metrics = figures(judge, variant)
        method, weights, granularity = variant.split(":")
        conditions = {
            "model": model, "method": method, "weights": weights, "granularity": granularity,
            "calibration_tokens": 0 if method == "rtn" else sum(map(len, judge.calibration)), "head": "as stored",
        }  # fmt: skip
        yield environment.record(f"quality/{variant}", script=SCRIPT, conditions=conditions, metrics=metrics)


def figures(judge: Judge, variant: str) -> dict[str, Any]:
    """What a variant ("method:format:granularity") costs."""
    started = time.perf_counter()
    overlay, nbytes = quantized(judge.source, variant, judge.calibration)
    seconds = time.perf_counter() - started
    return {"quantize_s": seconds, "layer_bytes": nbytes, **judge.metrics(overlay)}


def recorded(variant: str, file: Path) -> dict[str, Any]:
    """The record of a variant in a results file of this script; `ConfigError` where there is none."""
    for record in json.loads(file.read_text(encoding="utf-8")):
        if record["name"] == f"quality/{variant}":
            return record
    raise ConfigError(f"{file} has no record quality/{variant}; measure it with {SCRIPT} --variants {variant}")


def check_comparable(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """`ConfigError` unless two sets of figures are of the same source and texts, by what the source predicts."""
    for key, value in theirs.items():
        if key.endswith(("_tokens", "_reference")) and not math.isclose(value, ours[key], rel_tol=1e-6):
            raise ConfigError(f"{key} was {ours[key]} and is {value} here: other texts or weights; measure ours again")


def quantized(source: Any, variant: str, calibration: Sequence[Sequence[int]]) -> tuple[Any, int]:
    """The source with all matrices of its layers in a variant ("method:format:granularity"), and their bytes.

    "kv" leaves the matrices alone.
    """
    from strata_lab.quant import get_grid_format
    from strata_lab.quant.base import LinearWeight
    from strata_lab.quant.calibrate import quantize_model
    from strata_lab.quant.overlay import Overlay

    if variant.count(":") != 2:
        raise ConfigError(f"variant {variant!r} must be METHOD:FORMAT:GRANULARITY; try {VARIANTS[0]!r}")
    method, weights, granularity = variant.split(":")
    overlay, nbytes = Overlay(source), 0
    if method == "kv":
        return overlay, nbytes
    for one in quantize_model(source, calibration, get_grid_format(weights, granularity), method):
        overlay.put(one.name, one.value)
        nbytes += one.value.nbytes if isinstance(one.value, LinearWeight) else 0
    return overlay, nbytes


def _cache(source: Any, variant: str, calibration: Sequence[Sequence[int]]) -> dict[str, Any]:
    """How keys and values are kept: "kv:fp8:unit", or with scales of the calibration text "kv:fp8:scaled"."""
    import torch

    from strata_lab.quant.cache_scales import cache_scales

    method, _, scales = variant.split(":")
    if method != "kv":
        return {}
    found = cache_scales(source, calibration) if scales == "scaled" else None
    return {"kv_dtype": torch.float8_e4m3fn, "kv_scales": found}


def row(name: str, m: Mapping[str, Any]) -> str:
    """One line for the terminal: a variant and its metrics."""
    parts = [
        f"{text} {m[f'{text}_perplexity']:.3f} ({m[f'{text}_relative']:+.2%}) KL {m[f'{text}_kl']:.4f} "
        f"top-1 {m[f'{text}_top1']:.1%}"
        for text in ("evaluation", "unseen")
    ]
    return f"{name:24} {'; '.join(parts)}; {m['quantize_s']:.0f} s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog=SCRIPT, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), help="METHOD:FORMAT:GRANULARITY")
    parser.add_argument("--windows", type=int, default=WINDOWS, help=f"sequences of {WINDOW} tokens of each text")
    parser.add_argument("--name", default="quality_cpu", help="results file")
    parser.add_argument("--results", help="folder of the results file (default: docs/results)")
    options = parser.parse_args(arguments)
    records: list[Record] = []
    for record in measure(options.model, options.variants, options.windows):
        records.append(record)
        sys.stdout.write(row(record.name[8:], record.metrics) + "\n")
        sys.stdout.flush()
        write_results(options.name, records, options.results)  # what was measured survives an interruption
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Our GPTQ beside GPTQModel's: same model, calibration, texts and head; only what the layers' matrices became differs.

`python -m strata_lab.bench.peer_gptq [--python INTERPRETER]` writes the model as a float32 Hugging Face folder, lets
GPTQModel quantize it in 4 bits in symmetric groups of 64, reads the result with this project's reader, and judges both
as `quality.py` does. GPTQModel works in a process of its own, under an interpreter that has it (`INSTALL`), so its
packages never meet ours; without a GPU it takes minutes a variant. On machines of one or two cores it wants
GPTQMODEL_CPU_WORKERS=2 in the environment. With `--scratch`, what it has already made of this model is judged as it is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

OURS = "gptq:int4:group64"
SHARED = {"bits": 4, "group_size": 64, "sym": True, "lm_head": False, "device": "cpu"}
VARIANTS: dict[str, dict[str, Any]] = {
    "desc_act": {"desc_act": True, "act_group_aware": False},
    "default": {},  # order within and of whole groups
    "tuned": {"desc_act": True, "act_group_aware": False, "static_groups": True, "damp_percent": 0.01, "mse": 2.4},
}
INSTALL = "give the interpreter of an environment with `pip install gptqmodel` as --python"
NAME = "quality_peer_cpu"  # of the results file
SCRIPT = "python -m strata_lab.bench.peer_gptq"
MADE = "made.json"  # written last: its version of GPTQModel and the seconds it took


def write_source(model: str, folder: Path) -> None:
    """The model in float32, which holds what any stored format means, as transformers reads it."""
    import transformers

    from strata_lab.bench.peer_transformers import load
    from strata_lab.models.hub import find_model
    from strata_lab.models.loader import open_checkpoint

    path, tokenizer = find_model(model), open_checkpoint(model).tokenizer()
    assert path is not None and tokenizer is not None, "whoever judges has opened it and read texts with it"
    load(path).save_pretrained(folder)
    last = tokenizer.backend.id_to_token(next(iter(tokenizer.eos_token_ids)))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, eos_token=last).save_pretrained(folder)


def make(python: str, source: Path, folder: Path, calibration: list[list[int]], settings: dict[str, Any]) -> Any:
    """Have GPTQModel quantize `source` into `folder` unless that is done, and say how; `ConfigError` if it cannot."""
    from strata_lab.settings import ConfigError

    if not (folder / MADE).is_file():
        job = {"source": str(source), "folder": str(folder), "settings": settings, "calibration": calibration}
        # -P: the modules beside this file, such as `kernels`, would hide packages of the same name
        command = [python, "-P", __file__, "--worker"]
        if subprocess.run(command, input=json.dumps(job), text=True, stdout=sys.stderr).returncode:
            raise ConfigError(f"{python} could not quantize with GPTQModel, its messages are above; {INSTALL}")
    return json.loads((folder / MADE).read_text())


def work() -> None:
    """The other process: one job from standard input."""
    import torch
    from gptqmodel import GPTQModel, QuantizeConfig, __version__

    job = json.load(sys.stdin)
    started = time.perf_counter()
    model = GPTQModel.load(job["source"], QuantizeConfig(**job["settings"]), dtype=torch.float32)
    model.quantize([{"input_ids": s, "attention_mask": [1] * len(s)} for s in job["calibration"]], batch_size=1)
    model.save(job["folder"])
    made = {"version": __version__, "seconds": time.perf_counter() - started}
    (Path(job["folder"]) / MADE).write_text(json.dumps(made))


def read(source: Any, folder: Path) -> tuple[Any, str]:
    """The source with the layers' matrices of a folder, and what the reader had to say.

    Raises `ValueError` where the folder differs from the source in anything else.
    """
    import torch

    from strata_lab.bench.peer_transformers import plain
    from strata_lab.models.loader import open_checkpoint
    from strata_lab.quant.overlay import Overlay

    overlay, theirs = Overlay(source), open_checkpoint(str(folder))
    for name in source.names():
        if name.endswith("_proj.weight"):
            overlay.put(name, theirs.linear(name))
        elif not torch.equal(plain(source, name), plain(theirs, name)):
            raise ValueError(f"{folder}: {name} is not the source's, so quality would not be that of the layers alone")
    return overlay, "; ".join(theirs.notes())


def measure(model: str, python: str, variants: Sequence[str], scratch: Path, known: Path | None) -> Iterator[Any]:
    """A record per variant of the peer, as soon as it is there; our figures are measured unless a file has them."""
    from strata_lab.bench.harness import Environment
    from strata_lab.bench.quality import Judge, check_comparable, figures, recorded, row

    environment, judge = Environment.now("cpu"), Judge(model)
    if not (scratch / "source" / "tokenizer.json").is_file():
        write_source(model, scratch / "source")
    record = {"metrics": figures(judge, OURS), **vars(environment)} if known is None else recorded(OURS, known)
    ours = record["metrics"]
    for variant in variants:
        settings, folder = SHARED | VARIANTS[variant], scratch / variant
        made = make(python, scratch / "source", folder, judge.calibration, settings)
        changed, note = read(judge.source, folder)
        theirs = {"quantize_s": made["seconds"], **judge.metrics(changed)}
        check_comparable(ours, theirs)
        sys.stdout.write(f"ours      {row(OURS, ours)}\ngptqmodel {row(variant, theirs)}\n")
        ratios = {f"{t}_ratio_to_peer": ours[f"{t}_perplexity"] / theirs[f"{t}_perplexity"] for t in judge.texts}
        conditions = {
            "model": model, "ours": OURS, "peer": settings, "head": "as stored",
            "ours_measured": [record["date"], record["commit"]], "calibration_tokens": sum(map(len, judge.calibration)),
        }  # fmt: skip
        seen = replace(environment, versions={**environment.versions, "gptqmodel": made["version"]})
        peer = {"name": f"gptqmodel {variant}", "version": made["version"], "metrics": theirs}
        yield seen.record(
            f"quality_peer/{variant}", script=SCRIPT, conditions=conditions, metrics=ours | ratios, peer=peer, note=note
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    from strata_lab.bench.harness import Record, write_results
    from strata_lab.config import DEFAULT_MODEL

    parser = argparse.ArgumentParser(prog=SCRIPT, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has gptqmodel")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--ours", type=Path, help="results of bench.quality to take our figures from, if not measured")
    parser.add_argument("--scratch", type=Path, help="folder for the quantized models (default: a temporary one)")
    parser.add_argument("--results", help="folder of the results file (default: docs/results)")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        records: list[Record] = []
        for record in measure(args.model, args.python, args.variants, args.scratch or Path(temporary), args.ours):
            records.append(record)
            write_results(NAME, records, args.results)  # what was measured survives an interruption
    return 0


if __name__ == "__main__":
    work() if sys.argv[1:] == ["--worker"] else sys.exit(main())

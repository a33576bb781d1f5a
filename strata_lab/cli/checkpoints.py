"""`strata convert` and `strata validate`: parse, call, print (see `cli/__init__.py`)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from strata_lab.cli.terminal import AsJson, bar, fail, plain_errors, print_checks
from strata_lab.settings import ConfigError

WINDOW = 512  # tokens of a calibration sequence
SEQUENCES = 16  # of them
MIB = 1 << 20


@plain_errors
def convert(
    source: Annotated[str, typer.Argument(help="A known name, a .gguf file or a model folder.")],
    destination: Annotated[Path, typer.Argument(help="The new folder; it must not exist.")],
    weights: Annotated[str, typer.Option(help="fp8, int8, int4, bf16 or fp32.")] = "int8",
    granularity: Annotated[
        str | None,
        typer.Option(help="What shares a scale: tensor, channel, block128, group128, group64, group32, group64-asym."),
    ] = None,
    method: Annotated[
        str, typer.Option(help="rtn (round to nearest), rtn-clip, gptq, awq or awq-gptq; all but rtn read a text.")
    ] = "rtn",
    calibration: Annotated[
        Path | None, typer.Option(help="UTF-8 text to calibrate with. Default: the text that comes with strata.")
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="PATTERN or PATTERN=FORMAT for matrices to keep as stored or in a format; repeatable."),
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="Format of embedding and head. Default: int8 with quantized layers.")
    ] = None,
    kv_scales: Annotated[bool, typer.Option("--kv-scales", help="Calibrate scales for an FP8 cache.")] = False,
    sequences: Annotated[int, typer.Option(help=f"Sequences of {WINDOW} tokens to calibrate with.")] = SEQUENCES,
    device: Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Write a model as a quantized checkpoint, one layer in memory at a time; goes on where it was interrupted."""
    from strata_lab.models.loader import checkpoint_files, open_checkpoint
    from strata_lab.quant.convert_model import ConvertSettings, convert_checkpoint

    settings = ConvertSettings(weights, granularity, method, tuple(keep or ()), head, kv_scales)
    opened = open_checkpoint(source)
    try:
        tokens: list[list[int]] = []
        if method != "rtn" or kv_scales:
            tokens = calibration_tokens(opened, calibration, sequences)
        with bar() as progress:
            done = convert_checkpoint(
                opened, destination, settings, files=checkpoint_files(source), calibration=tokens, device=device,
                progress=progress,
            )  # fmt: skip
    finally:
        opened.close()
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(done) | {"folder": str(done.folder)}))
        return
    again = f", {done.resumed} of {done.layers} layers were there already" if done.resumed else ""
    typer.echo(
        f"{done.folder}: {done.bytes_after / MIB:.1f} MiB, from {done.bytes_before / MIB:.1f} MiB, in "
        f"{done.seconds:.1f} s{again}\nnext: strata validate {done.folder} --deep --source {source}"
    )


def calibration_tokens(checkpoint: Any, file: Path | None, sequences: int) -> list[list[int]]:
    """Sequences of token ids of a text file, or of the project's own text."""
    from strata_lab.quant.texts import text, windows

    tokenizer = checkpoint.tokenizer()
    if tokenizer is None:
        raise ConfigError(f"{checkpoint.name} has no tokenizer, so no text can calibrate it; use method='rtn'")
    if file is None:
        content = text("calibration")
    else:
        try:
            content = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"calibration={str(file)!r} cannot be read as UTF-8 text: {error}") from error
    length = min(WINDOW, checkpoint.config.max_position)
    found: Sequence[list[int]] = windows(tokenizer.encode(content), length)[: max(sequences, 1)]
    if not found or len(found[0]) < 2:
        raise ConfigError(f"calibration={str(file)!r} holds no text; give some thousand words")
    return list(found)


@plain_errors
def validate(
    path: Annotated[str, typer.Argument(help="A known name, a .gguf file or a model folder.")],
    deep: Annotated[bool, typer.Option("--deep", help="Measure the quality beside --source as well.")] = False,
    source: Annotated[str | None, typer.Option(help="The model it was made from, for --deep.")] = None,
    html: Annotated[Path, typer.Option(help="Where the page of --deep goes.")] = Path("validate.html"),
    as_json: AsJson = False,
) -> None:
    """Look at every tensor of a checkpoint and say, line by line, whether it fits; --deep compares what it says."""
    if deep and source is None:
        raise ConfigError("--deep compares with the model this one was made from; name it with --source")
    from strata_lab.models.loader import open_checkpoint
    from strata_lab.quant.validate import validate as examine

    opened = open_checkpoint(path)
    try:
        with bar() as progress:
            lines = examine(opened, progress)
    finally:
        opened.close()
    ok = all(line.verdict != "fail" for line in lines)
    document: dict[str, Any] = {"ok": ok, "lines": [dataclasses.asdict(line) for line in lines]}
    if not as_json:
        print_checks(lines)
    if deep and ok:
        document["quality"] = _compared(str(source), path, html, as_json)
    if as_json:
        typer.echo(json.dumps(document, ensure_ascii=False))
    if not ok:
        fail(f"{path} does not fit; see the lines marked fail", 1)


def _compared(source: str, path: str, html: Path, as_json: bool) -> dict[str, Any]:
    from strata_lab.bench.self_check import self_check
    from strata_lab.bench.self_check_report import html_page

    with bar() as progress:
        found = self_check(source, path, progress)
    html.parent.mkdir(parents=True, exist_ok=True)
    html.write_text(html_page(found), encoding="utf-8")
    if not as_json:
        for language, c in found.languages.items():
            typer.echo(
                f"{language}: perplexity {c.perplexity:.3f}, source {c.reference_perplexity:.3f} "
                f"({c.perplexity - c.reference_perplexity:+.3f}), mean KL {c.mean_kl:.4f}, top-1 {c.top1_agreement:.1%}"
            )
        for flag in found.flags:
            typer.echo(f"look at: {flag}")
        typer.echo(f"page: {html}", err=True)
    return dataclasses.asdict(found)

"""`strata`: the engine from a terminal.

Commands parse, call the package and print; nothing is computed here. Text goes to standard output, everything about
the text (timings, progress, errors) to standard error, so that a pipe gets only the text. torch is imported when a
command needs it, so help and mistakes in the flags are answered at once.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from strata_lab import __version__
from strata_lab.cli import bench, checkpoints, drafts, gauges
from strata_lab.cli.answers import answer
from strata_lab.cli.options import (
    config_flags,
    given,
    parse_toggle,
    sampling_flags,
    sampling_params,
    toggle_flags,
    with_flags,
)
from strata_lab.cli.serve import serve
from strata_lab.cli.terminal import AsJson, bar, fail, plain_errors, print_checks, publish
from strata_lab.config import DEFAULT_MODEL, engine_config, toggles
from strata_lab.sampling_params import RequestError, SamplingParams
from strata_lab.settings import ConfigError

INTERRUPTED = 130  # exit code: 128 + SIGINT
app = typer.Typer(
    name="strata",
    help="A small, fast LLM decode engine whose optimizations can be flipped while it runs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its panels cut long flag names off in a narrow terminal
    context_settings={"help_option_names": ["-h", "--help"]},
)
Model = Annotated[str, typer.Option("--model", "-m", help="A known name, a preset, a .gguf file or a model folder.")]
CHAT_HELP = """/set TOGGLE VALUE   change a toggle of the running engine (/set alone lists them)
/stats              where the engine stands
/reset              forget the conversation
/help               this list
/exit               leave (also Ctrl+D)"""


def make_engine(model: str, **options: Any) -> Any:
    """An engine with its loading shown on standard error where that is a terminal."""
    engine_config(model, **options)  # a mistake shows before torch is imported
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(f"loading {model}") as status:
        from strata_lab.engine import LLMEngine

        return LLMEngine(model, on_progress=lambda task, done: status.update(f"{task} {done:.0%}"), **options)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"strata {__version__}")
        raise typer.Exit


# -- generate -------------------------------------------------------------------------------------------------------


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@app.command()
@with_flags(toggle_flags(), config_flags(skip=["seed"]), sampling_flags())
@plain_errors
def generate(
    prompt: Annotated[str | None, typer.Argument(help="What to continue; '-' or nothing reads standard input.")] = None,
    model: Model = DEFAULT_MODEL,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Continue a prompt, streaming the text as it comes."""
    params = sampling_params(options)
    text = _prompt_text(prompt)
    with make_engine(model, **_engine_options(options)) as engine:
        if engine.tokenizer is None:
            raise ConfigError(f"{model} has no tokenizer, so it cannot read text; try {DEFAULT_MODEL}")
        wish = [{"role": "user", "content": text}] if chat else text
        result = answer(engine, wish, params, (lambda piece: None) if as_json else _write)
        toggled = engine.optimizations.as_dict()
    if as_json:
        facts = {
            "model": model,
            "text": result.text,
            "token_ids": result.token_ids,
            "finish_reason": result.finish_reason,
        }
        counts = {"prompt_tokens": result.prompt_tokens, "output_tokens": len(result.token_ids)}
        typer.echo(json.dumps(facts | counts | result.figures() | {"toggles": toggled}, ensure_ascii=False))
    else:
        _write("\n")
        typer.echo(result.summary(), err=True)
    if result.error is not None:
        fail(result.error, 1)
    if result.finish_reason == "abort":
        raise typer.Exit(INTERRUPTED)


def _prompt_text(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    if sys.stdin.isatty():
        raise RequestError("no prompt; give one as an argument, for example strata generate 'Hello', or pipe it in")
    return sys.stdin.read()


def _engine_options(options: dict[str, Any]) -> dict[str, Any]:
    sampling = {f.name for f in dataclasses.fields(SamplingParams)}
    return {name: value for name, value in given(options).items() if name not in sampling}


# -- chat -----------------------------------------------------------------------------------------------------------


@app.command()
@with_flags(toggle_flags(), config_flags(skip=["seed"]), sampling_flags())
@plain_errors
def chat(
    model: Model = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="Instructions that stand before the conversation.")] = None,
    **options: Any,
) -> None:
    """Talk with the model; /help lists what can be changed while it runs."""
    params = sampling_params(options)
    start = [] if system is None else [{"role": "system", "content": system}]
    with make_engine(model, **_engine_options(options)) as engine:
        if engine.tokenizer is None or engine.tokenizer.chat_template is None:
            raise ConfigError(f"{model} has no chat template; try strata generate, or {DEFAULT_MODEL}")
        typer.echo(f"{engine!r}; /help for commands", err=True)
        messages = list(start)
        for line in _lines():
            if not line.startswith("/"):
                _turn(engine, messages, line, params)
            elif line in ("/exit", "/quit"):
                break
            elif line == "/reset":
                messages = list(start)
            else:
                _chat_command(engine, line)


def _lines() -> Iterator[str]:
    """Non-empty lines from the keyboard or a pipe, until its end."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  (gives input() a history and line editing)
    while True:
        try:
            line = input("> ") if interactive else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            return
        if not interactive and not line:
            return
        if line.strip():
            yield line.strip()


def _turn(engine: Any, messages: list[dict[str, str]], text: str, params: SamplingParams) -> None:
    messages.append({"role": "user", "content": text})
    try:
        result = answer(engine, messages, params, _write)
    except RequestError as error:
        messages.pop()
        typer.echo(f"error: {error}; /reset forgets the conversation", err=True)
        return
    _write("\n")
    messages.append({"role": "assistant", "content": result.text})
    typer.echo(f"[{result.error or result.summary()}]", err=True)


def _chat_command(engine: Any, line: str) -> None:
    words = line.split()
    if words[0] == "/stats":
        typer.echo("\n".join(f"{name:24} {value}" for name, value in dataclasses.asdict(engine.stats()).items()))
    elif words[0] == "/set" and len(words) == 1:
        values = engine.optimizations.as_dict()
        typer.echo("\n".join(f"{t.name:24} {values[t.name]!s:8} {t.doc}" for t in toggles()))
    elif words[0] == "/set" and len(words) == 3:
        try:
            name = words[1].replace("-", "_")
            typer.echo(str(engine.apply(**{name: parse_toggle(name, words[2])})))
        except ConfigError as error:
            typer.echo(f"error: {error}")
    else:
        typer.echo(CHAT_HELP if words[0] == "/help" else f"unknown command {line!r}\n{CHAT_HELP}")


# -- climb and doctor -----------------------------------------------------------------------------------------------


@app.command()
@with_flags(toggle_flags(kinds=("int", "float")), config_flags())
@plain_errors
def climb(
    model: Model = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(help="Output tokens of a run.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(help="Prompt tokens of a run.")] = 128,
    streams: Annotated[int, typer.Option(help="Concurrent requests of the several-streams part.")] = 4,
    rounds: Annotated[int, typer.Option(help="Runs after each change; before it one more.")] = 2,
    workload: Annotated[
        str | None,
        typer.Option(help="Measure an article's workload instead: A, B or C. Lengths and streams are then its own."),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(help="Shorten that workload. Default: 1.0 on a GPU; on a CPU what it does in a few minutes."),
    ] = None,
    cold_starts: Annotated[
        int | None, typer.Option(min=0, help="New engines to measure after the climb. Default: 3 for B, else 0.")
    ] = None,
    html: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("climb.html"),
    results: Annotated[
        Path | None, typer.Option(help="Where the records go (.json). Default: beside the page.")
    ] = None,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Measure every optimization on this machine, one at a time, as a table and a page."""
    engine_config(model, **given(options))
    target = results or html.with_suffix(".json")
    if target.suffix != ".json":
        raise ConfigError(f"results={str(target)!r} must end in .json; try {target.with_suffix('.json')}")
    from strata_lab.bench import climb as climbing
    from strata_lab.bench import climb_report
    from strata_lab.bench.climb_records import Unfinished

    say = partial(typer.echo, err=True)
    kept = Unfinished(target, say)
    sizes = {"tokens": tokens, "prompt_tokens": prompt_tokens, "streams": streams, "rounds": rounds}
    chosen: dict[str, Any] = sizes | given({"workload": workload, "scale": scale, "cold": cold_starts})
    with bar() as progress:
        records = climbing.climb(model, progress=progress, stage_done=kept, say=say, **chosen, **given(options))
    publish(records, html, target, climb_report, as_json)
    kept.end()


@app.command()
@plain_errors
def doctor(
    model: Model = DEFAULT_MODEL,
    load: Annotated[
        bool, typer.Option("--load", help="Load the model too, and say what is really in force in the engine.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what is here, what is missing, what each toggle does on this machine, and how to mend what is wrong."""
    from strata_lab.telemetry.doctor import examine

    checks = examine(model)
    if load and all(c.verdict != "fail" for c in checks):
        from strata_lab.telemetry.doctor_engine import examine_engine

        with make_engine(model) as engine:
            checks += examine_engine(engine)
    ok = all(c.verdict != "fail" for c in checks)
    if as_json:
        typer.echo(json.dumps({"ok": ok, "checks": [dataclasses.asdict(c) for c in checks]}, ensure_ascii=False))
    else:
        print_checks(checks)
    raise typer.Exit(0 if ok else 1)


app.command()(serve)
app.command()(checkpoints.convert)
app.command()(checkpoints.validate)
app.command()(drafts.train_draft)
app.command()(gauges.roofline)
app.command()(gauges.memcheck)
app.add_typer(bench.commands, name="bench")


def main() -> None:
    """Entry point of the `strata` command."""
    app()

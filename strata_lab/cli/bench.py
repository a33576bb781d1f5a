"""`strata bench` and `strata bench compare`: parse, call, print (see `cli/__init__.py`)."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from strata_lab.cli.options import config_flags, given, parse_toggle, toggle_flags, with_flags
from strata_lab.cli.terminal import AsJson, bar, plain_errors, publish, show
from strata_lab.config import DEFAULT_MODEL, engine_config
from strata_lab.settings import ConfigError

CPU_SCALE = 0.125  # of the articles' workloads, where nothing else is asked for: minutes instead of an hour
commands = typer.Typer(help="Measure an engine or a server.", rich_markup_mode=None)


@commands.callback(invoke_without_command=True)
@with_flags(toggle_flags(), config_flags(skip=["seed"]))
@plain_errors
def bench(
    ctx: typer.Context,
    model: Annotated[str, typer.Option("--model", "-m", help="As in the other commands.")] = DEFAULT_MODEL,
    workload: Annotated[
        list[str] | None, typer.Option(help="An article's workload, A, B or C; repeatable. Default: all, or a sweep.")
    ] = None,
    scale: Annotated[
        float | None, typer.Option(help="Shorten the articles' workloads. Default: 1 on a GPU, 0.125 on a CPU.")
    ] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(help="Sweep: requests at a time; repeatable. Makes a sweep instead.")
    ] = None,
    rate: Annotated[
        list[float] | None, typer.Option(help="Sweep: requests per second at random moments (Poisson); repeatable.")
    ] = None,
    prompt_tokens: Annotated[list[int] | None, typer.Option(help="Sweep: prompt lengths; repeatable.")] = None,
    output_tokens: Annotated[list[int] | None, typer.Option(help="Sweep: output lengths; repeatable.")] = None,
    requests: Annotated[int | None, typer.Option(help="Sweep: requests of a cell.")] = None,
    text: Annotated[Path | None, typer.Option(help="UTF-8 text to cut prompts from. Default: strata's own.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Runs of a cell, after its warm-up.")] = 3,
    cold_starts: Annotated[int, typer.Option(min=0, help="Also measure this many new engines, first cell.")] = 0,
    versus: Annotated[
        list[str] | None,
        typer.Option(help="TOGGLE=VALUE that is held against the settings, A/B/A, first cell; repeatable."),
    ] = None,
    peer: Annotated[
        str | None, typer.Option(help="Measure this OpenAI-compatible server instead: http://127.0.0.1:8000/v1")
    ] = None,
    peer_model: Annotated[str | None, typer.Option(help="Its name for the model. Default: the first it lists.")] = None,
    peer_key: Annotated[Path | None, typer.Option(help="File that holds its API key.")] = None,
    html: Annotated[Path, typer.Option(help="Where the page goes; the records (.json) go beside it.")] = Path(
        "bench.html"
    ),
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Measure workloads with percentiles, sweeps, cold starts and A/B/A; real text, real token counts."""
    if ctx.invoked_subcommand is not None:
        return
    swept = (concurrency, rate, prompt_tokens, output_tokens, requests)
    if workload and any(swept):
        raise ConfigError("workload and a sweep's lengths are two ways to say the same; give one of them")
    if peer and (cold_starts or versus or given(options)):
        raise ConfigError("peer measures a server as it runs; --cold-starts, --versus and toggles are for an engine")
    change = dict(_change(word) for word in versus or ())
    engine_config(model, **given(options))
    from strata_lab.bench import serving, serving_report
    from strata_lab.bench.harness import Environment

    if any(swept):
        cells = serving.sweep(
            concurrency or ([] if rate else [1]), prompt_tokens or [128], output_tokens or [64], rate or [], requests
        )
    else:
        serving.article_cells(workload or ["A"])  # a mistake shows before anything is loaded
        cells = []
    with ExitStack() as stack, bar() as progress:
        made: Any
        if peer:
            made = _server(peer, peer_model, peer_key, text, runs, stack)
        else:
            made = _engine(model, text, runs, given(options), stack, progress)
        if not cells:
            small = made.device == "cpu"
            chosen = scale if scale is not None else CPU_SCALE if small else 1.0
            cells = serving.article_cells(workload or ["A", "B", "C"], chosen)
        environment = Environment.now(made.device or "cpu")
        records = serving.bench(made, cells, environment, progress)
        if change:
            progress(f"A/B/A: {cells[0].label}", 0.0)
            switch = _switch(made.target.engine, change)
            records += serving.versus(made, cells[0], environment, switch, rounds=max(1, runs - 1))
        if cold_starts:
            stack.close()  # the first engine makes room
            again = _again(model, text, given(options), progress)
            records.append(serving.cold_starts(again, cells[0], cold_starts, environment))
    publish(records, html, html.with_suffix(".json"), serving_report, as_json)


def _change(word: str) -> tuple[str, Any]:
    name, equals, value = word.partition("=")
    if not equals:
        raise ConfigError(f"versus={word!r} must be TOGGLE=VALUE; try cuda_graph=off")
    name = name.strip().replace("-", "_")
    return name, parse_toggle(name, value)


def _script() -> str:
    return shlex.join(["strata", *sys.argv[1:]]) if "bench" in sys.argv else "strata bench"


def _engine(
    model: str, text: Path | None, runs: int, options: Mapping[str, Any], stack: ExitStack, progress: Callable[..., Any]
) -> Any:
    from strata_lab.bench.serving import Bench, Prompts
    from strata_lab.bench.targets import EngineTarget
    from strata_lab.engine import LLMEngine

    engine = stack.enter_context(LLMEngine(model, on_progress=progress, **options))
    toggled = engine.optimizations.as_dict()
    conditions = {n: toggled[n] for n in ("weight_format", "kv_cache_dtype")} | {"model": model, "toggles": toggled}
    prompts = Prompts(text, engine.tokenizer, engine.model_config.vocab_size)
    device = "cuda" if engine.device.type == "cuda" else "cpu"
    return Bench(EngineTarget(engine), prompts, device, runs, engine.reset_prefix_cache, _script(), conditions)


def _server(url: str, name: str | None, key: Path | None, text: Path | None, runs: int, stack: ExitStack) -> Any:
    from strata_lab.bench.serving import Bench, Prompts
    from strata_lab.bench.targets import ServerTarget

    try:
        secret = None if key is None else key.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"peer-key={str(key)!r} cannot be read: {error}") from error
    target = ServerTarget(url, name, secret)
    stack.callback(target.close)
    conditions = {"model": target.model, "weight_format": None, "kv_cache_dtype": None, "toggles": None}
    return Bench(target, Prompts(text, None, None), _device_behind(url), runs, lambda: None, _script(), conditions)


def _device_behind(url: str) -> str | None:
    """The device of a server on this machine, so that its runs can be held against an engine's; None for another's."""
    if urlsplit(url).hostname not in ("localhost", "127.0.0.1", "::1"):
        return None
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _switch(engine: Any, change: Mapping[str, Any]) -> Callable[[str], Mapping[str, Any]]:
    """Puts the settings in force at the start ("a") or the changed ones ("b") in force; refusals end the bench."""
    before = {name: engine.optimizations.as_dict()[name] for name in change}

    def switch(side: str) -> Mapping[str, Any]:
        report = engine.apply(**(before if side == "a" else change))
        for name, result in report.results.items():
            if result.status == "refused":
                raise ConfigError(f"{name}={change[name]!r} was refused: {result.reason}")
        return dict(engine.optimizations.as_dict())

    return switch


def _again(model: str, text: Path | None, options: Mapping[str, Any], progress: Callable[..., Any]) -> Any:
    def make() -> tuple[Any, Callable[[], None]]:
        stack = ExitStack()
        return _engine(model, text, 1, options, stack, progress), stack.close

    return make


@commands.command()
@plain_errors
def compare(
    a: Annotated[Path, typer.Argument(help="Records of one bench (.json).")],
    b: Annotated[Path, typer.Argument(help="Records of another.")],
    despite: Annotated[
        list[str] | None, typer.Option(help="A condition that may differ after all, such as driver; repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ratios of two benches; refused, with the first difference named, where their conditions differ."""
    from strata_lab.bench import comparable
    from strata_lab.bench.serving_report import comparison_table

    pairs = comparable.compare(comparable.load(a), comparable.load(b), despite or ())
    if as_json:
        typer.echo(json.dumps(pairs, ensure_ascii=False))
    else:
        show(comparison_table(pairs))

"""`strata serve`: flags become settings, and the server runs until it is told to stop (see `server/run.py`)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from strata_lab.cli.options import config_flags, given, server_flags, toggle_flags, with_flags
from strata_lab.cli.routes import EXAMPLE, open_routes, parse_routes
from strata_lab.cli.terminal import plain_errors
from strata_lab.config import DEFAULT_MODEL, engine_config
from strata_lab.server.settings import ServerConfig
from strata_lab.settings import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@with_flags(server_flags(), toggle_flags(), config_flags())
@plain_errors
def serve(
    model: Annotated[
        str, typer.Option("--model", "-m", help="A known name, a preset, a .gguf file or a model folder.")
    ] = DEFAULT_MODEL,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file with one key per line: flags can be read by others on the machine.")
    ] = None,
    enable_chunked_prefill: Annotated[
        bool | None,
        typer.Option(
            "--enable-chunked-prefill/--no-enable-chunked-prefill",
            help="Always on: a long prompt is sliced to max-num-batched-tokens. See --pd-split for the other half.",
            show_default=False,
        ),
    ] = None,
    route: Annotated[
        list[str] | None,
        typer.Option(
            help="An engine of its own for requests that ask for it: NAME=SETTINGS, settings are a weight format or "
            "toggle=value, with commas between them. The first one is the default.",
            metavar="VALUE (repeatable)",
            show_default=False,
        ),
    ] = None,
    urgent_route: Annotated[
        str | None, typer.Option(help="The route of requests that name none and have at least --urgent-from.")
    ] = None,
    urgent_from: Annotated[int, typer.Option(help="Priority from which a request goes to --urgent-route.")] = 1,
    **options: Any,
) -> None:
    """Serve OpenAI's API, /generate and live settings over HTTP; Ctrl+C lets running requests finish."""
    if enable_chunked_prefill is False:
        raise ConfigError("prompts are always sliced to max_num_batched_tokens; for whole ones raise that number")
    mine = {f.name for f in dataclasses.fields(ServerConfig)}
    chosen: dict[str, Any] = given({k: v for k, v in options.items() if k in mine})
    if api_key_file is not None:
        chosen["api_key"] = (*chosen.get("api_key", ()), *_keys(api_key_file))
    settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in chosen.items()}
    config = ServerConfig(**settings)
    engine_options = given({k: v for k, v in options.items() if k not in mine})
    engine_config(model, **engine_options)  # a mistake shows before anything is imported
    if config.host not in LOOPBACK and not config.api_key:
        _say(f"warning: host={config.host} lets others in and there is no key; try --api-key-file FILE")
    routes = parse_routes(route or (), model, engine_options)
    if urgent_route is not None and urgent_route not in routes:
        raise ConfigError(
            f"urgent_route={urgent_route!r} must be one of {', '.join(routes) or 'the routes'}; {EXAMPLE}"
        )

    def load(progress: Any) -> Any:
        if routes:
            return open_routes(routes, urgent_route, urgent_from, progress)
        from strata_lab.engine import LLMEngine

        return LLMEngine(model, on_progress=progress, **engine_options)

    raise typer.Exit(_run(config, model, load))


def _run(config: ServerConfig, model: str, load: Any) -> int:
    try:
        from strata_lab.server.run import Server
    except ModuleNotFoundError as error:
        raise ConfigError(f"strata serve needs {error.name}; try pip install 'strata-lab[serve]'") from error

    server = Server(config, model, load, _say)
    server.run()
    return server.exit_code


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _keys(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(
            f"api_key_file={str(path)!r} cannot be read ({error.strerror}); it holds a key per line"
        ) from error
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"api_key_file={str(path)!r} holds no key; write one per line")
    return keys

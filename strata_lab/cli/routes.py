"""`strata serve --route`: several engines behind one server, told apart by what the route changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from strata_lab.cli.options import parse_toggle
from strata_lab.config import WEIGHT_FORMATS, engine_config, toggles
from strata_lab.settings import ConfigError

EXAMPLE = "try --route precise=bf16 --route fast=int4,max_num_seqs=8"
Routes = dict[str, tuple[str, dict[str, Any]]]  # name to model and options
Progress = Callable[[str, float], None]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def parse_routes(texts: Sequence[str], model: str, options: dict[str, Any]) -> Routes:
    """Name of each engine to its model and its options.

    Engines of one machine share its memory: where neither flags nor route say `gpu_memory_utilization`, each gets an
    equal part of the default.

    Args:
        texts: NAME=SETTINGS; settings are a weight format, or field=value, with commas between them. The fields are
            the toggles, and `model`.
        model, options: what holds where a route says nothing else.

    Raises:
        ConfigError: a text is none of that, a name comes twice, or no engine can have these settings.
    """
    shares = next(t.default for t in toggles() if t.name == "gpu_memory_utilization") / max(1, len(texts))
    found: Routes = {}
    for text in texts:
        name, _, settings = text.partition("=")
        if not NAME.fullmatch(name) or not settings:
            raise ConfigError(f"route={text!r} must be NAME=SETTINGS with a name of letters, digits, . _ -; {EXAMPLE}")
        if name in found:
            raise ConfigError(f"route={text!r}: {name!r} is taken; {EXAMPLE}")
        changes = dict(_setting(part.strip(), text) for part in settings.split(","))
        its_model = changes.pop("model", model)
        its_options = {"gpu_memory_utilization": shares} | options | changes
        engine_config(its_model, **its_options)
        found[name] = (its_model, its_options)
    return found


def _setting(part: str, text: str) -> tuple[str, Any]:
    field, given, value = part.partition("=")
    if not given:
        if field not in WEIGHT_FORMATS:
            raise ConfigError(f"route={text!r}: {field!r} must be a weight format or field=value; {EXAMPLE}")
        return "weight_format", field
    return (field, value) if field == "model" else (field.replace("-", "_"), parse_toggle(field, value))


def open_routes(
    routes: dict[str, tuple[str, dict[str, Any]]],
    urgent: str | None,
    urgent_from: int,
    progress: Callable[[str, float], None],
) -> Any:
    """A `Router` over an engine for each route; the first one is the default. All are closed if one cannot be made."""
    from strata_lab.engine import LLMEngine
    from strata_lab.router import Router

    made: dict[str, Any] = {}
    try:
        for name, (model, options) in routes.items():
            made[name] = LLMEngine(model, on_progress=partial(_named, progress, name), **options)
        return Router(made, urgent=urgent, urgent_from=urgent_from)
    except BaseException:
        for engine in made.values():
            engine.close()
        raise


def _named(progress: Progress, name: str, task: str, fraction: float) -> None:
    progress(f"{name}: {task}", fraction)

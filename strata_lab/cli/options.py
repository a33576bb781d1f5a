"""Command-line flags made from the fields they set, so that a setting is described once.

`Optimizations`, `EngineConfig` and `SamplingParams` say what their fields mean; here each field becomes a flag with
that text as its help. A flag that is not given is None and leaves the field's default alone. Commands are in
`cli/__init__.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

from strata_lab.config import ALIASES, BLOCK_SIZES, CAPTURES, DEVICES, DTYPES, EngineConfig, toggles
from strata_lab.sampling_params import RequestError, SamplingParams
from strata_lab.server.settings import ServerConfig
from strata_lab.settings import Toggle, attribute_docs, check_names
from strata_lab.speculative.train.settings import Recipe

CHOICES = {"device": DEVICES, "dtype": DTYPES, "block_size": BLOCK_SIZES, "capture": CAPTURES}
# Sampling fields that make no sense as flags: a mapping, and what a stream of text cannot show.
NO_FLAG = ("logit_bias", "logprobs")
ON, OFF = ("on", "true", "yes", "1"), ("off", "false", "no", "0")
Command = TypeVar("Command", bound=Callable[..., Any])


def toggle_flags(kinds: Iterable[str] = ("bool", "choice", "int", "float")) -> list[inspect.Parameter]:
    """A flag per toggle of the given kinds."""
    types_of = {"bool": bool, "int": int, "float": float, "choice": str}
    return [_flag(t.name, types_of[t.kind], t.doc, t.default, t.choices) for t in toggles() if t.kind in kinds]


def config_flags(skip: Iterable[str] = ()) -> list[inspect.Parameter]:
    """A flag per field of `EngineConfig` but the model, the toggles and `skip`."""
    left_out = {"model", "optimizations", *skip}
    return _field_flags(EngineConfig, left_out)


def sampling_flags() -> list[inspect.Parameter]:
    """A flag per field of `SamplingParams` that a person would set by hand."""
    return _field_flags(SamplingParams, set(NO_FLAG))


def server_flags() -> list[inspect.Parameter]:
    """A flag per field of `ServerConfig`."""
    return _field_flags(ServerConfig, set())


def recipe_flags() -> list[inspect.Parameter]:
    """A flag per field of the recipe that a draft is trained by."""
    return _field_flags(Recipe, set())


def _field_flags(cls: type, left_out: set[str]) -> list[inspect.Parameter]:
    docs, hints = attribute_docs(cls), typing.get_type_hints(cls)
    fields = [f for f in dataclasses.fields(cls) if f.name not in left_out]
    return [
        _flag(f.name, _plain_type(hints[f.name]), docs.get(f.name, ""), f.default, CHOICES.get(f.name, ()))
        for f in fields
    ]


def _plain_type(hint: Any) -> Any:
    """The type a flag parses: `int | None` is int, `tuple[str, ...]` a repeatable str, a record its JSON."""
    hint = _without_none(hint)
    if dataclasses.is_dataclass(hint):
        return str
    return list[typing.get_args(hint)[0]] if typing.get_origin(hint) is tuple else hint  # type: ignore[misc]


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(a for a in typing.get_args(hint) if a is not type(None))
    return hint


def _flag(name: str, kind: Any, doc: str, default: Any, choices: Iterable[Any]) -> inspect.Parameter:
    import typer

    dashed = name.replace("_", "-")
    text = doc[:1].upper() + doc[1:]
    if default not in (None, (), ""):
        shown = {True: "on", False: "off"}.get(default, default) if isinstance(default, bool) else default
        text = f"{text.rstrip('.')}. Default: {shown}."
    listed = [str(c) for c in choices]
    names = [dashed, *(alias.replace("_", "-") for alias, field in ALIASES.items() if field == name)]
    option = typer.Option(
        *(f"--{n}/--no-{n}" if kind is bool else f"--{n}" for n in names),
        help=text,
        metavar="|".join(listed) or ("VALUE (repeatable)" if typing.get_origin(kind) is list else None),
        autocompletion=(lambda: listed) if listed else None,
        show_default=False,
    )
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def with_flags(*groups: list[inspect.Parameter]) -> Callable[[Command], Command]:
    """Decorator: the command's `**options` become these flags."""

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters.values()
        shown = [p for p in own if p.kind is not inspect.Parameter.VAR_KEYWORD] + [p for g in groups for p in g]
        command.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in shown}
        return command

    return decorate


def given(options: Mapping[str, Any], cls: type | None = None) -> dict[str, Any]:
    """The flags that were given; only those of `cls`'s fields if it is named."""
    names = None if cls is None else {f.name for f in dataclasses.fields(cls)}
    return {k: v for k, v in options.items() if v not in (None, []) and (names is None or k in names)}


def sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """Of the flags that were given. Raises `RequestError`."""
    found, hints = given(options, SamplingParams), typing.get_type_hints(SamplingParams)
    for name in found:
        if dataclasses.is_dataclass(_without_none(hints[name])):
            found[name] = _record(name, found[name])
    return SamplingParams(**found)


def _record(name: str, text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, Mapping):
        raise RequestError(f'{name}={text!r} must be a JSON object; try \'{{"choice": ["yes", "no"]}}\'')
    return value


def parse_toggle(name: str, text: str) -> Any:
    """The value that `text` means for a toggle; `ConfigError` for an unknown name or a value it does not take."""
    toggle = _known_toggle(name)
    word = text.strip().lower()
    if toggle.optional and word in ("none", "auto"):
        return None
    if toggle.kind == "bool" and word in (*ON, *OFF):
        return word in ON
    try:
        value: Any = {"int": int, "float": float}.get(toggle.kind, str)(word)
    except ValueError:
        value = word  # not a number: the check below says what would be
    return toggle.check(value)


def _known_toggle(name: str) -> Toggle:
    known = {t.name: t for t in toggles()}
    normal = name.strip().replace("-", "_")
    check_names({normal: None}, list(known), "toggle")
    return known[normal]

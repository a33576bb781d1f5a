"""Several engines behind one door: requests go to the number format that suits them.

One engine may run a model in bf16 for answers that must be right, another one the same model in int4 for answers that
must be quick. Who a request goes to is decided once, when it arrives, by the first of these that says something:

    precision   the caller names an engine (a server takes it from a header)
    model       the caller names a model that is an alias of an engine
    priority    at least `urgent_from` goes to the `urgent` engine
    otherwise   the default engine

A request that names what does not exist is refused, never sent elsewhere. Every engine keeps its own queue, cache and
limits; two on one card share its memory by their `gpu_memory_utilization`. Nothing is moved between engines later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strata_lab.sampling_params import RequestError, SamplingParams
from strata_lab.settings import ConfigError, check_whole

URGENT_FROM = 1


@dataclass(frozen=True)
class Choice:
    """Where a request goes.

    Attributes:
        name: of the engine.
        engine: the engine.
        reason: "precision", "model", "priority" or "default": what decided it.
    """

    name: str
    engine: Any
    reason: str


class Router:
    """Chooses an engine per request.

    Args:
        engines: name to an open `LLMEngine`; the names are what callers say, for example "precise" and "fast".
        default: who takes requests that say nothing; the first engine by default.
        aliases: model name to engine name; an engine's own name is always an alias of it.
        urgent: who takes requests of high priority; None lets priority decide nothing.
        urgent_from: priority from which a request is urgent.

    Raises:
        ConfigError: no engine, or a name that is none of them.
    """

    def __init__(
        self, engines: Mapping[str, Any], *, default: str | None = None, aliases: Mapping[str, str] | None = None,
        urgent: str | None = None, urgent_from: int = URGENT_FROM,
    ) -> None:  # fmt: skip
        if not engines:
            raise ConfigError("engines={} must name at least one; try {'precise': LLMEngine(...)}")
        self.engines = dict(engines)
        self.default = next(iter(engines)) if default is None else default
        self.aliases = {name: name for name in engines} | dict(aliases or {})
        self.urgent, self.urgent_from = urgent, urgent_from
        check_whole("urgent_from", urgent_from, -(1 << 31), URGENT_FROM)
        for what, name in (("default", self.default), ("urgent", urgent), *((f"alias {a!r}", n) for a, n in
                           self.aliases.items())):  # fmt: skip
            if name is not None and name not in self.engines:
                raise ConfigError(f"{what}={name!r} must be one of {', '.join(self.engines)}; try {self.default!r}")

    def over(self, engines: Mapping[str, Any]) -> Router:
        """The same rules over other things of the same names."""
        return Router(
            engines, default=self.default, aliases=self.aliases, urgent=self.urgent, urgent_from=self.urgent_from
        )

    def choose(self, *, model: str | None = None, precision: str | None = None, priority: int = 0) -> Choice:
        """The engine of a request; `RequestError` for a name that does not exist."""
        if precision is not None:
            if precision not in self.engines:
                raise RequestError(f"precision={precision!r} must be one of {', '.join(self.engines)}")
            return Choice(precision, self.engines[precision], "precision")
        if model is not None:
            if model not in self.aliases:
                raise RequestError(f"model={model!r} is not served here; there are {', '.join(self.aliases)}")
            name = self.aliases[model]
            return Choice(name, self.engines[name], "model")
        if self.urgent is not None and priority >= self.urgent_from:
            return Choice(self.urgent, self.engines[self.urgent], "priority")
        return Choice(self.default, self.engines[self.default], "default")

    def add_request(
        self, prompt: Any, params: SamplingParams | None = None, *, model: str | None = None,
        precision: str | None = None, priority: int = 0, request_id: str | None = None,
    ) -> str:  # fmt: skip
        """`LLMEngine.add_request` of the engine that is chosen."""
        chosen = self.choose(model=model, precision=precision, priority=priority)
        return str(chosen.engine.add_request(prompt, params, request_id=request_id, priority=priority))

    def generate(
        self, prompts: Any, params: SamplingParams | Sequence[SamplingParams] | None = None, *,
        model: str | None = None, precision: str | None = None, priority: int = 0, progress: bool = False,
    ) -> Any:  # fmt: skip
        """`LLMEngine.generate` of the engine that is chosen; all prompts go to one."""
        chosen = self.choose(model=model, precision=precision, priority=priority)
        return chosen.engine.generate(prompts, params, priority=priority, progress=progress)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, *,
        model: str | None = None, precision: str | None = None, priority: int = 0,
    ) -> Any:  # fmt: skip
        """`LLMEngine.chat` of the engine that is chosen."""
        chosen = self.choose(model=model, precision=precision, priority=priority)
        return chosen.engine.chat(messages, params, priority=priority)

    def stream(
        self, prompt: Any, params: SamplingParams | None = None, *, model: str | None = None,
        precision: str | None = None, priority: int = 0, request_id: str | None = None,
    ) -> Any:  # fmt: skip
        """`LLMEngine.stream` of the engine that is chosen; `async for` reads it too."""
        chosen = self.choose(model=model, precision=precision, priority=priority)
        return chosen.engine.stream(prompt, params, priority=priority, request_id=request_id)

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is; False if no engine knows it."""
        return any(engine.abort(request_id) for engine in self.engines.values())

    def models(self) -> dict[str, str]:
        """Every name that may be asked for, with the number format behind it."""
        formats = {name: engine.optimizations.as_dict()["weight_format"] for name, engine in self.engines.items()}
        return {alias: formats[name] for alias, name in self.aliases.items()}

    def close(self) -> None:
        """Close every engine. Safe to repeat."""
        for engine in self.engines.values():
            engine.close()

    def __enter__(self) -> Router:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Router({', '.join(f'{name}: {engine!r}' for name, engine in self.engines.items())})"

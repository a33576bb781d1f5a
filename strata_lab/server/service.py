"""The server's state, and who answers a request: one engine, or the one that `router.Router` chooses of several.

What one engine does is in `backend.py`. Nothing here knows HTTP beyond its statuses.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from typing import Any, Literal

from strata_lab.router import Router
from strata_lab.sampling_params import RequestError
from strata_lab.server.backend import Backend
from strata_lab.server.errors import ApiError, bad
from strata_lab.server.settings import ServerConfig

State = Literal["loading", "ready", "draining", "failed"]
LOADING_RETRY_S = 5
PRECISION, PRIORITY = "X-Strata-Precision", "X-Strata-Priority"


class Service:
    """One engine, or several behind a `Router`, as a server.

    Args:
        config: how to serve.
        model: as it was asked for; its name unless `served_model_name` says otherwise.

    Attributes:
        names: of the model. Who asks for one of them leaves the choice among several engines to the server.
        state: "loading" until `ready`; "draining" from `drain` on; "failed" if the model could not be loaded.
        progress: what is being loaded and the fraction done.
        failure: why it is "failed".
    """

    def __init__(self, config: ServerConfig, model: str) -> None:
        self.config = config
        self.names = config.served_model_name or (model,)
        self.state: State = "loading"
        self.progress: tuple[str, float] = ("starting", 0.0)
        self.failure = ""
        self.created = int(time.time())
        self._made: Any = None
        self._router: Router | None = None

    # -- state --------------------------------------------------------------------------------------------------

    def ready(self, made: Any) -> None:
        """The engine, or the `Router` of several, is there; called in the event loop."""
        self._made = made
        router = made if isinstance(made, Router) else Router({self.names[0]: made})
        self._router = router.over(
            {name: Backend(name, engine, self.config, self.unavailable) for name, engine in router.engines.items()}
        )
        if self.state == "loading":
            self.state = "ready"

    def fail(self, reason: str) -> None:
        """The model could not be loaded."""
        self.state, self.failure = "failed", reason

    @property
    def backends(self) -> list[Backend]:
        """One per engine; none before they are loaded."""
        return [] if self._router is None else list(self._router.engines.values())

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return sum(backend.bridge.num_live for backend in self.backends)

    async def drain(self) -> int:
        """Take no more requests and wait for those that run, up to the limit; how many had to be ended."""
        self.state = "draining"
        idle = asyncio.gather(*(backend.bridge.idle() for backend in self.backends))
        try:
            await asyncio.wait_for(idle, self.config.drain_timeout_s)
        except TimeoutError:
            return sum(backend.bridge.abort_all() for backend in self.backends)
        return 0

    def unavailable(self) -> ApiError:
        """Why nothing is served now."""
        texts = {
            "loading": f"the model is loading ({self.progress[0]}, {self.progress[1]:.0%}); try again later",
            "failed": f"the model could not be loaded: {self.failure}",
        }
        text = texts.get(self.state, "the server is stopping; send the request to another one, or again later")
        return ApiError(503, text, code=self.state, retry_after_s=LOADING_RETRY_S)

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether it serves, and facts; never waits for an engine."""
        facts: dict[str, Any] = {"status": self.state, "model": self.names[0]}
        if self.state == "loading":
            facts |= {"task": self.progress[0], "fraction": self.progress[1]}
        if self.failure:
            facts["reason"] = self.failure
        facts["live_requests"] = self.num_live
        if len(self.backends) > 1:
            facts["live_requests_by_engine"] = {b.name: b.bridge.num_live for b in self.backends}
        alive = bool(self.backends) and all(backend.alive for backend in self.backends)
        if self.state == "ready" and not alive:
            facts |= {"status": "failed", "reason": "an engine's thread has ended; restart the server"}
        return self.state == "ready" and alive, facts

    # -- who answers --------------------------------------------------------------------------------------------

    def models(self) -> dict[str, Backend]:
        """Every name that may be asked for."""
        router = self._chooser()
        named = {alias: router.engines[name] for alias, name in router.aliases.items()}
        return dict.fromkeys(self.names, router.engines[router.default]) | named

    def choose(self, model: str | None = None, precision: str | None = None, priority: int = 0) -> Backend:
        """Who answers; `ApiError` for a name that does not exist."""
        router = self._chooser()
        if model is not None and model not in self.names and model not in router.aliases:
            listed = ", ".join(map(repr, self.models()))
            raise ApiError(
                404, f"model={model[:80]!r} is not served here; try {listed}", param="model", code="model_not_found"
            )
        try:
            chosen = router.choose(model=None if model in self.names else model, precision=precision, priority=priority)
        except RequestError as error:
            raise bad(str(error), PRECISION) from error
        backend: Backend = chosen.engine
        return backend

    def _chooser(self) -> Router:
        if self._router is None:
            raise self.unavailable()
        return self._router

    def close(self) -> None:
        """End the engines."""
        if self._made is not None:
            self._made.close()


def priority_of(headers: Mapping[str, str], field: int | None) -> int:
    """A request's priority, by its field or its header.

    Raises:
        ApiError: the header is no whole number, or says something else than the field.
    """
    text = headers.get(PRIORITY.lower())
    if text is None:
        return field or 0
    value = int(text) if re.fullmatch(r"-?[0-9]{1,10}", text) else 2**31
    if not -(2**31) <= value < 2**31:
        raise bad(f"{PRIORITY}={text[:40]!r} must be a whole number from -2**31 to 2**31 - 1; try 0", PRIORITY)
    if field is not None and field != value:
        raise bad(f"{PRIORITY}={value} and priority={field} are the same setting; give one", PRIORITY)
    return value

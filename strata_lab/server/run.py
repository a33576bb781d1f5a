"""Starts a server: listens at once, loads the model beside that, and stops without cutting anybody off.

SIGTERM or Ctrl+C: new requests get 503, running ones may finish for `drain_timeout_s`, then the engine is closed. A
second signal stops at once. The application itself is in `app.py`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from strata_lab.server.app import create_app
from strata_lab.server.service import Service
from strata_lab.server.settings import ServerConfig

KEEP_ALIVE_S = 30
CLOSING_S = 2  # for connections after the requests on them have ended
Load = Callable[[Callable[[str, float], None]], Any]
log = logging.getLogger("strata.server")


class Server(uvicorn.Server):
    """A server around one engine.

    Args:
        config: how to serve.
        model: the model's name as it was asked for.
        load: makes the engine; called in a thread with what takes (task, fraction).
        announce: told what happens, one sentence at a time.

    Attributes:
        service: its state.
        exit_code: for the process; 1 if the model could not be loaded.
    """

    def __init__(self, config: ServerConfig, model: str, load: Load, announce: Callable[[str], None]) -> None:
        self.service = Service(config, model)
        self.exit_code = 0
        self._load, self._announce = load, announce
        self._home: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        settings = uvicorn.Config(
            create_app(self.service),
            host=config.host,
            port=config.port,
            log_level="info" if config.access_log else "warning",
            access_log=config.access_log,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSING_S,
            lifespan="off",
        )
        super().__init__(settings)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.servers[0].sockets[0].getsockname()[1])

    def cpu_s(self) -> float:
        """Processor seconds that the event loop's thread has used; asked from another thread while it serves."""
        assert self._home is not None

        async def used() -> float:
            return time.thread_time()

        return asyncio.run_coroutine_threadsafe(used(), self._home).result()

    async def serve(self, sockets: Any = None) -> None:
        """Run until told to stop; the engine is closed in the end."""
        try:
            await super().serve(sockets)
        finally:
            self.service.close()

    async def startup(self, sockets: Any = None) -> None:
        """Listen, then begin to load."""
        await super().startup(sockets)
        self._home = asyncio.get_running_loop()
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        self._announce(f"listening on http://{host}:{self.port} (GET /health), loading {self.service.names[0]}")
        threading.Thread(target=self._make_engine, name="strata-load", daemon=True).start()

    def _make_engine(self) -> None:
        assert self._home is not None
        try:
            engine = self._load(self._show)
        except Exception as error:  # whatever it is, the one who started the server must see it
            if not isinstance(error, ValueError):
                log.exception("loading failed")
            self._tell_home(self._failed, str(error) or type(error).__name__)
            return
        if not self._tell_home(self._loaded, engine):
            engine.close()

    def _tell_home(self, what: Callable[[Any], None], value: Any) -> bool:
        """Call in the event loop; False if that is gone, because the server was stopped meanwhile."""
        assert self._home is not None
        try:
            self._home.call_soon_threadsafe(what, value)
        except RuntimeError:
            return False
        return True

    def _show(self, task: str, fraction: float) -> None:
        self.service.progress = (task, fraction)

    def _loaded(self, engine: Any) -> None:
        self.service.ready(engine)
        self._announce(f"ready: {engine!r}, OpenAI's API under /v1")

    def _failed(self, reason: str) -> None:
        self.service.fail(reason)
        self._announce(f"error: {reason}")
        self.exit_code, self.should_exit = 1, True

    # -- stopping -----------------------------------------------------------------------------------------------

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, stop at the second."""
        if self._home is None or self._draining is not None:
            self.should_exit = self.force_exit = True
        else:
            self._home.call_soon_threadsafe(self.begin_to_drain)

    def stop(self) -> None:
        """Drain and stop; from any thread."""
        if self._home is not None:
            self._tell_home(lambda _: self.begin_to_drain(), None)

    def begin_to_drain(self) -> None:
        """Take no more requests and stop when the last one has ended; call it in the event loop."""
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        live = self.service.num_live
        limit = self.service.config.drain_timeout_s
        self._announce(f"stopping: {live} requests may finish, for up to {limit:g} s; a second signal stops at once")
        cut = await self.service.drain()
        if cut:
            self._announce(f"{cut} requests were ended by drain_timeout_s={limit:g}")
        self.should_exit = True

"""A server beside the program that owns the engine: for notebooks and measurements.

The engine stays the caller's: it is not closed when the server stops. `strata serve` is `run.py` alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from strata_lab.router import Router
from strata_lab.server.run import Server
from strata_lab.server.settings import ServerConfig

START_LIMIT_S = 30.0
POLL_S = 0.01


class _Borrowed:
    """An engine whose `close` is somebody else's business."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def close(self) -> None:
        """Nothing: the owner closes it."""


@contextmanager
def served(engine: Any, config: ServerConfig | None = None) -> Iterator[Server]:
    """Serve an engine, or a `Router` of several, in a thread; leaving the block drains the server.

    Raises `RuntimeError` if it does not listen in time, for example because the port is taken.
    """
    router = engine if isinstance(engine, Router) else Router({"engine": engine})
    borrowed = router.over({name: _Borrowed(one) for name, one in router.engines.items()})
    lent = borrowed if router is engine else borrowed.engines["engine"]
    model = str(router.engines[router.default].config.model)
    server = Server(config or ServerConfig(port=0), model, lambda _: lent, lambda _: None)
    thread = threading.Thread(target=server.run, name="strata-server", daemon=True)
    thread.start()
    deadline = time.monotonic() + START_LIMIT_S
    while server.service.state == "loading":
        if time.monotonic() > deadline or not thread.is_alive():
            raise RuntimeError(f"the server does not listen on port {server.service.config.port}; try port=0")
        time.sleep(POLL_S)
    try:
        yield server
    finally:
        server.stop()
        thread.join()

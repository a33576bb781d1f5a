"""A server on a tiny random model, in a thread of the test's process: real sockets, a real engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from strata_lab.engine import LLMEngine
from strata_lab.server.run import Server
from strata_lab.server.settings import ServerConfig

TINY = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "cuda_graph": False}
WAIT_S = 30.0


class Served:
    """A running server.

    Attributes:
        url: where it listens.
        server, engine: the objects behind it.
        http: a client.
    """

    def __init__(self, server: Server, key: str = "") -> None:
        self.server = server
        self.said: list[str] = []
        wait_until(lambda: server.started)
        self.url = f"http://127.0.0.1:{server.port}"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_S, headers=headers)

    @property
    def engine(self) -> LLMEngine:
        return self.server.service.backends[0].engine

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def drain(self) -> None:
        self.server.stop()

    def blocks_used(self) -> int:
        return self.engine.stats().kv_blocks_used


def wait_until(condition: Callable[[], Any], limit_s: float = WAIT_S) -> None:
    """Poll a condition that another thread makes true; fail the test if it does not."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


@contextmanager
def serving(
    folder: Path, load: Callable[..., LLMEngine] | None = None, options: dict[str, Any] | None = None, **config: Any
) -> Iterator[Served]:
    """A server with its model loaded; drained in the end, and nothing of it is left."""
    make = load or (lambda progress: LLMEngine(folder, **(TINY | (options or {})), on_progress=progress))
    said: list[str] = []
    server = Server(ServerConfig(port=0, **config), "tiny", make, said.append)
    thread = threading.Thread(target=server.run, name="test-server")
    thread.start()
    served = Served(server, next(iter(server.service.config.api_key), ""))
    served.said = said
    try:
        if load is None:
            wait_until(lambda: server.service.state != "loading")
        yield served
    finally:
        served.http.close()
        served.drain()
        thread.join(WAIT_S)
        assert not thread.is_alive(), "the server did not stop"

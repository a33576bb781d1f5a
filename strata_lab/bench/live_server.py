"""`strata serve` as a process of its own, as operators run it: started, watched, signalled and killed.

For measurements and tests of what only a process has: signals, exit codes, memory, and a sudden end.
"""

from __future__ import annotations

import http.client
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "from strata_lab.cli import main; main()"  # what the installed `strata` does, by this interpreter
START_LIMIT_S = 60.0
STOP_LIMIT_S = 30.0


class LiveServer:
    """A running server.

    Attributes:
        process: of the server.
        port: where it listens on 127.0.0.1.
        said: lines it wrote so far.
    """

    def __init__(self, process: subprocess.Popen[str], loaded: bool = True) -> None:
        self.process, self.said = process, list[str]()
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="live-server", daemon=True).start()
        self.port = int(self.wait_for("listening on ").partition(" (GET")[0].rpartition(":")[2])
        if loaded:
            self.wait_for("ready: ")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line.rstrip())
            self._lines.put(line.rstrip())
        self._lines.put(None)

    def wait_for(self, beginning: str) -> str:
        """The next line that begins so; raises `RuntimeError` if the process ends or says nothing for too long."""
        try:
            while (line := self._lines.get(timeout=START_LIMIT_S)) is not None:
                if line.startswith(beginning):
                    return line
        except queue.Empty:
            pass
        raise RuntimeError(f"the server did not say {beginning!r}: {' | '.join(self.said[-5:])}")

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """One request on a connection of its own: status and answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=STOP_LIMIT_S)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def live_requests(self) -> int:
        """Requests that have not ended."""
        return int(json.loads(self.ask("GET", "/health")[1])["live_requests"])

    def metric(self, name: str, model: str = "") -> float:
        """Sum of a metric's samples, of the engine that a model's name stands for."""
        lines = self.ask("GET", f"/metrics?model={model}" if model else "/metrics")[1].decode().splitlines()
        found = [float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].partition(" ")[0] == name]
        if not found:
            raise KeyError(f"/metrics has no {name!r}")
        return sum(found)

    def wait_idle(self) -> None:
        """Wait until no request is live; raises `TimeoutError` if one stays."""
        deadline = time.monotonic() + STOP_LIMIT_S
        while self.live_requests():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.live_requests()} requests are still live after {STOP_LIMIT_S:g} s")
            time.sleep(0.01)

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_LIMIT_S)


@contextmanager
def live_server(model: Path | str, flags: Sequence[str] = (), *, loaded: bool = True) -> Iterator[LiveServer]:
    """Start a server and wait until it serves, or only listens; it is killed in the end if it still runs.

    Args:
        model, flags: of `strata serve`.
        loaded: wait for the model too.
    """
    command = [sys.executable, "-c", COMMAND, "serve", "--model", str(model), "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=ROOT) as process:
        try:
            yield LiveServer(process, loaded)
        finally:
            if process.poll() is None:
                process.kill()

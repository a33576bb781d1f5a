"""A client that costs almost nothing: many streams over plain sockets, in a process of its own.

`python -m strata_lab.bench.http_client` reads plans as JSON from its input, line by line, and answers each with what
it measured. It knows HTTP only as far as this server speaks it. While streams run it does nothing but keep what comes;
pieces and tokens (from the stream's usage) are counted afterwards, so that what it takes from the processors is not
mistaken for the server's, and that little is told too (`cpu_s`).
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import threading
import time
from typing import Any

HEALTH_PAUSE_S = 0.02
LIMIT_S = 120.0  # a server that says nothing for so long has failed
PIECE = b"data: {"


class Stream:
    """One streamed request that is on its way.

    Attributes:
        socket: where it comes from.
        sent_s, first_s, end_s: when it was sent, first answered with a piece, and over (seconds).
    """

    def __init__(self, host: str, port: int, path: str, body: dict[str, Any]) -> None:
        self.socket = socket.create_connection((host, port), timeout=LIMIT_S)
        self.sent_s, self.first_s, self.end_s = 0.0, 0.0, 0.0
        self._chunks: list[bytes] = []
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close"
        self._request = f"{head}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data

    def send(self) -> None:
        """Send the request; from now on its time runs."""
        self.sent_s = time.perf_counter()
        self.socket.sendall(self._request)
        self.socket.setblocking(False)

    def take(self) -> bool:
        """Keep what has come; False at the end, which the server makes by closing the connection."""
        chunk = self.socket.recv(65536)
        if not self.first_s and PIECE in chunk:
            self.first_s = time.perf_counter()
        if chunk:
            self._chunks.append(chunk)
            return True
        self.end_s = time.perf_counter()
        return False

    def counts(self) -> tuple[int, int]:
        """Tokens by the stream's usage, 0 if it was not answered whole; and pieces."""
        whole = b"".join(self._chunks)
        good = whole.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in whole[-64:]
        tokens = whole.rpartition(b'"completion_tokens":')[2].partition(b",")[0] if good else b""
        return int(tokens or 0), whole.count(PIECE)


class Health(threading.Thread):
    """Asks for /health again and again, each time on a new connection.

    Attributes:
        done: set it to end this.
        waits_ms: how long each answer took.
        num_failed: answers other than 200.
    """

    def __init__(self, host: str, port: int) -> None:
        super().__init__(name="health", daemon=True)
        self.done, self.waits_ms, self.num_failed = threading.Event(), list[float](), 0
        self._address = (host, port)

    def run(self) -> None:
        """See `Thread`."""
        while not self.done.is_set():
            started = time.perf_counter()
            with socket.create_connection(self._address, timeout=LIMIT_S) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: health\r\nConnection: close\r\n\r\n")
                answer = b""
                while chunk := connection.recv(4096):
                    answer += chunk
            self.waits_ms.append((time.perf_counter() - started) * 1e3)
            self.num_failed += not answer.startswith(b"HTTP/1.1 200")
            self.done.wait(HEALTH_PAUSE_S)


def read_all(streams: list[Stream]) -> None:
    """Send every request and take what comes until all have ended; `TimeoutError` if nothing comes any more."""
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            stream.send()
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        while selector.get_map():
            if not (ready := selector.select(LIMIT_S)):
                raise TimeoutError(f"no stream brought anything for {LIMIT_S:g} s")
            for key, _ in ready:
                if not key.data.take():
                    selector.unregister(key.data.socket)
                    key.data.socket.close()


def perform(plan: dict[str, Any]) -> dict[str, Any]:
    """Send all bodies of a plan at once; the time is from the first sent to the last ended."""
    streams = [Stream(plan["host"], plan["port"], plan["path"], body) for body in plan["bodies"]]
    health = Health(plan["host"], plan["port"])
    if plan["health"]:
        health.start()
    used_s = time.process_time()
    try:
        read_all(streams)
    finally:
        used_s = time.process_time() - used_s
        health.done.set()
        if plan["health"]:
            health.join()
    counts = [stream.counts() for stream in streams]
    return {
        "seconds": max(s.end_s for s in streams) - min(s.sent_s for s in streams),
        "cpu_s": used_s,
        "tokens": [tokens for tokens, _ in counts],
        "pieces": sum(pieces for _, pieces in counts),
        "ttft_ms": [(s.first_s - s.sent_s) * 1e3 for s in streams],
        "health_ms": health.waits_ms,
        "health_failed": health.num_failed,
    }


def main() -> int:
    """Plans in, measurements out."""
    for line in sys.stdin:
        sys.stdout.write(json.dumps(perform(json.loads(line))) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""A client that costs almost nothing: many streams over plain sockets, in a process of its own.

`python -m strata_lab.bench.http_client` reads plans as JSON from its input, line by line, and answers each with what
it measured. It knows HTTP only as far as this server speaks it, takes the number of tokens from the stream's usage and
never parses pieces, so that what it takes from the processors is not mistaken for the server's.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

FINISHED = b"data: [DONE]"
HEALTH_PAUSE_S = 0.02


async def stream(host: str, port: int, body: dict[str, Any]) -> dict[str, Any]:
    """One streamed request: tokens, pieces, and when it was sent, first answered and over (seconds)."""
    reader, writer = await asyncio.open_connection(host, port)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    sent_s = time.perf_counter()
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    status = await reader.readline()
    while (await reader.readline()).strip():
        pass
    first_s, pieces, tail = 0.0, 0, b""
    while chunk := await reader.read(65536):
        if not first_s and b"data: " in chunk:
            first_s = time.perf_counter()
        pieces += chunk.count(b"data: {")
        tail = (tail + chunk)[-2048:]
        if FINISHED in tail:
            break
    end_s = time.perf_counter()
    writer.close()
    tokens = int(tail.rpartition(b'"completion_tokens":')[2].partition(b",")[0] or 0) if b"200" in status else 0
    return {"tokens": tokens, "pieces": pieces, "sent_s": sent_s, "first_s": first_s, "end_s": end_s}


async def health(host: str, port: int, waits_ms: list[float]) -> None:
    """Ask for /health again and again, each time on a new connection, until cancelled."""
    while True:
        started = time.perf_counter()
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
        waits_ms.append((time.perf_counter() - started) * 1e3)
        assert b" 200 " in answer.partition(b"\r\n")[0], answer[:200]
        writer.close()
        await asyncio.sleep(HEALTH_PAUSE_S)


async def perform(plan: dict[str, Any]) -> dict[str, Any]:
    """Send all bodies of a plan at once; the time is from the first sent to the last ended."""
    waits_ms: list[float] = []
    watcher = asyncio.ensure_future(health(plan["host"], plan["port"], waits_ms)) if plan["health"] else None
    done = await asyncio.gather(*(stream(plan["host"], plan["port"], body) for body in plan["bodies"]))
    if watcher is not None:
        watcher.cancel()
    seconds = max(d["end_s"] for d in done) - min(d["sent_s"] for d in done)
    return {
        "seconds": seconds,
        "tokens": [d["tokens"] for d in done],
        "pieces": sum(d["pieces"] for d in done),
        "ttft_ms": [(d["first_s"] - d["sent_s"]) * 1e3 for d in done],
        "health_ms": waits_ms,
    }


def main() -> int:
    """Plans in, measurements out."""
    for line in sys.stdin:
        sys.stdout.write(json.dumps(asyncio.run(perform(json.loads(line)))) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""A live server against thousands of valid, wrong, broken and hostile requests, with callers who leave at any moment.

`python -m strata_lab.bench.hostile` starts `strata serve` with a random model in a process of its own. It counts what
must not happen: a crash, an answer that is not the one computed before, a status that is not the right one, a request
or a block that stays. The requests are a seed's, so that a failure can be looked at again; when each is served is not.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from strata_lab.bench.harness import Environment, write_results
from strata_lab.bench.hostile_requests import (
    GREEDY,
    KINDS,
    ROUTES,
    URGENT,
    URGENT_FROM,
    Ask,
    Die,
    Known,
    prompts,
    rows_field,
)
from strata_lab.bench.live_server import LiveServer, live_server
from strata_lab.bench.tiny_model import CONTEXT, write_tiny_model

SCRIPT = "python -m strata_lab.bench.hostile"
FLAGS = ("--device", "cpu", "--dtype", "float32", "--max-num-seqs", "16", "--max-model-len", str(CONTEXT))
ROUTE_FLAGS = (
    *(part for name, weight_format in ROUTES.items() for part in ("--route", f"{name}={weight_format}")),
    *("--urgent-route", URGENT, "--urgent-from", str(URGENT_FROM)),
)
PROMPTS, CONCURRENCY, ANSWER_LIMIT_S = 40, 24, 60.0
MAX_KEPT_FAILURES = 20


@dataclass
class Findings:
    """What happened.

    Attributes:
        counts, marks: requests by kind; valid ones by what else they are.
        failures: sentences about the first that went wrong.
        num_wrong_texts, num_wrong_statuses: requests whose answer was not the right one.
        seconds: of all requests.
        leaked_blocks, exit_code: after the last.
        rss_mib: memory of the server after its first tenth of the requests, and after all.
    """

    counts: Counter[str] = field(default_factory=Counter)
    marks: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    num_wrong_texts: int = 0
    num_wrong_statuses: int = 0
    seconds: float = 0.0
    leaked_blocks: float = 0.0
    exit_code: int = 0
    rss_mib: list[float] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Nothing of what must not happen."""
        return not (self.num_wrong_texts or self.num_wrong_statuses or self.leaked_blocks or self.exit_code)

    def book(self, ask: Ask, status: int, text: str | None) -> None:
        """Count an answer."""
        self.counts[ask.kind] += 1
        self.marks.update(ask.marks)
        if ask.leave_s is not None:
            return
        if status not in ask.statuses:
            self.num_wrong_statuses += 1
            self._keep(f"status {status} for {ask.data[:300]!r}: {(text or '')[:200]}")
        elif ask.expected is not None and text != ask.expected:
            self.num_wrong_texts += 1
            self._keep(f"{text!r} in place of {ask.expected!r} for {ask.data[:300]!r}")

    def _keep(self, sentence: str) -> None:
        if len(self.failures) < MAX_KEPT_FAILURES:
            self.failures.append(sentence)


def answers(folder: Path, count: int, seed: int) -> list[Known]:
    """What each engine alone says, one request at a time: to each prompt, to a chat of it, and to rows made of it."""
    from strata_lab.engine import LLMEngine

    asked: list[tuple[tuple[str, ...], dict[str, Any]]] = []
    texts: dict[str, list[str]] = {}
    for name, weight_format in ROUTES.items():
        options: dict[str, Any] = {"dtype": "float32", "max_model_len": CONTEXT, "weight_format": weight_format}
        with LLMEngine(folder, device="cpu", **options) as engine:
            asked = asked or _asked(engine, count, seed)
            texts[name] = [_said(engine, body) for _, body in asked]
    return [Known(paths, body, {name: texts[name][i] for name in ROUTES}) for i, (paths, body) in enumerate(asked)]


def _asked(engine: Any, count: int, seed: int) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    made: list[tuple[tuple[str, ...], dict[str, Any]]] = []
    for prompt, tokens in prompts(count, seed):
        embedded = engine.embed(engine.tokenizer.encode(prompt)).numpy()
        rows = (embedded + embedded[::-1]) / 2  # which no text has
        made += [
            (("/v1/completions", "/generate"), {"prompt": prompt, "max_tokens": tokens}),
            (("/v1/chat/completions",), {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens}),
            (("/v1/completions",), {"prompt_embeds": rows_field(rows), "max_tokens": tokens}),
        ]
    return made


def _said(engine: Any, body: dict[str, Any]) -> str:
    from strata_lab.sampling_params import SamplingParams

    params = SamplingParams(**GREEDY, max_tokens=body["max_tokens"])  # type: ignore[arg-type]
    field = body.get("prompt_embeds")
    rows = None if field is None else np.load(io.BytesIO(base64.b64decode(field)))
    pieces = engine.stream(body.get("prompt") or body.get("messages"), params, prompt_embeds=rows)
    return "".join(piece.text for piece in pieces)


async def send(port: int, ask: Ask) -> tuple[int, str | None]:
    """Status and text of the answer; status 0 if there was none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(ask.data)
        if ask.leave_s is not None:
            await asyncio.sleep(ask.leave_s)
            return 0, None
        got = await asyncio.wait_for(_read(reader), ANSWER_LIMIT_S)
    finally:
        writer.transport.abort()
    return _parsed(got)


async def _read(reader: asyncio.StreamReader) -> bytes:
    pieces = []
    try:
        while piece := await reader.read(65536):
            pieces.append(piece)
    except ConnectionError:  # the server closed it with something of ours unread; what it said came before
        pass
    return b"".join(pieces)


def _parsed(got: bytes) -> tuple[int, str | None]:
    head, _, body = got.partition(b"\r\n\r\n")
    if not head:
        return 0, None
    status = int(head.split(b" ", 2)[1])
    if status != 200:
        return status, body.decode("utf-8", "replace")
    if b"text/event-stream" in head:
        lines = [line[6:] for line in body.splitlines() if line.startswith(b"data: {")]
        return status, "".join(_text(json.loads(line)) for line in lines)
    return status, _text(json.loads(body))


def _text(document: dict[str, Any]) -> str:
    """Text of a document or of a piece, of any endpoint."""
    if "outputs" in document:  # a whole answer of /generate, or the totals that end its stream
        return "".join(document.get("text", ()))
    if "choices" not in document:
        return str(document.get("text", ""))
    return "".join(
        choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""
        for choice in document["choices"]
    )


async def storm(port: int, die: Die, count: int, findings: Findings) -> None:
    """Send `count` requests, `CONCURRENCY` at a time."""

    async def caller() -> None:
        nonlocal count
        while count > 0:
            count -= 1
            ask = die.draw()
            try:
                findings.book(ask, *await send(port, ask))
            except (OSError, TimeoutError, ValueError, KeyError) as error:
                findings.book(ask, -1, f"{type(error).__name__}: {error}")

    await asyncio.gather(*(caller() for _ in range(CONCURRENCY)))


def attack(count: int, seed: int) -> Findings:
    """All of it against a new server."""
    findings = Findings()
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "tiny")
        die = Die(seed, answers(model, PROMPTS, seed))
        with live_server(model, (*FLAGS, *ROUTE_FLAGS)) as server:
            started = time.perf_counter()
            asyncio.run(storm(server.port, die, count // 10, findings))
            findings.rss_mib.append(rss_mib(server))
            asyncio.run(storm(server.port, die, count - count // 10, findings))
            findings.seconds = time.perf_counter() - started
            _look_after(server, die, findings)
    return findings


def _look_after(server: LiveServer, die: Die, findings: Findings) -> None:
    """What stays: requests, blocks, memory; and whether it still answers and stops as it should."""
    server.wait_idle()
    findings.leaked_blocks = max(server.metric("vllm:kv_cache_usage_perc", name) for name in ROUTES)
    findings.rss_mib.append(rss_mib(server))
    for _ in range(PROMPTS):
        ask = die.valid()
        findings.book(ask, *asyncio.run(send(server.port, ask)))
    findings.exit_code = server.stop()


def rss_mib(server: LiveServer) -> float:
    """Resident memory of the server's process."""
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 1 if anything happened that must not."""
    parser = argparse.ArgumentParser(prog=SCRIPT, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="of the requests")
    parser.add_argument("--results", help="folder of the results file (default: docs/results)")
    options = parser.parse_args(arguments)
    environment = Environment.now("cpu")
    findings = attack(options.requests, options.seed)
    metrics: dict[str, float] = {f"num_{kind}": findings.counts[kind] for kind in KINDS}
    metrics |= {f"num_valid_{mark}": findings.marks[mark] for mark in (*ROUTES, "embeds")} | {
        "num_wrong_texts": findings.num_wrong_texts, "num_wrong_statuses": findings.num_wrong_statuses,
        "leaked_share_of_blocks": findings.leaked_blocks, "exit_code": findings.exit_code, "seconds": findings.seconds,
        "requests_s": sum(findings.counts.values()) / findings.seconds, "rss_mib_early": findings.rss_mib[0],
        "rss_mib_late": findings.rss_mib[-1],
    }  # fmt: skip
    record = environment.record(
        f"hostile/{options.requests}_requests",
        script=f"{SCRIPT} --requests {options.requests} --seed {options.seed}",
        conditions={
            "model": "a random Llama of 2 layers, float32",
            "batch": CONCURRENCY,
            "flags": " ".join((*FLAGS, *ROUTE_FLAGS)),
        },
        metrics=metrics,
        note="greedy answers are compared with those of the engine that was asked for, one request at a time; "
        "exit_code is that of the server after SIGTERM; client and server on the same cores",
    )
    sys.stdout.write("".join(f"{name:24} {value:.6g}\n" for name, value in metrics.items()))
    sys.stdout.write("".join(f"{sentence}\n" for sentence in findings.failures))
    write_results("hostile", [record], options.results)
    return 0 if findings.good else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Laws of a server's life: who gets in, who is told to wait, who is cut off, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from strata_lab.engine import LLMEngine
from strata_lab.server.settings import ServerConfig
from strata_lab.settings import ConfigError
from tests.server.serving import Served, serving, wait_until

LONG = {"prompt": "hello", "max_tokens": 120, "temperature": 0, "ignore_eos": True}
JSON = "Content-Type: application/json"
SMALL = 4096  # bytes of a socket's buffer: the sender soon has to wait


def raw(served: Served, path: str, body: dict[str, Any]) -> socket.socket:
    """A request on a bare socket, sent and not read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
    connection.connect(("127.0.0.1", served.server.port))
    data = json.dumps(body).encode()
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: x\r\n{JSON}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
    )
    return connection


class Paused:
    """Holds an engine in the middle of its next step; requests come and go, but no token does."""

    def __init__(self, engine: LLMEngine) -> None:
        self._runner, self.inside, self._go = engine._loop.parts.runner, threading.Event(), threading.Event()
        self._run = self._runner.run

    def _wait(self, batch: Any) -> Any:
        self.inside.set()
        assert self._go.wait(30)
        return self._run(batch)

    def __enter__(self) -> Paused:
        self._runner.run = self._wait
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run = self._run
        self._go.set()


@pytest.mark.parametrize("stream", [True, False])
def test_a_caller_who_leaves_frees_its_blocks_without_another_step(server: Served, stream: bool) -> None:
    connection = raw(server, "/v1/completions", LONG | {"stream": stream, "n": 2, "temperature": 1})
    wait_until(lambda: server.blocks_used() > 0)
    with Paused(server.engine) as paused:  # no step ends from here on
        assert paused.inside.wait(30)
        steps = server.engine._loop._accounts.num_steps
        connection.close()
        wait_until(lambda: server.server.service.num_live == 0)
        wait_until(lambda: server.engine._loop.scheduler.blocks.num_used == 0)
        assert server.engine._loop._accounts.num_steps == steps
    server.engine._loop.scheduler.blocks.check()


def test_a_full_queue_is_429_with_a_measured_time_and_then_has_room(folder: Path) -> None:
    with serving(folder, options={"max_num_seqs": 1}, max_queue=1) as served:
        assert served.post("/v1/completions", **LONG).status_code == 200
        with ThreadPoolExecutor(2) as pool, Paused(served.engine):
            waiting = [pool.submit(served.post, "/v1/completions", **LONG) for _ in range(2)]
            wait_until(lambda: served.server.service.num_live == 2)
            refused = served.post("/v1/completions", **LONG)
            assert refused.status_code == 429 and refused.json()["error"]["type"] == "rate_limit_error"
            assert 1 <= int(refused.headers["retry-after"]) <= 60 and "max_queue" in refused.json()["error"]["message"]
            assert served.http.get("/health").status_code == 200, "it is full, not ill"
        assert [f.result().status_code for f in waiting] == [200, 200]
        assert served.post("/v1/completions", **LONG).status_code == 200


def test_many_prompts_get_in_together_or_not_at_all(folder: Path) -> None:
    with serving(folder, options={"max_num_seqs": 2}, max_queue=1) as served, ThreadPoolExecutor(1) as pool:
        with Paused(served.engine):
            one = pool.submit(served.post, "/v1/completions", **LONG)
            wait_until(lambda: served.server.service.num_live == 1)
            assert served.post("/v1/completions", **LONG | {"prompt": ["a"] * 3}).status_code == 429
            assert served.server.service.num_live == 1
        assert one.result().status_code == 200
        bad = served.post("/v1/completions", **LONG | {"prompt": ["a", "b" * 500]})
        assert bad.status_code == 400
        assert served.server.service.num_live == 0
        assert served.post("/v1/completions", **LONG | {"prompt": ["a"] * 3}).status_code == 200


def test_only_who_has_a_key_gets_in(folder: Path) -> None:
    with serving(folder, api_key=("first", "second")) as served:
        for key, status in (("first", 200), ("second", 200), ("firs", 401), ("firsts", 401), ("\xe4", 401)):
            headers = {"Authorization": f"Bearer {key}".encode("latin-1")}
            assert httpx.get(f"{served.url}/v1/models", headers=headers).status_code == status, key
        anonymous = httpx.get(f"{served.url}/metrics")
        assert anonymous.status_code == 401 and anonymous.headers["www-authenticate"] == "Bearer"
        assert anonymous.json()["error"]["type"] == "authentication_error"
        assert httpx.get(f"{served.url}/health").status_code == 200, "load balancers have no key"
        assert httpx.patch(f"{served.url}/v1/optimizations", json={"max_num_seqs": 1}).status_code == 401
        assert served.http.get("/openapi.json").json()["components"]["securitySchemes"]


def test_more_texts_than_there_is_ever_room_for_is_the_callers_mistake(folder: Path) -> None:
    """429 says that it may be sent again, so it would be sent for ever."""
    with serving(folder, options={"max_num_seqs": 2}, max_queue=3) as served:
        ask = {"prompt": "a", "max_tokens": 2, "temperature": 1, "n": 5}
        assert served.post("/v1/completions", **ask).status_code == 200
        for body in (ask | {"n": 6}, ask | {"prompt": ["a"] * 6, "n": 1}, ask | {"prompt": ["a", "b"], "n": 3}):
            answer = served.post("/v1/completions", **body)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "n"
            assert "max_num_seqs + max_queue=5" in answer.json()["error"]["message"]


def test_large_and_slow_bodies_are_refused_whether_announced_or_not(folder: Path) -> None:
    with serving(folder, max_request_kib=1, body_timeout_s=0.2) as served:
        big = json.dumps({"prompt": "x" * 2000}).encode()
        headers = {"Content-Type": "application/json"}
        for content in (big, iter([big[:700], big[700:]])):
            response = served.http.post("/generate", content=content, headers=headers)
            assert response.status_code == 413 and "max_request_kib=1" in response.json()["error"]["message"]
        with socket.create_connection(("127.0.0.1", served.server.port)) as slow:
            slow.sendall(f"POST /generate HTTP/1.1\r\nHost: x\r\n{JSON}\r\nContent-Length: 20\r\n\r\n{{".encode())
            assert b" 408 " in slow.recv(1000)


def test_it_answers_503_while_it_loads_and_ends_with_1_if_that_fails(folder: Path) -> None:
    gate = threading.Event()

    def load(progress: Any) -> LLMEngine:
        progress("reading weights", 0.5)
        assert gate.wait(30)
        raise ConfigError("the model is not there; try another")

    with serving(folder, load) as served:
        wait_until(lambda: served.server.service.progress[1] == 0.5)
        response = served.post("/v1/completions", prompt="x")
        assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
        assert "reading weights, 50%" in response.json()["error"]["message"]
        health = served.http.get("/health")
        assert (health.status_code, health.json()["status"], health.json()["fraction"]) == (503, "loading", 0.5)
        gate.set()
        wait_until(lambda: served.server.should_exit)
        assert served.server.exit_code == 1 and "error: the model is not there; try another" in served.said


def test_draining_finishes_what_runs_and_refuses_what_is_new(folder: Path) -> None:
    with serving(folder) as served, ThreadPoolExecutor(1) as pool:
        with Paused(served.engine):
            running = pool.submit(served.post, "/v1/completions", **LONG)
            wait_until(lambda: served.server.service.num_live == 1)
            served.drain()
            wait_until(lambda: served.server.service.state == "draining")
            refused = served.post("/v1/completions", **LONG)
            assert refused.status_code == 503 and "stopping" in refused.json()["error"]["message"]
            assert served.http.get("/health").json()["status"] == "draining"
        done = running.result()
        assert done.status_code == 200 and done.json()["usage"]["completion_tokens"] == 120


def test_what_outlasts_the_drain_is_ended_and_told(folder: Path) -> None:
    with serving(folder, drain_timeout_s=0.05) as served, ThreadPoolExecutor(2) as pool:
        with Paused(served.engine):
            whole = pool.submit(served.post, "/v1/completions", **LONG)
            streamed = pool.submit(served.post, "/v1/completions", **LONG, stream=True)
            wait_until(lambda: served.server.service.num_live == 2)
            served.drain()
            assert whole.result().status_code == 503
            text = streamed.result().text
        assert '"finish_reason":"abort"' in text and '"code":"aborted"' in text


def test_a_second_signal_ends_what_runs_and_stops_at_once(folder: Path) -> None:
    with serving(folder, options={"max_num_seqs": 1}, drain_timeout_s=60) as served, ThreadPoolExecutor(1) as pool:
        many = pool.submit(served.post, "/v1/completions", **LONG | {"prompt": ["a"] * 64})
        wait_until(lambda: served.server.service.num_live == 64)
        served.server.handle_exit(signal.SIGTERM, None)
        wait_until(lambda: served.server.service.state == "draining")
        served.server.handle_exit(signal.SIGTERM, None)
        wait_until(lambda: served.server.service._made.closed)
        assert many.exception() is not None or many.result().status_code == 503


def test_a_reader_who_does_not_read_is_cut_off_and_holds_no_blocks(folder: Path) -> None:
    """Log probabilities of 20 alternatives are some 1.5 KB a token, so 2000 tokens fill the buffers of both sides."""
    options = {"max_model_len": 256, "max_num_seqs": 8}
    body = LONG | {"max_tokens": 250, "stream": True, "logprobs": 20, "n": 8, "temperature": 1}
    with serving(folder, options=options, max_stream_backlog=16) as served:
        with socket.socket(fileno=os.dup(served.server.servers[0].sockets[0].fileno())) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)  # what it accepts has the same
        with raw(served, "/v1/completions", body):
            wait_until(lambda: served.server.service.backends[0].bridge.num_overruns == 1)
            wait_until(lambda: served.blocks_used() == 0)
        assert served.server.service.num_live == 0
        assert served.post("/v1/completions", **LONG).status_code == 200, "others are served as before"


def test_a_reader_who_comes_back_late_gets_every_piece_in_order(folder: Path) -> None:
    """The reader's buffers fill, so that pieces have to wait; then it reads on."""
    options = {"max_model_len": 256, "max_num_seqs": 8}
    body = LONG | {"max_tokens": 200, "stream": True, "logprobs": 20, "n": 4, "temperature": 1, "seed": 3}
    with serving(folder, options=options, max_stream_backlog=4096) as served:
        whole = served.post("/v1/completions", **body | {"stream": False}).json()["choices"]
        with socket.socket(fileno=os.dup(served.server.servers[0].sockets[0].fileno())) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
        with raw(served, "/v1/completions", body | {"stream_options": {"include_usage": True}}) as late:
            wait_until(lambda: served.server.service.num_live == 0)  # the engine has ended, the reader has not begun
            text = b""
            while not text.endswith(b"0\r\n\r\n"):
                text += late.recv(65536)
    pieces = [
        json.loads(line[6:]) for line in re.sub(rb"\r\n[0-9a-f]+\r\n", b"", text).split(b"\n") if line[:7] == b"data: {"
    ]
    assert pieces[-1]["usage"]["completion_tokens"] == 800
    for number in range(4):
        parts = [c["text"] for p in pieces for c in p["choices"] if c["index"] == number]
        assert "".join(parts) == whole[number]["text"]


def test_browsers_of_a_named_origin_may_call(folder: Path) -> None:
    ask = {"Origin": "http://lab.example", "Access-Control-Request-Method": "POST"}
    with serving(folder, cors_origin=("http://lab.example",), api_key="k") as served:
        allowed = httpx.options(f"{served.url}/v1/completions", headers=ask)
        assert allowed.headers["access-control-allow-origin"] == "http://lab.example"
        refused = httpx.post(f"{served.url}/v1/completions", headers={"Origin": "http://lab.example"}, json={})
        assert refused.status_code == 401 and "access-control-allow-origin" in refused.headers, "a page may read why"
        other = httpx.options(f"{served.url}/v1/completions", headers=ask | {"Origin": "http://evil.example"})
        assert "access-control-allow-origin" not in other.headers


def test_requests_without_a_deadline_get_the_servers(folder: Path) -> None:
    with serving(folder, request_timeout_s=0.0001) as served:
        assert served.post("/generate", prompt="x", max_tokens=100, ignore_eos=True).status_code == 504
        assert served.post("/generate", prompt="x", max_tokens=2, timeout_s=30).status_code == 200


def test_an_engine_that_fails_a_step_says_so_and_goes_on(folder: Path) -> None:
    with serving(folder) as served:
        runner = served.engine._loop.parts.runner
        run = runner.run
        runner.run = lambda batch: 1 / 0
        failed = served.post("/v1/completions", **LONG)
        streamed = served.post("/v1/completions", **LONG, stream=True)
        runner.run = run
        assert failed.status_code == 500 and "ZeroDivisionError" in failed.json()["error"]["message"]
        assert '"code":"engine_error"' in streamed.text
        assert served.post("/v1/completions", **LONG).status_code == 200 and served.blocks_used() == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("port", 70000), ("max_queue", -1), ("drain_timeout_s", -1), ("api_key", " k"), ("api_key", "ä")],
)
def test_settings_are_checked_once_and_say_what_works(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{field}.*(try|leave)"):
        ServerConfig(**{field: value})

"""Laws of the server as a process: signals, a sudden end, and requests of every kind at once."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strata_lab.bench.hostile import FLAGS, Findings, answers, attack
from strata_lab.bench.hostile_requests import KINDS, ROUTES, Ask
from strata_lab.bench.live_server import LiveServer, live_server
from strata_lab.bench.tiny_model import write_tiny_model

LONG = {"prompt": "hello", "max_tokens": 480, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("process"))


@pytest.fixture(scope="module")
def first(tiny: Path) -> Iterator[tuple[LiveServer, bytes]]:
    """A server that nothing has happened to, and its answer."""
    with live_server(tiny, FLAGS) as server:
        yield server, text(server)


def text(server: LiveServer) -> bytes:
    status, answer = server.ask("POST", "/generate", LONG)
    assert status == 200
    return json.loads(answer)["text"][0]


def begun(server: LiveServer, **body: Any) -> socket.socket:
    """A stream that has brought its first piece."""
    data = json.dumps(LONG | {"stream": True} | body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = (
        f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    connection.sendall(head.encode() + data)
    got = b""
    while b"data: {" not in got:
        got += connection.recv(4096)
    return connection


def test_a_server_that_was_killed_under_load_and_while_it_loads_starts_again_and_answers_the_same(
    tiny: Path, first: tuple[LiveServer, bytes]
) -> None:
    server, before = first
    streams = [begun(server) for _ in range(8)]
    before_files = {p.name: p.read_bytes() for p in tiny.iterdir()}
    server.process.kill()
    assert server.process.wait(30) == -signal.SIGKILL
    for stream in streams:
        stream.close()
    flags = (*FLAGS, "--port", str(server.port))  # the port is free again at once, too
    with live_server(tiny, flags, loaded=False) as loading:
        loading.process.kill()
        assert loading.process.wait(30) == -signal.SIGKILL
    assert {p.name: p.read_bytes() for p in tiny.iterdir()} == before_files
    with live_server(tiny, flags) as again:
        assert again.port == server.port and text(again) == before
        with begun(again) as stream:
            again.process.send_signal(signal.SIGTERM)
            again.wait_for("stopping: 1 requests may finish")
            rest = b""
            while piece := stream.recv(65536):
                rest += piece
        assert rest.rstrip().endswith(b"0") and b"[DONE]" in rest and b'"completion_tokens":480' in rest
        assert again.process.wait(30) == 0, "SIGTERM lets what runs finish, and the process ends well"


def test_hostile_requests_break_nothing() -> None:
    findings = attack(400, seed=7)
    assert findings.good, findings.failures
    assert set(findings.counts) == set(KINDS) and sum(findings.counts.values()) == 400 + 40
    assert set(findings.marks) == {*ROUTES, "embeds"}, "every engine was asked for, and rows were among the prompts"


def test_the_right_answer_differs_by_engine_and_by_kind_of_prompt(tiny: Path) -> None:
    known = answers(tiny, 3, seed=7)
    assert sum(len(set(one.texts.values())) == len(ROUTES) for one in known) > len(known) / 2
    assert all(len({one.texts[name] for one in known}) > len(known) / 2 for name in ROUTES)


def test_what_must_not_happen_is_counted_and_kept() -> None:
    ask = Ask("valid", b"POST", frozenset({200}), "right")
    findings = Findings()
    findings.book(ask, 200, "right")
    assert findings.good
    findings.book(ask, 200, "wrong")
    findings.book(ask, 500, None)
    findings.book(Ask("leaves", b"", frozenset(), leave_s=0.1), 0, None)
    assert not findings.good and (findings.num_wrong_texts, findings.num_wrong_statuses) == (1, 1)
    assert len(findings.failures) == 2 and "'wrong' in place of 'right'" in findings.failures[0]
    assert not Findings(leaked_blocks=0.1).good and not Findings(exit_code=1).good

"""Laws of `strata bench`: tokens are counted and not chunks, clocks start when due, unlike runs are refused."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from strata_lab import cli
from strata_lab.bench import comparable, serving
from strata_lab.bench.harness import Environment
from strata_lab.bench.load import Ask, Reply, metrics, percentiles, send
from strata_lab.bench.serving_report import html_page
from strata_lab.bench.targets import ServerTarget
from strata_lab.events import HardwareEvent
from strata_lab.settings import ConfigError
from tests.checkpoints import write_checkpoint

ENVIRONMENT = Environment({"cpu": "test", "memory_gb": 1.0, "threads": 1, "load_average": 0.0, "driver": None,
                           "clocks": None, "temperature": None}, {"python": "3"}, "2026-01-01", "abc")  # fmt: skip


# -- figures ------------------------------------------------------------------------------------------------------


def test_rates_come_from_token_counts_and_streams_stay_apart_from_the_total() -> None:
    replies = [Reply(0.0, [1.0, 2.0, 3.0], 10, 3), Reply(0.0, [1.0, 5.0], 10, 9)]
    found = metrics(replies)
    assert found["output_tok_s"] == pytest.approx(12 / 5)
    assert found["tok_s_per_stream"] == pytest.approx(1 / 0.75), "1 and 0.5 s a token"
    assert found["itl_ms"]["p50"] == 1000.0, "the second reply came in pieces that are not tokens"
    assert (found["prompt_tokens"], found["output_tokens"], found["errors"]) == (20, 12, 0)
    assert found["ttft_ms"]["p99"] == 1000.0 and found["e2e_ms"]["p99"] == 5000.0


def test_failed_requests_are_counted_and_not_averaged() -> None:
    found = metrics([Reply(0.0, [1.0, 2.0], 1, 2), Reply(0.0, error="boom")])
    assert (found["requests"], found["errors"], found["output_tokens"]) == (2, 1, 2)
    assert metrics([Reply(0.0, error="boom")]) == {"requests": 1, "errors": 1}


def test_percentiles_are_nearest_ranks() -> None:
    found = percentiles([float(i) for i in range(100, 0, -1)])
    assert found == {"mean": 50.5, "p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0}
    assert percentiles([7.0]) == {"mean": 7.0, "p50": 7.0, "p90": 7.0, "p95": 7.0, "p99": 7.0}
    assert percentiles([]) is None


# -- sending ------------------------------------------------------------------------------------------------------


class Counter:
    """A target that notes how many requests are under way; each waits until as many as expected are."""

    name = "counter"

    def __init__(self, together: int) -> None:
        self.barrier = threading.Barrier(together)
        self.lock = threading.Lock()
        self.now = self.most = 0

    def answer(self, ask: Ask, reply: Reply) -> None:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self.barrier.wait(10)
        with self.lock:
            self.now -= 1
        if ask.max_tokens == 13:
            raise RuntimeError("unlucky")
        reply.times_s.append(time.perf_counter())
        reply.output_tokens = 1


def test_exactly_as_many_requests_as_asked_for_are_under_way() -> None:
    target = Counter(3)
    replies = send(target, [Ask("x", n) for n in range(11, 17)], concurrency=3)
    assert target.most == 3
    assert [r.error for r in replies] == ["", "", "RuntimeError: unlucky", "", "", ""]


def test_with_a_rate_the_clock_starts_when_a_request_is_due() -> None:
    class Slow:
        name = "slow"

        def answer(self, ask: Ask, reply: Reply) -> None:
            reply.times_s.append(time.perf_counter())

    first = send(Slow(), [Ask("x", 1)] * 20, rate=1000.0, seed=3)
    again = send(Slow(), [Ask("x", 1)] * 20, rate=1000.0, seed=3)

    def gaps(replies: list[Reply]) -> list[float]:
        return [round(b.sent_s - a.sent_s, 9) for a, b in itertools.pairwise(replies)]

    assert gaps(first) == gaps(again), "the moments follow from the seed"
    assert len(set(gaps(first))) == 19 and all(r.times_s[0] >= r.sent_s for r in first)
    assert 0.2e-3 < sum(gaps(first)) / 19 < 5e-3


# -- what is asked ------------------------------------------------------------------------------------------------


class Letters:
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) % 251 for c in text]


def test_every_request_gets_another_part_of_the_text(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"sentence number {i}. " for i in range(60)))
    cell = serving.Cell("x", 5, 40, 8)
    asks = serving.Prompts(text, Letters(), 251).asks(cell)
    assert {len(a.prompt) for a in asks} == {40} and len({tuple(a.prompt) for a in asks}) == 5
    for_server = serving.Prompts(text, None, None).asks(cell)
    assert {len(a.prompt) for a in for_server} == {160} and isinstance(for_server[0].prompt, str)
    assert len({tuple(a.prompt) for a in serving.Prompts(None, None, 300).asks(cell)}) == 5
    assert serving.Prompts(None, None, None).digest != serving.Prompts(text, None, None).digest


@pytest.mark.parametrize("content", [None, "short", b"\xff\xfe" * 300])
def test_a_text_that_cannot_serve_is_named(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        serving.Prompts(path, None, None)


def test_the_articles_workloads_keep_their_shape_and_sweeps_multiply() -> None:
    a, b, c = serving.article_cells(["A", "B", "C"])
    assert (a.prompt_characters, a.requests, a.concurrency) == (600, 4, 4)
    assert (b.prompt_tokens, b.output_tokens, b.concurrency) == (2048, 512, 1)
    assert (c.prompt_tokens, c.output_tokens, c.concurrency) == (512, 512, 8)
    cells = serving.sweep([1, 4], [16, 32], [8], [2.5], None)
    assert [(x.prompt_tokens, x.concurrency, x.rate, x.requests) for x in cells] == [
        (16, 1, None, 2), (16, 4, None, 8), (16, None, 2.5, 32), (32, 1, None, 2), (32, 4, None, 8),
        (32, None, 2.5, 32),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="concurrency=0 must be above 0; try 4"):
        serving.sweep([0], [1], [1], [], None)
    with pytest.raises(ConfigError, match="try 'A'"):
        serving.article_cells(["D"])


# -- a server -----------------------------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    """Streams two tokens in every piece, and tells the truth about tokens in its usage."""

    usage = True
    seen: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "test-model"}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(body | {"key": self.headers.get("Authorization")})
        if body["prompt"].startswith("refuse"):
            self._send(429, {"error": "busy"})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for _ in range(body["max_tokens"] // 2):
            self._event({"choices": [{"text": "two words "}]})
        if self.usage:
            self._event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b": a comment\ndata: " + json.dumps(event).encode() + b"\n\n")

    def _send(self, status: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Handler.usage, Handler.seen = True, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_servers_tokens_are_counted_by_its_usage(url: str) -> None:
    target = ServerTarget(url, api_key="secret")
    (reply,) = send(target, [Ask("hello", 12)], concurrency=1)
    target.close()
    assert (reply.error, len(reply.times_s), reply.output_tokens, reply.prompt_tokens) == ("", 6, 12, 7)
    assert reply.gaps_ms == []
    sent = Handler.seen[0]
    assert (sent["model"], sent["stream_options"], sent["key"]) == (
        "test-model",
        {"include_usage": True},
        "Bearer secret",
    )


def test_a_server_without_usage_or_with_errors_gives_errors_and_no_figures(url: str) -> None:
    target = ServerTarget(url, "m")
    (refused,) = send(target, [Ask("refuse", 4)], concurrency=1)
    assert refused.error.startswith("RuntimeError: status 429")
    Handler.usage = False
    (silent,) = send(target, [Ask("hello", 4)], concurrency=1)
    assert "sends no usage" in silent.error
    target.close()


@pytest.mark.parametrize(
    ("address", "message"), [("localhost:1", "must be an address"), ("http://127.0.0.1:9/v1", "--peer-model")]
)
def test_an_address_that_does_not_answer_is_named(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(address) + ".*" + message):
        ServerTarget(address)


def test_the_command_measures_a_server(url: str, tmp_path: Path) -> None:
    page = tmp_path / "peer.html"
    words = [
        "bench",
        "--peer",
        url,
        "--concurrency",
        "2",
        "--output-tokens",
        "8",
        "--runs",
        "2",
        "--html",
        str(page),
        "--json",
    ]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    (record,) = json.loads(result.stdout)
    assert (record["conditions"]["target"], record["conditions"]["model"]) == (url, "test-model")
    assert record["metrics"]["output_tokens"] == 4 * 8 and record["metrics"]["errors"] == 0
    assert record["metrics"]["itl_ms"] is None and record["spread"]["runs"] == 2
    assert record["hardware"]["during"]["readings"] >= 2, "the server is on this machine"
    assert json.loads(page.with_suffix(".json").read_text()) == [record]
    wrong = CliRunner().invoke(cli.app, ["bench", "--peer", url, "--cold-starts", "1"])
    assert wrong.exit_code == 2 and "for an engine" in wrong.output


# -- this engine --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def benched(tmp_path_factory) -> tuple[list[dict[str, Any]], Path]:
    """Records of a whole bench of a tiny model, and its page."""
    folder = write_checkpoint(tmp_path_factory.mktemp("bench"), "llama")[0]
    page = tmp_path_factory.mktemp("page") / "bench.html"
    words = ["bench", "-m", str(folder), "--concurrency", "1", "--concurrency", "3", "--prompt-tokens", "24",
             "--output-tokens", "6", "--runs", "2", "--cold-starts", "2", "--versus", "cuda_graph=off",
             "--max-model-len", "64", "--device", "cpu", "--html", str(page), "--json"]  # fmt: skip
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), page


def test_a_bench_of_an_engine_holds_every_condition_and_figure(benched) -> None:
    one, three, a, b, cold = benched[0]
    assert (three["conditions"]["batch"], three["metrics"]["requests"], three["metrics"]["output_tokens"]) == (3, 6, 36)
    assert one["metrics"]["prompt_tokens"] == 2 * 24, "real tokens of a real text"
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert 0 < three["metrics"][name]["p50"] <= three["metrics"][name]["p99"]
    assert three["metrics"]["tok_s_per_stream"] > 0 and three["spread"]["runs"] == 2
    assert one["hardware"]["during"]["note"].startswith("no sensor") and one["hardware"]["during"]["readings"] >= 2
    assert (a["conditions"]["toggles"]["cuda_graph"], b["conditions"]["toggles"]["cuda_graph"]) == (True, False)
    assert (a["spread"]["runs"], b["spread"]["runs"]) == (2, 1), "A on either side of B"
    assert b["metrics"]["ratio_to_a"] == pytest.approx(b["spread"]["median"] / a["spread"]["median"])
    assert b["metrics"]["drift_of_a"] > 0
    assert len(cold["metrics"]["load_s_each"]) == len(cold["metrics"]["first_ttft_ms_each"]) == 2
    assert cold["spread"]["runs"] == cold["conditions"]["cold_starts"] == 2


def test_the_page_stands_alone_and_shows_every_record(benched) -> None:
    records, path = benched
    page = path.read_text(encoding="utf-8")
    assert page == html_page(records)
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org)", page)
    assert page.count("<rect class=") == 2 and page.count('class="column') >= 2 * len(records)


def test_a_mistake_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    run = CliRunner().invoke
    for words, message in (
        (["--versus", "cuda_graph"], "try cuda_graph=off"), (["--versus", "cuda=on"], "cuda_graph"),
        (["--workload", "D"], "try 'A'"), (["--workload", "A", "--concurrency", "2"], "give one of them"),
        (["--rate", "0"], "rate=0"),
    ):  # fmt: skip
        result = run(cli.app, ["bench", "-m", str(tmp_path / "nowhere"), *words])
        assert result.exit_code == 2 and message in result.output


def test_a_target_that_answers_nothing_ends_the_bench() -> None:
    class Dead:
        name = "dead"

        def answer(self, ask: Ask, reply: Reply) -> None:
            raise OSError("no route")

    made = serving.Bench(Dead(), serving.Prompts(None, None, None), None, 1, lambda: None, "x", {})
    with pytest.raises(ConfigError, match="dead answers no request of .*: OSError: no route"):
        serving.bench(made, [serving.Cell("x", 2, 8, 4)], ENVIRONMENT)


def test_what_the_sensors_said_is_kept_as_extremes() -> None:
    readings = [
        HardwareEvent(t_s=0, device="x", name="x", core_c=60, sm_mhz=2500, throttle=("hot: b",)),
        HardwareEvent(t_s=1, device="x", name="x", core_c=70, sm_mhz=1900, throttle=("power: a",)),
    ]
    found = serving.sensors(readings)
    assert found is not None
    assert (found["core_c_max"], found["sm_mhz_min"], found["power_w_max"]) == (70, 1900, None)
    assert found["throttle"] == ["hot: b", "power: a"]
    assert serving.sensors([]) is None


def test_a_server_on_this_machine_can_be_held_against_an_engine(benched, url: str, tmp_path: Path) -> None:
    words = ["bench", "--peer", url, "--peer-model", benched[0][0]["conditions"]["model"], "--concurrency", "1",
             "--prompt-tokens", "24", "--output-tokens", "6", "--runs", "1", "--json",
             "--html", str(tmp_path / "p.html")]  # fmt: skip
    (theirs,) = json.loads(CliRunner().invoke(cli.app, words).stdout)
    assert comparable.first_difference(benched[0][0], theirs) is None


# -- comparing ----------------------------------------------------------------------------------------------------


def changed(record: dict[str, Any], part: str, **changes: Any) -> dict[str, Any]:
    return record | {part: record[part] | changes}


def test_runs_of_the_same_conditions_are_compared_whatever_their_toggles(benched, tmp_path: Path) -> None:
    record = benched[0][0]
    faster = changed(record, "metrics", output_tok_s=record["metrics"]["output_tok_s"] * 2)
    faster = changed(faster, "conditions", target="http://peer", toggles=None)
    faster["spread"] = {k: v * 10 for k, v in record["spread"].items()}
    (pair,) = comparable.compare([record], [faster])
    assert pair["output_tok_s"]["ratio"] == pytest.approx(2.0) and pair["spreads_are_apart"] is True
    assert comparable.compare([record], [record])[0]["spreads_are_apart"] is False
    for name, records in (("a.json", [record]), ("b.json", [faster])):
        (tmp_path / name).write_text(json.dumps(records))
    shown = CliRunner().invoke(cli.app, ["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")])
    assert shown.exit_code == 0 and "2.00" in shown.stdout


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("conditions", {"output_tokens": 7}, "output_tokens: 6 and 7"), ("conditions", {"text": "other"}, "text: "),
        ("conditions", {"rate": 3.0, "batch": None}, "batch: 1 and None"), ("hardware", {"cpu": "other"}, "cpu: "),
        ("hardware", {"during": {"throttle": ["hot: x"]}}, "throttle: [] and ['hot: x']"),
    ],
)  # fmt: skip
def test_the_first_condition_that_differs_is_named(part: str, changes: Any, message: str, benched, tmp_path) -> None:
    record = benched[0][0]
    other = changed(record, part, **changes)
    with pytest.raises(ConfigError, match=re.escape(f"not comparable: record 0 differs in {message}")):
        comparable.compare([record], [other])
    despite = ["throttle"] if "during" in changes else list(changes)
    assert len(comparable.compare([record], [other], despite)) == 1
    (tmp_path / "a.json").write_text(json.dumps([record]))
    (tmp_path / "b.json").write_text(json.dumps([other]))
    refused = CliRunner().invoke(cli.app, ["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")])
    assert refused.exit_code == 2 and "not comparable" in refused.output


def test_files_that_are_no_bench_are_refused(tmp_path: Path) -> None:
    for content in ("{", "[]", '[{"name": "climb/x"}]', '{"a": 1}'):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(ConfigError, match="x.json"):
            comparable.load(tmp_path / "x.json")
    with pytest.raises(ConfigError, match="try 'threads'"):
        comparable.first_difference({}, {}, ["colour"])

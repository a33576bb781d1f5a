"""What HTTP costs: tokens a second of streams over the server beside the same requests in the engine alone.

`python -m strata_lab.bench.http_overhead` lets one engine do both by turns (A B, B A, ...), at batch 1 and 16, with a
client in a process of its own on the same machine, and then asks /health while 200 streams run. Rates are output tokens
over the time from the first request to the last token, prefill included, on both sides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from strata_lab.bench.harness import Environment, Record, Spread, interleave, write_results
from strata_lab.config import DEFAULT_MODEL
from strata_lab.sampling_params import SamplingParams

SCRIPT = "python -m strata_lab.bench.http_overhead"
ROOT = Path(__file__).resolve().parents[2]
BATCHES = (1, 16)
ROUNDS, TOKENS, PROMPT_TOKENS = 5, 96, 16
STREAMS, STREAM_TOKENS = 200, 24


class Client:
    """The client process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def perform(self, **plan: Any) -> dict[str, Any]:
        """What it measured of a plan (`http_client.perform`)."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(plan) + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found


@contextmanager
def client() -> Iterator[Client]:
    """A client that ends with the block."""
    command = [sys.executable, "-m", "strata_lab.bench.http_client"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        yield Client(process)
        assert process.stdin
        process.stdin.close()


def prompts(engine: Any, count: int, salt: int) -> list[list[int]]:
    """Prompts of `PROMPT_TOKENS` tokens that differ from each other and from those of other salts."""
    vocab = engine.model_config.vocab_size
    return [[(11 + 97 * s + 31 * i + 7 * salt) % vocab for i in range(PROMPT_TOKENS)] for s in range(count)]


def bodies(made: list[list[int]], tokens: int) -> list[dict[str, Any]]:
    """Streamed requests for prompts."""
    shared = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    return [{"prompt": p, **shared, "stream_options": {"include_usage": True}} for p in made]


def engine_alone(engine: Any, batch: int, tokens: int) -> float:
    """Output tokens per second of one batch, without the server."""
    engine.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    started = time.perf_counter()
    outputs = engine.generate(prompts(engine, batch, 0), params)
    return sum(len(o.token_ids) for o in outputs) / (time.perf_counter() - started)


def over_http(engine: Any, server: Any, ask: Client, batch: int, tokens: int, costs_us: list[float]) -> float:
    """The same over the server; its loop's processor time per token goes to `costs_us`."""
    engine.reset_prefix_cache()
    used_s = server.cpu_s()
    found = ask.perform(
        host="127.0.0.1", port=server.port, health=False, bodies=bodies(prompts(engine, batch, 0), tokens)
    )
    assert found["tokens"] == [tokens] * batch, found["tokens"]
    costs_us.append((server.cpu_s() - used_s) * 1e6 / sum(found["tokens"]))
    return float(sum(found["tokens"]) / found["seconds"])


def measure(model: str, rounds: int, tokens: int, streams: int, batches: Sequence[int] = BATCHES) -> list[Record]:
    """A record per batch size and one for the many streams."""
    from strata_lab.engine import LLMEngine
    from strata_lab.server.background import served

    records = []
    with LLMEngine(model, max_num_seqs=max(16, *batches), max_model_len=512) as engine, client() as ask:
        environment = Environment.now(engine.device.type)
        with served(engine) as server:
            for batch in batches:
                costs_us: list[float] = []
                variants = {
                    "engine": partial(engine_alone, engine, batch, tokens),
                    "http": partial(over_http, engine, server, ask, batch, tokens, costs_us),
                }
                for warm in variants.values():
                    warm()
                found = interleave(variants, rounds)
                records.append(_record(environment, engine, model, batch, tokens, found, costs_us))
        engine.apply(max_num_seqs=streams)
        with served(engine) as server:
            records.append(_many(environment, engine, server, ask, model, streams))
    return records


def _record(
    environment: Environment,
    engine: Any,
    model: str,
    batch: int,
    tokens: int,
    found: dict[str, list[float]],
    costs_us: list[float],
) -> Record:
    alone, http = (statistics.median(found[name]) for name in ("engine", "http"))
    shares = [b / a for a, b in zip(found["engine"], found["http"], strict=True)]
    return environment.record(
        f"http_overhead/batch_{batch}",
        script=SCRIPT,
        conditions=_conditions(engine, model, batch, tokens),
        metrics={
            "output_tok_s": http,
            "engine_tok_s": alone,
            "share_of_engine": statistics.median(shares),
            "server_cpu_us_per_token": statistics.median(costs_us),
        },
        spread=Spread.of(shares),
        note="streams over HTTP beside generate() of the same engine, by turns; the spread is of the pairs' shares; "
        "client and server on the same cores",
    )


def _many(environment: Environment, engine: Any, server: Any, ask: Client, model: str, streams: int) -> Record:
    made = bodies(prompts(engine, streams, 1), STREAM_TOKENS)
    found = ask.perform(host="127.0.0.1", port=server.port, health=True, bodies=made)
    assert found["tokens"] == [STREAM_TOKENS] * streams, "a stream was not answered whole"
    waits = sorted(found["health_ms"])
    return environment.record(
        f"http_overhead/{streams}_streams",
        script=SCRIPT,
        conditions=_conditions(engine, model, streams, STREAM_TOKENS),
        metrics={
            "output_tok_s": sum(found["tokens"]) / found["seconds"],
            "health_p99_ms": waits[int(0.99 * (len(waits) - 1))],
            "health_max_ms": waits[-1],
            "num_health": len(waits),
            "ttft_ms": statistics.median(found["ttft_ms"]),
        },
        spread=Spread.of(waits),
        note="all streams run at once; /health on a new connection each time, from the client's process, which shares "
        "the cores; the spread is of its times, ms",
    )


def _conditions(engine: Any, model: str, batch: int, tokens: int) -> dict[str, Any]:
    toggles = engine.optimizations.as_dict()
    return {"model": model, "batch": batch, "prompt_tokens": PROMPT_TOKENS, "output_tokens": tokens, "toggles": toggles}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog=SCRIPT, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="anything the engine loads")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="pairs of runs per batch size")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="output tokens of a request")
    parser.add_argument("--streams", type=int, default=STREAMS, help="streams that run while /health is asked")
    parser.add_argument("--name", default="http_overhead", help="results file")
    parser.add_argument("--results", help="folder of the results file (default: docs/results)")
    options = parser.parse_args(arguments)
    records = measure(options.model, options.rounds, options.tokens, options.streams)
    for record in records:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in record.metrics.items())
        sys.stdout.write(f"{record.name:28} {figures}\n")
    write_results(options.name, records, options.results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

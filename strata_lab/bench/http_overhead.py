"""What HTTP costs: tokens a second of streams over the server beside the same requests in the engine alone.

`python -m strata_lab.bench.http_overhead` lets one engine do both by turns (A B, B A, ...), at batch 1 and 16, with a
client in a process of its own on the same machine, and then asks /health while 200 streams run. Rates are output tokens
over the time from the first request to the last token, prefill included, on both sides. A pair takes seconds, since a
shared machine changes its speed between minutes; the median of the pairs' shares comes with its 95% interval. The
time from step to step while all streams decode is compared too (`step_share`): neighbours touch few steps, and medians
of thousands of steps hardly move, but requests and their first tokens are not in it. A model without a tokenizer, such
as a preset, is asked over `/generate`, whose pieces carry token ids.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from strata_lab.bench.harness import Environment, Record, Spread, interleave, median_interval, write_results
from strata_lab.bench.measure import full_decode_steps
from strata_lab.config import DEFAULT_MODEL
from strata_lab.events import StepEvent
from strata_lab.sampling_params import SamplingParams

SCRIPT = "python -m strata_lab.bench.http_overhead"
ROOT = Path(__file__).resolve().parents[2]
ROUNDS = {1: 16, 16: 9}  # pairs by batch size: the longer a run, the less its neighbours matter
TOKENS, PROMPT_TOKENS = 96, 16
STREAMS, STREAM_TOKENS = 200, 24
MIN_MODEL_LEN = 512
STEP_STRIDE = 2  # steps from which to which a time is taken: a GPU may queue two at once, whose tokens come together


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


def plan(engine: Any, server: Any, made: list[list[int]], tokens: int, *, health: bool) -> dict[str, Any]:
    """What a client is to do with prompts (`http_client.perform`): stream them all at once."""
    shared: dict[str, Any] = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    path = "/generate"  # every stream of it ends with its usage
    if engine.tokenizer is not None:
        path, shared["stream_options"] = "/v1/completions", {"include_usage": True}
    bodies = [{"prompt": p, **shared} for p in made]
    return {"host": "127.0.0.1", "port": server.port, "path": path, "health": health, "bodies": bodies}


def engine_alone(engine: Any, batch: int, tokens: int) -> float:
    """Output tokens per second of one batch, without the server."""
    engine.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    started = time.perf_counter()
    outputs = engine.generate(prompts(engine, batch, 0), params)
    return sum(len(o.token_ids) for o in outputs) / (time.perf_counter() - started)


@dataclass
class Costs:
    """Processor time of the runs over HTTP, an entry per run.

    Attributes:
        server_us, client_us: of the server's loop and of the client's process, microseconds per token.
        client_share: of all processors, while the run lasted.
        tokens_per_piece: output tokens over pieces of the streams: what was ready together went out together.
    """

    server_us: list[float] = field(default_factory=list)
    client_us: list[float] = field(default_factory=list)
    client_share: list[float] = field(default_factory=list)
    tokens_per_piece: list[float] = field(default_factory=list)

    def medians(self) -> dict[str, float]:
        """As metrics."""
        return {
            "server_cpu_us_per_token": statistics.median(self.server_us),
            "client_cpu_us_per_token": statistics.median(self.client_us),
            "client_share_of_machine": statistics.median(self.client_share),
            "tokens_per_piece": statistics.median(self.tokens_per_piece),
        }


def over_http(engine: Any, server: Any, ask: Client, batch: int, tokens: int, costs: Costs) -> float:
    """The same over the server; what it took goes to `costs`."""
    engine.reset_prefix_cache()
    used_s = server.cpu_s()
    found = ask.perform(**plan(engine, server, prompts(engine, batch, 0), tokens, health=False))
    if found["tokens"] != [tokens] * batch:
        raise RuntimeError(f"{batch} streams brought {found['tokens']} tokens in place of {tokens} each")
    count = sum(found["tokens"])
    costs.server_us.append((server.cpu_s() - used_s) * 1e6 / count)
    costs.client_us.append(found["cpu_s"] * 1e6 / count)
    costs.client_share.append(found["cpu_s"] / found["seconds"] / (os.cpu_count() or 1))
    costs.tokens_per_piece.append(count / (found["pieces"] - batch))  # the last of each stream is its usage
    return float(count / found["seconds"])


def timed_steps(engine: Any, batch: int, run: Callable[[], float], steps_ms: list[float]) -> float:
    """Run, and add the times from step to step in which the whole batch decodes to `steps_ms`."""
    cursor = engine.events.cursor
    rate = run()
    events, _, lost = engine.events.since(cursor)
    if lost:
        raise RuntimeError(f"{lost} events were lost: the run has more steps than the event buffer; try --tokens 64")
    window = full_decode_steps([e for e in events if isinstance(e, StepEvent)], batch)
    steps_ms += [(b.t_s - a.t_s) * 1e3 / STEP_STRIDE for a, b in zip(window, window[STEP_STRIDE:], strict=False)]
    return rate


def measure(
    model: str, rounds: Mapping[int, int], tokens: int, streams: int, **options: Any
) -> Iterator[Record]:  # fmt: skip
    """A record per batch size of `rounds` (to the number of pairs) and one for the many streams, as they are made.

    `options`: of the engine.
    """
    from strata_lab.engine import LLMEngine
    from strata_lab.server.background import served

    options |= {"max_num_seqs": max(16, *rounds), "max_model_len": max(MIN_MODEL_LEN, PROMPT_TOKENS + tokens)}
    with LLMEngine(model, **options) as engine, client() as ask:
        environment = Environment.now(engine.device.type)
        with served(engine) as server:
            for batch, pairs in rounds.items():
                costs, steps_ms = Costs(), {"engine": list[float](), "http": list[float]()}
                runs = {
                    "engine": partial(engine_alone, engine, batch, tokens),
                    "http": partial(over_http, engine, server, ask, batch, tokens, costs),
                }
                for warm in runs.values():
                    warm()
                found = interleave(
                    {name: partial(timed_steps, engine, batch, run, steps_ms[name]) for name, run in runs.items()},
                    pairs,
                )
                conditions = _conditions(engine, model, batch, tokens)
                yield _record(environment, conditions, found, costs, steps_ms)
        engine.apply(max_num_seqs=streams)
        with served(engine) as server:
            yield _many(environment, engine, server, ask, model, streams)


def _record(
    environment: Environment,
    conditions: dict[str, Any],
    found: dict[str, list[float]],
    costs: Costs,
    steps_ms: dict[str, list[float]],
) -> Record:
    alone, http = (statistics.median(found[name]) for name in ("engine", "http"))
    shares = [b / a for a, b in zip(found["engine"], found["http"], strict=True)]
    low, high = median_interval(shares)
    return environment.record(
        f"http_overhead/batch_{conditions['batch']}",
        script=SCRIPT,
        conditions=conditions,
        metrics={
            "output_tok_s": http,
            "engine_tok_s": alone,
            "share_of_engine": statistics.median(shares),
            "share_low": low,
            "share_high": high,
            **_steps(**{name: statistics.median(ms) for name, ms in steps_ms.items() if ms}),
            **costs.medians(),
        },
        spread=Spread.of(shares),
        note="streams over HTTP beside generate() of the same engine, by turns; the spread is of the pairs' shares, "
        "share_low and share_high are the 95% interval of their median; step_share compares the median times from "
        "step to step; client, server and engine on the same processors, the client in a process of its own",
    )


def _steps(engine: float | None = None, http: float | None = None) -> dict[str, float]:
    """Median steps (ms) as metrics; none where the whole batch never decoded at once, as in runs of a few tokens."""
    return {"step_share": engine / http, "step_ms": http} if engine and http else {}


def _many(environment: Environment, engine: Any, server: Any, ask: Client, model: str, streams: int) -> Record:
    found = ask.perform(**plan(engine, server, prompts(engine, streams, 1), STREAM_TOKENS, health=True))
    if found["tokens"] != [STREAM_TOKENS] * streams or found["health_failed"]:
        raise RuntimeError(f"{streams} streams: not all were answered whole, or /health failed: {found}")
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
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--weights", help="format; default: as stored")
    parser.add_argument("--kv-cache-dtype", help="bf16 or fp8; default: the engine's")
    parser.add_argument("--rounds", type=int, help=f"pairs of runs per batch size (default: {ROUNDS})")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="output tokens of a request")
    parser.add_argument("--streams", type=int, default=STREAMS, help="streams that run while /health is asked")
    parser.add_argument("--name", default="http_overhead", help="results file")
    parser.add_argument("--results", help="folder of the results file (default: docs/results)")
    options = parser.parse_args(arguments)
    rounds = ROUNDS if options.rounds is None else dict.fromkeys(ROUNDS, options.rounds)
    extra = {"device": options.device, "weight_format": options.weights, "kv_cache_dtype": options.kv_cache_dtype}
    records = []
    for record in measure(options.model, rounds, options.tokens, options.streams, **extra):
        records.append(record)
        figures = ", ".join(f"{name} {value:.4g}" for name, value in record.metrics.items())
        sys.stdout.write(f"{record.name:28} {figures}\n")
        sys.stdout.flush()
    write_results(options.name, records, options.results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

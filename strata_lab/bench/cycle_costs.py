"""What a cycle of guessing and verifying costs on a card: the device's part, and what is left of a step beside it.

    python -m strata_lab.bench.cycle_costs [--drafter ngram] [--context 300] [--weights bf16] [--kernels]

One greedy request decodes in an ordinary engine, first plainly and then with so many guesses in every step. `engine` is
the time from one step's end to the next one's, `device` that of a bare replay of the same captured work at the same
place of the text, `idle` of one whose rows all lie beyond the text and see nothing. Where `engine` is longer than
`device`, the device waits for the host. Before a replay that is timed the device sleeps: the launch is over when the
clock starts. `--kernels` prints what the device ran in one replay; kernels that are launched early wait for the one
before, and that counts as their own time there.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from strata_lab.bench.harness import Environment, Record, write_results
from strata_lab.config import DEFAULT_MODEL
from strata_lab.request import Request
from strata_lab.sampling_params import SamplingParams

SCRIPT = "python -m strata_lab.bench.cycle_costs"
STEPS = 24  # of an engine, timed; the first ones of a flight do not count
FLIGHT_BEGINS = 4  # steps
REPLAYS = 3  # timed ones, of which the best counts: each moves the text on
MAX_TOKENS = 1024  # of the text: more than are ever needed
SLEEP_CYCLES = 2_000_000  # of the device's clock, a millisecond: longer than a launch

Replay = Callable[[], None]


@dataclass(frozen=True)
class Cost:
    """Microseconds of one kind of step.

    Attributes:
        guesses: of the step; 0 is a plain one.
        engine_us: mean time between two steps of the engine.
        device_us, idle_us: of a bare replay, per step.
        tokens: that a step of the engine yielded on average.
    """

    guesses: int
    engine_us: float
    device_us: float
    idle_us: float
    tokens: float


def device_us(replay: Replay) -> float:
    """Microseconds of the device's time that a replay takes, the best of a few."""
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP_CYCLES)
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return min(times)


def costs(engine: Any, context: int, timed: Callable[[Replay], float]) -> Iterator[tuple[Cost, Replay]]:
    """Of a plain step and of cycles of every number of guesses, with what replays each.

    Args:
        engine: with speculation in force whose guesses the device makes (`DraftAhead`), and nothing to do.
        context: tokens of the prompt.
        timed: microseconds of a replay.
    """
    speculation, drafting = engine.parts.speculation, engine.parts.runner
    policy, most = speculation.policy, speculation.most
    speculation.policy = None  # so many guesses in every step, whatever comes of them
    try:
        for guesses in (0, *drafting.cycles.drafts):
            speculation.most = guesses
            params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
            name = engine.add_request(_prompt(context), params)
            ends, tokens = _steps(engine)
            request = engine._loop.session(name).request
            replay, lengths, steps = _captured(drafting, request, guesses)
            engine_us = (ends[-1] - ends[0]) / (len(ends) - 1) * 1e6
            device, idle = timed(replay) / steps, _idle(lengths, replay, timed) / steps
            yield Cost(guesses, engine_us, device, idle, statistics.mean(tokens)), replay
            engine.abort(name)
            engine.forget(name)
            drafting.settle()
    finally:
        speculation.policy, speculation.most = policy, most


def _prompt(length: int) -> list[int]:
    """Tokens that differ, and come again: a look-up finds something to copy."""
    return [100 + i % 50 for i in range(length)]


def _steps(engine: Any) -> tuple[list[float], list[int]]:
    """Ends of decode steps, seconds, and their tokens."""
    ends: list[float] = []
    tokens: list[int] = []
    while len(ends) < FLIGHT_BEGINS + STEPS:
        event = engine.step()
        if event.num_decode_tokens and not event.num_prefill_tokens:
            ends.append(event.t_s)
            tokens.append(len(event.tokens))
    return ends[FLIGHT_BEGINS:], tokens[FLIGHT_BEGINS:]


def _captured(drafting: Any, request: Request, guesses: int) -> tuple[Replay, torch.Tensor, int]:
    """What replays the step where the text is, the lengths of its rows, and how many steps one replay is."""
    flight = drafting._flight if guesses else drafting.ahead._flight
    assert flight is not None and request in flight.requests
    if guesses:
        return flight.captured.replays[guesses, False], flight.captured.state.base.seq_lens, 1
    return flight.graph.replay, flight.graph.state.seq_lens, flight.graph.steps


@torch.inference_mode()
def _idle(lengths: torch.Tensor, replay: Replay, timed: Callable[[Replay], float]) -> float:
    """Microseconds of a replay whose rows all pad; afterwards they are what they were."""
    kept = lengths.clone()
    lengths.zero_()
    us = timed(replay)
    lengths.copy_(kept)
    return us


def kernels(replay: Replay) -> str:
    """A table of what the device runs in a replay."""
    from torch.profiler import ProfilerActivity, profile

    replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        replay()
        torch.cuda.synchronize()
    return str(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=24, max_name_column_width=60))


def table(found: Sequence[Cost]) -> str:
    """For a terminal."""
    lines = ["guesses  engine us  device us  idle us  tokens a step  against a plain step"]
    plain = found[0].device_us
    for cost in found:
        lines.append(
            f"{cost.guesses:7d}  {cost.engine_us:9.1f}  {cost.device_us:9.1f}  {cost.idle_us:7.1f}  {cost.tokens:13.2f}"
            f"  {cost.device_us / plain:5.2f} x"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 2 without a GPU."""
    parser = argparse.ArgumentParser(prog=SCRIPT, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as the engine takes it")
    parser.add_argument("--drafter", nargs="+", default=["ngram"], choices=("ngram", "draft"))
    parser.add_argument("--draft-model", help="with --drafter draft; default: the one that ships with the model")
    parser.add_argument("--weights", default="bf16", help="format of the model")
    parser.add_argument("--context", type=int, default=300, help="tokens of the prompt")
    parser.add_argument("--kernels", action="store_true", help="print the kernels of the largest cycle")
    parser.add_argument("--results", help="folder of the results file (default: docs/results)")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("cycles are captured on a CUDA device, and torch sees none\n")
        return 2
    from strata_lab.engine import LLMEngine
    from strata_lab.speculative.ahead import DraftAhead

    records: list[Record] = []
    for drafter in given.drafter:
        with LLMEngine(
            given.model, device="cuda", weight_format=given.weights, speculative=drafter, draft_model=given.draft_model,
            prefix_cache=False, max_num_seqs=1, max_model_len=given.context + MAX_TOKENS,
        ) as engine:  # fmt: skip
            environment = Environment.now(engine.device.type)
            found: list[Cost] = []
            runner = engine.parts.runner
            assert isinstance(runner, DraftAhead), type(runner)
            for cost, replay in costs(engine, given.context, device_us):
                found.append(cost)
                if given.kernels and cost.guesses in (0, runner.cycles.drafts[-1]):
                    sys.stdout.write(kernels(replay) + "\n")
            conditions = {
                "model": given.model, "weight_format": given.weights, "drafter": drafter, "batch": 1,
                "context": given.context,
            }  # fmt: skip
        sys.stdout.write(f"{drafter}\n{table(found)}\n")
        records += [
            environment.record(
                f"cycle/{drafter}/{cost.guesses}", script=SCRIPT, conditions=conditions, metrics=asdict(cost)
            )
            for cost in found
        ]
    sys.stdout.write(f"{write_results('cycle_costs_gpu', records, given.results)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

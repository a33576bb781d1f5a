"""The target writes texts: our own engine, as many requests at the same time as it takes.

A request begins as soon as another ends, until there are tokens or seconds enough. Every text is in the file as soon as
it ends, so an interrupted run leaves what it has made. Texts are cut where they begin to go round in circles: a draft
learns nothing from those, and they would make it look better than it is.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from strata_lab.events import TokenEvent
from strata_lab.sampling_params import RequestError, SamplingParams
from strata_lab.speculative.loops import MIN_TOKENS, is_loop
from strata_lab.speculative.traffic import Text, TrafficFile
from strata_lab.speculative.train.prompts import Prompt, UserTurn

GREEDY_SHARE = 0.4  # of the texts; the others are drawn
TEMPERATURES = (0.6, 0.8, 1.0)  # of those, in turn
TOP_K, TOP_P = 50, 0.98  # of those: few enough tokens that a device draws without its host
QUESTION_TEMPERATURE, QUESTION_TOKENS = 1.0, 64  # of requests that the target thinks up
MOST_REFUSED = 100  # prompts in a row that the model does not take, before that is an error
PATIENCE_S = 0.2  # between two looks at the clock while nothing ends


@dataclass(frozen=True)
class Made:
    """What came of it: finished texts, their output tokens, and the seconds it took."""

    texts: int
    tokens: int
    seconds: float


class _Ended:
    """`Inbox` that keeps only the events with which texts end."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()

    def put(self, event: TokenEvent) -> None:
        if event.finish_reason is not None:
            self.events.put(event)

    def flush(self) -> None:
        pass


def make_texts(
    engine: Any,
    prompts: Iterator[Prompt | UserTurn],
    target: TrafficFile,
    *,
    tokens: int,
    seconds: float,
    output_tokens: int,
    seed: int,
    progress: Callable[[str, float], None],
) -> Made:
    """Have `engine` write texts into `target` until there are `tokens` of output or `seconds` are over.

    Args:
        engine: an `LLMEngine`; its loop is started.
        prompts: what to ask, without end; where it is a user's turn, the target says what, and is then asked that.
        target: where the texts go.
        tokens, seconds: when to stop; texts that are being written then are finished if tokens are enough, and dropped
            if the time is over.
        output_tokens: of a text at most.
        seed: of the first text; the others count up.
        progress: called with what is being done and the fraction done.

    Raises:
        RequestError: the model takes none of many prompts in a row; RuntimeError: a step of it failed.
    """
    inbox, started = _Ended(), time.monotonic()
    waiting: dict[str, float | None] = {}  # temperature of a text; None of a question
    questions: deque[Prompt] = deque()
    most = 2 * engine.optimizations.max_num_seqs  # so that one is always there to begin
    index = num_texts = num_tokens = 0
    engine.start()

    def begin() -> None:
        refused: RequestError | None = None
        for _ in range(MOST_REFUSED):
            try:
                return ask()
            except RequestError as error:  # longer than the model allows
                refused = error
        assert refused is not None
        raise refused

    def ask() -> None:
        nonlocal index
        prompt = questions.popleft() if questions else next(prompts)
        thinks, temperature, length = isinstance(prompt, UserTurn), _temperature(index), output_tokens
        if isinstance(prompt, UserTurn):
            prompt, temperature, length = list(prompt.token_ids), QUESTION_TEMPERATURE, min(QUESTION_TOKENS, length)
        params = SamplingParams(temperature=temperature, top_k=TOP_K, top_p=TOP_P, max_tokens=length, seed=seed + index)
        index += 1
        session = engine.follow(prompt, params, inbox)
        waiting[session.request.request_id] = None if thinks else temperature

    try:
        while (num_tokens < tokens or waiting) and time.monotonic() - started < seconds:
            while num_tokens + len(waiting) * output_tokens // 2 < tokens and len(waiting) < most:
                begin()
            if not waiting:
                begin()
            try:
                event = inbox.events.get(timeout=PATIENCE_S)
            except queue.Empty:
                continue
            if event.finish_reason == "error":
                raise RuntimeError(f"the target could not write: {event.error}")
            output = engine.output(event.request_id)
            engine.forget(event.request_id)
            temperature = waiting.pop(event.request_id)
            if temperature is None:
                if event.finish_reason == "stop" and (said := output.text.strip()):
                    questions.append([{"role": "user", "content": said}])
            elif event.finish_reason in ("stop", "length"):
                made = before_loop(output.token_ids)
                target.add(Text(output.prompt_token_ids, made, temperature))
                num_texts, num_tokens = num_texts + 1, num_tokens + len(made)
            done = max(num_tokens / tokens, (time.monotonic() - started) / seconds)
            progress(f"{num_tokens:,} tokens written by the target", min(1.0, done))
    finally:
        for request_id in waiting:
            engine.forget(request_id)
    return Made(num_texts, num_tokens, time.monotonic() - started)


def before_loop(token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """A text that ends in circles up to where they begin."""
    if not is_loop(token_ids):
        return token_ids
    for end in range(MIN_TOKENS, len(token_ids) + 1):
        if is_loop(token_ids[:end]):
            return token_ids[: end - MIN_TOKENS + 1]
    return token_ids


def _temperature(index: int) -> float:
    """Greedy and drawn texts in turn."""
    greedy = int((index + 1) * GREEDY_SHARE) > int(index * GREEDY_SHARE)
    return 0.0 if greedy else TEMPERATURES[index % len(TEMPERATURES)]

"""Laws of the ways into an engine: every one takes a priority, and who can wait is never refused for want of room."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from strata_lab.engine import EngineClosedError, LLMEngine
from strata_lab.events import StepEvent
from strata_lab.router import Router
from strata_lab.sampling_params import RequestError, SamplingParams
from strata_lab.waiting_queue import QueueFull
from tests.checkpoints import write_checkpoint

SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama on disk."""
    return write_checkpoint(tmp_path_factory.mktemp("queue"), "llama")[0]


def make(folder, **options: Any) -> LLMEngine:
    defaults = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "cuda_graph": False, "max_num_seqs": 2}
    return LLMEngine(folder, **(defaults | options))


def prompt(number: int) -> list[int]:
    return [3 + (number * 17 + i * 5) % 90 for i in range(6)]


def most_waiting(engine: LLMEngine) -> int:
    return max(e.num_waiting for e in engine.events.since(0)[0] if isinstance(e, StepEvent))


@pytest.mark.parametrize("bounds", [{"max_waiting": 6}, {"max_waiting_tokens": 40}, {"max_waiting": 1}])
def test_a_list_longer_than_the_queue_is_served_whole_and_within_half_of_its_bounds(bounds, folder) -> None:
    prompts = [prompt(i) for i in range(40)]
    with make(folder) as engine:
        expected = [o.token_ids for o in engine.generate(prompts, SHORT)]
    with make(folder, **bounds) as engine:
        outputs = engine.generate(prompts, SHORT, progress=True)
        assert [o.token_ids for o in outputs] == expected
        assert {o.finish_reason for o in outputs} == {"length"}
        assert most_waiting(engine) <= 3
        assert engine.stats().kv_blocks_used == 0
        assert not engine._loop._sessions


def test_prompts_of_one_call_begin_in_the_same_step(folder) -> None:
    with make(folder, max_num_seqs=16, max_num_batched_tokens=512) as engine:
        engine.generate([prompt(0)], SHORT)
        cursor = engine.events.cursor
        engine.generate([prompt(i) for i in range(16)], SHORT)
        steps = [e for e in engine.events.since(cursor)[0] if isinstance(e, StepEvent)]
        assert [len(step.tokens) for step in steps] == [16] * 4


def test_beside_a_long_list_a_stream_finds_room_and_a_full_queue_refuses_it(folder) -> None:
    with make(folder, max_waiting=4) as engine:
        done: list[Any] = []
        bulk = threading.Thread(target=lambda: done.extend(engine.generate([prompt(i) for i in range(60)], SHORT)))
        bulk.start()
        while engine.stats().num_output_tokens < 20:
            time.sleep(0.001)
        assert len(list(engine.stream(prompt(99), SHORT))) == 4, "half of the queue is free for it"
        assert not done, "the list was still being served"
        streams = [engine.stream(prompt(i), LONG) for i in range(2)]
        with pytest.raises(QueueFull, match="max_waiting=4"):
            streams += [engine.stream(prompt(i), LONG) for i in range(6)]
        for stream in streams:
            stream.close()
        bulk.join()
        assert [o.finish_reason for o in done] == ["length"] * 60


def test_whoever_waits_for_room_is_told_when_the_engine_closes(folder) -> None:
    engine = make(folder, max_waiting=1, max_num_seqs=1)
    raised: list[BaseException] = []

    def bulk() -> None:
        try:
            engine.generate([prompt(i) for i in range(5)], LONG)
        except EngineClosedError as error:
            raised.append(error)

    thread = threading.Thread(target=bulk)
    thread.start()
    while not engine._loop._num_patient:
        time.sleep(0.001)
    engine.close()
    thread.join(10.0)
    assert len(raised) == 1


def test_one_request_of_a_list_that_can_never_be_served_is_refused_before_any_is_computed(folder) -> None:
    with make(folder, max_waiting=2) as engine:
        with pytest.raises(RequestError, match="max_model_len=256"):
            engine.generate([*(prompt(i) for i in range(30)), [5] * 300], SHORT)
        assert engine.stats().num_output_tokens == 0


def test_a_deadline_counts_from_the_call_and_not_from_the_place_in_the_queue(folder) -> None:
    brief = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, timeout_s=0.3)
    with make(folder, max_waiting=1, max_num_seqs=1) as engine:
        started = time.perf_counter()
        outputs = engine.generate([prompt(i) for i in range(50)], brief)
        assert time.perf_counter() - started < 3.0, "50 deadlines of their own would take 15 s"
        assert {o.finish_reason for o in outputs} <= {"length", "timeout"}
        assert outputs[-1].finish_reason == "timeout"


# -- priorities -------------------------------------------------------------------------------------------------------


def queue_and_wait(engine: LLMEngine) -> None:
    request_id = engine.add_request(prompt(1), SHORT, priority=5)
    while engine.output(request_id).finish_reason is None:
        time.sleep(0.001)


async def read(stream: Any) -> list[Any]:
    return [event async for event in stream]


CHAT = [{"role": "user", "content": "what now"}]
WAYS: dict[str, Any] = {
    "add_request": queue_and_wait,
    "generate": lambda engine: engine.generate([prompt(1)], SHORT, priority=5),
    "generate, one each": lambda engine: engine.generate([prompt(1), prompt(2)], SHORT, priority=[5, 6]),
    "chat": lambda engine: engine.chat(CHAT, SHORT, priority=5),
    "stream": lambda engine: list(engine.stream(prompt(1), SHORT, priority=5)),
    "astream": lambda engine: asyncio.run(read(engine.astream(prompt(1), SHORT, priority=5))),
    "router, generate": lambda engine: Router({"a": engine}).generate([prompt(1)], SHORT, priority=5),
    "router, chat": lambda engine: Router({"a": engine}).chat(CHAT, SHORT, priority=5),
    "router, stream": lambda engine: list(Router({"a": engine}).stream(prompt(1), SHORT, priority=5)),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_in_takes_a_priority_and_it_goes_before_those_who_were_there(way: str, folder) -> None:
    with make(folder, max_num_seqs=1, scheduling_policy="priority") as engine:
        for name in ("running", "waiting"):
            engine.add_request(prompt(len(name)), LONG, request_id=name)
        engine.start()
        while not engine.stats().num_output_tokens:
            time.sleep(0.001)
        WAYS[way](engine)
        assert engine.stats().num_running + engine.stats().num_waiting == 2
        assert {engine.output(name).finish_reason for name in ("running", "waiting")} == {None}
        assert engine.stats().num_preemptions >= 1


@pytest.mark.parametrize("priority", ["high", 1.5, True, None])
def test_a_priority_that_is_no_whole_number_is_refused(priority: Any, folder) -> None:
    with make(folder) as engine:
        for call in (engine.add_request, engine.generate, engine.stream):
            with pytest.raises(RequestError, match="priority=.* must be a whole number; try 0"):
                call(prompt(1), SHORT, priority=[priority] if call == engine.generate else priority)
        with pytest.raises(RequestError, match="1 prompts but 2 priorities"):
            engine.generate([prompt(1)], SHORT, priority=[1, 2])
        assert engine.stats().num_waiting == 0


def test_a_stream_has_the_name_that_it_is_given(folder) -> None:
    with make(folder) as engine:
        stream = engine.stream(prompt(1), SHORT, request_id="mine")
        assert {event.request_id for event in stream} == {stream.request_id} == {"mine"}

"""Laws of the event log: a reader sees every event once, in order, or is told how many it lost; nobody blocks."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_lab.events import EVENT_CAPACITY, EventLog, ProgressEvent, TokenEvent


def event(number: int) -> ProgressEvent:
    return ProgressEvent(t_s=float(number), task="", fraction=0.0)


def filled(capacity: int, count: int) -> EventLog:
    log = EventLog(capacity)
    for number in range(count):
        log.append(event(number))
    return log


def numbers(events: list) -> list[int]:  # type: ignore[type-arg]
    return [int(e.t_s) for e in events]


def test_a_reader_sees_every_event_once_and_in_order() -> None:
    log = filled(8, 3)
    events, cursor, lost = log.since(0)
    assert (numbers(events), cursor, lost) == ([0, 1, 2], 3, 0)
    assert log.since(cursor) == ([], 3, 0)
    log.append(event(3))
    events, cursor, lost = log.since(cursor)
    assert (numbers(events), cursor, lost) == ([3], 4, 0)


def test_a_slow_reader_loses_the_oldest_and_is_told_how_many() -> None:
    log = filled(4, 10)
    events, cursor, lost = log.since(3)
    assert (numbers(events), cursor, lost) == ([6, 7, 8, 9], 10, 3)
    assert log.since(cursor) == ([], 10, 0)


def test_a_new_reader_starts_at_the_cursor_and_sees_only_what_comes() -> None:
    log = filled(4, 10)
    cursor = log.cursor
    assert log.since(cursor) == ([], 10, 0)
    log.append(event(10))
    assert numbers(log.since(cursor)[0]) == [10]


def test_readers_do_not_disturb_each_other() -> None:
    log = filled(8, 5)
    assert numbers(log.since(0)[0]) == [0, 1, 2, 3, 4]
    assert numbers(log.since(2)[0]) == [2, 3, 4]
    assert numbers(log.since(0)[0]) == [0, 1, 2, 3, 4]


def test_a_cursor_from_the_future_sees_nothing_and_loses_nothing() -> None:
    assert filled(4, 2).since(99) == ([], 2, 0)


@settings(max_examples=50, deadline=None)
@given(capacity=st.integers(1, 6), steps=st.lists(st.integers(0, 9), max_size=12))
def test_seen_and_lost_add_up_to_what_was_written(capacity: int, steps: list[int]) -> None:
    log, cursor, written = EventLog(capacity), 0, 0
    for count in steps:
        for _ in range(count):
            log.append(event(written))
            written += 1
        before = cursor
        events, cursor, lost = log.since(cursor)
        assert cursor == written
        assert lost == max(0, count - capacity)
        assert numbers(events) == list(range(before + lost, written))


def test_the_log_never_holds_more_than_its_capacity() -> None:
    assert len(filled(5, 100).since(0)[0]) == 5
    assert EventLog().capacity == EVENT_CAPACITY


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_log_holds_at_least_one_event(capacity: int) -> None:
    with pytest.raises(ValueError, match=rf"capacity={capacity} must be at least 1; try {EVENT_CAPACITY}"):
        EventLog(capacity)


def test_wait_returns_at_once_for_what_is_there_and_false_after_the_timeout() -> None:
    log = filled(4, 2)
    assert log.wait(1, timeout_s=0)
    start = time.perf_counter()
    assert not log.wait(2, timeout_s=0.05)
    assert time.perf_counter() - start >= 0.05


def test_wait_wakes_up_when_an_event_arrives() -> None:
    log = EventLog()
    woken: list[bool] = []
    reader = threading.Thread(target=lambda: woken.append(log.wait(0, timeout_s=30)))
    reader.start()
    log.append(event(0))
    reader.join(30)
    assert woken == [True]


def test_concurrent_writers_and_readers_lose_and_repeat_nothing() -> None:
    """4 writers x 500 events; each of 3 readers must count 2000, and see each writer's events in order."""
    log, per_writer, writers = EventLog(4000), 500, 4
    seen: list[list[ProgressEvent]] = [[], [], []]

    def write(name: str) -> None:
        for number in range(per_writer):
            log.append(ProgressEvent(float(number), name, 0.0))

    def read(mine: list[ProgressEvent]) -> None:
        cursor = 0
        while len(mine) < writers * per_writer and log.wait(cursor, timeout_s=30):
            events, cursor, lost = log.since(cursor)
            assert lost == 0
            mine.extend(e for e in events if isinstance(e, ProgressEvent))

    threads = [threading.Thread(target=read, args=(mine,)) for mine in seen]
    threads += [threading.Thread(target=write, args=(str(i),)) for i in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for mine in seen:
        assert len(mine) == writers * per_writer
        for name in map(str, range(writers)):
            assert [e.t_s for e in mine if e.task == name] == [float(n) for n in range(per_writer)]


def test_events_are_frozen_records() -> None:
    token = TokenEvent("r", 5, "x", 0)
    assert (token.finish_reason, token.error) == (None, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        token.text = "y"  # type: ignore[misc]

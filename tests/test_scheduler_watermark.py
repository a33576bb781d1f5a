"""How much of the pool newcomers leave alone, and that admission which was closed opens above where it closes."""

from __future__ import annotations

import pytest

from strata_lab.admission import HighestPriorityFirst, Watermark
from strata_lab.engine import LLMEngine
from strata_lab.sampling_params import SamplingParams
from strata_lab.telemetry.metrics import metrics_text
from tests.checkpoints import write_checkpoint
from tests.fake_model import make, names, request, undisturbed


def test_a_newcomer_leaves_the_low_share_and_who_finds_nobody_running_need_not() -> None:
    scheduler, model = make(20, 4, watermark=Watermark(low=0.5))
    scheduler.add(request("first", prompt=40, max_tokens=8))
    scheduler.add(request("second", prompt=4, max_tokens=8))
    model.step()
    assert names(scheduler.running) == ["first"], "12 of 20 blocks, though half should stay free: it was alone"
    while names(scheduler.running) == ["first"]:
        assert names(scheduler.waiting) == ["second"], "3 more would leave 5 of 20"
        model.step()
    model.step()
    assert names(scheduler.running) == ["second"]
    model.drain()


def test_a_live_change_of_the_share_lets_in_who_waits() -> None:
    scheduler, model = make(20, 4, watermark=Watermark(low=0.5))
    for name, prompt in (("first", 40), ("second", 4)):
        scheduler.add(request(name, prompt=prompt, max_tokens=8))
    model.step()
    scheduler.configure(watermark=Watermark(low=0.25))
    model.step()
    assert names(scheduler.running) == ["first", "second"]


def test_after_the_pool_ran_short_newcomers_wait_for_the_high_share_and_then_need_only_leave_the_low_one() -> None:
    scheduler, model = make(20, 4, watermark=Watermark(low=0.0, high=0.5))
    for name, prompt, most in (("small", 1, 60), ("old", 25, 50), ("young", 20, 40)):
        scheduler.add(request(name, prompt=prompt, max_tokens=most))
    while not scheduler.num_preemptions:
        assert scheduler.has_work and not scheduler.watermark.closed
        model.step()
    assert scheduler.watermark.closed and names(scheduler.waiting) == ["young"]
    scheduler.abort("young")
    scheduler.add(request("new", prompt=2, max_tokens=2))
    assert scheduler._spare(2) >= scheduler._demand_of_waiting(scheduler.waiting.head, 2)
    model.step()
    assert names(scheduler.waiting) == ["new"], "it would fit, and must wait"
    scheduler.abort("old")
    model.step()
    assert names(scheduler.running) == ["small", "new"] and not scheduler.watermark.closed
    scheduler.add(request("large", prompt=40, max_tokens=2))
    model.step()
    assert "large" in names(scheduler.running) and scheduler.blocks.num_free < 10, "open again, down to the low share"
    assert scheduler.watermark.num_closures == 1
    model.drain()


def test_what_was_preempted_and_what_is_urgent_needs_leave_nothing() -> None:
    scheduler, model = make(20, 4, order=HighestPriorityFirst(), watermark=Watermark(low=0.9))
    scheduler.add(request("long", prompt=20, max_tokens=30))
    model.step()
    scheduler._preempt(scheduler.running[0])
    scheduler.add(request("other", prompt=4, max_tokens=20, priority=-1))
    model.step()
    assert names(scheduler.running) == ["long"] and names(scheduler.waiting) == ["other"]
    scheduler.add(request("urgent", prompt=4, max_tokens=4, priority=1))
    model.step()
    assert names(scheduler.running) == ["urgent", "long"]
    scheduler._preempt(scheduler.running[1])
    model.step()
    assert names(scheduler.running) == ["urgent", "long"], "back beside who runs, at a share that keeps newcomers out"
    model.drain()


def test_who_passes_a_preempted_request_leaves_the_share_too() -> None:
    for low, passes in ((0.0, True), (0.5, False)):
        scheduler, model = make(20, 4, max_passes=4)
        for name, prompt, most in (("first", 30, 30), ("second", 21, 30)):
            scheduler.add(request(name, prompt=prompt, max_tokens=most))
        while not scheduler.num_preemptions:
            assert scheduler.has_work
            model.step()
        scheduler.configure(watermark=Watermark(low=low))
        scheduler.add(request("short", prompt=2, max_tokens=2))
        model.step()
        assert names(scheduler.waiting)[:1] == ["second"]
        assert ("short" in names(scheduler.running)) == passes
        model.drain()


@pytest.mark.parametrize("marks", [(0.0, 0.0), (0.3, 0.3), (0.0, 0.9), (0.9, 0.9)])
def test_everybody_is_served_whatever_the_shares(marks: tuple[float, float]) -> None:
    scheduler, model = make(12, 4, max_model_len=48, watermark=Watermark(*marks))
    requests = [request(f"r{i}", prompt=3 + 5 * i % 23, max_tokens=20) for i in range(12)]
    for r in requests:
        scheduler.add(r)
    model.drain()
    assert [r.output_token_ids for r in requests] == [undisturbed(r, 48) for r in requests]


def test_the_engine_shows_that_admission_is_closed(tmp_path) -> None:
    pytest.importorskip("prometheus_client")
    folder = write_checkpoint(tmp_path, "llama")[0]
    with LLMEngine(folder, device="cpu", block_size=8, num_kv_blocks=9, max_model_len=64, watermark_high=0.9) as engine:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        for start in (5, 50, 90):
            engine.add_request(list(range(start, start + 12)), params)
        shown = False
        while engine.step() is not None:
            stats = engine.stats()
            line = metrics_text(engine).split(b"\nstrata:admission_closed{")[1].splitlines()[0]
            assert float(line.split()[-1]) == stats.admission_closed
            shown = shown or stats.admission_closed
        assert shown and engine.stats().num_closures >= 1
        assert engine.apply(watermark=0.1, watermark_high=0.0).ok
        assert (engine._loop.scheduler.watermark.low, engine.stats().num_closures >= 1) == (0.1, True)

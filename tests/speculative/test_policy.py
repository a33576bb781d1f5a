"""The policy drafts as much as pays, by measured cost and acceptance, and stops where the clock says that it loses."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from strata_lab.batch import ScheduledBatch
from strata_lab.request import Request
from strata_lab.sampling_params import SamplingParams
from strata_lab.speculative.acceptance import Acceptance
from strata_lab.speculative.costs import Curve, StepCosts, measure
from strata_lab.speculative.loops import is_loop
from strata_lab.speculative.ngram import NgramDrafter
from strata_lab.speculative.policy import (
    FIRST_PAUSE,
    HOPE_STEPS,
    JUDGED_STEPS,
    REFRESH_STEPS,
    TOLD_STEPS,
    DraftPolicy,
)
from strata_lab.speculative.speculator import LOOK_SHARE, Speculator

CLASSES = NgramDrafter.classes
BASE, PER_TOKEN = 6.0, 1.0  # milliseconds: a step of 8 tokens costs about two of one


def policy(base: float = BASE, per_token: float = PER_TOKEN, most: int = 8) -> DraftPolicy:
    points = {n: base + per_token * n for n in (1, 2, 4, 8, 16, 32, 64, 128)}
    return DraftPolicy(StepCosts(points, points), CLASSES, most)


def settle(p: DraftPolicy, accepted_of: float, *, evidence: int = 20, windows: int = 60, name: str = "a") -> None:
    """Windows of 8 whose guesses come true each with the given chance."""
    rng = random.Random(1)
    for _ in range(windows):
        accepted = next((i for i in range(8) if rng.random() >= accepted_of), 8)
        p.verified(name, evidence, 8, accepted)


def run(p: DraftPolicy, steps: int, accepted: int, ms: float, num_requests: int = 1, drafts: int = 4) -> int:
    """Steps that draft whenever the policy does not rest; how many did."""
    drafted = 0
    for _ in range(steps):
        if p.rests(num_requests):
            p.observe(num_requests, 0, 0, p.costs.plain_ms(num_requests))
        else:
            drafted += 1
            p.observe(num_requests, drafts, accepted, ms)
    return drafted


def test_windows_grow_with_acceptance_and_end_where_it_does_not_pay() -> None:
    lengths = []
    for acceptance in (0.0, 0.5, 0.8, 0.97):
        p = policy()
        settle(p, acceptance)
        lengths += p.plan(["a"], [20], 1)
    assert lengths == sorted(lengths)
    assert lengths[0] == 0
    assert lengths[-1] == 8


def test_windows_shrink_as_verification_gets_dearer() -> None:
    lengths = []
    for per_token in (0.01, 1.0, 3.0, 40.0):
        p = policy(per_token=per_token)
        settle(p, 0.8)
        lengths += p.plan(["a"], [20], 1)
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 8
    assert lengths[-1] == 0


def test_a_large_batch_gets_shorter_windows_than_a_small_one() -> None:
    """Where the step is bound by arithmetic (cost proportional to tokens) a guess must be nearly certain."""
    points = {1: 6, 8: 9, 16: 20, 128: 160}
    p = DraftPolicy(StepCosts(points, points), CLASSES, 8)
    settle(p, 0.8, name="r0")
    alone = p.plan(["r0"], [20], 1)
    many = p.plan([f"r{i}" for i in range(16)], [20] * 16, 16)
    assert alone[0] >= 4
    assert sum(many) / 16 < alone[0] / 2


def test_requests_of_one_step_share_its_cost_and_the_likelier_guesses_win() -> None:
    p = policy()
    settle(p, 0.97, name="copies")
    settle(p, 0.3, name="invents")
    copies, invents, blind = p.plan(["copies", "invents", "blind"], [20, 20, 0], 3)
    assert copies > invents
    assert blind == 0


def test_kinds_of_text_are_told_apart_by_evidence() -> None:
    acceptance = Acceptance(CLASSES)
    assert [acceptance.names[acceptance.kind_of(n)] for n in (2, 4, 5, 11, 12, 24)] == [
        "prose", "prose", "code", "code", "repetition", "repetition",
    ]  # fmt: skip
    p = policy()
    settle(p, 0.0, evidence=2)
    settle(p, 0.97, evidence=20)
    assert p.plan(["a"], [2], 1) == [0]
    assert p.plan(["a"], [20], 1) == [8]


def test_what_was_given_up_on_is_tried_again_after_a_while() -> None:
    p = policy()
    settle(p, 0.0)
    tries = [step for step in range(400) if p.plan(["a"], [20], 1) != [0]]
    assert 20 < tries[0] < 300, "fading must lead to a probe, and not at once"


def test_little_is_risked_before_anything_is_known() -> None:
    assert policy().plan(["new"], [24], 1)[0] <= 3


def test_it_stops_where_it_loses_says_so_and_rests_longer_each_time() -> None:
    p = policy()
    plain = p.costs.plain_ms(1)
    assert run(p, JUDGED_STEPS, accepted=0, ms=2 * plain) == JUDGED_STEPS
    assert p.state == "off"
    assert "with one request" in p.reason
    assert "0." in p.reason
    assert run(p, FIRST_PAUSE, accepted=0, ms=2 * plain) == 0
    assert run(p, JUDGED_STEPS, accepted=0, ms=2 * plain) == JUDGED_STEPS
    assert run(p, 2 * FIRST_PAUSE, accepted=0, ms=2 * plain) == 0, "the second rest is twice as long"


def test_it_takes_up_drafting_again_where_it_pays_and_not_for_a_hair() -> None:
    for accepted, state in ((3, "on"), (0, "off")):
        p = policy()
        plain = p.costs.plain_ms(1)
        run(p, JUDGED_STEPS + FIRST_PAUSE, accepted=0, ms=2 * plain)
        for _ in range(JUDGED_STEPS):
            assert not p.rests(1)
            p.observe(1, 4, accepted, p.costs.plain_ms(1))  # as fast as plain decoding, with or without tokens gained
        assert p.state == state


def test_a_step_whose_time_tells_nothing_is_neither_cost_nor_verdict() -> None:
    p = policy()
    before = p.costs.points()
    for _ in range(3 * JUDGED_STEPS):
        p.observe(1, 4, 0, None)
        p.observe(1, 0, 0, None)
    assert p.costs.points() == before
    assert (p.state, p.reason) == ("on", "no verdict yet")


def test_one_standstill_among_steps_that_gain_is_no_verdict() -> None:
    p = policy()
    for step in range(JUDGED_STEPS):
        p.observe(1, 4, 3, 5000.0 if step == 5 else p.costs.window_ms(5))
    assert p.state == "on" and p.net(1) > 1.5


def test_what_a_drafter_takes_counts_in_the_verdict_and_not_as_verification() -> None:
    p = policy()
    verified_ms = p.costs.window_ms(5)
    for _ in range(JUDGED_STEPS):
        p.observe(1, 4, 3, verified_ms + 3 * verified_ms, 3 * verified_ms)
    assert p.costs.window_ms(5) == pytest.approx(verified_ms)
    assert p.state == "off"


def test_batch_sizes_are_judged_apart() -> None:
    p = policy()
    run(p, JUDGED_STEPS, accepted=0, ms=200.0, num_requests=16)
    assert p.rests(16)
    assert not p.rests(1)


def test_a_plain_step_now_and_then_keeps_its_cost_known() -> None:
    p = policy()
    steps = 3 * REFRESH_STEPS
    assert steps - run(p, steps, accepted=4, ms=p.costs.plain_ms(1)) == 2


def test_a_curve_passes_through_its_points_and_goes_on_straight() -> None:
    curve = Curve({1: 5.0, 3: 9.0, 4: 10.0})
    assert [curve.ms(n) for n in (1, 2, 3, 4, 6)] == [5.0, 7.0, 9.0, 10.0, 12.0]
    curve.scale(2, 2.0)
    assert curve.points() == {1: 5.0, 2: 14.0, 3: 9.0, 4: 10.0}
    assert Curve({2: 7.0}).ms(9) == 7.0


def test_costs_follow_a_machine_that_slows_down_and_ignore_a_hiccup() -> None:
    costs = StepCosts({1: 5.0, 8: 10.0}, {1: 5.0, 8: 10.0})
    costs.observe(1, False, 500.0)
    assert costs.plain_ms(1) < 6.0
    for _ in range(40):
        costs.observe(1, False, 8.0)
    assert costs.plain_ms(1) == pytest.approx(8.0, rel=0.02)
    assert costs.window_ms(8) > 12.0, "a change of pace is shared"
    for _ in range(200):
        costs.observe(8, True, 16.0)
    assert costs.window_ms(8) == pytest.approx(16.0, rel=0.02)


def test_dear_steps_with_drafts_do_not_make_plain_ones_look_dear() -> None:
    costs = StepCosts({1: 5.0, 8: 10.0}, {1: 5.0, 8: 10.0})
    for _ in range(20):
        costs.observe(8, True, 20.0)
    assert costs.window_ms(8) > 19.0
    assert costs.plain_ms(1) < 6.0


def test_no_step_is_planned_that_is_larger_than_any_that_was_measured() -> None:
    points = {1: 6.0, 8: 6.5}  # a line on which more is always better
    p = DraftPolicy(StepCosts(points, points), CLASSES, 8)
    settle(p, 0.97, name="r0")
    assert p.plan(["r0"], [20], 1) == [7]
    assert sum(p.plan([f"r{i}" for i in range(6)], [20] * 6, 6)) == 2
    assert sum(p.plan([f"r{i}" for i in range(9)], [20] * 9, 9)) == 0
    assert p.rests(9)
    p = DraftPolicy(StepCosts(points, points, most_tokens=18), CLASSES, 8)
    assert sum(p.plan([f"r{i}" for i in range(9)], [20] * 9, 9)) == 9, "unless the line is known to go on"


def test_measuring_keeps_the_best_of_each_size_and_heeds_its_budget() -> None:
    now = 0.0

    def timer(noise: dict[int, float]):
        def time_ms(size: int) -> float:
            nonlocal now
            now += 1.0
            return size + noise.pop(size, 0.0)

        return time_ms

    plain, window = measure([timer({1: 50.0}), timer({2: 9.0})], lambda: now, 100.0, sizes=(1, 4, 2), repeats=2)
    assert plain == {1: 1.0, 2: 2.0, 4: 4.0}
    assert window == {1: 1.0, 2: 2.0, 4: 4.0}
    now = 0.0
    (short,) = measure([timer({})], lambda: now, 0.0, sizes=(1, 4, 2), repeats=3)
    assert set(short) == {1, 4}
    (odd,) = measure([timer({1: 8.0})], lambda: now, 100.0, sizes=(1, 4), repeats=1)
    assert odd == {1: 4.0, 4: 4.0}, "one token never takes longer than four"


def test_a_text_that_goes_round_is_a_loop_and_a_list_is_not() -> None:
    assert is_loop([1, 2, 3] * 40)
    assert is_loop([9, 8, 7, *[5] * 60])
    assert not is_loop([5] * 20)
    assert not is_loop([t for i in range(30) for t in (1, 2, 3, 100 + i)])


def test_a_batch_in_which_no_guess_could_pay_is_left_alone() -> None:
    """Where each token of a step costs the same, even true guesses gain nothing."""
    points = {1: 6.0, 8: 9.0, 16: 20.0, 32: 40.0, 64: 80.0, 128: 160.0}
    p = DraftPolicy(StepCosts(points, points), CLASSES, 8)
    assert not p.rests(1)
    assert p.state == "on"
    assert not p.is_hopeless(16), "nobody has asked yet"
    assert all(p.rests(16) for _ in range(200))
    assert p.is_hopeless(16) and not p.is_hopeless(1)
    heard: list[int] = []
    drafter: Any = SimpleNamespace(captures=0)
    speculator = Speculator(drafter, p, 8, hear=lambda batch, result: heard.append(batch.num_decode_tokens))
    for count in (16, 1, 0):  # 0 of a step that reads prompts alone
        speculator.hear(ScheduledBatch([], [], count, 0), None)
    assert heard == [1, 0], "and its states are not kept"
    assert (p.state, p.verdict(1)[0]) == ("off", "on")
    assert "16 requests" in p.reason
    assert p.observe(16, 0, 0, 20.0), "the change is news, once"
    assert not p.observe(16, 0, 0, 20.0)


def test_hope_returns_when_costs_change() -> None:
    points = {1: 6.0, 8: 48.0}
    p = DraftPolicy(StepCosts(points, points), CLASSES, 8)
    assert p.rests(1)
    for _ in range(400):  # the machine has become twice as slow at plain steps alone
        p.costs.observe(1, False, 12.0)
        p.costs.observe(2, True, 12.0)
    assert not all(p.rests(1) for _ in range(2 * HOPE_STEPS))


@pytest.mark.parametrize("seed", range(6))
def test_the_best_gain_is_that_of_every_number_of_drafts_tried(seed: int) -> None:
    rng = random.Random(seed)
    ms, points = 0.0, {}
    for n in (1, 2, 3, 4, 6, 8, 16, 32):
        ms += rng.random() * 4
        points[n] = 5 + ms
    costs, n, most, chance = StepCosts(points, points), rng.randint(1, 4), rng.randint(1, 8), 0.95
    rates = [(n + chance * k) / costs.window_ms(n + k) for k in range(1, n * most + 1)]
    gain = costs.best_gain(n, most, chance, lambda count: 0.0)
    assert gain == pytest.approx(max(rates) * costs.plain_ms(n) / n, rel=1e-9)


def test_which_kinds_of_text_get_guesses_is_told_when_it_changes() -> None:
    p = policy()
    settle(p, 0.0, evidence=2)
    settle(p, 0.97, evidence=20)
    kinds = {name: guesses for name, _, _, guesses in p.kinds(1)}
    assert kinds["prose"] == 0
    assert kinds["repetition"] == 8
    news = [p.observe(1, 0, 0, p.costs.plain_ms(1)) for _ in range(3 * TOLD_STEPS)]
    assert sum(news) == 1
    settle(p, 0.97, evidence=2)
    assert any(p.observe(1, 0, 0, p.costs.plain_ms(1)) for _ in range(2 * TOLD_STEPS))


class Sightless:
    """Looks for as long as it is told to and finds nothing."""

    name, classes, costs_time, look_is_work = "sightless", (("any", 1),), False, False
    captures = 0

    def __init__(self, look_ms: float) -> None:
        self.look_ms, self.now, self.looks = look_ms, 0.0, 0

    def look(self, requests):
        self.looks += 1
        self.now += self.look_ms / 1e3
        return [0] * len(requests)


def decoding(name: str) -> Request:
    request = Request(name, [1, 2, 3], SamplingParams())
    request.append(4, 0.0)
    request.num_computed_tokens = 3
    return request


def test_looking_in_vain_takes_half_a_hundredth_of_the_time_at_most() -> None:
    request = decoding("a")
    plain_ms = policy().costs.plain_ms(1)
    for look_ms, most in ((0.001, 400), (5 * LOOK_SHARE * plain_ms, 90)):
        drafter = Sightless(look_ms)
        s = Speculator(drafter, policy(), 4, clock_s=lambda drafter=drafter: drafter.now)
        for _ in range(400):
            s.prepare(lambda: [request])
        assert most / 1.5 < drafter.looks <= most, look_ms


def changes(p: DraftPolicy, kinds: list[int], switch_ms: float) -> int:
    """Steps whose evidence is as given, with guesses as planned; how often steps of the other kind followed."""
    drafting, count = False, 0
    for evidence in kinds:
        (guesses,) = p.plan(["a"], [evidence], 1)
        ms = p.costs.window_ms(1 + guesses) if guesses else p.costs.plain_ms(1)
        began, drafting = (guesses > 0) != drafting, guesses > 0
        count += began
        p.observe(1, guesses, 0, ms + switch_ms * began, began=began)
    return count


def test_where_changes_take_long_nobody_goes_back_and_forth() -> None:
    kinds = [20, 1] * 40  # a long copy, and nothing to go by, in turns
    swift, slow = policy(base=10.0, per_token=0.3), policy(base=10.0, per_token=0.3)
    for p in (swift, slow):
        settle(p, 0.9)
        settle(p, 0.02, evidence=1)
    assert changes(swift, kinds, 0.0) > 60
    assert changes(slow, kinds, 8.0) < 20, "until it is known what a change takes"
    assert slow.switch_ms == pytest.approx(8.0, rel=0.35)
    assert (slow.costs.plain_ms(1), slow.costs.window_ms(9)) == pytest.approx((10.3, 12.7)), "steps cost what they did"


def test_plain_steps_that_only_tell_their_cost_are_rarer_where_a_change_takes_long() -> None:
    p = policy(base=10.0, per_token=0.3)
    p.switch_ms = 10.0
    assert run(p, 2 * REFRESH_STEPS, 4, p.costs.window_ms(5)) == 2 * REFRESH_STEPS
    p.switch_ms = 0.0
    assert run(p, 2 * REFRESH_STEPS, 4, p.costs.window_ms(5)) < 2 * REFRESH_STEPS

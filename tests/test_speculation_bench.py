"""Laws of the measurement of speculation: same texts on both sides, no loop counts, pieces join, bars fail."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from strata_lab.bench import in_turns, speculation, speculation_check, speculation_report
from strata_lab.bench.drafted_texts import NUM_REQUESTS, TEXT_KINDS, TextKind, text_kind
from strata_lab.bench.harness import Environment, Spread, join_results
from strata_lab.bench.measure import RunFailed
from strata_lab.bench.speculation_check import check
from strata_lab.bench.tiny_model import write_tiny_model
from strata_lab.engine import LLMEngine
from strata_lab.events import Draft
from strata_lab.sampling_params import SamplingParams
from strata_lab.speculative.loops import MIN_TOKENS, loop_start

ECHO = TextKind("chat", "anything", lambda p, n: f"{n} ab ab ab ab", chat=False, temperature=0.9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=speculation.MAX_MODEL_LEN)


@pytest.fixture(scope="module")
def engine(folder):
    with LLMEngine(folder, device="cpu", max_num_seqs=4, num_draft_tokens=3) as made:
        yield made


def record(
    name: str, net: float, *, loops: int = 0, batch: int = 1, copies: bool = False, made_to_loop: bool = False,
    drafted_steps: float = 0.25, interval: tuple[float, float] | None = None,
    median_interval: tuple[float, float] | None = None,
):  # fmt: skip
    conditions = {"drafter": "ngram", "workload": name, "batch": batch, "copies": copies, "loops": made_to_loop}
    metrics = {
        "net": net, "net_interval": interval or (net, net),
        "net_of_median_pair_interval": median_interval or interval or (net, net), "loops": loops, "texts": 4,
        "accepted_by_position": [3, 1], "drafted_by_position": [4, 4],
        "plain_tok_s": 50.0, "output_tok_s": 50.0 * net, "tokens_per_step": 1.5, "drafted_steps": drafted_steps,
        "kinds": {},
    }  # fmt: skip
    environment = Environment({"cpu": "test", "threads": 1, "load_average": 0.0}, {"python": "3"}, "2026-01-01", "abc")
    return environment.record(
        f"speculation/ngram/{name}/x{batch}", script="s", conditions=conditions, metrics=metrics,
        spread=Spread.of([net]),
    )  # fmt: skip


def lines(*records) -> list[str]:
    return list(speculation_report.verdict_lines([r.as_dict() for r in records]))


def test_every_kind_has_twenty_different_requests() -> None:
    assert len(TEXT_KINDS) == 10
    for kind in TEXT_KINDS:
        assert len({json.dumps(kind.prompt(n)) for n in range(NUM_REQUESTS)}) == NUM_REQUESTS, kind.name
        with pytest.raises(ValueError, match="0 to 19"):
            kind.prompt(NUM_REQUESTS)
    with pytest.raises(ValueError, match="try 'edit'"):
        text_kind("poem")


def test_a_loop_begins_where_its_first_round_does() -> None:
    head = list(range(100, 130))
    assert loop_start([*head, *[1, 2, 3] * 30]) == len(head)
    assert loop_start(head) == len(head)
    assert loop_start([5] * (MIN_TOKENS - 1)) == MIN_TOKENS - 1, "too short to tell"


def test_texts_are_cut_before_they_go_round_unless_loops_are_the_workload(monkeypatch) -> None:
    texts = [[*range(n), *[7] * 60] for n in range(10, 10 + NUM_REQUESTS)]
    monkeypatch.setattr(
        speculation, "run_all", lambda engine, prompts, params: [SimpleNamespace(token_ids=t) for t in texts]
    )
    lengths = speculation.usable_lengths(None, ECHO, 96)
    assert lengths == {i: n for i, n in enumerate(range(10, 30)) if n >= speculation.MIN_TOKENS}
    assert list(lengths.values()) == sorted(lengths.values(), reverse=True)
    looping = TextKind("loop", "", lambda p, n: "", loops=True)
    assert speculation.usable_lengths(None, looping, 96) == {i: len(t) for i, t in enumerate(texts)}


def test_requests_of_like_lengths_run_together_and_end_together() -> None:
    lengths = {4: 50, 1: 40, 0: 30, 3: 20, 2: 10}
    assert speculation.groups_of(lengths, 2) == [([4, 1], 40), ([0, 3], 20)]
    assert speculation.groups_of({5: 9, 6: 8}, 4) == [([5, 6, 5, 6], 8)]


def test_a_record_says_what_was_gained_and_what_came_true_of_the_same_texts(engine) -> None:
    made = list(speculation.measure(engine, {"chat": [1, 2]}, "ngram", 0.1, 24))
    assert [r.name for r in made] == ["speculation/ngram/chat/x1", "speculation/ngram/chat/x2"]
    for r in made:
        m = r.metrics
        assert m["different_texts"] == 0
        assert m["net_interval"][0] <= m["net"] <= m["net_interval"][1]
        assert m["net"] == pytest.approx(m["output_tok_s"] / m["plain_tok_s"])
        assert m["pairs"] + m["pairs_disturbed"] > 2
        assert 1 <= m["warm_ups"] <= speculation.WARM_UPS
        assert m["costs_ms"]["plain"]["1"] > 0.0
        assert sum(kind["drafted"] for kind in m["kinds"].values()) == sum(m["drafted_by_position"])
        assert m["texts"] % r.conditions["batch"] == 0
        assert m["state"] in ("on", "off") and m["reason"]
        assert m["drafted_steps"] == 1.0 or m["policy_us"] > 0
    assert engine.optimizations.speculative == "none"
    assert not engine.alive and engine.stats().kv_blocks_used == 0


def segment(*ms: float, size: int = 1, tokens: int = 0) -> in_turns.Segment:
    return in_turns.Segment((size,) * len(ms), sum(ms), tokens or len(ms))


def test_both_sides_compute_the_same_texts_in_turns_and_nobody_sees_the_other(engine) -> None:
    kind = dataclasses.replace(ECHO, temperature=0.0)  # greedy texts of a small model go round
    prompts, wishes = [kind.prompt(n) for n in range(4)], [kind.params(n, 48) for n in range(4)]
    wishes = [dataclasses.replace(wish, ignore_eos=True) for wish in wishes]
    off, on = speculation.settings_of(engine, "ngram")
    drafted = dataclasses.replace(on, speculation=in_turns.Clocked(on.speculation))
    on.speculation.policy, policy = None, on.speculation.policy
    turns = in_turns.Turns(*(in_turns.Side(engine, parts, prompts, wishes) for parts in (off, drafted))).run()
    on.speculation.policy = policy
    assert turns.off.texts == turns.on.texts and {len(text) for text in turns.on.texts} == {48}
    assert all(not step.drafts for step in turns.off.steps) and any(step.drafts for step in turns.on.steps)
    assert {step.num_decode_tokens for step in turns.off.steps} == {4}
    assert len(drafted.speculation.ms) == len(turns.on.steps)
    whole = [pair for pair in turns.pairs if pair.on.tokens]
    assert len(whole) > 2
    turns.off.forget()
    turns.on.forget()


@dataclasses.dataclass(frozen=True)
class Bare:
    """Of an engine's parts what tells captures."""

    runner: SimpleNamespace
    speculation: SimpleNamespace


@pytest.mark.parametrize(("capturing", "runs"), [(0, 1), (1, 2), (2, 3), (9, 3)])
def test_a_place_is_warmed_up_until_nothing_new_is_captured(monkeypatch, capturing: int, runs: int) -> None:
    parts = Bare(SimpleNamespace(captures=7), SimpleNamespace(captures=2))
    seen: list[tuple[list[int], int]] = []

    def one_group(engine, kind, numbers, length, settings):
        seen.append((numbers, length))
        parts.runner.captures += len(seen) <= capturing

    monkeypatch.setattr(speculation, "one_group", one_group)
    groups = [([0], 9), ([1], 8)]
    assert speculation.warm_up(None, ECHO, groups, (parts, parts)) == runs == len(seen)
    assert seen == (groups * 2)[:runs]


def test_every_place_begins_with_a_policy_that_has_learned_nothing(engine) -> None:
    settings = speculation.settings_of(engine, "ngram")
    fresh, judge = speculation.untaught(settings), settings[1].speculation.policy
    speculation.one_group(engine, dataclasses.replace(ECHO, temperature=0.0), [0, 1], 24, fresh)
    learned = fresh[1].speculation.policy
    assert learned.costs.points() != judge.costs.points()
    assert speculation.untaught(settings)[1].speculation.policy.costs.points() == judge.costs.points()
    times = SimpleNamespace(ms=1.0)
    parts = Bare(SimpleNamespace(), SimpleNamespace(policy=SimpleNamespace(draft_ms=times), times=times))
    made = speculation.untaught((parts, parts))[1].speculation
    assert made.times is not times and made.policy.draft_ms is made.times, "what is measured is what is planned with"


@pytest.mark.parametrize(("device", "counted"), [("cpu", 3), ("cuda", 1)])
def test_on_a_card_no_pair_counts_in_which_something_was_captured(device: str, counted: int) -> None:
    class Scripted:
        def __init__(self, *captures: int) -> None:
            self.engine, self.left = SimpleNamespace(device=SimpleNamespace(type=device)), list(captures)

        @property
        def finished(self) -> bool:
            return not self.left

        def advance(self, until: int) -> in_turns.Segment:
            return in_turns.Segment((1,), 5.0, 1, captures=self.left.pop(0))

    turns = in_turns.Turns(Scripted(0, 2, 0), Scripted(1, 0, 0)).run()
    assert (len(turns.pairs), turns.pairs_capturing) == (counted, 3 - counted)


def test_a_pair_of_which_one_side_took_too_long_counts_on_neither() -> None:
    calm = [in_turns.Pair(segment(10, 10), segment(10, 11)) for _ in range(9)]
    verifying = in_turns.Pair(segment(10, 10), segment(30, size=5, tokens=4))
    found = [*calm, verifying, in_turns.Pair(segment(10, 26), segment(10, 10)), in_turns.Pair(segment(9), segment(99))]
    assert in_turns.undisturbed_pairs(found) == [*calm, verifying]
    assert in_turns.speed_ratio(calm) == pytest.approx(20 / 21)
    assert verifying.ratio == pytest.approx(4 / 30 * 10)


def test_an_interval_holds_what_like_pairs_say_and_narrows_with_their_number() -> None:
    dice = random.Random(1)

    def pairs(count: int) -> list[in_turns.Pair]:
        return [in_turns.Pair(segment(dice.gauss(10, 1)), segment(dice.gauss(12.5, 1))) for _ in range(count)]

    few, many = (in_turns.ratio_interval(pairs(n)) for n in (20, 500))
    assert few[0] < many[0] < 0.8 < many[1] < few[1]
    assert many[1] - many[0] < 0.03


def test_a_check_drafts_in_every_step_and_says_how_near_the_tokens_are_where_texts_part(engine, monkeypatch) -> None:
    (made,) = check(engine, [ECHO], "ngram", 32, speculation.conditions, "s")
    assert (made.metrics["texts"], made.metrics["different_texts"]) == (NUM_REQUESTS, 0)
    assert made.metrics["drafted_tokens"] > 0
    assert speculation.settings_of(engine, "ngram")[1].speculation.policy is not None, "put back"
    real, calls = speculation_check.run_all, []

    def wrong(engine, prompts, params):
        outputs = real(engine, prompts, params)
        calls.append(outputs)
        if len(calls) == 2:  # the second side of the first check
            right = outputs[3].token_ids
            other = next(t for t in likeliest if t != right[5])
            outputs[3] = dataclasses.replace(outputs[3], token_ids=(*right[:5], other, *right[6:]))
        return outputs

    asked = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
    likeliest = real(engine, [ECHO.prompt(3)], [asked])[0].logprobs[5].top
    monkeypatch.setattr(speculation_check, "run_all", wrong)
    (made,) = check(engine, [ECHO], "ngram", 32, speculation.conditions, "s")
    assert made.metrics["different_texts"] == 1
    (found,) = made.metrics["differences"]
    assert (found["request"], found["token"]) == (3, 5)
    best, second = sorted(likeliest.values())[-1:-3:-1]
    assert found["logit_gap"] == pytest.approx(best - second, abs=1e-3)


def test_drafts_of_loops_are_told_apart_in_the_figures() -> None:
    drafts = Draft("a", 0, (1, 2), 2, "code", True), Draft("a", 3, (1,), 1, "prose")
    pair = in_turns.Pair(segment(10, 10), segment(20, size=3, tokens=3))
    one = speculation.Group((pair,), 40.0, 20.0, ((1, 2),), ((1, 2),), drafts, 2, 1, 2, 4, ((0.5, 10.0),))
    m = speculation.figures([one, one])
    assert (m["net"], m["net_until_last"]) == (pytest.approx(1.5), 2.0)
    assert (m["tokens_per_step"], m["drafted_steps"], m["acceptance_rate"]) == (2.0, 0.5, 1.0)
    assert m["loop_share"] == pytest.approx(2 / 3)
    assert m["kinds"]["code"] == {"windows": 2, "drafted": 4, "accepted": 4}
    assert (m["policy_share"], m["policy_us"]) == (0.05, 500.0)


def test_groups_with_a_text_that_loops_count_only_where_loops_are_measured() -> None:
    fast, slow = (in_turns.Pair(segment(40, 10), segment(ms, size=3, tokens=3)) for ms in (20, 40))
    text, loop = tuple(range(60)), tuple(range(10)) + (7, 8) * 30
    on = speculation.Group((fast,), 40.0, 20.0, (text,), (loop,), (), 2, 1, 2, 4)
    off = dataclasses.replace(on, off_texts=(loop,), on_texts=(text,))
    good = dataclasses.replace(on, pairs=(slow,), on_texts=(text,))
    m = speculation.figures([on, good, off])
    assert m["net"] == speculation.figures([good])["net"] < speculation.figures([on, good, off], loops=True)["net"]
    assert (m["loops"], m["groups_looping"], m["texts"]) == (0, 2, 1)
    with pytest.raises(RunFailed, match="no text looped"):
        speculation.figures([on, off])


def test_a_place_is_missed_only_if_it_surely_is_and_reached_only_if_it_surely_is() -> None:
    good = [record("edit", 1.4, copies=True), record("chat", 0.98)]
    assert [line.split()[0] for line in lines(*good)] == ["reached", "reached"]
    slow = lines(*good, record("prose", 0.95, batch=8, interval=(0.93, 0.96)))
    assert slow[1].startswith("MISSED") and "prose x8 0.950 (0.93 to 0.96)" in slow[1] and "2 of 3" in slow[1]
    hidden = lines(*good, record("prose", 0.95, interval=(0.93, 0.96), median_interval=(0.99, 1.0)))
    assert "below: prose" in hidden[1], "most pairs lose nothing and some lose much"
    unsure = lines(*good, record("prose", 0.96, batch=8, interval=(0.93, 0.99)))
    assert unsure[1].startswith("MISSED") and "below" not in unsure[1].split(":", 1)[1]
    assert unsure[2].startswith("undecided") and "prose x8" in unsure[2]
    assert lines(record("edit", 1.25, copies=True))[0].startswith("MISSED")
    idle = lines(*good, record("code", 0.95, batch=16, drafted_steps=0.0))
    assert "code x16 0.950 (0.95 to 0.95, no drafts)" in idle[1]
    assert idle[2].startswith("beside") and "0.950 to 0.950" in idle[2]


def test_loops_must_be_flagged_where_they_are_made_and_be_nowhere_else() -> None:
    loop = record("loop", 3.0, loops=2, made_to_loop=True)
    assert lines(loop, record("edit", 1.4, copies=True))[2].startswith("reached")
    assert lines(loop, record("edit", 1.4, loops=1, copies=True))[2].startswith("MISSED")
    assert lines(record("loop", 3.0, made_to_loop=True))[-1].startswith("MISSED"), "none was seen"
    assert "1.40" in lines(loop, record("edit", 1.4, copies=True))[0], "the loop's 3.0 is no part of it"


def test_pieces_of_a_run_join_and_what_is_measured_anew_replaces(tmp_path: Path) -> None:
    join_results("s", [record("edit", 1.4), record("chat", 0.9)], tmp_path)
    path = join_results("s", [record("chat", 1.0), record("prose", 1.1)], tmp_path)
    found = json.loads(path.read_text())
    assert [(r["conditions"]["workload"], r["metrics"]["net"]) for r in found] == [
        ("edit", 1.4), ("chat", 1.0), ("prose", 1.1),
    ]  # fmt: skip
    assert found[0]["spread"] == {"runs": 1, "min": 1.4, "median": 1.4, "max": 1.4}


def test_the_command_adds_to_its_file_and_shows_table_and_bars(folder, tmp_path: Path, capsys) -> None:
    common = ["--model", str(folder), "--device", "cpu", "--workloads", "prose", "--results", str(tmp_path)]
    common += ["--name", "s", "--missing"]
    measured = [*common, "--place-s", "0.1", "--tokens", "20", "--batches"]
    assert speculation.main([*measured, "1,2", "--limit-s", "0"]) == 0
    first = (tmp_path / "s.json").read_text()
    assert [r["name"] for r in json.loads(first)] == ["speculation/ngram/prose/x1"], "no other was begun"
    assert speculation.main([*measured, "1"]) == 0
    assert (tmp_path / "s.json").read_text() == first, "nothing is missing"
    assert speculation.main([*common, "--check", "--tokens", "8"]) == 0
    found = json.loads((tmp_path / "s.json").read_text())
    assert [r["name"] for r in found] == ["speculation/ngram/prose/x1", "speculation/ngram/prose/greedy"]
    shown = capsys.readouterr().out
    assert "prose (ngram)" in shown
    assert "reached  greedy texts are those without drafts: 20 of 20" in shown


def test_the_table_has_a_row_per_text_and_a_column_per_batch_size(capsys) -> None:
    from rich.console import Console

    records = [record("edit", 1.4), record("edit", 1.1, batch=4), record("chat", 0.98)]
    Console(width=160).print(speculation_report.text_table([r.as_dict() for r in records]))
    shown = capsys.readouterr().out
    assert "1.40" in shown and "1.10" in shown and "x4" in shown and "75 25" in shown

"""Laws of the measurement of speculation: same texts on both sides, no loop counts, pieces join, bars fail."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from strata_lab.bench import speculation, speculation_report
from strata_lab.bench.drafted_texts import NUM_REQUESTS, TEXT_KINDS, TextKind, text_kind
from strata_lab.bench.harness import Environment, Spread, join_results
from strata_lab.bench.tiny_model import write_tiny_model
from strata_lab.engine import LLMEngine
from strata_lab.events import Draft
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
    drafted_steps: float = 0.25,
):  # fmt: skip
    conditions = {"drafter": "ngram", "workload": name, "batch": batch, "copies": copies, "loops": made_to_loop}
    metrics = {
        "net": net, "loops": loops, "texts": 4, "accepted_by_position": [3, 1], "drafted_by_position": [4, 4],
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


def test_texts_are_cut_before_they_go_round_unless_loops_are_the_workload() -> None:
    texts = [[*range(n), *[7] * 60] for n in range(10, 10 + NUM_REQUESTS)]
    fake = SimpleNamespace(generate=lambda prompts, params: [SimpleNamespace(token_ids=t) for t in texts])
    lengths = speculation.usable_lengths(fake, ECHO, 96)
    assert lengths == {i: n for i, n in enumerate(range(10, 30)) if n >= speculation.MIN_TOKENS}
    looping = TextKind("loop", "", lambda p, n: "", loops=True)
    assert speculation.usable_lengths(fake, looping, 96) == {i: len(t) for i, t in enumerate(texts)}


def test_a_record_says_what_was_gained_and_what_came_true_of_the_same_texts(engine) -> None:
    made = list(speculation.measure(engine, [ECHO], [1, 2], "ngram", 1, 24))
    assert [r.name for r in made] == ["speculation/ngram/chat/x1", "speculation/ngram/chat/x2"]
    for r in made:
        m = r.metrics
        assert m["different_texts"] == 0
        assert m["net"] == m["net_by_round"][0] == pytest.approx(m["output_tok_s"] / m["plain_tok_s"], rel=0.5)
        assert sum(kind["drafted"] for kind in m["kinds"].values()) == sum(m["drafted_by_position"])
        assert m["texts"] == r.conditions["batch"]
        assert m["state"] in ("on", "off") and m["reason"]
    assert engine.optimizations.speculative == "none", "A/B/A ends on A"


def test_a_check_drafts_in_every_step_and_names_the_request_that_differs(engine, monkeypatch, capsys) -> None:
    (made,) = speculation.check(engine, [ECHO], "ngram", 32)
    assert (made.metrics["texts"], made.metrics["different_texts"]) == (NUM_REQUESTS, 0)
    assert made.metrics["drafted_tokens"] > 0
    policy = engine._loop.parts.speculation.policy
    assert policy is not None, "put back"
    real, calls = engine.generate, []

    def wrong(prompts, params):
        outputs = real(prompts, params)
        calls.append(outputs)
        if len(calls) == 2:
            other = [*outputs[3].token_ids[:5], -1, *outputs[3].token_ids[6:]]
            outputs[3] = SimpleNamespace(token_ids=tuple(other))
        return outputs

    monkeypatch.setattr(engine, "generate", wrong)
    (made,) = speculation.check(engine, [ECHO], "ngram", 32)
    assert made.metrics["different_texts"] == 1
    assert "chat 3: token 5 is" in capsys.readouterr().err


def test_drafts_of_loops_are_told_apart_in_the_figures() -> None:
    one = speculation.Pass(10.0, 9.0, ((1, 2),), (), 4, 0, 4, 4)
    two = speculation.Pass(
        15.0, 18.0, ((1, 2),), (Draft("a", 0, (1, 2), 2, "code", True), Draft("a", 3, (1,), 1, "prose")), 2, 2, 2, 4
    )
    m = speculation.figures([[one, one]], [two])
    assert (m["net_by_round"], m["net_until_last"]) == ([1.5], 2.0)
    assert (m["tokens_per_step"], m["drafted_steps"], m["acceptance_rate"]) == (2.0, 1.0, 1.0)
    assert m["loop_share"] == pytest.approx(2 / 3)
    assert m["kinds"]["code"] == {"windows": 1, "drafted": 2, "accepted": 2}


def test_bars_are_missed_by_any_text_that_is_slower_and_by_copies_that_gain_too_little() -> None:
    good = [record("edit", 1.4, copies=True), record("chat", 0.98)]
    assert [line.split()[0] for line in lines(*good)] == ["reached", "reached"]
    slow = lines(*good, record("prose", 0.96, batch=8))
    assert slow[1].startswith("MISSED") and "prose x8 0.960" in slow[1]
    assert lines(record("edit", 1.25, copies=True))[0].startswith("MISSED")
    idle = lines(*good, record("code", 0.95, batch=16, drafted_steps=0.0))
    assert "code x16 without drafts 0.950" in idle[1]
    assert idle[2].startswith("beside") and "0.95 to 0.95" in idle[2]


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
    common += ["--name", "s"]
    assert speculation.main([*common, "--batches", "1", "--rounds", "1", "--tokens", "20"]) == 0
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

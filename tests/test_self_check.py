"""`strata validate --deep`: equal models show no difference, damaged ones are flagged, the page is one safe file."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from strata_lab.bench.self_check import (
    ANSWER_TOKENS,
    CYCLES,
    LONGEST_CYCLE,
    PROMPTS,
    Answer,
    SelfCheck,
    divergence,
    flags_of,
    self_check,
    texts,
)
from strata_lab.bench.self_check_report import html_page
from strata_lab.models.errors import CheckpointError
from strata_lab.quant.quality import Comparison
from tests.checkpoints import write_checkpoint

GEOMETRY = {"max_position_embeddings": 256, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def source(tmp_path_factory: Any) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source") / "source", "llama", **GEOMETRY)[0]


@pytest.fixture(scope="module")
def same(source: Path) -> SelfCheck:
    return self_check(str(source), str(source))


@pytest.fixture(scope="module")
def ruined(source: Path, tmp_path_factory: Any) -> SelfCheck:
    """The head says nothing: every token is as likely as every other, and greedy takes the first for ever."""
    folder = tmp_path_factory.mktemp("ruined") / "ruined"
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["lm_head.weight"].zero_()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return self_check(str(source), str(folder))


def test_a_model_beside_itself_shows_no_difference(same: SelfCheck) -> None:
    assert list(same.languages) == ["English", "Chinese"]
    for found in same.languages.values():
        assert found.tokens > 1000
        assert (found.mean_kl, found.top1_agreement) == (0.0, 1.0)
        assert found.perplexity == found.reference_perplexity > 1.0
    assert [a.prompt for a in same.answers] == list(PROMPTS)
    assert all(a.divergence is None and a.source == a.candidate for a in same.answers)


def test_a_ruined_model_is_measured_and_flagged(ruined: SelfCheck) -> None:
    for found in ruined.languages.values():
        assert found.perplexity == pytest.approx(320.0, rel=1e-4)  # as many as there are tokens
        assert found.mean_kl > 0.1 and found.top1_agreement < 0.2
    assert all(a.divergence is not None and "repeats its last token" in a.flags for a in ruined.answers)
    assert len(ruined.flags) >= len(PROMPTS)
    assert any(PROMPTS[0] in flag for flag in ruined.flags)


def test_progress_ends_at_one_and_never_goes_back(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from strata_lab.bench import self_check as module

    monkeypatch.setattr(module, "texts", lambda: {"English": "hello " * 20, "Chinese": "你好" * 20})
    seen: list[float] = []
    self_check(str(source), str(source), lambda text, done: seen.append(done))
    assert seen == sorted(seen) and seen[0] == 0.0 and seen[-1] == 1.0


def test_models_of_two_vocabularies_are_refused(source: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", "llama", vocab_size=288, **GEOMETRY)[0]
    with pytest.raises(CheckpointError, match="a vocabulary of 288, .* of 320"):
        self_check(str(source), str(other))


def test_a_source_without_tokenizer_is_refused(tmp_path: Path) -> None:
    bare = write_checkpoint(tmp_path / "bare", "llama", tokenizer=False, **GEOMETRY)[0]
    with pytest.raises(CheckpointError, match="no tokenizer"):
        self_check(str(bare), str(bare))


def test_models_with_few_positions_are_compared_on_shorter_pieces(tmp_path: Path) -> None:
    short = write_checkpoint(tmp_path / "short", "llama", max_position_embeddings=192, num_hidden_layers=1)[0]
    assert self_check(str(short), str(short)).languages["English"].mean_kl == 0.0


def test_the_text_is_divided_by_language() -> None:
    found = texts()
    assert list(found) == ["English", "Chinese"]
    share = {name: len(re.findall(r"[\u4e00-\u9fff]", text)) / len(text) for name, text in found.items()}
    assert share["English"] < 0.05 and share["Chinese"] > 0.5
    assert all("---" not in text.splitlines() for text in found.values())


# -- what is measured on two texts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "other", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 5, 3], 1), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1], 1),
        ([], [], None), ([], [4], 0),
    ],
)  # fmt: skip
def test_divergence_is_the_first_token_that_differs(ids: list[int], other: list[int], expected: int | None) -> None:
    assert divergence(ids, other) == expected


@pytest.mark.parametrize("cycle", [1, 2, 7, LONGEST_CYCLE])
def test_a_text_that_ends_in_circles_is_flagged(cycle: int) -> None:
    circle = list(range(cycle))
    said = "token" if cycle == 1 else f"{cycle} tokens"
    assert flags_of([99, 98, *circle * CYCLES], 64, False, False) == (f"repeats its last {said}",)
    assert flags_of([99, 98, *circle * CYCLES, 77], 64, False, False) == ()
    if cycle > 1:
        assert flags_of([99, 98, *circle * (CYCLES - 1)], 64, False, False) == ()


def test_a_circle_longer_than_looked_for_is_not_flagged() -> None:
    assert flags_of(list(range(LONGEST_CYCLE + 1)) * CYCLES, 64, False, False) == ()


def test_an_answer_that_stops_too_early_or_never_is_flagged() -> None:
    text = list(range(ANSWER_TOKENS))
    assert flags_of(text[:9], 20, True, True) == ("ends after 9 tokens, its source after 20",)
    assert flags_of(text[:10], 20, True, True) == ()
    assert flags_of(text[:9], 20, True, False) == ("does not come to an end",)
    assert flags_of(text, 64, False, False) == flags_of(text, 64, False, True) == ()


# -- the page ---------------------------------------------------------------------------------------------------------


def page(**changes: Any) -> str:
    numbers = {"English": Comparison(1234, 23.75, 24.125, 0.0155, 0.926)}
    answer = Answer("2 < 3 & 4?", "<script>alert(1)</script>\nyes", "no & <b>no</b>", 3, ("repeats its last token",))
    parts = {"source": "a<b>", "candidate": "c&d", "languages": numbers, "answers": (answer,)} | changes
    return html_page(SelfCheck(**parts))


def test_the_page_needs_nothing_but_itself(same: SelfCheck, ruined: SelfCheck) -> None:
    for text in (page(), html_page(same), html_page(ruined)):
        assert text.startswith("<!doctype html>") and text.endswith("</html>\n")
        for outside in ("http", "src=", "href=", "@import", "url(h", "url(/"):
            assert outside not in text, outside


def test_model_text_is_escaped_and_keeps_its_lines() -> None:
    text = page()
    assert "<script" not in text and "<b>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;<br>yes" in text
    assert "<title>c&amp;d beside a&lt;b&gt;</title>" in text
    assert "2 &lt; 3 &amp; 4?" in text


def test_the_page_shows_the_numbers_it_was_given() -> None:
    cells = [unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", page())]
    assert cells[:6] == ["1234", "23.750", "24.125", "+0.375", "0.0155", "92.6%"]
    assert cells[-2:] == ["3", "repeats its last token"]
    assert "<ul><li>repeats its last token: &#x27;2 &lt; 3 &amp; 4?&#x27;</li></ul>" in page()


def test_a_page_without_flags_says_so() -> None:
    text = page(answers=(Answer("q", "a", "a", None, ()),))
    assert "No answer goes in circles" in text and "<td>none</td>" in text

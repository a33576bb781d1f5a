"""Laws of streaming text: pieces add up to decoding everything, and nothing said is ever taken back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from strata_lab.detokenizer import Detokenizer
from strata_lab.models import hub
from strata_lab.models.loader import open_checkpoint
from strata_lab.sampling_params import SamplingParams
from strata_lab.tokenizer import Tokenizer
from tests.checkpoints import byte_level_backend

DEFAULT = hub.find_model("smollm2-135m")
needs_default = pytest.mark.skipif(DEFAULT is None, reason=f"the default model is not installed: {hub.how_to_get()}")
REPLACEMENT = "\ufffd"
NASTY = (
    "na\u00efve \u65e5\u672c\u8a9e \U0001f469\u200d\U0001f680 hello \u0645\u0631\u062d\u0628\u0627 e\u0301 \n\n\t wo"
)


def sentencepiece_backend() -> Backend:
    """A tokenizer built like Llama 2's: spaces as U+2581, bytes as <0x..> tokens, the first space stripped."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    tokens += ["\u2581", "\u2581hello", "\u2581wo", "he", "l", "o", ".", "\u65e5", "\u2581\u2581", "\ufffd"]
    added = [
        {"id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i in range(3)
    ]  # fmt: skip
    decoder = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    model = {"type": "BPE", "unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True, "merges": [],
             "vocab": {token: i for i, token in enumerate(tokens)}}  # fmt: skip
    parts = {"normalizer": None, "pre_tokenizer": None, "post_processor": None, "truncation": None, "padding": None}
    content = {"version": "1.0", **parts, "added_tokens": added, "model": model,
               "decoder": {"type": "Sequence", "decoders": decoder}}  # fmt: skip
    return Backend.from_str(json.dumps(content))


BYTE_LEVEL = Tokenizer(byte_level_backend())
SENTENCEPIECE = Tokenizer(sentencepiece_backend())
# Ids that make trouble: mostly bytes of multi-byte characters, some words, special tokens, ids that do not exist.
BYTE_IDS = st.lists(st.integers(0, 266), max_size=30)
PIECES = st.sampled_from([3 + b for b in (0x41, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80)])
SENTENCEPIECE_IDS = st.lists(st.integers(0, 270) | PIECES | st.integers(259, 268), max_size=30)
TEXT_IDS = st.text(max_size=12).map(BYTE_LEVEL.encode)


def cut(text: str, stops: tuple[str, ...], include: bool) -> str:
    """The text up to the stop string that is complete first (the longest of those that end together)."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            return text[: end if include else end - len(max(found, key=len))]
    return text


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int] = [], **params) -> tuple[list[str], Detokenizer]:  # noqa: B006
    """Pieces of pushing every token, then of flushing."""
    detokenizer = Detokenizer(tokenizer, prompt, SamplingParams(**params))
    pieces = [detokenizer.push(token_id) for token_id in ids]
    return [*pieces, detokenizer.flush()], detokenizer


def stops_for(data, text: str) -> tuple[str, ...]:
    """Stop strings that have a chance to occur: parts of the text, single characters, and ones that do not occur."""
    part = st.tuples(st.integers(0, len(text)), st.integers(1, 4)).map(lambda x: text[x[0] : x[0] + x[1]])
    return tuple(s for s in data.draw(st.lists(part | st.text(min_size=1, max_size=3), max_size=3)) if s)


def check_law(tokenizer: Tokenizer, ids: list[int], data) -> None:
    skip, include = data.draw(st.booleans()), data.draw(st.booleans())
    everything = tokenizer.decode(ids, skip_special_tokens=skip)
    stops = stops_for(data, everything)
    pieces, detokenizer = stream(
        tokenizer, ids, stop=stops, skip_special_tokens=skip, include_stop_str_in_output=include
    )
    assert "".join(pieces) == detokenizer.text == cut(everything, stops, include)
    assert detokenizer.stopped == any(s in everything for s in stops)


# -- the law ----------------------------------------------------------------------------------------------------------


@given(BYTE_IDS | TEXT_IDS, st.data())
@settings(deadline=None, max_examples=250)
def test_pieces_add_up_to_decoding_everything_for_byte_level_tokens(ids, data) -> None:
    check_law(BYTE_LEVEL, ids, data)


@given(SENTENCEPIECE_IDS, st.data())
@settings(deadline=None, max_examples=250)
def test_pieces_add_up_to_decoding_everything_for_sentencepiece_tokens(ids, data) -> None:
    check_law(SENTENCEPIECE, ids, data)


@pytest.fixture(scope="module")
def default() -> Tokenizer:
    """The default model's tokenizer."""
    tokenizer = open_checkpoint("smollm2-135m").tokenizer()
    assert tokenizer is not None
    return tokenizer


@needs_default
@given(st.lists(st.integers(0, 49151), max_size=25), st.data())
@settings(deadline=None, max_examples=150)
def test_pieces_add_up_to_decoding_everything_for_the_default_model(default, ids, data) -> None:
    check_law(default, ids, data)


@given(st.text(max_size=30))
@settings(deadline=None, max_examples=150)
def test_no_piece_has_half_a_character(text) -> None:
    pieces, _ = stream(BYTE_LEVEL, BYTE_LEVEL.encode(text), skip_special_tokens=False)
    assert "".join(pieces) == text
    assert all(piece.count(REPLACEMENT) <= text.count(REPLACEMENT) for piece in pieces)
    assert pieces[-1] == "", "a whole text leaves nothing to flush"


@given(SENTENCEPIECE_IDS, st.lists(st.integers(259, 267), min_size=1, max_size=12))
@settings(deadline=None, max_examples=150)
def test_sentencepiece_text_continues_its_prompt(ids, prompt) -> None:
    """The space that begins a word is only dropped at the very beginning of a text."""
    before = SENTENCEPIECE.decode(prompt)
    pieces, _ = stream(SENTENCEPIECE, ids, prompt)
    assert before + "".join(pieces) == SENTENCEPIECE.decode(prompt + ids)


# -- by example -------------------------------------------------------------------------------------------------------


def test_a_character_appears_with_its_last_byte() -> None:
    pieces, _ = stream(BYTE_LEVEL, BYTE_LEVEL.encode("a\U0001f600b"))
    assert pieces == ["a", "", "", "", "\U0001f600", "b", ""]


def test_an_unfinished_character_is_a_replacement_at_the_very_end_only() -> None:
    pieces, _ = stream(BYTE_LEVEL, BYTE_LEVEL.encode("a\U0001f600")[:-1])
    assert pieces == ["a", "", "", "", REPLACEMENT]


def test_a_run_of_bytes_waits_for_its_end_where_one_bad_byte_spoils_it() -> None:
    euro, bad, dot = [3 + 0xE2, 3 + 0x82, 3 + 0xAC], 3 + 0xFF, SENTENCEPIECE.backend.token_to_id(".")
    assert stream(SENTENCEPIECE, [*euro, dot])[0] == ["", "", "", "\u20ac.", ""]
    assert stream(SENTENCEPIECE, [*euro, bad, dot])[0] == ["", "", "", "", REPLACEMENT * 4 + ".", ""]


def test_a_stop_string_may_be_spread_over_tokens() -> None:
    ids = BYTE_LEVEL.encode("one STOP two")
    pieces, detokenizer = stream(BYTE_LEVEL, ids, stop="STOP")
    assert ("".join(pieces), detokenizer.stopped) == ("one ", True)
    assert pieces[:4] == ["o", "n", "e", " "], "what cannot begin the stop string is said at once"


def test_what_only_looked_like_a_stop_string_is_said_after_all() -> None:
    pieces, detokenizer = stream(BYTE_LEVEL, BYTE_LEVEL.encode("aabaac"), stop="aabaab")
    assert ("".join(pieces), detokenizer.stopped) == ("aabaac", False)
    pieces, _ = stream(BYTE_LEVEL, BYTE_LEVEL.encode("xST"), stop="STOP")
    assert pieces == ["x", "", "", "ST"]


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (("cd", "b"), "a"),  # the earlier one
        (("abcd", "bc"), "a"),  # the one that is complete first
        (("c", "bc", "abc"), ""),  # of those that end together the longest
        (("d", "e"), "abc"),
    ],
)
def test_of_several_stop_strings_the_first_to_be_complete_counts(stops, expected) -> None:
    for order in (stops, stops[::-1]):
        assert stream(BYTE_LEVEL, BYTE_LEVEL.encode("abcde"), stop=order)[1].text == expected


def test_one_token_with_a_stop_string_inside_stops_like_many() -> None:
    hello = BYTE_LEVEL.encode("hello")
    assert len(hello) == 1
    assert stream(BYTE_LEVEL, hello, stop="ll")[0] == ["he", ""]
    assert stream(BYTE_LEVEL, hello, stop="ll", include_stop_str_in_output=True)[0] == ["hell", ""]


def test_after_a_stop_nothing_is_said() -> None:
    _, detokenizer = stream(BYTE_LEVEL, BYTE_LEVEL.encode("a.b"), stop=".")
    assert [detokenizer.push(70), detokenizer.flush(), detokenizer.text] == ["", "", "a"]


def test_flushing_twice_says_it_once() -> None:
    for tokenizer, unfinished in ((BYTE_LEVEL, BYTE_LEVEL.encode("\u20ac")[0]), (SENTENCEPIECE, 3 + 0xE2)):
        pieces, detokenizer = stream(tokenizer, [unfinished], stop="zz")
        assert pieces == ["", REPLACEMENT]
        assert (detokenizer.flush(), detokenizer.text) == ("", REPLACEMENT)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
def test_special_tokens_are_said_on_request_only(tokenizer) -> None:
    ids = [1, tokenizer.backend.token_to_id("o"), 2]
    assert stream(tokenizer, ids)[0] == ["", "o", "", ""]
    assert "".join(stream(tokenizer, ids, skip_special_tokens=False)[0]) == tokenizer.decode(
        ids, skip_special_tokens=False
    )


def test_the_work_per_token_does_not_grow_with_the_text(monkeypatch) -> None:
    """The longest decode in a text of 3,000 tokens is no longer than a few tokens."""
    longest = 0
    decode = Tokenizer.decode

    def counted(self, ids, **options) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(self, ids, **options)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    ids = [SENTENCEPIECE.backend.token_to_id(t) for t in ("\u2581hello", ".", "\u65e5", "\ufffd", "<0x41>", "o")]
    for tokenizer, text in ((SENTENCEPIECE, ids * 500), (BYTE_LEVEL, list(range(260)) * 12)):
        stream(tokenizer, text, stop=("zzz", "hellohello"))
        assert longest <= 16


def test_a_long_stop_string_does_not_slow_down_the_rest() -> None:
    """Looking for the beginning of a stop string costs about its own length, whatever the text repeats."""
    stop = "a" * 50_000 + "b"
    pieces, _ = stream(BYTE_LEVEL, BYTE_LEVEL.encode("a" * 300 + "c"), stop=stop)
    assert pieces[-2:] == ["a" * 300 + "c", ""]


def test_nasty_text_streams_whole() -> None:
    pieces, detokenizer = stream(BYTE_LEVEL, BYTE_LEVEL.encode(NASTY))
    assert "".join(pieces) == detokenizer.text == NASTY

"""Laws of what ends a text or may not be said: stop strings, stop tokens, min_tokens, bad_words, seeds, penalties."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_lab.detokenizer import Detokenizer
from strata_lab.engine import LLMEngine
from strata_lab.sampling_params import RequestError, SamplingParams
from tests.checkpoints import write_checkpoint
from tests.test_detokenizer import BYTE_LEVEL, TEXT_IDS, cut

OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "cuda_graph": False, "block_size": 8}
# Single bytes that are letters, so that texts are readable and no character is cut: every other token is held down.
LETTERS = [BYTE_LEVEL.encode(char)[0] for char in "abcdef "]
SPELL = dict.fromkeys(LETTERS, 30.0)


def params(**more: Any) -> SamplingParams:
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 40, "ignore_eos": True, "logit_bias": SPELL, **more}
    return SamplingParams(**options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("ends"), "llama")[0]


@pytest.fixture(scope="module")
def engine(folder):
    with LLMEngine(folder, **OPTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def text(engine) -> str:
    """What the request says when nothing stops it; a character a token."""
    said = engine.generate(["ab"], params())[0].text
    assert len(said) == 40 and set(said) <= set("abcdef ") and len(set(said)) >= 3
    return said


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("start", [0, 7, 20])
def test_a_stop_string_over_several_tokens_ends_the_text_and_is_told(start, include, engine, text) -> None:
    stop = text[start : start + 4]
    output = engine.generate(["ab"], params(stop=("never said", stop), include_stop_str_in_output=include))[0]
    first = text.index(stop)
    assert output.text == text[: first + 4 if include else first]
    assert len(output.token_ids) == first + 4, "it ends with the token that completes it"
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_a_stream_never_says_the_beginning_of_a_stop_string(engine, text) -> None:
    stop = text[10:13]
    events = list(engine.stream("ab", params(stop=(stop,))))
    assert "".join(event.text for event in events) == text[: text.index(stop)]


def test_a_stop_token_is_told_by_its_id_and_the_models_end_is_not(engine, text) -> None:
    token_id = BYTE_LEVEL.encode(text[6])[0]
    output = engine.generate(["ab"], params(stop_token_ids=[token_id]))[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", token_id)
    assert output.token_ids[-1] == token_id and token_id not in output.token_ids[:-1]
    end = engine.generate(["ab"], params(ignore_eos=False, logit_bias={2: 100.0}))[0]
    assert (end.finish_reason, end.stop_reason, end.token_ids) == ("stop", None, (2,))
    full = engine.generate(["ab"], params(max_tokens=3))[0]
    assert (full.finish_reason, full.stop_reason) == ("length", None)


@pytest.mark.parametrize("min_tokens", [1, 2, 9, 40])
def test_before_min_tokens_no_end_token_is_chosen(min_tokens, engine) -> None:
    """The end token is by far the likeliest, and a stop token the next."""
    bias = {**SPELL, 2: 100.0, LETTERS[0]: 60.0}
    asked = params(ignore_eos=False, logit_bias=bias, stop_token_ids=[LETTERS[0]], min_tokens=min_tokens)
    output = engine.generate(["ab"], asked)[0]
    # The token number min_tokens + 1 is the first that may be an end.
    assert len(output.token_ids) == min(min_tokens + 1, 40)
    assert not {2, LETTERS[0]} & set(output.token_ids[:min_tokens])
    assert output.finish_reason == ("stop" if min_tokens < 40 else "length")


def test_min_tokens_holds_after_preemption(folder, engine) -> None:
    asked = params(ignore_eos=False, logit_bias={2: 100.0}, min_tokens=50, max_tokens=60)
    prompts = [[3 + i] * 9 for i in range(4)]
    with LLMEngine(folder, **{**OPTIONS, "max_model_len": 96}, num_kv_blocks=12) as small:
        outputs = small.generate(prompts, asked)
        assert small.stats().num_preemptions > 0
    assert [o.token_ids for o in outputs] == [engine.generate([p], asked)[0].token_ids for p in prompts]
    assert all(len(o.token_ids) == 51 and o.token_ids[-1] == 2 for o in outputs)


def test_stop_strings_are_looked_for_behind_min_tokens(engine, text) -> None:
    stop = text[3:5]
    later = text.find(stop, 19)
    output = engine.generate(["ab"], params(stop=(stop,), min_tokens=20))[0]
    if later < 0:
        assert output.text == text and output.finish_reason == "length"
    else:
        assert output.text == text[:later] and output.finish_reason == "stop"
    assert len(output.token_ids) >= 20


@given(
    TEXT_IDS, st.integers(0, 20), st.lists(st.text("abhelow \u65e5", min_size=1, max_size=3), min_size=1, max_size=3)
)
def test_the_detokenizer_says_all_of_the_first_tokens_and_then_stops_as_usual(ids, min_tokens, stops) -> None:
    one = Detokenizer(BYTE_LEVEL, [], SamplingParams(min_tokens=min_tokens, max_tokens=100, stop=tuple(stops)))
    for token_id in ids:
        one.push(token_id)
    one.flush()
    head = Detokenizer(BYTE_LEVEL, [], SamplingParams())
    said = "".join(head.push(token_id) for token_id in ids[: max(0, min_tokens - 1)])
    assert one.text == said + cut(BYTE_LEVEL.decode(ids)[len(said) :], tuple(stops), include=False)


# -- words -----------------------------------------------------------------------------------------------------------


def test_a_bad_word_is_never_spelled_and_its_beginning_may_be(engine, text) -> None:
    word = next(text[i : i + 3] for i in range(5, 30) if " " not in text[i : i + 3])
    output = engine.generate(["ab"], params(bad_words=[word]))[0]
    assert word in text and word not in output.text and len(output.token_ids) == 40
    assert output.text[: text.index(word) + 2] == text[: text.index(word) + 2], "nothing changes before its last letter"


def test_a_bad_word_of_one_token_is_never_chosen_in_a_batch_that_has_others(engine, text) -> None:
    letter = next(char for char in text if char != " ")
    prompts, asked = ["ab", "ab", "ab"], [params(), params(bad_words=letter), params(presence_penalty=1.0)]
    alone = [engine.generate([p], one)[0].token_ids for p, one in zip(prompts, asked, strict=True)]
    outputs = engine.generate(prompts, asked)
    assert [o.token_ids for o in outputs] == alone
    assert outputs[0].text == text and letter not in outputs[1].text


def test_a_bad_word_in_the_prompt_does_not_count_as_begun(engine) -> None:
    """The prompt ends with the word's first letter; the output may begin with the second."""
    first = engine.generate(["a"], params())[0].text[0]
    assert engine.generate(["a"], params(bad_words=[f"a{first}"]))[0].text[0] == first


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"min_tokens": 41}, "min_tokens=41 must be a whole number, from 0 to 40"),
        ({"min_tokens": -1}, "min_tokens=-1"),
        ({"bad_words": [" "]}, "bad_words=.* must be texts that are not blank"),
        ({"bad_words": [3]}, "bad_words=.* must be texts"),
        ({"bad_words": 3}, "bad_words=3 must be a collection"),
    ],
)
def test_bad_values_say_what_works(options, match) -> None:
    with pytest.raises(RequestError, match=match):
        params(**options)


def test_without_a_tokenizer_words_are_refused(tmp_path) -> None:
    bare = write_checkpoint(tmp_path, "llama", tokenizer=False)[0]
    with LLMEngine(bare, **OPTIONS) as engine, pytest.raises(RequestError, match="bad_words need a tokenizer"):
        engine.generate([[3]], SamplingParams(bad_words=["x"]))

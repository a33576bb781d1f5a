"""Laws of structured outputs: a text that ends fits its structure, whatever else happens to the request."""

from __future__ import annotations

import json
import re
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
import xgrammar

from strata_lab.engine import LLMEngine
from strata_lab.grammar import GrammarMasks, Grammars, TokenMatcher
from strata_lab.request import Request
from strata_lab.sampling_edits import edits_logits
from strata_lab.sampling_params import RequestError, SamplingParams, StructuredOutputs
from strata_lab.tokenizer import Tokenizer
from tests.checkpoints import SPECIAL, VOCAB, byte_level_backend, write_checkpoint
from tests.test_detokenizer import SENTENCEPIECE

OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "cuda_graph": False, "block_size": 8}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
}
PHONE = r"\d{3}-\d{4}"
EXPRESSION = 'root ::= term (" + " term)?\nterm ::= [0-9] | "(" root ")"'
BYTES = Tokenizer(byte_level_backend(), eos_token_ids=[2])
EOS = 2


def fits_schema(text: str) -> bool:
    value = json.loads(text)
    tags = value["tags"]
    return (
        list(value) == ["name", "age", "tags"] and len(value["name"]) <= 8
        and isinstance(value["age"], int) and 0 <= value["age"] <= 150
        and len(tags) <= 2 and set(tags) <= {"a", "b"}
    )  # fmt: skip


def balanced(text: str) -> bool:
    return bool(re.fullmatch(r"[0-9 +()]+", text)) and eval(text, {"__builtins__": {}}) >= 0


WISHES: dict[str, tuple[dict[str, Any], Any]] = {
    "json": ({"json": SCHEMA}, fits_schema),
    "json_object": ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    "regex": ({"regex": PHONE}, lambda text: re.fullmatch(PHONE, text)),
    "choice": (
        {"choice": ["yes", 'no "never"\n', "\u65e5\u672c"]},
        lambda t: t in ("yes", 'no "never"\n', "\u65e5\u672c"),
    ),
    "grammar": ({"grammar": EXPRESSION}, balanced),
}


def ask(kind: str, seed: int = 0, **more: Any) -> SamplingParams:
    options = {"temperature": 1.0, "seed": seed, "max_tokens": 120, "structured_outputs": WISHES[kind][0], **more}
    return SamplingParams(**options)


def check(kind: str, output: Any) -> None:
    """A text that ended by itself fits; one that `max_tokens` ended says so."""
    assert output.error is None, output.error
    if output.finish_reason == "stop":
        assert WISHES[kind][1](output.text), output.text
        assert output.token_ids[-1] == EOS and output.token_ids.count(EOS) == 1
    else:
        assert output.finish_reason == "length" and len(output.token_ids) == 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("structured"), "llama")[0]


@pytest.fixture(scope="module")
def engine(folder):
    with LLMEngine(folder, **OPTIONS) as made:
        yield made


@pytest.mark.parametrize("kind", WISHES)
def test_a_text_that_ends_fits_its_structure(kind, engine) -> None:
    outputs = engine.generate([[3 + i, 4, 5] for i in range(8)], [ask(kind, seed) for seed in range(8)])
    for output in outputs:
        check(kind, output)
    ended = [o for o in outputs if o.finish_reason == "stop"]
    assert len(ended) >= (1 if kind == "json_object" else 4), "the test would show nothing"
    if kind != "choice":
        assert len({o.text for o in outputs}) > 1


@pytest.mark.parametrize("kind", ["json", "regex", "grammar"])
@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0},
        {"repetition_penalty": 1.3, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"top_k": 5, "top_p": 0.8, "min_p": 0.05},
        {"logit_bias": {EOS: -100, 40: 100}},
        {"logprobs": 3, "temperature": 5.0},
    ],
    ids=["greedy", "penalties", "filters", "bias", "logprobs"],
)
def test_other_parameters_choose_among_what_fits(kind, more, engine) -> None:
    output = engine.generate([[3, 4, 5]], ask(kind, 1, **more))[0]
    check(kind, output)
    if "logprobs" in more:
        assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)
        assert all(entry.logprob < 0 and len(entry.top) == 3 for entry in output.logprobs)


def test_a_batch_where_some_are_structured_gives_each_what_it_gives_alone(engine) -> None:
    params = [ask("json", 1), SamplingParams(seed=5, max_tokens=40), ask("regex", 2), ask("choice", 3),
              SamplingParams(temperature=0, max_tokens=40, presence_penalty=1.0), ask("json", 4)]  # fmt: skip
    prompts = [[10 + i] * (3 + i) for i in range(len(params))]
    alone = [engine.generate([p], one)[0].token_ids for p, one in zip(prompts, params, strict=True)]
    assert [o.token_ids for o in engine.generate(prompts, params)] == alone


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preemption_rebuilds_the_matcher_from_the_output(preemption, folder, engine) -> None:
    params = [ask("json", seed, max_tokens=70) for seed in range(4)]
    prompts = [[10 + i] * 9 for i in range(4)]
    expected = [engine.generate([p], one)[0].token_ids for p, one in zip(prompts, params, strict=True)]
    with LLMEngine(folder, **{**OPTIONS, "max_model_len": 88}, num_kv_blocks=12, preemption=preemption) as small:
        outputs = small.generate(prompts, params)
        assert small.stats().num_preemptions > 0
    assert [o.token_ids for o in outputs] == expected


def test_a_change_of_settings_in_the_middle_changes_nothing(engine) -> None:
    expected = engine.generate([[9, 9, 9]], ask("json", 6))[0].token_ids
    stream = engine.stream([9, 9, 9], ask("json", 6))
    events = [next(stream) for _ in range(5)]
    assert engine.apply(fused_kernels=not engine.optimizations.fused_kernels).ok
    assert tuple(e.token_id for e in [*events, *stream]) == expected


def test_max_tokens_in_the_middle_is_told_as_length(engine) -> None:
    output = engine.generate([[3, 4]], ask("json", max_tokens=3))[0]
    assert output.finish_reason == "length" and output.text.startswith("{")
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        json.loads(output.text)


def test_a_stop_string_may_end_it_before(engine) -> None:
    output = engine.generate([[3, 4]], ask("json", stop=('"name"',)))[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", '"name"')
    assert output.text.strip() == "{"


def test_structured_requests_are_left_to_the_host_sampler() -> None:
    assert all(edits_logits(ask(kind)) for kind in WISHES)


# -- compiling -----------------------------------------------------------------------------------------------------


def test_a_structure_is_compiled_once_in_the_thread_that_asks(folder, monkeypatch) -> None:
    threads = []
    original = Grammars._compile

    def watched(self: Grammars, wish: StructuredOutputs) -> Any:
        threads.append(threading.current_thread())
        return original(self, wish)

    monkeypatch.setattr(Grammars, "_compile", watched)
    with LLMEngine(folder, **OPTIONS) as engine:
        engine.generate([[3], [4]], ask("json"))
        engine.generate([[3]], ask("json", structured_outputs=StructuredOutputs(json=json.dumps(SCHEMA))))
        assert threads == [threading.current_thread()]


def test_what_is_kept_is_bounded_and_the_oldest_goes(monkeypatch) -> None:
    monkeypatch.setattr("strata_lab.grammar.MAX_KEPT", 2)
    grammars = Grammars(BYTES, VOCAB, frozenset({EOS}))
    first = grammars.compiled(StructuredOutputs(choice=["a"]))
    grammars.compiled(StructuredOutputs(choice=["b"]))
    assert grammars.compiled(StructuredOutputs(choice=["a"])) is first
    grammars.compiled(StructuredOutputs(choice=["c"]))
    assert grammars.compiled(StructuredOutputs(choice=["a"])) is first
    assert len(grammars._kept) == 2


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ({"regex": "(ab"}, "The parenthesis is not closed"),
        ({"regex": "a(?=b)"}, "Lookahead is not supported"),
        ({"grammar": "root ::= foo"}, '"foo" is not defined'),
        ({"grammar": 'start ::= "a"'}, '"root" is not found'),
        ({"json": {"type": "strng"}}, 'Unsupported type "strng"'),
        ({"json": {"$ref": "#/definitions/x"}}, "Cannot find field"),
        ({"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "greater than maxLength"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason_and_one_that_works(wish, reason, engine) -> None:
    with pytest.raises(RequestError) as caught:
        engine.generate([[3]], SamplingParams(structured_outputs=wish))
    text = str(caught.value)
    assert reason in text and "; try " in text and "/cpp/" not in text and "\n" not in text
    example = eval(text.rpartition(f"try {next(iter(wish))}=")[2], {})
    assert StructuredOutputs(**{next(iter(wish)): example})
    assert engine.stats().num_waiting == engine.stats().num_running == 0


def test_without_its_package_the_way_to_get_it_is_named(folder, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with (
        LLMEngine(folder, **OPTIONS) as engine,
        pytest.raises(RequestError, match=r"xgrammar .*pip install.*structured"),
    ):
        engine.generate([[3]], ask("json"))


def test_a_model_without_a_tokenizer_says_so(tmp_path) -> None:
    folder = write_checkpoint(tmp_path, "llama", tokenizer=False)[0]
    with LLMEngine(folder, **OPTIONS) as engine, pytest.raises(RequestError, match="need a tokenizer"):
        engine.generate([[3]], ask("regex"))


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"ignore_eos": True}, "ignore_eos=True does not go with structured_outputs"),
        ({"min_tokens": 3}, "min_tokens=3 does not go with structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "unknown key 'regexp'; try one of"),
        ({"structured_outputs": "json"}, "must be StructuredOutputs"),
    ],
)
def test_parameters_that_contradict_a_structure_are_refused(more, match) -> None:
    with pytest.raises(RequestError, match=match):
        ask("regex", **more)


# -- masks ---------------------------------------------------------------------------------------------------------


def request_of(grammar: Any, output: list[int], name: str = "r") -> Request:
    request = Request(name, [5, 6], SamplingParams(), grammar=grammar)
    request.token_ids += output
    return request


def allowed(grammar: Any, output: list[int]) -> set[int]:
    logits = torch.zeros(1, VOCAB)
    assert GrammarMasks().apply(logits, [(0, request_of(grammar, output))]) == {}
    return set((logits[0] == 0).nonzero()[:, 0].tolist())


def test_a_mask_allows_exactly_the_tokens_that_go_on_and_the_end_when_it_is_complete() -> None:
    grammar = Grammars(BYTES, VOCAB, frozenset({EOS})).compiled(StructuredOutputs(regex="hello?( wo)?"))
    token = {BYTES.token_bytes(i): i for i in range(BYTES.vocab_size)}
    assert allowed(grammar, []) == {token[b"h"], token[b"he"], token[b"hell"], token[b"hello"]}
    assert allowed(grammar, [token[b"hell"]]) == {token[b"o"], token[b" "], token[b" w"], token[b" wo"], EOS}
    assert allowed(grammar, [token[b"hello"], token[b" wo"]]) == {EOS}


def test_special_tokens_and_ids_without_a_token_never_fit_and_text_that_looks_like_one_does() -> None:
    grammar = Grammars(BYTES, VOCAB, frozenset({EOS})).compiled(StructuredOutputs(regex="[ -~]*"))
    spelled = {i for i in range(len(SPECIAL), BYTES.vocab_size) if BYTES.token_bytes(i).isascii()}
    printable = {i for i in spelled if BYTES.token_bytes(i).decode().isprintable()}
    assert allowed(grammar, []) == printable | {EOS}
    as_text = [BYTES.encode(char)[0] for char in SPECIAL[1]]
    assert allowed(grammar, as_text) == printable | {EOS}


def test_json_has_no_bare_control_characters_even_in_strings_of_bounded_length() -> None:
    schema = {"type": "string", "minLength": 1, "maxLength": 5}
    grammar = Grammars(BYTES, VOCAB, frozenset({EOS})).compiled(StructuredOutputs(json=schema))
    free = {BYTES.token_bytes(i) for i in allowed(grammar, BYTES.encode('"'))}
    assert b"a" in free and b"hello" in free and not any(byte < 32 for word in free for byte in word)
    size = SENTENCEPIECE.vocab_size
    grammar = Grammars(SENTENCEPIECE, size, frozenset({EOS})).compiled(StructuredOutputs(json=schema))
    quoted = request_of(grammar, SENTENCEPIECE.encode('"', add_special_tokens=False)[-1:])
    logits = torch.zeros(1, size)
    assert GrammarMasks().apply(logits, [(0, quoted)]) == {}
    names = {SENTENCEPIECE.backend.id_to_token(i) for i in (logits[0] == 0).nonzero()[:, 0].tolist()}
    assert {"<0x61>", "l"} <= names and not {f"<0x{byte:02X}>" for byte in range(32)} & names


def test_masks_touch_their_rows_only_and_tell_a_token_that_does_not_fit() -> None:
    grammar = Grammars(BYTES, VOCAB, frozenset({EOS})).compiled(StructuredOutputs(choice=["he"]))
    logits = torch.randn(3, VOCAB)
    before = logits.clone()
    errors = GrammarMasks().apply(logits, [(0, request_of(grammar, [], "a")), (2, request_of(grammar, [EOS], "b"))])
    assert torch.equal(logits[1], before[1]) and (logits[0] == -torch.inf).sum() > VOCAB - 5
    assert list(errors) == [2] and "does not fit the structure at output position 0" in errors[2]


def test_a_tokenizer_with_byte_fallback_spells_the_same_texts() -> None:
    size = SENTENCEPIECE.vocab_size
    grammar = Grammars(SENTENCEPIECE, size, frozenset({EOS})).compiled(StructuredOutputs(regex=" ?hello \u65e5."))
    mask = np.zeros(xgrammar.get_bitmask_shape(1, size), dtype=np.int32)
    for text in (" hello \u65e5.", "hello \u65e5."):
        ids = SENTENCEPIECE.encode(text, add_special_tokens=False)
        matcher = TokenMatcher(request_of(grammar, ids))
        matcher.fill(mask, 0)
        assert matcher.error is None, (text, ids)
        assert np.unpackbits(mask[0].view(np.uint8), bitorder="little").nonzero()[0].tolist() == [EOS]

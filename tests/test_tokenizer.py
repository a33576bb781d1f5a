"""Laws of text to tokens and back: equal to transformers, exact on any Unicode, and chat messages are checked."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from strata_lab.models import hub
from strata_lab.models.conversion import open_gguf
from strata_lab.models.gguf_tokenizer import _backend
from strata_lab.models.loader import open_checkpoint
from strata_lab.sampling_params import RequestError
from strata_lab.tokenizer import Tokenizer, TokenizerError, check_messages
from tests.checkpoints import CHAT_TEMPLATE, MERGES, SPECIAL, byte_level_backend, byte_vocab, write_tokenizer

DEFAULT = hub.find_model("smollm2-135m")
needs_default = pytest.mark.skipif(DEFAULT is None, reason=f"the default model is not installed: {hub.how_to_get()}")
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi 12 \U0001f600"},
    {"role": "assistant", "content": "Yo"},
    {"role": "user", "content": "?"},
]
# What transformers' own conversion of the default model's file gives, with the pre-tokenizer of the original
# tokenizer.json (single digits, then GPT-2's rule); see `test_transformers_reads_the_file_the_same_way`.
EXPECTED = {
    "Hello, world!": [19556, 28, 905, 17],
    "  leading and   inner  spaces \n\n\ttabs\r\n": [216, 2899, 284, 256, 6210, 216, 5600, 38028, 197, 100, 7366, 2738],
    "3.14159 and 2026-11-29, 0x1F": [
        35,
        30,
        33,
        36,
        33,
        37,
        41,
        284,
        216,
        34,
        32,
        34,
        38,
        29,
        33,
        33,
        29,
        34,
        41,
        28,
        216,
        32,
        104,
        33,
        54,
    ],
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f3f3\ufe0f\u200d\U0001f308 e\u0301 \u200b": [
        10813,
        235,
        119,
        321,
        231,
        10813,
        235,
        119,
        321,
        231,
        10813,
        235,
        117,
        321,
        231,
        10813,
        235,
        116,
        15107,
        233,
        128,
        31752,
        321,
        231,
        10813,
        230,
        226,
        297,
        151,
        219,
        459,
        229,
    ],
    "\u4f60\u597d,\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f \uc548\ub155\ud558\uc138\uc694": [
        18645,
        250,
        48392,
        138,
        28,
        7906,
        240,
        178,
        239,
        230,
        19076,
        7365,
        237,
        10391,
        237,
        41152,
        7365,
        111,
        7365,
        124,
        18601,
        239,
        226,
        182,
        223,
        239,
        33085,
        242,
        183,
        222,
        133,
        183,
        244,
        238,
    ],
    "def f(x):\n    return x**2  # \u03c0\u22483.14\n": [
        1604,
        275,
        24,
        104,
        727,
        472,
        1003,
        1792,
        828,
        34,
        216,
        907,
        25143,
        40533,
        226,
        35,
        30,
        33,
        36,
        198,
    ],
    "<|im_start|>user\nHi<|im_end|>": [1, 4093, 198, 26843, 2],
    "I'm you're WE'LL d'accord": [57, 5248, 346, 2316, 26587, 23, 16421, 287, 23, 2487, 589],
    "a\xa0b\u2028c": [81, 15442, 82, 321, 118, 83],
    "   ": [333],
    "\n\n\n": [16506],
    "1": [33],
    "  42  007": [256, 36, 34, 256, 32, 32, 39],
    "$\u20ac\xa3 +=-_*&^%~`|\\/": [20, 14195, 37564, 4519, 29, 79, 26, 22, 78, 21, 110, 80, 43509, 31],
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947": [
        21706,
        20602,
        44626,
        31462,
        10805,
        12960,
        119,
        31838,
        23970,
        162,
        247,
        12335,
        118,
        35090,
        38770,
        16525,
        26293,
        30581,
    ],
    "\u03a9\u03bc\u03ad\u03b3\u03b1 \xbd \xb2 \u2460": [
        153,
        119,
        16674,
        34075,
        23098,
        8998,
        216,
        16738,
        216,
        19133,
        216,
        173,
        235,
        250,
    ],
    "\x00\x01\x7f": [190, 191, 217],
    "": [],
    "<|im_end": [44, 108, 306, 79, 486],
    "<repo_name>a/b<filename>c.py": [3, 81, 31, 82, 6, 83, 30, 1306],
}


@pytest.fixture(scope="module")
def default() -> Tokenizer:
    """The default model's tokenizer."""
    tokenizer = open_checkpoint("smollm2-135m").tokenizer()
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Tokenizer:
    """A 265-token byte-level tokenizer, read from a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.load(folder)


# -- text to tokens and back ------------------------------------------------------------------------------------------


@needs_default
@pytest.mark.parametrize("text", EXPECTED, ids=ascii)
def test_the_default_model_encodes_as_transformers_does(text, default) -> None:
    assert default.encode(text) == EXPECTED[text]
    assert default.decode(EXPECTED[text], skip_special_tokens=False) == text


@needs_default
@pytest.mark.slow
def test_transformers_reads_the_file_the_same_way(default) -> None:
    """transformers forgets the file's pre-tokenizer name; with it put back, every text and chat is the same."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(DEFAULT.parent), gguf_file=DEFAULT.name)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text, ids in EXPECTED.items():
        assert theirs(text)["input_ids"] == ids
    for messages in (CHAT, CHAT[1:]):
        for prompt in (True, False):
            expected = theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
            assert default.apply_chat_template(messages, prompt) == expected


@pytest.fixture(scope="module")
def spelled(default) -> set[bytes]:
    """The single bytes in the default model's vocabulary: 21 that hardly occur in text are missing from it."""
    return {default.token_bytes(i) for i in range(default.vocab_size) if len(default.token_bytes(i)) == 1}


@needs_default
@given(st.text(max_size=60))
@settings(deadline=None, max_examples=150)
def test_the_default_model_gives_back_any_text_it_can_spell(default, spelled, text) -> None:
    text = "".join(char for char in text if all(bytes([b]) in spelled for b in char.encode()))
    assert default.decode(default.encode(text), skip_special_tokens=False) == text


@given(st.text(max_size=40))
@settings(deadline=None, max_examples=150)
def test_a_folder_gives_back_any_text(small, text) -> None:
    assert small.decode(small.encode(text), skip_special_tokens=False) == text


@needs_default
def test_every_token_of_the_default_model_has_the_bytes_that_decoding_uses(default) -> None:
    """Decoding one token is its bytes read as UTF-8, for the whole vocabulary."""
    assert default.is_byte_level
    assert default.vocab_size == 49152
    decoded = default.backend.decode_batch([[i] for i in range(default.vocab_size)], skip_special_tokens=False)
    assert [default.token_bytes(i).decode("utf-8", "replace") for i in range(default.vocab_size)] == decoded
    assert default.token_bytes(10**6) == b""


def test_special_tokens_are_known_and_left_out_on_request(small) -> None:
    ids = small.encode("<|im_start|>hello<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert small.special_token_ids == {0, 1, 2}
    assert small.decode(ids) == "hello"
    assert small.decode(ids, skip_special_tokens=False) == "<|im_start|>hello<|im_end|>"
    assert (small.bos_token_id, small.eos_token_ids, small.vocab_size) == (1, (2,), 265)
    assert [small.token_text(i) for i in (1, ids[1], 10**6)] == ["<|im_start|>", "hello", ""]


def test_an_added_token_outside_the_byte_alphabet_stands_for_itself() -> None:
    backend = byte_level_backend()
    backend.add_tokens(["a b", "\u65e5"])
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("xa b\u65e5")
    assert b"".join(tokenizer.token_bytes(i) for i in ids).decode() == "xa b\u65e5" == tokenizer.decode(ids)


@pytest.mark.parametrize("text", ["\ud83d", "ab\udfffc"])
def test_a_lone_surrogate_is_refused_with_its_position(text, small) -> None:
    with pytest.raises(RequestError, match=r"lone surrogate .* at position [02], which is no character; decode"):
        small.encode(text)


@pytest.mark.parametrize("value", [None, 3, b"hi", ["a"]])
def test_only_text_is_encoded(value, small) -> None:
    with pytest.raises(RequestError, match=f"text must be a string, not {type(value).__name__}; try 'Hello'"):
        small.encode(value)


def test_saving_and_loading_changes_nothing(small, tmp_path) -> None:
    before = Tokenizer(
        small.backend, eos_token_ids=[2, 0], bos_token_id=1, add_bos=True, chat_template="{{ bos_token }}\u00e9"
    )
    before.save(tmp_path)
    after = Tokenizer.load(tmp_path)
    for name in ("eos_token_ids", "bos_token_id", "add_bos", "chat_template", "vocab_size", "special_token_ids"):
        assert getattr(after, name) == getattr(before, name), name
    assert after.encode("hello wo<|im_end|>") == before.encode("hello wo<|im_end|>")


def test_other_libraries_read_what_is_saved(small, tmp_path) -> None:
    from transformers import PreTrainedTokenizerFast

    Tokenizer(small.backend, eos_token_ids=[2, 0], bos_token_id=1, add_bos=True).save(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert theirs.eos_token_id == 2
    assert theirs("hello wo")["input_ids"][-3:] == Tokenizer.load(tmp_path).encode("hello wo")[-3:]


def test_a_folder_is_read_as_transformers_reads_it(tmp_path) -> None:
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    ours = Tokenizer.load(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[2]})
    )
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in EXPECTED:
        assert ours.encode(text) == theirs(text)["input_ids"]
    for prompt in (True, False):
        expected = theirs.apply_chat_template(CHAT, add_generation_prompt=prompt, return_dict=False)
        assert ours.apply_chat_template(CHAT, prompt) == expected


def test_damaged_tokenizer_files_are_named(tmp_path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json must hold a JSON object, not list"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json is not JSON"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(TokenizerError, match=r"the tokenizer cannot be read .* fetch tokenizer.json again"):
        Tokenizer.load(tmp_path)


# -- GGUF's named pre-tokenizers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", " 12345", " x", "=", "y", "\n\n ", " \u00bd", "!\u2026", " We", "'", "LL"]),
        (
            "smollm",
            ["It", "'s", " ", "1", "2", "3", "4", "5", " x", "=", "y", "\n\n  ", "\u00bd", "!\u2026", " We", "'", "LL"],
        ),
        ("llama-bpe", ["It", "'s", " ", "123", "45", " x", "=y", "\n\n", " ", " ", "\u00bd", "!\u2026", " We", "'LL"]),
        (
            "qwen2",
            ["It", "'s", " ", "1", "2", "3", "4", "5", " x", "=y", "\n\n", " ", " ", "\u00bd", "!\u2026", " We", "'LL"],
        ),
        (
            "default",
            ["It", "'", "s", " ", "123", "45", " x", "=", "y", "\n\n ", " ", "\u00bd", "!\u2026", " We", "'", "LL"],
        ),
    ],
)
def test_each_pre_tokenizer_splits_as_its_model_did(pre, pieces) -> None:
    backend = _backend(pre, list(byte_vocab()), list(MERGES))
    text = "It's 12345 x=y\n\n  \u00bd!\u2026 We'LL"
    split = backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in split] == pieces
    assert backend.decode(backend.encode(text).ids) == text


def write_tokenizer_gguf(path, **metadata) -> None:
    """A GGUF file with a tokenizer and a model of random weights."""
    from tests.checkpoints import write_checkpoint, write_gguf

    write_gguf(path, write_checkpoint(path.parent / "m", "llama", tokenizer=False)[1], **metadata)


def test_add_bos_is_honoured_in_text_and_once_in_chats(tmp_path) -> None:
    path = tmp_path / "m.gguf"
    write_tokenizer_gguf(path, tokenizer__ggml__add_bos_token=True, tokenizer__ggml__bos_token_id=0)
    tokenizer = open_gguf(path, cache_dir=tmp_path).tokenizer()
    hello = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [0, *hello]
    assert hello[0] != 0
    assert tokenizer.apply_chat_template(CHAT)[:2] == [0, 1], "the template has no beginning token of its own"
    tokenizer.chat_template = "{{ bos_token }}" + CHAT_TEMPLATE
    assert tokenizer.apply_chat_template(CHAT)[:2] == [0, 1], "and is not given a second one"


def test_a_gguf_without_a_tokenizer_has_none(tmp_path) -> None:
    write_tokenizer_gguf(tmp_path / "m.gguf", tokenizer=None)
    assert open_gguf(tmp_path / "m.gguf", cache_dir=tmp_path).tokenizer() is None


# -- chat -------------------------------------------------------------------------------------------------------------


def with_template(small: Tokenizer, template: str | None) -> Tokenizer:
    return Tokenizer(small.backend, bos_token_id=1, eos_token_ids=[2], chat_template=template)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hello", r"messages must be a list, not str; try \[\{'role': 'user'"),
        ({"role": "user", "content": "x"}, "messages must be a list, not dict"),
        (None, "messages must be a list, not NoneType"),
        ([], "messages is empty"),
        (["Hello"], r"messages\[0\]='Hello' must be a dict"),
        ([CHAT[0], {"role": "usr", "content": "x"}], r"messages\[1\] has role 'usr'; it must be one of system"),
        ([{"content": "x"}], r"messages\[0\] has role None"),
        ([{"role": "user"}], r"messages\[0\] has content None; it must be a string"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\] has content \['x'\]"),
    ],
)
def test_malformed_messages_say_which_and_show_an_example(messages, message, small) -> None:
    for check in (check_messages, small.apply_chat_template):
        with pytest.raises(RequestError, match=message):
            check(messages)


def test_a_model_without_a_template_says_what_to_do(small) -> None:
    with pytest.raises(RequestError, match="has no chat template; give the prompt as a string"):
        with_template(small, None).apply_chat_template(CHAT)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ raise_exception('no system role') }}", "refused the messages: no system role"),
        ("{% if %}", "refused the messages"),
        ("{{ messages.__class__.__mro__ }}", "refused the messages: .*unsafe"),
        ("{{ messages.append(1) }}", "refused the messages"),
        ("{{ messages[9].content }}", "refused the messages"),
        ("{{ 1 / 0 }}", "refused the messages"),
    ],
)
def test_a_template_that_fails_or_misbehaves_is_a_request_error(template, text, small) -> None:
    with pytest.raises(RequestError, match=text):
        with_template(small, template).render_chat(CHAT)


def test_templates_find_what_transformers_gives_them(small) -> None:
    template = """
    {%- for m in messages %}
        {%- if loop.index > 2 %}{% break %}{% endif %}
        {% generation %}{{ m.content | tojson }}{% endgeneration %}
    {%- endfor %}
    {{ bos_token }}{{ eos_token }}{{ strftime_now("%Y") | length }}{{ tools is none }}"""
    assert with_template(small, template).render_chat(CHAT) == (
        '"Be brief.""Hi 12 \U0001f600"    <|im_start|><|im_end|>4True'
    )


@pytest.mark.parametrize("where", ["file", "named", "inline"])
def test_the_template_is_found_wherever_transformers_puts_it(where, tmp_path) -> None:
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"chat_template": "inline"}
    if where == "file":
        (tmp_path / "chat_template.jinja").write_text("file", encoding="utf-8")
    if where == "named":
        config["chat_template"] = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "named"}]
    path.write_text(json.dumps(config))
    assert Tokenizer.load(tmp_path).chat_template == where

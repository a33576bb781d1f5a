"""Builds a `Tokenizer` from the token lists of a GGUF file.

The file names its pre-tokenizer ("smollm") and does not describe it: the splitting rules of the supported names are
here, as llama.cpp's `unicode_regex_split` and the models' own `tokenizer.json` state them. Byte-level BPE only
(`tokenizer.ggml.model` "gpt2"); SentencePiece files are refused, since a wrong guess would garble text silently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from strata_lab.models.errors import CheckpointError
from strata_lab.tokenizer import Tokenizer

if TYPE_CHECKING:
    from strata_lab.models.gguf_file import GgufFile

# Values of tokenizer.ggml.token_type (ggml's llama_token_type).
_CONTROL, _USER_DEFINED = 3, 4

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2.removesuffix(r"|\s+"), r"\p{N}+", r"[0-9][0-9][0-9]")

# Pre-tokenizer name to the expressions that split the text, one after the other.
SPLITS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    "gpt-2": (_GPT2,),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "smollm": (r"\p{N}", _GPT2),
}
_IGNORE_MERGES = {"llama-bpe"}  # a piece that is itself a token is not built from merges
_NFC = {"qwen2"}


def read_tokenizer(gguf: GgufFile) -> Tokenizer | None:
    """The tokenizer in the file, None where there is none; `CheckpointError` for a kind that is not supported."""
    kind = gguf.get("tokenizer.ggml.model", None)
    if kind is None:
        return None
    if kind != "gpt2":
        raise CheckpointError(
            f"{gguf.path}: tokenizer {kind!r} is not supported; supported is 'gpt2' (byte-level BPE). "
            "Use the model's Hugging Face folder, whose tokenizer.json says everything"
        )
    pre = gguf.get("tokenizer.ggml.pre", "default")
    if pre not in SPLITS:
        raise CheckpointError(
            f"{gguf.path}: pre-tokenizer {pre!r} is not supported; supported are {', '.join(SPLITS)}. "
            "Use the model's Hugging Face folder, whose tokenizer.json says everything"
        )
    tokens: list[str] = gguf.get("tokenizer.ggml.tokens")
    types: list[int] = gguf.get("tokenizer.ggml.token_type", [1] * len(tokens))
    bos = _token_id(gguf, "bos", len(tokens))
    add_bos = bool(gguf.get("tokenizer.ggml.add_bos_token", False)) and bos is not None
    if len(types) != len(tokens):
        raise CheckpointError(
            f"{gguf.path}: tokenizer.ggml.token_type has {len(types)} entries, but there are {len(tokens)} tokens"
        )
    try:
        backend = _backend(pre, tokens, [_pair(m) for m in gguf.get("tokenizer.ggml.merges")])
    except Exception as error:  # tokenizers raises plain Exception
        raise CheckpointError(f"{gguf.path}: the tokenizer's merges are damaged ({error}); fetch it again") from error
    typed = list(zip(tokens, types, strict=True))
    backend.add_special_tokens([_added(token, True) for token, kind in typed if kind == _CONTROL])
    backend.add_tokens([_added(token, False) for token, kind in typed if kind == _USER_DEFINED])
    if add_bos and bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=[tokens[bos], "$A"], pair=[tokens[bos], "$A", "$B"], special_tokens=[(tokens[bos], bos)]
        )
    return Tokenizer(
        backend,
        bos_token_id=bos,
        eos_token_ids=gguf.config.eos_token_ids,
        add_bos=add_bos,
        chat_template=gguf.get("tokenizer.chat_template", None),
    )


def _backend(pre: str, tokens: list[str], merges: list[tuple[str, str]]) -> Backend:
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, ignore_merges=pre in _IGNORE_MERGES))
    splits: list[Any] = [pre_tokenizers.Split(Regex(rule), behavior="isolated") for rule in SPLITS[pre]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    if pre in _NFC:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _added(token: str, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)


def _token_id(gguf: GgufFile, name: str, vocab_size: int) -> int | None:
    token_id = gguf.get(f"tokenizer.ggml.{name}_token_id", None)
    if token_id is not None and not 0 <= token_id < vocab_size:
        raise CheckpointError(f"{gguf.path}: {name}_token_id is {token_id}, but the vocabulary has {vocab_size} tokens")
    return token_id

"""Whether a checkpoint is what this engine can run, one line per question: `strata validate`.

The readers refuse a file that cannot be loaded; here the tensors themselves are looked at, layer by layer, with one
layer in memory. A line says what was found, and a failing one which tensor it was, what was expected and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from strata_lab.layers.rotary import rotary_table
from strata_lab.models.checkpoint import Checkpoint, is_linear
from strata_lab.models.errors import CheckpointError
from strata_lab.quant import get_format, variant_of
from strata_lab.quant.base import LinearWeight
from strata_lab.quant.forward import Forward
from strata_lab.tokenizer import TokenizerError

Verdict = Literal["ok", "warn", "fail"]
SUSPICIOUS = 1e4  # a weight of this magnitude is rather a bit flip than trained
LOAD_BYTES = 16  # what a GPU thread asks for at once
BLOCK_SIZE = 16  # tokens of a cache block
PROBE = "Grüße, 你好! 12 < 34"


class StructuralIncompatibilityError(CheckpointError):
    """A tensor does not fit the model.

    Attributes:
        tensor: its canonical name.
        found, expected: in words.
        fix: what to do.
    """

    def __init__(self, tensor: str, found: str, expected: str, fix: str) -> None:
        super().__init__(f"{tensor}: found {found}, expected {expected}; {fix}")
        self.tensor, self.found, self.expected, self.fix = tensor, found, expected, fix


@dataclass(frozen=True)
class Line:
    """One question and its answer.

    Attributes:
        name: what was looked at.
        value: what was found.
        verdict: "ok", "warn" (runs, but slower or doubtful) or "fail" (does not run, or runs wrongly).
        fix: what to do about it; empty when ok.
    """

    name: str
    value: str
    verdict: Verdict = "ok"
    fix: str = ""


def validate(checkpoint: Checkpoint, progress: Callable[[str, float], None] = lambda text, done: None) -> list[Line]:
    """All structural questions; a failing one does not keep the others from being asked."""
    lines: list[Line] = []
    questions: Sequence[tuple[str, Callable[[Checkpoint], Iterator[Line]]]] = (
        ("geometry", _geometry), ("positions", _rope), ("attention", _attention), ("MLP", _mlp),
        ("alignment", _alignment), ("tokenizer", _tokenizer),
    )  # fmt: skip
    for name, ask in questions:
        lines += _answered(name, lambda ask=ask: ask(checkpoint))  # type: ignore[misc]
    lines += _answered("values", lambda: _values(checkpoint, progress))
    return lines


def _answered(name: str, ask: Callable[[], Iterator[Line]]) -> list[Line]:
    found: list[Line] = []
    try:
        found.extend(ask())
    except StructuralIncompatibilityError as error:
        found.append(Line(name, f"{error.tensor}: found {error.found}, expected {error.expected}", "fail", error.fix))
    except (CheckpointError, TokenizerError) as error:
        found.append(Line(name, str(error), "fail", "fetch the model again"))
    return found


def _geometry(checkpoint: Checkpoint) -> Iterator[Line]:
    c = checkpoint.config
    matrices = [name for name in checkpoint.names() if is_linear(name)]
    kind = f"{c.num_experts} experts, {c.num_experts_per_tok} per token" if c.num_experts else "dense"
    yield Line("architecture", f"{c.architecture}, {c.num_layers} layers, {kind}")
    yield Line("tensors", f"{len(checkpoint.names())} as the architecture names and shapes them")  # readers checked
    formats: dict[str, int] = {}
    for name in matrices:
        label = _kind(checkpoint.linear(name))
        formats[label] = formats.get(label, 0) + 1
    yield Line("precision", ", ".join(f"{count} matrices {label}" for label, count in sorted(formats.items())))
    if not c.tie_word_embeddings and "lm_head.weight" not in checkpoint.names():
        raise StructuralIncompatibilityError("lm_head.weight", "nothing", "a head of its own", "fetch all files again")


def _rope(checkpoint: Checkpoint) -> Iterator[Line]:
    c = checkpoint.config
    cos, sin = rotary_table(c, min(c.max_position, 4096), torch.device("cpu"))
    real = not cos.is_complex() and bool(torch.isfinite(cos).all() & torch.isfinite(sin).all())
    if not real or c.head_dim % 2:
        raise StructuralIncompatibilityError(
            "rotary positions", f"theta {c.rope_theta}, head_dim {c.head_dim}", "finite real pairs of an even head_dim",
            "correct rope_theta and head_dim in config.json",
        )  # fmt: skip
    rule = (c.rope_scaling or {}).get("rope_type", "plain")
    yield Line("RoPE", f"real-valued, theta {c.rope_theta:g}, {rule}, up to position {c.max_position}")


def _attention(checkpoint: Checkpoint) -> Iterator[Line]:
    c = checkpoint.config
    if c.num_q_heads % c.num_kv_heads:
        raise StructuralIncompatibilityError(
            "attention heads", f"{c.num_q_heads} query heads on {c.num_kv_heads}", "a multiple", "correct config.json"
        )
    yield Line("heads", f"{c.num_q_heads} query heads share {c.num_kv_heads} key/value heads of {c.head_dim}")
    kinds = {_kind(checkpoint.linear(f"model.layers.0.self_attn.{p}_proj.weight")) for p in "qkv"}
    if len(kinds) > 1:
        yield Line("fused QKV", f"q, k and v differ: {sorted(kinds)}", "warn", "they are made alike when loaded")
    else:
        yield Line("fused QKV", "q, k and v have one format")
    yield _causal(checkpoint)


def _causal(checkpoint: Checkpoint) -> Line:
    """Whether the first layer's results for a prefix change with what follows it."""
    forward = Forward(checkpoint)
    vocab = checkpoint.config.vocab_size
    with torch.no_grad():
        layer = forward.load_layer(0)
        both = [forward.layer(forward.embed([i % vocab for i in (1, 5, 9, last)]), layer)[:3] for last in (2, 7)]
    if not all(bool(torch.isfinite(one).all()) for one in both):
        raise StructuralIncompatibilityError(
            "layer 0", "results that are not finite", "finite ones", "see the line on values"
        )  # fmt: skip
    moved = float((both[0] - both[1]).abs().max())
    if moved:
        raise StructuralIncompatibilityError(
            "causal mask", f"a later token that moves earlier results by {moved:g}", "no change", "report this model"
        )
    return Line("causal mask", "a later token changes nothing before it")


def _kind(weight: LinearWeight) -> str:
    return f"{weight.format} {variant_of(weight) or ''}".strip()


def _mlp(checkpoint: Checkpoint) -> Iterator[Line]:
    c = checkpoint.config
    owners = [f"model.layers.0.mlp.experts.{e}." for e in range(c.num_experts)] or ["model.layers.0.mlp."]
    for owner in owners:
        gate, up = (checkpoint.linear(f"{owner}{p}_proj.weight") for p in ("gate", "up"))
        if gate.shape != up.shape:
            raise StructuralIncompatibilityError(
                f"{owner}up_proj.weight", f"shape {list(up.shape)}", f"{list(gate.shape)} like the gate",
                "fetch the model again",
            )  # fmt: skip
    same = _kind(gate) == _kind(up)
    yield Line(
        "gated MLP", f"gate and up {'can be fused' if same else 'differ in format'}, width {gate.shape[0]}",
        "ok" if same else "warn", "" if same else "they are made alike when loaded",
    )  # fmt: skip


def _alignment(checkpoint: Checkpoint) -> Iterator[Line]:
    """Whether rows start on the 16 bytes that a GPU thread loads, and groups are whole."""
    ragged, odd = [], []
    for name in checkpoint.names():
        if not is_linear(name):
            continue
        weight = checkpoint.linear(name)
        k = weight.shape[1]
        if weight.group_size and k % weight.group_size:
            ragged.append(name)
        if weight.data.shape[1] * weight.data.element_size() % LOAD_BYTES:
            odd.append(name)
    c = checkpoint.config
    block = BLOCK_SIZE * c.num_kv_heads * c.head_dim
    yield Line("cache blocks", f"{BLOCK_SIZE} tokens x {c.num_kv_heads} heads x {c.head_dim} = {block} numbers")
    text = (
        f"rows of whole {LOAD_BYTES} byte loads" if not odd else f"{len(odd)} matrices with rows off {LOAD_BYTES} bytes"
    )
    yield Line(
        "row alignment", text if not odd else f"{text}, first {odd[0]}", "warn" if odd else "ok",
        "runs, but slower on a GPU" if odd else "",
    )  # fmt: skip
    text = "whole" if not ragged else f"{len(ragged)} matrices end with a part of a group, first {ragged[0]}"
    yield Line(
        "groups", text, "warn" if ragged else "ok", "runs; groups of 32 or 64 may fit" if ragged else ""
    )  # fmt: skip


def _tokenizer(checkpoint: Checkpoint) -> Iterator[Line]:
    tokenizer = checkpoint.tokenizer()
    if tokenizer is None:
        yield Line("tokenizer", "none", "warn", "prompts must be token ids; add tokenizer.json for text")
        return
    size, vocab = tokenizer.vocab_size, checkpoint.config.vocab_size
    if size > vocab:
        raise StructuralIncompatibilityError(
            "tokenizer", f"{size} tokens", f"at most the model's {vocab}", "fetch tokenizer and weights from one place"
        )
    ids = tokenizer.encode(PROBE, add_special_tokens=False)
    back = tokenizer.decode(ids)
    same = back.strip() == PROBE
    yield Line(
        "tokenizer", f"{size} tokens of {vocab}, text {'survives' if same else f'comes back as {back!r}'}",
        "ok" if same else "warn", "" if same else "it may drop accents or scripts on purpose",
    )  # fmt: skip


def _values(checkpoint: Checkpoint, progress: Callable[[str, float], None]) -> Iterator[Line]:
    """Every number once: finite, and scales of the sign that their format gives them."""
    names, largest, where, zeros = checkpoint.names(), 0.0, "", []
    for count, name in enumerate(names):
        progress(f"reading {name}", count / len(names))
        if is_linear(name):
            weight = checkpoint.linear(name)
            peak = _matrix(name, weight)
        else:
            peak = _finite(name, checkpoint.tensor(name), "value")
        if peak == 0.0:
            zeros.append(name)
        if peak > largest:
            largest, where = peak, name
    yield Line("values", f"{len(names)} tensors finite, no scale of a wrong sign")
    if zeros:
        fix = "a pruned or padded tensor is fine; otherwise fetch again"
        yield Line("empty tensors", f"{len(zeros)} hold nothing but zeros, first {zeros[0]}", "warn", fix)
    if largest > SUSPICIOUS:
        yield Line(
            "largest weight", f"{largest:g} in {where}", "warn", "such a value is rarely trained: compare hashes"
        )
    else:
        yield Line("largest weight", f"{largest:.3g} in {where}")


def _matrix(name: str, weight: LinearWeight) -> float:
    """The largest magnitude of a matrix; raises for what is not finite."""
    if weight.scales is not None:
        _finite(name, weight.scales, "scale")
        turned = weight.format == "int4" and weight.mins is None  # its sign says which side of zero has more codes
        if not turned and bool((weight.scales < 0).any()):
            lowest = float(weight.scales.float().min())
            raise StructuralIncompatibilityError(name, f"a scale of {lowest:g}", "scales from 0 on", "convert it again")
    if weight.mins is not None:
        _finite(name, weight.mins, "minimum")
    return _finite(name, get_format(weight.format).dequantize(weight), "value")


def _finite(name: str, tensor: Tensor, what: str) -> float:
    wide = tensor.float()
    peak = float(wide.abs().max()) if wide.numel() else 0.0
    if not math.isfinite(peak):
        at = tuple(int(i) for i in (~torch.isfinite(wide)).nonzero()[0])
        raise StructuralIncompatibilityError(
            name, f"a {what} of {float(wide[at])} at {list(at)}", "finite numbers", "fetch or convert the model again"
        )
    return peak

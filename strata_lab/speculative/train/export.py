"""Writes a trained draft: a folder that `draft_model` takes, with a card that says where it comes from.

A folder as `strata convert` writes it (`models/strata_folder.py`), without embedding and tokenizer: those are the
target's. The head is a file of its own, so that no file is large.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strata_lab import __version__
from strata_lab.models.checkpoint import Checkpoint, is_linear, plain_linear
from strata_lab.models.draft_part import FEATURES, PROBE, state_mark
from strata_lab.models.strata_folder import MANIFEST, VERSION, StrataCheckpoint
from strata_lab.quant import convert
from strata_lab.quant.base import LinearWeight
from strata_lab.quant.convert_files import Entries, precision, replace_file, write_tensors
from strata_lab.speculative.train.network import NORM, Network

CARD = "README.md"
GRANULARITY = {"int8": "channel"}  # a scale per row: what the GPU's kernels multiply by fastest, and enough for guesses


def write_draft(
    folder: Path, draft: Network, to_target: Tensor, target: Checkpoint, weights: str, kind: str,
    facts: Mapping[str, Any], seen: Sequence[int] = (),
) -> int:  # fmt: skip
    """Write the folder, whole or not at all; bytes of its tensors.

    Args:
        folder: must not exist; its parent must.
        draft: the trained draft.
        to_target: its vocabulary, [Vd] int64 ascending.
        target: whose draft it is.
        weights: number format of its matrices.
        kind: what it sees.
        facts: for the card; see `card`.
        seen: behind which of the target's layers lie the states that it sees.
    """
    part = folder.parent / f".{folder.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    tensors: Entries = {}
    for file, values in _files(draft, weights).items():
        entries = write_tensors(part / file, values)
        tensors |= {name: {"file": file} | entry for name, entry in entries.items()}
    tokenizer = target.tokenizer()
    manifest = {
        "strata_checkpoint": VERSION, "tool_version": __version__, "stored_format": weights,
        "granularity": GRANULARITY.get(weights), "precision": precision(tensors), "config": asdict(draft.config),
        "generation": {}, "tensors": tensors,
        "draft": {
            "target": target.name, "vocab_size": target.config.vocab_size, "to_target": to_target.tolist(),
            "kind": kind, "mark": state_mark(target.tensor(NORM)) if kind == FEATURES else 0,
            "seen": list(seen) if kind == FEATURES else [],
            "probe": None if tokenizer is None else tokenizer.encode(PROBE), "facts": dict(facts),
        },
    }  # fmt: skip
    (part / CARD).write_text(card(target.name, draft, kind, facts), encoding="utf-8")
    replace_file(part / MANIFEST, json.dumps(manifest, separators=(",", ":")).encode())
    os.rename(part, folder)
    StrataCheckpoint(folder).close()  # what was written is what is read
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _files(draft: Network, weights: str) -> dict[str, dict[str, LinearWeight | Tensor]]:
    files: dict[str, dict[str, LinearWeight | Tensor]] = {"layers.safetensors": {}, "head.safetensors": {}}
    for name, tensor in draft.tensors.items():
        value = tensor.detach().float().cpu()
        file = "layers.safetensors" if name.startswith("model.layers.") else "head.safetensors"
        matrix = is_linear(name)
        files[file][name] = _packed(value, weights) if matrix else value.to(torch.bfloat16)
    return files


def _packed(value: Tensor, weights: str) -> LinearWeight:
    return convert(plain_linear(value), weights, GRANULARITY.get(weights))


def card(target: str, draft: Network, kind: str, facts: Mapping[str, Any]) -> str:
    """The data card of a draft of this kind.

    `facts`: recipe ("recipe"), what was read ("texts", "tokens", "greedy", "coverage"), what training did ("steps",
    "places", "seconds", "loss", "hardware") and acceptance ("before", "after", and "answers" with "answers_coverage"
    where the bench's questions were asked).
    """
    reads = "embedding and its hidden states" if kind == FEATURES else "embedding"
    c, after, before = draft.config, facts["after"], facts["before"]
    rows = zip(range(1, 99), before["by_position"], after["by_position"], after["tokens_per_step"], strict=False)
    recipe = "\n".join(f"- {name}: {value}" for name, value in facts["recipe"].items())
    return (
        f"""# A draft for {target}

Guesses what {target} says next, for `speculative="draft"`. It is no model of its own: it reads the target's {reads}
and knows {c.vocab_size:,} of its tokens. Texts are the target's, whatever it guesses.

- Shape: layers of width {c.hidden_size} ({c.architecture}): {c.num_layers}; a head over {c.vocab_size:,} tokens.
- Learned from: {facts["tokens"]:,} tokens in {facts["texts"]:,} texts that {target} wrote
  ({facts["greedy"]:.0%} of them greedily), by distilling its probabilities; the vocabulary covers
  {facts["coverage"]:.2%} of the tokens of other texts.
- Training: {facts["steps"]:,} steps, {facts["places"]:,} places, {facts["seconds"]:.0f} s on {facts["hardware"]},
  last loss {facts["loss"]:.3f} nats.
- Licence: that of the target, whose layers it began as.

## Acceptance

Greedy guesses in {after["places"]:,} places of texts to prompts it has not seen. "true" counts guesses behind true
ones; "tokens per step" is of windows of so many guesses, the target's own token included.

| guess | true before training | true | tokens per step |
|---:|---:|---:|---:|
"""
        + "\n".join(f"| {n} | {a:.1%} | {b:.1%} | {t:.2f} |" for n, a, b, t in rows)
        + _answers(facts)
        + f"""

## Recipe

{recipe}
"""
    )


def _answers(facts: Mapping[str, Any]) -> str:
    """Acceptance in what the bench asks, as it came to be."""
    measured = facts.get("answers") or []
    if not measured:
        return ""
    last, covered = measured[-1], facts["answers_coverage"]
    true = ", ".join(f"{share:.1%}" for share in last["by_position"][:5])
    tokens = ", ".join(f"{count:.2f}" for count in last["tokens_per_step"][:5])
    return f"""

In greedy answers to the questions that `strata_lab.bench.speculation` asks ({last["places"]:,} places, of whose tokens
the vocabulary covers {covered:.2%}) guesses 1 to 5 were true in {true}, and tokens per step {tokens}.
"""

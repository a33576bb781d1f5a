"""What `sweep_moe` tries, and how it tells what it found."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

HIDDEN, WIDTH, EXPERTS, TOP_K = 2560, 1024, 64, 8  # `qwen3.8-flash`
BEST = 5
# formats that can be multiplied in float16; integers only so, since what they do in float32 was swept and is slower
HALVES = {"fp8": (True, False), "int8": (True,), "int4": (True,)}
ROW_SCALES = ("fp8", "int8")  # in the variants that an engine makes

Overrides = dict[str, Any]


def _gate(prefix: str, tiles: int, warps: int, programs: int, registers: int | None, **rest: Any) -> Overrides:
    sizes = {"tiles": tiles, "warps": warps, "programs": programs, "registers": registers}
    return {f"{prefix}_{k}": v for k, v in sizes.items()} | {"half": True} | rest


def _one(rows: int, warps: int, registers: int | None, late: bool) -> Overrides:
    return {"one_rows": rows, "one_warps": warps, "one_registers": registers, "one_late": late, "half": True}


# by estimate the best in FP8: few registers, so that many bytes are outstanding, and no second wave nearly empty
EXPECTED = [
    _gate("gate", 2, 4, 0, 128), _gate("gate", 1, 8, 0, 64), _gate("gate", 1, 8, 0, None),
    _gate("gate", 2, 4, 4, 128), _gate("gate", 2, 4, 3, None), _gate("gate", 1, 8, 4, 64), _gate("gate", 2, 8, 0, 128),
    _one(4, 4, 96, True), _one(4, 4, None, False), _one(8, 4, 168, True), _one(2, 4, 64, True), _one(4, 8, None, True),
    *(_gate("shared", 1, 8, p, r, pairs=m) for p in (0, 3) for r in (80, 96) for m in (1, 2)),
    *(_gate("shared", 2, 4, p, r, pairs=m) for p in (0, 3) for r in (168, 128) for m in (1, 2)),
    *(_gate("down", 4, 4, 0, r, pairs=m) for r in (None, 80, 96) for m in (1, 2)),
    *(_gate("down", 2, w, 0, r, pairs=m) for w in (4, 8) for r in (None, 64) for m in (1, 2)),
]  # fmt: skip


@dataclass
class Result:
    """One candidate of one stage.

    Attributes:
        stage: "logits", "select", "gate_up", "down", "combine" or "block".
        tokens: in the step.
        weights: format of the experts.
        overrides: of the format's `MoeConfig`.
        us: microseconds of a call; None if it failed.
        byte_us: microseconds that the stage's bytes take at the card's bandwidth.
        error: the largest error of an element, of its row's largest; None if it failed before.
        problem: why there is no time.
    """

    stage: str
    tokens: int
    weights: str
    overrides: Overrides = field(default_factory=dict)
    us: float | None = None
    byte_us: float = 0.0
    error: float | None = None
    problem: str = ""


def stages(tokens: int) -> tuple[str, ...]:
    """Kernels of a decode step, in order."""
    return ("logits", "gate_up", "down") if tokens == 1 else ("logits", "select", "gate_up", "down", "combine")


def candidates(stage: str, tokens: int, weights: str) -> list[Overrides]:
    """Overrides worth trying: the present configuration, the `EXPECTED`, and others in no order: any part is fair."""
    halves = HALVES.get(weights, (False,))
    if stage == "gate_up":
        prefix = "gate" if tokens == 1 else "shared"
        found = list(_expert_candidates(prefix, tokens, halves, 2 * HIDDEN, weights))
    elif stage == "down" and tokens == 1:
        found = list(_one_candidates(halves, weights))
    elif stage == "down":
        found = list(_expert_candidates("down", tokens, halves, WIDTH, weights))
    else:
        found = []
    random.Random(0).shuffle(found)
    first = [o for o in EXPECTED if o in found]
    return [{}, *first, *(o for o in found if o not in first)]


def _width(weights: str) -> float:
    """Bytes of a weight."""
    return {"bf16": 2.0, "int4": 0.5}.get(weights, 1.0)


def _expert_candidates(
    prefix: str, tokens: int, halves: Sequence[bool], columns: int, weights: str
) -> Iterator[Overrides]:  # fmt: skip
    pairs_tried = (2,) if tokens == 1 else (1, 2)
    for tiles, warps, pairs, half in itertools.product((1, 2, 4, 8), (2, 4, 8, 16), pairs_tried, halves):
        held = int(tiles * columns * _width(weights) / 128)  # registers of a thread that hold weights
        rows = tiles * warps
        if not 8 <= rows <= 32 or not 8 <= held <= 128 or (prefix != "down" and tiles == 8):
            continue
        if not half and rows > 16:
            continue
        for programs, registers in itertools.product((0, 2, 3, 4, 6), _register_limits(held)):
            if programs and (prefix == "down" or not half) and programs != 4:
                continue  # a sample of these will do
            if programs and (programs * warps > 32 or programs * warps < 8):
                continue
            sizes = {"tiles": tiles, "warps": warps, "programs": programs, "registers": registers}
            yield (
                {f"{prefix}_{k}": v for k, v in sizes.items()}
                | {"half": half}
                | ({} if tokens == 1 else {"pairs": pairs})
            )


def _one_candidates(halves: Sequence[bool], weights: str) -> Iterator[Overrides]:
    for rows, warps, half in itertools.product((1, 2, 4, 8), (2, 4, 8), halves):
        held = int(rows * TOP_K * WIDTH * _width(weights) / (warps * 128))
        if not 16 <= held <= 128:
            continue
        for late, registers in itertools.product((True, False), _register_limits(held)):
            if late and weights not in ROW_SCALES:
                continue
            if not half and late:
                continue
            yield {"one_rows": rows, "one_warps": warps, "one_registers": registers, "one_late": late, "half": half}


def _register_limits(held: int) -> list[int | None]:
    """None, and what lets whole programs more be resident, if the weights leave room for the rest."""
    return [None, *(r for r in (56, 64, 80, 96, 128, 168) if held + 24 <= r <= 2 * held + 48)]


def merged(gates: Sequence[Overrides], downs: Sequence[Overrides]) -> list[Overrides]:
    """Configurations of the whole block from the best of two stages; what both decide must agree."""
    found = []
    for gate, down in itertools.product(gates, downs):
        if all(gate[k] == down[k] for k in gate.keys() & down.keys()):
            found.append(gate | down)
    return found


def best(results: Sequence[Result], stage: str, tokens: int, weights: str, count: int = BEST) -> list[Result]:
    """The fastest candidates of a stage."""
    found = [r for r in results if (r.stage, r.tokens, r.weights) == (stage, tokens, weights) and r.us is not None]
    return sorted(found, key=lambda r: r.us or 0.0)[:count]


def table(results: Sequence[Result], stage: str, tokens: int, weights: str) -> str:
    """The best of a stage as text."""
    mine = [r for r in results if (r.stage, r.tokens, r.weights) == (stage, tokens, weights)]
    failed = [r for r in mine if r.us is None]
    lines = [f"{weights} tokens {tokens} {stage}: {len(mine)} tried, {len(failed)} failed"]
    present = next((r for r in mine if not r.overrides and r.us is not None), None)
    rows = best(results, stage, tokens, weights)
    for r in [*rows, *([present] if present is not None and present not in rows else [])]:
        assert r.us is not None
        share = f" bytes {r.byte_us:6.2f} us ({100 * r.byte_us / r.us:3.0f}%)" if r.byte_us else ""
        lines.append(f"  {r.us:7.2f} us{share}  {json.dumps(r.overrides) if r.overrides else 'present'}")
    lines += [f"  failed: {r.problem[:200]} {json.dumps(r.overrides)}" for r in failed[:2]]
    return "\n".join(lines)

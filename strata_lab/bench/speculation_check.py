"""Greedy texts with and without drafts, token by token: with as many guesses as the window has, in every step.

All requests of a kind run together, on both sides. Where two texts part, the record says how far apart the two tokens'
logits are there: rounding can decide between logits that are the same to the last digits, and nothing else may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from strata_lab.bench.drafted_texts import NUM_REQUESTS, TextKind
from strata_lab.bench.harness import Environment, Record
from strata_lab.bench.in_turns import run_all
from strata_lab.sampling_params import SamplingParams

CHECKED_TOKENS, CHECKED_BATCH, CHECKED_DRAFTS = 128, NUM_REQUESTS, 3
ALTERNATIVES = 20  # log probabilities that are asked for where texts part


def check(
    engine: Any, kinds: Sequence[TextKind], drafter: str, max_tokens: int | None,
    conditions: Callable[[Any, TextKind, str], dict[str, Any]], script: str,
) -> Iterator[Record]:  # fmt: skip
    """A record per kind of text.

    Args:
        engine: an open `LLMEngine` whose background loop does not run.
        kinds: of text.
        drafter: "ngram" or "draft".
        max_tokens: of each text; None is `CHECKED_TOKENS`.
        conditions: of a record, from engine, kind and drafter.
        script: that makes it.
    """
    environment = Environment.now(engine.device.type)
    length = max_tokens or CHECKED_TOKENS
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    for kind in kinds:
        prompts = [kind.prompt(number) for number in range(NUM_REQUESTS)]
        sides = []
        for setting in ("none", drafter):
            assert engine.apply(speculative=setting).ok, setting
            speculation = engine.parts.speculation
            before = engine.stats()
            policy, speculation.policy = getattr(speculation, "policy", None), None  # every step drafts what it can
            sides.append(run_all(engine, prompts, [params] * len(prompts)))
            speculation.policy = policy
        after = engine.stats()
        assert engine.apply(speculative="none").ok
        pairs = [
            (n, *pair) for n, pair in enumerate(zip(*sides, strict=True)) if pair[0].token_ids != pair[1].token_ids
        ]
        yield environment.record(
            f"speculation/{drafter}/{kind.name}/greedy", script=f"{script} --check",
            conditions=conditions(engine, kind, drafter) | {"batch": CHECKED_BATCH, "output_tokens": length},
            metrics={
                "texts": len(prompts), "different_texts": len(pairs),
                "differences": [_difference(engine, number, plain, drafted) for number, plain, drafted in pairs],
                "tokens": sum(len(output.token_ids) for output in sides[1]),
                "drafted_tokens": after.num_drafted_tokens - before.num_drafted_tokens,
                "accepted_tokens": after.num_accepted_tokens - before.num_accepted_tokens,
            },
            note="greedy, as many guesses as the window has in every step",
        )  # fmt: skip


def _difference(engine: Any, number: int, plain: Any, drafted: Any) -> dict[str, Any]:
    """Where two texts part, and the logits' distance there; None where it is not among the likeliest."""
    ids = plain.token_ids, drafted.token_ids
    place = next(i for i, (a, b) in enumerate(zip(*ids, strict=True)) if a != b)
    tokens = [one[place] for one in ids]
    prompt = [*plain.prompt_token_ids, *plain.token_ids[:place]]
    asked = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=ALTERNATIVES)
    top = run_all(engine, [prompt], [asked])[0].logprobs[0].top
    gap = top[tokens[0]] - top[tokens[1]] if all(token in top for token in tokens) else None
    return {"request": number, "token": place, "without": tokens[0], "with": tokens[1], "logit_gap": gap}

"""What came of groups of requests with and without guesses, as the metrics of a record. It runs nothing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from strata_lab.bench.harness import Spread, median_interval
from strata_lab.bench.in_turns import Pair, ratio_interval, speed_ratio, undisturbed_pairs
from strata_lab.bench.measure import RunFailed
from strata_lab.events import Draft
from strata_lab.speculative.loops import loop_start


@dataclass(frozen=True)
class Group:
    """What came of one group of requests.

    Attributes:
        pairs: the same pieces of its texts with and without drafts.
        off_ms, on_ms: wall time until its last text had ended.
        off_texts, on_texts: token ids of each request.
        drafts: verified proposals.
        num_steps, num_drafted: steps with the policy on, and those of them with drafts.
        num_decodes: requests that decoded, summed over these steps.
        num_tokens: what they got.
        idle_ms: of each step without drafts, what the policy and looking took, and the whole.
        pairs_capturing: pairs that do not count, since something was captured in them.
    """

    pairs: tuple[Pair, ...]
    off_ms: float
    on_ms: float
    off_texts: tuple[tuple[int, ...], ...]
    on_texts: tuple[tuple[int, ...], ...]
    drafts: tuple[Draft, ...]
    num_steps: int
    num_drafted: int
    num_decodes: int
    num_tokens: int
    idle_ms: tuple[tuple[float, float], ...] = ()
    pairs_capturing: int = 0

    @property
    def loops(self) -> int:
        """Texts of both sides that go round in circles."""
        return sum(loop_start(text) < len(text) for text in (*self.off_texts, *self.on_texts))


def figures(every: Sequence[Group], loops: bool = False) -> dict[str, Any]:
    """Metrics of a record: what was gained, how sure that is, and what came true of the guesses.

    Groups with a text that goes round in circles are left out, unless `loops` are what is measured. Texts are cut
    before that, but where rounding makes another one of them it may loop all the same.
    """
    groups = [group for group in every if loops or not group.loops]
    found = [pair for group in groups for pair in group.pairs]
    if not found:
        raise RunFailed("in no step all requests decoded, nothing was captured and no text looped; try more --tokens")
    pairs, idle = undisturbed_pairs(found), [both for group in groups for both in group.idle_ms]
    ratios = [pair.ratio for pair in pairs]
    windows = [draft for group in groups for draft in group.drafts]
    by_place: tuple[list[int], list[int]] = [], []
    kinds: dict[str, dict[str, int]] = {}
    for draft in windows:
        draft.count_into(*by_place)
        kind = kinds.setdefault(draft.kind, {"windows": 0, "drafted": 0, "accepted": 0})
        kind["windows"] += 1
        kind["drafted"] += len(draft.token_ids)
        kind["accepted"] += draft.num_accepted
    accepted = sum(by_place[1])
    texts = [text for group in groups for text in group.on_texts]
    off = [pair.off for pair in pairs]
    plain_tok_s, net = 1e3 * sum(s.tokens for s in off) / sum(s.ms for s in off), speed_ratio(pairs)
    return {
        "net": net,
        "net_interval": [round(end, 4) for end in ratio_interval(pairs)],
        "net_of_median_pair": Spread.of(ratios).median,
        "net_of_median_pair_interval": [round(end, 4) for end in median_interval(ratios)],
        "pairs": len(pairs),
        "pairs_disturbed": len(found) - len(pairs),
        "pairs_capturing": sum(group.pairs_capturing for group in groups),
        "policy_share": sum(own for own, _ in idle) / sum(ms for _, ms in idle) if idle else None,
        "policy_us": 1e3 * statistics.median(own for own, _ in idle) if idle else None,
        "net_until_last": sum(group.off_ms for group in groups) / sum(group.on_ms for group in groups),
        "output_tok_s": net * plain_tok_s,
        "plain_tok_s": plain_tok_s,
        "tokens_per_step": sum(group.num_tokens for group in groups) / sum(group.num_decodes for group in groups),
        "drafted_steps": sum(group.num_drafted for group in groups) / sum(group.num_steps for group in groups),
        "acceptance_rate": accepted / sum(by_place[0]) if windows else None,
        "drafted_by_position": by_place[0],
        "accepted_by_position": by_place[1],
        "kinds": kinds,
        "loops": sum(loop_start(text) < len(text) for text in texts),
        "groups_looping": len(every) - len(groups),
        "loop_share": sum(d.num_accepted for d in windows if d.is_loop) / accepted if accepted else 0.0,
        "texts": len(texts),
        "different_texts": sum(
            one != two for group in groups for one, two in zip(group.off_texts, group.on_texts, strict=True)
        ),
    }  # fmt: skip


def verdict(settings: tuple[Any, Any], batch: int) -> dict[str, Any]:
    """What the policy makes of a batch size, and of what steps cost: metrics of a record."""
    policy = settings[1].speculation.policy
    state, reason = policy.verdict(batch)
    kinds = {
        name: {"first": round(first, 3), "next": round(later, 3), "guesses": guesses}
        for name, first, later, guesses in policy.kinds(batch)
    }
    costs = {
        curve: {str(n): round(ms, 4) for n, ms in points.items()} for curve, points in policy.costs.points().items()
    }
    return {"state": state, "reason": reason, "expected": kinds, "costs_ms": costs}

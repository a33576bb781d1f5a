"""Which experts of a mixture are chosen, from the counts that the engine keeps while the panel is open."""

from __future__ import annotations

import math

from strata_lab.events import Event, ExpertEvent
from strata_lab.workbench.details import Context
from strata_widgets import ExpertMap
from strata_widgets.expert_map import pack_counts

DENSE = "None: this model is dense."
UNKNOWN = "\u2013"
WAITING = "Counting has begun; the map fills with the tokens of the next steps."
COUNTED = "Counted by the router, a small part of a step, while this panel is open; closed, nothing is counted."


class ExpertsDetail:
    """Layers by experts, counted since the panel was first opened, or since somebody asked to count anew."""

    name, title = "experts", "Experts"
    tip = "How often each expert of each layer is chosen: whether the router spreads its tokens."

    def __init__(self) -> None:
        self.map = ExpertMap(note=WAITING)
        self.widgets = (self.map,)
        self.map.on_restart(self.restart)
        self._latest: ExpertEvent | None = None
        self._known: tuple[int, ...] | None = None  # counts as read last
        self._base: tuple[int, ...] | None = None  # counts when counting began for this panel

    def restart(self) -> None:
        """Begin to count anew."""
        self._base, self._known = self._known, None

    def say(self, note: str) -> None:
        """Put a sentence under the map."""
        self.map.push(note=note)

    def take(self, event: Event) -> None:
        """Take in an event."""
        if isinstance(event, ExpertEvent):
            self._latest = event

    def push(self, context: Context, now_s: float) -> None:
        """Send counts that have changed."""
        event, self._latest = self._latest, None
        if event is None or event.counts == self._known:
            return
        base = self._base = self._base or event.counts
        self._known = event.counts
        counts = [now - then for now, then in zip(event.counts, base, strict=True)]
        self.map.push(
            counts=pack_counts(counts),
            num_layers=event.num_layers,
            num_experts=event.num_experts,
            top_k=event.top_k,
            numbers=expert_numbers(counts, event.num_experts, event.top_k),
            note=COUNTED,
            enabled=True,
        )


def evenness(row: list[int]) -> float:
    """Entropy of the shares of one layer over that of even shares: 1 is even, 0 all to one expert; NaN without any."""
    total = sum(row)
    if not total or len(row) < 2:
        return math.nan
    shares = [count / total for count in row if count]
    return -sum(share * math.log(share) for share in shares) / math.log(len(row))


def expert_numbers(counts: list[int], num_experts: int, top_k: int) -> list[dict[str, str]]:
    """The figures above the map, with their formulas."""
    layers = [counts[i : i + num_experts] for i in range(0, len(counts), num_experts)]
    busy = [row for row in layers if sum(row)]
    most, where = max(((max(row) / sum(row), i) for i, row in enumerate(layers) if sum(row)), default=(math.nan, 0))
    never = sum(count == 0 for count in counts)
    even = sum(map(evenness, busy)) / len(busy) if busy else math.nan
    expert = layers[where].index(max(layers[where]))
    rows = (
        ("tokens", f"{sum(layers[0]) // top_k}", f"Choices of layer 0 / {top_k} experts a token; of prompts, too."),
        (
            "busiest",
            f"{most:.1%} (layer {where}, expert {expert})" if busy else UNKNOWN,
            "Largest of count / sum of the layer's counts (ExpertEvent.counts).",
        ),
        ("never chosen", f"{never} of {len(counts)}", "Cells of the map whose count is 0."),
        (
            "evenness",
            f"{even:.3f}" if busy else UNKNOWN,
            "Mean over layers of -sum(p ln p) / ln(experts), p = share: 1 is even, 0 is one expert for all.",
        ),
    )
    return [dict(zip(("label", "value", "tip"), row, strict=True)) for row in rows]

"""What a chart of speculation shows, computed from an engine's events: lanes of windows, acceptance by position.

Torch-free.

It draws nothing and keeps nothing; call it again with the events so far.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from strata_lab.events import Event, SpeculationEvent, StepEvent


@dataclass(frozen=True, slots=True)
class LaneWindow:
    """One step of one request.

    Attributes:
        index: position of its first token among the request's generated tokens.
        texts: text of each token that the step generated.
        num_accepted: the first so many were drafts.
        num_rejected: drafts behind them that did not come true.
        kind: what kind of text the drafter took it for; "" for a step without drafts.
        is_loop: the text goes round in circles.
    """

    index: int
    texts: tuple[str, ...]
    num_accepted: int
    num_rejected: int
    kind: str
    is_loop: bool


@dataclass(frozen=True, slots=True)
class SpeculationChart:
    """Lanes and sums of a span of events.

    Attributes:
        lanes: request id to its windows, oldest first.
        drafted_by_position, accepted_by_position: verified and true drafts by place in the window.
        tokens_per_step: generated tokens over the steps of decoding requests.
        changes: (seconds, state, reason) each time drafting stopped or went on.
    """

    lanes: dict[str, tuple[LaneWindow, ...]]
    drafted_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]
    tokens_per_step: float
    changes: tuple[tuple[float, str, str], ...]

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Share of true drafts by place in the window, 0.0 to 1.0: of those verified there."""
        return tuple(a / d for a, d in zip(self.accepted_by_position, self.drafted_by_position, strict=True))

    def as_dict(self) -> dict[str, Any]:
        """Plain lists and dicts, for a widget's trait."""
        return asdict(self) | {"acceptance_by_position": list(self.acceptance_by_position)}


def speculation_chart(events: Iterable[Event], last: int = 200) -> SpeculationChart:
    """The chart of a span of events; of each lane the last so many windows."""
    lanes: dict[str, list[LaneWindow]] = {}
    drafted: list[int] = []
    accepted: list[int] = []
    changes = []
    num_windows = num_tokens = 0
    for event in events:
        if isinstance(event, SpeculationEvent):
            changes.append((event.t_s, event.state, event.reason))
        if not isinstance(event, StepEvent):
            continue
        by_request = {window.request_id: window for window in event.drafts}
        texts: dict[str, list[str]] = {}
        first: dict[str, int] = {}
        for token in event.tokens:
            texts.setdefault(token.request_id, []).append(token.text)
            first.setdefault(token.request_id, token.index)
        for request_id, generated in texts.items():
            window = by_request.get(request_id)
            true = 0 if window is None else min(window.num_accepted, len(generated))
            false = 0 if window is None else len(window.token_ids) - window.num_accepted
            kind, is_loop = ("", False) if window is None else (window.kind, window.is_loop)
            entry = LaneWindow(first[request_id], tuple(generated), true, false, kind, is_loop)
            lanes.setdefault(request_id, []).append(entry)
            if entry.index > 0:  # the first token comes with the prompt
                num_windows += 1
                num_tokens += len(generated)
        for window in event.drafts:
            window.count_into(drafted, accepted)
    return SpeculationChart(
        lanes={name: tuple(windows[-last:]) for name, windows in lanes.items()},
        drafted_by_position=tuple(drafted),
        accepted_by_position=tuple(accepted),
        tokens_per_step=num_tokens / num_windows if num_windows else 1.0,
        changes=tuple(changes),
    )

"""What speculation proposes and what is taken of it, from the drafts of steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from strata_lab.events import Draft, Event, SpeculationEvent, StepEvent
from strata_lab.workbench.details import Context
from strata_widgets import DraftLanes

KEPT_ROUNDS = 8  # per request, and on its line
MAX_LANES = 8
NOTHING = "No proposals: speculation is off, or nothing was proposed yet. Switch it on among the settings."


class DraftsDetail:
    """The latest proposals, and acceptance by place since the panel was opened."""

    name, title, tip = "drafts", "Speculation", "What the drafter proposed, how much was taken, and at which place."

    def __init__(self) -> None:
        self.lanes = DraftLanes(note=NOTHING)
        self.widgets = (self.lanes,)
        self._rounds: dict[str, deque[Draft]] = {}
        self._drafted: list[int] = []  # by place
        self._accepted: list[int] = []
        self._kinds: dict[str, list[int]] = {}  # kind of text to proposed, taken
        self._off: dict[str, str] = {}  # kind of text, or "all", to why nothing is proposed for it
        self._num_rounds = 0
        self._changed = False

    def take(self, event: Event) -> None:
        """Take in an event."""
        if isinstance(event, SpeculationEvent):
            self._off = {
                name: f"Off: a first guess would come true {first:.0%} of the time, the next ones {later:.0%}; too few."
                for name, first, later, guesses in event.kinds
                if not guesses
            }
            if event.state == "off":
                self._off["all"] = event.reason
            self._changed = True
        for draft in event.drafts if isinstance(event, StepEvent) else ():
            if not draft.token_ids:
                continue
            self._changed = True
            self._num_rounds += 1
            rounds = self._rounds.pop(draft.request_id, deque(maxlen=KEPT_ROUNDS))
            rounds.append(draft)
            self._rounds[draft.request_id] = rounds  # the latest request is last
            if len(self._rounds) > MAX_LANES:
                del self._rounds[next(iter(self._rounds))]
            draft.count_into(self._drafted, self._accepted)
            kind = self._kinds.setdefault(draft.kind, [0, 0])
            kind[0] += len(draft.token_ids)
            kind[1] += draft.num_accepted

    def push(self, context: Context, now_s: float) -> None:
        """Send what is new."""
        if not self._changed:
            return
        self._changed = False
        decode = getattr(context.engine.tokenizer, "decode", None)
        self.lanes.push(
            lanes=[
                {
                    "id": request_id,
                    "title": context.names.title(request_id),
                    "color": context.names.color(request_id),
                    "rounds": [_round(draft, decode) for draft in rounds],
                }
                for request_id, rounds in self._rounds.items()
            ],
            by_position=[
                {"position": i + 1, "drafted": drafted, "accepted": accepted}
                for i, (drafted, accepted) in enumerate(zip(self._drafted, self._accepted, strict=True))
            ],
            numbers=self._numbers() if self._num_rounds else [],
            note=self._note(),
        )

    def _note(self) -> str:
        """Why nothing is proposed; nothing where something is."""
        if "all" in self._off:
            return f"Off: {self._off['all']}."
        return "" if self._num_rounds else NOTHING

    def _numbers(self) -> list[dict[str, Any]]:
        proposed, taken = sum(self._drafted), sum(self._accepted)
        rows = (
            (
                "accepted",
                f"{taken / proposed:.0%}",
                f"Tokens taken / proposed: {taken} / {proposed}, since it was opened.",
            ),
            (
                "tokens per round",
                f"{1 + taken / self._num_rounds:.2f}",
                "1 + tokens taken / rounds: the model adds its own.",
            ),
            ("rounds", str(self._num_rounds), "Proposals that a step has verified (StepEvent.drafts)."),
        )
        return [dict(zip(("label", "value", "tip"), row, strict=True)) for row in (*rows, *self._by_kind())]

    def _by_kind(self) -> list[tuple[str, str, str]]:
        """A number for each kind of text: where it is off, its tip says why."""
        rows = []
        for kind in sorted({*self._kinds, *self._off} - {"", "all"}):
            proposed, taken = self._kinds.get(kind, (0, 0))
            share = f"{taken / proposed:.0%}" if proposed else ""
            tip = self._off.get(
                kind, f"Of texts that look like this to the drafter: taken / proposed, {taken} / {proposed}."
            )
            rows.append((kind, " ".join(part for part in (share, "off" if kind in self._off else "") if part), tip))
        return rows


def _round(draft: Draft, decode: Callable[[list[int]], str] | None) -> dict[str, list[str]]:
    texts = [decode([token]) if decode else f"#{token}" for token in draft.token_ids]
    return {"accepted": texts[: draft.num_accepted], "rejected": texts[draft.num_accepted :]}

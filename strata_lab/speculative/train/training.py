"""The training loop: the target's probabilities into the draft, with AdamW, in plain torch.

It stops after so many steps or seconds, whichever comes first; the learning rate falls to zero by then. What it needs
to go on is written down every now and then: after an interruption training continues as if there had been none (by
steps exactly; seconds count those before).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strata_lab.settings import ConfigError
from strata_lab.speculative.traffic import Text
from strata_lab.speculative.train.lessons import Lesson
from strata_lab.speculative.train.measure import Acceptance, HeldOut
from strata_lab.speculative.train.network import Network
from strata_lab.speculative.train.texts import Rows, batches
from strata_lab.speculative.train.told import Told

BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 0.01, 1.0
WARM_UP = 0.04  # of the training
MEASUREMENTS = 4  # of acceptance on the way
SAVE_EVERY_S = 60.0
LOSS_FADE = 0.95

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Schedule:
    """How to train.

    Attributes:
        steps, seconds: when to stop, whichever comes first.
        batch_tokens: places of a batch, padding included.
        most_tokens: of a text.
        learning_rate: at its highest.
        seed: of the order of texts.
    """

    steps: int
    seconds: float
    batch_tokens: int
    most_tokens: int = 512
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("batch_tokens", 16), ("most_tokens", 16)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}; try {max(least, 512)}")
        if not self.seconds > 0 or not 0 < self.learning_rate < 1:
            raise ConfigError(
                f"seconds={self.seconds} must be above 0 and learning_rate={self.learning_rate} between 0 and 1; "
                "try 300 and 0.001"
            )


@dataclass
class Course:
    """How training went so far.

    Attributes:
        step, tokens, seconds: steps, places learned from, and time, of all runs together.
        loss: faded mean, nats per place.
        measured: (step, acceptance), the first one before any training.
        answered: the same of answers to the bench's questions, where there are any.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float | None = None
    measured: list[tuple[int, Acceptance]] = field(default_factory=list)
    answered: list[tuple[int, Acceptance]] = field(default_factory=list)


class Training:
    """One draft being trained.

    Args:
        lesson: what is learned, and the target.
        draft: changed in place.
        texts: to learn from.
        held_out: to measure with.
        schedule: how.
        state: a file for what is needed to go on; it is read if it is there.
        asked: to measure with as well: what the bench asks.
    """

    def __init__(
        self,
        lesson: Lesson,
        draft: Network,
        texts: Sequence[Text],
        held_out: HeldOut,
        schedule: Schedule,
        state: Path,
        asked: HeldOut | None = None,
    ) -> None:
        self.lesson, self.draft, self.texts = lesson, draft, texts
        self.held_out, self.schedule, self._state, self.asked = held_out, schedule, state, asked
        self._told = Told(lesson.teacher, texts, schedule.most_tokens, lesson.seen)
        self.course = Course()
        self.device = draft.head.device
        values = list(draft.tensors.values())
        groups = [
            {"params": [v for v in values if v.dim() > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [v for v in values if v.dim() == 1], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, betas=BETAS, fused=self.device.type == "cuda")
        if state.is_file():
            self._load()

    def run(self, progress: Progress) -> Course:
        """Train to the end of the schedule; an interruption keeps what was learned so far."""
        s, course = self.schedule, self.course
        before, started = course.seconds, time.monotonic()
        saved = started
        if not course.measured:
            self._measure()
        rows = batches(self.texts, s.batch_tokens, s.most_tokens, s.seed, course.step)
        following = next(rows)
        try:
            while (done := max(course.step / s.steps, course.seconds / s.seconds)) < 1.0:
                batch, loss = following, self._learn(following.to(self.device), done)
                following = next(rows)  # while the device learns
                self._count(loss.item(), int(batch.learned.sum()))  # SYNC: numbers for people
                if done * MEASUREMENTS >= len(course.measured):
                    self._measure()
                course.seconds = before + time.monotonic() - started
                if time.monotonic() - saved > SAVE_EVERY_S:
                    self._save()
                    saved = time.monotonic()
                progress(self._line(), done)
        finally:
            self._save()
        if course.measured[-1][0] != course.step:
            self._measure()
            self._save()
        return course

    def _line(self) -> str:
        course = self.course
        guesses = f"{course.measured[-1][1].by_position[0]:.1%}"
        if course.answered:
            guesses += f", in the bench's chats {course.answered[-1][1].by_position[0]:.1%}"
        return f"step {course.step}, loss {course.loss:.3f}, first guesses true {guesses}"

    def _learn(self, rows: Rows, done: float) -> Tensor:
        """A step; its loss."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.schedule.learning_rate * rate(done)
        loss = self.lesson.loss(self.draft, rows, self._told(rows), self.course.step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(self.draft.tensors.values()), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _count(self, loss: float, places: int) -> None:
        course = self.course
        course.step += 1
        course.tokens += places
        course.loss = loss if course.loss is None else LOSS_FADE * course.loss + (1 - LOSS_FADE) * loss

    def _measure(self) -> None:
        course = self.course
        course.measured.append((course.step, self.held_out.measure(self.draft)))
        if self.asked is not None:
            course.answered.append((course.step, self.asked.measure(self.draft)))

    def _save(self) -> None:
        """Write what is needed to go on, whole or not at all."""
        part = self._state.with_suffix(".part")
        state = {
            "tensors": {name: value.detach() for name, value in self.draft.tensors.items()},
            "optimizer": self._optimizer.state_dict(), "course": asdict(self.course), "key": self._key(),
        }  # fmt: skip
        torch.save(state, part)
        os.replace(part, self._state)

    def _load(self) -> None:
        found = torch.load(self._state, map_location=self.device, weights_only=True)
        if found["key"] != self._key():
            raise ConfigError(
                f"{self._state} belongs to another training ({found['key']}, now {self._key()}); give the same "
                "settings and texts, or another folder"
            )
        with torch.no_grad():
            for name, value in found["tensors"].items():
                self.draft.tensors[name].copy_(value)
        self._optimizer.load_state_dict(found["optimizer"])
        course = found["course"]
        for name in ("measured", "answered"):
            course[name] = [(step, _acceptance(one)) for step, one in course[name]]
        self.course = Course(**course)

    def _key(self) -> dict[str, Any]:
        """What a training is determined by, except its length."""
        lasts = ("steps", "seconds")
        how = {name: value for name, value in asdict(self.schedule).items() if name not in lasts}
        c = self.draft.config
        return how | {
            "kind": self.lesson.kind, "layers": c.num_layers, "vocab": c.vocab_size, "texts": len(self.texts),
        }  # fmt: skip


def _acceptance(found: dict[str, Any]) -> Acceptance:
    return Acceptance(found["places"], tuple(found["by_position"]), tuple(found["tokens_per_step"]))


def rate(done: float) -> float:
    """Share of the highest learning rate when a share `done` of the training is over: up, then down as a cosine."""
    if done < WARM_UP:
        return (done + WARM_UP / 20) / (WARM_UP + WARM_UP / 20)  # the very first step learns something too
    return 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))

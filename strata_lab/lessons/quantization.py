"""Notebook 04: the exercises about number formats, answered by rounding random matrices when they are asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from strata_lab.lessons.checks import ASK, Verdict, number
from strata_lab.quant.survey import rounded

OUTLIER = 100.0  # how much larger one weight of each row is
VARIANTS = ("fp8", "int8/channel", "int8/group32")


class Checks:
    """The exercises.

    Args:
        seed: of the matrices.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def _normal(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=torch.Generator().manual_seed(self.seed))

    def bits(self, answer: Any) -> Verdict:
        """Bits of a weight in int4/group64-asym, scales included."""
        truth = rounded(self._normal(8, 256), "int4/group64-asym").bits
        return number(
            answer, truth, within=0.0,
            because=f"4 bits for the code and 2 x 16 / 64 for its share of scale and minimum: {truth:g}.",
            hint="A weight has its own code, and a share of what its group stores besides.",
            traps=((4.0, "That is the code alone. Who pays for the scale and the minimum?"),
                   (4 + 16 / 64, "That counts one of scale and minimum; the group stores both."),
                   (4 + 2 * 16, "The group shares them: 64 weights pay together.")),
        )  # fmt: skip

    def harm(self) -> dict[str, float]:
        """Variant to how far it moves the *other* weights of rows with an outlier; root mean square."""
        matrix = self._normal(64, 512)
        matrix[:, 0] *= OUTLIER
        return {v: float(rounded(matrix, v).error[:, 1:].square().mean().sqrt()) for v in VARIANTS}

    def outliers(self, answer: Any) -> Verdict:
        """(most, least) harm to the other weights of a row with an outlier, among `VARIANTS`."""
        if answer is None:
            return Verdict(None, ASK)
        if not isinstance(answer, Sequence) or len(answer) != 2 or not set(answer) <= set(VARIANTS):
            return Verdict(False, f"`{answer!r}` is not a pair of two of {', '.join(VARIANTS)}: (most, least).")
        harm = self.harm()
        most, least = max(harm, key=harm.__getitem__), min(harm, key=harm.__getitem__)
        if tuple(answer) == (most, least):
            return Verdict(
                True, "One scale a row has to reach the outlier, so its steps are far too wide for the "
                "others. Groups confine that to one group. A floating-point step follows each number.",
            )  # fmt: skip
        if answer[0] != most:
            return Verdict(False, "Most harm: who has to share a scale with the outlier, and with how many others?")
        return Verdict(False, "Most harm is right. Least: whose step follows each single weight?")

    def narrower_groups(self, answer: Any) -> Verdict:
        """Factor on the error of symmetric int4 from groups of 128 to groups of 32, normally distributed weights."""
        normal = self._normal(256, 1024)
        narrow, wide = (rounded(normal, f"int4/group{size}").relative for size in (32, 128))
        return number(
            answer, narrow / wide, within=0.06,
            because=f"{narrow / wide:.2f}. A scale follows the largest weight of its group; the largest of 32 normal "
            "numbers is not much smaller than the largest of 128. The scales cost 0.375 bits a weight more.",
            hint="A scale follows the largest weight of its group. How much smaller is the largest of 32 than of 128?",
            traps=((4.0, "Four times the scales. Is the error proportional to that?"),
                   (0.25, "Four times the scales. Is the error proportional to that?"),
                   (1.0, "A smaller group has a smaller largest weight, if only a little.")),
        )  # fmt: skip

"""What a draft is trained with, validated once; the command line's flags come from these fields. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from strata_lab.config import DEFAULT_MODEL
from strata_lab.models.draft_part import FEATURES, KINDS, TOKENS
from strata_lab.settings import ConfigError

DEVICES = ("auto", "cpu", "cuda")
LAYERS = {TOKENS: 2, FEATURES: 1}  # a draft that sees the target's states needs few of its own
TRAFFIC_SUFFIX = ".jsonl"  # of files of recorded traffic
STORED = ("int8", "bf16")  # formats of a draft's matrices on disk


@dataclass(frozen=True)
class Recipe:
    """What to train, on what.

    Attributes:
        target: the model to guess for: a known name, a .gguf file or a model folder.
        data: files: recorded traffic (.jsonl) to learn from, texts (UTF-8) whose pieces the target continues.
        kind: "tokens", or "features": a draft that sees the target's hidden states as well.
        layers: of the draft; 0 takes what suits the kind.
        vocab: tokens that it can say, a multiple of 16.
        make_tokens: tokens that the target writes to learn from, beside recorded traffic; 0 makes none.
        make_seconds: seconds that it may take for them.
        output_tokens: of a text that it writes, at most.
        streams: texts that it writes at the same time; 0 takes what suits the device.
        steps, seconds: of training, whichever is over first.
        batch_tokens: places that a step learns from; 0 takes what suits the device.
        learning_rate: at its highest.
        weights: number format in which the draft is stored.
        device: "auto", "cpu" or "cuda".
        seed: of prompts, draws and order.
    """

    target: str = DEFAULT_MODEL
    data: tuple[Path, ...] = ()
    kind: str = TOKENS
    layers: int = 0
    vocab: int = 8192
    make_tokens: int = 1_000_000
    make_seconds: float = 3600.0
    output_tokens: int = 256
    streams: int = 0
    steps: int = 2000
    seconds: float = 3600.0
    batch_tokens: int = 0
    learning_rate: float = 1e-3
    weights: str = "int8"
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least, example in (("make_tokens", 0, 100_000), ("output_tokens", 1, 256), ("streams", 0, 16)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}; try {example}")
        if not self.make_seconds > 0:
            raise ConfigError(f"make_seconds={self.make_seconds} must be above 0; try 600")
        for name, allowed in (("kind", KINDS), ("device", DEVICES), ("weights", STORED)):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} must be one of {', '.join(allowed)}; try {allowed[0]!r}"
                )

    @property
    def num_layers(self) -> int:
        """Of the draft."""
        return self.layers or LAYERS[self.kind]

"""`Lesson`: the engine of a notebook, loaded as its parameters say, with what the machine can do at best."""

from __future__ import annotations

import functools
from typing import Any

from strata_lab.config import DEFAULT_MODEL
from strata_lab.lessons.theme import stylesheet_text
from strata_lab.request import RequestOutput
from strata_lab.sampling_params import SamplingParams
from strata_lab.telemetry.bandwidth import Bandwidth
from strata_lab.workbench.causes import Ceiling

_open: dict[str, Lesson] = {}  # by name: a notebook that is run again replaces its engine


class Lesson:
    """A notebook's engine and machine. Shown in a cell, it says what they are and lets charts follow the theme.

    Args:
        model, device, seconds, seed: the notebook's parameters; `seconds` is how long a measurement may take.
        name: a lesson closes the previous one of the same name, so that a cell can be run twice.
        **options: of `LLMEngine`.

    Raises:
        ConfigError: an option is unknown, wrong or impossible here.
        CheckpointError: the model cannot be read.
    """

    def __init__(
        self, model: str = DEFAULT_MODEL, device: str = "auto", seconds: float = 1.0, seed: int = 0, *,
        name: str = "lesson", **options: Any,
    ) -> None:  # fmt: skip
        from strata_lab.engine import LLMEngine

        previous = _open.pop(name, None)
        if previous is not None:
            previous.close()
        self.seconds, self.seed = seconds, seed
        self.engine = LLMEngine(model, device=device, seed=seed, **options)
        _open[name] = self

    @property
    def on_gpu(self) -> bool:
        """Whether the engine computes on a CUDA device."""
        return bool(self.engine.device.type == "cuda")

    def read_bandwidth(self) -> Bandwidth:
        """How fast this machine can read what a decode step reads; seconds the first time, then kept on disk."""
        from strata_lab.telemetry.bandwidth import ceiling

        return ceiling(str(self.engine.device), self.engine.stats().bytes_per_step)

    def ceiling(self) -> Ceiling:
        """The same as `measuring.causes_ms` takes it."""
        found = self.read_bandwidth()
        return Ceiling(found.bytes_s, found.level, found.reader)

    def params(self, tokens: int, **chosen: Any) -> SamplingParams:
        """Greedy, exactly `tokens` tokens; `chosen` fields of `SamplingParams` change that."""
        fields = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "seed": self.seed}
        return SamplingParams(**(fields | chosen))

    def write(self, prompt: Any, tokens: int, **chosen: Any) -> RequestOutput:
        """Continue a prompt; as `params`."""
        return self.engine.generate(prompt, self.params(tokens, **chosen))[0]

    @functools.cached_property
    def machine(self) -> str:
        """The product name of what computes."""
        if self.on_gpu:
            import torch

            return str(torch.cuda.get_device_name(self.engine.device))
        from strata_lab.telemetry.hardware import cpu_info

        return cpu_info().name

    def close(self) -> None:
        """Give the engine's memory back. Safe to repeat."""
        self.engine.close()

    def _repr_html_(self) -> str:
        import html

        if self.engine.closed:
            return f"{stylesheet_text()}<p>{html.escape(self.engine.config.model)}: closed</p>"
        stats, config = self.engine.stats(), self.engine.model_config
        text = (
            f"{self.engine.config.model}: {config.num_layers} layers, {stats.weight_bytes / 1e9:.3f} GB of weights in "
            f"{self.engine.optimizations.weight_format}, on {self.machine}"
        )
        return f"{stylesheet_text()}<p>{html.escape(text)}</p>"

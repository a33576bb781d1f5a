"""Quantizes a model layer by layer, each on the inputs that the quantized layers before it produce.

The hidden states of a calibration text are kept between layers. A layer is loaded, run once in float32 while the inputs
of its matrices are counted (`sites.py`, `stats.py`), quantized, and run again as it will be from now on; so later
layers see, and GPTQ makes up for, the errors of earlier ones. In memory are one layer in float32 with its quantized
matrices, its statistics (4 K^2 bytes per input; a mixture has two inputs per expert) and the hidden states
(4 * tokens * hidden bytes), never the model.

What stays as it is: norms, biases and routers (unless AWQ folds a scale into them), the embedding and the head. Experts
that the text never reached have no statistics and are rounded to nearest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strata_lab.models.base import WeightSource
from strata_lab.quant import awq, get_format, gptq, rtn
from strata_lab.quant.base import LinearWeight
from strata_lab.quant.folding import fold_scales
from strata_lab.quant.forward import Forward, check_length
from strata_lab.quant.grid import GridFormat
from strata_lab.quant.sites import Recorder, Site, layer_sites, owned
from strata_lab.quant.stats import InputStats
from strata_lab.settings import ConfigError

Over = Callable[[WeightSource], WeightSource]  # a checkpoint with some tensors replaced, such as an `Overlay`


@dataclass(frozen=True)
class Method:
    """How a layer is quantized.

    Attributes:
        round: what rounds a matrix.
        looks: whether it needs the inputs' statistics.
        folds: whether AWQ scales the matrices first.
    """

    round: Callable[[Tensor, InputStats, GridFormat], LinearWeight]
    looks: bool = True
    folds: bool = False


METHODS = {
    "rtn": Method(rtn.quantize, looks=False),
    "rtn-clip": Method(awq.clipped),
    "gptq": Method(gptq.quantize),
    "awq": Method(awq.clipped, folds=True),
    "awq-gptq": Method(gptq.quantize, folds=True),
}


@dataclass(frozen=True)
class Quantized:
    """One tensor of the quantized model.

    Attributes:
        name: canonical name, for example "model.layers.0.self_attn.q_proj.weight".
        value: a matrix in the new format, or a norm or bias that a scale was folded into.
        progress: share of the layers done, the current one counted when its last matrix is.
    """

    name: str
    value: LinearWeight | Tensor
    progress: float


def quantize_model(
    source: WeightSource,
    sequences: Sequence[Sequence[int]],
    format: GridFormat,
    method: str = "gptq",
    *,
    device: torch.device | str = "cpu",
    finished: Sequence[Over] = (),
    left_out: Callable[[str], bool] = lambda name: False,
) -> Iterator[Quantized]:
    """Every matrix of every layer in `format`, and what else the method changed, one by one.

    Args:
        source: the checkpoint.
        sequences: token ids of the calibration text, each at most as long as the model's positions. A few thousand
            tokens do; more than the widest matrix has columns are better.
        format: what to store.
        method: a key of `METHODS`.
        device: where to compute.
        finished: for each of the first layers that an earlier call has made, what puts it over a checkpoint; these
            layers are run and not yielded.
        left_out: whether a matrix stays as it is, by name; AWQ then folds no scale into or out of it.

    Raises:
        ConfigError: an unknown method.
        ValueError: no text, a sequence that is too long, or a matrix that the format cannot store.
    """
    if method not in METHODS:
        raise ConfigError(f"method={method!r} must be one of {', '.join(METHODS)}; try 'gptq'")
    if not sequences and METHODS[method].looks:
        raise ValueError("calibration needs text: 0 sequences were given; try 8 of 512 tokens")
    for sequence in sequences:
        check_length(sequence, source.config.max_position)
    walk = _Walk(source, sequences, format, METHODS[method], device, left_out)
    return _run(walk, source.config.num_layers, finished)


def _run(walk: _Walk, layers: int, finished: Sequence[Over]) -> Iterator[Quantized]:
    with torch.no_grad():  # never around a yield: it would hold for the caller's code too
        walk.start()
    for index in range(layers):
        with torch.no_grad():
            if index < len(finished):
                walk.replay(index, finished[index])
                continue
            changed = walk.look(index)
        yield from (Quantized(name, value, index / layers) for name, value in changed)
        last = len(walk.sites) - 1
        for number, site in enumerate(walk.sites):
            with torch.no_grad():
                made = walk.round(site)
            progress = (index + (number == last)) / layers
            yield from (Quantized(name, value, progress) for name, value in made)
        with torch.no_grad():
            walk.advance()


class _Walk:
    """The hidden states of the text, and the layer they have come to."""

    def __init__(
        self,
        source: WeightSource,
        sequences: Sequence[Sequence[int]],
        format: GridFormat,
        method: Method,
        device: torch.device | str,
        left_out: Callable[[str], bool],
    ) -> None:
        self.config, self.format, self.method, self.left_out = source.config, format, method, left_out
        self.sequences = sequences if method.looks else ()
        self.source, self.device = source, device
        self.recorder = Recorder()
        self.forward = self._forward(source)
        self.states: list[Tensor] = []  # as the quantized layers make them
        self.sites: list[Site] = []

    def start(self) -> None:
        """Embed the text."""
        self.states = [self.forward.embed(sequence) for sequence in self.sequences]

    def _forward(self, source: WeightSource) -> Forward:
        return Forward(source, self.device, {"linear": self.recorder.linear, "moe_mlp": self.recorder.moe_mlp})

    def replay(self, index: int, over: Over) -> None:
        """Go through layer `index`, which is quantized already."""
        if self.states:
            self.layer = self._forward(over(self.source)).load_layer(index)
            self.advance()

    def look(self, index: int) -> list[tuple[str, Tensor]]:
        """Load layer `index` and count its inputs; plain tensors that scales were folded into, by name."""
        prefix, self.layer = f"model.layers.{index}.", owned(self.forward.load_layer(index))
        sites = layer_sites(prefix, self.config, self.layer)
        self.sites = list(sites)
        self.recorder.watch(sites)
        for state in self.states:
            self.forward.layer(state, self.layer)
        self.recorder.rest()
        if not self.method.folds:
            return []
        return list(fold_scales(prefix, self.config, self.layer, sites, self.format, self.left_out))

    def round(self, site: Site) -> list[tuple[str, LinearWeight]]:
        """The site's matrices in the format, by name; the layer then holds what they mean."""
        spans = list(itertools.pairwise(itertools.accumulate(site.rows, initial=0)))
        wanted = [(name, span) for name, span in zip(site.names, spans, strict=True) if not self.left_out(name)]
        if self.format.shared_rows == 1 and len(wanted) == len(spans):  # rows do not interact: one pass for all
            whole = self.method.round(site.weight, site.stats, self.format)
            made = [(name, whole.rows(start, stop)) for name, (start, stop) in wanted]
        else:
            made = [
                (name, self.method.round(site.weight[start:stop], site.stats, self.format))
                for name, (start, stop) in wanted
            ]
        dequantize = get_format(self.format.name).dequantize
        for (_, (start, stop)), (_, weight) in zip(wanted, made, strict=True):
            site.weight[start:stop] = dequantize(weight)
        return made

    def advance(self) -> None:
        """Go on to the next layer through this one as it is now."""
        self.states = [self.forward.layer(state, self.layer) for state in self.states]

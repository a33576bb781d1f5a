"""The places where a layer multiplies, and what comes in there while a text runs through it.

A site is a matrix, or several that read the same input (q, k and v; gate and up; those of one expert). `Recorder`
stands in for the operators that multiply, counts each site's inputs and computes what the reference would.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from strata_lab.config import ModelConfig
from strata_lab.layers.weights import LayerWeights, MoeWeights
from strata_lab.quant.base import LinearWeight
from strata_lab.quant.stats import InputStats


@dataclass
class Site:
    """Matrices that read the same input.

    Attributes:
        names: canonical names of the matrices, in the order of their rows.
        rows: how many rows each has.
        weight: all of them, [N, K] float32: a view of the layer's own, so writing it changes the layer.
        stats: of the input, [K].
        adds: whether the output is added to the hidden state as it is.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    weight: Tensor
    stats: InputStats
    adds: bool


@dataclass(frozen=True)
class LayerSites:
    """All sites of a layer; experts have their own, a dense MLP counts as one expert."""

    qkv: Site
    out: Site
    gate_up: tuple[Site, ...]
    down: tuple[Site, ...]

    def __iter__(self) -> Iterator[Site]:
        yield self.qkv
        yield self.out
        for wide, narrow in zip(self.gate_up, self.down, strict=True):
            yield wide
            yield narrow


def owned(layer: LayerWeights) -> LayerWeights:
    """A copy of a float32 layer that may be written: what a checkpoint maps into memory must not be."""

    def matrix(weight: LinearWeight) -> LinearWeight:
        assert weight.format == "fp32", weight.format
        return replace(weight, data=weight.data.clone())

    a, m = layer.attention, layer.mlp
    bias = None if a.qkv_bias is None else a.qkv_bias.clone()
    return LayerWeights(
        replace(a, norm=a.norm.clone(), qkv=matrix(a.qkv), qkv_bias=bias, out=matrix(a.out)),
        replace(m, norm=m.norm.clone(), gate_up=matrix(m.gate_up), down=matrix(m.down)),
    )


def layer_sites(prefix: str, config: ModelConfig, layer: LayerWeights) -> LayerSites:
    """The sites of the layer called `prefix` (for example "model.layers.0."), with empty statistics."""
    c = config
    attn, kv = f"{prefix}self_attn.", c.num_kv_heads * c.head_dim
    heads = (c.num_q_heads * c.head_dim, kv, kv)
    qkv = _site(tuple(f"{attn}{p}_proj.weight" for p in "qkv"), heads, layer.attention.qkv.data)
    out = _site((f"{attn}o_proj.weight",), (c.hidden_size,), layer.attention.out.data, adds=True)
    mlp = layer.mlp
    experts = c.num_experts if isinstance(mlp, MoeWeights) else 1
    width = mlp.gate_up.shape[0] // (2 * experts)
    wide, narrow = [], []
    for e in range(experts):
        owner = f"{prefix}mlp.experts.{e}." if isinstance(mlp, MoeWeights) else f"{prefix}mlp."
        names = (f"{owner}gate_proj.weight", f"{owner}up_proj.weight")
        wide.append(_site(names, (width, width), mlp.gate_up.data[e * 2 * width : (e + 1) * 2 * width]))
        part = mlp.down.data[e * c.hidden_size : (e + 1) * c.hidden_size]
        narrow.append(_site((f"{owner}down_proj.weight",), (c.hidden_size,), part, adds=True))
    return LayerSites(qkv, out, tuple(wide), tuple(narrow))


def _site(names: tuple[str, ...], rows: tuple[int, ...], weight: Tensor, *, adds: bool = False) -> Site:
    assert sum(rows) == weight.shape[0], (names, rows, weight.shape)
    return Site(names, rows, weight, InputStats(weight.shape[1], device=weight.device), adds)


class Recorder:
    """Operators that count the inputs of the sites they are told to watch.

    A sequence may run twice, first as the original model would compute it (`remember`), then with the inputs that the
    quantized layers before really produce (`count`), which are then counted beside what they were.

    What a matrix adds to the hidden state of a token is next seen through a norm, so an error there matters in
    proportion to that state. In many models the first token's is a hundred times as large as all others (it serves as
    a sink of attention); counted as they are, its inputs would be all that a quantizer sees.
    """

    def __init__(self) -> None:
        self._sites: dict[int, Site] = {}  # address of the first row -> site
        self._remembered: dict[int, Tensor] = {}
        self._counting = False
        self._state = torch.empty(0)  # [T, hidden], kept up to what has been added so far
        self._usual = 1.0  # size of a hidden state

    def watch(self, sites: LayerSites) -> None:
        """These sites are meant from now on."""
        self._sites = {site.weight.data_ptr(): site for site in sites}

    def remember(self) -> None:
        """The next sequence is the original one."""
        self._counting = False

    def count(self, state: Tensor) -> None:
        """The next sequence counts; it starts from the hidden state [T, hidden]."""
        self._state = state
        self._usual = max(state.square().mean(dim=1).sqrt().median().item(), 1e-30)
        self._counting = True

    def rest(self) -> None:
        """Count nothing."""
        self._sites, self._remembered = {}, {}

    def linear(self, x: Tensor, weight: LinearWeight, bias: Tensor | None = None) -> Tensor:
        """x [T, K] -> [T, N]; a site counts when its first matrix is used, so q, k and v count once."""
        y = functional.linear(x, weight.data, bias)
        address = weight.data.data_ptr()
        site = self._sites.get(address)
        if site is None:
            return y
        if not self._counting:
            self._remembered[address] = x
            return y
        importance = None
        if site.adds:
            self._state = self._state + y
            importance = self._importance(self._state)
        site.stats.add(x, self._remembered.pop(address, None), importance)
        return y

    def moe_mlp(self, x: Tensor, gate_up: LinearWeight, down: LinearWeight, weights: Tensor, ids: Tensor) -> Tensor:
        """The experts of a mixture, one after the other, each on the tokens that chose it (`kernels/moe_mlp.py`).

        An error of an expert matters in proportion to its share of a token. Drifted inputs may choose other experts,
        so what an expert would have seen is not paired with what it sees.
        """
        experts = down.shape[0] // x.shape[1]
        wide, narrow = (w.data.unflatten(0, (experts, -1)) for w in (gate_up, down))
        out = torch.zeros_like(x)
        for expert in range(experts):
            tokens, choice = (ids == expert).nonzero(as_tuple=True)
            h, share = x[tokens], weights[tokens, choice]
            gate, up = functional.linear(h, wide[expert]).chunk(2, dim=-1)
            hidden = functional.silu(gate) * up
            y = functional.linear(hidden, narrow[expert]) * share[:, None]
            out.index_add_(0, tokens, y)
            sites = [self._sites.get(w[expert].data_ptr()) for w in (wide, narrow)]
            if self._counting and sites[0] is not None and sites[1] is not None:
                sites[0].stats.add(h, importance=share)
                sites[1].stats.add(hidden, importance=share * self._importance(self._state[tokens] + y))
        return out

    def _importance(self, state: Tensor) -> Tensor:
        """Of an error in hidden states [T, hidden]: 1 for those of the usual size, [T]."""
        size = state.square().mean(dim=1).sqrt()
        return self._usual / size.clamp(min=1e-3 * self._usual)

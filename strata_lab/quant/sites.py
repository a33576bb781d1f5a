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

from strata_lab.layers.weights import LayerWeights, MoeWeights
from strata_lab.model_config import ModelConfig
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
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    weight: Tensor
    stats: InputStats


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
    out = _site((f"{attn}o_proj.weight",), (c.hidden_size,), layer.attention.out.data)
    mlp = layer.mlp
    experts = c.num_experts if isinstance(mlp, MoeWeights) else 1
    width = mlp.gate_up.shape[0] // (2 * experts)
    wide, narrow = [], []
    for e in range(experts):
        owner = f"{prefix}mlp.experts.{e}." if isinstance(mlp, MoeWeights) else f"{prefix}mlp."
        names = (f"{owner}gate_proj.weight", f"{owner}up_proj.weight")
        wide.append(_site(names, (width, width), mlp.gate_up.data[e * 2 * width : (e + 1) * 2 * width]))
        part = mlp.down.data[e * c.hidden_size : (e + 1) * c.hidden_size]
        narrow.append(_site((f"{owner}down_proj.weight",), (c.hidden_size,), part))
    return LayerSites(qkv, out, tuple(wide), tuple(narrow))


def _site(names: tuple[str, ...], rows: tuple[int, ...], weight: Tensor) -> Site:
    assert sum(rows) == weight.shape[0], (names, rows, weight.shape)
    return Site(names, rows, weight, InputStats(weight.shape[1], device=weight.device))


class Recorder:
    """Operators that count the inputs of the sites they are told to watch."""

    def __init__(self) -> None:
        self._sites: dict[int, Site] = {}  # address of the first row -> site

    def watch(self, sites: LayerSites) -> None:
        """Count what these sites are given."""
        self._sites = {site.weight.data_ptr(): site for site in sites}

    def rest(self) -> None:
        """Count nothing."""
        self._sites = {}

    def linear(self, x: Tensor, weight: LinearWeight, bias: Tensor | None = None) -> Tensor:
        """x [T, K] -> [T, N]; a site counts when its first matrix is used, so q, k and v count once."""
        self._count(weight.data, x)
        return functional.linear(x, weight.data, bias)

    def moe_mlp(self, x: Tensor, gate_up: LinearWeight, down: LinearWeight, weights: Tensor, ids: Tensor) -> Tensor:
        """The experts of a mixture, one after the other, each on the tokens that chose it (`kernels/moe_mlp.py`)."""
        experts = down.shape[0] // x.shape[1]
        wide, narrow = (w.data.unflatten(0, (experts, -1)) for w in (gate_up, down))
        out = torch.zeros_like(x)
        for expert in range(experts):
            tokens, choice = (ids == expert).nonzero(as_tuple=True)
            h = x[tokens]
            self._count(wide[expert], h)
            gate, up = functional.linear(h, wide[expert]).chunk(2, dim=-1)
            h = functional.silu(gate) * up
            self._count(narrow[expert], h)
            out.index_add_(0, tokens, functional.linear(h, narrow[expert]) * weights[tokens, choice, None])
        return out

    def _count(self, weight: Tensor, x: Tensor) -> None:
        site = self._sites.get(weight.data_ptr())
        if site is not None:
            site.stats.add(x)

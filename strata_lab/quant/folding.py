"""AWQ's scales carried through a layer, in place: afterwards it computes the same and is easier to round.

| matrix | its scale goes into | condition |
|---|---|---|
| q, k, v | the norm before | |
| gate, up | the norm before | dense MLPs; a router would read the scaled norm too |
| down | the rows of up | silu(gate) * up is linear in up |
| out | the rows of v (and its bias) | query heads that share a key-value head share the scale |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from strata_lab.layers.weights import LayerWeights, MlpWeights
from strata_lab.model_config import ModelConfig
from strata_lab.quant import awq
from strata_lab.quant.grid import GridFormat
from strata_lab.quant.sites import LayerSites, Site


def fold_scales(
    prefix: str,
    config: ModelConfig,
    layer: LayerWeights,
    sites: LayerSites,
    format: GridFormat,
    left_out: Callable[[str], bool],
) -> Iterator[tuple[str, Tensor]]:
    """Search scales for every site of the layer `prefix`, fold them, and scale the sites' statistics to match.

    `layer` must be `sites.owned`. Yields the plain tensors that changed, with their canonical names. What is folded
    into rows comes first, as the matrices that hold those rows are scaled themselves afterwards. A fold that would
    change a matrix of a name that is `left_out` is not made.
    """

    def free(*touched: Site) -> bool:
        return not any(left_out(name) for site in touched for name in site.names)

    if free(sites.out, sites.qkv):
        yield from _out_into_values(prefix, config, layer, sites, format)
    for wide, narrow in zip(sites.gate_up, sites.down, strict=True):
        if free(wide, narrow):
            scale = awq.search(narrow.weight, narrow.stats, format)
            _apply(narrow, scale)
            up = wide.weight[wide.rows[0] :]
            up.copy_(awq.fold_rows(up, scale))
    if free(sites.qkv):
        yield f"{prefix}input_layernorm.weight", _into_norm(layer.attention.norm, sites.qkv, format)
    if isinstance(layer.mlp, MlpWeights) and free(sites.gate_up[0]):
        yield f"{prefix}post_attention_layernorm.weight", _into_norm(layer.mlp.norm, sites.gate_up[0], format)


def _out_into_values(
    prefix: str, config: ModelConfig, layer: LayerWeights, sites: LayerSites, format: GridFormat
) -> Iterator[tuple[str, Tensor]]:
    c, shared = config, config.num_q_heads // config.num_kv_heads

    def tied(size: Tensor) -> Tensor:  # mean over the query heads that read the same values
        by_head = size.view(c.num_kv_heads, shared, c.head_dim).mean(dim=1, keepdim=True)
        return by_head.expand(-1, shared, -1).reshape(-1)

    scale = awq.search(sites.out.weight, sites.out.stats, format, tied=tied)
    _apply(sites.out, scale)
    per_value = scale.view(c.num_kv_heads, shared, c.head_dim)[:, 0].reshape(-1)
    values = sites.qkv.weight[-per_value.numel() :]
    values.copy_(awq.fold_rows(values, per_value))
    if layer.attention.qkv_bias is not None:
        bias = layer.attention.qkv_bias[-per_value.numel() :]
        bias.copy_(awq.fold_rows(bias, per_value))
        yield f"{prefix}self_attn.v_proj.bias", bias.clone()


def _into_norm(norm: Tensor, site: Site, format: GridFormat) -> Tensor:
    folded, scale = awq.fold_norm(norm, awq.search(site.weight, site.stats, format))
    _apply(site, scale)
    norm.copy_(folded)
    return folded


def _apply(site: Site, scale: Tensor) -> None:
    site.weight.mul_(scale)
    site.stats = site.stats.scaled(scale)

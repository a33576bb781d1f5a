"""Choosing pages in Triton: the same ones as by sorting, ties and NaN included, whoever else is in the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from strata_lab.kernels.gpu.sparse_attention import choose_pages, one_head, sparse_attention_triton
from strata_lab.kernels.sparse_attention import chosen_pages, sparse_inputs

SIZE = 8


def ids(tables: Tensor, lens: Tensor, row: int, head: int, heads: int) -> tuple[list[int], int]:
    """Blocks of a row and head in their order, and the tokens in them."""
    count = -(-int(lens[row, head]) // SIZE)
    found = tables[row, head, :count]
    assert (found % (SIZE * heads) == head).all(), "rows of this head"
    return (found // (SIZE * heads)).tolist(), int(lens[row, head])


@pytest.mark.parametrize("pages", [4, 7, 39])
@pytest.mark.parametrize("values", ["random", "few", "equal", "nan"])
def test_the_pages_are_those_of_a_stable_sort(values: str, pages: int, device: torch.device) -> None:
    heads, group, dim, lengths = 2, 3, 16, torch.tensor([3, 26, 312, 313, 0], dtype=torch.int32)
    generator = torch.Generator().manual_seed(pages)
    bounds = torch.randn(41, heads, 2, dim, generator=generator).sort(dim=2).values
    if values == "few":  # promises from a handful of blocks, signs of zero included
        bounds = bounds[torch.randint(0, 3, (41,), generator=generator)]
        bounds[bounds.abs() < 0.3] *= 0.0
    elif values == "equal":
        bounds = torch.zeros_like(bounds)
    elif values == "nan":
        bounds[5, 1] = torch.nan
    table = torch.stack([torch.randperm(41, generator=generator)[:40] for _ in lengths]).int()
    q = torch.randint(-2, 3, (5, heads * group, dim), generator=generator).float()  # sums of both are exact
    bounds = (4 * bounds).round() / 4
    prompts = torch.tensor([0, 9, 0, 400, 0], dtype=torch.int32)
    mask = chosen_pages(q[:, None], bounds, table, lengths[:, None] - 1, prompts, SIZE, pages)
    inputs = (x.to(device) for x in (q, bounds, table))
    tables, lens = choose_pages(*inputs, None, lengths.to(device), prompts.to(device), SIZE, pages)
    for row, length in enumerate(lengths.tolist()):
        total = -(-length // SIZE)
        for head in range(heads):
            found, tokens = ids(tables, lens, row, head, heads)
            expected = [i for i in range(40) if mask[row, head, 0, i]]
            assert found == table[row, expected].tolist()
            assert tokens == length - (total - len(expected)) * SIZE


def test_a_row_gets_the_same_pages_alone_and_among_slices(device: torch.device) -> None:
    lengths, prompts = [(3, 70), (1, 90), (2, 40)], [68, 5, 0]
    inputs = sparse_inputs(lengths, prompts, (4, 2, 16), 4, block_size=SIZE, device=device)
    out = sparse_attention_triton(**inputs)
    alone: dict[str, Any] = {
        "q": inputs["q"][3:4], "block_tables": inputs["block_tables"][1:2], "seq_lens": inputs["seq_lens"][1:2],
        "prompt_lens": inputs["prompt_lens"][1:2], "max_q_len": 1,
        "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32, device=device),
    }  # fmt: skip
    torch.testing.assert_close(sparse_attention_triton(**inputs | alone), out[3:4], rtol=1e-5, atol=1e-6)


def test_the_view_of_one_head_reaches_every_slot_and_nothing_else() -> None:
    cache = torch.arange(3 * SIZE * 2 * 4.0).view(3, SIZE, 2, 4)
    view = one_head(cache)
    for block in range(3):
        for head in range(2):
            assert torch.equal(view[block * SIZE * 2 + head, :, 0], cache[block, :, head])
    assert view.shape[0] == 2 * SIZE * 2 + 2

"""Logits equal transformers' for random weights of all four families; the presets and the MoE operator are right."""

from __future__ import annotations

import pytest
import torch

from strata_lab.engine import LLMEngine
from strata_lab.kernels.moe_mlp import moe_mlp_cpu, moe_mlp_ref
from strata_lab.kernels.router_topk import router_topk_ref
from strata_lab.models import get_family
from strata_lab.models.presets import PRESETS, preset_config, tensor_shapes
from strata_lab.runner import StepInputs
from strata_lab.sampling_params import SamplingParams
from strata_lab.settings import ConfigError
from tests.checkpoints import FAMILIES, write_checkpoint

PROMPT_LEN = 37  # three blocks of 16, the last one partly filled


def our_logits(folder, tokens: list[int], *, slices: tuple[int, ...], **options) -> torch.Tensor:
    """Logits of every position, the prompt fed in slices of the given lengths (a decode is a slice of 1)."""
    options = {"dtype": "float32", "device": "cpu", "max_model_len": 128} | options
    with LLMEngine(folder, **options) as engine, torch.device(engine.device):
        step, size = engine._loop.parts.runner.step, engine.config.block_size
        table = list(range(len(tokens) // size + 1))[::-1]  # blocks out of order, as in real life
        rows = []
        start = 0
        for count in slices:
            stop = start + count
            inputs = StepInputs(
                input_ids=torch.tensor(tokens[start:stop]),
                positions=torch.arange(start, stop),
                slot_mapping=torch.tensor([table[p // size] * size + p % size for p in range(start, stop)]),
                block_tables=torch.tensor([table], dtype=torch.int32),
                seq_lens=torch.tensor([stop], dtype=torch.int32),
                prompt_lens=torch.tensor([len(tokens)], dtype=torch.int32),
                cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
                sample_rows=torch.arange(count),
                max_q_len=count,
            )
            with torch.inference_mode():
                rows.append(step(inputs).clone())
            start = stop
        return torch.cat(rows)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family, fused, tmp_path) -> None:
    folder, reference = write_checkpoint(tmp_path, family)
    tokens = torch.randint(0, reference.config.vocab_size, (PROMPT_LEN,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(tokens[None]).logits[0]
    slices = (20, 1, 9, *[1] * 7)
    ours = our_logits(folder, tokens.tolist(), slices=slices, fused_kernels=fused, cuda_graph=False)
    assert (ours - expected).abs().max().item() < 1e-4


def test_every_registered_family_is_tested() -> None:
    from strata_lab.models import FAMILIES as REGISTERED

    assert set(REGISTERED) == set(FAMILIES)


def test_unknown_family_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'mamba' is not supported; supported are llama"):
        get_family("mamba")


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_scaled_preset_generates(name) -> None:
    with LLMEngine(f"{name}@0.02", device="cpu", max_model_len=64, cuda_graph=False) as engine:
        out = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=5, temperature=0))[0]
    assert len(out.token_ids) == 5 and out.finish_reason == "length"
    assert out.text == ""


def test_preset_geometries_have_the_published_sizes() -> None:
    """21.9 B and 4.0 B parameters, as docs name them."""
    total = {name: sum(torch.Size(s).numel() for s in tensor_shapes(c).values()) for name, c in PRESETS.items()}
    assert round(total["qwen3.8-flash"] / 1e9, 1) == 21.9
    assert round(total["qwen3.8-flash-dense"] / 1e9, 1) == 4.0


@pytest.mark.parametrize("scale", ["0", "2", "1.2.3"])
def test_a_bad_preset_scale_says_what_works(scale) -> None:
    with pytest.raises(ConfigError, match=r"must be above 0 and at most 1; try qwen3\.8-flash@0\.05"):
        preset_config(f"qwen3.8-flash@{scale}")


def test_other_names_are_no_presets() -> None:
    assert preset_config("smollm2-135m") is None and preset_config("some/folder@x") is None


def test_router_weights_sum_to_one_and_name_the_best_experts() -> None:
    x, router = torch.randn(5, 16), torch.randn(8, 16)
    weights, ids = router_topk_ref(x, router, 3, True)
    assert torch.allclose(weights.sum(-1), torch.ones(5))
    best = (x @ router.t()).topk(3).indices
    assert torch.equal(ids, best)


def test_moe_paths_agree_whatever_the_number_of_tokens() -> None:
    from strata_lab.quant import get_format

    generator = torch.Generator().manual_seed(3)
    gate_up = get_format("fp32").quantize(torch.randn(8 * 32, 24, generator=generator))
    down = get_format("fp32").quantize(torch.randn(8 * 24, 16, generator=generator))
    x, router = torch.randn(12, 24, generator=generator), torch.randn(8, 24, generator=generator)
    weights, ids = router_topk_ref(x, router, 2, True)
    together = moe_mlp_ref(x, gate_up, down, weights, ids)
    for row in range(12):  # one token takes the gathering path, twelve the expert loop
        alone = moe_mlp_ref(x[row : row + 1], gate_up, down, weights[row : row + 1], ids[row : row + 1])
        assert torch.allclose(alone[0], together[row], atol=1e-4)
    assert torch.allclose(moe_mlp_cpu(x, gate_up, down, weights, ids), together, atol=1e-4)

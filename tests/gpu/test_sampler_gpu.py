"""Laws of the sampler and the weight formats on CUDA: the CPU's tokens and bits, the same in any batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from strata_lab.quant import FORMATS, get_format
from strata_lab.sampler import Sampler
from tests.sampling_reference import MIXED, mixed_requests, random_logits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("vocab_size", [53, 49152, 151936])
def test_cuda_gives_the_cpus_tokens_in_any_batch(vocab_size: int) -> None:
    requests, logits = mixed_requests(vocab_size), random_logits(len(MIXED), vocab_size, scale=2.0)
    logits[2, vocab_size // 2 :] = logits[2, : vocab_size - vocab_size // 2].clone()  # ties
    expected = Sampler().sample(logits, requests)
    shared, on_device, rng = Sampler(), logits.cuda(), np.random.default_rng(0)
    assert shared.sample(on_device, requests).token_ids == expected.token_ids
    alone = [Sampler().sample(on_device[i : i + 1], [r]) for i, r in enumerate(requests)]
    for _ in range(10):
        batch = rng.permutation(len(requests))[: rng.integers(1, len(requests) + 1)].tolist()
        got = shared.sample(on_device[batch], [requests[i] for i in batch])
        assert got.token_ids == [expected.token_ids[i] for i in batch]
        assert got.logprobs == [alone[i].logprobs[0] for i in batch]


@pytest.mark.parametrize("name", FORMATS)
def test_quantizing_on_cuda_gives_the_cpus_bits(name: str) -> None:
    w = random_logits(300, 1000)
    expected, got = get_format(name).quantize(w), get_format(name).quantize(w.cuda())
    for ours, theirs in zip(got.tensors, expected.tensors, strict=True):
        assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8))
    assert torch.equal(get_format(name).dequantize(got).cpu(), get_format(name).dequantize(expected))

"""Sampling kernels: the tokens of `Sampler`, and a state that is ready for the next step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from strata_lab.kernels.gpu.decode_state import Scratch, key_ids, key_values, sort_keys, uniform
from strata_lab.kernels.gpu.sampling import DecodeState, GreedyConfig, sample_drawn, sample_greedy
from strata_lab.kernels.gpu.sampling_draw import _weights
from strata_lab.sampling_draw import HEAD, UNRESOLVED, WEIGHT_ONE, Filters, _sort_keys, draw, weights
from strata_lab.sampling_random import seed_keys, uniforms

INF, NAN = float("inf"), float("nan")
NO_BEST = -2
VOCAB_SIZES = (1, 5, 50, 1000, 4099)
BLOCK_SIZE = 4


def make_state(device: torch.device, vocab_size: int, num_seqs: int, steps: int = 1, width: int = 3) -> DecodeState:
    """Live rows at position 0, whose blocks are numbered so that every slot tells its row and place."""
    state = DecodeState.empty(num_seqs, width, steps, BLOCK_SIZE, vocab_size, device)
    state.block_tables.copy_(torch.randperm(num_seqs * width).view(num_seqs, width))
    state.seq_lens.fill_(1)
    state.slot_mapping.copy_(state.block_tables[:, 0] * BLOCK_SIZE)
    state.out_tokens.fill_(-99)
    for tensor in (state.scratch.partials, state.scratch.peaks, state.scratch.candidates, state.scratch.head):
        tensor.fill_(-(2**62))  # sorts before any key that a kernel should have written
    state.scratch.sums.fill_(NAN)
    return state


def random_parameters(state: DecodeState, random: np.random.Generator) -> None:
    """Rows of every kind: greedy, unfiltered, and each filter on its own and with others."""
    num_seqs, vocab_size = state.input_ids.shape[0], state.vocab_size

    def some(off: float, on: np.ndarray) -> Tensor:
        return torch.from_numpy(np.where(random.random(num_seqs) < 0.5, off, on))

    state.inverse_temperature.copy_(torch.from_numpy(random.choice([0.0, 0.1, 0.7, 1.0, 2.5, 1e300], num_seqs)))
    state.top_k.copy_(some(random.choice([0, vocab_size]), random.integers(1, min(HEAD, vocab_size) + 1, num_seqs)))
    state.top_p.copy_(some(1.0, random.choice([1e-9, 0.3, 0.9, 0.999], num_seqs)))
    state.min_p.copy_(some(0.0, random.choice([1e-9, 0.01, 0.3, 1.0], num_seqs)))
    state.seed_keys.copy_(torch.from_numpy(seed_keys(random.integers(0, 2**62, num_seqs).tolist()).view(np.int64)))
    state.output_positions.copy_(torch.from_numpy(random.integers(0, 5000, num_seqs)))


def random_logits(random: np.random.Generator, num_seqs: int, vocab_size: int) -> Tensor:
    """Rows of different spread, some with many ties, infinities or zeros of both signs."""
    scale = random.choice([0.0, 0.5, 3.0, 30.0], (num_seqs, 1))
    x = (random.standard_normal((num_seqs, vocab_size)) * scale).astype(np.float32)
    x = np.where(random.random((num_seqs, 1)) < 0.3, np.round(x), x)
    x = np.where(random.random(x.shape) < random.choice([0.0, 0.2], (num_seqs, 1)), -np.inf, x)
    x = np.where(random.random(x.shape) < random.choice([0.0, 0.0, 0.01], (num_seqs, 1)), np.inf, x)
    x[:, random.integers(vocab_size)] = 0.0
    return torch.from_numpy(x.astype(np.float32))


def expected_tokens(logits: Tensor, state: DecodeState) -> list[int]:
    """What `sampling_draw.draw` makes of each row on its own, on the CPU."""
    logits, vocab_size = logits.cpu(), state.vocab_size
    keys = state.seed_keys.cpu().numpy().view(np.uint64)
    uniform = torch.from_numpy(uniforms(keys, state.output_positions.tolist()))
    tokens = []
    for row in range(logits.shape[0]):
        one = logits[row : row + 1]
        best = one.amax(dim=1)
        scale, top_k = state.inverse_temperature[row].item(), int(state.top_k[row]) or vocab_size
        if not best.item() > -INF:
            tokens.append(NO_BEST)
        elif scale == 0:
            tokens.append(int(one.numpy().argmax()))
        else:
            filters = Filters(
                state.inverse_temperature[row].cpu().view(1, 1),
                torch.tensor([[top_k]]),
                state.top_p[row].cpu().view(1, 1),
                state.min_p[row].cpu().view(1, 1),
                all_top_k=False,
            )
            tokens.append(int(draw(one, best, filters, uniform[row : row + 1], min(HEAD, vocab_size))))
    return tokens


def snapshot(state: DecodeState) -> dict[str, Tensor]:
    """Copies of all tensors but scratch."""
    tensors = {f.name: getattr(state, f.name) for f in fields(state)}
    return {name: value.clone() for name, value in tensors.items() if isinstance(value, Tensor)}


@triton.jit
def _keys_kernel(x, keys, values, ids, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    key = sort_keys(tl.load(x + at, mask=at < n, other=0.0), at)
    tl.store(keys + at, key, mask=at < n)
    tl.store(values + at, key_values(key), mask=at < n)
    tl.store(ids + at, key_ids(key), mask=at < n)


@triton.jit
def _uniform_kernel(keys, positions, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    chance = uniform(tl.load(keys + at, mask=at < n, other=0), tl.load(positions + at, mask=at < n, other=0))
    tl.store(out + at, chance, mask=at < n)


def test_device_uniforms_are_those_of_the_host_bit_for_bit(device: torch.device) -> None:
    random = np.random.default_rng(1)
    keys = seed_keys([0, 1, 2**63 - 1, *random.integers(0, 2**62, 1000).tolist()])
    positions = np.concatenate([[0, 1, 2**40], random.integers(0, 2**31, 1000)])
    out = torch.full((len(keys),), NAN, dtype=torch.float64, device=device)
    inputs = torch.from_numpy(keys.view(np.int64)).to(device), torch.from_numpy(positions).to(device)
    _uniform_kernel[(1,)](*inputs, out, len(keys), BLOCK=1024)
    assert np.array_equal(out.cpu().numpy(), uniforms(keys, positions.tolist()))


def test_keys_are_those_of_the_host_and_hold_value_and_id(device: torch.device) -> None:
    x = torch.cat([torch.randn(500), torch.tensor([0.0, -0.0, INF, -INF, 3e38, -3e38, 1e-45, -1e-45])]).to(device)
    keys, ids = torch.zeros(2, len(x), dtype=torch.int64, device=device)
    values = torch.zeros_like(x)
    _keys_kernel[(1,)](x, keys, values, ids, len(x), BLOCK=512)
    assert torch.equal(keys, _sort_keys(x, torch.arange(len(x), device=device)))
    assert torch.equal(values, x) and torch.equal(ids, torch.arange(len(x), device=device))


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_greedy_takes_the_first_of_the_largest(device: torch.device, vocab_size: int) -> None:
    random = np.random.default_rng(vocab_size)
    for num_seqs in (1, 2, 5):
        logits = random_logits(random, num_seqs, vocab_size).to(device)
        state = make_state(device, vocab_size, num_seqs)
        expected = expected_tokens(logits, state)
        sample_greedy(logits, state, 0)
        assert state.out_tokens[0].tolist() == expected
        assert state.input_ids.tolist() == [max(token, 0) for token in expected]
        assert state.scratch.arrivals.tolist() == [0] * num_seqs


@pytest.mark.parametrize("sample", [sample_greedy, sample_drawn])
def test_rows_without_a_largest_logit_say_so_and_feed_token_0(
    device: torch.device, sample: Callable[..., None]
) -> None:
    rows = torch.zeros(6, 2100, device=device)
    rows[0, 2050] = NAN
    rows[1] = -INF
    rows[2, 7] = -NAN
    rows[3, 2099] = INF
    rows[4] = NAN
    rows[5] = -INF
    rows[5, 1025] = -3e38
    for inverse_temperature in (0.0, 1.0):
        state = make_state(device, 2100, 6)
        state.inverse_temperature.fill_(inverse_temperature)
        sample(rows, state, 0)
        assert state.out_tokens.tolist() == [[NO_BEST, NO_BEST, NO_BEST, 2099, NO_BEST, 1025]]
        assert state.input_ids.tolist() == [0, 0, 0, 2099, 0, 1025]
        assert state.seq_lens.tolist() == [2] * 6


def test_the_first_and_the_last_of_a_program_s_logits_count(device: torch.device) -> None:
    places = torch.tensor([0, 1023, 1024, 2047, 2048])
    logits = torch.zeros(5, 2049, device=device)
    logits[torch.arange(5), places] = 1.0
    for sample in (sample_greedy, sample_drawn):
        state = make_state(device, 2049, 5)
        state.inverse_temperature.fill_(1e9)
        sample(logits, state, 0)
        assert torch.equal(state.out_tokens[0].cpu(), places)


@pytest.mark.parametrize("chunk", [1024, 2048, 4096])
def test_greedy_reads_rows_of_any_stride_and_nothing_between_them(device: torch.device, chunk: int) -> None:
    wide = torch.full((3, 5000), INF, device=device)
    logits = wide[:, :4099]
    logits.copy_(torch.randn(3, 4099))
    state = make_state(device, 4099, 3)
    sample_greedy(logits, state, 0, GreedyConfig(chunk))
    assert state.out_tokens[0].tolist() == logits.argmax(dim=1).tolist()


@pytest.mark.parametrize(("vocab_size", "block"), [(1, 0), (5, 0), (50, 0), (255, 0), (1000, 0), (1000, 2), (4099, 0)])
def test_drawn_tokens_are_those_of_the_sampler(device: torch.device, vocab_size: int, block: int) -> None:
    random = np.random.default_rng(vocab_size + block)
    batches = 400 if device.type == "cuda" else 5 if vocab_size < 200 else 2  # the interpreter takes its time
    resolved = 0
    for _ in range(batches):
        num_seqs = int(random.integers(1, 6))
        state = make_state(device, vocab_size, num_seqs)
        state.scratch = Scratch.empty(num_seqs, vocab_size, device, block=block)
        random_parameters(state, random)
        logits = random_logits(random, num_seqs, vocab_size).to(device)
        expected = expected_tokens(logits, state)
        sample_drawn(logits, state, 0)
        assert state.out_tokens[0].tolist() == expected
        assert state.input_ids.tolist() == [max(token, 0) for token in expected]
        assert state.scratch.num_candidates.tolist() == [0] * num_seqs
        resolved += sum(token != UNRESOLVED for token in expected)
    assert resolved > batches  # the comparison is not one of failures


def test_many_seeds_draw_the_sampler_s_tokens_of_one_row(device: torch.device) -> None:
    num_seqs = 300 if device.type == "cuda" else 20
    logits = (torch.randn(1, 300) * 2).to(device).expand(num_seqs, 300).contiguous()
    state = make_state(device, 300, num_seqs)
    state.inverse_temperature.fill_(1.0)
    state.seed_keys.copy_(torch.from_numpy(seed_keys(range(num_seqs)).view(np.int64)))
    state.top_p[::3] = 0.9
    state.min_p[1::3] = 0.02
    expected = expected_tokens(logits, state)
    sample_drawn(logits, state, 0)
    assert state.out_tokens[0].tolist() == expected
    assert len(set(expected)) > 7


def key_of(chance: float, position: int) -> int:
    """A seed key (int64 bits) whose uniform at `position` is `chance`: splitmix64 backwards."""
    mask = 2**64 - 1
    x = int(chance * 2**53) << 11
    for shift, multiplier in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        y = x
        for _ in range(64 // shift):
            y = x ^ (y >> shift)
        x = y * pow(multiplier, -1, 2**64) & mask
    x = (x - (position + 1) * 0x9E3779B97F4A7C15) & mask
    return x - 2**64 if x >= 2**63 else x


def test_a_draw_on_the_border_of_two_tokens_takes_the_second(device: torch.device) -> None:
    chances = [0.0, 0.25 - 2**-53, 0.25, 0.5, 0.75, 1 - 2**-53]
    state = make_state(device, 4, len(chances))
    state.inverse_temperature.fill_(1.0)
    state.output_positions.fill_(6)
    state.seed_keys.copy_(torch.tensor([key_of(chance, 6) for chance in chances]))
    sample_drawn(torch.ones(len(chances), 4, device=device), state, 0)
    assert state.out_tokens[0].tolist() == [0, 0, 1, 2, 3, 3]


def test_min_p_keeps_what_is_exactly_as_likely_and_top_p_what_reaches_it(device: torch.device) -> None:
    chances = [0.1, 0.9] * 3
    state = make_state(device, 5, 6)
    state.inverse_temperature.fill_(1.0)
    state.seed_keys.copy_(torch.tensor([key_of(chance, 0) for chance in chances]))
    state.min_p[:2] = 1.0
    state.top_p[2:] = torch.tensor([0.5, 0.5, 0.25, 0.25], dtype=torch.float64)
    logits = torch.zeros(6, 5, device=device)
    logits[:, 4] = -INF
    logits[:2, 2:] = -0.001
    sample_drawn(logits, state, 0)
    assert state.out_tokens[0].tolist() == [0, 1, 0, 1, 0, 0]


@triton.jit
def _weights_kernel(x, best, scale, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0)
    tl.store(out + at, _weights(value, tl.load(best), tl.load(scale)), mask=at < n)


@pytest.mark.parametrize("largest", [3.5, INF])
def test_weights_are_the_whole_numbers_of_the_host(device: torch.device, largest: float) -> None:
    x = torch.cat([torch.tensor([largest, 3.5, -INF, 3.4999]), torch.randn(1000)]).clamp(max=largest).to(device)
    scale = torch.tensor([1.7], dtype=torch.float64, device=device)
    best = _sort_keys(x, torch.arange(len(x), device=device)).min().view(1)
    out = torch.full((len(x),), NAN, dtype=torch.float64, device=device)
    _weights_kernel[(1,)](x, best, scale, out, len(x), BLOCK=1024)
    top = torch.tensor([[largest]], device=device).clamp(max=torch.finfo(torch.float32).max)
    expected = weights(x.view(1, -1), top, scale)[0]
    assert torch.equal(out, out.round())
    assert (out - expected).abs().max() <= 1.0  # one part in 2^34, where exp rounds otherwise
    assert out[0] == WEIGHT_ONE


def test_ties_across_blocks_are_ordered_by_id(device: torch.device) -> None:
    """1,500 equal logits, of which a top_k of 256 keeps the lowest ids; blocks of 4 put 1,024 in the way."""
    state = make_state(device, 1500, 4)
    state.scratch = Scratch.empty(4, 1500, device, block=4)
    state.inverse_temperature.fill_(1.0)
    state.top_k.copy_(torch.tensor([256, 3, 1, 0]))
    state.seed_keys.copy_(torch.from_numpy(seed_keys([1, 2, 3, 4]).view(np.int64)))
    logits = torch.zeros(4, 1500, device=device)
    expected = expected_tokens(logits, state)
    sample_drawn(logits, state, 0)
    assert state.out_tokens[0].tolist() == expected
    assert expected[0] < 256 and expected[1] < 3 and expected[2] == 0


def test_a_top_k_above_the_head_is_left_to_the_host(device: torch.device) -> None:
    state = make_state(device, 600, 2)
    state.inverse_temperature.fill_(1.0)
    state.top_k.copy_(torch.tensor([HEAD + 1, 600]))
    logits = torch.zeros(2, 600, device=device)
    logits[:, 5] = 20.0
    sample_drawn(logits, state, 0)
    assert state.out_tokens[0].tolist() == [UNRESOLVED, 5]
    assert state.input_ids.tolist() == [0, 5]


@pytest.mark.parametrize("sample", [sample_greedy, sample_drawn])
def test_rows_do_not_depend_on_batch_mates(device: torch.device, sample: Callable[..., None]) -> None:
    random = np.random.default_rng(5)
    logits = random_logits(random, 4, 300).to(device)
    together = make_state(device, 300, 4)
    random_parameters(together, random)
    before = snapshot(together)
    sample(logits, together, 0)
    for row in range(4):
        alone = make_state(device, 300, 1)
        for name, value in before.items():
            getattr(alone, name).copy_(value[:, row : row + 1] if name == "out_tokens" else value[row : row + 1])
        sample(logits[row : row + 1], alone, 0)
        assert alone.out_tokens[0, 0] == together.out_tokens[0, row]


@pytest.mark.parametrize("sample", [sample_greedy, sample_drawn])
def test_the_state_advances_over_block_boundaries_until_the_row_is_full(
    device: torch.device, sample: Callable[..., None]
) -> None:
    """Row 0 has its whole table, row 1 five slots of it, row 2 is padding."""
    width, steps, num_seqs = 3, 14, 3
    state = make_state(device, 40, num_seqs, steps, width)
    state.max_seq_lens.copy_(torch.tensor([10**6, 5, 12]))
    state.seq_lens[2], state.slot_mapping[2], state.positions[2], state.output_positions[2] = 0, -1, 3, 9
    state.output_positions[:2] = torch.tensor([7, 0])
    lengths = [width * BLOCK_SIZE, 5, 0]
    for step in range(steps):
        logits = torch.randn(num_seqs, 40).to(device)
        before = snapshot(state)
        sample(logits, state, step)
        for row, length in enumerate(lengths):
            token = int(logits[row].argmax())
            live, more = step < length, step + 1 < length
            assert state.out_tokens[step, row] == (token if live else 0)
            if not live:  # padding stays as it is
                for name in ("input_ids", "positions", "seq_lens", "slot_mapping", "output_positions"):
                    assert getattr(state, name)[row] == before[name][row], name
                assert state.seq_lens[row] == 0 and state.slot_mapping[row] == -1
                continue
            position = step + 1
            block = int(state.block_tables[row, min(position // BLOCK_SIZE, width - 1)])
            assert state.input_ids[row] == token
            assert state.output_positions[row] == before["output_positions"][row] + 1
            assert state.positions[row] == (position if more else step)
            assert state.seq_lens[row] == (position + 1 if more else 0)
            assert state.slot_mapping[row] == (block * BLOCK_SIZE + position % BLOCK_SIZE if more else -1)
    untouched = ("block_tables", "max_seq_lens", "inverse_temperature", "top_k", "top_p", "min_p", "seed_keys")
    assert all(torch.equal(getattr(state, name), before[name]) for name in untouched)


def test_an_idle_state_samples_nothing(device: torch.device) -> None:
    """What a capture's warm-up runs on."""
    state = DecodeState.empty(2, 3, 2, BLOCK_SIZE, 30, device)
    before = snapshot(state)
    logits = torch.randn(2, 30).to(device)
    sample_greedy(logits, state, 0)
    sample_drawn(logits, state, 1)
    assert all(torch.equal(value, before[name]) for name, value in snapshot(state).items())
    assert state.out_tokens.shape == (2, 2) and state.slot_mapping.tolist() == [-1, -1]


def test_padding_rows_of_a_drawn_batch_stay_padding(device: torch.device) -> None:
    state = make_state(device, 64, 2)
    state.seq_lens[1], state.slot_mapping[1] = 0, -1
    state.inverse_temperature.fill_(1.0)
    before = snapshot(state)
    sample_drawn(torch.randn(2, 64).to(device), state, 0)
    assert state.out_tokens[0, 1] == 0
    for name in ("input_ids", "positions", "seq_lens", "slot_mapping", "output_positions"):
        assert getattr(state, name)[1] == before[name][1]


@pytest.mark.gpu
@pytest.mark.parametrize("num_seqs", [1, 8, 16])
def test_a_captured_chain_of_steps_draws_what_the_sampler_draws(device: torch.device, num_seqs: int) -> None:
    """Eight steps in one graph over the reference vocabulary, the same logits each time, twice."""
    vocab_size, steps = 151936, 8
    random = np.random.default_rng(9)
    logits = torch.from_numpy(random.standard_normal((num_seqs, vocab_size)).astype(np.float32) * 4).to(device)
    state = make_state(device, vocab_size, num_seqs, steps)
    random_parameters(state, random)
    before = snapshot(state)

    def restore() -> None:
        for name, value in before.items():
            getattr(state, name).copy_(value)

    expected = []
    for _ in range(steps):
        expected.append(expected_tokens(logits, state))
        state.output_positions += 1
    restore()
    for step in range(2):
        sample_drawn(logits, state, step)  # compiles
    restore()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in range(steps):
            sample_drawn(logits, state, step)
    for _ in range(2):
        restore()
        graph.replay()
        assert state.out_tokens.tolist() == expected


@pytest.mark.gpu
@pytest.mark.parametrize("num_seqs", [1, 3, 16, 64])
def test_greedy_at_the_reference_vocabulary_is_torch_s_argmax(device: torch.device, num_seqs: int) -> None:
    logits = torch.randn(num_seqs, 151936, device=device)
    state = make_state(device, 151936, num_seqs, steps=4, width=5)
    for step in range(4):
        sample_greedy(logits, state, step)
    assert torch.equal(state.out_tokens, logits.argmax(dim=1).expand(4, num_seqs))

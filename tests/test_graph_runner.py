"""A captured step computes what the eager step computes, at every batch size, and refuses what it could not replay."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch

from strata_lab.capture import Taken
from strata_lab.engine import LLMEngine
from strata_lab.graph_runner import CapturedStep, CompiledStep, CpuRecorder
from strata_lab.kernels.cpu.build import CpuKernelsUnavailable, load
from strata_lab.runner import Slice, StepInputs
from strata_lab.sampling_params import SamplingParams
from tests.checkpoints import write_checkpoint

try:
    load()
except CpuKernelsUnavailable as reason:
    pytest.skip(f"CPU captures need the CPU kernels: {reason}", allow_module_level=True)

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def engine(request, tmp_path_factory):
    """A tiny dense model of each family."""
    folder, _ = write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    with LLMEngine(folder, device="cpu", weight_format="int8", max_model_len=64, cuda_graph=False) as engine:
        for index in range(engine.model_config.num_layers):  # tests read context that no step has written
            layer = engine._loop.parts.kv.layer(index)
            layer.k.normal_()
            layer.v.normal_()
        yield engine


def decode_inputs(engine: LLMEngine, num_seqs: int, position: int) -> StepInputs:
    """Every request at `position` of its own blocks."""
    size = engine.config.block_size
    tables = torch.arange(num_seqs * 4, dtype=torch.int32).view(num_seqs, 4)
    inputs = StepInputs.idle(num_seqs, 4, engine.device)
    return dataclasses.replace(
        inputs,
        input_ids=torch.randint(0, 300, (num_seqs,)),
        positions=torch.full((num_seqs,), position),
        slot_mapping=tables[:, position // size].long() * size + position % size,
        block_tables=tables,
        seq_lens=torch.full((num_seqs,), position + 1, dtype=torch.int32),
    )


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_replayed_logits_are_the_eager_ones_bit_for_bit(engine, fused) -> None:
    engine.apply(fused_kernels=fused)
    eager = engine._loop.parts.runner.step
    captured = CapturedStep(eager, CpuRecorder())
    with torch.inference_mode():
        for num_seqs in (1, 3, 2, 3):  # the second 3 replays what the first one captured
            for position in (0, 1, 17):
                inputs = decode_inputs(engine, num_seqs, position)
                expected = eager(inputs).clone()
                assert torch.equal(captured(inputs), expected)
    assert len(captured._captures) == 3


def test_plain_and_fused_compositions_agree_bit_for_bit(engine) -> None:
    with torch.inference_mode():
        logits = []
        for fused in (False, True):
            engine.apply(fused_kernels=fused)
            step = engine._loop.parts.runner.step
            torch.manual_seed(5)
            for position in (0, 1, 2):
                rows = step(decode_inputs(engine, 2, position)).clone()
            logits.append(rows)
    assert torch.equal(*logits)


def tensors(result):
    return [result] if isinstance(result, torch.Tensor) else [found for part in result for found in tensors(part)]


class Fixed:
    """Captures whose grids are fixed, as a GPU's: the work is run again, into the memory of its first result."""

    ragged, count, captures = False, 0, 0

    def __init__(self) -> None:
        self._taken = Taken()

    @property
    def capture_bytes(self) -> int:
        return self._taken.nbytes

    def bucket(self, num_seqs: int) -> int:
        return num_seqs

    def record(self, work, device):
        result = work()
        self.captures += 1

        def replay() -> None:
            self.count += 1
            for tensor, again in zip(tensors(result), tensors(work()), strict=True):
                tensor.copy_(again)

        self._taken.count(replay, 100)
        return replay, result


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_rows_that_stand_as_requests_get_the_logits_of_their_windows(engine, fused, monkeypatch) -> None:
    """Windows of any lengths, from any tables, replay what was captured for as many rows or a few more."""
    engine.apply(fused_kernels=fused)
    eager, size = engine._loop.parts.runner.step, engine.config.block_size
    captured = CapturedStep(eager, recorder := Fixed())
    monkeypatch.setattr(eager, "seen", (1,))  # as for a draft that sees more than the last states
    shapes = ([(3, 20)], [(2, 17), (1, 5)], [(5, 30), (2, 1)], [(1, 3), (4, 40)], [(6, 9)])
    with torch.inference_mode():
        for number, windows in enumerate(shapes):
            parts = [
                Slice(torch.randint(0, 300, (count,)).tolist(), start, [4 * i + j for j in range(4)], count)
                for i, (count, start) in enumerate(windows)
            ]
            inputs = StepInputs.gather(parts, size, engine.device)
            expected, states = eager(inputs).clone(), [rows.clone() for rows in eager.states]
            torch.testing.assert_close(captured(inputs), expected, rtol=1e-5, atol=1e-5)
            assert len(states) == 2
            found = [rows[: len(states[0])] for rows in captured.states]
            torch.testing.assert_close(found, states, rtol=1e-5, atol=1e-5)
            assert recorder.count == number + 1, "replayed"
    assert len(captured.windows._captures) == 3, "for 3, 6 and 8 rows"


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_prompts_replay_what_was_captured_for_as_many_tokens_or_a_few_more(engine, fused, monkeypatch) -> None:
    """Alone, several together and beside decodes; the second step of a shape is the first that is captured."""
    engine.apply(fused_kernels=fused)
    eager, size = engine._loop.parts.runner.step, engine.config.block_size
    captured = CapturedStep(eager, recorder := Fixed())
    monkeypatch.setattr(eager, "seen", (1,))
    record, keys = recorder.record, engine._loop.parts.kv.layer(0).k

    def untouched(work, device):  # a capture runs its work: no key, and no expert, may count twice
        before = keys.clone()
        made = record(work, device)
        assert torch.equal(keys, before)
        return made

    recorder.record = untouched
    shapes = (  # of each request: tokens, where they begin, rows that need logits
        ([(20, 5, 1)], 0), ([(29, 0, 1)], 1), ([(17, 3, 0)], 2), ([(9, 0, 1), (1, 30, 1)], 2),
        ([(1, 8, 1), (8, 1, 0)], 3), ([(1, 8, 1), (1, 7, 1), (14, 2, 1)], 4),
        ([(5, 0, 1), (4, 0, 0), (2, 9, 1), (1, 30, 1)], 5), ([(6, 1, 1)], 5),
    )  # fmt: skip
    with torch.inference_mode():
        for parts, replays in shapes:
            inputs = StepInputs.gather(
                [
                    Slice(torch.randint(0, 300, (count,)).tolist(), start, [4 * i + j for j in range(4)], rows)
                    for i, (count, start, rows) in enumerate(parts)
                ],
                size,
                engine.device,
            )
            written = [engine._loop.parts.kv.layer(i).k.clone() for i in range(engine.model_config.num_layers)]
            found, states = captured(inputs).clone(), tuple(rows.clone() for rows in captured.states)
            after = [engine._loop.parts.kv.layer(i).k.clone() for i in range(engine.model_config.num_layers)]
            expected = eager(inputs)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            assert len(states) == 2
            torch.testing.assert_close(states, eager.states, rtol=1e-5, atol=1e-5)
            assert recorder.count == replays, parts
            slots = set(inputs.slot_mapping.tolist())
            for k, now in zip(written, after, strict=True):
                changed = (k != now).flatten(2).any(-1).flatten().nonzero().flatten().tolist()
                assert set(changed) <= slots, "padding writes nowhere"


def test_a_prompt_that_cannot_be_captured_runs_all_the_same(engine) -> None:
    eager, told = engine._loop.parts.runner.step, []
    captured = CapturedStep(eager, recorder := Fixed(), told.append)
    recorder.record = lambda work, device: (_ for _ in ()).throw(RuntimeError("an operator asks the host"))
    inputs = StepInputs.gather([Slice([5, 6, 7], 0, [1], 1)], engine.config.block_size, engine.device)
    with torch.inference_mode():
        for _ in range(3):
            torch.testing.assert_close(captured(inputs), eager(inputs))
    assert told == ["prompts run uncaptured from now on: an operator asks the host"]


def test_memory_of_captures_is_counted_once_and_while_they_can_be_replayed(engine) -> None:
    """Of decode steps, of windows and of prompts, until prompts are refused: then theirs is given back."""
    eager, told, size = engine._loop.parts.runner.step, [], engine.config.block_size
    captured = CapturedStep(eager, recorder := Fixed(), told.append)
    prompt, other = (StepInputs.gather([Slice([5] * n, 0, [1, 2, 3], 1)], size, engine.device) for n in (6, 20))
    with torch.inference_mode():
        captured(decode_inputs(engine, 2, 3))
        captured(StepInputs.gather([Slice([5, 6], 9, [1, 2], 2)], size, engine.device))
        assert captured.capture_bytes == 200
        for _ in range(3):
            captured(prompt)
        assert captured.capture_bytes == 300
        recorder.record = lambda work, device: (_ for _ in ()).throw(RuntimeError("out of memory"))
        for _ in range(2):
            captured(other)
    assert told and captured.capture_bytes == 200


def test_a_prompt_slice_of_one_token_samples_nothing(engine) -> None:
    step = CapturedStep(engine._loop.parts.runner.step, CpuRecorder())
    inputs = decode_inputs(engine, 3, 2)
    with torch.inference_mode():
        every = step(inputs).clone()
        torch.testing.assert_close(step.states, step.eager.hidden(inputs))
        some = step(dataclasses.replace(inputs, sample_rows=torch.tensor([0, 2])))
    assert torch.equal(some, every[[0, 2]])


def test_a_capture_refuses_operators_it_could_not_replay() -> None:
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"aten\.mul.* cannot be captured on a CPU"):
        CpuRecorder().record(lambda: x * 2, torch.device("cpu"))
    replay, _ = CpuRecorder().record(lambda: load().add(x, x).view(3, 1), torch.device("cpu"))  # none is left open
    replay()


def test_a_capture_reads_its_inputs_anew_and_is_freed_with_its_owner() -> None:
    x = torch.ones(4)
    replay, result = CpuRecorder().record(lambda: load().add(load().add(x, x), x), torch.device("cpu"))
    assert result.tolist() == [3.0] * 4
    x.fill_(2.0)
    replay()
    assert result.tolist() == [6.0] * 4
    handle = replay._handle
    del replay
    gc.collect()
    with pytest.raises(ValueError, match=f"capture {handle} does not exist or was freed"):
        load().replay(handle)


def test_a_capture_refuses_to_copy_what_changes() -> None:
    x = torch.ones(4, 6).t()
    with pytest.raises(ValueError, match="which it would have to copy"):
        CpuRecorder().record(lambda: load().add(x, x), torch.device("cpu"))


@pytest.mark.slow
def test_the_step_that_inductor_compiles_gives_the_same_tokens(engine) -> None:
    """The alternative to a capture, kept to be measured against it."""
    if engine.model_config.architecture != "llama":
        pytest.skip("compiling takes long, and what is compiled is a layer like any other")
    engine.apply(fused_kernels=True)
    parts = engine._loop.parts
    prompt = [5, 6, 7, 8]
    expected = engine.generate([prompt, prompt[:3]], GREEDY)
    compiled = CompiledStep(parts.runner.step)
    compiled.prepare(lambda fraction: None)
    eager, parts.runner.step = parts.runner.step, compiled
    try:
        again = engine.generate([prompt, prompt[:3]], GREEDY)
    finally:
        parts.runner.step = eager
    assert [o.token_ids for o in again] == [o.token_ids for o in expected]

"""Laws of the engine on a tiny model: what is asked for comes out, whatever is switched, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest
import torch

from strata_lab.config import Optimizations
from strata_lab.engine import EngineClosedError, LLMEngine
from strata_lab.events import SettingEvent, StepEvent
from strata_lab.sampling_params import RequestError, SamplingParams
from strata_lab.settings import ConfigError
from tests.checkpoints import write_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama on disk."""
    return write_checkpoint(tmp_path_factory.mktemp("engine"), "llama")[0]


def make(folder, **options) -> LLMEngine:
    defaults = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "cuda_graph": False}
    return LLMEngine(folder, **(defaults | options))


def prompts(count: int, length: int = 9) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randint(3, 90, (length + i,), generator=generator).tolist() for i in range(count)]


@pytest.fixture(scope="module")
def expected(folder) -> list[tuple[int, ...]]:
    """Greedy tokens of four prompts, each alone in the slow, obviously right engine."""
    with make(folder, optimizations=Optimizations.none(), weight_format="fp32", kv_cache_dtype="fp32") as engine:
        return [engine.generate([p], GREEDY)[0].token_ids for p in prompts(4)]


def test_batched_equals_alone(folder, expected) -> None:
    with make(folder) as engine:
        assert [o.token_ids for o in engine.generate(prompts(4), GREEDY)] == expected


def test_work_between_steps_meets_books_that_no_step_changes_and_its_error_comes_out(folder) -> None:
    def looking(scheduler) -> None:
        before = scheduler.blocks.num_used, [request.num_tokens for request in scheduler.running]
        time.sleep(0.02)  # many steps of this model
        assert (scheduler.blocks.num_used, [request.num_tokens for request in scheduler.running]) == before
        seen.append(len(scheduler.running))

    seen: list[int] = []
    with make(folder) as engine:
        stream = engine.stream(prompts(1)[0], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
        next(stream)
        engine.between_steps(looking)
        with pytest.raises(ZeroDivisionError):
            engine.between_steps(lambda scheduler: 1 // 0)
        stream.close()
    assert seen in ([1], [0]), "whether it still ran was a matter of speed"
    with pytest.raises(EngineClosedError):
        engine.between_steps(looking)


def test_preemption_loses_nothing(folder) -> None:
    """Four requests that grow to 9 blocks of 8 each share a pool of 12: they cannot all stay."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with make(folder, block_size=8, num_kv_blocks=12, max_model_len=96) as engine:
        alone = [engine.generate([p], params)[0].token_ids for p in prompts(4)]
        assert engine.stats().num_preemptions == 0
        assert [o.token_ids for o in engine.generate(prompts(4), params)] == alone
        stats = engine.stats()
        assert stats.num_preemptions > 0 and stats.num_recomputed_tokens > 0 and stats.kv_blocks_used == 0


def test_settings_changed_while_tokens_stream_leave_them_unchanged(folder, expected) -> None:
    with make(folder) as engine:
        streams = [engine.stream(p, GREEDY) for p in prompts(4)]
        for name, value in (("fused_kernels", False), ("max_num_seqs", 1), ("continuous_batching", False)):
            report = engine.apply(**{name: value})
            assert report.ok and report.results[name].status == "applied"
            assert getattr(engine.optimizations, name) == value
        assert [tuple(e.token_id for e in s) for s in streams] == expected


def test_weights_and_pool_are_rebuilt_under_running_requests(folder) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with make(folder) as engine:
        stream = engine.stream(prompts(1)[0], params)
        next(stream)
        report = engine.apply(weight_format="int8", kv_cache_dtype="bf16")
        assert {n: r.status for n, r in report.results.items()} == {
            "weight_format": "rebuilt",
            "kv_cache_dtype": "rebuilt",
        }
        assert len(list(stream)) == 59
        assert engine.optimizations.weight_format == "int8" and engine.optimizations.kv_cache_dtype == "bf16"
        changes = [e for e in engine.events.since(0)[0] if isinstance(e, SettingEvent)]
        assert changes[-1].changes.keys() == {"weight_format", "kv_cache_dtype"}


def test_apply_refuses_with_a_reason_and_keeps_serving(folder, expected) -> None:
    with make(folder) as engine:
        before = engine.optimizations
        report = engine.apply(max_model_len=10**6, fused_kernel=False, weight_format="int3", max_num_seqs=0)
        assert not report.ok and {r.status for r in report.results.values()} == {"refused"}
        reasons = {name: r.reason for name, r in report.results.items()}
        assert "1000000" in reasons["max_model_len"] and "did you mean 'fused_kernels'" in reasons["fused_kernel"]
        assert "int4" in reasons["weight_format"] and "at least 1" in reasons["max_num_seqs"]
        assert engine.optimizations == before
        assert engine.generate(prompts(4), GREEDY)[0].token_ids == expected[0]


def test_apply_answers_unchanged_for_what_is_already_so(folder) -> None:
    with make(folder) as engine:
        assert engine.apply(fused_kernels=True).results["fused_kernels"].status == "unchanged"


def test_shrinking_max_model_len_below_a_live_request_is_refused(folder) -> None:
    with make(folder) as engine:
        stream = engine.stream(prompts(1, 40)[0], SamplingParams(temperature=0, max_tokens=80, ignore_eos=True))
        next(stream)
        report = engine.apply(max_model_len=16)
        assert report.results["max_model_len"].status == "refused"
        assert len(list(stream)) == 79


def test_sampling_is_reproducible_by_seed_alone(folder) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=12, ignore_eos=True)
    with make(folder) as engine:
        alone = engine.generate([prompts(4)[2]], params)[0].token_ids
        batched = engine.generate(prompts(4), params)[2].token_ids
        other = engine.generate([prompts(4)[2]], SamplingParams(temperature=1.0, top_p=0.9, seed=8, max_tokens=12))[0]
    assert alone == batched != other.token_ids


def test_the_call_of_the_articles_works_as_written(folder) -> None:
    engine = LLMEngine(
        model=str(folder), quantization="int8", max_batch_size=16, max_seq_len=128, gpu_memory_utilization=0.92,
        block_size=16, dtype="float16",
    )  # fmt: skip
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=8)
    text = engine.generate(prompts=["hello"], sampling_params=params)[0].text
    assert isinstance(text, str) and engine.optimizations.weight_format == "int8"
    assert any(f.feature == "dtype" for f in engine.fallbacks) == (engine.device.type == "cpu")
    engine.close()


def test_streamed_text_is_the_generated_text(folder) -> None:
    with make(folder) as engine:
        events = list(engine.stream("some words", GREEDY))
        assert "".join(e.text for e in events) == engine.generate(["some words"], GREEDY)[0].text
        assert [e.index for e in events] == list(range(12)) and events[-1].finish_reason == "length"


def test_async_streams_interleave_and_agree(folder, expected) -> None:
    async def read(engine, prompt):
        return tuple([e.token_id async for e in engine.astream(prompt, GREEDY)])

    async def all_of_them(engine):
        return await asyncio.gather(*(read(engine, p) for p in prompts(4)))

    with make(folder) as engine:
        assert asyncio.run(all_of_them(engine)) == expected


@pytest.mark.parametrize("leave", ["close", "drop", "unread"])
def test_leaving_a_stream_aborts_its_request(leave, folder) -> None:
    with make(folder) as engine:
        stream = engine.stream(prompts(1)[0], SamplingParams(max_tokens=100, ignore_eos=True))
        if leave != "unread":
            next(stream)
        if leave == "close":
            stream.close()
        del stream
        gc.collect()
        deadline = time.monotonic() + 5
        while engine.stats().num_running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.stats().kv_blocks_used == 0


def test_step_by_step_without_a_thread(folder, expected) -> None:
    with make(folder) as engine:
        request_id = engine.add_request(prompts(4)[0], GREEDY, request_id="mine")
        events = []
        while (event := engine.step()) is not None:
            events.append(event)
        assert engine.output(request_id).token_ids == expected[0]
        assert events[0].num_prefill_tokens == 9 and all(e.num_decode_tokens == 1 for e in events[1:])
        assert all(e.schedule_ms + e.forward_ms + e.sample_ms + e.commit_ms <= e.duration_ms + 1e-6 for e in events)


def test_step_is_refused_while_the_loop_owns_the_steps(folder) -> None:
    with make(folder) as engine:
        engine.start()
        with pytest.raises(RuntimeError, match="do not call start"):
            engine.step()


def test_logprobs_belong_to_the_tokens(folder) -> None:
    with make(folder) as engine:
        out = engine.generate(
            [prompts(1)[0]], SamplingParams(temperature=0, max_tokens=5, logprobs=3, ignore_eos=True)
        )[0]
    assert len(out.logprobs) == 5
    for token, entry in zip(out.token_ids, out.logprobs, strict=True):
        assert entry.token_id == token == next(iter(entry.top)) and len(entry.top) == 3


def test_stop_token_ids_end_the_text(folder, expected) -> None:
    stop = expected[0][3]
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(stop,), ignore_eos=True)
    with make(folder) as engine:
        out = engine.generate([prompts(4)[0]], params)[0]
    assert out.finish_reason == "stop" and out.token_ids == expected[0][: expected[0].index(stop) + 1]


def test_reaching_max_model_len_ends_with_length(folder) -> None:
    with make(folder, max_model_len=20) as engine:
        out = engine.generate([prompts(1, 12)[0]], SamplingParams(temperature=0, max_tokens=999, ignore_eos=True))[0]
    assert out.finish_reason == "length" and 12 + len(out.token_ids) == 20


# -- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "match"),
    [("", "empty"), ([], "no tokens"), ([10**6], "from 0 to"), ([1] * 128, "128"), ([{"role": "user"}], "content")],
    ids=["empty-text", "empty-ids", "outside-vocabulary", "too-long", "malformed-chat"],
)
def test_bad_prompts_are_refused_before_anything_runs(prompt, match, folder) -> None:
    with make(folder) as engine:
        with pytest.raises(ValueError, match=match):
            engine.generate([prompt], GREEDY)
        assert engine.stats().num_waiting == engine.stats().num_running == 0


def test_one_bad_prompt_among_good_ones_leaves_nothing_running(folder) -> None:
    with make(folder) as engine:
        with pytest.raises(RequestError):
            engine.generate([prompts(1)[0], [1] * 500], GREEDY)
        assert engine.stats().num_running == engine.stats().num_waiting == 0


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_bad_max_tokens_says_what_works(value) -> None:
    with pytest.raises(RequestError, match="max_tokens=.*try 256"):
        SamplingParams(max_tokens=value)


def test_parts_are_those_in_force_for_looking_at_and_gone_with_the_engine(folder) -> None:
    with make(folder, prefix_cache=False) as engine:
        before = engine.parts
        assert engine.apply(prefix_cache=True).ok
        assert engine.parts.optimizations == engine.optimizations != before.optimizations
        assert engine.parts.weights is before.weights, "what did not change is the same"
        with pytest.raises(AttributeError):
            engine.parts = before
    with pytest.raises(EngineClosedError):
        _ = engine.parts


def test_nan_logits_end_their_request_and_not_the_engine(folder, expected) -> None:
    with make(folder) as engine:
        norm = engine._loop.parts.weights.final_norm
        good = norm.clone()
        norm.fill_(float("nan"))
        out = engine.generate([prompts(4)[0]], GREEDY)[0]
        assert out.finish_reason == "error" and "NaN" in (out.error or "")
        norm.copy_(good)
        assert engine.generate([prompts(4)[0]], GREEDY)[0].token_ids == expected[0]
        assert engine.stats().kv_blocks_used == 0


def test_a_mistake_in_booking_ends_all_requests_and_nobody_waits(folder, expected, monkeypatch) -> None:
    with make(folder) as engine:
        monkeypatch.setattr(engine._loop._accounts, "book", lambda *args: 1 / 0)
        outputs = engine.generate(prompts(4), GREEDY)
        assert {output.finish_reason for output in outputs} == {"error"}
        assert "ZeroDivisionError" in outputs[0].error
        monkeypatch.undo()
        assert [o.token_ids for o in engine.generate(prompts(4), GREEDY)] == expected
        assert engine.stats().num_running == 0


def test_a_crashing_step_ends_its_requests_and_not_the_engine(folder, expected, monkeypatch) -> None:
    with make(folder) as engine:
        runner = engine._loop.parts.runner
        monkeypatch.setattr(runner, "step", lambda inputs: 1 / 0)
        out = engine.generate([prompts(4)[0]], GREEDY)[0]
        assert out.finish_reason == "error" and "ZeroDivisionError" in (out.error or "")
        monkeypatch.undo()
        assert engine.generate([prompts(4)[0]], GREEDY)[0].token_ids == expected[0]


def test_a_pool_too_small_for_max_model_len_names_the_numbers(folder) -> None:
    with pytest.raises(
        ConfigError, match="max_model_len=128 needs 8 KV blocks but the pool has 3 .48 tokens.*try max_model_len=48"
    ):
        make(folder, num_kv_blocks=3)


def test_a_request_larger_than_the_pool_is_refused_at_once(folder) -> None:
    with make(folder, num_kv_blocks=2, max_model_len=None) as engine:
        assert engine.optimizations.max_model_len == 32
        with pytest.raises(RequestError, match="32"):
            engine.generate([[1] * 40], GREEDY)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"quantisation": "int8"}, "did you mean 'quantization'"),
        ({"quantization": "int8", "weight_format": "int8"}, "same setting"),
        ({"block_size": 5}, "block_size=5 must be one of 8, 16, 32"),
        ({"max_model_len": 10**6}, "positions"),
        ({"device": "tpu"}, "device='tpu' must be one of"),
    ],
    ids=["unknown", "twice", "block-size", "too-long", "device"],
)
def test_bad_options_say_what_works(options, match, folder) -> None:
    with pytest.raises(ConfigError, match=match):
        make(folder, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_a_gpu_says_so(folder) -> None:
    with pytest.raises(ConfigError, match="sees no CUDA device; try device='cpu'"):
        make(folder, device="cuda")


# -- life -----------------------------------------------------------------------------------------------------------


def test_every_call_after_close_says_so(folder) -> None:
    engine = make(folder)
    engine.start()
    engine.close()
    engine.close()
    for call in (
        lambda: engine.generate(["x"]),
        lambda: engine.stream("x"),
        lambda: engine.add_request("x"),
        lambda: engine.apply(fused_kernels=False),
        lambda: engine.step(),
        lambda: engine.stats(),
    ):
        with pytest.raises(EngineClosedError, match="make a new one"):
            call()


def test_close_ends_running_streams(folder) -> None:
    engine = make(folder)
    stream = engine.stream(prompts(1)[0], SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    engine.close()
    assert list(stream)[-1].finish_reason in ("abort", "length")


def test_two_engines_at_once_do_not_disturb_each_other(folder, expected) -> None:
    with make(folder) as one, make(folder) as two:
        streams = [engine.stream(prompts(4)[0], GREEDY) for engine in (one, two)]
        assert [tuple(e.token_id for e in s) for s in streams] == [expected[0]] * 2


def test_an_interrupt_in_generate_frees_everything(folder, monkeypatch) -> None:
    """Ctrl+C lands while the caller waits for a token."""
    from strata_lab.session import Session

    calls = 0
    original = Session.next_event

    def interrupted(self):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return original(self)

    monkeypatch.setattr(Session, "next_event", interrupted)
    with make(folder) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompts(2), SamplingParams(max_tokens=100, ignore_eos=True))
        stats = engine.stats()
        assert stats.num_running == stats.num_waiting == stats.kv_blocks_used == 0


def test_ten_engines_one_after_the_other_leave_no_thread_and_no_memory(folder) -> None:
    def tensors() -> int:
        gc.collect()
        return sum(1 for o in gc.get_objects() if type(o) is torch.Tensor)

    with make(folder) as engine:
        engine.generate([prompts(1)[0]], GREEDY)
    threads, baseline = threading.active_count(), tensors()
    for _ in range(10):
        with make(folder) as engine:
            engine.generate([prompts(1)[0]], GREEDY)
    del engine
    assert threading.active_count() == threads
    assert tensors() <= baseline + 5


def test_events_tell_the_whole_story(folder) -> None:
    with make(folder) as engine:
        outputs = engine.generate(prompts(3), GREEDY)
        steps = [e for e in engine.events.since(0)[0] if isinstance(e, StepEvent)]
        by_request: dict[str, list[int]] = {}
        for token in (t for s in steps for t in s.tokens):
            by_request.setdefault(token.request_id, []).append(token.token_id)
        assert sorted(map(tuple, by_request.values())) == sorted(o.token_ids for o in outputs)
        assert sum(s.num_prefill_tokens for s in steps) == sum(len(p) for p in prompts(3))
        assert all(s.bytes_moved >= engine.stats().weight_bytes * 0.5 for s in steps)

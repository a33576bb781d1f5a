"""Laws of the metrics: every figure is one that the engine booked, and an engine that nobody scrapes pays nothing."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_lab.engine import EngineClosedError, LLMEngine
from strata_lab.events import FINISH_REASONS, RequestEvent, StepEvent
from strata_lab.sampling_params import SamplingParams
from strata_lab.telemetry import metrics, metrics_pump
from strata_lab.telemetry.metrics import MetricsUnavailable, content_type, metrics_text
from tests.checkpoints import write_checkpoint

OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "cuda_graph": False, "block_size": 8}


def params(max_tokens: int = 10, **more) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("metrics"), "llama")[0]


@pytest.fixture(scope="module")
def scraped(folder):
    """Events of an engine that was preempted, ended requests in four ways and changed a toggle; and its metrics."""
    with LLMEngine(folder, **OPTIONS, num_kv_blocks=16) as engine:
        engine.generate([[i + 3] * 9 for i in range(4)], params(60))
        engine.generate([[5] * 20, [5] * 20], params(6))
        first = engine.generate([[7, 8, 9]], params(4))[0].token_ids
        engine.generate([[7, 8, 9]], params(4, stop_token_ids=(first[1],)))
        engine.generate([[7, 8, 9]], params(100, timeout_s=1e-9))
        stream = engine.stream([4, 5, 6], params(100))
        next(stream)
        stream.close()
        engine.apply(fused_kernels=False)
        engine._loop.between_steps(lambda: None)
        text = metrics_text(engine).decode()
        return engine.events.since(0)[0], engine.stats(), text, str(engine.config.model)


@pytest.fixture(scope="module")
def values(scraped) -> dict[str, float]:
    """Sample name, with what is not the model's label, to value."""
    from prometheus_client.parser import text_string_to_metric_families

    found = {}
    for family in text_string_to_metric_families(scraped[2]):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == scraped[3]
            found[" ".join((sample.name, *labels.values()))] = sample.value
    return found


def test_counters_and_gauges_are_those_of_the_engine(scraped, values) -> None:
    stats = scraped[1]
    for field, name, _ in metrics._COUNTERS:
        assert values[f"{name}_total"] == getattr(stats, field), name
    for field, name, _ in metrics._GAUGES:
        if field != "output_tok_s":  # of the second before the question
            assert values[name] == getattr(stats, field), name
    assert values["vllm:num_preemptions_total"] > 0 and values["strata:recomputed_tokens_total"] > 0
    assert values["vllm:prefix_cache_hits_total"] >= 16
    assert values["vllm:kv_cache_usage_perc"] == stats.kv_blocks_used / stats.kv_blocks_total


def test_every_end_is_counted_once_under_its_reason(scraped, values) -> None:
    ends = [e for e in scraped[0] if isinstance(e, RequestEvent)]
    assert len(ends) == len({e.request_id for e in ends}) == 10
    for reason in FINISH_REASONS:
        assert values[f"vllm:request_success_total {reason}"] == sum(e.finish_reason == reason for e in ends)
    assert [values[f"vllm:request_success_total {r}"] for r in FINISH_REASONS] == [1, 7, 1, 1, 0]


def test_prompt_tokens_count_once_whatever_preemption_repeats(scraped, values) -> None:
    """9 x 4 + 20 x 2 + 3 x 3: the request that timed out never got to its prompt."""
    assert values["vllm:prompt_tokens_total"] == 36 + 40 + 9
    computed = sum(e.num_prefill_tokens for e in scraped[0] if isinstance(e, StepEvent))
    assert computed > values["vllm:prompt_tokens_total"]


def test_histograms_count_what_the_events_say(scraped, values) -> None:
    steps = [e for e in scraped[0] if isinstance(e, StepEvent)]
    ends = [e for e in scraped[0] if isinstance(e, RequestEvent)]
    first = [e.ttft_ms / 1e3 for e in ends if e.ttft_ms is not None]
    assert values["vllm:time_to_first_token_seconds_count"] == len(first) == 9
    assert values["vllm:time_to_first_token_seconds_sum"] == pytest.approx(sum(first))
    assert values["vllm:e2e_request_latency_seconds_count"] == 10
    assert values["vllm:e2e_request_latency_seconds_sum"] == pytest.approx(sum(e.e2e_ms for e in ends) / 1e3)
    num_tokens = sum(len(s.tokens) for s in steps)
    assert values["vllm:inter_token_latency_seconds_count"] == num_tokens - len(first)
    assert values["vllm:request_generation_tokens_sum"] == num_tokens == values["vllm:generation_tokens_total"]
    assert values["strata:step_duration_seconds_count"] == len(steps) == values["strata:steps_total"]
    assert values["vllm:iteration_tokens_total_sum"] == sum(s.num_prefill_tokens + s.num_decode_tokens for s in steps)


def test_the_parts_of_steps_add_up_to_their_durations(scraped, values) -> None:
    steps = [e for e in scraped[0] if isinstance(e, StepEvent)]
    parts = [value for name, value in values.items() if name.startswith("strata:step_seconds_total")]
    assert len(parts) == 5 and sum(parts) == pytest.approx(sum(s.duration_ms for s in steps) / 1e3)
    kinds = [value for name, value in values.items() if name.startswith("strata:steps_by_kind")]
    assert sum(kinds) == len(steps) and values["strata:steps_by_kind_total decode"] > 0
    assert values["strata:bytes_moved_total"] == sum(s.bytes_moved for s in steps)
    assert values["strata:setting_changes_total fused_kernels"] == 1
    assert values["strata:events_lost_total"] == 0


@given(st.lists(st.floats(0, 3000), max_size=50))
def test_a_histogram_counts_each_value_under_every_bound_that_holds_it(numbers) -> None:
    histogram = metrics_pump.Histogram(metrics_pump.TTFT_S)
    for number in numbers:
        histogram.add(number)
    rows = histogram.cumulative()
    assert rows[-1] == ("+Inf", len(numbers)) and histogram.total == pytest.approx(sum(numbers))
    assert [count for _, count in rows[:-1]] == [sum(n <= b for n in numbers) for b in metrics_pump.TTFT_S]


@pytest.mark.parametrize("name", ["TTFT_S", "ITL_S", "E2E_S", "TOKENS", "STEP_TOKENS"])
def test_bounds_ascend(name) -> None:
    bounds = getattr(metrics_pump, name)
    assert list(bounds) == sorted(set(bounds))


def test_bandwidth_use_is_bytes_over_what_the_memory_could_have_read(folder, monkeypatch) -> None:
    monkeypatch.setattr(metrics_pump, "_bandwidth", lambda engine: 1e9)
    with LLMEngine(folder, **OPTIONS) as engine:
        engine.generate([[3, 4, 5]], params())
        report = metrics_pump.MetricsPump(engine).report()
        decodes = [e for e in engine.events.since(0)[0] if isinstance(e, StepEvent) and not e.num_prefill_tokens]
    expected = sum(e.bytes_moved for e in decodes) / (sum(e.duration_ms for e in decodes) / 1e3 * 1e9)
    assert report.mbu == pytest.approx(expected)


def test_nothing_reads_the_log_before_the_first_scrape_nor_after_the_engine(folder) -> None:
    def readers() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "strata-metrics"]

    before = len(readers())
    engine = LLMEngine(folder, **OPTIONS)
    assert len(readers()) == before
    metrics_text(engine)
    metrics_text(engine)
    mine = readers()[before:]
    assert len(mine) == 1
    engine.close()
    with pytest.raises(EngineClosedError):
        metrics_text(engine)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    mine[0].join(5 * metrics_pump.READ_EVERY_S)
    assert not mine[0].is_alive()


def test_without_its_package_the_way_to_get_it_is_named(folder, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with LLMEngine(folder, **OPTIONS) as engine, pytest.raises(MetricsUnavailable, match="pip install.*serve"):
        metrics_text(engine)


def test_the_content_type_is_what_the_writer_writes() -> None:
    import prometheus_client

    assert content_type == prometheus_client.CONTENT_TYPE_LATEST

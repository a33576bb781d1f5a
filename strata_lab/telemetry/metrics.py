"""What Prometheus scrapes: vLLM's names where it has one, so that its dashboards work, and ours beside them.

Counters and gauges are `EngineStats` at the moment of the scrape and count since the engine was made. Histograms are
made of the events in the engine's log, by a thread that the first scrape of an engine starts (`metrics_pump.py`); they
begin with what the log still held then. An engine that nobody scrapes pays nothing.

`prometheus-client` is imported by the first scrape. Nothing here serves HTTP.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from strata_lab.events import FINISH_REASONS
from strata_lab.telemetry.metrics_pump import Histogram, MetricsPump

if TYPE_CHECKING:
    from strata_lab.engine import LLMEngine
    from strata_lab.stats import EngineStats

content_type = "text/plain; version=1.0.0; charset=utf-8"  # what prometheus-client writes; a test compares them

# Field of `EngineStats`, name, help.
_GAUGES = (
    ("num_running", "vllm:num_requests_running", "Requests that have a place in the batch."),
    ("num_waiting", "vllm:num_requests_waiting", "Requests in the queue, preempted ones included."),
    ("num_waiting_tokens", "strata:waiting_tokens", "Tokens of the requests in the queue."),
    ("admission_closed", "strata:admission_closed", "1 while newcomers wait until the high watermark is free."),
    ("output_tok_s", "strata:output_tokens_per_second", "Tokens of all requests in the last second."),
    ("kv_blocks_used", "strata:kv_blocks_used", "KV blocks that some request holds."),
    ("kv_blocks_total", "strata:kv_blocks", "KV blocks of the pool."),
    ("kv_blocks_cached", "strata:kv_blocks_cached", "KV blocks nobody holds that the prefix cache keeps."),
    ("kv_fragmentation", "strata:kv_fragmentation_ratio", "Share of the slots in used blocks that hold no token."),
    ("weight_bytes", "strata:weight_bytes", "Memory of all matrices."),
    ("kv_bytes", "strata:kv_cache_bytes", "Memory of the KV pool."),
    ("capture_bytes", "strata:capture_bytes", "Memory of captured steps."),
)
_COUNTERS = (
    ("num_prompt_tokens", "vllm:prompt_tokens", "Tokens of prompts that were computed or found."),
    ("num_output_tokens", "vllm:generation_tokens", "Tokens generated."),
    ("num_preemptions", "vllm:num_preemptions", "Times that a request lost its KV blocks."),
    ("prefix_asked_tokens", "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache."),
    ("prefix_hit_tokens", "vllm:prefix_cache_hits", "Tokens found in the prefix cache."),
    ("num_recomputed_tokens", "strata:recomputed_tokens", "Computed tokens that preemption threw away."),
    ("num_closures", "strata:admission_closures", "Times that the pool ran short and admission was closed."),
    ("num_steps", "strata:steps", "Steps of the engine."),
)

_DRAFT_COUNTERS = (
    ("num_drafted_tokens", "vllm:spec_decode_num_draft_tokens", "Drafted tokens that were verified."),
    ("num_accepted_tokens", "vllm:spec_decode_num_accepted_tokens", "Drafted tokens that came true."),
)

_exporters: weakref.WeakKeyDictionary[LLMEngine, Exporter] = weakref.WeakKeyDictionary()
_exporters_lock = threading.Lock()


class MetricsUnavailable(RuntimeError):
    """The package that writes the metrics is not installed. The message says how to get it."""


def metrics_text(engine: LLMEngine) -> bytes:
    """All metrics of an engine in Prometheus' text format, UTF-8. Safe from any thread.

    Raises:
        MetricsUnavailable: `prometheus-client` is not installed.
        EngineClosedError: the engine was closed.
    """
    stats = engine.stats()
    with _exporters_lock:
        exporter = _exporters.get(engine)
        if exporter is None:
            exporter = _exporters[engine] = Exporter(engine)
    return exporter.text(stats)


class Exporter:
    """The metrics of one engine. It does not keep the engine alive."""

    def __init__(self, engine: LLMEngine) -> None:
        try:
            import prometheus_client
            from prometheus_client import core
        except ImportError as error:
            raise MetricsUnavailable(
                "metrics need the package prometheus-client; install it with: pip install 'strata-lab[serve]'"
            ) from error
        self._core: Any = core
        self._write = prometheus_client.generate_latest
        self._labels = {"model_name": str(engine.config.model)}
        self._stats = engine.stats()
        self._lock = threading.Lock()  # one scrape at a time: `collect` reads what `text` was handed
        self._pump = MetricsPump(engine)
        self._registry = prometheus_client.CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._pump.start()

    def text(self, stats: EngineStats) -> bytes:
        """One scrape."""
        with self._lock:
            self._stats = stats
            return self._write(self._registry)

    def collect(self) -> Iterator[Any]:
        """Every family, as the registry asks for them."""
        stats = self._stats
        for field, name, text in _GAUGES:
            yield self._gauge(name, text, getattr(stats, field))
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "Share of the KV blocks that are used; 1 is all of them.",
            stats.kv_blocks_used / stats.kv_blocks_total,
        )  # fmt: skip
        drafts = [row for row in _DRAFT_COUNTERS if hasattr(stats, row[0])]  # an engine that speculates
        for field, name, text in (*_COUNTERS, *drafts):
            yield self._counter(name, text, {(): getattr(stats, field)})
        ends = {(reason,): float(stats.num_finished.get(reason, 0)) for reason in FINISH_REASONS}
        yield self._counter("vllm:request_success", "Requests that ended, by reason.", ends, "finished_reason")
        report = self._pump.report()
        for name, text, histogram in report.histograms:
            yield self._histogram(name, text, histogram)
        parts = {(part,): seconds for part, seconds in report.step_s.items()}
        yield self._counter("strata:step_seconds", "Wall time of steps, by what the host did.", parts, "part")
        kinds = {(kind,): float(count) for kind, count in report.steps.items()}
        yield self._counter("strata:steps_by_kind", "Steps, by what they computed.", kinds, "kind")
        changes = {(name,): float(count) for name, count in report.changes.items()}
        yield self._counter("strata:setting_changes", "Changes of a toggle that took effect.", changes, "name")
        yield self._counter("strata:bytes_moved", "Bytes of weights and KV that steps read.", {(): report.bytes_moved})
        yield self._counter("strata:events_lost", "Events overwritten before they were read.", {(): report.lost})
        if report.mbu is not None:
            yield self._gauge(
                "strata:mbu",
                "Bytes of decode steps over what the memory could have read meanwhile, lately.",
                report.mbu,
            )

    def _gauge(self, name: str, text: str, value: float) -> Any:
        family = self._core.GaugeMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, values: Mapping[Any, float], *labels: str) -> Any:
        """`values`: the values of `labels`, as a tuple, to the count."""
        family = self._core.CounterMetricFamily(name, text, labels=[*self._labels, *labels])
        for more, value in values.items():
            family.add_metric([*self._labels.values(), *more], value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Any:
        family = self._core.HistogramMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), histogram.cumulative(), histogram.total)
        return family

"""Prometheus metrics of the HTTP server: the engine's state as it is read, and each request as it ends."""

import math
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxkv.serving.engine import Engine
from jaxkv.serving.requests import RequestStats

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_TOKENS = tuple(2**power for power in range(0, 18))


class Metrics:
    """Metrics of one server, in a registry of their own."""

    def __init__(self, engine: Engine):
        """Makes the metrics, all 0."""
        self._registry = CollectorRegistry()
        self._registry.register(_State(engine))
        self._engine = engine
        self._requests = Counter(
            "jaxkv_http_requests", "HTTP requests by route and status.", ["route", "status"], registry=self._registry
        )
        self._first = Histogram(
            "jaxkv_time_to_first_token_seconds",
            "From submission to the first token.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._step = Histogram(
            "jaxkv_time_per_token_seconds",
            "Mean time between the tokens of one answer.",
            buckets=_STEP_SECONDS,
            registry=self._registry,
        )
        self._whole = Histogram(
            "jaxkv_answer_seconds", "From submission to the whole answer.", buckets=_SECONDS, registry=self._registry
        )
        self._prompt = Histogram("jaxkv_prompt_tokens", "Tokens of a prompt.", buckets=_TOKENS, registry=self._registry)
        self._new = Histogram("jaxkv_answer_tokens", "Tokens of an answer.", buckets=_TOKENS, registry=self._registry)
        self._mean = 1.0

    def ended(self, route: str, status: int) -> None:
        """Counts one HTTP request."""
        self._requests.labels(route, str(status)).inc()

    def answered(self, stats: RequestStats) -> None:
        """Counts one answer."""
        self._first.observe(stats.first_token_seconds)
        self._whole.observe(stats.seconds)
        self._prompt.observe(stats.prompt_tokens)
        self._new.observe(stats.new_tokens)
        if stats.new_tokens > 1:
            self._step.observe((stats.seconds - stats.first_token_seconds) / (stats.new_tokens - 1))
        self._mean += 0.1 * (stats.seconds - self._mean)

    def retry_after(self) -> int:
        """Seconds, 1 to 60, after which a place in the queue should be free: a mean answer's time over the slots."""
        return max(1, min(60, math.ceil(self._mean / self._engine.stats.slots)))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _State(Collector):
    """Collector of an engine's state at the moment of reading."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yields the engine's numbers."""
        now = self._engine.stats
        documents = self._engine.documents.all()
        gauges = {
            "queue_requests": ("Requests that are not prefilled yet.", now.waiting),
            "ready_requests": ("Prefilled requests that wait for a slot.", now.ready),
            "slots_taken": ("Slots with a request.", now.running),
            "slots": ("Slots.", now.slots),
            "slots_bytes": ("Bytes of all slots.", now.nbytes),
            "documents": ("Documents that can be asked.", len(documents)),
            "documents_rows": ("Rows of all documents per kv head and layer.", sum(each.rows for each in documents)),
            "documents_bytes": ("Bytes of documents on the device.", now.document_bytes),
            "longest_pause_seconds": ("Longest time between two tokens.", now.longest_pause_seconds),
        }
        for name, (about, value) in gauges.items():
            yield GaugeMetricFamily(f"jaxkv_{name}", about, value=value)
        counts = {
            "answers": ("Requests answered.", now.answered),
            "queue_refusals": ("Requests refused because the queue was full.", now.refused),
            "tokens": ("Tokens drawn.", now.new_tokens),
        }
        for name, (about, value) in counts.items():
            yield CounterMetricFamily(f"jaxkv_{name}", about, value=value)

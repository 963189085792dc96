"""Prometheus metrics of the HTTP server: the engine's state as it is read, and each request as it ends."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

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

    def __init__(self, models: Mapping[str, Engine]):
        """Makes the metrics of engines by model id, all 0."""
        self._registry = CollectorRegistry()
        self._registry.register(_State(models))
        self._models = models
        self._requests = Counter(
            "jaxkv_http_requests",
            "HTTP requests by route and status.",
            ["route", "status"],
            registry=self._registry,
        )
        self._first = Histogram(
            "jaxkv_time_to_first_token_seconds",
            "From submission to the first token.",
            ["model"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._step = Histogram(
            "jaxkv_time_per_token_seconds",
            "Mean time between the tokens of one answer.",
            ["model"],
            buckets=_STEP_SECONDS,
            registry=self._registry,
        )
        self._whole = Histogram(
            "jaxkv_answer_seconds",
            "From submission to the whole answer.",
            ["model"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        counted: dict[str, Any] = {
            "labelnames": ["model"],
            "buckets": _TOKENS,
            "registry": self._registry,
        }
        self._prompt = Histogram("jaxkv_prompt_tokens", "Tokens of a prompt.", **counted)
        self._new = Histogram("jaxkv_answer_tokens", "Tokens of an answer.", **counted)
        self._mean = dict.fromkeys(models, 1.0)
        # A model that has answered nothing yet is there with zeros.
        for name in models:
            for each in (self._first, self._step, self._whole, self._prompt, self._new):
                each.labels(name)

    def ended(self, route: str, status: int) -> None:
        """Counts one HTTP request."""
        self._requests.labels(route, str(status)).inc()

    def answered(self, model: str, stats: RequestStats) -> None:
        """Counts one answer of a model."""
        self._first.labels(model).observe(stats.first_token_seconds)
        self._whole.labels(model).observe(stats.seconds)
        self._prompt.labels(model).observe(stats.prompt_tokens)
        self._new.labels(model).observe(stats.new_tokens)
        if stats.new_tokens > 1:
            self._step.labels(model).observe(
                (stats.seconds - stats.first_token_seconds) / (stats.new_tokens - 1)
            )
        self._mean[model] += 0.1 * (stats.seconds - self._mean[model])

    def retry_after(self, model: str) -> int:
        """Seconds, 1 to 60, until a place in a model's queue should be free: a mean answer's time over the slots."""
        return max(1, min(60, math.ceil(self._mean[model] / self._models[model].stats.slots)))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _State(Collector):
    """Collector of the engines' states at the moment of reading."""

    def __init__(self, models: Mapping[str, Engine]):
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Yields the engines' numbers, each by its model id."""
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for model, engine in self._models.items():
            for kind, name, about, value in _numbers(engine):
                family = families.setdefault(name, kind(f"jaxkv_{name}", about, labels=["model"]))
                family.add_metric([model], value)
        yield from families.values()


def _numbers(engine: Engine) -> Iterator[tuple[type[Any], str, str, float]]:
    """Yields kind, name, help text and value of each number of an engine."""
    now, documents = engine.stats, engine.documents.all()
    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    yield gauge, "queue_requests", "Requests that are not prefilled yet.", now.waiting
    yield gauge, "ready_requests", "Prefilled requests that wait for a slot.", now.ready
    yield gauge, "slots_taken", "Slots with a request.", now.running
    yield gauge, "slots", "Slots.", now.slots
    yield gauge, "slots_bytes", "Bytes of all slots.", now.nbytes
    yield gauge, "documents", "Documents that can be asked.", len(documents)
    about = "Rows of all documents per kv head and layer."
    yield gauge, "documents_rows", about, sum(each.rows for each in documents)
    yield gauge, "documents_bytes", "Bytes of documents on the device.", now.document_bytes
    yield (
        gauge,
        "longest_pause_seconds",
        "Longest time between two tokens.",
        now.longest_pause_seconds,
    )
    yield counter, "answers", "Requests answered.", now.answered
    yield counter, "queue_refusals", "Requests refused because the queue was full.", now.refused
    yield counter, "tokens", "Tokens drawn.", now.new_tokens

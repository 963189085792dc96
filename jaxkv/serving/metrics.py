"""Prometheus metrics of the HTTP server: the engine's state as it is read, and each request as it ends."""

import math
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxkv.serving.engine import Engine
from jaxkv.serving.requests import RequestStats

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_TOKENS = tuple(2**power for power in range(0, 18))


_COUNTERS = ("answers", "queue_refusals", "tokens")
_STATE = {
    "queue_requests": "Requests that are not prefilled yet.",
    "ready_requests": "Prefilled requests that wait for a slot.",
    "slots_taken": "Slots with a request.",
    "slots": "Slots.",
    "slots_bytes": "Bytes of all slots.",
    "documents": "Documents that can be asked.",
    "documents_rows": "Rows of all documents per kv head and layer.",
    "documents_bytes": "Bytes of documents on the device.",
    "longest_pause_seconds": "Longest time between two tokens.",
    "answers": "Requests answered.",
    "queue_refusals": "Requests refused because the queue was full.",
    "tokens": "Tokens drawn.",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From submission to the first token.", _SECONDS),
    "time_per_token_seconds": ("Mean time between the tokens of one answer.", _STEP_SECONDS),
    "answer_seconds": ("From submission to the whole answer.", _SECONDS),
    "prompt_tokens": ("Tokens of a prompt.", _TOKENS),
    "answer_tokens": ("Tokens of an answer.", _TOKENS),
}


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
        self._histograms = {
            name: Histogram(
                f"jaxkv_{name}", about, ["model"], buckets=buckets, registry=self._registry
            )
            for name, (about, buckets) in _HISTOGRAMS.items()
        }
        self._mean = dict.fromkeys(models, 1.0)
        # A model that has answered nothing yet is there with zeros.
        for each in self._histograms.values():
            for name in models:
                each.labels(name)

    def ended(self, route: str, status: int) -> None:
        """Counts one HTTP request."""
        self._requests.labels(route, str(status)).inc()

    def answered(self, model: str, stats: RequestStats) -> None:
        """Counts one answer of a model."""
        seen: dict[str, int | float] = {
            "time_to_first_token_seconds": stats.first_token_seconds,
            "answer_seconds": stats.seconds,
            "prompt_tokens": stats.prompt_tokens,
            "answer_tokens": stats.new_tokens,
        }
        if stats.new_tokens > 1:
            drawing = stats.seconds - stats.first_token_seconds
            seen["time_per_token_seconds"] = drawing / (stats.new_tokens - 1)
        for name, value in seen.items():
            self._histograms[name].labels(model).observe(value)
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
        numbers = {model: _numbers(engine) for model, engine in self._models.items()}
        for name, about in _STATE.items():
            kind = CounterMetricFamily if name in _COUNTERS else GaugeMetricFamily
            family = kind(f"jaxkv_{name}", about, labels=["model"])
            for model, values in numbers.items():
                family.add_metric([model], values[name])
            yield family


def _numbers(engine: Engine) -> dict[str, int | float]:
    """The numbers of an engine by name."""
    now, documents = engine.stats, engine.documents.all()
    return {
        "queue_requests": now.waiting,
        "ready_requests": now.ready,
        "slots_taken": now.running,
        "slots": now.slots,
        "slots_bytes": now.nbytes,
        "documents": len(documents),
        "documents_rows": sum(each.rows for each in documents),
        "documents_bytes": now.document_bytes,
        "longest_pause_seconds": now.longest_pause_seconds,
        "answers": now.answered,
        "queue_refusals": now.refused,
        "tokens": now.new_tokens,
    }

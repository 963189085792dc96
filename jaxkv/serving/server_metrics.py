"""Prometheus metrics of the HTTP server: engine state at collection, and each request when it ends."""

import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxkv.serving.engine import Engine
from jaxkv.serving.requests import RequestStats

_TABLES = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text("utf-8"))
_KINDS = {"counters": CounterMetricFamily, "gauges": GaugeMetricFamily}


class ServerMetrics:
    """Prometheus metrics of one HTTP server and its engines, in a registry of their own."""

    def __init__(self, models: Mapping[str, Engine]):
        """Register the metrics of `models`, engines by model id; request counts and answers' histograms start at 0."""
        self._registry = CollectorRegistry()
        self._registry.register(_EngineStateCollector(models))
        self._models = models
        self._requests = Counter(
            "jaxkv_http_requests",
            "HTTP requests by route and status.",
            ["route", "status"],
            registry=self._registry,
        )
        self._successes = Counter(
            "vllm:request_success",
            "Requests answered, by finish reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._prompt_tokens = Counter(
            "vllm:prompt_tokens",
            "Tokens of the prompts of answered requests.",
            ["model_name"],
            registry=self._registry,
        )
        self._histograms = [
            (
                row["field"],
                Histogram(
                    name, row["about"], [label], buckets=row["buckets"], registry=self._registry
                ),
            )
            for name, label, row in _iterate_metric_rows("histograms")
        ]
        self._mean = dict.fromkeys(models, 1.0)
        # A model without answers is listed with zeros.
        for _, each in self._histograms:
            for name in models:
                each.labels(name)

    def count_http_request(self, route: str, status: int) -> None:
        """Count one HTTP request by its route and status."""
        self._requests.labels(route, str(status)).inc()

    def record_answer(self, model: str, stats: RequestStats, reason: str) -> None:
        """Record an answer's finish reason, seconds and token counts; update the model's moving mean of seconds."""
        seen: dict[str, int | float] = {
            "time_to_first_token_seconds": stats.first_token_seconds,
            "answer_seconds": stats.seconds,
            "prompt_tokens": stats.prompt_tokens,
            "answer_tokens": stats.new_tokens,
        }
        if stats.new_tokens > 1:
            decoding = stats.seconds - stats.first_token_seconds
            seen["time_per_token_seconds"] = decoding / (stats.new_tokens - 1)
        for field, histogram in self._histograms:
            if field in seen:
                histogram.labels(model).observe(seen[field])
        self._prompt_tokens.labels(model).inc(stats.prompt_tokens)
        self._successes.labels(model, reason).inc()
        self._mean[model] += 0.1 * (stats.seconds - self._mean[model])

    def estimate_retry_seconds(self, model: str) -> int:
        """Estimate seconds, 1 to 60, until a model's queue has a place: mean answer seconds / slots, rounded up."""
        return max(1, min(60, math.ceil(self._mean[model] / self._models[model].stats.slots)))

    def format_metrics(self) -> bytes:
        """Return all metrics in Prometheus' text format, as bytes."""
        return generate_latest(self._registry)


def _iterate_metric_rows(kind: str) -> Iterator[tuple[str, str, Any]]:
    """Yield (name, name of its label, row of metrics.toml) of each metric of a kind, also under vLLM's names."""
    for table in _TABLES.values():
        for name, row in table[kind].items():
            yield table["prefix"] + name, table["label"], row


class _EngineStateCollector(Collector):
    """Prometheus collector of the current numbers of requests, slots, tokens and documents of engines."""

    def __init__(self, models: Mapping[str, Engine]):
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Yield a gauge or counter for each metric, with one number per engine, labelled by model id."""
        numbers = {model: _get_engine_numbers(engine) for model, engine in self._models.items()}
        for kind, family in _KINDS.items():
            for name, label, row in _iterate_metric_rows(kind):
                made = family(name, row["about"], labels=[label])
                for model, values in numbers.items():
                    made.add_metric([model], values[row["field"]])
                yield made


def _get_engine_numbers(engine: Engine) -> dict[str, int | float]:
    """Return a dict: `EngineStats`, numbers of documents, their entries, queued requests; share of slots taken."""
    documents, stats = engine.documents.get_documents(), engine.stats
    return vars(stats) | {
        "documents": len(documents),
        "documents_rows": sum(each.rows for each in documents),
        "queued": stats.waiting + stats.ready,
        "usage": stats.running / stats.slots,
    }

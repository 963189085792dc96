"""Compressed caches under lm-evaluation-harness, an extra: `python -m jaxkv.evals.harness` is its command line."""

from jaxkv.evals.harness.model import JaxKVLM

__all__ = ["JaxKVLM"]

"""jaxkv: KV-cache compression for long-context inference in JAX."""

from jaxkv.attention import Implementation
from jaxkv.cache import KVCache
from jaxkv.config import ModelConfig
from jaxkv.generate import generate, prefill
from jaxkv.load import LanguageModel, load
from jaxkv.plan import Plan, plan
from jaxkv.policies import (
    AdaKV,
    FullKV,
    KNorm,
    LocalWindow,
    Policy,
    PyramidKV,
    Random,
    SnapKV,
    StreamingLLM,
)
from jaxkv.results import Generation, Stats, Stream
from jaxkv.sampling import Greedy, MinP, Temperature, TopK, TopP

__all__ = [
    "AdaKV",
    "FullKV",
    "Generation",
    "Greedy",
    "Implementation",
    "KNorm",
    "KVCache",
    "LanguageModel",
    "LocalWindow",
    "MinP",
    "ModelConfig",
    "Plan",
    "Policy",
    "PyramidKV",
    "Random",
    "SnapKV",
    "Stats",
    "Stream",
    "StreamingLLM",
    "Temperature",
    "TopK",
    "TopP",
    "generate",
    "load",
    "plan",
    "prefill",
]

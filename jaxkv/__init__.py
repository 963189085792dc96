"""jaxkv: KV-cache compression for long-context inference in JAX."""

import jaxkv._beside  # noqa: F401  first: it says where two of our packages lie
from jaxkv.attention import Implementation
from jaxkv.cache import KVCache
from jaxkv.config import ModelConfig
from jaxkv.generate import generate, prefill
from jaxkv.load import LanguageModel, load
from jaxkv.plan import Plan, plan
from jaxkv.policies import (
    D2O,
    H2O,
    TOVA,
    AdaKV,
    BrutalOffload,
    CaM,
    CriticalKV,
    FullKV,
    KNorm,
    LocalWindow,
    Merge,
    OmniKV,
    Policy,
    PyramidInfer,
    PyramidKV,
    Random,
    RoCo,
    SnapKV,
    StreamingLLM,
    VarianceLayers,
)
from jaxkv.results import Generation, Stats, Stream
from jaxkv.sampling import Greedy, MinP, Temperature, TopK, TopP
from jaxkv.session import Session

__all__ = [
    "D2O",
    "H2O",
    "TOVA",
    "AdaKV",
    "BrutalOffload",
    "CaM",
    "CriticalKV",
    "FullKV",
    "Generation",
    "Greedy",
    "Implementation",
    "KNorm",
    "KVCache",
    "LanguageModel",
    "LocalWindow",
    "Merge",
    "MinP",
    "ModelConfig",
    "OmniKV",
    "Plan",
    "Policy",
    "PyramidInfer",
    "PyramidKV",
    "Random",
    "RoCo",
    "Session",
    "SnapKV",
    "Stats",
    "Stream",
    "StreamingLLM",
    "Temperature",
    "TopK",
    "TopP",
    "VarianceLayers",
    "generate",
    "load",
    "plan",
    "prefill",
]

"""jaxkv: KV-cache compression for long-context inference in JAX."""

import jaxkv._beside  # noqa: F401  first: it says where two of our packages lie
from jaxkv._warnings import UnseenQuestionWarning
from jaxkv.attention import Implementation
from jaxkv.cache import KVCache
from jaxkv.engine.plan import PrefillPlan
from jaxkv.engine.session import Session
from jaxkv.evals import evaluate, report
from jaxkv.exporting import export
from jaxkv.generation import generate, prefill
from jaxkv.loading import LanguageModel, load
from jaxkv.models.config import ModelConfig
from jaxkv.planning.planner import plan
from jaxkv.planning.plans import Plan
from jaxkv.policies import (
    D2O,
    H2O,
    TOVA,
    AdaKV,
    BrutalOffload,
    CaM,
    CriticalKV,
    DefensiveKV,
    ExpectedAttention,
    FullKV,
    GlobalBudget,
    Keep,
    KeyDiff,
    KNorm,
    LayerDefensiveKV,
    LocalWindow,
    Merge,
    Method,
    OmniKV,
    Policy,
    PyramidInfer,
    PyramidKV,
    Random,
    RoCo,
    SnapKV,
    StreamingLLM,
    VarianceLayers,
    register,
)
from jaxkv.resharding import reshard
from jaxkv.results import Generation, Stats, Stream
from jaxkv.rows import Rows, append, attend
from jaxkv.sampling import Greedy, MinP, Temperature, TopK, TopP
from jaxkv.saved import load_cache
from jaxkv.transform import compress, compress_layers

__all__ = [
    "D2O",
    "H2O",
    "TOVA",
    "AdaKV",
    "BrutalOffload",
    "CaM",
    "CriticalKV",
    "DefensiveKV",
    "ExpectedAttention",
    "FullKV",
    "Generation",
    "GlobalBudget",
    "Greedy",
    "Implementation",
    "KNorm",
    "KVCache",
    "Keep",
    "KeyDiff",
    "LanguageModel",
    "LayerDefensiveKV",
    "LocalWindow",
    "Merge",
    "Method",
    "MinP",
    "ModelConfig",
    "OmniKV",
    "Plan",
    "Policy",
    "PrefillPlan",
    "PyramidInfer",
    "PyramidKV",
    "Random",
    "RoCo",
    "Rows",
    "Session",
    "SnapKV",
    "Stats",
    "Stream",
    "StreamingLLM",
    "Temperature",
    "TopK",
    "TopP",
    "UnseenQuestionWarning",
    "VarianceLayers",
    "append",
    "attend",
    "compress",
    "compress_layers",
    "evaluate",
    "export",
    "generate",
    "load",
    "load_cache",
    "plan",
    "prefill",
    "reshard",
    "register",
    "report",
]

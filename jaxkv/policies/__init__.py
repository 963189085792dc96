"""Policies: frozen dataclasses composed of a scorer, budgets over layers and heads, and rows that always stay."""

from jaxkv.policies.adakv import AdaKV
from jaxkv.policies.base import Policy
from jaxkv.policies.budgets import (
    EntropyLayers,
    ExponentialLayers,
    GeometricLayers,
    GiniLayers,
    KVPressLayers,
    LinearLayers,
    OfficialLayers,
    UniformLayers,
)
from jaxkv.policies.cam import CaM
from jaxkv.policies.controls import KNorm, Random
from jaxkv.policies.criticalkv import CriticalKV
from jaxkv.policies.d2o import D2O
from jaxkv.policies.full import FullKV
from jaxkv.policies.heavy import H2O, TOVA, Mode, RoCo
from jaxkv.policies.merging import Decision, Merge, Metric, Scope, ValueMerge, Weights
from jaxkv.policies.omnikv import BrutalOffload, OmniKV
from jaxkv.policies.protocol import Observed, Scorer
from jaxkv.policies.pyramidinfer import PyramidInfer
from jaxkv.policies.pyramidkv import PyramidKV
from jaxkv.policies.reading import Selector
from jaxkv.policies.scorers import AvgPool, GroupReduce, MaxPool, NoPool, PoolOrder, WindowAttention
from jaxkv.policies.select import AdaptiveHeads, ProtectedHeads, SharedHeads, TwoStageHeads, UniformHeads
from jaxkv.policies.snapkv import SnapKV
from jaxkv.policies.streaming import LocalWindow, StreamingLLM
from jaxkv.policies.variance import OfficialVarianceLayers, Statistic, VarianceLayers

__all__ = [
    "H2O",
    "TOVA",
    "AdaKV",
    "AdaptiveHeads",
    "AvgPool",
    "BrutalOffload",
    "CaM",
    "CriticalKV",
    "D2O",
    "Decision",
    "EntropyLayers",
    "ExponentialLayers",
    "FullKV",
    "GeometricLayers",
    "GiniLayers",
    "GroupReduce",
    "KNorm",
    "KVPressLayers",
    "LinearLayers",
    "LocalWindow",
    "MaxPool",
    "Merge",
    "Metric",
    "Mode",
    "NoPool",
    "Observed",
    "OfficialLayers",
    "OfficialVarianceLayers",
    "OmniKV",
    "Policy",
    "PoolOrder",
    "ProtectedHeads",
    "PyramidInfer",
    "PyramidKV",
    "Random",
    "RoCo",
    "Scope",
    "Scorer",
    "Selector",
    "SharedHeads",
    "SnapKV",
    "Statistic",
    "StreamingLLM",
    "TwoStageHeads",
    "UniformHeads",
    "UniformLayers",
    "ValueMerge",
    "VarianceLayers",
    "Weights",
    "WindowAttention",
]

"""Policies: frozen dataclasses composed of a scorer, budgets over layers and heads, and rows that always stay."""

from jaxkv.policies.adakv import AdaKV
from jaxkv.policies.base import Observed, Policy, Scorer
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
from jaxkv.policies.controls import KNorm, Random
from jaxkv.policies.full import FullKV
from jaxkv.policies.pyramidkv import PyramidKV
from jaxkv.policies.scorers import AvgPool, GroupReduce, MaxPool, NoPool, PoolOrder, WindowAttention
from jaxkv.policies.select import AdaptiveHeads, ProtectedHeads, UniformHeads
from jaxkv.policies.snapkv import SnapKV
from jaxkv.policies.streaming import LocalWindow, StreamingLLM

__all__ = [
    "AdaKV",
    "AdaptiveHeads",
    "AvgPool",
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
    "NoPool",
    "Observed",
    "OfficialLayers",
    "Policy",
    "PoolOrder",
    "ProtectedHeads",
    "PyramidKV",
    "Random",
    "Scorer",
    "SnapKV",
    "StreamingLLM",
    "UniformHeads",
    "UniformLayers",
    "WindowAttention",
]

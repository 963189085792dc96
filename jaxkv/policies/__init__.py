"""Policies: methods of papers, and the parts that compose them: scorers, budgets, ranks, mergers."""

from jaxkv._checks import UnseenQuestionWarning
from jaxkv.policies import methods
from jaxkv.policies.attended import (
    AvgPool,
    CumulativeAttention,
    LastAttention,
    MaxPool,
    NoPool,
    PoolOrder,
    WindowAttention,
)
from jaxkv.policies.checks import Bytes, Share, Tokens
from jaxkv.policies.folding import Decision, Merge, Metric, Scope, ValueMerge, Weights
from jaxkv.policies.gates import Gate
from jaxkv.policies.head_budgets import (
    AdaptiveHeads,
    HeadBudgets,
    Order,
    ProtectedHeads,
    ScoredRows,
    SharedHeads,
    ThresholdHeads,
    TwoStageHeads,
    UniformHeads,
)
from jaxkv.policies.head_shares import CurveBudgets, Importance
from jaxkv.policies.keep import Keep
from jaxkv.policies.layer_budgets import (
    Division,
    EntropyLayers,
    ExponentialLayers,
    GeometricLayers,
    GiniLayers,
    GlobalLayers,
    KVPressLayers,
    LayerBudgets,
    LinearLayers,
    OfficialLayers,
    UniformLayers,
)
from jaxkv.policies.merger import Joined, Merged, Merger, Row
from jaxkv.policies.methods import *  # noqa: F403
from jaxkv.policies.methods.cake import PreferenceLayers, VaryingAttention
from jaxkv.policies.methods.duoattention import HeadKinds
from jaxkv.policies.methods.heavy import Mode
from jaxkv.policies.methods.kvzip import ReplayAttention
from jaxkv.policies.methods.qfilters import HeadFilters
from jaxkv.policies.methods.quest import PagedReads
from jaxkv.policies.methods.simlayerkv import LazyLayers
from jaxkv.policies.parts import Parts
from jaxkv.policies.phases import Append, Evict, KeepAll, Recompress, Select
from jaxkv.policies.policy import CustomPolicy, Policy
from jaxkv.policies.rank import Anew, ByAge, ByAttention, Rank
from jaxkv.policies.reads import FilteredReads, LoadedReads, ReadAll, Reads, Selector
from jaxkv.policies.registry import register
from jaxkv.policies.scorer import (
    BlockAttention,
    FutureQueries,
    GroupReduce,
    Needs,
    Observed,
    QueryMoments,
    Replay,
    Scorer,
)
from jaxkv.policies.trained import FastKVzipGate, KVzapGate
from jaxkv.policies.unseen import (
    FutureAttention,
    GateScores,
    KeyDifference,
    KeyNorm,
    Position,
    Uniform01,
    WorstAttention,
)
from jaxkv.policies.variance import OfficialVarianceLayers, Statistic, VarianceLayers
from jaxkv.policies.wrapper import Wrapper

__all__ = [
    "AdaptiveHeads",
    "Anew",
    "Append",
    "AvgPool",
    "BlockAttention",
    "ByAge",
    "ByAttention",
    "Bytes",
    "CumulativeAttention",
    "CurveBudgets",
    "Decision",
    "Division",
    "EntropyLayers",
    "Evict",
    "ExponentialLayers",
    "FastKVzipGate",
    "FilteredReads",
    "FutureAttention",
    "FutureQueries",
    "Gate",
    "GateScores",
    "GeometricLayers",
    "GiniLayers",
    "GlobalLayers",
    "GroupReduce",
    "HeadBudgets",
    "HeadFilters",
    "HeadKinds",
    "Importance",
    "Joined",
    "KVPressLayers",
    "KVzapGate",
    "Keep",
    "KeepAll",
    "KeyDifference",
    "KeyNorm",
    "LastAttention",
    "LayerBudgets",
    "LazyLayers",
    "LinearLayers",
    "LoadedReads",
    "MaxPool",
    "Merge",
    "Merged",
    "Merger",
    "Policy",
    "Metric",
    "Mode",
    "Needs",
    "NoPool",
    "Observed",
    "OfficialLayers",
    "OfficialVarianceLayers",
    "Order",
    "PagedReads",
    "Parts",
    "CustomPolicy",
    "PoolOrder",
    "Position",
    "PreferenceLayers",
    "ProtectedHeads",
    "QueryMoments",
    "Rank",
    "ReadAll",
    "Reads",
    "Recompress",
    "Replay",
    "ReplayAttention",
    "Row",
    "Scope",
    "ScoredRows",
    "Scorer",
    "Select",
    "Selector",
    "Share",
    "SharedHeads",
    "Statistic",
    "ThresholdHeads",
    "Tokens",
    "TwoStageHeads",
    "Uniform01",
    "UnseenQuestionWarning",
    "UniformHeads",
    "UniformLayers",
    "ValueMerge",
    "VarianceLayers",
    "VaryingAttention",
    "Weights",
    "WindowAttention",
    "WorstAttention",
    "Wrapper",
    "register",
]
__all__ += methods.__all__

"""Policies: methods of papers, and the parts that compose them: scorers, budgets, ranks, mergers."""

from jaxkv._checks import UnseenQuestionWarning
from jaxkv.policies import methods
from jaxkv.policies.attended import (
    AvgPool,
    CumulativeAttention,
    LastAttention,
    MaxPool,
    NoPool,
    ObservationWindowAttention,
    PoolOrder,
)
from jaxkv.policies.checks import ByteBudget, EntryBudget, ShareBudget
from jaxkv.policies.folding import (
    Merge,
    MergeDecision,
    MergeMetric,
    MergeWeights,
    ThresholdScope,
    ValueMerge,
)
from jaxkv.policies.gates import Gate
from jaxkv.policies.head_budgets import (
    AdaptiveHeads,
    HeadBudgets,
    ProtectedHeads,
    ScoredEntries,
    SelectionOrder,
    SharedHeads,
    ThresholdHeads,
    TwoStageHeads,
    UniformHeads,
)
from jaxkv.policies.head_shares import CurveBudgets, ImportanceBudgets
from jaxkv.policies.keep import Keep
from jaxkv.policies.layer_budgets import (
    EntropyLayers,
    ExponentialLayers,
    GeometricLayers,
    GiniLayers,
    GlobalLayers,
    KVPressLayers,
    LayerBudgetInputs,
    LayerBudgets,
    LinearLayers,
    OfficialLayers,
    UniformLayers,
)
from jaxkv.policies.merger import EntryPerSegment, Joined, Merged, Merger
from jaxkv.policies.methods import *  # noqa: F403
from jaxkv.policies.methods.cake import AttentionMeanVarianceScorer, PreferenceLayerBudgets
from jaxkv.policies.methods.duoattention import RetrievalHeadBudgets
from jaxkv.policies.methods.heavy import EvictionMode
from jaxkv.policies.methods.kvzip import ReplayAttentionScorer
from jaxkv.policies.methods.qfilters import QFilterVectors
from jaxkv.policies.methods.quest import TopPageReads
from jaxkv.policies.methods.simlayerkv import LazyLayerBudgets
from jaxkv.policies.parts import Parts
from jaxkv.policies.phases import Append, Evict, KeepAll, Recompress, Select
from jaxkv.policies.policy import CustomPolicy, Policy
from jaxkv.policies.query_statistics import QueryStatistics
from jaxkv.policies.rank import ByAge, ByAttention, ByNewScores, Rank
from jaxkv.policies.reads import (
    AttentionReads,
    FilteredReads,
    OffloadedReads,
    QueryWeighting,
    ReadAll,
)
from jaxkv.policies.registry import register
from jaxkv.policies.scorer import (
    BlockAttention,
    FutureQuerySettings,
    GroupReduce,
    Needs,
    PromptReplay,
    QueryMoments,
    QueryPairs,
    QueryPairSettings,
    ReplayWeighting,
    Scorer,
    ScorerInputs,
)
from jaxkv.policies.trained import FastKVzipGate, KVzapGate
from jaxkv.policies.unseen import (
    FutureAttention,
    GateScores,
    KeyDifference,
    KeyNorm,
    PositionScores,
    UniformRandomScores,
    WorstAttention,
)
from jaxkv.policies.variance import OfficialVarianceLayers, VarianceLayers, VarianceWeighting
from jaxkv.policies.wrapper import PolicyWrapper

__all__ = [
    "AdaptiveHeads",
    "ByNewScores",
    "Append",
    "AvgPool",
    "BlockAttention",
    "ByAge",
    "ByAttention",
    "ByteBudget",
    "CumulativeAttention",
    "CurveBudgets",
    "MergeDecision",
    "LayerBudgetInputs",
    "EntropyLayers",
    "Evict",
    "ExponentialLayers",
    "FastKVzipGate",
    "FilteredReads",
    "FutureAttention",
    "FutureQuerySettings",
    "Gate",
    "GateScores",
    "GeometricLayers",
    "GiniLayers",
    "GlobalLayers",
    "GroupReduce",
    "HeadBudgets",
    "QFilterVectors",
    "RetrievalHeadBudgets",
    "ImportanceBudgets",
    "Joined",
    "KVPressLayers",
    "KVzapGate",
    "Keep",
    "KeepAll",
    "KeyDifference",
    "KeyNorm",
    "LastAttention",
    "LayerBudgets",
    "LazyLayerBudgets",
    "LinearLayers",
    "OffloadedReads",
    "MaxPool",
    "Merge",
    "Merged",
    "Merger",
    "Policy",
    "MergeMetric",
    "EvictionMode",
    "Needs",
    "NoPool",
    "ScorerInputs",
    "OfficialLayers",
    "OfficialVarianceLayers",
    "SelectionOrder",
    "TopPageReads",
    "Parts",
    "CustomPolicy",
    "PoolOrder",
    "PositionScores",
    "PreferenceLayerBudgets",
    "ProtectedHeads",
    "QueryMoments",
    "QueryPairs",
    "QueryPairSettings",
    "QueryStatistics",
    "Rank",
    "ReadAll",
    "AttentionReads",
    "Recompress",
    "PromptReplay",
    "ReplayAttentionScorer",
    "ReplayWeighting",
    "EntryPerSegment",
    "ThresholdScope",
    "ScoredEntries",
    "Scorer",
    "Select",
    "QueryWeighting",
    "ShareBudget",
    "SharedHeads",
    "VarianceWeighting",
    "ThresholdHeads",
    "EntryBudget",
    "TwoStageHeads",
    "UniformRandomScores",
    "UnseenQuestionWarning",
    "UniformHeads",
    "UniformLayers",
    "ValueMerge",
    "VarianceLayers",
    "AttentionMeanVarianceScorer",
    "MergeWeights",
    "ObservationWindowAttention",
    "WorstAttention",
    "PolicyWrapper",
    "register",
]
__all__ += methods.__all__

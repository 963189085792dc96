"""Measurements of attention and of the entries that policies keep, as in papers' figures, for any model and texts."""

from jaxkv.analysis.attending import (
    AttentionSpread,
    FilterLayers,
    density,
    find_filter_layers,
    retained,
    similarity,
)
from jaxkv.analysis.gate_fitting import FittedGate, fit_kvzap_gate
from jaxkv.analysis.plots import plot_lines, plot_maps
from jaxkv.analysis.query_fitting import fit_query_statistics
from jaxkv.analysis.retention import AttentionRecall, EvictionLoss, budgets, eviction_loss, recall

__all__ = [
    "AttentionSpread",
    "EvictionLoss",
    "FilterLayers",
    "FittedGate",
    "AttentionRecall",
    "budgets",
    "density",
    "plot_lines",
    "plot_maps",
    "eviction_loss",
    "find_filter_layers",
    "fit_kvzap_gate",
    "fit_query_statistics",
    "recall",
    "retained",
    "similarity",
]

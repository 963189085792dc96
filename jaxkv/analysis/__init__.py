"""Measurements of attention and of the entries that policies keep, as in papers' figures, for any model and texts."""

from jaxkv.analysis.attending import (
    Density,
    FilterLayers,
    density,
    filter_layers,
    retained,
    similarity,
)
from jaxkv.analysis.gate_fitting import FittedGate, fit_gate
from jaxkv.analysis.plots import draw_lines, draw_maps
from jaxkv.analysis.retention import EvictionLoss, Recall, budgets, eviction_loss, recall

__all__ = [
    "Density",
    "EvictionLoss",
    "FilterLayers",
    "FittedGate",
    "Recall",
    "budgets",
    "density",
    "draw_lines",
    "draw_maps",
    "eviction_loss",
    "filter_layers",
    "fit_gate",
    "recall",
    "retained",
    "similarity",
]

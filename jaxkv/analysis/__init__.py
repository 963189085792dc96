"""Measurements of attention and of the rows that policies keep, as in papers' figures, for any model and texts."""

from jaxkv.analysis.density import Density, density
from jaxkv.analysis.drawing import draw_lines, draw_maps
from jaxkv.analysis.fitting import FittedGate, fit_gate
from jaxkv.analysis.keeping import budgets
from jaxkv.analysis.loss import EvictionLoss, eviction_loss
from jaxkv.analysis.recall import Recall, recall
from jaxkv.analysis.retained import retained
from jaxkv.analysis.similarity import FilterLayers, filter_layers, similarity

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

"""Measurements of attention and of the rows that policies keep, as in papers' figures, for any model and texts."""

from jaxkv.analysis.budgets import Budgets, budgets
from jaxkv.analysis.density import Density, density
from jaxkv.analysis.figures import Figure
from jaxkv.analysis.fitting import FittedGate, fit_gate
from jaxkv.analysis.loss import EvictionLoss, eviction_loss
from jaxkv.analysis.recall import Recall, recall
from jaxkv.analysis.retained import Retained, retained
from jaxkv.analysis.similarity import (
    FilterLayers,
    Similarity,
    best_filters,
    filter_layers,
    similarity,
)

__all__ = [
    "Budgets",
    "Density",
    "EvictionLoss",
    "Figure",
    "FilterLayers",
    "FittedGate",
    "Recall",
    "Retained",
    "Similarity",
    "best_filters",
    "budgets",
    "density",
    "eviction_loss",
    "filter_layers",
    "fit_gate",
    "recall",
    "retained",
    "similarity",
]

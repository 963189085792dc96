"""Trained gates: KVzap (arXiv:2601.07891), scores of rows from hidden states, in float64."""

import math

import numpy as np

__all__ = ["kvzap_scores"]


def kvzap_scores(tensors, layer, hidden):
    """Scores [K, n] of a layer's rows from its hidden states [n, E], by tensors of the published names."""
    at = f"layers.{layer}."
    mine = {name: np.asarray(array, np.float64) for name, array in tensors.items() if name.startswith(at)}
    of = {name.removeprefix(at): array for name, array in mine.items()}
    out = []
    for x in np.asarray(hidden, np.float64):
        if "weight" in of:
            out.append(of["weight"] @ x + of["bias"])
            continue
        inner = of["0.weight"] @ x + of["0.bias"]
        # GELU: x times the normal distribution function of x.
        out.append(of["2.weight"] @ np.array([z * 0.5 * (1 + math.erf(z / 2**0.5)) for z in inner]) + of["2.bias"])
    return np.array(out).T

"""Attention as functions of arrays, independent of caches and policies.

`backend_of` returns the `Backend` of an `Implementation`. Plain XLA on every backend: `causal` and `column_sums` of one
sequence, `block_sums`, `pool_sums`, `probabilities`, `window_mass`, `group_logits`, `chunk_peaks`, `filters`, and
`merge` of two sets of keys.
"""

from jaxkv.attention.backend import Backend
from jaxkv.attention.choice import (
    PREFILL_ONLY,
    Implementation,
    Implementations,
    backend_of,
    capability_of,
    choose,
    named,
)
from jaxkv.attention.columns import (
    block_sums,
    column_sums,
    group_logits,
    pool_sums,
    probabilities,
    window_mass,
)
from jaxkv.attention.merging import merge, merge_with_lse
from jaxkv.attention.peaks import chunk_peaks
from jaxkv.attention.shaping import Shaping
from jaxkv.attention.xla import causal

__all__ = [
    "PREFILL_ONLY",
    "Backend",
    "Implementation",
    "Implementations",
    "Shaping",
    "backend_of",
    "block_sums",
    "capability_of",
    "causal",
    "choose",
    "chunk_peaks",
    "column_sums",
    "group_logits",
    "merge",
    "merge_with_lse",
    "named",
    "pool_sums",
    "probabilities",
    "window_mass",
]

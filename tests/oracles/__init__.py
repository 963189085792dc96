"""Independent float64 oracles of every policy: plain loops over numpy, sharing no code with the library.

An oracle works on ONE sequence of n tokens, without batch or padding. Letters: K kv heads, G query heads per kv head,
H = K * G query heads (query head h reads kv head h // G), n positions, w rows of the observation window, D head dim,
L layers. Kept positions are a list of K ascending lists.

An oracle that selects by scores returns `(kept, gap)`. `gap` is the smallest relative distance between the score of a
kept row and a *different* score of a dropped row, at any cut made; inf where nothing is cut. Exact ties do not count:
max pooling copies one score to its neighbours, so equal scores at a cut are the rule there, and the tie rule (lowest
position first) decides them the same way in every precision. Tests reject inputs whose gap is under `MIN_GAP`.
"""

from oracles.ada import (
    ada_select,
    ada_targets,
    global_counts,
    protect_select,
    round_targets,
)
from oracles.attention import attend_rows, causal_attention, causal_probs, softmax
from oracles.baselines import cam_values, critical_select, pyramid_infer, value_norms
from oracles.budgets import (
    entropy,
    forced_positions,
    gini,
    kvpress_rows,
    largest_remainder,
    layer_rows,
    official_rows,
    resolve_budget,
    shape_values,
    water_fill,
)
from oracles.columns import column_sums, cumulative_scores
from oracles.evict import bulk_evict, halve_values, last_scores, simulate
from oracles.merging import cosine, merge_rows, move_thresholds, nearest_rows
from oracles.policies import (
    adakv,
    allocation_weights,
    compress,
    full,
    knorm,
    local_window,
    pyramidkv,
    snapkv,
    streaming_llm,
)
from oracles.scores import knorm_scores, pool_columns, position_scores, window_probs, window_scores
from oracles.select import MIN_GAP, cut_gap, relative_gap, top_select
from oracles.theorems import (
    adaptive_allocation,
    all_allocations,
    allocation_mass,
    allocation_rows,
    best_allocation,
    decode_weights,
    eps_bound,
    eviction_loss,
    output_row_norm,
    retained_mass,
)
from oracles.unseen import (
    defensive_scores,
    expected_scores,
    global_select,
    keydiff_scores,
    mean_and_covariance,
    mean_rotation,
)
from oracles.variance import (
    layer_statistic,
    layer_weights,
    official_variance_rows,
    scale_fill,
    variance_rows,
)

__all__ = [
    "keydiff_scores",
    "mean_and_covariance",
    "mean_rotation",
    "expected_scores",
    "defensive_scores",
    "global_select",
    "MIN_GAP",
    "ada_select",
    "ada_targets",
    "adakv",
    "adaptive_allocation",
    "all_allocations",
    "allocation_mass",
    "allocation_rows",
    "allocation_weights",
    "attend_rows",
    "best_allocation",
    "bulk_evict",
    "cam_values",
    "causal_attention",
    "causal_probs",
    "column_sums",
    "compress",
    "cosine",
    "critical_select",
    "cumulative_scores",
    "cut_gap",
    "decode_weights",
    "entropy",
    "eps_bound",
    "eviction_loss",
    "forced_positions",
    "full",
    "gini",
    "global_counts",
    "knorm",
    "knorm_scores",
    "kvpress_rows",
    "largest_remainder",
    "last_scores",
    "layer_rows",
    "layer_statistic",
    "layer_weights",
    "local_window",
    "halve_values",
    "merge_rows",
    "move_thresholds",
    "nearest_rows",
    "official_rows",
    "official_variance_rows",
    "output_row_norm",
    "pool_columns",
    "position_scores",
    "protect_select",
    "pyramid_infer",
    "pyramidkv",
    "relative_gap",
    "resolve_budget",
    "retained_mass",
    "round_targets",
    "scale_fill",
    "shape_values",
    "simulate",
    "snapkv",
    "softmax",
    "streaming_llm",
    "top_select",
    "value_norms",
    "variance_rows",
    "water_fill",
    "window_probs",
    "window_scores",
]

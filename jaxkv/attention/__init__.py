"""Attention as functions of arrays, independent of caches and policies.

`get_attention_backend` returns the `AttentionBackend` of an `Implementation`. Plain XLA on every backend:
`compute_causal_attention` and `sum_attention_per_key` of one
sequence, `sum_attention_in_block`, `add_attention_to_scores`, `compute_attention_probabilities`,
`reduce_window_attention`, `compute_group_max_logits`, `max_attention_per_key`, `filters`, and
`merge_attention_outputs` of two sets of keys.
"""

from jaxkv.attention.backend import AttentionBackend
from jaxkv.attention.choice import (
    PREFILL_ONLY,
    Implementation,
    PrefillDecodeImplementations,
    choose_attention_implementations,
    fit_head_dim,
    get_attention_backend,
    get_cuda_capability,
    parse_attention_implementation,
)
from jaxkv.attention.columns import (
    add_attention_to_scores,
    compute_attention_probabilities,
    compute_group_max_logits,
    reduce_window_attention,
    sum_attention_in_block,
    sum_attention_per_key,
)
from jaxkv.attention.merging import merge_attention_outputs, merge_attention_with_lse
from jaxkv.attention.peaks import max_attention_per_key
from jaxkv.attention.shaping import LogitShaping
from jaxkv.attention.xla import compute_causal_attention

__all__ = [
    "PREFILL_ONLY",
    "AttentionBackend",
    "Implementation",
    "PrefillDecodeImplementations",
    "LogitShaping",
    "get_attention_backend",
    "sum_attention_in_block",
    "get_cuda_capability",
    "compute_causal_attention",
    "choose_attention_implementations",
    "fit_head_dim",
    "max_attention_per_key",
    "sum_attention_per_key",
    "compute_group_max_logits",
    "merge_attention_outputs",
    "merge_attention_with_lse",
    "parse_attention_implementation",
    "add_attention_to_scores",
    "compute_attention_probabilities",
    "reduce_window_attention",
]

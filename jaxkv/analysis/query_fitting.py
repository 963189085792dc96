"""Statistics of a model's queries before RoPE, for TriAttention: one pass over any texts."""

from collections.abc import Sequence

import numpy as np

from jaxkv.analysis.full_attention import (
    encode_texts,
    iterate_full_attention_layers,
    require_finite,
)
from jaxkv.engine.moments import average_queries
from jaxkv.loading import LanguageModel
from jaxkv.policies.query_statistics import QueryStatistics
from jaxkv.sharding.mesh import copy_to_host
from jaxkv.text.prompts import Prompt


def fit_query_statistics(params: LanguageModel, texts: Sequence[Prompt]) -> QueryStatistics:
    """Measure means and mean norms of a model's queries before RoPE in texts; return `QueryStatistics`.

    Every token counts equally. The statistics of sliding-window layers, whose entries have no scores, are 0.

    Args:
        params: from `jaxkv.load`.
        texts: any texts, or their ids, each of at most the model's positions; in the paper 32,768 tokens in all.

    Returns:
        The statistics, for `TriAttention(statistics=...)`; `encode_safetensors()` is the content of their file.

    Raises:
        ValueError: for no texts, empty or too long texts, capped logits, and queries that are not finite.
    """
    config = params.config
    sums = np.zeros((config.layers, config.heads, config.head_dim // 2 * 3))
    total = 0
    for text in encode_texts(params, texts):
        count = len(text.ids[0])
        total += count
        for layer, out in iterate_full_attention_layers(params, text, sinks=True, queries=count):
            means = average_queries(out.q, out.q_positions, config.get_layer_spec(layer).rope)
            sums[layer] += count * copy_to_host(means)[0].reshape(sums[layer].shape)
    return QueryStatistics.create_from_array(require_finite(params, sums / total))

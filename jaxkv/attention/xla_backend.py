"""Backend in plain XLA: runs on every device, and is the reference of the others."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxkv.attention import columns, xla
from jaxkv.attention.backend import AttentionBackend, BackendCapabilities
from jaxkv.attention.shaping import PLAIN, LogitShaping
from jaxkv.attention.xla import SegmentRanges, SegmentReadMode


class XlaBackend(AttentionBackend):
    """Backend in plain XLA for every device, the reference of the others; prompts are processed one by one."""

    can = BackendCapabilities(at_once=False, sliding_windows=True, most_channels=1 << 30)

    def compute_prefill_attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        length: Array,
        first: Array | None = None,
        *,
        lse: bool = True,
        shaping: LogitShaping = PLAIN,
        window: int | None = None,
    ) -> tuple[Array, Array | None]:
        """Compute causal attention, prompt by prompt; return output and log-sum-exp (None unless `lse`)."""

        def attend_prompt(q, k, v, first=None):
            """Return causal attention output and log-sum-exp of one prompt's queries."""
            begin = jnp.int32(0) if first is None else first
            return xla.compute_causal_attention(
                q, k, v, begin, window=window, softcap=shaping.softcap
            )

        out, found = shaping.include_sink_logits(
            *_map_over_sequences(attend_prompt, q, k, v, *([] if first is None else [first]))
        )
        return out, found if lse else None

    def sum_attention_per_key(
        self,
        q: Array,
        k: Array,
        lse: Array,
        length: Array,
        first: Array | None = None,
        *,
        shaping: LogitShaping = PLAIN,
    ) -> Array:
        """Return causal attention `f32[B, K, G, S]` to each key, summed over T queries of given `lse`, by prompt."""

        def sum_one_prompt_attention(q, k, lse, length, first=None):
            """Return the attention `f32[K, G, S]` that one prompt's keys receive, summed over its queries."""
            begin = jnp.int32(0) if first is None else first
            real = begin + jnp.arange(q.shape[2], dtype=jnp.int32) < length
            total = jnp.where(real, lse, jnp.inf)
            return columns.sum_attention_per_key(q, k, total, begin, softcap=shaping.softcap)

        return _map_over_sequences(
            sum_one_prompt_attention, q, k, lse, length, *([] if first is None else [first])
        )

    def average_window_attention(
        self,
        q: Array,
        k: Array,
        positions: Array,
        length: Array,
        *,
        shaping: LogitShaping = PLAIN,
    ) -> Array:
        """Return the attention `f32[B, K, S]` to each key: mean over the last w queries and the G query heads."""

        def mean(p: Array, at: Array) -> Array:
            return columns.average_over_queries(p, at).mean(axis=0)

        return columns.reduce_window_attention(q, k, positions, mean, shaping=shaping)

    def attend_to_segments(
        self, q: Array, store: Any, reach: SegmentRanges, *, shaping: LogitShaping = PLAIN
    ) -> tuple[Array, Array]:
        """Compute attention of R queries per kv head over its segment; return output and log-sum-exp."""
        return shaping.include_sink_logits(
            *xla.attend_over_pool(q, *reach.decode_rotated_entries(store), reach, shaping.softcap)
        )

    def attend_and_score(
        self,
        q: Array,
        store: Any,
        reach: SegmentRanges,
        score: Array,
        counts: Array,
        *,
        shaping: LogitShaping = PLAIN,
    ) -> tuple[Array, Array]:
        """Attend with one token; return output, scores plus mean attention of heads for sequences in mask `counts`."""
        k, v = reach.decode_rotated_entries(store)
        widest = reach.widest
        cap = shaping.softcap
        if (
            reach.walk is SegmentReadMode.WINDOWS
            and widest is not None
            and columns.supports_block_windows(k.shape[1], widest)
        ):
            return columns.attend_and_score_blockwise(q, k, v, reach, score, counts, shaping)
        out, lse = shaping.include_sink_logits(*xla.attend_over_pool(q, k, v, reach, cap))
        lse = jnp.where(counts[:, None, None], lse, jnp.inf)
        weight = 1 / q.shape[2]
        return out, columns.add_attention_to_scores(
            q, k, lse, reach, score, weight=weight, softcap=cap
        )


def _map_over_sequences(one: Callable[..., Any], *arrays: Array) -> Any:
    """Apply `one` to each sequence (first axis) of `arrays` in turn; return the results stacked along that axis."""
    if arrays[0].shape[0] > 1:
        return lax.map(lambda row: one(*row), arrays)
    alone = one(*(each.reshape(each.shape[1:]) for each in arrays))
    return jax.tree.map(lambda leaf: leaf.reshape(1, *leaf.shape), alone)

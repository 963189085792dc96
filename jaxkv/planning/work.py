"""Work of a request by arithmetic, whatever computes it: bytes that a decode step reads, FLOP of prefill, scores."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxkv.engine.plan import plan_prefill
from jaxkv.planning.setting import Request
from jaxkv.policies.reading import WHOLE
from jaxkv.policies.redundant import compares_keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillWork:
    """FLOP of one device's prefill: `products` with weights, `attention`, and `scores`, which the policy adds."""

    products: float
    attention: float
    scores: float


def rows_read(request: Request) -> tuple[np.ndarray, tuple[int, ...]]:
    """Rows per kv head `[L]` that a decode step reads midway through an answer, and a tuple of filter layer indices."""
    parts, layers, behind = request.policy.parts(), request.config.layers, request.new // 2
    planned = plan_prefill(request.config, request.policy, [request.context], dtype=request.dtype)
    # Budgets over layers that depend on the prompt are taken as uniform.
    kept = (
        np.full(layers, float(planned.budget.mean()))
        if planned.rows is None
        else planned.rows.mean(axis=1)
    )
    reading = parts.reading(request.config.windows, planned.slots)
    if reading is not None:
        whole = np.asarray([source == WHOLE for source in reading.sources])
        if reading.page is not None:
            # The bounds of a page are read like one row: a minimum and a maximum, in place of a key and a value.
            held = kept + behind
            return np.where(whole, held, np.minimum(reading.width, held) + held / reading.page), ()
        return np.where(whole, kept, np.minimum(reading.width, kept)) + behind, tuple(
            reading.filters
        )
    grows = parts.ongoing is None or not parts.evicts
    period = parts.every or 2 * behind
    # Recompressed caches hold half a period of new rows on average; evicting ones hold none once full.
    return kept + (min(behind, period // 2) if grows or parts.every else 0), ()


def weights_read(request: Request, weights: int) -> tuple[float, float]:
    """Bytes of parameters that a decode step reads, and bytes that each token is multiplied by (fewer with experts).

    `weights` is the bytes of all parameters that the device holds.
    """
    local, experts, item = request.local, request.config.experts, jnp.dtype(request.dtype).itemsize
    # An embedding table that is not the head, too, is read one row per token.
    held = float(weights - (0 if local.tied else local.vocab * local.embed * item))
    if experts is None:
        return held, held
    each = 3 * local.embed * local.hidden * local.layers * item
    others = held - experts.count * each
    # Tokens are taken to choose different experts until all are chosen.
    return others + min(
        experts.count, experts.chosen * request.sequences
    ) * each, others + experts.chosen * each


def prefill_work(request: Request, weights: int) -> PrefillWork:
    """`PrefillWork` (FLOP by kind) of one device's prompts; `weights` is the bytes of the parameters that it holds."""
    local, item, needs = (
        request.local,
        jnp.dtype(request.dtype).itemsize,
        request.policy.parts().needs,
    )
    # Only the last tokens are multiplied by the head.
    used = weights_read(request, weights)[1] / item - local.vocab * local.embed
    tokens, again = request.sequences * request.context, 0.0
    # 4 FLOP per query, key and channel, and half of the pairs.
    pairs, channels = (
        request.sequences * request.context**2 / 2,
        local.layers * local.heads * local.head_dim,
    )
    scores = 2 * pairs * channels if needs.sums else 0.0
    if needs.replay is not None:
        # A second pass: each chunk, and the tokens between chunks, attend to the whole prompt, and logits are read.
        again = 1 + needs.replay.tail / min(needs.replay.chunk, request.context)
        scores += 2 * 2 * pairs * again * channels
    scores += _scores(request, request.context)
    return PrefillWork(
        products=2 * used * tokens * (1 + again),
        attention=4 * pairs * channels * (1 + 2 * again),
        scores=scores,
    )


def step_scores(request: Request) -> float:
    """FLOP of scoring the cache again every few tokens, averaged over decode steps; 0 for policies that do not."""
    parts = request.policy.parts()
    if (
        parts.every is None
        or parts.ongoing is None
        or parts.ongoing.rank is not None
        or request.new < parts.every
    ):
        return 0.0
    held = min(float(rows_read(request)[0].mean()) + parts.every / 2, request.context + request.new)
    return _scores(request, held) / parts.every


def _scores(request: Request, rows: int | float) -> float:
    """FLOP on one device, over all layers and sequences, of scoring each kv head's `rows` rows by the policy."""
    local, parts = request.local, request.policy.parts()
    found = (
        2.0
        * request.sequences
        * parts.needs.queries
        * rows
        * local.layers
        * local.heads
        * local.head_dim
    )
    if compares_keys(parts.scorer):
        found += 2.0 * request.sequences * rows**2 * local.layers * local.kv_heads * local.head_dim
    return found

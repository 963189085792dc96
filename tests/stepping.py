"""One layer on random tensors, driven step by step by the library's own pieces: what the oracle is held against."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles as o
import test_oracle_agreement as agreement
from jax import lax

from jaxkv import TOVA, Policy
from jaxkv.cache.layout import SegmentLayout
from jaxkv.cache.packing import UnpackedEntries, make_empty_pool, pack_into_shared_pool
from jaxkv.cache.pools import EntryPool
from jaxkv.engine.bookkeeping import decay_scores
from jaxkv.engine.compress import merge_evicted_entries
from jaxkv.engine.evict import EvictionConfig, evict_entries
from jaxkv.engine.layers.binding import make_cache_layer
from jaxkv.engine.layers.step import StepState
from jaxkv.engine.layers.terms import DecodeAttentionConfig
from jaxkv.engine.segments import Segments
from jaxkv.engine.selection import create_prompt_candidates, select_entries
from jaxkv.engine.tokens import NewTokens, TokenProjections
from jaxkv.policies import KeyNorm

HEADS, DIM, STEPS, SLOTS = 2, 8, 64, 48
LENGTHS = (37, 22)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A layer's tensors: prompts `[B, K, (G,) S, D]` and new tokens `[B, K, (G,) T, D]`."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    q_new: np.ndarray
    k_new: np.ndarray
    v_new: np.ndarray

    def of(self, row, n):
        """One sequence without padding, query heads flat, as the oracle takes it."""
        flat = lambda a: a[row].reshape(-1, *a.shape[3:]).astype(np.float64)  # noqa: E731
        cut = lambda a: a[row][..., :n, :].astype(np.float64)  # noqa: E731
        return (
            flat(self.q)[:, :n],
            cut(self.k),
            cut(self.v),
            flat(self.q_new),
            *(a[row].astype(np.float64) for a in (self.k_new, self.v_new)),
        )


def draw(seed, group, *, sharp=1.5, like=0.0):
    """Random tensors; `like` pulls keys towards a common direction, so that cosines are far from zero."""
    rng = np.random.default_rng(seed)
    size = lambda n, *lead: (len(LENGTHS), HEADS, *lead, n, DIM)  # noqa: E731
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    common = like * normal(len(LENGTHS), HEADS, 1, DIM)
    return Drawn(
        sharp * normal(*size(SLOTS, group)),
        normal(*size(SLOTS)) + common,
        normal(*size(SLOTS)),
        sharp * normal(*size(STEPS, group)),
        normal(*size(STEPS)) + common,
        normal(*size(STEPS)),
    )


def prefilled(policy: Policy, drawn: Drawn, lengths, layout: SegmentLayout):
    """The layer's pool after the prompt, its segments and thresholds, put together from the library's pieces.

    A shared pool holds rows of other layers before and behind this one's, which nothing may touch.
    """
    lengths = np.asarray(lengths)
    parts = policy.build_policy_parts()
    always_kept = parts.keep.mask_always_kept(lengths, SLOTS)
    anyway = always_kept.sum(axis=1)
    rows = parts.compute_prompt_budgets(lengths, anyway)[None]
    limit = parts.compute_growth_limits(rows[0])
    recent = parts.count_recent_entries(rows, lengths, anyway)[0]
    sums = agreement.all_sums(drawn.q, drawn.k, lengths)
    mass = sums.mean(axis=2)
    length = jnp.asarray(lengths, jnp.int32)
    if isinstance(policy, TOVA):
        mass = jnp.asarray(
            np.stack(
                [
                    np.pad(o.last_scores(*drawn.of(row, n)[:2])[:HEADS], ((0, 0), (0, SLOTS - n)))
                    for row, n in enumerate(lengths)
                ]
            ),
            jnp.float32,
        )
    if isinstance(parts.scorer, KeyNorm):
        mass = -jnp.sqrt((jnp.asarray(drawn.k) ** 2).sum(axis=-1))
    scores = parts.scorer.finalise_scores(mass, length)
    count, last = jnp.asarray(rows[0], jnp.int32), jnp.asarray(recent, jnp.int32)
    layer = create_prompt_candidates(scores, jnp.asarray(always_kept), length)
    mask = select_entries([layer], count, last, heads=parts.heads).masks[0]
    taken = UnpackedEntries(
        jnp.asarray(drawn.k), jnp.asarray(drawn.v), layer.inside, score=mass, mass=mass
    )
    if parts.merge is not None:
        taken = merge_evicted_entries(taken, mask, jax.random.key(0), merge=parts.merge)
    kept = mask.sum(axis=-1, dtype=jnp.int32)
    around = 0 if layout is SegmentLayout.EQUAL else 7
    each = int(max(limit.max(), lengths.max())) + 1
    rows_in_all = HEADS * each + 2 * around
    start = SegmentLayout.EQUAL.compute_segment_starts(kept[None], HEADS * each)[0] + around
    pool = make_empty_pool(len(lengths), rows_in_all, DIM, jnp.dtype(jnp.float32), scored=True)
    pool = pack_into_shared_pool(pool, taken, mask, start)
    segments = Segments(
        start=start,
        length=kept,
        limit=jnp.asarray(np.broadcast_to(limit[:, None], kept.shape), jnp.int32),
        recent=jnp.broadcast_to(
            jnp.asarray(parts.count_recent_entries(limit[None], lengths, anyway)[0], jnp.int32)[
                :, None
            ],
            kept.shape,
        ),
        tau=taken.tau,
        prompt=length,
        seen=length,
    )
    return pool, segments


def terms_of(
    policy: Policy, layout: SegmentLayout, widest: int | None = None
) -> DecodeAttentionConfig:
    """Static config of the layer's rows."""
    parts = policy.build_policy_parts()
    reading = parts.build_read_config((None,), SLOTS)
    return DecodeAttentionConfig(
        layout=layout, reading=reading, ongoing=parts.decoding_compression, widest=widest
    )


def attended(
    terms: DecodeAttentionConfig,
    token: TokenProjections,
    pool: EntryPool,
    segments: Segments,
    new: NewTokens,
):
    """Attention of new tokens, and the pool with their rows and all scores."""
    made = make_cache_layer(terms, pool, segments.start, segments.length).append_tokens_and_attend(
        token, StepState(new=new)
    )
    return made.out, made.pool


def one_step(
    terms: DecodeAttentionConfig,
    token: TokenProjections,
    pool: EntryPool,
    segments: Segments,
    count,
):
    """A layer's step: attention, scores, eviction."""
    (pool,) = decay_scores((pool,), count, terms)
    new = NewTokens(positions=segments.seen[:, None], count=count)
    out, pool = attended(terms, token, pool, segments, new)
    now = dataclasses.replace(
        segments, length=segments.length + count[:, None], seen=segments.seen + count
    )
    how = EvictionConfig(terms=terms, heads=HEADS)
    return out, *evict_entries(pool, now, out[:, :, 0, 0, 0], how)


def follow(policy: Policy, drawn: Drawn, lengths, layout: SegmentLayout, *, widest=None):
    """Every step's pool, segments and output; the prompt's first, without output."""
    pool, segments = prefilled(policy, drawn, lengths, layout)
    terms = terms_of(policy, layout, widest)
    count = jnp.ones((len(lengths),), jnp.int32)

    @jax.jit
    def run(pool, segments, q, k, v):
        def step(carry, new):
            q, k, v = new
            out, *after = one_step(terms, TokenProjections(q=q, k=k, v=v, stored=k), *carry, count)
            return tuple(after), jax.tree.leaves((*after, out))

        return lax.scan(step, (pool, segments), (q, k, v))[1]

    by_step = lambda a: jnp.moveaxis(jnp.asarray(a), -2, 0)[..., None, :]  # noqa: E731
    after = run(pool, segments, *map(by_step, (drawn.q_new, drawn.k_new, drawn.v_new)))
    host, kind = [np.asarray(leaf) for leaf in after], jax.tree.structure((pool, segments, 0))
    yield pool, segments, None
    for t in range(STEPS):
        pool, segments, out = jax.tree.unflatten(kind, [jnp.asarray(leaf[t]) for leaf in host])
        yield pool, segments, np.asarray(out)[..., 0, :]


def held(pool: EntryPool, segments: Segments, row: int, head: int):
    """One segment's rows in order of position."""
    first, count = int(segments.start[row, head]), int(segments.length[row, head])
    span = slice(first, first + count)
    pos, k, v, score = (
        np.asarray(leaf)[row, span] for leaf in (pool.pos, pool.k, pool.v, pool.score)
    )
    order = np.argsort(pos)
    return pos[order].tolist(), k[order], v[order], score[order]

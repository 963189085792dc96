"""A cache compressed once more: its policy chooses anew among the rows of prompt and answer, in order of position."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxkv._values import Value
from jaxkv.attention.xla import Form
from jaxkv.cache import KVCache
from jaxkv.models.compress import ROWS, empty_pool, merged_whole, pack, pack_shared
from jaxkv.models.decoder import Flat, Graphs, Leaves
from jaxkv.models.layer import value_norms
from jaxkv.plan import bucket
from jaxkv.policies.after import ranked
from jaxkv.policies.checks import checked
from jaxkv.policies.parts import Ongoing, Parts
from jaxkv.policies.protocol import Observed, Scorer
from jaxkv.policies.select import HeadBudgets, sortable, top
from jaxkv.pools import Pool, lay_out


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Parts(Value):
    """What is static when a layer is compressed again."""

    graphs: Graphs
    ongoing: Ongoing
    scorer: Scorer
    heads: HeadBudgets
    form: Form
    slots: int


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["pool", "start", "length", "recent", "tau", "ring", "rows", "now", "seen", "prompt", "layer", "key"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Layer:
    """One layer as it stands: segments `[B, K]`, and for each sequence the rows wanted and whether it is due."""

    pool: Pool
    start: Int[Array, "B K"]
    length: Int[Array, "B K"]
    recent: Int[Array, " B"]
    tau: Float[Array, "B K n"] | None
    ring: Float[Array, "B K G R D"] | None
    rows: Int[Array, " B"]
    now: Bool[Array, " B"]
    seen: Int[Array, " B"]
    prompt: Int[Array, " B"]
    layer: Int[Array, ""]
    key: PRNGKeyArray


def due(cache: KVCache) -> Bool[np.ndarray, " B"]:
    """Which sequences must be compressed again.

    Args:
        cache: any cache.

    Returns:
        Sequences with `every` rows, or more, beyond their budget; where rows go one by one, any beyond it.
    """
    parts = cache.policy.parts()
    if parts.ongoing is None:
        return np.zeros(cache.batch, bool)
    return beyond(cache) >= (parts.every or 1)


def beyond(cache: KVCache) -> Int[np.ndarray, " B"]:
    """Rows that each sequence's fullest segment holds beyond its limit; negative while there is room to grow."""
    return (np.asarray(cache.length, np.int64) - np.asarray(cache.limit)).max(axis=(0, 2))


def again(flat: Flat, cache: KVCache, *, key: PRNGKeyArray, room: int | Int[np.ndarray, " L"] = 0) -> KVCache:
    """Compresses the sequences that are due; the others stay as they are, moved into the new buffers.

    Args:
        flat: the decoder's parameters.
        cache: a cache of a policy that goes on after the prompt; unchanged.
        key: for policies that draw.
        room: rows to leave behind every segment of the result.

    Returns:
        The new cache, each of whose pools is as small as its fullest sequence allows.
    """
    policy, state, form = cache.policy.parts(), cache.state, cache.form
    assert state is not None and policy.scorer is not None and policy.ongoing is not None
    layers, batch, heads = cache.start.shape
    now, rows = due(cache), _rows(policy, cache)
    parts = _Parts(
        graphs=flat.graphs,
        ongoing=policy.ongoing,
        scorer=policy.scorer,
        heads=policy.heads,
        form=form,
        # As many slots as the text, or a segment, could fill: a number that content does not change, and rarely time.
        slots=min(bucket(int(np.asarray(cache.seen).max())), _widest(cache)),
    )

    def layer(index: int) -> _Layer:
        return _Layer(
            pool=cache.pools[0 if form is Form.SHARED else index],
            start=cache.start[index],
            length=cache.length[index],
            recent=state.recent[index],
            tau=None if state.tau is None else state.tau[index],
            ring=state.rings[index] if state.rings else None,
            rows=jnp.asarray(rows[index], jnp.int32),
            now=jnp.asarray(now),
            seen=cache.seen,
            prompt=state.prompt,
            layer=jnp.int32(index),
            key=key,
        )

    masks = [_mask(flat.blocks[index], layer(index), parts=parts) for index in range(layers)]
    kept = jnp.stack([mask.sum(axis=-1, dtype=jnp.int32) for mask in masks])
    rooms = np.broadcast_to(np.asarray(room, np.int64), (layers,))
    pool_rows = _pool_rows(np.asarray(kept, np.int64), rows, rooms, form)
    pools, starts, taus = [], [], []
    if form is Form.SHARED:
        table = jnp.moveaxis(kept, 0, 1).reshape(batch, layers * heads)
        behind = jnp.asarray(np.repeat(rooms, heads), jnp.int32)
        start = lay_out(table, pool_rows[0], form=form, room=behind).reshape(batch, layers, heads)
        starts = list(jnp.moveaxis(start, 0, 1))
        old = cache.pools[0]
        scored = old.score is not None
        pools = [empty_pool(batch, pool_rows[0], cache.config.head_dim, old.k.dtype, scored=scored)]
    for index, mask in enumerate(masks):
        k, v, pos, score, tau = _kept(flat.blocks[index], layer(index), mask, parts=parts)
        taus.append(tau)
        if form is Form.SHARED:
            pools = [pack_shared(pools[0], k, v, mask, starts[index], score, pos)]
        else:
            packed, start, _ = pack(k, v, mask, score, pos, rows=pool_rows[index], form=form)
            pools.append(packed)
            starts.append(start)
        jax.block_until_ready(pools[-1])
    target = kept if not policy.heads.uniform else jnp.asarray(np.broadcast_to(rows[..., None], kept.shape), jnp.int32)
    return dataclasses.replace(
        cache,
        pools=tuple(pools),
        start=jnp.stack(starts),
        length=kept,
        limit=jnp.where(jnp.asarray(now)[:, None], target, cache.limit),
        state=dataclasses.replace(state, tau=None if state.tau is None else jnp.stack(taus)),
    )


def _widest(cache: KVCache) -> int:
    """Rows that a segment could hold at most where it lies."""
    rows = max(pool.rows for pool in cache.pools)
    return rows // cache.start.shape[2] if cache.form is Form.EQUAL else rows


def _rows(parts: Parts, cache: KVCache) -> Int[np.ndarray, "L B"]:
    """What each layer is to hold: limits, or for schedules over layers what they say of the text so far."""
    limit = np.asarray(cache.limit, np.int64)
    if parts.evicts or parts.layers.from_scores or cache.state is None:
        # Heads of different budgets share their layer's rows.
        return limit.sum(axis=2) // limit.shape[2]
    seen, budget = np.asarray(cache.seen, np.int64), np.asarray(cache.state.budget, np.int64)
    forced = parts.keep.counts(seen, np.asarray(cache.state.prompt, np.int64))
    now = np.maximum(np.minimum(budget, seen), forced)
    return parts.layers.rows(now, seen, forced, layers=len(limit), window=parts.keep.window, weights=None)


def _pool_rows(
    kept: Int[np.ndarray, "L B K"], wanted: Int[np.ndarray, "L B"], rooms: Int[np.ndarray, " L"], form: Form
) -> list[int]:
    """P of each pool: what was wanted, or where sequences hold more that are not due a size that repeats."""
    heads = kept.shape[2]
    held = kept.max(axis=2) * heads if form is Form.EQUAL else kept.sum(axis=2)
    most, wanted = held, heads * wanted
    if form is Form.SHARED:
        most, wanted, rooms = (each.sum(axis=0, keepdims=True) for each in (most, wanted, rooms))
    pools = []
    for rows, target, room in zip(most.max(axis=1).tolist(), wanted.max(axis=1).tolist(), rooms.tolist(), strict=True):
        size = heads * bucket(-(-rows // heads))
        pools.append((min(target, size) if rows <= target else size) + heads * room)
    return pools


def _unpacked(layer: _Layer, parts: _Parts) -> tuple[Array, Array, Array, Array | None, Array]:
    """Keys, values, positions and scores in order of position, and which of the slots hold a row: `[B, K, M]`."""
    pool, (batch, heads) = layer.pool, layer.start.shape
    slots = min(parts.slots, pool.rows // heads if parts.form is Form.EQUAL else pool.rows)
    index = jnp.arange(slots, dtype=jnp.int32)
    inside = index < layer.length[..., None]
    row = jnp.where(inside, layer.start[..., None] + index, 0).reshape(batch, heads * slots)
    last = jnp.iinfo(jnp.int32).max
    pos = jnp.where(inside, jnp.take_along_axis(pool.pos, row, axis=1).reshape(inside.shape), last)
    order = jnp.argsort(pos, axis=-1)
    row = jnp.take_along_axis(row.reshape(inside.shape), order, axis=-1).reshape(batch, heads * slots)
    rows = lambda leaf: jnp.take_along_axis(leaf, row[..., None], axis=1).reshape(*inside.shape, -1)  # noqa: E731
    score = None if pool.score is None else jnp.take_along_axis(pool.score, row, axis=1).reshape(inside.shape)
    return rows(pool.k), rows(pool.v), jnp.take_along_axis(pos, order, axis=-1), score, inside


def _observed(layer: _Layer, k: Array, v: Array, parts: _Parts) -> tuple[Array, Array]:
    """Scores and mass by the policy's scorer, asked again: the last queries over the rows there are."""
    batch, heads = layer.length.shape
    window = parts.scorer.queries
    if layer.ring is None:
        q = jnp.zeros((batch, heads, 1, 0, k.shape[-1]), k.dtype)
    else:
        position = (layer.seen - window)[:, None] + jnp.arange(window, dtype=jnp.int32)
        slot = position % layer.ring.shape[3]
        q = jnp.take_along_axis(layer.ring, slot[:, None, None, :, None], axis=3).astype(k.dtype)
    # Where heads hold rows of their own number, each is a sequence of its own to the scorer.
    fold = not parts.heads.uniform
    flat = (lambda a: a.reshape(batch * heads, 1, *a.shape[2:])) if fold else (lambda a: a)
    length = layer.length.reshape(-1) if fold else layer.length[:, 0]
    seen = Observed(
        q=flat(q),
        q_positions=(length - window)[:, None] + jnp.arange(window, dtype=jnp.int32),
        k=flat(k),
        v=flat(v),
        length=length,
        layer=layer.layer,
        key=layer.key,
    )
    rows = seen.k.shape[:3]
    mass = checked(parts.scorer, "observe", parts.scorer.observe(seen), rows, ROWS)
    scores = checked(parts.scorer, "scores", parts.scorer.scores(mass, length), rows, ROWS)
    return scores.reshape(k.shape[:3]), mass.reshape(k.shape[:3])


@partial(jax.jit, static_argnames=("parts",))
def _mask(leaves: Leaves, layer: _Layer, *, parts: _Parts) -> Bool[Array, "B K M"]:
    """Which rows stay, in order of position."""
    k, v, pos, score, inside = _unpacked(layer, parts)
    rank, heads = parts.ongoing.rank, layer.length.shape[1]
    seen = layer.seen[:, None, None]
    if rank is None:
        scores, _ = _observed(layer, k, v, parts)
    else:
        scores = ranked(rank, jnp.zeros(pos.shape, jnp.float32) if score is None else score, seen - pos)
    forced = parts.ongoing.keep.protected(pos, layer.prompt[:, None, None])
    forced = inside & (forced | (pos >= seen - layer.recent[:, None, None]))
    candidates = inside & ~forced
    anyway = forced[:, 0].sum(axis=-1, dtype=jnp.int32)
    most = candidates.sum(axis=(1, 2), dtype=jnp.int32) // heads
    base = jnp.clip(layer.rows - anyway, 0, most)
    norms = value_norms(parts.graphs.block(leaves), v) if parts.heads.needs_norms else None
    chosen = parts.heads.choose(scores, candidates, base, anyway, norms) & candidates
    if not parts.heads.uniform:
        # A head's share can be more than it has; what it leaves goes to the best rows of the others.
        left = jnp.where(candidates & ~chosen, sortable(scores), jnp.uint32(0)).reshape(len(base), -1)
        missing = heads * base - chosen.sum(axis=(1, 2), dtype=jnp.int32)
        chosen = chosen | top(left, missing).reshape(chosen.shape)
    return jnp.where(layer.now[:, None, None], forced | chosen, inside)


@partial(jax.jit, static_argnames=("parts",))
def _kept(leaves: Leaves, layer: _Layer, mask: Bool[Array, "B K M"], *, parts: _Parts):
    """Rows in order of position, dropped ones merged into those that stay, and the thresholds."""
    k, v, pos, score, inside = _unpacked(layer, parts)
    merge = parts.ongoing.merge
    if merge is None:
        return k, v, pos, score, layer.tau
    mass = jnp.zeros(pos.shape, jnp.float32)
    if not merge.compares:
        _, mass = _observed(layer, k, v, parts)
    key = jax.random.fold_in(layer.key, layer.layer)
    new = merged_whole(merge, k, v, mask, inside, mass, layer.tau, key)
    now = layer.now[:, None, None, None]
    return jnp.where(now, new.k, k), jnp.where(now, new.v, v), pos, score, new.tau

"""A few new tokens at once on top of a cache: a question, or the one token of a decode step."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv import attention
from jaxkv.attention import Implementation
from jaxkv.attention.xla import Form
from jaxkv.cache import KVCache, Pool, State, append
from jaxkv.config import ModelConfig
from jaxkv.models.decoder import Block, Flat, Graphs, Leaves
from jaxkv.models.evict import Segments, evict
from jaxkv.plan import bucket, widest
from jaxkv.policies.protocol import Carry, Upkeep
from jaxkv.rope import rotate


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["pools", "start", "length", "seen", "limit", "state"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Live:
    """The moving part of a cache: what jitted code takes, gives back, and may write in place.

    Attributes:
        pools: as in KVCache.
        start: `i32[L, B, K]`.
        length: `i32[L, B, K]`.
        seen: `i32[B]`.
        limit: `i32[L, B, K]`.
        state: as in KVCache.
    """

    pools: tuple[Pool, ...]
    start: Int[Array, "L B K"]
    length: Int[Array, "L B K"]
    seen: Int[Array, " B"]
    limit: Int[Array, "L B K"]
    state: State | None

    @classmethod
    def of(cls, cache: KVCache) -> "Live":
        """The moving part of a cache, which must own its pools if a donating function takes it."""
        return cls(
            pools=cache.pools,
            start=cache.start,
            length=cache.length,
            seen=cache.seen,
            limit=cache.limit,
            state=cache.state,
        )

    def into(self, cache: KVCache) -> KVCache:
        """The cache with this as its moving part."""
        return dataclasses.replace(
            cache, pools=self.pools, start=self.start, length=self.length, seen=self.seen, state=self.state
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What a decode program is compiled for, besides shapes.

    Attributes:
        graphs: the decoder's static half.
        config: its shape.
        form: how segments lie in their pools.
        rolling: positions are those within the cache.
        tail: new rows gather beside the pool while tokens are drawn, and join it later. A CPU cannot write into a
            16-bit pool in place, so there one write for many tokens beats one per token.
        upkeep: what the policy does after each token; None if it only appends.
        widest: the most rows a segment of a shared pool can have when a token is drawn; None if unknown.
        implementation: what computes attention over the pool.
    """

    graphs: Graphs
    config: ModelConfig
    form: Form
    rolling: bool
    tail: bool = False
    upkeep: Upkeep | None = None
    widest: int | None = None
    implementation: Implementation = Implementation.XLA

    @property
    def scored(self) -> bool:
        """Whether rows' scores go on."""
        return self.upkeep is not None and self.upkeep.scored

    @property
    def evicts(self) -> bool:
        """Whether a row goes for each that comes."""
        return self.upkeep is not None and self.upkeep.evicts


def program_for(flat: Flat, cache: KVCache, implementation: Implementation = Implementation.XLA) -> Program:
    """The program that decodes on top of a cache, on the default device.

    Args:
        flat: the decoder's parameters.
        cache: any cache of this decoder.
        implementation: what computes attention over its segments.

    Returns:
        What is static about it.
    """
    upkeep = cache.policy.upkeep
    # Scores and dropped rows are the pool's own business: rows cannot wait beside it.
    appends = upkeep is None or not (upkeep.evicts or upkeep.scored)
    most = None
    if upkeep is not None and cache.form is Form.SHARED and cache.state is not None:
        most = widest(cache.policy, bucket(int(np.asarray(cache.state.prompt).max())), cache.config.layers)
    return Program(
        graphs=flat.graphs,
        config=cache.config,
        form=cache.form,
        rolling=cache.policy.rolling,
        tail=appends and jax.default_backend() == "cpu" and cache.pools[0].k.dtype.itemsize == 2,
        upkeep=upkeep,
        widest=most,
        implementation=implementation,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Token:
    """N new tokens of every sequence, as one block of the decoder sees them."""

    q: Float[Array, "B K G N D"]
    k: Float[Array, "B K N D"]
    v: Float[Array, "B K N D"]
    stored: Float[Array, "B K N D"]


def project(block: Block, program: Program, x: Float[Array, "B N E"], place: Int[Array, "B N"]) -> Token:
    """Queries, keys and values of new tokens at their places."""
    raw, v = block.keys_values(x)
    k = block.rotated(raw, place)
    return Token(q=block.queries(x, place), k=k, v=v, stored=raw if program.rolling else k)


def pool_attention(
    q: Float[Array, "B K G N D"], keys: Array, values: Array, start: Array, length: Array, program: Program
) -> tuple[Float[Array, "B K G N D"], Float[Array, "B K G N"]]:
    """New queries against one layer's segments."""
    batch, heads, group, tokens, dim = q.shape
    folded = q.reshape(batch, heads, group * tokens, dim)
    out, lse = attention.over_pool(
        folded, keys, values, start, length, form=program.form, implementation=program.implementation
    )
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


def over_rows(
    program: Program, new: Token, pool: Pool, segments: Segments, count: Int[Array, " B"], positions: Int[Array, "B N"]
) -> tuple[Float[Array, "B K G N D"], Pool, Int[Array, "B K"], Float[Array, "B K n"] | None]:
    """One layer's attention of N new tokens, and what becomes of its pool.

    Args:
        program: what is static.
        new: the tokens.
        pool: the layer's pool, with room for N rows behind every segment.
        segments: the layer's segments before these tokens.
        count: how many of the N are real.
        positions: their positions in the text.

    Returns:
        The attention's output, the pool, the new lengths, and merging's thresholds.
    """
    start, length, tokens = segments.start, segments.length, positions.shape[1]
    end = start + length
    if tokens > 1:
        out, scores = _several(program, new, pool, segments, count)
        own = None
        if scores is not None:
            pool, own = dataclasses.replace(pool, score=scores[0]), scores[1]
        after = append(pool, new.stored, new.v, positions, end, count, own)
        return out, after, length + count[:, None], segments.tau
    # A single token simply joins the rows before it is its turn to look at them.
    after, rows = append(pool, new.stored, new.v, positions, end, count), length + count[:, None]
    keys = rolled(after.k, start, program) if program.rolling else after.k
    if program.scored:
        assert program.upkeep is not None and after.score is not None
        carry = program.upkeep.carry
        out, _, score = attention.over_pool_scored(
            new.q[..., 0, :],
            keys,
            after.v,
            start,
            rows,
            jnp.zeros_like(after.score) if carry is Carry.LAST else after.score,
            count > 0,
            form=program.form,
            widest=program.widest,
            implementation=program.implementation,
        )
        if carry is Carry.LAST:
            score = jnp.where(count[:, None] > 0, score, after.score)
        out, after = out[..., None, :], dataclasses.replace(after, score=score)
    else:
        out, _ = pool_attention(new.q, keys, after.v, start, rows, program)
    if not program.evicts:
        return out, after, rows, segments.tau
    assert program.upkeep is not None
    now = dataclasses.replace(segments, length=rows, seen=segments.seen + count)
    after, rows, tau = evict(
        after, now, out[:, :, 0, 0, 0], upkeep=program.upkeep, form=program.form, widest=program.widest
    )
    return out, after, rows, tau


def _several(program: Program, new: Token, pool: Pool, segments: Segments, count: Array):
    """Attention of several tokens to older rows and to one another; and the scores of both, if they go on."""
    start, length = segments.start, segments.length
    keys = rolled(pool.k, start, program) if program.rolling else pool.k
    out, lse = pool_attention(new.q, keys, pool.v, start, length, program)
    own, own_lse = lax.map(lambda a: attention.causal(a[0], a[1], a[2], jnp.int32(0)), (new.q, new.k, new.v))
    joined = attention.merge(out, lse, own, own_lse)
    if not program.scored:
        return joined, None
    assert program.upkeep is not None and pool.score is not None
    tokens, group = new.q.shape[3], new.q.shape[2]
    index = jnp.arange(tokens, dtype=jnp.int32)
    counts = index < count[:, None]
    score = pool.score
    if program.upkeep.carry is Carry.LAST:
        counts = counts & (index == count[:, None] - 1)
        score = jnp.where((count > 0)[:, None], 0.0, score)
    whole = jnp.where(counts[:, None, None], jnp.logaddexp(lse, own_lse), jnp.inf)
    flat = lambda a: a.reshape(*a.shape[:2], group * tokens, *a.shape[4:])  # noqa: E731
    score = attention.pool_sums(
        flat(new.q), keys, flat(whole), start, length, score, form=program.form, weight=1 / group
    )
    sums = lax.map(lambda a: attention.column_sums(a[0], a[1], a[2], jnp.int32(0)), (new.q, new.k, whole))
    return joined, (score, sums.mean(axis=2))


def rolled(keys: Float[Array, "B P D"], start: Int[Array, "B K"], program: Program) -> Float[Array, "B P D"]:
    """Un-rotated keys, rotated by their place within the cache."""
    place = jnp.arange(keys.shape[1], dtype=jnp.int32) % (keys.shape[1] // start.shape[1])
    return rotate(keys, place, program.config.rope)


def step(
    ends: Leaves,
    blocks: tuple[Leaves, ...],
    live: Live,
    tokens: Int[Array, "B N"],
    count: Int[Array, " B"],
    *,
    program: Program,
) -> tuple[Float[Array, "B V"], Live]:
    """Runs N new tokens per sequence through the model.

    Args:
        ends: parameters before and after the blocks.
        blocks: one tuple of parameters per block.
        live: the cache's moving part, with room for N rows behind every segment.
        tokens: ids, padded on the right.
        count: how many of the N are real; 0 leaves a sequence's cache as it is.
        program: what is static.

    Returns:
        Float32 logits of each sequence's last real token, and the moving part with the new rows.
    """
    outer = program.graphs.ends(ends)
    x = outer.embed(tokens)
    positions = live.seen[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    pools, lengths, taus, rings = list(live.pools), [], [], []
    for index, leaves in enumerate(blocks):
        at = 0 if program.form is Form.SHARED else index
        block = program.graphs.block(leaves)
        # Rolling positions exist only where all heads of a sequence hold the same rows: any head's length will do.
        held = live.length[index][:, :1]
        place = held + positions - live.seen[:, None] if program.rolling else positions
        new = project(block, program, x, place)
        out, pools[at], rows, tau = over_rows(program, new, pools[at], layer_of(live, index), count, positions)
        x = block.finish(x, out)
        lengths.append(rows)
        if tau is not None:
            taus.append(tau)
        if live.state is not None and live.state.rings:
            rings.append(remembered(live.state.rings[index], new.q, positions, count))
    last = jnp.maximum(count - 1, 0)
    logits = outer.logits(jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0])
    state = live.state
    if state is not None:
        state = dataclasses.replace(state, tau=jnp.stack(taus) if taus else None, rings=tuple(rings))
    live = dataclasses.replace(live, pools=tuple(pools), length=jnp.stack(lengths), seen=live.seen + count, state=state)
    return logits, live


def layer_of(live: Live, index: int) -> Segments:
    """One layer's segments."""
    state, batch = live.state, live.seen.shape[0]
    none = jnp.zeros((batch,), jnp.int32)
    return Segments(
        start=live.start[index],
        length=live.length[index],
        limit=live.limit[index],
        recent=none if state is None else state.recent[index],
        tau=None if state is None or state.tau is None else state.tau[index],
        prompt=none if state is None else state.prompt,
        seen=live.seen,
    )


def remembered(
    ring: Float[Array, "B K G R D"],
    q: Float[Array, "B K G N D"],
    positions: Int[Array, "B N"],
    count: Int[Array, " B"],
) -> Float[Array, "B K G R D"]:
    """A ring with N new queries, of which `count` are real, in the slots of their positions."""
    batch, rows, tokens = ring.shape[0], ring.shape[3], q.shape[3]
    offset = jnp.arange(tokens, dtype=jnp.int32)
    # Of more queries than the ring holds only the last ones count.
    real = (offset < count[:, None]) & (offset >= count[:, None] - rows)
    slot = jnp.where(real, positions % rows, rows)
    index = jnp.arange(batch, dtype=jnp.int32)[:, None]
    by_token = jnp.moveaxis(q, 3, 1).astype(ring.dtype)
    return ring.at[index, :, :, slot].set(by_token, mode="drop", unique_indices=True)


@partial(jax.jit, static_argnames=("program",), donate_argnames=("pools",))
def _extend(ends, blocks, pools, rest, tokens, count, *, program):
    logits, live = step(ends, blocks, dataclasses.replace(rest, pools=pools), tokens, count, program=program)
    return logits, live.pools, dataclasses.replace(live, pools=())


def extend(
    flat: Flat, live: Live, tokens: Int[Array, "B N"], count: Int[Array, " B"], *, program: Program
) -> tuple[Float[Array, "B V"], Live]:
    """`step`, compiled; the pools given are consumed.

    Args:
        flat: the decoder's parameters.
        live: as for `step`; its pools are donated.
        tokens: as for `step`.
        count: as for `step`.
        program: what is static.

    Returns:
        As `step`.
    """
    rest = dataclasses.replace(live, pools=())
    logits, pools, rest = _extend(flat.ends, flat.blocks, live.pools, rest, tokens, count, program=program)
    return logits, dataclasses.replace(rest, pools=pools)

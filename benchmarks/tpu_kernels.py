"""Times the TPU kernels: attention over segments of a pool, and eviction. Cases are those of `tpu_parts`.

Kernels read pools from HBM themselves. What a loop hands on from call to call XLA keeps in VMEM, where it fits, and
copies back and forth for them; in a model's step it does not, for all layers' pools do not fit. So pools are larger
than VMEM here.
"""

import jax.numpy as jnp

import jaxkv
from benchmarks.gpu_kernels import coded, pools_of
from benchmarks.gpu_timing import INTERPRET, ROTATED, chained, random
from jaxkv.engine import evict as eviction
from jaxkv.pallas_kernels import tpu_decode, tpu_evict

# Bytes per second by which the number of calls goes, roughly those of a TPU.
_BYTES = 1e12
# Bytes behind a pool's last segment: more than VMEM has.
_SPARE = 0 if INTERPRET else ROTATED


def _timed(step, carry, pools, nbytes, each=1):
    """Figures of a chain of calls (see `gpu_timing.Chain`) that each read so many bytes of rows."""
    found = chained(step, carry, pools, estimate=nbytes / _BYTES + 1e-5, each=each)
    return found | {"bytes": nbytes, "bytes_per_second": nbytes / found["seconds"]}


def decode(case):
    """Seconds of attention of one new token's queries over segments of a pool, which is only read."""
    q, pools, start, length, nbytes = pools_of(case, jnp.dtype(case["dtype"]), spare=_SPARE)
    attend = lambda q, pool: tpu_decode.attend(q, *pool, start, length, interpret=INTERPRET)[0]  # noqa: E731
    return _timed(attend, q, pools, nbytes)


def _new(q):
    """A new token's keys and values `[B, K, D]`, and the counts of sequences that go on, 1 for each."""
    batch, heads, _, dim = q.shape
    return tuple(random(20_000 + i, (batch, heads, dim), q.dtype) for i in (0, 1)), jnp.ones(
        (batch,), jnp.int32
    )


def token(case):
    """Seconds of a layer's attention in a step: the new token's row joins the pool, in place, and is attended to."""
    q, pools, start, length, nbytes = pools_of(
        case, jnp.dtype(case["dtype"]), spare=0 if "store" in case else _SPARE
    )
    new, counts = _new(q)
    if "store" in case:
        new = coded(*new, case["store"])
        pools = [tuple(map(tuple, pool)) for pool in pools]

    def step(carry, _):
        q, written = carry[0], []
        for pool in carry[1]:
            q, _, *pool = tpu_decode.append_and_attend(
                q, new, *pool, start, length, counts, interpret=INTERPRET
            )
            written.append(tuple(pool))
        return q, written

    return _timed(step, (q, pools), [()], nbytes, each=len(pools))


def mass(case):
    """Seconds of the same over equal segments, with each row's attention added to its score (H2O)."""
    q, pools, start, length, nbytes = pools_of(case, jnp.dtype(case["dtype"]))
    new, counts = _new(q)
    options = {"widest": pools[0][0].shape[1] // case["kv_heads"], "interpret": INTERPRET}

    def step(carry, _):
        q, score, written = carry[0], carry[1], []
        for pool in carry[2]:
            q, received, *pool = tpu_decode.append_and_score(
                q, new, *pool, start, length, counts, **options
            )
            score, written = score + received, [*written, tuple(pool)]
        return q, score, written

    score = jnp.zeros(pools[0][0].shape[:2], jnp.float32)
    return _timed(step, (q, score, pools), [()], nbytes, each=len(pools))


def evict(case):
    """Seconds in which H2O evicts a row of each full segment: rows ranked, and the newest one moved."""
    batch, heads, rows, dim = (case[name] for name in ("batch", "kv_heads", "rows", "dim"))
    whole, table = -(-rows // 8) * 8, (batch, heads)  # tiles
    k, v = (random(i, (batch, heads * whole, dim), jnp.dtype(case["dtype"])) for i in (0, 1))
    score = jnp.abs(random(2, k.shape[:2], jnp.float32))
    # Later calls find the row that has gone at the end again: the lowest now, it is ranked and moved like any other.
    pos = jnp.broadcast_to(jnp.arange(heads * whole, dtype=jnp.int32) % whole, k.shape[:2])
    start = jnp.broadcast_to(whole * jnp.arange(heads, dtype=jnp.int32), table)
    sizes = [jnp.full(table, each, jnp.int32) for each in (rows, rows - 1, rows // 2)]
    tokens = [jnp.full((batch,), each, jnp.int32) for each in (rows, rows // 2)]
    weigh = eviction.weigh_of(jaxkv.H2O(budget=max(2, rows - 1)).parts().ongoing)

    def step(pool, _):
        return tpu_evict.evict_rows(
            *pool, start, *sizes, *tokens, weigh=weigh, interpret=INTERPRET
        )[:4]

    return chained(step, (k, v, pos, score), [()], estimate=2e-5)

"""Times the TPU kernels: attention over segments of a pool. Cases are those of `tpu_parts`.

Kernels read pools from HBM themselves. What a loop hands on from call to call XLA keeps in VMEM, where it fits, and
copies back and forth for them; in a model's step it does not, for all layers' pools do not fit. So pools are larger
than VMEM here.
"""

import jax.numpy as jnp

from benchmarks.gpu_kernels import coded, pools_of
from benchmarks.gpu_timing import INTERPRET, ROTATED, chained, random
from jaxkv.pallas_kernels.tpu import decode as tpu_decode

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

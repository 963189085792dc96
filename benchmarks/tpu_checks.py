"""Compares every TPU kernel on this device with numpy in float64, for one dtype and head dim at a time.

Each check draws its arrays and returns errors by what is compared: the largest difference as a share of the largest
value.
"""

import jax.numpy as jnp
import numpy as np

from benchmarks import gpu_checks
from benchmarks.gpu_checks import error, oracle, wide
from benchmarks.gpu_timing import INTERPRET, random
from jaxkv.cache.quantised import STORES
from jaxkv.pallas_kernels.tpu import decode as tpu_decode
from jaxkv.pallas_kernels.tpu import prefill as tpu_prefill
from jaxkv.pallas_kernels.tpu import rows as tpu_rows

_LANES = 128


class _Drawn:
    """Queries and a pool of three sequences: a head ten times longer, an empty one, few rows; the second has ended.

    Attributes:
        q: queries `[B, K, G, D]`.
        new: keys and values `[B, K, D]` of a token.
        pool: keys and values `[B, P, D]`.
        start: first rows `i32[B, K]`, a free row behind each segment.
        length: its rows.
        counts: `i32[B]` 0 for the sequence that has ended.
    """

    def __init__(self, case, dtype):
        """Draws random numbers of a case's sizes, the same for the same case."""
        heads, group, dim, rows = case["kv_heads"], case["group"], case["dim"], case["rows"]
        share = np.ones((3, heads))
        share[0, 0], share[1, -1] = 10, 0
        share = share / share.sum(axis=1, keepdims=True) * heads * rows
        self.length = (share * [[1.0], [0.7], [0.1]]).astype(np.int32)
        self.start = (np.cumsum(self.length + 1, axis=1) - self.length - 1).astype(np.int32)
        self.counts = np.asarray([1, 0, 1], np.int32)
        size = -(-(heads * (rows + 1)) // tpu_rows.TILE) * tpu_rows.TILE
        self.q = random(0, (3, heads, group, dim), dtype)
        self.new = tuple(random(i, (3, heads, dim), dtype) for i in (1, 2))
        self.pool = tuple(random(i, (3, size, dim), dtype) for i in (3, 4))

    @property
    def tables(self):
        """Tuple of starts, lengths and counts on the device."""
        return tuple(map(jnp.asarray, (self.start, self.length, self.counts)))

    def joined(self):
        """Writes the token's rows; returns keys and values in float64, and the number of rows of each segment."""
        found = [wide(each).copy() for each in self.pool]
        for b, h in zip(
            *np.nonzero(np.broadcast_to(self.counts[:, None] > 0, self.start.shape)), strict=True
        ):
            for leaf, new in zip(found, self.new, strict=True):
                leaf[b, self.start[b, h] + self.length[b, h]] = wide(new)[b, h]
        return found, self.length + self.counts[:, None]


def _oracle(drawn, k, v, length):
    """Output, log-sum-exp and attention that rows received, by `gpu_checks.oracle` from keys and values in float64."""
    return oracle(
        drawn.q, *(jnp.asarray(each, jnp.float32) for each in (k, v)), drawn.start, length
    )


def _pools(name, ours, theirs):
    """Errors of a pool's keys and values, by name."""
    return {
        f"{name} {leaf}": error(mine, its)
        for leaf, mine, its in zip("kv", ours, theirs, strict=True)
    }


def attend(case, dtype):
    """Compares decode attention over segments that are only read: output and log-sum-exp."""
    drawn = _Drawn(case, dtype)
    out, lse, _ = _oracle(drawn, *map(wide, drawn.pool), drawn.length)
    ours = tpu_decode.attend(drawn.q, *drawn.pool, *drawn.tables[:2], interpret=INTERPRET)
    return {"attend": error(ours[0], out), "attend lse": error(ours[1], lse)}


def append(case, dtype):
    """Compares a step in which a token's rows join the pool and are attended to: output, log-sum-exp, pool."""
    drawn = _Drawn(case, dtype)
    pool, length = drawn.joined()
    out, lse, _ = _oracle(drawn, *pool, length)
    ours = tpu_decode.append_and_attend(
        drawn.q, drawn.new, *drawn.pool, *drawn.tables, interpret=INTERPRET
    )
    return {"append": error(ours[0], out), "append lse": error(ours[1], lse)} | _pools(
        "append", ours[2:], pool
    )


def codes(case, dtype):
    """Compares such a step over rows in 8 bits with attention over what they decode to."""
    drawn = _Drawn(case, dtype)
    held, new = (STORES["int8"].of(*each).held for each in (drawn.pool, drawn.new))
    drawn.pool, drawn.new = (tuple(_decoded(*each) for each in some) for some in (held, new))
    pool, length = drawn.joined()
    out, lse, _ = _oracle(drawn, *pool, length)
    ours = tpu_decode.append_and_attend(drawn.q, new, *held, *drawn.tables, interpret=INTERPRET)
    found = {"codes": error(ours[0], out), "codes lse": error(ours[1], lse)}
    return found | _pools("codes", [_decoded(*each) for each in ours[2:]], pool)


def _decoded(code, scale):
    """Float32 keys or values of 8-bit codes and scales."""
    return code.astype(jnp.float32) * scale.astype(jnp.float32)[..., None]


def splash(case, dtype):
    """Compares causal attention of two prompts of unequal lengths, and its log-sum-exp."""
    heads, group, dim, slots = case["kv_heads"], case["group"], case["dim"], case["slots"]
    q, k, v = (
        random(i, (2, heads, *more, slots, dim), dtype)
        for i, more in ((5, (group,)), (3, ()), (4, ()))
    )
    out, lse = tpu_prefill.flash(q, k, v, lse=True, interpret=INTERPRET)
    return gpu_checks.causal(q, k, v, (slots - 5, slots // 3), {"splash": out, "splash lse": lse})


SEGMENTS = {each.__name__: each for each in (attend, append, codes)}


def check(case):
    """Calls the checks of the kernels that take a dtype and head dim: errors by kernel; see `gpu_checks.checked`."""
    kernels = SEGMENTS if case["dim"] % _LANES == 0 else {}
    # As the backend has it: splash attention serves prompts of bfloat16, whatever their head dim.
    return gpu_checks.checked(
        kernels | ({"splash": splash} if case["dtype"] == "bfloat16" else {}), case
    )

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
from jaxkv.pallas_kernels import tpu_decode, tpu_evict, tpu_prefill, tpu_rows, tpu_windows

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

    @property
    def widest(self):
        """Number of rows of the longest segment, the new one included."""
        return int(self.length.max()) + 1

    def joined(self):
        """Writes the token's rows; returns keys and values in float64, and the number of rows of each segment."""
        found = [wide(each).copy() for each in self.pool]
        for b, h in zip(
            *np.nonzero(np.broadcast_to(self.counts[:, None] > 0, self.start.shape)), strict=True
        ):
            for leaf, new in zip(found, self.new, strict=True):
                leaf[b, self.start[b, h] + self.length[b, h]] = wide(new)[b, h]
        return found, self.length + self.counts[:, None]

    def windows_of(self, leaf, length):
        """Copies a pool's numbers `[B, P]` into windows `[B, K, n]`, as kernels do; zeros outside of the segments."""
        rows = leaf.shape[1]
        found = np.zeros((*self.start.shape, tpu_rows.width(self.widest, rows)))
        first = np.asarray(tpu_rows.window_at(jnp.asarray(self.start), rows))
        for b, h in np.ndindex(*self.start.shape):
            at, begin = self.start[b, h] - first[b, h], self.start[b, h]
            found[b, h, at : at + length[b, h]] = leaf[b, begin : begin + length[b, h]]
        return found


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


def score(case, dtype):
    """Compares a step and the attention that rows receive, at their places and in windows."""
    drawn, found = _Drawn(case, dtype), {}
    pool, length = drawn.joined()
    out, _, mass = _oracle(drawn, *pool, length)
    mass[drawn.counts == 0] = 0
    for name, windows in (("score", False), ("score windows", True)):
        options = {"widest": drawn.widest, "windows": windows, "interpret": INTERPRET}
        ours = tpu_decode.append_and_score(
            drawn.q, drawn.new, *drawn.pool, *drawn.tables, **options
        )
        received = drawn.windows_of(mass, length) if windows else mass
        found |= {name: error(ours[0], out), f"{name} mass": error(ours[1], received)} | _pools(
            name, ours[2:], pool
        )
    return found


def windows(case, dtype):
    """Compares windows that are taken out of a pool and added to scores, and cosines of rows with a vector."""
    drawn = _Drawn(case, dtype)
    rows, (start, length, _) = drawn.pool[0], drawn.tables
    batch, size = rows.shape[:2]
    inside, options = (
        drawn.windows_of(np.ones((batch, size)), drawn.length),
        {"interpret": INTERPRET},
    )
    leaf = np.arange(batch * size, dtype=np.int32).reshape(batch, size)
    taken = tpu_windows.take(jnp.asarray(leaf), start, widest=drawn.widest, **options)[1]
    found = {
        "windows taken": error(np.asarray(taken) * inside, drawn.windows_of(leaf, drawn.length))
    }
    scores, new = (random(i, (batch, size), jnp.float32) for i in (5, 6))
    added = jnp.asarray(drawn.windows_of(wide(new), drawn.length), jnp.float32)
    want, vectors, keys = wide(scores), wide(drawn.new[0]), wide(rows)
    norms = np.linalg.norm(keys, axis=-1)
    cosines = (
        np.einsum("bhd,bpd->bhp", vectors, keys)
        / norms[:, None]
        / np.linalg.norm(vectors, axis=-1)[..., None]
    )
    compared = np.zeros(inside.shape)
    for b, h in np.ndindex(*drawn.start.shape):
        span = slice(drawn.start[b, h], drawn.start[b, h] + drawn.length[b, h])
        want[b, span] += wide(new)[b, span]
        compared[b, h] = drawn.windows_of(cosines[:, h], drawn.length)[b, h]
    found["windows added"] = error(tpu_windows.add(scores, start, added, **options), want)
    ours = tpu_windows.cosines(rows, drawn.new[0], start, length, widest=drawn.widest, **options)
    return found | {"cosines": error(ours, compared)}


def by_score(score, pos, seen, prompt):
    """Ranks of rows, their scores, and the rows that may go: all but those of the first two tokens."""
    return score, pos >= 2


def evict(case, dtype):
    """Compares a pool in which segments above their limit lose the row of the lowest score to the newest one."""
    drawn = _Drawn(case, dtype)
    want, size = [wide(each).copy() for each in drawn.pool], drawn.pool[0].shape[1]
    scores, pos = (
        np.asarray(random(7, (3, size), jnp.float32)).copy(),
        np.full((3, size), -1, np.int32),
    )
    limit, recent = (
        np.maximum(drawn.length - [[1], [0], [1]], 0).astype(np.int32),
        np.full(drawn.start.shape, 3),
    )
    for b, h in np.ndindex(*drawn.start.shape):
        pos[b, drawn.start[b, h] : drawn.start[b, h] + drawn.length[b, h]] = np.arange(
            drawn.length[b, h]
        )
    seen, went = np.full((3,), drawn.widest, np.int32), np.zeros(drawn.start.shape)
    given = [*drawn.pool, *map(jnp.asarray, (pos, scores)), *drawn.tables[:2]]
    given += [jnp.asarray(each, jnp.int32) for each in (limit, recent, seen, seen // 2)]
    ours = tpu_evict.evict_rows(*given, weigh=by_score, interpret=INTERPRET)
    want += [pos.astype(np.float64), scores.astype(np.float64)]
    for b, h in np.ndindex(*drawn.start.shape):
        rows = np.arange(drawn.start[b, h], drawn.start[b, h] + drawn.length[b, h])
        free = (pos[b, rows] >= 2) & (pos[b, rows] < seen[b] - recent[b, h])
        if len(rows) > limit[b, h] and free.any():
            to, at = rows[np.argmin(np.where(free, scores[b, rows], np.inf))], rows[-1]
            for leaf, empty in zip(want, (None, None, -1, 0), strict=True):
                leaf[b, to] = leaf[b, at]
                leaf[b, at] = leaf[b, at] if empty is None else empty
            went[b, h] = 1
    names = ("k", "v", "pos", "score", "went")
    return {
        f"evict {name}": error(mine, its)
        for name, mine, its in zip(names, ours, [*want, went], strict=True)
    }


def splash(case, dtype):
    """Compares causal attention of two prompts of unequal lengths, and its log-sum-exp."""
    heads, group, dim, slots = case["kv_heads"], case["group"], case["dim"], case["slots"]
    q, k, v = (
        random(i, (2, heads, *more, slots, dim), dtype)
        for i, more in ((5, (group,)), (3, ()), (4, ()))
    )
    out, lse = tpu_prefill.flash(q, k, v, lse=True, interpret=INTERPRET)
    return gpu_checks.causal(q, k, v, (slots - 5, slots // 3), {"splash": out, "splash lse": lse})


SEGMENTS = {each.__name__: each for each in (attend, append, codes, score, windows, evict)}


def check(case):
    """Calls the checks of the kernels that take a dtype and head dim: errors by kernel; see `gpu_checks.checked`."""
    kernels = SEGMENTS if case["dim"] % _LANES == 0 else {}
    # As the backend has it: splash attention serves prompts of bfloat16, whatever their head dim.
    return gpu_checks.checked(
        kernels | ({"splash": splash} if case["dtype"] == "bfloat16" else {}), case
    )

"""What tests of the transform share: random arrays, and looks into the rows that come out."""

import contextlib

import jax.numpy as jnp
import jaxtyping
import numpy as np

import jaxkv
from jaxkv import AdaKV, PyramidKV, SnapKV
from jaxkv.policies import EntropyLayers

SLOTS, WINDOW = 64, 8
LENGTHS = (50, 37)
SNAP = SnapKV(budget=16, window=WINDOW)
ADA = AdaKV(base=SNAP)
ENTROPY = PyramidKV(budget=16, window=WINDOW, layers=EntropyLayers())


def draw(seed=0, *, batch=2, heads=2, group=3, slots=SLOTS, dim=8, dtype=jnp.float32):
    """Random k, v `[B, K, S, D]` and all queries `[B, H, S, D]`."""
    rng = np.random.default_rng(seed)
    shapes = (
        (batch, heads, slots, dim),
        (batch, heads, slots, dim),
        (batch, heads * group, slots, dim),
    )
    k, v, q = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    return k, v, 1.5 * q


def segments(rows: jaxkv.CompressedKV):
    """Every segment as `(layer, sequence, head, k, v, pos)` of its rows."""
    start, length = np.asarray(rows.segment_starts), np.asarray(rows.length)
    for at in np.ndindex(*start.shape):
        layer, row, _ = at
        pool = rows.get_layer_pool(layer)
        span = slice(start[at], start[at] + length[at])
        yield *at, *(np.asarray(leaf)[row, span] for leaf in (pool.k, pool.v, pool.pos))


def kept(rows: jaxkv.CompressedKV) -> list:
    """Positions by layer, sequence and head."""
    layers, batch, heads = rows.segment_starts.shape
    out = [[[None] * heads for _ in range(batch)] for _ in range(layers)]
    for layer, row, head, _, _, pos in segments(rows):
        out[layer][row][head] = pos.tolist()
    return out


def attended(q, rows: jaxkv.CompressedKV, *, last: int = 1, layer: int = 0) -> np.ndarray:
    """Float64 attention of the last queries `[B, H, N, D]` over a layer's rows, each over those that come no later."""
    q = np.asarray(q, np.float64)
    batch, heads, _, dim = q.shape
    out = np.zeros(q.shape)
    for at, row, head, k, v, pos in segments(rows):
        group = heads // rows.segment_starts.shape[2]
        for h in range(head * group, head * group + group) if at == layer else ():
            for n in range(last):
                here = pos <= np.asarray(rows.seen)[layer, row] - last + n
                weights = np.exp(k[here].astype(np.float64) @ q[row, h, n] / np.sqrt(dim))
                out[row, h, n] = weights @ v[here].astype(np.float64) / weights.sum()
    return out


def one_step(k, v, q, length, *, policy):
    """One compression, one token, one attention."""
    rows = jaxkv.compress(k, v, queries=q, length=length, policy=policy, headroom=1)
    rows = rows.append(k[:, :, :1], v[:, :, :1])
    return rows, rows.attend(q[:, :, :1])


@contextlib.contextmanager
def batched():
    """A batch of states has one more axis than a state's annotations say, which only tests check."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)

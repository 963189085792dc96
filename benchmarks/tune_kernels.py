"""Times one way of cutting a kernel's work, and holds it against numpy; each function takes a case of `tune`.

A case names a dtype, a head dim, and the fields in which its tiles differ from the rule of thumb. Functions that can be
prepared in another thread have `prepare`: what it gives is compiled, and kept for when the same tiles are timed longer.
"""

import dataclasses
import functools
import json
import math

import jax.numpy as jnp
import numpy as np

from benchmarks import gpu_checks, shapes
from benchmarks.gpu_kernels import coded, tokens
from benchmarks.gpu_timing import INTERPRET, MIB, Chain, random
from jaxkv import pallas_kernels
from jaxkv.cache.layout import Layout
from jaxkv.pallas_kernels import tuning

_MODELS = {m.dim: m for m in shapes.MODELS if m.name in shapes.PER_DIM}
# Bytes and operations per second by which the number of calls goes, and seconds of one measurement's programs.
_BYTES, _FLOPS = 3e12, 3e14
# Queries that SnapKV looks at.
WINDOW = 32


def _ragged(batch, heads, rows):
    share = np.random.default_rng(0).dirichlet([3.0] * heads, batch)
    return np.maximum(1, np.floor(share * heads * rows)).astype(np.int32)


def _itemsize(kernel, dtype):
    return 1 if kernel == "codes" else jnp.dtype(dtype).itemsize


@functools.cache
def _segments(kernel, dim, dtype):
    """Two loads: many ragged rows (256 MiB), and few (32 MiB, in turns with others of the same size); room for one."""
    heads, itemsize, loads = _MODELS[dim], _itemsize(kernel, dtype), []
    for size, batch, count in (
        ((MIB // 4, 2, 1),) if INTERPRET else ((256 * MIB, 8, 1), (32 * MIB, 1, 5))
    ):
        rows = size // (2 * itemsize * heads.dim * heads.kv_heads * batch)
        length = _ragged(batch, heads.kv_heads, rows)
        shape = (batch, heads.kv_heads * (rows + 1), dim)
        pools = [tuple(random(2 * i + j, shape, dtype) for j in (0, 1)) for i in range(count)]
        if kernel == "codes":
            pools = [coded(*pool, "int8") for pool in pools]
        q = random(9, (batch, heads.kv_heads, heads.group, dim), dtype)
        start = Layout.RAGGED.place(jnp.asarray(length)[None], shape[1])[0]
        loads.append((q, pools, start, jnp.asarray(length), size))
    return loads


@functools.cache
def _rule(kernel, dim, dtype):
    """The rule of thumb, and what a table in force makes of it."""
    itemsize = _itemsize(kernel, dtype)
    if kernel == "gather":
        return tuning.gather_tiles(dim=dim, itemsize=itemsize)
    if kernel == "window":
        return tuning.window_tiles(rows=_MODELS[dim].group * WINDOW, dim=dim, itemsize=itemsize)
    if kernel in ("flash", "sums"):
        return tuning.prefill_tiles(dim=dim, itemsize=itemsize)
    return tuning.decode_tiles(dim=dim, itemsize=itemsize)


def _tiles(kernel, case):
    return tuning.from_fields(_rule(kernel, case["dim"], case["dtype"]), case["tiles"])


def _decode(case, kernel="decode"):
    tiles, chains = _tiles(kernel, case), []
    of = {"dim": case["dim"], "itemsize": _itemsize(kernel, case["dtype"])}
    rule = _rule(kernel, case["dim"], case["dtype"])
    options = {"dtype": jnp.dtype(case["dtype"])} if kernel == "codes" else {}
    # As many as `attend` would have with these tiles in force.
    programs = tuning.programs(**of, interpret=INTERPRET) // rule.resident * tiles.resident
    for q, pools, start, length, size in _segments(kernel, case["dim"], case["dtype"]):
        chunks = pallas_kernels.deal(
            start[None], length[None], programs=programs, block=tiles.chunk
        )
        # The kernel of a step; the one for questions walks rows alike.
        step, carry = tokens(q, pools, start, chunks, tiles=tiles, interpret=INTERPRET, **options)
        chains.append(Chain(step, carry, [()], estimate=size / _BYTES, each=len(pools)))
    return chains


@functools.cache
def _prompt(dim, dtype):
    heads, slots = _MODELS[dim], 48 if INTERPRET else 8192
    q = random(
        0, (1, heads.kv_heads, min(heads.group, 2) if INTERPRET else heads.group, slots, dim), dtype
    )
    k, v = (random(i, (1, heads.kv_heads, slots, dim), dtype) for i in (1, 2))
    return q, k, v, jnp.zeros((1,), jnp.int32), jnp.full((1,), slots, jnp.int32)


def _flash(case):
    q, k, v, zero, length = _prompt(case["dim"], case["dtype"])

    def run(q, kv):
        return pallas_kernels.flash(q, *kv, zero, length, tiles=tiles, interpret=INTERPRET)[0]  # noqa: E731

    tiles = _tiles("flash", case)
    return [Chain(run, q, [(k, v)], estimate=2 * q.size * q.shape[3] / _FLOPS)]


def _sums(case):
    q, k, _, zero, length = _prompt(case["dim"], case["dtype"])
    tiles = _tiles("sums", case)

    def run(lse, k):
        sums = pallas_kernels.column_sums(q, k, lse, zero, length, tiles=tiles, interpret=INTERPRET)
        return lse + 1e-6 * jnp.minimum(sums[0, 0, 0], 1.0)

    lse = jnp.full(q.shape[:4], 12.0, jnp.float32)
    return [Chain(run, lse, [k], estimate=q.size * q.shape[3] / _FLOPS)]


def _window(case):
    q, k, _, _, length = _prompt(case["dim"], case["dtype"])
    tiles, few = _tiles("window", case), q[..., -WINDOW:, :]

    def run(q, k):
        sums = pallas_kernels.window_sums(
            q, k, length - WINDOW, length, tiles=tiles, interpret=INTERPRET
        )
        return q + (1e-6 * jnp.minimum(sums[0, 0, 0], 1.0)).astype(q.dtype)

    return [Chain(run, few, [k], estimate=k.size * k.dtype.itemsize / _BYTES + 2e-5)]


@functools.cache
def _rows(dim, dtype):
    heads = _MODELS[dim]
    slots, kept = (64, 16) if INTERPRET else (32768, 8192)
    k, v = (random(i, (2, heads.kv_heads, slots, dim), dtype) for i in (0, 1))
    rng = np.random.default_rng(0)
    source = np.stack(
        [
            np.sort(rng.permutation(heads.kv_heads * slots)[: heads.kv_heads * kept])
            for _ in range(2)
        ]
    )
    return k, v, jnp.asarray(source.astype(np.int32))


def _gather(case):
    k, v, source = _rows(case["dim"], case["dtype"])
    tiles = _tiles("gather", case)

    def run(source, pool):
        pos = pallas_kernels.compact(*pool, source, tiles=tiles, interpret=INTERPRET)[2]
        return jnp.where(pos < 0, 0, source)

    return [
        Chain(
            run,
            source,
            [(k, v)],
            estimate=4 * source.size * case["dim"] * k.dtype.itemsize / _BYTES,
        )
    ]


_codes = functools.partial(_decode, kernel="codes")
_MADE = {
    "decode": _decode,
    "codes": _codes,
    "flash": _flash,
    "sums": _sums,
    "window": _window,
    "gather": _gather,
}


@functools.cache
def _compiled(kernel, named):
    return [chain.compile() for chain in _MADE[kernel](json.loads(named))]


class _Timed:
    """Times a kernel: the geometric mean over its loads."""

    def __init__(self, kernel):
        self.kernel = kernel

    def prepare(self, case):
        """The programs, compiled."""
        return _compiled(
            self.kernel, json.dumps({name: case[name] for name in ("dim", "dtype", "tiles")})
        )

    def __call__(self, case, chains):
        """Seconds of a call, and the tiles with all their fields."""
        found = [chain.measure(case["repeats"]) for chain in chains]
        mean = lambda values: math.exp(sum(map(math.log, values)) / len(found))  # noqa: E731
        ends = [mean([max(each["range"][end], 1e-9) for each in found]) for end in (0, 1)]
        tiles = dataclasses.asdict(_tiles(self.kernel, case))
        seconds = [each["seconds"] for each in found]
        return {
            "seconds": mean([max(each, 1e-9) for each in seconds]),
            "range": ends,
            "loads": seconds,
            "tiles": tiles,
        }


decode, codes, flash, sums, window, gather = (_Timed(kernel) for kernel in _MADE)


def check(case):
    """Tiles against numpy.

    Raises:
        ValueError: naming what is wrong.
    """
    known = {
        "decode": ("attend", "token"),
        "codes": ("codes",),
        "gather": ("compact",),
        "window": ("window",),
    }
    kernels = known.get(case["kernel"], ("flash",))
    rows, slots = (40, 48) if INTERPRET else (700, 384)
    shape = {"kv_heads": 3, "group": 2, "dim": case["dim"], "rows": rows, "slots": slots}
    dtype, tiles, errors = jnp.dtype(case["dtype"]), _tiles(case["kernel"], case), {}
    for kernel in kernels:
        errors |= gpu_checks.KERNELS[kernel](shape, dtype, tiles)
    wrong = {
        name: size
        for name, size in errors.items()
        if not size <= gpu_checks.TOLERANCE[case["dtype"]]
    }
    if wrong:
        raise ValueError(f"WRONG: {wrong}")
    return {"largest": max(errors.values()), "errors": errors}

"""How device work is timed: many calls chained in one program, over arrays that no cache of the device can hold.

A dispatch from Python costs more than a small kernel, so one call by itself says nothing. The same array, again and
again, is read from the L2 cache (60 MB on an H200), so calls rotate through several.
Each call takes what the one before it gave: they cannot run side by side. What a loop costs that does nothing is taken
off.
"""

import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

# A CPU interprets the kernels, once each: its times mean nothing.
INTERPRET = jax.default_backend() == "cpu"
MIB = 2**20
# Arrays together, where calls rotate: more than twice an H200's L2 cache.
ROTATED = 160 * MIB
# Of one timed program: a dispatch, about 0.1 ms, is then below half a per cent, and taken off besides.
SECONDS = 0.04
REPEATS = 7


def median(seconds):
    """Figures of some times."""
    return {"seconds": statistics.median(seconds), "range": [min(seconds), max(seconds)]}


def timed(call, repeats=REPEATS):
    """Seconds of each of some calls, after one that compiles and warms up."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - begin)
    return seconds


@partial(jax.jit, static_argnames="count")
def _empty(carry, count):
    return lax.fori_loop(0, count, lambda _, c: lax.optimization_barrier(c), carry)


def chained(step, carry, pools, *, estimate, each=1):
    """Seconds of a call in a chain of them, in one program: median, least and most, and what was taken off.

    Args:
        step: of what the call before gave and one of the pools; gives the same shapes again.
        carry: what the first call takes.
        pools: what calls rotate through, each a tree of arrays.
        estimate: seconds of a call, roughly, by which the number of calls goes.
        each: calls that a step makes, where it goes through all that it writes and nothing is rotated.
    """
    calls, repeats = each * len(pools), 1 if INTERPRET else REPEATS
    rounds = 1 if INTERPRET else max(2, min(2000, round(SECONDS / (estimate * calls))))

    @jax.jit
    def run(carry, pools):
        def body(_, carry):
            for pool in pools:
                carry = step(carry, pool)
            return carry

        return lax.fori_loop(0, rounds, body, carry)

    # A CPU's single round takes less than what is to be taken off.
    empty = lambda: _empty(carry, rounds)  # noqa: E731
    nothing = 0.0 if INTERPRET else statistics.median(timed(empty, repeats))
    seconds = timed(lambda: run(carry, pools), repeats)
    figures = median([(each - nothing) / (rounds * calls) for each in seconds])
    return figures | {
        "calls": rounds * calls,
        "pools": calls,
        "loop_seconds": nothing / (rounds * calls),
    }


def rotation(nbytes):
    """How many arrays of a size calls must rotate through."""
    return 2 if INTERPRET else max(1, -(-ROTATED // nbytes))


@partial(jax.jit, static_argnames=("shape", "dtype", "scale"))
def _normal(key, shape, dtype, scale):
    return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def random(key, shape, dtype, *, scale=1.0):
    """Normal values made on the device, the same for the same number."""
    return _normal(jax.random.key(key), tuple(shape), jnp.dtype(dtype), scale)

"""The Mosaic GPU kernel under JAX's simulator: `tests/test_kernels_mosaic.py` starts it, a test's case per line out.

A process of its own, because the simulator runs Python in a thread per warpgroup: under pytest those of JAX 0.11 and
0.12 stand still, and with eight devices that of 0.10 once ended the process that ran it.
"""

import contextlib
import functools
import io
import json
import threading
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import oracles as o
from test_kernels import DTYPES, draw, wide

from pallas_kernels import mosaic

TILES = mosaic.HopperTiles(queries=16, keys=16, stages=2)
# Two unequal prompts of no multiple of a block: more blocks of keys than the ring holds, and a tile of padding. Then
# the last queries alone, some before the beginning, some past the end, and a sequence of no tokens.
CASES = {
    "whole-64-bfloat16": dict(
        dim=64,
        dtype="bfloat16",
        group=2,
        queries=40,
        slots=40,
        first=[0, 0],
        length=[39, 20],
    ),
    "offset-128-float16": dict(
        dim=128,
        dtype="float16",
        group=1,
        queries=9,
        slots=50,
        first=[41, -3, 20, 0],
        length=[50, 5, 24, 0],
    ),
}


def compiled_once():
    """Lets the simulator compile a kernel once; by itself it does for every warpgroup and every program of the grid."""
    lock, programs = threading.Lock(), {}

    def run(jaxpr, consts, *args):
        with lock:
            if id(jaxpr) not in programs:
                jitted = jax.jit(functools.partial(jax.core.eval_jaxpr, jaxpr))
                programs[id(jaxpr)] = jaxpr, jitted.lower(consts, *args).compile()
        programs[id(jaxpr)][1](consts, *args)

    return mock.patch("jax._src.pallas.mosaic.interpret.thread_map._run_jaxpr", run)


def simulate(*, dim, dtype, group, queries, slots, first, length):
    """Queries first .. first + T of each sequence, two kv heads, held against loops in float64: dtypes, races."""
    kind, tolerance = DTYPES[dtype]
    batch, heads = len(first), 2
    rows = (batch, heads, slots, dim)
    q, k, v = draw(dim, (batch, heads, group, queries, dim), rows, rows, dtype=kind)
    at = (jnp.asarray(first, jnp.int32), jnp.asarray(length, jnp.int32))
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        out, lse = jax.block_until_ready(mosaic.flash(q, k, v, *at, tiles=TILES, interpret=True))
    for b, tokens in enumerate(length):
        positions = [p if p < tokens else -1 for p in range(first[b], first[b] + queries)]
        folded = wide(q[b]).reshape(heads * group, queries, dim)
        theirs = o.attend_rows(folded, wide(k[b]), wide(v[b]), [range(tokens)] * heads, positions)
        for ours, want in zip((out[b], lse[b]), theirs, strict=True):
            np.testing.assert_allclose(
                wide(ours), want.reshape(ours.shape), rtol=tolerance * 4, atol=tolerance * 4
            )
    # JAX before 0.11 says that warpgroups race, later ones raise.
    return {"dtypes": [out.dtype.name, lse.dtype.name], "race": "RACE" in said.getvalue()}


if __name__ == "__main__":
    for name, case in CASES.items():
        try:
            with compiled_once():
                found = simulate(**case)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"case": name, **found}), flush=True)

"""The Mosaic GPU kernel, simulated: its warpgroups, barriers, copies and masks, against plain loops in float64."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import oracles as o
import pytest
from test_kernels import DTYPES, draw, wide

from jaxkv.attention import Implementation, backend_of
from jaxkv.pallas_kernels import mosaic

# Under pytest the simulators of JAX 0.11 and 0.12 stand still; in a script of its own the kernel passes in both.
simulated = pytest.mark.skipif(
    jax.__version_info__ >= (0, 11),
    reason="the simulator of JAX 0.11 and later hangs under pytest; the lock, and so CI, has 0.10",
)
TILES = mosaic.HopperTiles(queries=16, keys=16, stages=2)


@pytest.fixture(autouse=True)
def _compiled_once(monkeypatch):
    """The simulator compiles a kernel anew for every warpgroup and every program of the grid: here once."""
    lock, programs = threading.Lock(), {}

    def run(jaxpr, consts, *args):
        with lock:
            if id(jaxpr) not in programs:
                jitted = jax.jit(functools.partial(jax.core.eval_jaxpr, jaxpr))
                programs[id(jaxpr)] = jaxpr, jitted.lower(consts, *args).compile()
        programs[id(jaxpr)][1](consts, *args)

    monkeypatch.setattr("jax._src.pallas.mosaic.interpret.thread_map._run_jaxpr", run)


def check(capsys, dim, dtype, *, group, queries, slots, first, length):
    """Queries first .. first + T of each sequence, two kv heads."""
    kind, tolerance = DTYPES[dtype]
    batch, heads = len(first), 2
    rows = (batch, heads, slots, dim)
    q, k, v = draw(dim, (batch, heads, group, queries, dim), rows, rows, dtype=kind)
    at = (jnp.asarray(first, jnp.int32), jnp.asarray(length, jnp.int32))
    out, lse = mosaic.flash(q, k, v, *at, tiles=TILES, interpret=True)
    assert out.dtype == kind and lse.dtype == jnp.float32
    # JAX before 0.11 says that warpgroups race, later ones raise.
    assert "RACE" not in capsys.readouterr().out
    for b, tokens in enumerate(length):
        positions = [p if p < tokens else -1 for p in range(first[b], first[b] + queries)]
        folded = wide(q[b]).reshape(heads * group, queries, dim)
        theirs = o.attend_rows(folded, wide(k[b]), wide(v[b]), [range(tokens)] * heads, positions)
        for ours, want in zip((out[b], lse[b]), theirs, strict=True):
            np.testing.assert_allclose(wide(ours), want.reshape(ours.shape), rtol=tolerance * 4, atol=tolerance * 4)


@simulated
@pytest.mark.parametrize(("dim", "dtype", "group"), [(64, "bfloat16", 2), (128, "float16", 1)])
def test_whole_prompts(capsys, dim, dtype, group):
    """Two unequal prompts of no multiple of a block: more blocks of keys than the ring holds, and a tile of padding."""
    check(capsys, dim, dtype, group=group, queries=40, slots=40, first=[0, 0], length=[39, 20])


@simulated
def test_an_offset(capsys):
    """The last queries alone, some before the beginning, some past the end, and a sequence of no tokens."""
    check(capsys, 64, "float16", group=1, queries=9, slots=50, first=[41, -3, 20, 0], length=[50, 5, 24, 0])


def test_refused(monkeypatch):
    """What the kernel does not take is refused by name."""
    q, k = draw(0, (1, 1, 1, 16, 64), (1, 1, 16, 64))
    at = jnp.zeros((1,), jnp.int32)
    with pytest.raises(ValueError, match="float32"):
        mosaic.flash(q, k, k, at, at)
    q, k = draw(0, (1, 1, 1, 16, 96), (1, 1, 16, 96), dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="head dim is 96"):
        mosaic.flash(q, k, k, at, at)
    monkeypatch.setattr("jaxkv.pallas_kernels._compat_mosaic.cuda_version", lambda: 12090)
    q, k = draw(0, (1, 1, 1, 16, 64), (1, 1, 16, 64), dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match=r"CUDA is 12\.9"):
        mosaic.flash(q, k, k, at, at)


@pytest.mark.parametrize("dtype", mosaic.DTYPES)
@pytest.mark.parametrize("dim", mosaic.DIMS)
def test_lowers_for_a_gpu(dim, dtype):
    """As far as a machine without a GPU's compiler goes: products on tensor cores, copies by the TMA."""
    of = jax.ShapeDtypeStruct
    q, k = of((2, 2, 3, 300, dim), jnp.dtype(dtype)), of((2, 2, 300, dim), jnp.dtype(dtype))
    at = of((2,), jnp.int32)
    text = mosaic.flash.trace(q, k, k, at, at).lower(lowering_platforms=("cuda",)).as_text()
    assert "@mosaic_gpu" in text and "wgmma" in text and "tma" in text


def test_behind_the_door():
    """Prompts go to Mosaic, what each key receives to Triton, by Mosaic's log-sum-exp."""
    of = jax.ShapeDtypeStruct
    shapes = of((2, 2, 2, 128, 64), jnp.bfloat16), *[of((2, 2, 128, 64), jnp.bfloat16)] * 2, of((2,), jnp.int32)
    backend = backend_of(Implementation.MOSAIC)

    def run(q, k, v, length, *, sums):
        out, lse = backend.prefill(q, k, v, length, lse=sums)
        return (out, backend.column_sums(q, k, lse, length)) if sums else out

    for sums in (False, True):
        program = jax.jit(functools.partial(run, sums=sums))
        text = program.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
        assert "@mosaic_gpu" in text and ("column_sums" in text) == sums

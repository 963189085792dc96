"""The Mosaic GPU kernel, simulated: its warpgroups, barriers, copies and masks, against plain loops in float64."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from simulated_mosaic import CASES
from test_kernels import draw

from jaxkv.attention import Implementation, get_attention_backend
from pallas_kernels import mosaic

ROOT = Path(__file__).parent
# The simulator's threads once ended their process (a segmentation fault in JAX, seen in CI): it may try again.
_TRIES = 3


@pytest.fixture(scope="module")
def simulated():
    """What each case of the simulation came to."""
    path = os.pathsep.join([str(ROOT.parent), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "XLA_FLAGS": ""}
    command = [sys.executable, str(ROOT / "simulated_mosaic.py")]
    for _ in range(_TRIES):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        if done.returncode >= 0:
            break
    assert done.returncode == 0, done.stderr
    return {found.pop("case"): found for found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("case", CASES)
def test_simulated(simulated, case):
    """Warpgroups, barriers, copies and masks give what plain loops in float64 give, and no warpgroup races another."""
    assert simulated[case] == {"dtypes": [CASES[case]["dtype"], "float32"], "race": False}


def test_refused(monkeypatch):
    """What the kernel does not take is rejected by name."""
    q, k = draw(0, (1, 1, 1, 16, 64), (1, 1, 16, 64))
    at = jnp.zeros((1,), jnp.int32)
    with pytest.raises(ValueError, match="float32"):
        mosaic.flash(q, k, k, at, at)
    q, k = draw(0, (1, 1, 1, 16, 96), (1, 1, 16, 96), dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="head dim is 96"):
        mosaic.flash(q, k, k, at, at)
    monkeypatch.setattr("pallas_kernels._compat_mosaic.cuda_version", lambda: 12090)
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
    shapes = (
        of((2, 2, 2, 128, 64), jnp.bfloat16),
        *[of((2, 2, 128, 64), jnp.bfloat16)] * 2,
        of((2,), jnp.int32),
    )
    backend = get_attention_backend(Implementation.MOSAIC)

    def run(q, k, v, length, *, sums):
        out, lse = backend.compute_prefill_attention(q, k, v, length, lse=sums)
        return (out, backend.sum_attention_per_key(q, k, lse, length)) if sums else out

    for sums in (False, True):
        program = jax.jit(functools.partial(run, sums=sums))
        text = program.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
        assert "@mosaic_gpu" in text and ("column_sums" in text) == sums

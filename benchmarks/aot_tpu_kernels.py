"""Rows of the table of TPU kernels: each compiled by itself for devices that are not there; what all rows compile by.

`aot_tpu` writes the table.
"""

import functools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import perf_tpu
import tpu_llo
from jax.experimental import topologies

from jaxkv.pallas_kernels.tpu import decode as tpu_decode
from jaxkv.pallas_kernels.tpu import prefill as tpu_prefill
from jaxkv.planning.tpus import tpus

# Where libtpu dumps what it compiles; removed when this process ends.
DUMPS = tempfile.TemporaryDirectory(prefix="aot_tpu_")
os.environ.setdefault("LIBTPU_INIT_ARGS", tpu_llo.arguments(Path(DUMPS.name)))
# Batch, kv heads, group, head dim, pool rows.
KERNELS = [
    (8, 8, 4, 128, 10240),
    (4, 32, 1, 128, 40960),
    (1, 8, 11, 128, 262144),
    (2, 8, 4, 256, 65536),
]


class Row(NamedTuple):
    """A row of a table: its cells, and what is wrong with it, if something is."""

    cells: list[str]
    wrong: str | None = None


class Mesh(NamedTuple):
    """An abstract TPU: its mesh of one device, and the sharding on it."""

    mesh: jax.sharding.Mesh
    sharding: jax.sharding.NamedSharding


def mesh_of(device: str) -> Mesh:
    """`Mesh` of one device of a kind."""
    found = topologies.get_topology_desc(platform="tpu", topology_name=tpus()[device].slice_of(1))
    mesh = jax.sharding.Mesh(np.asarray(found.devices[:1]), ("x",))
    return Mesh(mesh, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))


def compiled(traced: Any, options: dict[str, str] | None = None) -> tuple[Any, str, float]:
    """Compiles a traced program for TPUs; returns the compiler's bytes, the HLO text, and seconds."""
    began = time.perf_counter()
    made = traced.lower(lowering_platforms=("tpu",)).compile(compiler_options=options)
    return made.memory_analysis(), made.as_text(), time.perf_counter() - began


def decode_row(device: str, shape: tuple[int, ...], *, coded: bool = False) -> Row:
    """Row of the kernels' table: the decode kernel of a shape on a device, of bfloat16 or codes."""
    where, (batch, heads, group, dim, rows) = mesh_of(device), shape

    def of(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=where.sharding)

    def rows_of(*sizes: int) -> Any:
        return (
            (of(*sizes, dtype=jnp.int8), of(*sizes[:-1], dtype=jnp.float16))
            if coded
            else of(*sizes)
        )

    new, pool = (rows_of(batch, heads, dim),) * 2, (rows_of(batch, rows, dim),) * 2
    tables = (
        of(batch, heads, dtype=jnp.int32),
        of(batch, heads, dtype=jnp.int32),
        of(batch, dtype=jnp.int32),
    )
    with jax.sharding.use_abstract_mesh(where.mesh.abstract_mesh):
        run = jax.jit(tpu_decode.append_and_attend, donate_argnums=(2, 3))
        memory, _, seconds = compiled(run.trace(of(batch, heads, group, dim), new, *pool, *tables))
    size = sum(each.size * each.dtype.itemsize for each in jax.tree.leaves(pool))
    share = f"{min(1, memory.alias_size_in_bytes / size):.0%}"
    name, temporaries = "decode" + ", 8 bits" * coded, f"{memory.temp_size_in_bytes / 1e6:.2f}"
    wrong = None if share == "100%" else f"{share} of the pools are updated in place"
    return Row([name, device, str(shape), f"{seconds:.1f}", share, temporaries], wrong)


def splash_row(device: str, dim: int) -> Row:
    """Row of the kernels' table: splash attention of a prompt of 4,096 tokens, with log-sum-exp."""
    where = mesh_of(device)
    q, k = (
        jax.ShapeDtypeStruct((1, 8, *group, 4096, dim), jnp.bfloat16, sharding=where.sharding)
        for group in ((4,), ())
    )
    with jax.sharding.use_abstract_mesh(where.mesh.abstract_mesh):
        run = jax.jit(lambda q, k, v: tpu_prefill.flash(q, k, v, lse=True))
        memory, _, seconds = compiled(run.trace(q, k, k))
    shape = str((1, 8, 4, dim, 4096))
    return Row(
        ["splash", device, shape, f"{seconds:.1f}", "-", f"{memory.temp_size_in_bytes / 1e6:.2f}"]
    )


def with_spills(call: Callable[[], Row]) -> Row:
    """Row of a call and a cell more: instructions with spilled vectors in the kernels that it compiled."""
    # Rows without this cell have left their dumps.
    tpu_llo.spills(Path(DUMPS.name))
    made = call()
    found = tpu_llo.spills(Path(DUMPS.name))
    ours = [
        f"{kernel} spills vectors, {count} times"
        for kernel, count in found.items()
        if count and "tpu_" in kernel
    ]
    return Row([*made.cells, str(found.total())], made.wrong or ", ".join(ours) or None)


def kernel_rows() -> dict[str, Callable[[], Row]]:
    """Dict from the names of the table's rows to calls that compile them."""
    device = perf_tpu.DEVICE
    known = [(kind, KERNELS[0]) for kind in tpus()] + [(device, shape) for shape in KERNELS[1:]]
    kernels = {
        f"decode {kind} {shape}": functools.partial(decode_row, kind, shape)
        for kind, shape in known
    }
    coded = functools.partial(decode_row, coded=True)
    kernels |= {
        f"decode int8 {kind} {shape}": functools.partial(coded, kind, shape)
        for kind, shape in known
    }
    splash = [(kind, 128) for kind in tpus()] + [(device, dim) for dim in (64, 80, 96, 256)]
    kernels |= {
        f"splash {kind} {dim}": functools.partial(splash_row, kind, dim) for kind, dim in splash
    }
    return {name: functools.partial(with_spills, call) for name, call in kernels.items()}

"""Compiles the TPU kernels and an 8B model's programs for TPUs that are not there; writes what libtpu says of them.

`make aot-tpu` runs it, in an environment with libtpu. It needs no TPU, and nothing runs on one: bytes are the
compiler's, times are estimates by `perf_tpu`. It ends with 1 if a pool is not updated in place, or is copied where a
kernel writes it.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp
import numpy as np
import perf_tpu
import shapes
from jax.experimental import topologies

import jaxkv
from jaxkv.attention import Implementation
from jaxkv.pallas_kernels import tpu_decode, tpu_prefill
from jaxkv.planning import hlo
from jaxkv.planning.programs import Work, abstract_model, prefill_calls, traced_loop
from jaxkv.planning.tpus import tpus

# Batch, kv heads, group, head dim, pool rows.
KERNELS = [(8, 8, 4, 128, 10240), (4, 32, 1, 128, 40960), (1, 8, 11, 128, 262144), (2, 8, 4, 256, 65536)]
FEW = 4


class Loop(NamedTuple):
    """A decode loop to compile: policy, sequences, tokens of each prompt, layers, and the implementation."""

    policy: Any
    batch: int = 8
    tokens: int = 32768
    layers: int = 32
    implementation: Implementation = Implementation.TPU


LOOPS = {
    "FullKV, prompts of 1,024": Loop(jaxkv.FullKV(), tokens=1024),
    "SnapKV, by XLA": Loop(jaxkv.SnapKV(budget=1024), implementation=Implementation.XLA),
    "SnapKV": Loop(jaxkv.SnapKV(budget=1024)),
    "AdaKV": Loop(jaxkv.AdaKV(budget=1024)),
    "H2O": Loop(jaxkv.H2O(budget=1024)),
    "OmniKV, prompts of 4,096": Loop(jaxkv.OmniKV(budget=1024, filter_layers=(2, 8, 18)), tokens=4096),
    "D2O, 4 layers": Loop(jaxkv.D2O(budget=1024), layers=FEW),
}
LAYERS = {"by XLA": Implementation.XLA, "tpu": Implementation.TPU}


class Mesh(NamedTuple):
    """An abstract TPU: its mesh of one device, and the sharding on it."""

    mesh: jax.sharding.Mesh
    sharding: jax.sharding.NamedSharding


def mesh_of(device: str) -> Mesh:
    """`Mesh` of one device of a kind."""
    found = topologies.get_topology_desc(platform="tpu", topology_name=tpus()[device].slice_of(1))
    mesh = jax.sharding.Mesh(np.asarray(found.devices[:1]), ("x",))
    return Mesh(mesh, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))


def compiled(traced: Any) -> tuple[Any, str, float]:
    """Compiles a traced program for TPUs; returns the compiler's bytes, the HLO text, and seconds."""
    began = time.perf_counter()
    made = traced.lower(lowering_platforms=("tpu",)).compile()
    return made.memory_analysis(), made.as_text(), time.perf_counter() - began


def decode_row(device: str, shape: tuple[int, ...]) -> list[str]:
    """Row of the kernels' table: the decode kernel of a shape, in bfloat16, on a device."""
    where, (batch, heads, group, dim, rows) = mesh_of(device), shape

    def of(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=where.sharding)

    new, pool = (of(batch, heads, dim),) * 2, (of(batch, rows, dim),) * 2
    tables = of(batch, heads, dtype=jnp.int32), of(batch, heads, dtype=jnp.int32), of(batch, dtype=jnp.int32)
    with jax.sharding.use_abstract_mesh(where.mesh.abstract_mesh):
        run = jax.jit(tpu_decode.append_and_attend, donate_argnums=(2, 3))
        memory, _, seconds = compiled(run.trace(of(batch, heads, group, dim), new, *pool, *tables))
    size = 2 * batch * rows * dim * 2
    return [
        "decode",
        device,
        str(shape),
        f"{seconds:.1f}",
        f"{min(1, memory.alias_size_in_bytes / size):.0%}",
        f"{memory.temp_size_in_bytes / 1e6:.2f}",
    ]


def splash_row(device: str, dim: int) -> list[str]:
    """Row of the kernels' table: splash attention of a prompt of 4,096 tokens, with log-sum-exp."""
    where = mesh_of(device)
    q, k = (
        jax.ShapeDtypeStruct((1, 8, *group, 4096, dim), jnp.bfloat16, sharding=where.sharding) for group in ((4,), ())
    )
    with jax.sharding.use_abstract_mesh(where.mesh.abstract_mesh):
        run = jax.jit(lambda q, k, v: tpu_prefill.flash(q, k, v, lse=True))
        memory, _, seconds = compiled(run.trace(q, k, k))
    return [
        "splash",
        device,
        str((1, 8, 4, dim, 4096)),
        f"{seconds:.1f}",
        "-",
        f"{memory.temp_size_in_bytes / 1e6:.2f}",
    ]


def work_of(loop: Loop, where: Mesh) -> Work:
    """`Work` of Llama 3 8B in bfloat16 for a loop."""
    flat = abstract_model(shapes.llama_3_8b(loop.layers), "bfloat16")
    given = {"batch": loop.batch, "tokens": loop.tokens, "new": 256, "implementation": loop.implementation}
    return Work(flat=flat, policy=loop.policy, sharding=where.sharding, **given)


def loop_row(name: str, loop: Loop) -> tuple[list[str], str | None]:
    """Row of the decode loops' table, and what is wrong with the loop, or None."""
    where = mesh_of(perf_tpu.DEVICE)
    with jax.sharding.use_abstract_mesh(where.mesh.abstract_mesh):
        work = work_of(loop, where)
        traced, pools = traced_loop(work)
        memory, text, seconds = compiled(traced)
    leaves = jax.tree.leaves(pools)
    arrays = [(hlo.NAMES[leaf.dtype.name], tuple(leaf.shape)) for leaf in leaves]
    size = sum(hlo.size_of(*each) for each in arrays)
    rows = {each for each in arrays if len(each[1]) == 3}
    copies, kernels = hlo.copies(text, rows), text.count('custom_call_target="tpu_custom_call"')
    found, inner = perf_tpu.step(text)
    config = work.flat.config
    row_bytes = 2 * config.head_dim * 2
    held = sum(pool.k.shape[1] for pool in pools) // (config.kv_heads * config.layers)
    each = perf_tpu.decode_kernel(loop.batch * config.kv_heads, held, row_bytes)
    moved = copies * max(hlo.size_of(*one) for one in rows) / tpus()[perf_tpu.DEVICE].bandwidth
    xla = found / perf_tpu.CLOCK + moved
    weights = memory.argument_size_in_bytes - size - 2 * config.vocab * config.embed
    read = loop.batch * config.kv_heads * held * row_bytes * config.layers
    ideal = (weights + read) / tpus()[perf_tpu.DEVICE].bandwidth
    share = hlo.aliased(text) / size
    # Kernels that read chosen rows alone, and loops whose trips depend on data, are no part of the model.
    known = kernels in (0, config.layers) and None not in inner
    row = [
        name,
        f"{seconds:.0f}",
        f"{size / 1e9:.3f}",
        f"{share:.0%}",
        f"{memory.temp_size_in_bytes / 1e6:.0f}",
        f"{memory.temp_size_in_bytes / size:.1%}",
        str(copies),
        f"{len(inner)}",
        f"{found / 1e6:.2f}",
        str(kernels),
        f"{1e3 * (xla + kernels * each):.2f}" if known else "-",
        f"{1e3 * ideal:.2f}",
    ]
    wrong = None
    if share < 1:
        wrong = f"{name}: {share:.0%} of the pools are updated in place"
    elif kernels == config.layers and copies:
        wrong = f"{name}: {copies} copies of pools that a kernel writes"
    return row, wrong


def layer_row(name: str, implementation: Implementation, tokens: int = 32768) -> list[str]:
    """Row of the prefill's table: one of Llama 3 8B's layers over a prompt under SnapKV."""
    where = mesh_of(perf_tpu.DEVICE)
    with jax.sharding.use_abstract_mesh(where.mesh.abstract_mesh):
        asked = Loop(jaxkv.SnapKV(budget=1024), batch=1, tokens=tokens, layers=3, implementation=implementation)
        work = work_of(asked, where)
        call = next(each for each in prefill_calls(work) if each.name == "layer")
        memory, text, seconds = compiled(call.traced)
    found, config = perf_tpu.cycles(text), work.flat.config
    kernels = text.count('custom_call_target="tpu_custom_call"')
    total = found / perf_tpu.CLOCK + kernels * perf_tpu.splash(1, config.heads, tokens, config.head_dim)
    matrices = 2 * config.heads * config.head_dim + 2 * config.kv_heads * config.head_dim + 3 * config.hidden
    flops = 2 * tokens * config.embed * matrices + 2 * config.heads * config.head_dim * tokens**2
    share = flops / total / tpus()[perf_tpu.DEVICE].products
    # By XLA blocks are as many as a prompt fills: an estimate has to know their number.
    times = [f"{1e3 * total:.0f}", f"{32 * total:.1f}", f"{share:.0%}"]
    return [
        name,
        f"{seconds:.0f}",
        f"{memory.temp_size_in_bytes / 1e9:.3f}",
        f"{found / 1e6:.0f}",
        str(kernels),
        *(times if perf_tpu.countable(text) else ["-"] * len(times)),
    ]


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return ["| " + " | ".join(each) + " |" for each in (head, ["---"] * len(head), *rows)]


def report(kernels: list[list[str]], layers: list[list[str]], loops: list[list[str]]) -> str:
    """The Markdown page: how it was made, and the tables."""
    rules, device = (perf_tpu.__doc__ or "").split("Rules:\n", 1)[1].rstrip(), perf_tpu.DEVICE
    lines = [
        "# TPUs, by their compiler and a model",
        "",
        f"Compiled by libtpu of jax {jax.__version__} (`make aot-tpu`) on a machine without a TPU. **Nothing here",
        "ran on a TPU**: bytes are the compiler's, times are estimates, by these rules (`benchmarks/perf_tpu.py`):",
        "",
        rules,
        "",
        "## Kernels",
        "",
        "Shapes: batch, kv heads, group, head dim, rows of the pool or tokens of the prompt; bfloat16.",
        "",
    ]
    head = ["kernel", "device", "shape", "compiled, s", "pools in place", "temporaries, MB"]
    lines += table(head, kernels)
    lines += ["", "## A layer of a prompt of 32,768 tokens", "", f"Llama 3 8B, bfloat16, one {device}.", ""]
    head = ["implementation", "compiled, s", "temporaries, GB", "million cycles of XLA's", "kernels", "ms, estimate"]
    lines += table([*head, "s of 32 layers, estimate", "of peak FLOP/s, estimate"], layers)
    lines += [
        "",
        "## Decode loops of 8 sequences",
        "",
        f"Llama 3 8B, bfloat16, one {device}; 32 layers, budget 1,024 and prompts of 32,768 tokens if nothing else is",
        "said. The ideal reads weights and rows once, at the data sheet's bandwidth. There is no estimate (-) where",
        "kernels read chosen rows alone, or where loops run as often as data say: their cycles count once.",
        "",
    ]
    head = ["policy", "compiled, s", "pools, GB", "in place", "temporaries, MB", "of the pools", "copies of rows"]
    head += ["loops in a step", "million cycles of XLA's", "kernels", "ms a step, estimate", "ideal, ms"]
    return "\n".join([*lines, *table(head, loops), ""])


def main() -> int:
    """Compiles everything, prints or writes the tables; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the tables there, as Markdown")
    parser.add_argument("--quick", action="store_true", help="the kernels, and one loop of few layers")
    asked = parser.parse_args()
    kernels = [decode_row(device, KERNELS[0]) for device in tpus()]
    kernels += [decode_row(perf_tpu.DEVICE, shape) for shape in KERNELS[1:]]
    kernels += [splash_row(device, 128) for device in tpus()]
    kernels += [splash_row(perf_tpu.DEVICE, dim) for dim in (64, 80, 96, 256)]
    layers = [] if asked.quick else [layer_row(name, each) for name, each in LAYERS.items()]
    chosen = {"SnapKV, 4 layers": LOOPS["SnapKV"]._replace(layers=FEW)} if asked.quick else LOOPS
    loops, wrong = [], [" ".join(row) for row in kernels if row[0] == "decode" and row[4] != "100%"]
    for name, loop in chosen.items():
        row, found = loop_row(name, loop)
        loops.append(row)
        wrong += [found] if found else []
        print("\t".join(row), file=sys.stderr)
    text = report(kernels, layers, loops)
    if asked.out is None:
        print(text)
    else:
        asked.out.write_text(text, "utf-8")
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

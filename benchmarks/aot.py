"""Compiles the kernels, and whole programs around them, for GPUs that are not there; reads what ptxas says.

    make aot          every kernel, dtype and model for H100, H200 and A100; the decode step and prefill of Llama 3 8B
    make aot-quick    one dtype and head dim per kernel for H100: what CI runs

It fails where a kernel asks for more shared memory than the device has (XLA refuses to compile it), where it spills
registers, where a decode step copies a pool, and where its temporary memory
passes 2% of the pools' bytes. Needs its own environment (.venv-aot): see the Makefile.
"""

import argparse
import concurrent.futures
import dataclasses
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from aot_cases import arguments

DEVICES = ("h100", "h200", "a100")
KERNELS = (
    "decode_token",
    "decode_token_scored",
    "decode_token_picked",
    "decode_token_int8",
    "decode_token_int4",
    "decode_token_mixed",
    "attend",
    "attend_question",
    "compact",
    "add_norm",
    "multiply_codes_8",
    "multiply_codes_4",
    "replace_rows",
    "evict_rows",
    "flash",
    "flash_window",
    "column_sums",
    "window_sums",
)
DTYPES = ("bfloat16", "float16", "float32")
# Mosaic GPU's, for Hopper: one model for each head dim that they take, and what their code must have.
MOSAIC = ("flash_mosaic",)
MOSAIC_MODELS, MOSAIC_DTYPES = ("Llama-3-8B", "SmolLM2-135M"), ("bfloat16", "float16")
INSTRUCTIONS = {"wgmma": "wgmma.mma_async", "TMA": "cp.async.bulk.tensor"}
TEMP_SHARE = 0.02


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel, at one model's shape, for one device."""

    kernel: str
    model: str
    dtype: str
    device: str


def _start(folder, text="false"):
    """Prepares a worker process: its own dump folder, named before JAX starts; with HLO and thunks as text if asked."""
    dump = tempfile.mkdtemp(dir=folder)
    os.environ["JAXKV_DUMP"] = dump
    # From JAX 0.11 on PTX is left only on demand.
    os.environ["XLA_FLAGS"] = (
        f"--xla_dump_to={dump} --xla_dump_hlo_as_text={text} --xla_dump_emitter_re=ptx"
    )
    # Mosaic GPU has a compiler of its own beside XLA's.
    os.environ |= {"MOSAIC_GPU_DUMP_TO": dump, "MOSAIC_GPU_DUMP_PTX": "1"}
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    # XLA and JAX say at length that there is no GPU, which is the point here.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def gpu(device):
    """What is known of a device; imported late, for workers set their environment before JAX starts."""
    from jaxkv.planning.named import accelerator_named

    return accelerator_named(device)


def sharding_for(device):
    """A sharding on one abstract device."""
    import jax
    import numpy as np
    from jax.experimental import topologies

    known = {"platform": "cuda", "topology_name": device, "target_config": gpu(device).target}
    topology = topologies.get_topology_desc(**known, topology="1x1x1")
    mesh = jax.sharding.Mesh(np.asarray(topology.devices[:1]), ("x",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def compile_for(device, function, *shapes, donate=()):
    """Compiles a function of abstract arrays for a device."""
    import jax

    sharding = sharding_for(device)
    placed = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes
    )
    # From JAX 0.11 on, kernels are lowered for the device of the mesh at hand; without one they ask for a GPU.
    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
        traced = jax.jit(function, donate_argnums=donate).trace(*placed)
        return traced.lower(lowering_platforms=("cuda",)).compile()


def ptxas_report(device, dump):
    """Registers, static shared memory, spills and Hopper's instructions of every kernel in the PTX that was dumped."""
    from benchmarks.ptxas import kernels

    rows = []
    for each in kernels(dump, gpu(device).architecture, _ptxas()):
        text = Path(each.path).read_text()
        row = {
            "name": each.name,
            "spills": each.spills,
            "registers": each.registers,
            "shared": each.shared,
        }
        rows.append(row | {name: text.count(code) for name, code in INSTRUCTIONS.items()})
    return rows


def _ptxas():
    from benchmarks.ptxas import ptxas

    if not (found := ptxas()):
        raise SystemExit(
            "ptxas is missing: pip install nvidia-cuda-nvcc, or put a CUDA toolkit on the path"
        )
    return found


def run_case(case):
    """Compiles one case; returns its rows of ptxas' report, or an error."""
    dump = os.environ["JAXKV_DUMP"]
    shutil.rmtree(dump)
    Path(dump).mkdir()
    try:
        function, shapes = arguments(case)
        compile_for(case.device, function, *shapes)
        kernels = (
            "ragged_decode",
            "ragged_mass",
            "compact",
            "add_norm",
            "multiply_codes",
            "replace_rows",
            "evict_rows",
            "flash_prefill",
            "column_sums",
            "window",
        )
        rows = [row for row in ptxas_report(case.device, dump) if row["name"].startswith(kernels)]
        return case, rows, None if rows else "no kernel in the program"
    except Exception as error:  # One case's failure is a line of the table.
        return case, [], f"{type(error).__name__}: {str(error)[:300]}"


def whole_programs(device):
    """Compiles Llama 3 8B's decode step and one prefill layer; returns lines and faults."""
    import jax
    import jax.numpy as jnp
    import shapes

    from jaxkv.attention import Implementation
    from jaxkv.engine.decode import step
    from jaxkv.engine.plan import plan_prefill
    from jaxkv.engine.prefill_layer import layer
    from jaxkv.models.rope import angles
    from jaxkv.planning.programs import abstract_model
    from jaxkv.policies import SnapKV
    from jaxkv.policies.scorer import Needs

    config = shapes.llama_3_8b()
    flat = abstract_model(config)
    faults, lines = [], []
    for tokens, batch in ((8192, 8), (131072, 1)):
        rows = config.kv_heads * (tokens + 256)
        given = shapes.abstract_cache(config, batch=batch, rows=rows)
        spec = shapes.spec_of(config, flat)

        def decode(pools, ends, blocks, start, length, seen, token, count, spec=spec):
            cache = shapes.cache_of(pools, start=start, length=length, seen=seen)
            return step(ends, blocks, cache, token, count, spec=spec)[:2]

        one = jax.ShapeDtypeStruct((batch,), jnp.int32)
        token = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
        tables = given.tables
        inputs = (
            given.pools,
            flat.ends,
            flat.blocks,
            tables.start,
            tables.length,
            tables.seen,
            token,
            one,
        )
        compiled = compile_for(device, decode, *inputs, donate=(0,))
        memory = compiled.memory_analysis()
        pools = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(given.pools))
        shape = f"bf16[{batch},{rows},{config.head_dim}]"
        copies = len(re.findall(rf"= {re.escape(shape)}\S* copy\(", compiled.as_text()))
        share = memory.temp_size_in_bytes / pools
        lines.append(
            f"| decode step, {batch} x {tokens} | {pools / 2**30:.2f} GiB | {memory.alias_size_in_bytes / pools:.1%} | "
            f"{copies} | {memory.temp_size_in_bytes / 2**20:.0f} MiB ({share:.2%}) |"
        )
        if copies:
            faults.append(
                f"{device}: the decode step of {batch} x {tokens} copies a pool {copies} times"
            )
        if tokens == 131072 and share >= TEMP_SHARE:
            faults.append(
                f"{device}: temporaries of the decode step at {tokens} tokens are {share:.1%} of the pools"
            )
        if memory.alias_size_in_bytes < pools:
            faults.append(
                f"{device}: the decode step of {batch} x {tokens} does not write every pool in place"
            )
    tokens = 32768
    inputs = (
        jax.ShapeDtypeStruct((1, tokens, config.embed), jnp.bfloat16),
        flat.blocks[0],
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )

    def prefill_layer(x, leaves, length):
        return layer(
            leaves,
            x,
            length,
            angles(jnp.arange(tokens, dtype=jnp.int32)[None], config.rope, config.head_dim),
            graphs=flat.graphs,
            needs=Needs(queries=32),
            last=False,
            implementation=Implementation.PALLAS,
        )

    compiled = compile_for(device, prefill_layer, *inputs, donate=(0,))
    memory = compiled.memory_analysis()
    hidden = tokens * config.embed * 2
    lines.append(
        f"| prefill layer, 1 x {tokens} | hidden states {hidden / 2**30:.2f} GiB | "
        f"{memory.alias_size_in_bytes / hidden:.1%} | - | {memory.temp_size_in_bytes / 2**20:.0f} MiB |"
    )
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(flat.blocks[0]))
    taken = memory.argument_size_in_bytes - weights + memory.temp_size_in_bytes
    taken += memory.output_size_in_bytes - memory.alias_size_in_bytes
    planned = plan_prefill(
        config, SnapKV(), [tokens], dtype=jnp.bfloat16, implementation=Implementation.PALLAS
    )
    # Beside the layer below the top one lie the pools of those below it.
    beside = planned.cache_bytes * (config.layers - 2) // config.layers
    # XLA's allocator rounds each array up.
    if taken + beside > 1.001 * planned.peak_bytes:
        faults.append(
            f"{device}: a prefill layer of {tokens} tokens takes {taken:,} bytes, more than {planned}"
        )
    return lines, faults


def cases(quick, dtypes):
    """What is compiled."""
    import shapes

    if quick:
        return [Case(kernel, "Llama-3-8B", "bfloat16", "h100") for kernel in KERNELS]
    found = (
        (k, m, t, d)
        for d in DEVICES
        for m in shapes.MODELS
        for k in KERNELS
        for t in dtypes
        if takes(k, m.dim)
    )
    return [Case(kernel, heads.name, dtype, device) for kernel, heads, dtype, device in found]


def takes(kernel, dim):
    """True if a kernel reads rows of a head dim, which not all do of rows in codes."""
    from jaxkv.cache.quantised import STORES

    store = STORES.get(kernel.removeprefix("decode_token_"))
    return store is None or store.fused_at(dim)


def mosaic_cases(quick, dtypes):
    """What is compiled of Mosaic GPU's kernels."""
    hopper = [device for device in DEVICES if gpu(device).architecture == "sm_90a"]
    kinds = [(m, t) for m in MOSAIC_MODELS for t in MOSAIC_DTYPES if t in dtypes]
    found = [
        Case(kernel, *kind, device) for device in hopper for kind in kinds for kernel in MOSAIC
    ]
    return found[:1] if quick else found


def executor(folder, **options):
    """Processes that compile."""
    context = multiprocessing.get_context("spawn")
    options |= {
        "max_workers": os.cpu_count(),
        "mp_context": context,
        "initializer": _start,
        "initargs": (folder,),
    }
    return concurrent.futures.ProcessPoolExecutor(**options)


def run_all(pool, folder, quick, dtypes):
    """Runs every case; Mosaic's in a process each, for it compiles what it has compiled before no second time."""
    yield from pool.map(run_case, cases(quick, dtypes), chunksize=4)
    with executor(folder, max_tasks_per_child=1) as fresh:
        yield from fresh.map(run_case, mosaic_cases(quick, dtypes))


def dim_of(model):
    """A model's head dim."""
    import shapes

    return next(heads.dim for heads in shapes.MODELS if heads.name == model)


def main():
    """Compiles everything, prints the tables, exits with 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="one dtype and head dim per kernel, H100 alone"
    )
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--out", type=Path, help="write the tables here as well")
    args = parser.parse_args()
    faults, lines = [], []
    with tempfile.TemporaryDirectory() as folder:
        _start(folder)
        with executor(folder) as pool:
            table = {}
            for case, rows, error in run_all(pool, folder, args.quick, args.dtypes):
                if error:
                    faults.append(f"{case}: {error}")
                for row in rows:
                    key = (row["name"], case.kernel, case.dtype, case.model)
                    table.setdefault(key, {})[case.device] = row
                    if row["spills"]:
                        faults.append(f"{case}: {row['name']} spills {row['spills']} bytes")
                    if case.kernel in MOSAIC and not all(row[name] for name in INSTRUCTIONS):
                        faults.append(
                            f"{case}: {row['name']} lacks one of {', '.join(INSTRUCTIONS)}"
                        )
            devices = ("h100",) if args.quick else DEVICES
            wholes = (
                []
                if args.quick
                else [(device, *pool.submit(whole_programs, device).result()) for device in devices]
            )
    hopper = lambda row: [f"{row[name]} {name}" for name in INSTRUCTIONS if row["TMA"]]  # noqa: E731
    lines.append(
        "| kernel | asked for by | dtype | model (head dim) | " + " | ".join(devices) + " |"
    )
    lines.append("|---|---|---|---|" + "---|" * len(devices))
    for (name, kernel, dtype, model), by_device in table.items():
        show = lambda row: (  # noqa: E731
            ", ".join(
                [
                    f"{row['registers']} reg, {row['shared']} B shared, {row['spills']} B spilled",
                    *hopper(row),
                ]
            )
            if row
            else "-"
        )
        values = " | ".join(show(by_device.get(device)) for device in devices)
        lines.append(f"| {name} | {kernel} | {dtype} | {model} ({dim_of(model)}) | {values} |")
    for device, rows, wrong in wholes:
        lines += [
            "",
            f"Llama 3 8B, bfloat16, {device}:",
            "",
            "| program | pools | written in place | pool copies | temporaries |",
        ]
        lines += ["|---|---|---|---|---|", *rows]
        faults += wrong
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")
    for fault in faults:
        print(f"FAULT {fault}", file=sys.stderr)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()

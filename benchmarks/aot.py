"""Compiles kernels, decode loops and steps of 70B on eight GPUs for devices that are not there, and reads the compiler.

    make aot, make aot-tpu                  every case for an H100 and an A100, and for TPUs
    make aot-quick, make aot-tpu-quick      one case of each kind: what CI runs
    python -m benchmarks.aot --device a100  the cases of one kind of device

It ends with 1 where a kernel is missing or one of jaxkv's spills registers, where a loop copies a pool, does not write
it in place or walks entries one after the other (which eviction may on a TPU), and where keys or values travel between
devices. It needs .venv-aot (GPUs) or .venv-aot-tpu, and none of these devices.
"""

import argparse
import concurrent.futures
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

# Read as JAX is imported: XLA and JAX would say at length that there is no such device, which is the point here.
if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "TPU_SKIP_MDS_QUERY": "1"}
    os.environ |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import jax
import numpy as np
from jax.experimental import topologies

from benchmarks import hlo, ptxas
from benchmarks.aot_cases import Kernel, arguments, cases
from jaxkv.planning.named import find_accelerator
from jaxkv.planning.traced_programs import select_largest_calls, trace_planned_loop
from jaxkv.planning.worker import compile_traced_program, prepare_trace_inputs

# Kernels by the beginnings of their names, which no fusion of XLA's has.
# JAX's splash attention spills on TPUs, and may.
NAMES = ("ragged_", "compact", "add_norm", "multiply_blocks", "multiply_codes")
NAMES += ("replace_rows", "evict_rows", "flash_prefill", "column_sums", "window_", "tpu_", "splash")
# Dtypes as HLO names them.
DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "int32": "s32", "int8": "s8"}
# A TPU kernel's last bundles, and the instructions in them that write or read spilled vectors.
BUNDLES = re.compile(r"\d+-(?P<kernel>[\w.]+?)(\.\d+)?-\d+-final_bundles\.txt")
SPILL = re.compile(r"\[vmem:\[#allocation\d+_spill")


def begin(folder):
    """Prepares a process that compiles: compilers write their code into a folder of its own."""
    dump = os.environ["JAXKV_DUMP"] = tempfile.mkdtemp(dir=folder)
    # From JAX 0.11 on PTX is left only on demand; Mosaic GPU has a compiler of its own beside XLA's.
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_emitter_re=ptx"
    os.environ |= {"MOSAIC_GPU_DUMP_TO": dump, "MOSAIC_GPU_DUMP_PTX": "1"}
    os.environ["LIBTPU_INIT_ARGS"] = (
        f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true "
        "--xla_jf_dump_llo_pass_label_regex=final_bundles"
    )


def compile_kernel(case):
    """Compiles a kernel for a GPU; returns nothing to tell, and no faults: what it spills is read by `run`."""
    gpu = find_accelerator(case.device)
    known = {"topology_name": gpu.name, "target_config": gpu.xla_target_config, "topology": "1x1x1"}
    devices = topologies.get_topology_desc(platform="cuda", **known).devices
    mesh = jax.sharding.Mesh(np.asarray(devices), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    function, shapes = arguments(case)
    placed = jax.tree.map(lambda shape: shape.update(sharding=sharding), shapes)
    # From JAX 0.11 on, kernels are lowered for the device of the mesh at hand; without one they ask for a GPU.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jax.jit(function).trace(*placed).lower(lowering_platforms=("cuda",)).compile()
    return "", []


def compile_program(case):
    """Compiles a decode loop or a layer of a prefill; returns what is to be told of it, and its faults."""
    setting = case.setting
    with prepare_trace_inputs(setting) as work:
        axes = work.flat.axes
        if case.prefill:
            traced = next(
                call.traced for call in select_largest_calls(work) if call.name == "layer"
            )
            written = [jax.ShapeDtypeStruct((1, case.tokens, setting.config.embed), work.dtype)]
        else:
            traced, pools = trace_planned_loop(work)
            written = jax.tree.leaves(pools)
        made, text = compile_traced_program("", traced, platform=setting.gpu.platform)
    local = [on_one(leaf, "B S E" if case.prefill else "B P D", axes) for leaf in written]
    size = sum(hlo.size_of(*each) for each in local)
    rows = {each for each in local if len(each[1]) == 3}
    copies, serial = copies_of(text, rows), nested(text)
    wrong = []
    if copies:
        wrong.append(f"{copies} copies of pools")
    if made.aliased < size:
        wrong.append(f"{size - made.aliased:,} bytes are not written in place")
    if serial > case.loops and not case.prefill:
        wrong.append(f"{serial} loops within the loop over tokens")
    sent = hlo.collectives(text)
    if any(setting.config.head_dim in sizes for _, arrays in sent for _, sizes in arrays):
        wrong.append("keys or values travel")
    told = f"{size / 1e9:.2f} GB written, {made.temporaries / 1e6:.1f} MB beside, peak {made.peak_bytes / 1e9:.2f} GB"
    return told + "".join(
        f", {count} x {kind} of {hlo.shown(arrays)}"
        for (kind, arrays), count in sorted(sent.items())
    ), wrong


def on_one(leaf, letters, axes):
    """What one device holds of an array, as HLO names it."""
    shape = leaf.shape
    if axes is not None:
        spec = axes.get_array_spec(" ".join(letters.split()[: leaf.ndim]), shape)
        shape = jax.sharding.NamedSharding(axes.mesh, spec).shard_shape(shape)
    return DTYPES[leaf.dtype.name], tuple(shape)


def copies_of(text, arrays):
    """Number of copy instructions in an HLO text whose result has one of the given (dtype, shape) pairs."""
    made = re.findall(r"= (\([^=]*?\)|\S+) (?:copy|copy-start)\(", text)
    return sum(hlo.arrays_in(result)[0] in arrays for result in made)


def nested(text):
    """Number of loops of an HLO text that lie within other loops."""
    computations = text.split("\n\n")
    return sum(each.count(" while(") for each in computations if not each.startswith("ENTRY"))


def spills(case, dump):
    """Dict of what each kernel spills by its name: bytes on GPUs, on TPUs instructions; empties the dump."""
    device = find_accelerator(case.device)
    if device.platform == "cuda":
        assembler = ptxas.ptxas() or sys.exit("ptxas is missing: pip install nvidia-cuda-nvcc")
        kernels = ptxas.kernels(dump, device.architecture, assembler)
        found = [(each.name, each.spills) for each in kernels]
    else:
        named = [(BUNDLES.fullmatch(path.name), path) for path in sorted(dump.iterdir())]
        found = [(at["kernel"], len(SPILL.findall(path.read_text()))) for at, path in named if at]
    shutil.rmtree(dump)
    dump.mkdir()
    return {name: count for name, count in found if name.startswith(NAMES)}


def run(case):
    """Compiles a case; returns a line on it, and its faults."""
    began = time.perf_counter()
    try:
        told, wrong = (compile_kernel if isinstance(case, Kernel) else compile_program)(case)
        found = spills(case, Path(os.environ["JAXKV_DUMP"]))
    except Exception as error:  # One case's failure is a line beside the others.
        return f"{case.name}: failed", [f"{case.name}: {type(error).__name__}: {error}"[:400]]
    ours = {kernel: count for kernel, count in found.items() if not kernel.startswith("splash")}
    wrong += [f"{kernel} spills {count}" for kernel, count in ours.items() if count]
    wrong += [] if found else ["it has no kernel"]
    line = f"{case.name}: {time.perf_counter() - began:.0f} s, kernels {', '.join(found)}"
    return f"{line}; {told}" if told else line, [f"{case.name}: {each}" for each in wrong]


def main():
    """Compiles the cases, a line on each; returns 1 where one has a fault."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", nargs="+", choices=("h100", "a100", "tpu"), default=["h100", "a100"]
    )
    parser.add_argument("--quick", action="store_true", help="one case of each kind")
    asked = parser.parse_args()
    faults = []
    with tempfile.TemporaryDirectory() as folder:
        with concurrent.futures.ProcessPoolExecutor(
            # libtpu is opened once at a time.
            max_workers=1 if "tpu" in asked.device else os.cpu_count(),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=begin,
            initargs=(folder,),
        ) as pool:
            for line, wrong in pool.map(run, cases(asked.device, asked.quick)):
                print(line, flush=True)
                faults += wrong
    for each in faults:
        print(f"FAULT {each}", file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())

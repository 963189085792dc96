"""Exports programs for eight H100s that are not there, reads them back, and compiles them for those.

    .venv-aot/bin/python benchmarks/aot_export.py          two layers with the heads of Llama 3 70B

It fails where a program does not serialise, deserialise or compile. Needs .venv-aot.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
# Three threads for each of eight CPU devices, which stand for GPUs while programs are written.
os.environ.setdefault("NPROC", "24")

import jax
import numpy as np
from jax.experimental import topologies

import jaxkv
from jaxkv.planning.gpus import gpus
from jaxkv.testing import tiny_model

NEW = 32
POLICIES = {
    "FullKV": jaxkv.FullKV(),
    "SnapKV": jaxkv.SnapKV(budget=64),
    "AdaKV": jaxkv.AdaKV(budget=64),
    "H2O": jaxkv.H2O(budget=64),
    "D2O": jaxkv.D2O(budget=64),
}


def model():
    """Two layers with Llama 3 70B's heads, narrow otherwise."""
    shape = {
        "vocab": 512,
        "layers": 2,
        "embed": 256,
        "hidden": 512,
        "heads": 64,
        "kv_heads": 8,
        "head_dim": 128,
    }
    return tiny_model(jaxkv.ModelConfig(**shape, max_positions=1024), dtype="bfloat16")


def compiled(folder, said, devices):
    """One program of a folder, for these devices: seconds, and bytes of its temporaries."""
    read = jax.export.deserialize(bytearray((folder / "programs" / said["file"]).read_bytes()))
    mesh = said["mesh"]
    mesh = jax.sharding.Mesh(devices.reshape(tuple(mesh.values())), tuple(mesh))
    there = read.in_shardings_jax(mesh)
    given = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at)
        for a, at in zip(read.in_avals, there, strict=True)
    ]
    donated = [at for at, each in enumerate(said["inputs"]) if each["donated"]]
    begun = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = (
            jax.jit(read.call, donate_argnums=donated)
            .trace(*given)
            .lower(lowering_platforms=("cuda",))
        )
    program = lowered.compile()
    return time.perf_counter() - begun, program.memory_analysis().temp_size_in_bytes


def main():
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jax.make_mesh((1, 8), ("data", "model"), devices=jax.devices("cpu"))
    known = {"platform": "cuda", "topology_name": "h100", "target_config": gpus()["h100"].target}
    known["topology"] = "1x1x8"
    devices = np.asarray(topologies.get_topology_desc(**known).devices)
    small = model()
    names = sys.argv[1:] or list(POLICIES)
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            of = {
                "lengths": 256,
                "question": 16,
                "new": NEW,
                "platforms": "cuda",
                "mesh": mesh,
                "weights": False,
            }
            made = jaxkv.export(small, Path(folder) / "out", policy=POLICIES[name], **of)
            manifest = json.loads((made / "manifest.json").read_text("utf-8"))
            for said in manifest["programs"]:
                seconds, temporaries = compiled(made, said | {"mesh": manifest["mesh"]}, devices)
                told = f"{said['bytes'] / 1e3:.0f} KB, compiled in {seconds:.1f} s, {temporaries / 1e6:.1f} MB beside"
                print(f"{name:7} {said['kind']:12} {told}", flush=True)


if __name__ == "__main__":
    main()

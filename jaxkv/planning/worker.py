"""Child process of `compiled`: reads a setting, compiles its programs, and writes the compiler's figures."""

import contextlib
import pickle
import time
from collections.abc import Iterator
from typing import IO, Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv.planning.compiled import CompiledProgram
from jaxkv.planning.gpus import GPU
from jaxkv.planning.setting import Workload
from jaxkv.planning.tpus import TPU
from jaxkv.planning.traced_programs import (
    TraceInputs,
    build_abstract_model,
    select_largest_calls,
    trace_planned_loop,
)
from jaxkv.sharding.mesh import ShardingMesh
from jaxkv.sharding.parameters import make_model_mesh
from jaxkv.sharding.record import count_device_bytes


def describe_devices(setting: Workload) -> Any:
    """Return an array of JAX's descriptions of a workload's devices, for which programs compile without them."""
    gpu = setting.gpu
    if isinstance(gpu, TPU):
        found = topologies.get_topology_desc(
            platform="tpu", topology_name=gpu.find_slice(setting.gpus)
        )
        return np.asarray(found.devices[: setting.gpus])
    assert isinstance(gpu, GPU)
    hosts = -(-setting.gpus // gpu.per_host)
    hosts = hosts if setting.gpus % hosts == 0 else 1
    # Slices x hosts x GPUs per host.
    shape = f"1x{hosts}x{setting.gpus // hosts}"
    known = {"topology_name": gpu.name, "target_config": gpu.xla_target_config, "topology": shape}
    return np.asarray(topologies.get_topology_desc(platform="cuda", **known).devices)


@contextlib.contextmanager
def prepare_trace_inputs(setting: Workload) -> Iterator[TraceInputs]:
    """Context manager that yields a workload's `TraceInputs`, devices present or not, under their abstract mesh."""
    devices = describe_devices(setting)
    axes = sharding = None
    if setting.gpus > 1:
        mesh = make_model_mesh(
            Mesh(devices.reshape(setting.data, setting.gpus_per_group), ("data", "model")),
            setting.config,
        )
        axes = ShardingMesh(mesh=mesh)
    else:
        mesh = Mesh(devices, ("x",))
        sharding = NamedSharding(mesh, PartitionSpec())
    work = TraceInputs(
        flat=build_abstract_model(setting.config, setting.dtype, axes, weights=setting.weights),
        policy=setting.policy,
        # Groups with one prompt less get a copy of the last one.
        batch=setting.prompts_per_group * setting.data,
        tokens=setting.context,
        new=max(1, setting.new),
        sharding=sharding,
        implementation=setting.prefill_implementation,
    )
    # From JAX 0.11 on, kernels are lowered for the device of the current mesh; without a mesh they need a GPU.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield work


def compile_traced_program(
    name: str, traced: Any, *, platform: str = "cuda", beside: int = 0
) -> tuple[CompiledProgram, str]:
    """Lower and compile a traced program for a platform; return its `CompiledProgram` and its optimised HLO as text.

    `beside` is the number of bytes of other live arrays.
    """
    compiled = traced.lower(lowering_platforms=(platform,)).compile()
    memory = compiled.memory_analysis()
    made = CompiledProgram(
        name=name,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        beside=beside,
    )
    return made, compiled.as_text()


def compile_workload(setting: Workload) -> dict[str, Any]:
    """Compile a workload's programs; return a dict of `CompiledProgram` and weight bytes, or a failed one's error."""
    name = f"such {setting.gpu.word}s"
    platform = setting.gpu.platform
    try:
        with prepare_trace_inputs(setting) as work:
            weights = count_device_bytes((work.flat.ends, work.flat.blocks))
            name = "the decode loop"
            decode, _ = compile_traced_program(
                "decode", trace_planned_loop(work)[0], platform=platform
            )
            name = "a prefill's programs"
            prefill = []
            for call in select_largest_calls(work):
                name = f"a prefill's program: {call.name}"
                made, _ = compile_traced_program(
                    call.name, call.traced, platform=platform, beside=call.beside
                )
                prefill.append(made)
    except jax.errors.JaxRuntimeError as error:
        return {"program": name, "error": str(error).strip().splitlines()[0]}
    return {"decode": decode, "prefill": tuple(prefill), "weights": weights}


def main(given: IO[bytes]) -> None:
    """Read a pickled workload and path from a stream; compile its programs; pickle figures or an error to that path."""
    began = time.perf_counter()
    setting = pickle.load(given)
    result = pickle.load(given)
    made = compile_workload(setting) | {"seconds": time.perf_counter() - began}
    part = result.with_suffix(".part")
    part.write_bytes(pickle.dumps(made))
    part.rename(result)

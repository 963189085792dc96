"""Compiles the programs of a plan with XLA for GPUs or TPUs, present or not, in a separate process."""

import importlib.metadata
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.engine.lengths import round_up_to_bucket
from jaxkv.planning.accelerators import Device
from jaxkv.planning.setting import Workload
from jaxkv.planning.tpus import TPU

_PLUGINS = ("cuda13", "cuda12")
# The child needs its parent's path: scripts import neighbouring files, and policies come from any module.
_CHILD = (
    "import pickle, sys; given = sys.stdin.buffer; sys.path[:] = pickle.load(given); "
    "from jaxkv.planning.worker import main; main(given)"
)


@frozen_dataclass
class CompiledProgram:
    """XLA's memory figures of one compiled program on one device, in bytes.

    Attributes:
        name: purpose of the program.
        arguments: bytes of its arguments.
        outputs: bytes of its results.
        aliased: bytes of results written into donated arguments.
        temporaries: bytes allocated while it runs.
        beside: bytes of other live arrays, computed from shapes; see `CompiledPlan.prefill`.
    """

    name: str
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    beside: int = 0

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of a device in a program: other live arrays, arguments, unaliased outputs, temporaries."""
        return self.beside + self.arguments + self.outputs - self.aliased + self.temporaries

    def __str__(self) -> str:
        """Compiled program in one line: name, gigabytes of peak, arguments, temporaries, other live arrays."""
        return (
            f"{self.name}: peak {self.peak_bytes / 1e9:.2f} GB a device (arguments {self.arguments / 1e9:.2f}, "
            f"temporaries {self.temporaries / 1e9:.3f}, other arrays {self.beside / 1e9:.2f})"
        )


@frozen_dataclass
class CompiledPlan:
    """XLA's memory figures in bytes of a plan's decode loop and prefill programs, compiled without the device.

    Attributes:
        decode: the decode loop with all layers.
        prefill: the prefill program with the highest peak. The programs are embedding, a layer, the top layer, the
            policy's scoring, choosing and merging, packing, and logits, for all prompts together, as a session prefills
            on a GPU. Other live arrays are weights of other layers, hidden states, keys and values of one layer with
            their scores (with a shared pool, those of all layers below), and the cache of the layers below. Every
            layer is traced; of calls that differ only in numbers, the one with the highest peak is compiled. A GPU with
            free memory may run several layers ahead, which uses more memory only while it is free.
        programs: decode and all programs of a prefill.
        weights: bytes of the parameters on one device, which are part of both peaks.
        jaxlib: version of the compiler.
        word: "GPU" or "TPU".
        seconds: total time in seconds, including the start of the child process.
    """

    decode: CompiledProgram
    prefill: CompiledProgram
    programs: tuple[CompiledProgram, ...]
    weights: int
    jaxlib: str
    seconds: float
    word: str = "GPU"

    def __str__(self) -> str:
        """Three lines: XLA's version and compile time; memory of decode loop, of prefill's largest program."""
        head = f"compiled by XLA of jaxlib {self.jaxlib} in {self.seconds:.0f} s"
        lines = [
            f"{head}; nothing has run on a {self.word}",
            f"  {self.decode}",
            f"  {self.prefill}",
        ]
        return "\n".join(lines)


def require_compiler_plugin(gpu: Device) -> str:
    """Return jaxlib's version if XLA's compiler for a device (GPU: of this version) is installed; else ImportError."""
    jaxlib = importlib.metadata.version("jaxlib")
    if gpu.platform == "tpu":
        if importlib.util.find_spec("libtpu") is None:
            raise ImportError(
                "XLA's compiler for TPUs is not installed: in a separate environment with jaxkv, run "
                f"pip install 'jax[tpu]=={jaxlib}' (no TPU is needed)"
            )
        return jaxlib
    there = (name for name in _PLUGINS if importlib.util.find_spec(f"jax_{name}_plugin"))
    known = next(there, None)
    found = None if known is None else importlib.metadata.version(f"jax-{known}-plugin")
    if found != jaxlib:
        has = "none is installed" if found is None else f"the installed one is {found}"
        wheels = " ".join(f"jax-{_PLUGINS[0]}-{part}=={jaxlib}" for part in ("plugin", "pjrt"))
        raise ImportError(
            f"compiling needs XLA's compiler for GPUs of jaxlib {jaxlib}, and {has}: in a separate environment with "
            f"jaxkv and jax of that version, run pip install --no-deps {wheels} nvidia-cuda-nvcc==13.0.* (neither a "
            "GPU nor a driver is needed)"
        )
    return jaxlib


def compile_plan(setting: Workload) -> CompiledPlan:
    """Compile a workload's decode and prefill programs in a child process, without a device; return a `CompiledPlan`.

    The child process is needed because JAX may be in use on other devices here; its output is discarded.

    Raises:
        ImportError: if the compiler is not installed.
        ValueError: if it rejects a program, for more TPUs than a slice has, and for policies with chunked prefill or
            offloaded entries.
        TypeError: for a policy that cannot be pickled.
    """
    jaxlib = require_compiler_plugin(setting.gpu)
    parts = setting.policy.composed
    reading = parts.build_read_config(
        setting.config.sliding_windows, round_up_to_bucket(setting.context)
    )
    # Without a GPU the compiler ignores memory kinds, and would count host memory as device memory.
    whole = not reading.offloaded
    whole &= parts.needs.replay is None and not parts.read.prefill_chunk_tokens
    remedy = "chunked prefill, second passes and offloaded entries cannot be compiled: plan without the compiler"
    require(whole, "policy", setting.policy, remedy)
    try:
        given = pickle.dumps(sys.path) + pickle.dumps(setting)
    except (pickle.PicklingError, AttributeError) as error:
        raise TypeError(
            f"policy={setting.policy}: {error}: the policy goes to another process: import it from a module"
        ) from None
    gpu = setting.gpu
    if isinstance(gpu, TPU):
        gpu.find_slice(setting.gpus)
    with tempfile.TemporaryDirectory() as folder:
        made = _compile_in_child_process(given, Path(folder), setting)
    largest = max(made["prefill"], key=lambda each: each.peak_bytes)
    return CompiledPlan(
        decode=made["decode"],
        prefill=largest,
        programs=(made["decode"], *made["prefill"]),
        weights=made["weights"],
        jaxlib=jaxlib,
        word=gpu.word,
        seconds=made["seconds"],
    )


def _compile_in_child_process(given: bytes, folder: Path, setting: Workload) -> dict[str, Any]:
    """Run `worker.main` in a child process; return its dict of figures; ValueError if XLA rejects a program."""
    # Silences warnings about missing GPUs, and hides present ones.
    quiet = {
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
    }
    environment = {**os.environ, **quiet}
    environment.pop("JAX_PLATFORMS", None)
    if setting.gpu.platform == "tpu":
        # libtpu compiles for a described slice; JAX itself starts on the CPU. No server is queried for the TPU. Nothing
        # runs on a TPU, so the lock of another process that uses libtpu does not matter.
        environment |= {
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "JAX_PLATFORMS": "cpu",
        }
    result = folder / "result.pickle"
    said = folder / "said.txt"
    with said.open("wb") as log:
        command = [sys.executable, "-c", _CHILD]
        given += pickle.dumps(result)
        done = subprocess.run(command, input=given, stdout=log, stderr=log, env=environment)
    if not result.exists():
        last = [
            line.strip() for line in said.read_text("utf-8", "replace").splitlines() if line.strip()
        ][-1:]
        raise RuntimeError(
            f"the compiling process ended with code {done.returncode}: {''.join(last) or 'no message'}"
        )
    made = pickle.loads(result.read_bytes())
    if "error" in made:
        raise ValueError(
            f"gpus={setting.gpu.name!r}: the compiler rejects {made['program']}: {made['error']}"
        )
    return made

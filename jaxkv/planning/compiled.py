"""What the real compiler makes of a plan, for GPUs that are not there."""

import collections
import dataclasses
import importlib.metadata
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

from jaxkv._errors import require
from jaxkv.engine.plan import bucket
from jaxkv.planning.ptxas import Kernel, kernels, ptxas
from jaxkv.planning.setting import Setting

_PLUGINS = ("cuda13", "cuda12")
# The child's path is its parent's: scripts import what lies beside them, and policies come from anywhere.
_CHILD = (
    "import pickle, sys; given = sys.stdin.buffer; sys.path[:] = pickle.load(given); "
    "from jaxkv.planning.worker import main; main(given)"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sent:
    """What GPUs send one another; what is in a loop counts once, for it is sent again with each token.

    Attributes:
        kind: `all-reduce`, `all-gather` and so on.
        arrays: their types and sizes, as XLA writes them.
        bytes: of them.
        count: how many instructions do the same.
    """

    kind: str
    arrays: str
    bytes: int
    count: int

    def __str__(self) -> str:
        """One line."""
        return f"{self.count} x {self.kind} {self.arrays}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledProgram:
    """A program as XLA compiled it; bytes are those of one GPU.

    Attributes:
        name: what it does.
        arguments: what it is given: for the loop over tokens weights, cache and numbers.
        outputs: what comes out of it.
        aliased: part of the outputs that is written into arguments.
        temporaries: what it needs besides while it runs.
        beside: what lies there meanwhile and is no argument, by shapes; see `CompiledPlan.prefill`.
        sent: what travels.
        trace_seconds: Python's part, and lowering.
        compile_seconds: XLA's part.
    """

    name: str
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    beside: int = 0
    sent: tuple[Sent, ...] = ()
    trace_seconds: float = 0.0
    compile_seconds: float = 0.0

    @property
    def peak(self) -> int:
        """All of that at once: beside, arguments, outputs that are not written into them, temporaries."""
        return self.beside + self.arguments + self.outputs - self.aliased + self.temporaries

    def __str__(self) -> str:
        """One line."""
        return (
            f"{self.name}: peak {self.peak / 1e9:.2f} GB a GPU (arguments {self.arguments / 1e9:.2f}, "
            f"temporaries {self.temporaries / 1e9:.3f}, beside them {self.beside / 1e9:.2f}); "
            f"traced in {self.trace_seconds:.0f} s, compiled in {self.compile_seconds:.0f} s"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledPlan:
    """What the compiler says of a setting. Nothing has run on a GPU.

    Attributes:
        decode: the loop over new tokens, with all layers.
        prefill: of the programs that a prefill calls, the one at whose time most lies on a GPU. They are embedding, a
            layer, the top layer, the policy's scoring, choosing and merging, packing, logits; all prompts together, as
            a session prefills on a GPU. Beside a program lies what the engine holds at that time and does not give
            it: the weights of other layers, hidden states, one layer's keys and values with their scores (of policies
            whose layers share a pool those of all layers below), and what is kept of the layers below. All layers are
            walked; of calls that differ in numbers alone the one at which most lies there is compiled. A GPU with
            memory to spare lets some layers be under way at once: that comes on top, and gives way.
        programs: all of them.
        weights: bytes of a GPU's parameters, which are in both peaks.
        kernels: how many kernels ptxas has looked at; None where there was no ptxas.
        spills: (kernel, bytes) of those that spill registers.
        notes: what has been left out.
        jaxlib: whose compiler it was.
        seconds: all in all, the start of a process included.
    """

    decode: CompiledProgram
    prefill: CompiledProgram
    programs: tuple[CompiledProgram, ...]
    weights: int
    kernels: int | None
    spills: tuple[tuple[str, int], ...]
    notes: tuple[str, ...]
    jaxlib: str
    seconds: float

    def __str__(self) -> str:
        """Some lines: both programs, what travels in a step, spills."""
        lines = [f"compiled by XLA of jaxlib {self.jaxlib} in {self.seconds:.0f} s; nothing has run on a GPU"]
        lines += [f"  decode loop, {str(self.decode).partition(': ')[2]}"]
        lines += [f"  prefill, at its {self.prefill}"]
        lines += [f"  a step sends {each}" for each in self.decode.sent]
        if self.kernels is None:
            lines.append("  spills: nobody has looked, for there is no ptxas; pip install nvidia-cuda-nvcc")
        else:
            lines.append(f"  spills: {len(self.spills)} of {self.kernels} kernels")
            lines += [f"    {name} spills {count:,} bytes" for name, count in self.spills]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def plugin() -> str:
    """The version of XLA's compiler for GPUs beside this jaxlib.

    Returns:
        Its version.

    Raises:
        ImportError: if there is none, or one of another version; the message says what to install.
    """
    jaxlib = importlib.metadata.version("jaxlib")
    found = None
    for name in _PLUGINS:
        if importlib.util.find_spec(f"jax_{name}_plugin") is not None:
            found = importlib.metadata.version(f"jax-{name}-plugin")
            break
    if found != jaxlib:
        there = "none is installed" if found is None else f"the one here is {found}"
        wheels = " ".join(f"jax-{_PLUGINS[0]}-{part}=={jaxlib}" for part in ("plugin", "pjrt"))
        raise ImportError(
            f"compiling needs XLA's compiler for GPUs of jaxlib {jaxlib}, and {there}: in an environment of its own, "
            f"with jaxkv and jax of that version, pip install --no-deps {wheels} nvidia-cuda-nvcc==13.0.* (it needs "
            "neither a GPU nor a driver)"
        )
    return found


def compile_plan(setting: Setting) -> CompiledPlan:
    """Compiles the programs of a setting for its GPUs, which need not be there.

    A process of its own does it, because this one's JAX may be under way on other devices; its noise goes nowhere.

    Args:
        setting: what is planned for.

    Returns:
        What the compiler says.

    Raises:
        ImportError: without the compiler; the message says what to install.
        ValueError: where the compiler refuses the GPU, or one of the programs on it, and for a policy that reads
            prompts in chunks, or whose rows wait in host memory.
        TypeError: for a policy or sampler that another process cannot be given.
    """
    jaxlib = plugin()
    parts = setting.policy.parts()
    remedy = "prompts in chunks are not compiled: plan without the compiler, or leave prefill_ratio out"
    require(parts.read is None or not parts.read.by_chunks, "policy", setting.policy, remedy)
    reading = parts.reading(setting.config.layers, bucket(setting.context))
    # GPUs that are not there have no host beside them: the compiler would count its memory as theirs.
    remedy = "rows that wait in host memory are not compiled: plan without the compiler, or leave offload out"
    require(reading is None or not reading.offloaded, "policy", setting.policy, remedy)
    try:
        given = pickle.dumps(sys.path) + pickle.dumps(setting)
    except (pickle.PicklingError, AttributeError) as error:
        raise TypeError(
            f"policy={setting.policy}: {error}: another process compiles, import it from a module"
        ) from None
    assembler = ptxas()
    with tempfile.TemporaryDirectory() as folder:
        made = _in_another_process(given, Path(folder), setting, dump=assembler is not None)
        found = None if assembler is None else kernels(folder, setting.gpu.architecture, assembler)
    largest = max(made["prefill"], key=lambda each: each.peak)
    return CompiledPlan(
        decode=made["decode"],
        prefill=largest,
        programs=(made["decode"], *made["prefill"]),
        weights=made["weights"],
        kernels=None if found is None else len(found),
        spills=_spills(found or []),
        notes=made["notes"],
        jaxlib=jaxlib,
        seconds=made["seconds"],
    )


def _spills(found: list[Kernel]) -> tuple[tuple[str, int], ...]:
    worst = collections.Counter[str]()
    for each in found:
        worst[each.name] = max(worst[each.name], each.spills)
    return tuple((name, spilled) for name, spilled in worst.most_common() if spilled)


def _in_another_process(given: bytes, folder: Path, setting: Setting, *, dump: bool) -> dict:
    flags = [os.environ.get("XLA_FLAGS", "")]
    if dump:
        # From JAX 0.11 on PTX is left only on demand.
        flags.append(f"--xla_dump_to={folder} --xla_dump_hlo_as_text=false --xla_dump_emitter_re=ptx")
    # XLA and JAX say at length that there is no GPU, which is the point here; one that is there is left in peace.
    quiet = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    environment = {**os.environ, **quiet, "XLA_FLAGS": " ".join(flags).strip()}
    environment.pop("JAX_PLATFORMS", None)
    result, said = folder / "result.pickle", folder / "said.txt"
    with said.open("wb") as log:
        command = [sys.executable, "-c", _CHILD]
        given += pickle.dumps(result)
        done = subprocess.run(command, input=given, stdout=log, stderr=log, env=environment)
    if not result.exists():
        last = [line.strip() for line in said.read_text("utf-8", "replace").splitlines() if line.strip()][-1:]
        raise RuntimeError(f"the process that compiles ended with {done.returncode}: {''.join(last) or 'no word'}")
    made = pickle.loads(result.read_bytes())
    if "error" in made:
        raise ValueError(f"gpus={setting.gpu.name!r}: the compiler refuses {made['program']}: {made['error']}")
    return made

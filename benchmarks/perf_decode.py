"""The decode kernels in the performance model: what their SASS says, how long lengths take, which rules break.

Compiled here for a GPU that is not there; needs .venv-aot's ptxas and nvdisasm. `pallas_kernels` may be another
checkout's: an older one cuts segments into chunks of one size, a newer one deals them from lengths.
"""

import dataclasses
import functools
import glob
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import aot
import aot_cases
import perf_gpu
import perf_sass

# Rows that a program takes at a time, at least: fewer are not worth a program.
BLOCK = 64
# A device counts as filled where every slot has so many blocks to read: less, and beginning and ending decide.
FILLED_BLOCKS = 8
SHARE, MERGE_SHARE, RAGGED, IN_FLIGHT = 0.8, 0.1, 1.05, 1.5
# A merge of one step cannot take less; only where it takes more does its share of the pass count.
MERGE_LEAST = 2e-6


@dataclasses.dataclass(frozen=True)
class Case:
    """Lengths of a pool's segments, `[B][K]`, and the shape of the heads that read them.

    `like` names the case of as many rows in equal segments, if there is one; `store` is what holds rows in fewer bits.
    """

    name: str
    lengths: tuple[tuple[int, ...], ...]
    group: int = 4
    dim: int = 128
    like: str | None = None
    store: str | None = None

    @property
    def rows(self):
        """Of all segments."""
        return sum(map(sum, self.lengths))

    @property
    def pool_rows(self):
        """Of one sequence, with room for 256 tokens."""
        return max(map(sum, self.lengths)) + 256 * len(self.lengths[0])


def even(batch, heads, rows):
    """Segments of as many rows each."""
    return ((rows,) * heads,) * batch


def skewed(batch, heads, rows, by=10):
    """As many rows in all, one head with ten times as many as each of the others."""
    least = rows * heads // (by + heads - 1)
    return ((rows * heads - least * (heads - 1), *(least,) * (heads - 1)),) * batch


def unequal(batch, heads, rows):
    """As many rows in all, sequences from an eighth to two of the mean, heads from a third to ten times another's."""
    weights = [
        [(1 + 2 * (b % 8)) * (1 + (3 * h + b) % 10) for h in range(heads)] for b in range(batch)
    ]
    total, whole = batch * heads * rows, sum(map(sum, weights))
    lengths = [[total * weight // whole for weight in each] for each in weights]
    lengths[0][0] += total - sum(map(sum, lengths))
    return tuple(map(tuple, lengths))


CASES = (
    Case("1 x 131072", even(1, 8, 131072)),
    Case("1 x 32768", even(1, 8, 32768)),
    Case("8 x 8192", even(8, 8, 8192)),
    Case("1 x 1024", even(1, 8, 1024)),
    Case("64 x 1024", even(64, 8, 1024)),
    Case("1 x 1024, one head 10x", skewed(1, 8, 1024), like="1 x 1024"),
    Case("1 x 131072, one head 10x", skewed(1, 8, 131072), like="1 x 131072"),
    Case("4 x 8192 of 70B on 8", even(4, 1, 8192), group=8),
    Case("8 x 8192, unequal", unequal(8, 8, 8192), like="8 x 8192"),
    Case("8 x 8192, 8 bits", even(8, 8, 8192), store="int8"),
    Case("64 x 1024, 8 bits", even(64, 8, 1024), store="int8"),
    Case("8 x 8192, 4 bits", even(8, 8, 8192), store="int4"),
    Case("64 x 1024, 4 bits", even(64, 8, 1024), store="int4"),
    Case("8 x 8192, keys in 8 bits, values in 4", even(8, 8, 8192), store="mixed"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """A kernel in a compiled program: how it is launched, and what ptxas and nvdisasm say."""

    thunk: perf_sass.Thunk
    code: perf_sass.Kernel
    registers: int
    spills: int

    def resident(self, device):
        """CTAs that an SM holds."""
        shape = {"threads": self.thunk.threads, "shared": self.thunk.shared}
        return device.resident(registers=self.registers, **shape)


def begin(folder):
    """Prepares this process: where XLA leaves what it compiled. Call it before JAX is imported."""
    aot._start(folder, text="true")


def emptied():
    """The folder that XLA writes to, emptied."""
    dump = Path(os.environ["JAXKV_DUMP"])
    shutil.rmtree(dump)
    dump.mkdir()
    return dump


def sequence(dump):
    """The thunks of the program for a GPU that was compiled last."""
    passes = glob.glob(f"{dump}/*thunk_sequence_after_thunk_passes.txt")
    path = max(passes or glob.glob(f"{dump}/*thunk_sequence.txt"), key=os.path.getsize)
    return perf_sass.thunks(Path(path).read_text())


def found_in(dump, names):
    """Kernels whose names begin so, by name."""
    thunks = {each.name: each for each in sequence(dump) if each.name.startswith(names)}
    found = {}
    for path in glob.glob(f"{dump}/*.ptx"):
        text = Path(path).read_text()
        for name in re.findall(r"\.entry (\w+)\(", text):
            if name in thunks:
                code, registers, spills = assembled(text)
                found[name] = Found(
                    thunk=thunks[name], code=code, registers=registers, spills=spills
                )
    return found


@functools.cache
def assembled(ptx):
    """A kernel's operations, registers and spilled bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        path.write_text(ptx)
        command = [
            aot._ptxas(),
            "-v",
            f"-arch={aot.gpu('h200').architecture}",
            str(path),
            "-o",
            str(cubin),
        ]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        sass = subprocess.run(
            [nvdisasm(), "-c", str(cubin)], check=True, capture_output=True, text=True
        ).stdout
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    spills = int(spilled[1]) + int(spilled[2]) if spilled else 0
    return perf_sass.kernel_of(sass), int(re.search(r"Used (\d+) registers", said)[1]), spills


def nvdisasm():
    """The disassembler of the wheel, or of the machine's CUDA toolkit."""
    wheels = glob.glob(f"{sys.prefix}/lib/python*/site-packages/nvidia/*/bin/nvdisasm")
    found = (
        next(iter(wheels), None)
        or shutil.which("nvdisasm")
        or shutil.which("/usr/local/cuda/bin/nvdisasm")
    )
    if not found:
        raise SystemExit(
            "nvdisasm is missing: pip install nvidia-cuda-nvdisasm, or put a CUDA toolkit on the path"
        )
    return found


def row_numbers(found, dim):
    """Loads of row numbers that one pass through a kernel's loop needs where rows are picked: one number a row."""
    body = found.code.body(found.code.hot)
    rows = (
        sum(each for each in map(perf_sass.width, body) if each == 16)
        * found.thunk.threads
        // (dim * 2 * 2)
    )
    return math.ceil(rows / found.thunk.threads)


def stream_of(found, device, picked=False):
    """The pass over rows, as the model takes it; with picked rows their numbers arrive before the first of them."""
    code, loop = found.code, found.code.hot
    body = code.body(loop)
    loaded = sum(map(perf_sass.width, body)) * found.thunk.threads
    begun = max(1, perf_sass.groups(body))
    return perf_gpu.Stream(
        resident=found.resident(device),
        warps=found.thunk.threads // 32,
        bytes=loaded,
        instructions=len(body),
        flight=perf_sass.left_in_flight(body) / begun * loaded,
        rounds=perf_sass.rounds(code.operations[: loop[0]]) + picked,
    )


def merge_of(found, device, *, segments, group, dim):
    """The merge of chunks, as the model takes it: without a loop, one step takes all of them."""
    code, loop = found.code, found.code.hot
    body = code.body(loop) if loop else code.operations
    before = code.operations[: loop[0]] if loop else ()
    tiles = max(1, found.thunk.ctas // segments)
    # A program of several query rows pads them to a tensor core's 16.
    rows = max(1, group // tiles)
    chunk = (1 if rows == 1 else max(16, rows)) * dim * 4
    loaded = sum(map(perf_sass.width, body)) * found.thunk.threads
    return perf_gpu.Merge(
        resident=found.resident(device),
        tiles=tiles,
        many=max(1, loaded // chunk) if loop else sys.maxsize,
        rounds=perf_sass.rounds(body),
        instructions=len(body),
        before=perf_sass.rounds(before),
    )


def chunks_of(kernels, lengths, *, group, dim, pool_rows, itemsize=2):
    """How a checkout cuts segments: rows of each program, and chunks of each segment."""
    if not hasattr(kernels, "chunks"):
        batch, heads = len(lengths), len(lengths[0])
        shape = {"batch": batch, "heads": heads, "rows": group, "pool_rows": pool_rows}
        size = kernels.tuning.decode_tiles(**shape, dim=dim, itemsize=2).chunk
        segments = [rows for each in lengths for rows in each]
        work = [min(size, rows - at) for rows in segments for at in range(0, rows, size)]
        return work, [math.ceil(rows / size) for rows in segments]
    import jax.numpy as jnp
    import numpy as np

    ask = {"dim": dim, "itemsize": itemsize}
    tiles, programs = kernels.tuning.decode_tiles(**ask), kernels.tuning.programs(**ask)
    length = jnp.asarray(lengths, jnp.int32)[None]
    dealt = kernels.chunks.deal(
        jnp.zeros_like(length), length, programs=programs, block=tiles.chunk
    )
    return np.asarray(dealt.rows)[0].tolist(), np.asarray(dealt.count)[0].ravel().tolist()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A case in the model; times are seconds."""

    rows: float
    merge: float
    launches: int
    bytes: int
    ctas: int
    filled: bool
    needed: int
    flight: float
    resident: int
    found: Found
    store: str | None = None

    def share(self, device):
        """Of the copy bandwidth, launches counted."""
        return self.bytes / device.copy / self.time

    @property
    def time(self):
        """Of the passes, from one launch to the next."""
        return self.rows + self.merge + self.launches * perf_gpu.LAUNCH


def estimate(
    device,
    rows,
    merge,
    work,
    counts,
    *,
    group,
    dim,
    segments,
    launches=2,
    written=0,
    picked=False,
    store=None,
):
    """What the model makes of the two kernels and the rows of each program; `written` bytes go out with each row.

    Of picked rows numbers come in besides. The rows are taken to come as fast as neighbours do: each is some sectors.
    """
    from jaxkv.cache.quantised import STORES

    stream = stream_of(rows, device, picked)
    each = STORES[store or "dense"].row_bytes(dim, 2) + written + 4 * picked
    total = sum(work)
    merging = merge_of(merge, device, segments=segments, group=group, dim=dim)
    slots = device.sms * stream.resident
    return Estimate(
        rows=perf_gpu.streamed(device, stream, [n * each for n in work if n]),
        merge=perf_gpu.merged(device, merging, counts, group * (dim + 1) * 4),
        launches=launches,
        bytes=total * each,
        ctas=sum(n > 0 for n in work),
        filled=total >= slots * FILLED_BLOCKS * BLOCK,
        needed=min(device.sms, total // BLOCK),
        flight=stream.flight * stream.resident,
        resident=stream.resident,
        found=rows,
        store=store,
    )


def pair(found):
    """The pass over rows and the merge, of the kernels of one program."""
    rows = next(each for name, each in found.items() if not name.startswith("ragged_decode_merge"))
    return rows, next(
        each for name, each in found.items() if name.startswith("ragged_decode_merge")
    )


def run(kernels, case, device):
    """Compiles attention for a case's shapes, and puts it into the model."""
    import jax
    import jax.numpy as jnp

    batch, heads = len(case.lengths), len(case.lengths[0])
    of = jax.ShapeDtypeStruct
    table, shape = of((batch, heads), jnp.int32), (batch, case.pool_rows, case.dim)
    pools = (
        aot_cases.stored(kernels, case.store, *shape)
        if case.store
        else (of(shape, jnp.bfloat16),) * 2
    )
    dump = emptied()
    query = of((batch, heads, case.group, case.dim), jnp.bfloat16)
    aot.compile_for(device.name, kernels.attend, query, *pools, table, table)
    rows, merge = pair(found_in(dump, ("ragged_decode",)))
    shape = {"group": case.group, "dim": case.dim}
    item = kernels.codes.itemsize_of(*pools, jnp.bfloat16) if case.store else 2
    work, counts = chunks_of(
        kernels, case.lengths, **shape, pool_rows=case.pool_rows, itemsize=item
    )
    shape |= {"segments": batch * heads, "store": case.store}
    return estimate(device, rows, merge, work, counts, **shape)


def kernel_faults(found, device, numbers=0, *, store=None):
    """What is wrong with the pass over rows whatever the lengths are.

    Args:
        found: the kernel.
        device: it runs on.
        numbers: loads of 4 bytes that its loop may have, see `row_numbers`; none where rows are not picked.
        store: of rows in fewer bits, whose scales are few bytes each: their loads may be narrow.
    """
    stream, body = stream_of(found, device), found.code.body(found.code.hot)
    wrong = [f"spills {found.spills} bytes"] if found.spills else []
    # Picked rows lie where a list says, so that a pass over them loads one number for each row; nothing else is narrow.
    if store is None and (thin := perf_sass.narrow(body, numbers)):
        wrong.append(f"{thin} loads in the hot loop are narrower than 16 bytes")
    flight, wanted = stream.flight * stream.resident, IN_FLIGHT * device.little
    if flight < wanted:
        wrong.append(f"{flight / 1024:.0f} KiB in flight per SM are fewer than {wanted / 1024:.0f}")
    return wrong


def faults(found, device, like=None):
    """Which rules an estimate breaks, held against that of equal segments if there is one."""
    wrong = kernel_faults(found.found, device, store=found.store)
    if found.ctas < found.needed:
        wrong.append(f"{found.ctas} programs work where rows are enough for {found.needed} SMs")
    if found.merge > max(MERGE_SHARE * found.rows, MERGE_LEAST):
        wrong.append(f"the merge takes {found.merge / found.rows:.0%} of the pass over rows")
    if found.filled and found.share(device) < SHARE:
        wrong.append(f"{found.share(device):.0%} of the copy bandwidth")
    if like and found.rows + found.merge > RAGGED * (like.rows + like.merge):
        slower = (found.rows + found.merge) / (like.rows + like.merge) - 1
        wrong.append(f"{slower:.0%} slower than equal segments")
    return wrong


def prefill_faults(found):
    """What is wrong with prefill's kernel."""
    code = found.code
    body = code.body(code.hot) if code.hot else code.operations
    wrong = [f"spills {found.spills} bytes"] if found.spills else []
    if (depth := perf_sass.left_in_flight(body)) < 2:
        wrong.append(f"prefetches {depth} groups of loads ahead, fewer than 2")
    if not any("GMMA" in each for each in body):
        wrong.append("no warpgroup matrix product in the hot loop")
    return wrong

"""A model of TPU times, from programs that libtpu compiled without a TPU: every figure is an estimate.

Rules:
1. Operations of XLA take the `estimated_cycles` that the compiler writes beside them, at `CLOCK`. That clock is
   assumed: at it, products that read weights reach 86% of v6e's bandwidth by these cycles.
2. A loop takes its body's cycles times the constant that its condition compares with. A loop over drawn tokens compares
   with an argument: one trip of it is a decode step. Where a step's loop compares a count with what data say, it walks
   segments, and takes as many trips as the budget's rows have blocks of the rows that loops within it slice at once;
   loops that compare no count take one.
3. A decode kernel takes the longer of two times, summed over segments: copies of its rows, in chunks, at the data
   sheet's bandwidth; and bundles, `BLOCK_BUNDLES` a block and `PROGRAM_BUNDLES` a segment, read from its LLO; with
   scores `SCORED_BUNDLES`, of a block and a segment; of rows in 8 bits `CODED_BUNDLES` a larger block. The kernels of
   eviction take theirs: `RANK_BUNDLES` a head, of eight sequences and a register of 128 rows, `MOVE_BUNDLES` a segment,
   and `LAUNCH_BUNDLES` both together. Those of a pool that layers share take `WINDOW_BUNDLES` a segment, to take or add
   its window, and `COSINE_BUNDLES`, of a block and a segment, to compare its rows. There a segment has the budget's
   rows, and blocks are not dealt to them.
4. Splash attention takes bundles, read from its LLO at head dim 128: `SPLASH_BUNDLES` a block of keys that a block of
   queries sees, and a block of queries.
5. Copies of whole pools between HBM and VMEM take their bytes at the data sheet's bandwidth, for they share it. So do
   gathers of rows, for which the compiler writes no cycles: their bytes twice, read and written.
6. Left out: scatters, for which the compiler writes no cycles either, other copies that run beside operations, what a
   step costs on the host, links of chips. Times are therefore lower bounds.
"""

import collections
import re

from benchmarks import hlo
from jaxkv.pallas_kernels.tpu_codes import CODED_BLOCK
from jaxkv.pallas_kernels.tpu_prefill import KEYS, QUERIES
from jaxkv.pallas_kernels.tpu_rows import BLOCK, CHUNK
from jaxkv.planning.tpus import tpus

DEVICE = "v6e"
CLOCK = 1.75e9
BLOCK_BUNDLES, PROGRAM_BUNDLES = 340, 250
SCORED_BUNDLES, CODED_BUNDLES = (480, 320), 410
RANK_BUNDLES, MOVE_BUNDLES, LAUNCH_BUNDLES = 18, 160, 200
WINDOW_BUNDLES, COSINE_BUNDLES = 130, (690, 100)
SPLASH_BUNDLES = 6180, 910

_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_KERNEL = re.compile(
    r"^\s*(?:ROOT )?%(\w+?)(?:\.\d+)* = .*custom_call_target=\"tpu_custom_call\"", re.MULTILINE
)
_SLICED, _CALLS = re.compile(r"dynamic_slice_sizes=\{(\d+)"), re.compile(r" calls=%([\w.\-]+)")
_WHILE = re.compile(r" while\(.*condition=%([\w.\-]+).*body=%([\w.\-]+)")


def computations(text: str) -> dict[str, list[str]]:
    """Dict from the name of each computation of an HLO text to its lines; the entry is "ENTRY"."""
    found, name = dict[str, list[str]](), ""
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head is not None:
            name = "ENTRY" if line.startswith("ENTRY") else head[1]
            found[name] = []
        elif name:
            found[name].append(line)
    return found


def trips(condition: list[str]) -> int | None:
    """Number of trips of a loop by its condition's lines; None if it is no constant."""
    constants = [re.search(r"s32\[\]\S* constant\((\d+)\)", line) for line in condition]
    found = [int(each[1]) for each in constants if each is not None]
    return (
        found[0] if len(found) == 1 and any("direction=LT" in line for line in condition) else None
    )


def cycles(text: str, name: str = "ENTRY") -> int:
    """Estimated cycles of a computation of an HLO text and of the loops in it; loops of unknown trips count once."""
    return _cycles(computations(text), name, None)


def countable(text: str) -> bool:
    """True if the trips of all loops of an HLO text are constants."""
    parts = computations(text)
    loops = [
        loop
        for lines in parts.values()
        for line in lines
        if (loop := _WHILE.search(line)) is not None
    ]
    return all(trips(parts[loop[1]]) is not None for loop in loops)


def _sliced(parts: dict[str, list[str]], name: str) -> int:
    """Most rows that one of `computations` slices at once, what it calls and loops in it included; at least 1."""
    most = 1
    for line in parts[name]:
        called, loop = _CALLS.search(line), _WHILE.search(line)
        inner = [each for each in (called and called[1], loop and loop[2]) if each in parts]
        most = max(
            [most, *map(int, _SLICED.findall(line)), *(_sliced(parts, each) for each in inner)]
        )
    return most


def _cycles(parts: dict[str, list[str]], name: str, budget: int | None) -> int:
    """Estimated cycles of one of `computations`, loops in it included; those of unknown counts walk `budget` rows."""
    total = 0
    for line in parts[name]:
        total += sum(map(int, _CYCLES.findall(line)))
        loop = _WHILE.search(line)
        if loop is not None:
            walks = budget is not None and any("direction=LT" in each for each in parts[loop[1]])
            walked = -(-(budget or 1) // _sliced(parts, loop[2])) if walks else 1
            total += (trips(parts[loop[1]]) or walked) * _cycles(parts, loop[2], budget)
    return total


def step(text: str, budget: int | None = None) -> tuple[int, list[int | None]]:
    """Estimated cycles of a decode loop's body, and the trips of all loops within it (None where they vary).

    Of the entry's loops it is the one of most cycles: shorter ones make ready what a step carries along. Loops of
    unknown counts walk segments of `budget` rows, or take one trip.
    """
    parts = computations(text)
    outer = [loop[2] for line in parts["ENTRY"] if (loop := _WHILE.search(line)) is not None]
    body = max(outer, key=lambda name: _cycles(parts, name, None))
    return _cycles(parts, body, budget), _loops(parts, body)


def _loops(parts: dict[str, list[str]], name: str) -> list[int | None]:
    """Trips of all loops of one of `computations`, those within loops included."""
    found = list[int | None]()
    for line in parts[name]:
        loop = _WHILE.search(line)
        if loop is not None:
            found += [trips(parts[loop[1]]), *_loops(parts, loop[2])]
    return found


def kernels(text: str) -> collections.Counter[str]:
    """Counter of the calls of kernels in an HLO text by the kernels' names, each call once."""
    return collections.Counter(_KERNEL.findall(text))


def gathered(text: str) -> int:
    """Bytes of the rows that gathers of an HLO text collect: of results with three axes."""
    found = [hlo.arrays_in(each)[0] for each in re.findall(r"= (\S+) gather\(", text)]
    return sum(hlo.size_of(*each) for each in found if len(each[1]) == 3)


def decode_kernel(
    segments: int,
    rows: int,
    row_bytes: int,
    *,
    scores: bool = False,
    windows: bool = False,
    coded: bool = False,
) -> float:
    """Seconds of the decode kernel over equal segments of so many rows, a key and a value of `row_bytes` in all.

    With `windows` the pool is shared: blocks are not dealt to the rows of its segments. `coded` rows are in 8 bits.
    """
    chunks = -(-rows // CHUNK)
    copied = chunks * CHUNK * row_bytes / tpus()[DEVICE].bandwidth
    # With scores the rows of a segment are dealt to blocks of whole chunks.
    blocks, (each, program) = -(-rows // BLOCK), (BLOCK_BUNDLES, PROGRAM_BUNDLES)
    if scores:
        blocks, (each, program) = blocks if windows else chunks * CHUNK / BLOCK, SCORED_BUNDLES
    if coded:
        blocks, each = -(-rows // CODED_BLOCK), CODED_BUNDLES
    return segments * max(copied, (blocks * each + program) / CLOCK)


def eviction(batch: int, heads: int, rows: int) -> float:
    """Seconds of the two kernels that rank the rows of a pool of so many rows and move one in each of its segments."""
    ranked = -(-batch // 8) * heads * -(-rows // 128) * RANK_BUNDLES
    return (ranked + batch * heads * MOVE_BUNDLES + LAUNCH_BUNDLES) / CLOCK


def shared_pool(segments: int, rows: int, key_bytes: int, calls: collections.Counter[str]) -> float:
    """Seconds of the kernels over all segments of a shared pool, of so many rows of `key_bytes`, by their calls."""
    copied = -(-rows // CHUNK) * CHUNK * key_bytes / tpus()[DEVICE].bandwidth
    block, program = COSINE_BUNDLES
    compared = max(copied, (-(-rows // BLOCK) * block + program) / CLOCK)
    windows = (calls["tpu_windows"] + calls["tpu_add"]) * WINDOW_BUNDLES / CLOCK
    return segments * (windows + calls["tpu_cosines"] * compared)


def splash(batch: int, heads: int, tokens: int) -> float:
    """Seconds of causal attention of whole prompts, of so many tokens that blocks are the largest."""
    blocks = sum(-(-(first + QUERIES) // KEYS) for first in range(0, tokens, QUERIES))
    block, program = SPLASH_BUNDLES
    return batch * heads * (blocks * block + tokens // QUERIES * program) / CLOCK

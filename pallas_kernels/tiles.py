"""Block sizes and launches of the kernels: rules by head dim, element size and device."""

import dataclasses
import re

import jax

from pallas_kernels._compat import LaunchParameters, round_up_head_dim

# Multiprocessors of an H100 and an H200, the default for devices that do not report theirs.
_CORES = 132
# Number of programs in the work table of interpreted kernels, which run sequentially.
_INTERPRETED = 4
# Bytes of shared memory per program, by device names; other devices have 99 KiB.
_AMPERE = 166912
_HOPPER = 232448
_SHARED = {"H20|H100|H200|H800|GH200|B100|B200|B300|GB200|GB300": _HOPPER, "A30|A100|A800": _AMPERE}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeTiles:
    """Block sizes and launch parameters of decode attention: rows per chunk and block, queries per program.

    Attributes:
        chunk: rows; every chunk except a segment's last is a multiple of it.
        block: rows that a program reads at a time; a power of two, at least 16.
        queries: maximum queries per program; a power of two, at least 16.
        resident: concurrent programs per multiprocessor, by registers and shared memory.
        launch: launch of the kernel over chunks.
        merge_launch: launch of the kernel that merges chunks.
    """

    chunk: int = 64
    block: int
    queries: int = 64
    resident: int = 3
    launch: LaunchParameters = LaunchParameters(warps=4, stages=3)
    merge_launch: LaunchParameters = LaunchParameters(warps=4, stages=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillTiles:
    """Block sizes and launch parameters of causal attention and sums per key: queries and keys per block.

    Attributes:
        queries: queries per program; a power of two, at least 16.
        keys: keys read at a time; a power of two, at least 16.
        launch: launch of the attention.
        scores_launch: launch of the column sums.
    """

    queries: int
    keys: int
    launch: LaunchParameters = LaunchParameters(warps=8, stages=3)
    scores_launch: LaunchParameters = LaunchParameters(warps=8, stages=3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowTiles:
    """Block sizes and launch parameters of observation-window attention: queries, keys, keys per chunk.

    Attributes:
        rows: queries at a time, with the heads of a group consecutive; a power of two, at least 16.
        keys: keys read at a time; a power of two, at least 16.
        chunk: keys per program of the first pass; a multiple of `keys`.
        launch: launch of both passes.
    """

    rows: int
    keys: int
    chunk: int
    launch: LaunchParameters = LaunchParameters(warps=8, stages=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearTiles:
    """Block sizes and launch parameters of products with 8-bit or 4-bit weights; defaults are the fastest on an H200.

    Attributes:
        outputs: outputs per program; a power of two.
        pieces: pieces of 16 bytes of codes read of each output at a time; a power of two.
        ahead: number of steps by which pieces are prefetched.
        launch: launch of the kernel, which has no pipelined loop.
    """

    outputs: int = 16
    pieces: int = 8
    ahead: int = 1
    launch: LaunchParameters = LaunchParameters(warps=4, stages=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearDotTiles:
    """Block sizes and launch parameters of products of several vectors with codes on tensor cores; not yet measured.

    Attributes:
        outputs: outputs per program; a power of two, at least 16.
        bytes: bytes of codes read of each output at a time; a power of two, at least 16.
        launch: launch of the kernel.
    """

    outputs: int = 64
    bytes: int = 64
    launch: LaunchParameters = LaunchParameters(warps=4, stages=4)


def choose_decode_tiles(*, dim: int, itemsize: int | float, exact: bool = False) -> DecodeTiles:
    """Return the `DecodeTiles` for a head dim, bytes per element (mean of keys and values) and the local GPU.

    `exact` is True for a float32 model whose entries are codes.
    """
    if itemsize < 1 and exact:
        # Dequantised to float32 they cannot use tensor cores: their products are in registers.
        return DecodeTiles(block=16, queries=16)
    if itemsize < 1:
        return _choose_int4_tiles(dim, itemsize)
    width = round(round_up_head_dim(dim) * itemsize)
    wide = (
        itemsize == 4
    )  # float32 has no tensor cores: its products are in registers, and larger tiles spill.
    block = (32 if width <= 512 else 16) if wide else (64 if width <= 256 else 32)
    return DecodeTiles(
        block=block,
        queries=16 if wide or itemsize == 1 else 64,
        resident=_count_resident_programs(width, itemsize),
        launch=LaunchParameters(warps=4, stages=3 if width <= 512 else 2),
    )


def _choose_int4_tiles(dim: int, itemsize: int | float) -> DecodeTiles:
    """Return the `DecodeTiles` for 4-bit keys or values: two warps up to a head dim of 128, else four.

    With two warps each scale that a thread loads serves twice as many of its columns.
    """
    if dim > 128:
        # With two warps, sums of that width use all registers.
        return DecodeTiles(block=32, queries=16)
    # Keys and values of different codes need more registers: on an A100 a fourth stage spills.
    most = {_AMPERE: {0.5: (6, 4), 0.75: (5, 3)}}.get(
        get_shared_memory_bytes(), {0.5: (8, 4), 0.75: (6, 4)}
    )
    resident, stages = most[itemsize]
    return DecodeTiles(
        block=32, queries=16, resident=resident, launch=LaunchParameters(warps=2, stages=stages)
    )


def _is_before_hopper() -> bool:
    """True if the compute capability of JAX's first device is 8.x (Ampere, Ada)."""
    return str(getattr(jax.devices()[0], "compute_capability", "9")).startswith("8")


def _count_resident_programs(width: int, itemsize: int | float) -> int:
    """Return how many decode programs run at a time on one multiprocessor, for rows of `width` bytes."""
    # A program needs 37 KiB of shared memory for short rows, else 74, of 228 KiB (164 before Hopper). Codes need more
    # registers than unencoded entries: 106 per thread.
    if width <= 128:
        return 4 if _is_before_hopper() or itemsize == 1 else 5
    return 2 if _is_before_hopper() else 3


def count_concurrent_programs(*, dim: int, itemsize: int | float, interpret: bool = False) -> int:
    """Return how many decode attention programs the local device runs at a time; 4 if interpreted."""
    if interpret:
        return _INTERPRETED
    return count_multiprocessors() * choose_decode_tiles(dim=dim, itemsize=itemsize).resident


def count_multiprocessors() -> int:
    """Return the number of multiprocessors of JAX's first device; 132, an H100's, if it reports none."""
    return getattr(jax.devices()[0], "core_count", None) or _CORES


def choose_prefill_tiles(*, dim: int, itemsize: int) -> PrefillTiles:
    """Return the `PrefillTiles` for a head dim, bytes per element and the GPU's shared memory."""
    width = round_up_head_dim(dim) * itemsize
    if itemsize == 4:
        launch = LaunchParameters(warps=8, stages=2)
        return PrefillTiles(
            queries=64 if width <= 256 else 32,
            keys=32 if width <= 256 else 16,
            launch=launch,
            scores_launch=launch,
        )
    # The largest tiles with enough memory to load the next blocks of keys and values in flight. From Hopper on queries
    # are in shared memory, too; before in registers, which XLA fills through a few rows of shared memory.
    queries = 128 if width <= 256 else 64
    shared = get_shared_memory_bytes()
    choices = ((keys, stages) for stages in (3, 2) for keys in (128, 64, 32) if keys <= queries)
    resident = queries if shared >= _HOPPER else 8
    fitting = (each for each in choices if (resident + 2 * each[0] * each[1]) * width <= shared)
    keys, stages = next(fitting, (32, 2))
    launch = LaunchParameters(warps=8, stages=stages)
    return PrefillTiles(queries=queries, keys=keys, launch=launch, scores_launch=launch)


def choose_window_tiles(*, rows: int, dim: int, itemsize: int) -> WindowTiles:
    """Return the `WindowTiles` for `rows` queries per kv head, a head dim and bytes per element."""
    width = round_up_head_dim(dim) * itemsize
    wide = itemsize == 4
    most, keys = (32, 32 if width <= 256 else 16) if wide else (128, 128 if width <= 256 else 64)
    return WindowTiles(rows=min(most, round_up_head_dim(rows)), keys=keys, chunk=4 * keys)


def get_shared_memory_bytes() -> int:
    """Return the bytes of shared memory per program, by the name of the device that is compiled for."""
    kind = device_kind()
    sizes = (size for names, size in _SHARED.items() if re.search(rf"\b({names})\b", kind))
    return next(sizes, 101376)


def device_kind() -> str:
    """Return the kind, such as "NVIDIA H100", of the device compiled for: the abstract mesh's, else JAX's first one."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return jax.devices()[0].device_kind if device is None else device.device_kind

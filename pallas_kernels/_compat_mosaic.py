"""Pallas' Mosaic GPU backend, for Hopper, independent of the JAX version; no other module imports it.

Only kernels of this backend import this file, on first use, so that other machines do not load it. The backend's
simulator runs kernels on a CPU: warpgroups, barriers, copies between memories and the grid, with race detection. Matrix
products and layouts, which the simulator supports in some versions only, are plain JAX operations.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as _mosaic

when = pl.when
ds = pl.ds
axis_index = lax.axis_index
copy_in = _mosaic.copy_gmem_to_smem
# Start an asynchronous copy to global memory; `wait_for_stores` waits for it.
copy_out = _mosaic.copy_smem_to_gmem
# Fence this warpgroup's writes to shared memory, so that copies from it see them.
commit = _mosaic.commit_smem
barrier_arrive = _mosaic.barrier_arrive
barrier_wait = _mosaic.barrier_wait
set_max_registers = _mosaic.set_max_registers
Barrier = _mosaic.Barrier

# Tiles of shared memory as tensor cores read them: 8 rows of 128 bytes, swizzled.
_SWIZZLE = 128


def call_mosaic_kernel(
    kernel: Callable[..., None],
    *arrays: Array,
    name: str,
    grid: dict[str, int],
    shapes: Sequence[jax.ShapeDtypeStruct],
    scratch: Sequence[Any],
    threads: tuple[str, int],
    interpret: bool,
) -> Any:
    """Run a Mosaic GPU kernel once per point of its grid, with several warpgroups; return the outputs.

    Args:
        kernel: function of a ref in global memory per input and output, then of a tuple of the `scratch` refs.
        arrays: the inputs.
        name: name in profiles and compiled programs.
        grid: number of programs along each named axis, the fastest-changing axis first.
        shapes: shapes of the outputs.
        scratch: shared memory and barriers of the warpgroups.
        threads: the axis of warpgroups and their number.
        interpret: True simulates the kernel on any device, for tests; a race between warpgroups is then an error.

    Returns:
        The outputs.
    """
    axis, number = threads

    def body(*refs):
        pl.run_scoped(lambda *own: kernel(*refs, own), *scratch, collective_axes=axis)

    body.__name__ = name
    return _mosaic.kernel(
        body,
        out_type=list(shapes),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=number,
        thread_name=axis,
        compiler_params=_mosaic.CompilerParams(approx_math=True),
        interpret=_make_simulator_parameters() if interpret else None,
    )(*arrays)


def cuda_version() -> int | None:
    """Return the installed CUDA runtime's version as an integer, 1000 * major + 10 * minor; None without CUDA."""
    from jax._src.lib import cuda_versions

    return None if cuda_versions is None else cuda_versions.cuda_runtime_get_version()


def _make_simulator_parameters() -> Any:
    """Return parameters that run a Mosaic GPU kernel in JAX's simulator on the CPU, with race detection."""
    # JAX 0.10.2 has the interpreter but does not export its parameters.
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams(detect_races=True)


def make_shared_memory_spec(
    shape: Sequence[int], dtype: jax.typing.DTypeLike, *, tiled: bool = False
) -> Any:
    """Return the scratch spec of an array in shared memory; `tiled` selects the layout that tensor cores read."""
    columns = _SWIZZLE // jnp.dtype(dtype).itemsize
    transforms = (
        (_mosaic.TilingTransform((8, columns)), _mosaic.SwizzleTransform(_SWIZZLE)) if tiled else ()
    )
    return _mosaic.SMEM(tuple(shape), dtype, transforms=transforms)


def wait_for_stores() -> None:
    """Wait until all copies that this warpgroup started from shared to global memory are done."""
    _mosaic.wait_smem_to_gmem(0)


def cast_to_wgmma_layout(array: Array, *, interpret: bool) -> Array:
    """Convert a matrix, or a vector of one element per row, to the register layout of a tensor-core result."""
    if interpret:
        return array
    layout = _mosaic.Layout.WGMMA
    return _mosaic.layout_cast(array, layout if array.ndim == 2 else layout.reduce(1))


def make_tile_indices(shape: tuple[int, ...], axis: int, *, interpret: bool) -> Array:
    """Return each tile element's index along an axis, i32, in the register layout of a tensor-core result (iota)."""
    return cast_to_wgmma_layout(lax.broadcasted_iota(jnp.int32, shape, axis), interpret=interpret)


def broadcast_over_columns(vector: Array, like: Array) -> Array:
    """Broadcast a vector of one element per row over the columns of a tile of the shape of `like`."""
    return lax.broadcast_in_dim(vector, like.shape, [0])


def multiply_on_tensor_cores(
    rows: Any,
    columns: Any,
    *,
    transposed: bool = False,
    start: Array | None = None,
    meanwhile: Callable[[], None],
    interpret: bool,
) -> Array:
    """Compute start + rows @ columns on a warpgroup's tensor cores, calling `meanwhile` before the wait; float32.

    Args:
        rows: `[m, k]` in shared memory, or a tile.
        columns: `[k, n]` in shared memory, or `[n, k]` if `transposed`.
        transposed: True for columns of shape `[n, k]`.
        start: `f32[m, n]`; 0 by default.
        meanwhile: function called between the start of the product and the wait for it.
        interpret: as in `call_mosaic_kernel`.

    Returns:
        `f32[m, n]`.
    """
    if interpret:
        meanwhile()
        left = rows if isinstance(rows, Array) else rows[...]
        right = columns[...]
        # Tensor cores read shared memory through the same proxy as copies; reads by the warpgroup need a fence.
        commit()
        over = (((1,), (1 if transposed else 0,)), ((), ()))
        out = lax.dot_general(left, right, over, preferred_element_type=jnp.float32)
        return out if start is None else start + out
    right = _transpose_ref(columns) if transposed else columns
    if start is None:

        def whole(acc):
            _mosaic.wgmma(acc, rows, right)
            meanwhile()
            return acc[...]

        return pl.run_scoped(whole, _mosaic.ACC((rows.shape[0], right.shape[1]), jnp.float32))

    def more(acc):
        _mosaic.wgmma(acc, rows, right)
        meanwhile()

    return pl.run_state(more)(_mosaic.ACC.init(start))


def _transpose_ref(ref: Any) -> Any:
    """Return a transposed view of a two-dimensional ref."""
    # JAX 0.12 deprecates the function, and 0.10.2 has no method.
    return (
        ref.transpose((1, 0)) if hasattr(ref, "transpose") else _mosaic.transpose_ref(ref, (1, 0))
    )

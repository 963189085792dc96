"""Pallas' TPU backend, independent of the JAX version, with copies simulated on a CPU; no other module imports it.

Only kernels for TPUs import this file, on first use.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as _tpu
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as _splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as _mask

when = pl.when
ds = pl.ds
program_id = pl.program_id
multiple_of = pl.multiple_of
async_copy = _tpu.make_async_copy
vmem = _tpu.VMEM
smem = _tpu.SMEM
# Programs share scratch, and a program waits for copies that the one before started. Checks of each copy's bounds would
# need more scalar instructions than the copies.
_SEQUENTIAL = _tpu.CompilerParams(
    dimension_semantics=("arbitrary", "arbitrary"), disable_bounds_checks=True
)


def make_semaphore_spec(shape: Sequence[int]) -> Any:
    """Return the scratch spec of an array of DMA semaphores, which count asynchronous copies."""
    return _tpu.SemaphoreType.DMA(tuple(shape))


def make_block_spec(shape: Sequence[int], index: Callable[..., tuple[Any, ...]]) -> pl.BlockSpec:
    """Return the spec of an array of which a program sees the block of `shape` at `index(*program ids)`, in VMEM."""
    return pl.BlockSpec(tuple(shape), lambda *ids: index(*ids[:2]))


def make_hbm_spec() -> pl.BlockSpec:
    """Return the spec of an array that stays in HBM, from which the kernel copies what it needs."""
    return pl.BlockSpec(memory_space=_tpu.HBM)


def call_tpu_kernel(
    kernel: Callable[..., None],
    scalars: Sequence[Array],
    arrays: Sequence[Array],
    *,
    name: str,
    grid: tuple[int, int],
    given: Sequence[pl.BlockSpec],
    made: Sequence[pl.BlockSpec],
    shapes: Sequence[jax.ShapeDtypeStruct],
    scratch: Sequence[Any],
    in_place: dict[int, int],
    interpret: bool,
) -> Any:
    """Launch a Pallas TPU kernel over a grid whose programs run one after the other; return a list of outputs.

    Args:
        kernel: function of a ref per scalar table, input, output and scratch, in this order.
        scalars: i32 tables in scalar memory.
        arrays: the inputs.
        name: name in profiles and compiled programs.
        grid: number of programs along both axes; the second changes faster.
        given: spec of each input.
        made: spec of each output.
        shapes: shapes of the outputs.
        scratch: memory and semaphores, which keep their contents between programs.
        in_place: by input index, the index of the output written into it; counted without the scalars.
        interpret: True runs the kernel as plain JAX operations on any device, for tests.

    Returns:
        The outputs.
    """
    if not interpret:
        # Otherwise XLA copies an array that fits VMEM there, and writes it back.
        arrays = [
            _tpu.with_memory_space_constraint(each, _tpu.HBM)
            if spec.memory_space is _tpu.HBM
            else each
            for each, spec in zip(arrays, given, strict=True)
        ]
    return pl.pallas_call(
        kernel,
        grid_spec=_tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=list(given),
            out_specs=list(made),
            scratch_shapes=list(scratch),
        ),
        out_shape=list(shapes),
        input_output_aliases={len(scalars) + index: out for index, out in in_place.items()},
        compiler_params=None if interpret else _SEQUENTIAL,
        interpret=interpret,
        name=name,
    )(*scalars, *arrays)


def make_splash_attention(
    heads: int,
    slots: int,
    *,
    blocks: tuple[int, int, int],
    lse: bool,
    softcap: float | None,
    window: int | None,
    interpret: bool,
) -> Callable[[Array, Array, Array], tuple[Array, Array | None]]:
    """Return a function of a prompt's (scaled queries, keys, values) to its causal attention, lse (None unless `lse`).

    Args:
        heads: number of query heads.
        slots: padded length of the prompt in tokens.
        blocks: queries per block, keys per block, and keys per product.
        lse: False returns None for the log-sum-exp.
        softcap: softcap of the logits; None for none.
        window: sliding window in tokens, the query's own included; None for all.
        interpret: True runs the kernel as plain JAX operations on any device, for tests.

    Returns:
        The function of `[heads, slots, D]` queries, and of keys and values with as many or fewer heads.
    """
    queries, keys, at_once = blocks
    shape = (slots, slots)
    mask = _mask.CausalMask(shape) if window is None else _mask.LocalMask(shape, (window - 1, 0), 0)
    kernel = _splash.make_splash_mha(
        mask=_mask.MultiHeadMask([mask] * heads),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=_splash.BlockSizes(block_q=queries, block_kv=keys, block_kv_compute=at_once),
        save_residuals=lse,
        attn_logits_soft_cap=softcap,
        interpret=interpret,
    )

    def run(q: Array, k: Array, v: Array) -> tuple[Array, Array | None]:
        found = kernel(q, k, v)
        if not lse:
            return found, None
        out, (total, *_) = found
        return out, total

    return run

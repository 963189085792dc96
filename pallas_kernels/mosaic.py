"""`flash` on Hopper in Mosaic GPU: causal attention of complete prompts, with the results of `prefill.flash`.

A program has three warpgroups. The last one only copies blocks of keys and values, through the TMA, into a ring buffer
in shared memory. The other two compute 64 queries of one head each, with accumulators in registers, and alternate:
during the softmax of one, the other uses the tensor cores (FlashAttention-3, Shah et al. 2024, section 3.1).
"""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import _compat_mosaic as mosaic
from pallas_kernels._compat import MASKED

DTYPES = ("bfloat16", "float16")
DIMS = (64, 128)
_LOG2E = math.log2(math.e)
_COMPUTE = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperTiles:
    """Block sizes of Mosaic's `flash`: queries per warpgroup, keys per block, blocks in flight.

    Attributes:
        queries: queries per computing warpgroup, a multiple of 64 (on a GPU).
        keys: keys per block, a multiple of 64 (on a GPU).
        stages: blocks of keys, and of values, in flight.
    """

    queries: int = 64
    keys: int = 128
    stages: int = 2


def find_unsupported_cuda() -> str | None:
    """Return the installed CUDA's version, such as "12.8", if its compiler miscompiles `flash`; else None."""
    version = mosaic.cuda_version()
    # The same bound as in JAX's own causal attention in Mosaic GPU.
    if version is None or not 12080 <= version < 12091:
        return None
    return f"{version // 1000}.{version % 1000 // 10}"


@partial(jax.jit, static_argnames=("tiles", "interpret"))
def flash(
    q: Array,
    k: Array,
    v: Array,
    first: Array,
    length: Array,
    *,
    tiles: HopperTiles | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Compute causal attention of T queries per sequence on Hopper, in 16 bits; return output and log-sum-exp.

    Args:
        q: `[B, K, G, T, D]` rotated queries, at positions first .. first + T; bfloat16 or float16, D 64 or 128.
        k: `[B, K, S, D]` rotated keys at positions 0 .. S, in q's dtype.
        v: `[B, K, S, D]` values in q's dtype.
        first: `i32[B]` position of each sequence's first query.
        length: `i32[B]` tokens of each sequence, at most S; later queries and keys are padding.
        tiles: block sizes; by default by D.
        interpret: True simulates the kernel on any device, for tests.

    Returns:
        `[B, K, G, T, D]` in q's dtype and `f32[B, K, G, T]` natural log-sum-exp of the scaled logits; padding queries
        return output 0 and lse -inf.

    Raises:
        ValueError: for other dtypes and head dims, or a CUDA version that miscompiles the kernel.
    """
    batch, heads, group, queries, dim = q.shape
    if q.dtype.name not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"dtype is {q.dtype}, {k.dtype}, {v.dtype}: use one of {', '.join(DTYPES)} with "
            "Mosaic's flash"
        )
    if dim not in DIMS:
        raise ValueError(f"head dim is {dim}: use 64 or 128 with Mosaic's flash")
    if not interpret and (version := find_unsupported_cuda()):
        raise ValueError(f"CUDA is {version}, whose ptxas miscompiles Mosaic's masks: use 13")
    tiles = tiles or HopperTiles(stages=2 if dim == 128 else 4)
    rows = tiles.queries * _COMPUTE
    # Copies must be inside their arrays. Buckets are multiples of the tiles, so only short prompts are padded.
    q = _pad_rows(q.reshape(batch, heads * group, queries, dim), rows)
    k = _pad_rows(k, tiles.keys)
    v = _pad_rows(v, tiles.keys)
    stage = (tiles.stages, tiles.keys, dim)
    free = mosaic.Barrier(num_arrivals=_COMPUTE, num_barriers=tiles.stages)
    ready = mosaic.Barrier(num_barriers=tiles.stages)
    out, lse = mosaic.call_mosaic_kernel(
        partial(_program, queries=queries, group=group, tiles=tiles, interpret=interpret),
        q,
        k,
        v,
        first,
        length,
        name="flash_prefill",
        # Heads of one group, which read the same keys, run concurrently.
        grid={"head": heads * group, "tile": q.shape[2] // rows, "batch": batch},
        shapes=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(q.shape[:3], jnp.float32),
        ],
        scratch=(
            mosaic.make_shared_memory_spec((_COMPUTE, tiles.queries, dim), q.dtype, tiled=True),
            mosaic.make_shared_memory_spec(stage, q.dtype, tiled=True),
            mosaic.make_shared_memory_spec(stage, q.dtype, tiled=True),
            mosaic.make_shared_memory_spec((_COMPUTE, tiles.queries), jnp.float32),
            mosaic.Barrier(num_barriers=_COMPUTE),
            ready,
            ready,
            free,
            free,
            mosaic.Barrier(num_arrivals=_COMPUTE),
        ),
        threads=("warpgroup", _COMPUTE + 1),
        interpret=interpret,
    )
    shape = (batch, heads, group, queries)
    return out[:, :, :queries].reshape(*shape, dim), lse[:, :, :queries].reshape(shape)


def _pad_rows(array: Array, multiple: int) -> Array:
    """Pad an array `[B, H, n, D]` with zeros until n is a multiple of `multiple`."""
    more = -array.shape[2] % multiple
    return jnp.pad(array, ((0, 0), (0, 0), (0, more), (0, 0))) if more else array


# Refs of a program (head, tile, batch), head over H query heads, all in global memory: q, out [B, H, T', D]; k, v [B,
# K, S', D]; first, length [B]; lse [B, H, T']. In shared memory: q and out [2, 64, D], k and v [stages, keys, D], lse
# [2, 64], and barriers: q is loaded; k, v are loaded; k, v may be overwritten; turns of the warpgroups.
def _program(
    q_ref,
    k_ref,
    v_ref,
    first_ref,
    length_ref,
    out_ref,
    lse_ref,
    memory,
    *,
    queries,
    group,
    tiles,
    interpret,
):
    _, k_smem, v_smem, _, _, k_ready, v_ready, k_free, v_free, _ = memory
    head, batch, me = (mosaic.axis_index(name) for name in ("head", "batch", "warpgroup"))
    rows = tiles.queries * _COMPUTE
    # The longest rows of the triangle start first, so that the last programs to finish are short ones.
    row = (q_ref.shape[2] // rows - 1 - mosaic.axis_index("tile")) * rows
    begin = first_ref[batch]
    tokens = jnp.minimum(length_ref[batch], k_ref.shape[2])
    # Both warpgroups run the same number of steps; masks hide keys later than a query.
    end = jnp.minimum(begin + jnp.minimum(row + rows, queries), tokens)
    end = jnp.where(begin + row < tokens, jnp.maximum(end, 0), 0)
    steps = lax.div(end + tiles.keys - 1, tiles.keys)

    @mosaic.when(me < _COMPUTE)
    def _():
        mosaic.set_max_registers(232, action="increase")
        at = (batch, head, mosaic.ds(row + me * tiles.queries, tiles.queries))
        first = begin + row + me * tiles.queries
        refs = (q_ref.at[at], out_ref.at[at], lse_ref.at[at])
        _attend_in_warpgroup(
            refs, memory, me, first, tokens, steps, tiles=tiles, interpret=interpret
        )

    @mosaic.when(me == _COMPUTE)
    def _():
        mosaic.set_max_registers(40, action="decrease")
        kv = lax.div(head, group)

        def load(index, _):
            slot = lax.rem(index, tiles.stages)
            at = (batch, kv, mosaic.ds(index * tiles.keys, tiles.keys))
            for source, target, ready, free in (
                (k_ref, k_smem, k_ready, k_free),
                (v_ref, v_smem, v_ready, v_free),
            ):
                mosaic.when(index >= tiles.stages)(
                    lambda free=free: mosaic.barrier_wait(free.at[slot])
                )
                mosaic.copy_in(source.at[at], target.at[slot], ready.at[slot])

        def drain(index, _):
            slot = lax.rem(index, tiles.stages)
            mosaic.barrier_wait(k_free.at[slot])
            mosaic.barrier_wait(v_free.at[slot])

        lax.fori_loop(0, steps, load, None)
        lax.fori_loop(jnp.maximum(steps - tiles.stages, 0), steps, drain, None)


def _attend_in_warpgroup(refs, memory, me, first, tokens, steps, *, tiles, interpret):
    """Compute the attention of one warpgroup's queries over `steps` blocks of keys; write output and log-sum-exp."""
    q_ref, out_ref, lse_ref = refs
    q_smem, k_smem, v_smem, lse_smem, q_ready, k_ready, v_ready, k_free, v_free, turns = memory
    q_smem = q_smem.at[me]
    lse_smem = lse_smem.at[me]
    count, dim = q_smem.shape
    kind = q_smem.dtype
    # exp(x) is 2 ** (x log2 e): one multiplication scales logits and changes the base.
    base = _LOG2E / math.sqrt(dim)
    registers = partial(mosaic.cast_to_wgmma_layout, interpret=interpret)
    numbers = partial(mosaic.make_tile_indices, interpret=interpret)

    def pass_on():
        mosaic.barrier_arrive(turns)
        mosaic.barrier_wait(turns)

    mosaic.copy_in(q_ref, q_smem, q_ready.at[me])
    mosaic.barrier_wait(q_ready.at[me])
    mosaic.when(steps > 0)(lambda: mosaic.barrier_wait(k_ready.at[0]))
    # The second warpgroup begins when the first is at its first softmax.
    mosaic.when(me == 1)(pass_on)

    def step(index, carry, *, masked):
        acc, top, total = carry
        slot = lax.rem(index, tiles.stages)
        s = mosaic.multiply_on_tensor_cores(
            q_smem, k_smem.at[slot], transposed=True, meanwhile=pass_on, interpret=interpret
        )
        mosaic.barrier_arrive(k_free.at[slot])
        if masked:
            # Real queries precede the padding, so no key that they see is padding.
            seen = numbers(s.shape, 1) + index * tiles.keys <= numbers(s.shape, 0) + first
            s = jnp.where(seen, s, MASKED)
        new_top = jnp.maximum(top, s.max(axis=1) * base)
        weights = jnp.exp2(s * base - mosaic.broadcast_over_columns(new_top, s))
        shrink = jnp.exp2(top - new_top)
        acc = acc * mosaic.broadcast_over_columns(shrink, acc)
        total = total * shrink + weights.sum(axis=1)
        acc, total, top, weights = lax.optimization_barrier(
            (acc, total, new_top, weights.astype(kind))
        )
        mosaic.barrier_arrive(turns)
        mosaic.barrier_wait(v_ready.at[slot])
        mosaic.barrier_wait(turns)

        def next_keys():
            after = lax.rem(index + 1, tiles.stages)
            mosaic.when(index + 1 < steps)(lambda: mosaic.barrier_wait(k_ready.at[after]))

        acc = mosaic.multiply_on_tensor_cores(
            weights, v_smem.at[slot], start=acc, meanwhile=next_keys, interpret=interpret
        )
        mosaic.barrier_arrive(v_free.at[slot])
        return acc, top, total

    carry = (
        registers(jnp.zeros((count, dim), jnp.float32)),
        registers(jnp.full((count,), MASKED, jnp.float32)),
        registers(jnp.zeros((count,), jnp.float32)),
    )
    # Blocks of keys completely before the first query need no mask.
    whole = jnp.minimum(lax.div(jnp.maximum(first + 1, 0), tiles.keys), steps)
    carry = lax.fori_loop(0, whole, partial(step, masked=False), carry)
    acc, top, total = lax.fori_loop(whole, steps, partial(step, masked=True), carry)
    mosaic.when(me == 0)(pass_on)

    def counts(position):
        return (position >= 0) & (position < tokens)

    real = counts(numbers((count,), 0) + first)
    total = jnp.where(real, total, 1.0)
    out = acc * mosaic.broadcast_over_columns(1.0 / total, acc)
    q_smem[...] = jnp.where(counts(numbers(acc.shape, 0) + first), out, 0.0).astype(kind)
    lse_smem[...] = jnp.where(real, top / _LOG2E + jnp.log(total), -jnp.inf)
    mosaic.commit()
    mosaic.copy_out(q_smem, out_ref)
    mosaic.copy_out(lse_smem, lse_ref)
    mosaic.wait_for_stores()

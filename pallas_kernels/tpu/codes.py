"""8-bit codes in the TPU's decode kernel: supported pools, their scales, and a token's new entries.

Codes are copied unchanged, and multiplied as numbers of the queries' dtype, which holds them exactly. Keys' scales
multiply logits, and values' scales softmax weights, along lanes. A sequence's scales are in VMEM, with 128 rows per
line::

    rows 0 to 127 | 128 to 255 | ... up to a complete line | a copy of the scales of the pool's last chunk

A chunk of rows that begins with a line reads its scales from there. The last chunk, which may begin within a line,
reads the copy. Segments are copied from a line's first row on: `UNIT`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import _compat_tpu as tpu
from pallas_kernels.tpu.rows import CHUNK, LANES, TILE, BlockCopyRing

# Keys or values: an array, or codes `i8[B, P, D]` and scales `f16[B, P]`, as in `Int8Store`.
Pair = tuple[Array, Array]
Rows = Array | Pair
# Rows per product: with BLOCK rows copies would wait for products, with more rows registers spill on a v5e.
CODED_BLOCK = 1280
# A segment's first block begins at a multiple of this row.
UNIT = LANES
# Rows of an HBM tile in 8 bits, if pools have complete tiles.
_TILE = 32
# Maximum rows of a pool whose scales VMEM holds: 4 MB of keys and values, and a second buffer.
_MOST_SCALES = 1 << 19


def supports_int8_pool(pool_rows: int) -> bool:
    """True if the TPU kernel supports int8 pools of `pool_rows` rows: a multiple of 8, at most 2**19."""
    return pool_rows % TILE == 0 and pool_rows <= _MOST_SCALES


def get_tile_rows(pool: Array) -> int:
    """Return the number of rows in an HBM tile of keys or values `[B, P, D]`: 32 if int8 and 32 divides P, else 8."""
    return _TILE if pool.dtype == jnp.int8 and pool.shape[1] % _TILE == 0 else TILE


def choose_product_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """Return the dtype in which codes are multiplied by queries: bfloat16 for bfloat16 queries, else float32."""
    return jnp.dtype(jnp.bfloat16 if jnp.dtype(dtype) == jnp.dtype(jnp.bfloat16) else jnp.float32)


def lay_out_scales(leaf: Array) -> Array:
    """Convert scales `[B, P]` to float32 lines `[B, n, 128]`; unless 128 divides P, add a copy of the last chunk's."""
    wide = leaf.astype(jnp.float32)
    rows = leaf.shape[1]
    if rows % LANES:
        whole = lambda part: jnp.pad(part, ((0, 0), (0, -part.shape[1] % LANES)))  # noqa: E731
        wide = jnp.concatenate([whole(wide), whole(wide[:, rows - min(CHUNK, rows) :])], axis=1)
    return wide.reshape(len(leaf), -1, LANES)


def append_entry_scales(pool: Any, new: Any, end: Array) -> tuple[Pair, Array]:
    """Write new entries' scales to rows `end`; return pool (codes as given, scales), entries dequantised and as codes.

    Of an entry, line 0 is dequantised, as later steps read it, and line 1 has its codes.
    """
    codes, scales = pool
    code, scale = new
    batch = jnp.arange(len(codes), dtype=jnp.int32)[:, None]
    wide = code.astype(jnp.float32)
    put = scales.at[batch, end].set(scale, mode="drop", unique_indices=True)
    return (codes, put), jnp.stack([wide * scale.astype(jnp.float32)[..., None], wide], axis=2)


def load_block_scales(scales: Any, copies: BlockCopyRing, b: Any, h: Any, index: Any) -> Array:
    """Return the scales of the rows of a segment's block `index`, `f32[1, rows]`, inside the kernel."""
    last = copies.rows - copies.chunk
    parts = []
    behind = last if copies.rows % LANES == 0 else -(-copies.rows // LANES) * LANES
    for number in range(copies.size // copies.chunk):
        begin = copies.find_first_row(b, h) + index * copies.size + number * copies.chunk
        line = lax.div(jnp.where(begin > last, behind, begin), jnp.int32(LANES))
        lines = [scales[0, tpu.ds(line + each, 1)] for each in range(-(-copies.chunk // LANES))]
        parts.append(jnp.concatenate(lines, axis=1)[:, : copies.chunk])
    return jnp.concatenate(parts, axis=1)

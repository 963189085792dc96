"""Backend for TPUs: splash attention in prefill, Pallas kernels over segments, else XLA without CPU-specific forms."""

import dataclasses
from types import ModuleType
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxkv.attention.backend import Capabilities, DeviceTraits
from jaxkv.attention.shaping import PLAIN, Shaping
from jaxkv.attention.steps import Gathered, NewEntries
from jaxkv.attention.xla import Reach
from jaxkv.attention.xla_backend import Xla

# Queries of all prompts per block of XLA where splash attention is not supported, to keep logits small.
_QUERIES = 128
# Maximum number of queries per kv head that the kernel over segments holds in VMEM; more use XLA.
_MOST_ROWS = 256
_LANES = 128


class Tpu(Xla):
    """Backend for TPUs: prefill by splash attention, reads and appends of segments by its own kernel.

    XLA computes prefill in dtypes other than bfloat16, with a padded length that is no multiple of 128, or of a block
    of a prompt. XLA also reads pools in float16 or 4 bits, pools without complete tiles, head dims that are no multiple
    of 128, and many queries. Scoring and eviction are always XLA's.

    Attributes:
        interpret: True runs the kernels as plain JAX operations, for tests.
    """

    can = Capabilities(
        sliding_windows=True,
        operands_apart=True,
        embeds_in_blocks=True,
        custom_calls=("tpu_custom_call",),
    )
    interpret: ClassVar[bool] = False

    @property
    def _decode(self) -> ModuleType:
        """Module `pallas_kernels.tpu.decode`, imported on first use."""
        import pallas_kernels.tpu.decode as decode

        return decode

    @property
    def _prefill(self) -> ModuleType:
        """Module `pallas_kernels.tpu.prefill`, imported on first use."""
        import pallas_kernels.tpu.prefill as prefill

        return prefill

    def summed_bytes(self, prompts: int, padded_len: int, heads: int, queries: int) -> int:
        """Bytes of two more copies of the queries, splash attention's log-sum-exp, and one block's logits."""
        return 2 * queries + 4 * heads * (
            _LANES * self._prefill.tokens_at_once(prompts, padded_len) + _QUERIES * padded_len
        )

    def invalid(self, setting: DeviceTraits) -> str | None:
        """Return an error text for devices other than TPUs; None on TPUs."""
        return (
            None
            if setting.platform == "tpu"
            else f"not supported on {setting.platform}: it needs a TPU. Use auto or xla"
        )

    def prefill(
        self,
        q: Array,
        k: Array,
        v: Array,
        length: Array,
        first: Array | None = None,
        *,
        lse: bool = True,
        shaping: Shaping = PLAIN,
        window: int | None = None,
    ) -> tuple[Array, Array | None]:
        """Compute causal attention by splash attention, or by XLA if not supported; return output, log-sum-exp."""
        if first is not None:
            return super().prefill(q, k, v, length, first, lse=lse, shaping=shaping, window=window)
        if self._prefill.takes(q.shape[3], q.dtype):
            how = {"window": window, "softcap": shaping.softcap, "interpret": self.interpret}
            if shaping.sink_logits is None:
                return self._prefill.flash(q, k, v, lse=lse, **how)
            return shaping.joined(*self._prefill.flash(q, k, v, lse=True, **how))
        size = _block(q.shape[3], len(q))

        def some(index: Array) -> tuple[Array, Array | None]:
            """Return output and log-sum-exp of one block of queries."""
            begin = jnp.broadcast_to(index * size, length.shape)
            mine = lax.dynamic_slice_in_dim(q, index * size, size, axis=3)
            run = super(Tpu, self).prefill
            return run(mine, k, v, length, begin, shaping=shaping, window=window)

        out, found = lax.map(some, jnp.arange(q.shape[3] // size, dtype=jnp.int32))
        total = jnp.moveaxis(found, 0, 3).reshape(q.shape[:4]) if lse else None
        return jnp.moveaxis(out, 0, 3).reshape(q.shape), total

    def column_sums(
        self,
        q: Array,
        k: Array,
        lse: Array,
        length: Array,
        first: Array | None = None,
        *,
        shaping: Shaping = PLAIN,
    ) -> Array:
        """Return the attention `f32[B, K, G, S]` that keys receive from T queries, block by block."""
        begin, size = jnp.zeros_like(length) if first is None else first, _block(q.shape[3], 1)

        def one(of: tuple[Array, ...]) -> Array:
            """Return the sums `f32[1, K, G, S]` of one prompt."""
            q, k, lse, length, begin = (each[None] for each in of)

            def more(index: Array, sums: Array) -> Array:
                """Loop body: add the sums of one more block of queries."""
                mine, total = (
                    lax.dynamic_slice_in_dim(each, index * size, size, axis=3) for each in (q, lse)
                )
                found = super(Tpu, self).column_sums(
                    mine, k, total, length, begin + index * size, shaping=shaping
                )
                return sums + found

            none = jnp.zeros((*q.shape[:3], k.shape[2]), jnp.float32)
            return lax.fori_loop(0, q.shape[3] // size, more, none)

        return lax.map(one, (q, k, lse, length, begin))[:, 0]

    def attend(
        self, q: Array, store: Any, reach: Reach, *, shaping: Shaping = PLAIN
    ) -> tuple[Array, Array]:
        """Compute attention of R queries per kv head over its segment, by a kernel or XLA; return output, lse."""
        if not self._takes(store, reach):
            store, reach = Gathered(*reach.view(store)), dataclasses.replace(reach, rotated=None)
        if q.shape[2] > _MOST_ROWS or not self._takes(store, reach):
            return super().attend(q, store, reach, shaping=shaping)
        how = {"softcap": shaping.softcap, "interpret": self.interpret}
        rows = (*store.held, reach.start, reach.length)
        return shaping.joined(*self._decode.attend(q, *rows, **how))

    def gathered(self, k: Array, v: Array, rows: Array) -> tuple[Array, Array]:
        """Gather pool rows by index; return keys and values, those of row 0 where an index is -1.

        On a TPU, masking would cost as much time as reading the entries.
        """
        at, batch = (
            jnp.maximum(rows, 0).reshape(len(rows), -1),
            jnp.arange(len(rows), dtype=jnp.int32)[:, None],
        )
        keys, values = (each.at[batch, at].get(mode="promise_in_bounds") for each in (k, v))
        return keys, values

    def _takes(self, store: Any, reach: Reach) -> bool:
        """True if the kernel reads and writes a store's entries in their encoding.

        These are entries in bfloat16, float32 or 8 bits, in complete tiles, of head dims that 128 divides. A TPU stores
        entries of fewer lanes transposed, to avoid padding, and a kernel would need a copy. Codes require a complete
        chunk, whose scales fill registers, and a pool per layer. With a shared pool each layer would copy all layers'
        scales.
        """
        coded = store.kernels == ("bytes", "bytes")
        if reach.rotated is not None or not coded and store.kernels != ("rows", "rows"):
            return False
        rows = store.held[0][0] if coded else store.held[0]
        filled = rows.shape[2] % _LANES == 0
        if coded:
            filled &= rows.shape[1] >= self._decode.CHUNK
        whole = self.interpret or filled
        return (
            whole and not (coded and reach.shared) and self._decode.takes(rows.shape[1], rows.dtype)
        )

    def append_and_attend(
        self, q: Array, new: NewEntries, pool: Any, reach: Reach, *, shaping: Shaping = PLAIN
    ) -> tuple[Array, Array, Any]:
        """Append new entries to their segments and attend, in one kernel if supported; return output, lse, pool."""
        store = pool.store
        if not self._takes(store, reach):
            return super().append_and_attend(q, new, pool, reach, shaping=shaping)
        out, lse, k, v = self._decode.append_and_attend(
            q,
            store.of(new.k[:, :, 0], new.v[:, :, 0]).held,
            *store.held,
            reach.start,
            reach.length - new.count[:, None],
            new.count,
            softcap=shaping.softcap,
            interpret=self.interpret,
        )
        pool = dataclasses.replace(pool.placed(new), store=store.holding(k, v))
        return *shaping.joined(out, lse), pool


class InterpretedTpu(Tpu):
    """Backend for TPUs whose kernels run as plain JAX operations on any device, for tests; very slow."""

    interpret = True

    def invalid(self, setting: DeviceTraits) -> str | None:
        """Return None (no error): interpreted kernels run on every device."""
        return None

    def suits(self, setting: DeviceTraits) -> bool:
        """Always False: AUTO never chooses interpreted kernels."""
        return False


def _block(queries: int, prompts: int) -> int:
    """Return the queries per block: the largest divisor of their number with up to `_QUERIES` in all prompts."""
    most = max(1, min(queries, _QUERIES // prompts))
    return next(size for size in range(most, 0, -1) if queries % size == 0)

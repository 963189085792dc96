"""Backend for TPUs: splash attention in prefill, Pallas kernels over segments, else XLA without CPU-specific forms."""

import dataclasses
from types import ModuleType
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxkv.attention.backend import BackendCapabilities, DeviceTraits
from jaxkv.attention.shaping import PLAIN, LogitShaping
from jaxkv.attention.steps import GatheredEntries, NewEntries
from jaxkv.attention.xla import SegmentRanges
from jaxkv.attention.xla_backend import XlaBackend

# Queries of all prompts per block of XLA where splash attention is not supported, to keep logits small.
_QUERIES = 128
# Maximum number of queries per kv head that the kernel over segments holds in VMEM; more use XLA.
_MOST_ROWS = 256
_LANES = 128


class TpuBackend(XlaBackend):
    """Backend for TPUs: prefill by splash attention, reads and appends of segments by its own kernel, else by XLA.

    XLA computes prefill in dtypes other than bfloat16, with a padded length that is no multiple of 128, or of a block
    of a prompt. XLA also reads pools in float16 or 4 bits, pools without complete tiles, head dims that are no multiple
    of 128, and many queries. Scoring and eviction are always XLA's.

    Attributes:
        interpret: True runs the kernels as plain JAX operations, for tests.
    """

    can = BackendCapabilities(
        sliding_windows=True,
        operands_apart=True,
        embeds_in_blocks=True,
        custom_calls=("tpu_custom_call",),
    )
    interpret: ClassVar[bool] = False

    @property
    def _decode_kernels(self) -> ModuleType:
        """The module `pallas_kernels.tpu.decode`, imported on first use."""
        import pallas_kernels.tpu.decode as decode

        return decode

    @property
    def _prefill_kernels(self) -> ModuleType:
        """The module `pallas_kernels.tpu.prefill`, imported on first use."""
        import pallas_kernels.tpu.prefill as prefill

        return prefill

    def count_column_sum_bytes(
        self, prompts: int, padded_len: int, heads: int, queries: int
    ) -> int:
        """Return extra prefill bytes for attention sums per key: two query copies, lse, a block's logits."""
        return 2 * queries + 4 * heads * (
            _LANES * self._prefill_kernels.count_batched_tokens(prompts, padded_len)
            + _QUERIES * padded_len
        )

    def get_unsupported_reason(self, setting: DeviceTraits) -> str | None:
        """Return an error text for devices other than TPUs; None on TPUs."""
        return (
            None
            if setting.platform == "tpu"
            else f"not supported on {setting.platform}: it needs a TPU. Use auto or xla"
        )

    def compute_prefill_attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        length: Array,
        first: Array | None = None,
        *,
        lse: bool = True,
        shaping: LogitShaping = PLAIN,
        window: int | None = None,
    ) -> tuple[Array, Array | None]:
        """Compute causal attention by splash attention, or XLA if unsupported; return output, log-sum-exp or None."""
        if first is not None:
            return super().compute_prefill_attention(
                q, k, v, length, first, lse=lse, shaping=shaping, window=window
            )
        if self._prefill_kernels.supports_prompt(q.shape[3], q.dtype):
            how = {"window": window, "softcap": shaping.softcap, "interpret": self.interpret}
            if shaping.sink_logits is None:
                return self._prefill_kernels.flash(q, k, v, lse=lse, **how)
            return shaping.include_sink_logits(
                *self._prefill_kernels.flash(q, k, v, lse=True, **how)
            )
        size = _choose_query_block(q.shape[3], len(q))

        def attend_query_block(index: Array) -> tuple[Array, Array | None]:
            """Return attention output and log-sum-exp of block `index` of the queries of all prompts, by XLA."""
            begin = jnp.broadcast_to(index * size, length.shape)
            mine = lax.dynamic_slice_in_dim(q, index * size, size, axis=3)
            run = super(TpuBackend, self).compute_prefill_attention
            return run(mine, k, v, length, begin, shaping=shaping, window=window)

        out, found = lax.map(attend_query_block, jnp.arange(q.shape[3] // size, dtype=jnp.int32))
        total = jnp.moveaxis(found, 0, 3).reshape(q.shape[:4]) if lse else None
        return jnp.moveaxis(out, 0, 3).reshape(q.shape), total

    def sum_attention_per_key(
        self,
        q: Array,
        k: Array,
        lse: Array,
        length: Array,
        first: Array | None = None,
        *,
        shaping: LogitShaping = PLAIN,
    ) -> Array:
        """Return causal attention `f32[B, K, G, S]` to each key, summed over T queries of given `lse`, in blocks."""
        begin = jnp.zeros_like(length) if first is None else first
        size = _choose_query_block(q.shape[3], 1)

        def sum_one_prompt_attention(of: tuple[Array, ...]) -> Array:
            """Return the attention `f32[1, K, G, S]` that one prompt's keys receive, summed over its queries."""
            q, k, lse, length, begin = (each[None] for each in of)

            def add_query_block_sums(index: Array, sums: Array) -> Array:
                """Loop body: add the attention that keys receive from one more block of queries to their sums."""
                mine, total = (
                    lax.dynamic_slice_in_dim(each, index * size, size, axis=3) for each in (q, lse)
                )
                found = super(TpuBackend, self).sum_attention_per_key(
                    mine, k, total, length, begin + index * size, shaping=shaping
                )
                return sums + found

            none = jnp.zeros((*q.shape[:3], k.shape[2]), jnp.float32)
            return lax.fori_loop(0, q.shape[3] // size, add_query_block_sums, none)

        return lax.map(sum_one_prompt_attention, (q, k, lse, length, begin))[:, 0]

    def attend_to_segments(
        self, q: Array, store: Any, reach: SegmentRanges, *, shaping: LogitShaping = PLAIN
    ) -> tuple[Array, Array]:
        """Compute attention of R queries per kv head over its segment, by a kernel or XLA; return output, lse."""
        if not self._supports_store(store, reach):
            store = GatheredEntries(*reach.decode_rotated_entries(store))
            reach = dataclasses.replace(reach, rotated=None)
        if q.shape[2] > _MOST_ROWS or not self._supports_store(store, reach):
            return super().attend_to_segments(q, store, reach, shaping=shaping)
        how = {"softcap": shaping.softcap, "interpret": self.interpret}
        rows = (*store.kernel_inputs, reach.start, reach.length)
        return shaping.include_sink_logits(*self._decode_kernels.attend(q, *rows, **how))

    def gather_pool_rows(self, k: Array, v: Array, rows: Array) -> tuple[Array, Array]:
        """Gather pool rows by index; return keys and values `[B, K * T, D]`, those of row 0 where an index is -1.

        On a TPU, masking would cost as much time as reading the entries.
        """
        at = jnp.maximum(rows, 0).reshape(len(rows), -1)
        batch = jnp.arange(len(rows), dtype=jnp.int32)[:, None]
        keys, values = (each.at[batch, at].get(mode="promise_in_bounds") for each in (k, v))
        return keys, values

    def _supports_store(self, store: Any, reach: SegmentRanges) -> bool:
        """True if the kernel over segments reads and writes a store's entries without decoding and without rotation.

        These are entries in bfloat16, float32 or 8 bits, in complete tiles, of head dims that 128 divides. A TPU stores
        entries of fewer lanes transposed, to avoid padding, and a kernel would need a copy. Codes require a complete
        chunk, whose scales fill registers, and a pool per layer. With a shared pool each layer would copy all layers'
        scales.
        """
        coded = store.kernels == ("bytes", "bytes")
        if reach.rotated is not None or not coded and store.kernels != ("rows", "rows"):
            return False
        rows = store.kernel_inputs[0][0] if coded else store.kernel_inputs[0]
        filled = rows.shape[2] % _LANES == 0
        if coded:
            filled &= rows.shape[1] >= self._decode_kernels.CHUNK
        whole = self.interpret or filled
        return (
            whole
            and not (coded and reach.shared)
            and self._decode_kernels.supports_pool(rows.shape[1], rows.dtype)
        )

    def append_and_attend(
        self,
        q: Array,
        new: NewEntries,
        pool: Any,
        reach: SegmentRanges,
        *,
        shaping: LogitShaping = PLAIN,
    ) -> tuple[Array, Array, Any]:
        """Append new entries to their segments and attend, in one kernel if supported; return output, lse, pool."""
        store = pool.store
        if not self._supports_store(store, reach):
            return super().append_and_attend(q, new, pool, reach, shaping=shaping)
        out, lse, k, v = self._decode_kernels.append_and_attend(
            q,
            store.encode_entries(new.k[:, :, 0], new.v[:, :, 0]).kernel_inputs,
            *store.kernel_inputs,
            reach.start,
            reach.length - new.count[:, None],
            new.count,
            softcap=shaping.softcap,
            interpret=self.interpret,
        )
        pool = dataclasses.replace(
            pool.append_positions_and_scores(new), store=store.store_kernel_outputs(k, v)
        )
        return *shaping.include_sink_logits(out, lse), pool


class InterpretedTpuBackend(TpuBackend):
    """Backend for TPUs whose kernels run as plain JAX operations on any device, for tests; very slow."""

    interpret = True

    def get_unsupported_reason(self, setting: DeviceTraits) -> str | None:
        """Return None (no error): interpreted kernels run on every device."""
        return None

    def is_auto_candidate(self, setting: DeviceTraits) -> bool:
        """Always False: AUTO never chooses interpreted kernels."""
        return False


def _choose_query_block(queries: int, prompts: int) -> int:
    """Return queries per block: the largest divisor of `queries` up to 128 / `prompts`, at least 1."""
    most = max(1, min(queries, _QUERIES // prompts))
    return next(size for size in range(most, 0, -1) if queries % size == 0)

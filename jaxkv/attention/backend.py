"""`AttentionBackend`: the interface of a device's attention functions, with XLA defaults for all optional ones."""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.attention.merging import merge_attention_outputs
from jaxkv.attention.shaping import PLAIN, LogitShaping
from jaxkv.attention.steps import GatheredEntries, NewEntries, UnrotatedProjections, WorkTable
from jaxkv.attention.xla import SegmentRanges


class DeviceTraits(NamedTuple):
    """Named tuple of a device's platform and GPU capability and a model's dtype and head dim, which backends check.

    Attributes:
        platform: `cpu`, `is_nvidia_gpu` (or `cuda`), `tpu`.
        dtype: dtype of the model.
        head_dim: D.
        capability: compute capability of a GPU, such as (9, 0) for Hopper; None if unknown.
    """

    platform: str
    dtype: jnp.dtype
    head_dim: int
    capability: tuple[int, int] | None = None

    @property
    def is_nvidia_gpu(self) -> bool:
        """True if the platform name is `gpu` or `cuda`, both of which are taken for an NVIDIA GPU."""
        return self.platform in ("gpu", "cuda")


@frozen_dataclass
class BackendCapabilities:
    """Dataclass of what a backend supports and which program forms are faster on it; programs choose by its fields.

    Attributes:
        at_once: True if `prefill` accepts all sequences of a batch in one call. If False, prompts are processed one by
            one in blocks of queries, so that padding costs no time.
        query_copies: number of arrays of the size of one layer's queries that `prefill` holds, including its output.
        sliding_windows: True if `prefill` supports a `window`; if False, layers with a sliding window use XLA.
        few_launches: True if each XLA operation costs a launch, so that one sort or reduction beats several passes.
        operands_apart: True if norms and activations of an MLP over a prompt are computed before the products that read
            them. If False, the compiler may fuse them into the products and recompute them per tile.
        embeds_in_blocks: True if devices of a mesh sum a prompt's embeddings one block of tokens at a time. If False,
            they do in one step, for which a compiler may copy all embeddings.
        steps: forms of entries (`Store.kernels`) for which steps of one token run `compute_decode_attention` and
            `add_norm`.
        evicts: forms of entries that `evict_lowest_entries` and `move_segment_entries` read and write.
        most_channels: largest head dim that its kernels support; wider heads are for XLA (`fit_head_dim`).
        custom_calls: names of custom calls in its programs, for which `jax.export` guarantees no compatibility.
    """

    at_once: bool = True
    query_copies: int = 2
    sliding_windows: bool = False
    few_launches: bool = False
    operands_apart: bool = False
    embeds_in_blocks: bool = False
    steps: frozenset[str] = frozenset()
    evicts: frozenset[str] = frozenset()
    most_channels: int = 512
    custom_calls: tuple[str, ...] = ()


class AttentionBackend(abc.ABC):
    """Abstract base class of a device's attention functions over prompts and pools; optional ones have XLA defaults.

    Required are `compute_prefill_attention`, `sum_attention_per_key`, `average_window_attention`, `attend_to_segments`
    and `attend_and_score`. All others have XLA defaults,
    except `evict_lowest_entries` and `move_segment_entries`, which are called only for entries named in `can.evicts`.
    Overrides call `super()` for inputs that their kernel does not support.

    A backend is a file with a subclass, and one line of `Implementation` that names it. Stores and pools are those of
    `jaxkv.cache`.

    Attributes:
        can: the backend's capabilities.
    """

    can: ClassVar[BackendCapabilities] = BackendCapabilities()

    def count_column_sum_bytes(
        self, prompts: int, padded_len: int, heads: int, queries: int
    ) -> int:
        """Return extra prefill bytes for attention sums per key, beyond `compute_prefill_attention`; 0 by default.

        Args:
            prompts: number of prompts in a batch.
            padded_len: padded length of the prompts in tokens.
            heads: query heads of one device.
            queries: bytes of one layer's queries of all prompts.
        """
        return 0

    def get_unsupported_reason(self, setting: DeviceTraits) -> str | None:
        """Return why the backend does not support a model on a device, as an error text; None if it does (the default).

        Args:
            setting: the model and the device.

        Returns:
            The error text, or None.
        """
        return None

    def is_auto_candidate(self, setting: DeviceTraits) -> bool:
        """True if AUTO may choose this backend for a model on a device; by default wherever the model is supported.

        Args:
            setting: the model and the device.

        Returns:
            True or False.
        """
        return self.get_unsupported_reason(setting) is None

    @abc.abstractmethod
    def compute_prefill_attention(
        self,
        q: Float[Array, "B K G T D"],
        k: Float[Array, "B K S D"],
        v: Float[Array, "B K S D"],
        length: Int[Array, " B"],
        first: Int[Array, " B"] | None = None,
        *,
        lse: bool = True,
        shaping: LogitShaping = PLAIN,
        window: int | None = None,
    ) -> tuple[Float[Array, "B K G T D"], Float[Array, "B K G T"] | None]:
        """Compute causal attention of T queries per prompt, with softcap, sinks and window; return output, lse or None.

        Args:
            q: rotated queries; T divides S.
            k: rotated keys at positions 0 .. S.
            v: values, finite everywhere.
            length: tokens of each prompt. Outputs of later queries are padding: finite and undefined.
            first: position of each sequence's first query, a multiple of T; 0 by default.
            lse: True to return the log-sum-exp.
            shaping: softcap and sink logits.
            window: sliding window of the layer in tokens, the query's own included; passed only to backends with
                `sliding_windows`.

        Returns:
            The output in q's dtype, and the natural log-sum-exp of the scaled logits, float32, or None without `lse`.
        """

    @abc.abstractmethod
    def sum_attention_per_key(
        self,
        q: Float[Array, "B K G T D"],
        k: Float[Array, "B K S D"],
        lse: Float[Array, "B K G T"],
        length: Int[Array, " B"],
        first: Int[Array, " B"] | None = None,
        *,
        shaping: LogitShaping = PLAIN,
    ) -> Float[Array, "B K G S"]:
        """Return causal attention `f32[B, K, G, S]` that keys receive, summed over T queries per prompt of given `lse`.

        Args:
            q: rotated queries; T divides S.
            k: rotated keys at positions 0 .. S.
            lse: log-sum-exp from `compute_prefill_attention`.
            length: tokens of each prompt; later queries are padding and are ignored.
            first: position of each sequence's first query, a multiple of T; 0 by default.
            shaping: softcap and sink logits.

        Returns:
            Sums of probabilities, float32.
        """

    @abc.abstractmethod
    def average_window_attention(
        self,
        q: Float[Array, "B K G w D"],
        k: Float[Array, "B K S D"],
        positions: Int[Array, "B w"],
        length: Int[Array, " B"],
        *,
        shaping: LogitShaping = PLAIN,
    ) -> Float[Array, "B K S"]:
        """Return the attention `f32[B, K, S]` to each key: mean over a prompt's last w queries and the G query heads.

        Args:
            q: rotated queries.
            k: rotated keys at positions 0 .. S.
            positions: positions of the queries; negative ones are padding (of a prompt shorter than w) and are ignored.
            length: tokens of each prompt.
            shaping: softcap and sink logits.

        Returns:
            The means, float32.
        """

    @abc.abstractmethod
    def attend_to_segments(
        self,
        q: Float[Array, "B K R D"],
        store: Any,
        reach: SegmentRanges,
        *,
        shaping: LogitShaping = PLAIN,
    ) -> tuple[Float[Array, "B K R D"], Float[Array, "B K R"]]:
        """Compute attention of R queries per kv head to the entries in `reach` of its segment; return output, lse.

        Args:
            q: rotated queries; R combines the group and, for several tokens, their number.
            store: keys and values of the pool, which `reach.view` returns as arrays.
            reach: the entries to read.
            shaping: softcap and sink logits.

        Returns:
            The output in q's dtype and the natural log-sum-exp of the scaled logits, float32.
        """

    @abc.abstractmethod
    def attend_and_score(
        self,
        q: Float[Array, "B K G D"],
        store: Any,
        reach: SegmentRanges,
        score: Float[Array, "B P"],
        counts: Bool[Array, " B"],
        *,
        shaping: LogitShaping = PLAIN,
    ) -> tuple[Float[Array, "B K G D"], Float[Array, "B P"]]:
        """Attend with one token; return output, scores plus mean attention of heads for sequences in mask `counts`.

        Args:
            q: rotated queries.
            store: keys and values of the pool.
            reach: the entries to read.
            score: accumulated attention of the entries.
            counts: mask of the sequences whose attention is added to the scores.
            shaping: softcap and sink logits.

        Returns:
            The output, and the scores.
        """

    def pack_kept_entries(
        self, k: Float[Array, "B K S D"], v: Float[Array, "B K S D"], source: Int[Array, "B P"]
    ) -> tuple[Float[Array, "B P D"], Float[Array, "B P D"], Int[Array, "B P"]]:
        """Gather a layer's keys and values at indices `source`; return keys, values and positions of the pool's P rows.

        Args:
            k: keys as the pool stores them.
            v: values.
            source: head * S + position for each pool row; -1 for none.

        Returns:
            Keys, values and positions of the pool; rows without a source are 0, 0 and -1.
        """
        batch, heads, padded_len, dim = k.shape
        real = source >= 0
        at = jnp.where(real, source, 0)[..., None]
        keys, values = (
            jnp.where(
                real[..., None],
                jnp.take_along_axis(a.reshape(batch, heads * padded_len, dim), at, axis=1),
                0,
            )
            for a in (k, v)
        )
        return keys, values, jnp.where(real, source % padded_len, -1)

    def gather_pool_rows(
        self, k: Float[Array, "B P D"], v: Float[Array, "B P D"], rows: Int[Array, "B K T"]
    ) -> tuple[Float[Array, "B n D"], Float[Array, "B n D"]]:
        """Gather T pool rows per segment by index; return keys and values `[B, K * T, D]`, finite where an index is -1.

        Args:
            k: keys of a pool.
            v: values.
            rows: pool rows of each head; -1 for none.

        Returns:
            Keys and values, the T entries of each head consecutive.
        """
        return self.pack_kept_entries(k[:, None], v[:, None], rows.reshape(rows.shape[0], -1))[:2]

    def append_and_attend(
        self,
        q: Float[Array, "B K G D"],
        new: NewEntries,
        pool: Any,
        reach: SegmentRanges,
        *,
        shaping: LogitShaping = PLAIN,
    ) -> tuple[Float[Array, "B K G D"], Float[Array, "B K G"], Any]:
        """Append a token's entry to each segment; attend to the entries in `reach`; return output, log-sum-exp, pool.

        Args:
            q: rotated queries.
            new: the entry of each kv head.
            pool: the pool, written in place if it is donated.
            reach: the entries to read, including the new one.
            shaping: softcap and sink logits.

        Returns:
            Output and log-sum-exp as from `attend_to_segments`, and the pool with the new entries.
        """
        pool = pool.append_entries(new)
        return *self.attend_to_segments(q, pool.store, reach, shaping=shaping), pool

    def append_attend_and_score(
        self,
        q: Float[Array, "B K G D"],
        new: NewEntries,
        pool: Any,
        reach: SegmentRanges,
        *,
        shaping: LogitShaping = PLAIN,
    ) -> tuple[Float[Array, "B K G D"], Any]:
        """Append a token's entry, attend, and add the attention received to the pool's scores; return output, pool.

        Args:
            q: rotated queries.
            new: the entry of each kv head.
            pool: a pool with scores.
            reach: the entries to read, including the new one.
            shaping: softcap and sink logits.

        Returns:
            The output, and the pool with the new entries.
        """
        pool = pool.append_entries(new)
        counts = new.count > 0
        given = (pool.store, reach, pool.score, counts)
        out, score = self.attend_and_score(q, *given, shaping=shaping)
        return out, dataclasses.replace(pool, score=score)

    def build_work_table(
        self,
        start: Int[Array, "L B K"],
        length: Int[Array, "L B K"],
        *,
        dim: int,
        itemsize: int | float,
    ) -> Any:
        """Return the work table for `compute_decode_attention`: rows that each kernel program reads; None by default.

        Args:
            start: first row of each segment.
            length: entries of each segment before the step.
            dim: D.
            itemsize: bytes of a stored element, mean of keys and values.

        Returns:
            The table, or None if `compute_decode_attention` needs none.
        """
        return None

    def compute_decode_attention(
        self,
        q: Float[Array, "B K G D"],
        split: UnrotatedProjections | None,
        new: NewEntries,
        pool: Any,
        reach: SegmentRanges,
        work: WorkTable,
        *,
        scored: bool = False,
        shaping: LogitShaping = PLAIN,
    ) -> tuple[Float[Array, "M K G D"], Any]:
        """Append an entry; attend to `reach` and selected entries; add to scores if `scored`; return output, pool.

        Args:
            q: rotated queries.
            split: queries, keys and values before rotation, for kernels that rotate them; None in other steps.
            new: the entry of each kv head.
            pool: the pool, written in place if it is donated.
            reach: the entries that every layer reads, including the new one.
            work: the work table, and the selected entries.
            scored: True to add attention to the pool's scores.
            shaping: softcap and sink logits.

        Returns:
            The output, undefined in padding sequences, and the pool.
        """
        if scored:
            return self.append_attend_and_score(q, new, pool, reach, shaping=shaping)
        out, lse, pool = self.append_and_attend(q, new, pool, reach, shaping=shaping)
        if work.rows is None or work.held is None:
            return out, pool
        start = work.start[work.layer]
        size = work.rows.shape[2]
        real = jnp.arange(size, dtype=jnp.int32) < work.held[..., None]
        rows = jnp.where(real, start[..., None] + work.rows, -1)
        held = SegmentRanges.make_strided_ranges(jnp.broadcast_to(work.held, start.shape), size)
        k, v = pool.store.decode_entries()
        chosen = GatheredEntries(*self.gather_pool_rows(k, v, rows))
        some = self.attend_to_segments(q, chosen, held, shaping=shaping.without_sink_logits)
        return merge_attention_outputs(*some, out, lse), pool

    def add_norm(
        self,
        x: Float[Array, "M N E"],
        added: Float[Array, "n M N E"],
        scale: Float[Array, " E"],
        *,
        eps: float,
        dtype: jnp.dtype,
    ) -> tuple[Float[Array, "M N E"], Float[Array, "M N E"]]:
        """Add the n split-K parts of a product to hidden states; return the sum, and the sum after RMS normalisation.

        Args:
            x: hidden states.
            added: the n split-K parts.
            scale: scale of the norm.
            eps: epsilon of the norm.
            dtype: dtype of the returned sum.

        Returns:
            The sum, and its norm in the scale's dtype.
        """
        wide = x.astype(jnp.float32) + added.astype(jnp.float32).sum(axis=0)
        normed = wide * lax.rsqrt((wide * wide).mean(axis=-1, keepdims=True) + eps)
        return wide.astype(dtype), (normed * scale.astype(jnp.float32)).astype(scale.dtype)

    def evict_lowest_entries(
        self, *args: Array | None, weigh: Any
    ) -> tuple[Array, Array, Array, Array | None, Array]:
        """In segments above their limit evict the lowest-ranked entry; return pool arrays, flags. Raises by default.

        Args:
            *args: keys, values, positions and scores of a pool, and `start`, `length`, `limit`, `recent`, `seen` and
                `prompt` of its segments, as for `pallas_kernels.evict_lowest_entries`.
            weigh: hashable function of scores, positions, `seen` and `prompt` that returns ranks and a mask of
                evictable entries.

        Returns:
            Keys, values, positions and scores; and i32 `[B, K]`, 1 for each segment with an evicted entry, else 0.
        """
        raise NotImplementedError

    def move_segment_entries(self, *args: Array | None) -> tuple[Array, Array, Array, Array | None]:
        """Move one entry of each masked segment over another; return the pool's arrays. NotImplementedError by default.

        Args:
            *args: keys, values, positions and scores of a pool; overwritten entries, moved entries, and a mask of the
                segments, each `[B, K]`, as for `pallas_kernels.overwrite_evicted_rows`.

        Returns:
            Keys, values, positions and scores.
        """
        raise NotImplementedError

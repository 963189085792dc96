"""`Backend`: the interface of a device's attention functions, with forms in XLA of all that is not required."""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.attention.merging import merge
from jaxkv.attention.shaping import PLAIN, Shaping
from jaxkv.attention.steps import Gathered, NewEntries, Unrotated, WorkTable
from jaxkv.attention.xla import Reach


class DeviceTraits(NamedTuple):
    """Named tuple of a device's platform and GPU capability and a model's dtype and head dim, for `Backend.invalid`.

    Attributes:
        platform: `cpu`, `gpu` (or `cuda`), `tpu`.
        dtype: of the model.
        head_dim: D.
        capability: of a GPU, such as (9, 0) for Hopper; None where it is not known.
    """

    platform: str
    dtype: jnp.dtype
    head_dim: int
    capability: tuple[int, int] | None = None

    @property
    def gpu(self) -> bool:
        """True if the platform is an NVIDIA GPU."""
        return self.platform in ("gpu", "cuda")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Record of a backend's abilities, by which programs take one form or another.

    Attributes:
        at_once: True if `prefill` takes all sequences of a batch in one call; else prompt by prompt, in blocks of
            queries, so that padding costs no time.
        query_copies: number of arrays of the size of one layer's queries that `prefill` holds, its output among them.
        sliding_windows: True if `prefill` takes a `window`; layers that have one are XLA's otherwise.
        few_launches: True if each XLA operation costs a launch, so that one sort or reduction beats several passes.
        operands_apart: True if norms and activations are computed before the products of an MLP over a prompt that read
            them; else the compiler may compute them within these, again for each tile.
        embeds_in_blocks: True if devices of a mesh sum a prompt's embeddings a block of tokens at a time; else all at
            once, for which a compiler may take copies of all.
        steps: entries, as `Store.kernels` names them, over which steps of one token run `decode_token` and `add_norm`.
        evicts: entries that `evict_rows` and `replace_rows` read and write.
        custom_calls: names of the custom calls in its programs, for which `jax.export` gives no guarantee.
    """

    at_once: bool = True
    query_copies: int = 2
    sliding_windows: bool = False
    few_launches: bool = False
    operands_apart: bool = False
    embeds_in_blocks: bool = False
    steps: frozenset[str] = frozenset()
    evicts: frozenset[str] = frozenset()
    custom_calls: tuple[str, ...] = ()


class Backend(abc.ABC):
    """Abstract base class of a device's attention: complete functions, of which a device overrides whole ones.

    Required are `prefill`, `column_sums`, `window_mean`, `attend` and `attend_scored`. All others have a form in XLA
    made of these, except `evict_rows` and `replace_rows`, which are called for entries that `can.evicts` names. Overrides
    call `super()` where its kernel does not serve.

    A backend is a file with a subclass, and one line of `Implementation` that names it. Stores and pools are those of
    `jaxkv.cache`.

    Attributes:
        can: what it is made for.
    """

    can: ClassVar[Capabilities] = Capabilities()

    def summed_bytes(self, prompts: int, padded_len: int, heads: int, queries: int) -> int:
        """Bytes that `prefill` with log-sum-exp and `column_sums` hold beyond `prefill` without; 0 in the base class.

        Args:
            prompts: number of prompts in a batch.
            padded_len: tokens of a prompt, padded.
            heads: query heads of one device.
            queries: bytes of one layer's queries of all prompts.
        """
        return 0

    def invalid(self, setting: DeviceTraits) -> str | None:
        """Error text if this backend cannot serve a model on a device, None if it can; always None in the base class.

        Args:
            setting: the model and the device.

        Returns:
            The text, or None.
        """
        return None

    def suits(self, setting: DeviceTraits) -> bool:
        """True if AUTO may choose this backend for a model on a device; in the base class wherever it is not rejected.

        Args:
            setting: the model and the device.

        Returns:
            True or False.
        """
        return self.invalid(setting) is None

    @abc.abstractmethod
    def prefill(
        self,
        q: Float[Array, "B K G T D"],
        k: Float[Array, "B K S D"],
        v: Float[Array, "B K S D"],
        length: Int[Array, " B"],
        first: Int[Array, " B"] | None = None,
        *,
        lse: bool = True,
        shaping: Shaping = PLAIN,
        window: int | None = None,
    ) -> tuple[Float[Array, "B K G T D"], Float[Array, "B K G T"] | None]:
        """Causal attention of T consecutive queries of each prompt; returns output and log-sum-exp (None unless `lse`).

        Args:
            q: rotated queries; T divides S.
            k: rotated keys at positions 0 .. S.
            v: values, finite everywhere.
            length: tokens of each prompt; outputs of later queries are padding: finite, without meaning.
            first: position of each sequence's first query, a multiple of T; 0 by default.
            lse: True to return the log-sum-exp, too.
            shaping: of the logits.
            window: number of last keys that a query attends to, its own included; given for layers that have one, to
                backends with `sliding_windows`.

        Returns:
            The output in q's dtype, and the natural log-sum-exp of the scaled logits, float32; None if not asked for.
        """

    @abc.abstractmethod
    def column_sums(
        self,
        q: Float[Array, "B K G T D"],
        k: Float[Array, "B K S D"],
        lse: Float[Array, "B K G T"],
        length: Int[Array, " B"],
        first: Int[Array, " B"] | None = None,
        *,
        shaping: Shaping = PLAIN,
    ) -> Float[Array, "B K G S"]:
        """Attention `f32[B, K, G, S]` that each key receives, summed over T consecutive queries of each prompt.

        Args:
            q: rotated queries; T divides S.
            k: rotated keys at positions 0 .. S.
            lse: from `prefill`.
            length: tokens of each prompt; later queries are padding, and do not count.
            first: position of each sequence's first query, a multiple of T; 0 by default.
            shaping: of the logits.

        Returns:
            Sums of probabilities, float32.
        """

    @abc.abstractmethod
    def window_mean(
        self,
        q: Float[Array, "B K G w D"],
        k: Float[Array, "B K S D"],
        positions: Int[Array, "B w"],
        length: Int[Array, " B"],
        *,
        shaping: Shaping = PLAIN,
    ) -> Float[Array, "B K S"]:
        """Mean attention `f32[B, K, S]` that keys receive from a prompt's last w queries, over a kv head's query heads.

        Args:
            q: rotated queries.
            k: rotated keys at positions 0 .. S.
            positions: of the queries; negative ones are padding (of a prompt shorter than w), and do not count.
            length: tokens of each prompt.
            shaping: of the logits.

        Returns:
            The means, float32.
        """

    @abc.abstractmethod
    def attend(
        self, q: Float[Array, "B K R D"], store: Any, reach: Reach, *, shaping: Shaping = PLAIN
    ) -> tuple[Float[Array, "B K R D"], Float[Array, "B K R"]]:
        """Attention of R queries per kv head over that head's segment of a pool; returns output and log-sum-exp.

        Args:
            q: rotated queries; R folds the group and, for several tokens, their number.
            store: keys and values of the pool, of which `reach.view` gives arrays.
            reach: entries that are read.
            shaping: of the logits.

        Returns:
            The output in q's dtype and the natural log-sum-exp of the scaled logits, float32.
        """

    @abc.abstractmethod
    def attend_scored(
        self,
        q: Float[Array, "B K G D"],
        store: Any,
        reach: Reach,
        score: Float[Array, "B P"],
        counts: Bool[Array, " B"],
        *,
        shaping: Shaping = PLAIN,
    ) -> tuple[Float[Array, "B K G D"], Float[Array, "B P"]]:
        """One token per sequence attends to pool rows; returns output, and row scores plus attention.

        Args:
            q: rotated queries.
            store: keys and values of the pool.
            reach: entries that are read.
            score: attention that entries have received so far.
            counts: mask of the sequences whose attention is added to scores.
            shaping: of the logits.

        Returns:
            The output, and the scores.
        """

    def packed(
        self, k: Float[Array, "B K S D"], v: Float[Array, "B K S D"], source: Int[Array, "B P"]
    ) -> tuple[Float[Array, "B P D"], Float[Array, "B P D"], Int[Array, "B P"]]:
        """Gather one layer's keys and values at the indices `source`; return pool rows' keys, values and positions.

        Args:
            k: keys as the pool stores them.
            v: values.
            source: head * S + position of each pool row; -1 where there is none.

        Returns:
            Keys, values and positions of the pool; entries without a source are 0, 0 and -1.
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

    def gathered(
        self, k: Float[Array, "B P D"], v: Float[Array, "B P D"], rows: Int[Array, "B K T"]
    ) -> tuple[Float[Array, "B n D"], Float[Array, "B n D"]]:
        """Gather pool rows by index for reading; return their keys and values, finite ones where an index is -1.

        Args:
            k: keys of a pool.
            v: values.
            rows: pool rows of each head; -1 for none.

        Returns:
            Keys and values, the T entries of one head after another.
        """
        return self.packed(k[:, None], v[:, None], rows.reshape(rows.shape[0], -1))[:2]

    def append_and_attend(
        self,
        q: Float[Array, "B K G D"],
        new: NewEntries,
        pool: Any,
        reach: Reach,
        *,
        shaping: Shaping = PLAIN,
    ) -> tuple[Float[Array, "B K G D"], Float[Array, "B K G"], Any]:
        """Write one new entry behind each segment and attend to it and others; output, log-sum-exp, pool.

        Args:
            q: rotated queries.
            new: the entry of each kv head.
            pool: written in place if it is donated.
            reach: entries that are read, the new one among them.
            shaping: of the logits.

        Returns:
            As `attend`, and the pool with the entries.
        """
        pool = pool.appended(new)
        return *self.attend(q, pool.store, reach, shaping=shaping), pool

    def append_and_score(
        self,
        q: Float[Array, "B K G D"],
        new: NewEntries,
        pool: Any,
        reach: Reach,
        *,
        shaping: Shaping = PLAIN,
    ) -> tuple[Float[Array, "B K G D"], Any]:
        """Append a token's row, attends, and add attention received to entries' scores; return output, pool.

        Args:
            q: rotated queries.
            new: the entry of each kv head.
            pool: with scores.
            reach: entries that are read, the new one among them.
            shaping: of the logits.

        Returns:
            The output, and the pool with the entries.
        """
        pool, counts = pool.appended(new), new.count > 0
        given = (pool.store, reach, pool.score, counts)
        out, score = self.attend_scored(q, *given, shaping=shaping)
        return out, dataclasses.replace(pool, score=score)

    def work_table(
        self,
        start: Int[Array, "L B K"],
        length: Int[Array, "L B K"],
        *,
        dim: int,
        itemsize: int | float,
    ) -> Any:
        """Table of the pool rows that each program of `decode_token` reads; None in the base class, which needs none.

        Args:
            start: first row of each segment.
            length: entries of each segment, before the step.
            dim: D.
            itemsize: bytes of a stored element, mean of keys and values.

        Returns:
            The table, as `decode_token` takes it.
        """
        return None

    def decode_token(
        self,
        q: Float[Array, "B K G D"],
        split: Unrotated | None,
        new: NewEntries,
        pool: Any,
        reach: Reach,
        work: WorkTable,
        *,
        scored: bool = False,
        shaping: Shaping = PLAIN,
    ) -> tuple[Float[Array, "M K G D"], Any]:
        """Append a token's row and attend to what it reaches and to chosen entries; return output, pool.

        Args:
            q: rotated queries.
            split: the queries, keys and values before rotation, for kernels that rotate them; None in other steps.
            new: the entry of each kv head.
            pool: written in place if it is donated.
            reach: entries that are read without a choice, the new one among them.
            work: which program reads which entries, and the entries that were chosen.
            scored: True to add attention to the pool's scores.
            shaping: of the logits.

        Returns:
            The output, undefined in padding sequences, and the pool.
        """
        if scored:
            return self.append_and_score(q, new, pool, reach, shaping=shaping)
        out, lse, pool = self.append_and_attend(q, new, pool, reach, shaping=shaping)
        if work.rows is None or work.held is None:
            return out, pool
        start, size = work.start[work.layer], work.rows.shape[2]
        real = jnp.arange(size, dtype=jnp.int32) < work.held[..., None]
        rows = jnp.where(real, start[..., None] + work.rows, -1)
        held = Reach.of_heads(jnp.broadcast_to(work.held, start.shape), size)
        k, v = pool.store.view()
        chosen = Gathered(*self.gathered(k, v, rows))
        some = self.attend(q, chosen, held, shaping=shaping.without_sinks)
        return merge(*some, out, lse), pool

    def add_norm(
        self,
        x: Float[Array, "M N E"],
        added: Float[Array, "n M N E"],
        scale: Float[Array, " E"],
        *,
        eps: float,
        dtype: jnp.dtype,
    ) -> tuple[Float[Array, "M N E"], Float[Array, "M N E"]]:
        """Add split-K parts to hidden states; return the sum and its RMS norm.

        Args:
            x: hidden states.
            added: n split-K parts of a product.
            scale: of the norm.
            eps: of the norm.
            dtype: of the returned sum.

        Returns:
            The sum, and its norm in the scale's dtype.
        """
        wide = x.astype(jnp.float32) + added.astype(jnp.float32).sum(axis=0)
        normed = wide * lax.rsqrt((wide * wide).mean(axis=-1, keepdims=True) + eps)
        return wide.astype(dtype), (normed * scale.astype(jnp.float32)).astype(scale.dtype)

    def evict_rows(
        self, *args: Array | None, weigh: Any
    ) -> tuple[Array, Array, Array, Array | None, Array]:
        """Evict an entry of segments over a limit; return pool and i32 flags; NotImplementedError in this base class.

        Args:
            *args: keys, values, positions and scores of a pool, and `start`, `length`, `limit`, `recent`, `seen` and
                `prompt` of its segments, as for `pallas_kernels.evict_rows`.
            weigh: hashable function of scores, positions, `seen` and `prompt`; returns ranks and the evictable rows.

        Returns:
            Keys, values, positions and scores; and i32 `[B, K]`, 1 for each segment that lost an entry, else 0.
        """
        raise NotImplementedError

    def replace_rows(self, *args: Array | None) -> tuple[Array, Array, Array, Array | None]:
        """Overwrite an entry of masked segments by another; return the pool; NotImplementedError in this base class.

        Args:
            *args: keys, values, positions and scores of a pool; entries that are overwritten, entries that are moved, and a
                mask of the segments, each `[B, K]`, as for `pallas_kernels.replace_rows`.

        Returns:
            Keys, values, positions and scores.
        """
        raise NotImplementedError

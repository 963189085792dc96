"""`Backend`: the protocol of a device's attention functions, required and fused ones."""

import abc
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv.attention.columns import Received
from jaxkv.attention.shaping import PLAIN, Shaping
from jaxkv.attention.xla import Walk


class Setting(NamedTuple):
    """Named tuple of a device's platform and GPU capability and a model's dtype and head dim, for `Backend.refusal`.

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


class Backend(abc.ABC):
    """Abstract base class of a device's attention: prefill, decode, scoring required; fused steps, eviction optional.

    Required are `prefill`, `column_sums`, `window_mean`, `attend` and `attend_scored`. Optional are `packed`, which
    falls back on XLA; `deal`, `decode_token` and `add_norm`, with `fused_step`; `evict_rows` and `replace_rows`, with
    `fused_eviction`; `append_and_attend`, where `joins` says so. Without the fused ones the engine takes XLA's
    operations. New rows are written by `cache.stores`, which know how rows are held.

    A backend is a file with a subclass, and one line of `Implementation` that names it.

    Attributes:
        at_once: True if `prefill` takes all sequences of a batch in one call; else prompt by prompt, in blocks of
            queries, so that padding costs no time.
        query_copies: number of arrays of the size of one layer's queries that `prefill` holds, its output among them.
        windows: True if `prefill` takes a `window`; layers that have one are XLA's otherwise.
        few_launches: True if each XLA operation costs a launch, so that one sort or reduction beats several passes.
        operands_apart: True if norms and activations are computed before the products of an MLP over a prompt that read
            them; else the compiler may compute them within these, again for each tile.
        embeds_in_blocks: True if devices of a mesh sum a prompt's embeddings a block of tokens at a time; else all at
            once, for which a compiler may take copies of all.
        fused_step: True if it has `deal`, `decode_token` and `add_norm`.
        fused_eviction: True if it has `evict_rows` and `replace_rows`.
        custom_calls: names of the custom calls in its programs, for which `jax.export` gives no guarantee.
    """

    at_once: ClassVar[bool] = True
    query_copies: ClassVar[int] = 2
    windows: ClassVar[bool] = False
    few_launches: ClassVar[bool] = False
    operands_apart: ClassVar[bool] = False
    embeds_in_blocks: ClassVar[bool] = False
    fused_step: ClassVar[bool] = False
    fused_eviction: ClassVar[bool] = False
    custom_calls: ClassVar[tuple[str, ...]] = ()

    def summed_bytes(self, prompts: int, slots: int, heads: int, queries: int) -> int:
        """Bytes that `prefill` with log-sum-exp and `column_sums` hold beyond `prefill` without; 0 in the base class.

        Args:
            prompts: number of prompts in a batch.
            slots: tokens of a prompt, padded.
            heads: query heads of one device.
            queries: bytes of one layer's queries of all prompts.
        """
        return 0

    def refusal(self, setting: Setting) -> str | None:
        """Error text if this backend cannot serve a model on a device, None if it can; always None in the base class.

        Args:
            setting: the model and the device.

        Returns:
            The text, or None.
        """
        return None

    def suits(self, setting: Setting) -> bool:
        """True if AUTO may choose this backend for a model on a device; in the base class wherever it is not refused.

        Args:
            setting: the model and the device.

        Returns:
            True or False.
        """
        return self.refusal(setting) is None

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
                backends with `windows`.

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
        self,
        q: Float[Array, "B K R D"],
        k: Float[Array, "B P D"],
        v: Float[Array, "B P D"],
        start: Int[Array, "B K"],
        length: Int[Array, "B K"],
        *,
        walk: Walk,
        shaping: Shaping = PLAIN,
    ) -> tuple[Float[Array, "B K R D"], Float[Array, "B K R"]]:
        """Attention of R queries per kv head over that head's segment of a pool; returns output and log-sum-exp.

        Args:
            q: rotated queries; R folds the group and, for several tokens, their number.
            k: pool rows, rotated keys.
            v: pool rows, finite everywhere.
            start: first row of each segment.
            length: rows of each segment; 0 gives output 0 and lse -inf.
            walk: how rows are read, for backends whose formulation depends on it.
            shaping: of the logits.

        Returns:
            The output in q's dtype and the natural log-sum-exp of the scaled logits, float32.
        """

    @abc.abstractmethod
    def attend_scored(
        self,
        q: Float[Array, "B K G D"],
        k: Float[Array, "B P D"],
        v: Float[Array, "B P D"],
        start: Int[Array, "B K"],
        length: Int[Array, "B K"],
        score: Float[Array, "B P"],
        counts: Bool[Array, " B"],
        *,
        walk: Walk,
        widest: int | None = None,
        shaping: Shaping = PLAIN,
    ) -> tuple[Float[Array, "B K G D"], Float[Array, "B P"] | Received]:
        """One token per sequence attends to pool rows; returns output, and row scores plus attention or a `Received`.

        Args:
            q: rotated queries.
            k: pool rows, rotated keys.
            v: pool rows, finite everywhere.
            start: first row of each segment.
            length: rows of each segment.
            score: attention that rows have received so far.
            counts: mask of the sequences whose attention is added to scores.
            walk: how rows are read.
            widest: the most rows a segment of a shared pool can have; None if unknown.
            shaping: of the logits.

        Returns:
            The output, and the scores, or a `Received` from which `columns.add_received` computes them later.
        """

    def packed(
        self, k: Float[Array, "B K S D"], v: Float[Array, "B K S D"], source: Int[Array, "B P"]
    ) -> tuple[Float[Array, "B P D"], Float[Array, "B P D"], Int[Array, "B P"]]:
        """Gathers one layer's keys and values at the indices `source`; returns pool rows' keys, values and positions.

        Args:
            k: keys as the pool stores them.
            v: values.
            source: head * S + position of each pool row; -1 where there is none.

        Returns:
            Keys, values and positions of the pool; rows without a source are 0, 0 and -1.
        """
        batch, heads, slots, dim = k.shape
        real = source >= 0
        at = jnp.where(real, source, 0)[..., None]
        keys, values = (
            jnp.where(
                real[..., None],
                jnp.take_along_axis(a.reshape(batch, heads * slots, dim), at, axis=1),
                0,
            )
            for a in (k, v)
        )
        return keys, values, jnp.where(real, source % slots, -1)

    def gathered(
        self, k: Float[Array, "B P D"], v: Float[Array, "B P D"], rows: Int[Array, "B K T"]
    ) -> tuple[Float[Array, "B n D"], Float[Array, "B n D"]]:
        """Gathers pool rows by index for reading; returns their keys and values, finite ones where an index is -1.

        Args:
            k: keys of a pool.
            v: values.
            rows: pool rows of each head; -1 for none.

        Returns:
            Keys and values, the T rows of one head after another.
        """
        return self.packed(k[:, None], v[:, None], rows.reshape(rows.shape[0], -1))[:2]

    def deal(
        self,
        start: Int[Array, "L B K"],
        length: Int[Array, "L B K"],
        *,
        dim: int,
        itemsize: int | float,
    ) -> Any:
        """Table of the pool rows that each decode kernel program reads; NotImplementedError in this base class.

        Args:
            start: first row of each segment.
            length: rows of each segment, before the step.
            dim: D.
            itemsize: bytes of a stored element, mean of keys and values.

        Returns:
            The table, as `decode_token` takes it.
        """
        raise NotImplementedError

    def decode_token(
        self,
        q: Float[Array, "n M K G D"],
        kv: Float[Array, "n M two K D"],
        angles: tuple[Float[Array, "B half"], Float[Array, "B half"]],
        positions: Int[Array, " B"],
        counts: Int[Array, " B"],
        pool: tuple[Any, Any, Int[Array, "B P"]],
        start: Int[Array, "L B K"],
        chunks: Any,
        *,
        layer: int,
        score: Float[Array, "B P"] | None = None,
        begin: Float[Array, "B K"] | None = None,
        widest: int | None = None,
        picks: tuple[Array, ...] | None = None,
        dtype: jnp.dtype | None = None,
        shaping: Shaping = PLAIN,
    ) -> tuple[Any, ...]:
        """Rotates a token, appends its row, attends; returns output, pool, scores; NotImplementedError in base class.

        Args:
            q: n split-K parts of the queries before rotation; M is B, or more with padding sequences.
            kv: n split-K parts of keys, before rotation, and of values.
            angles: cosines and sines of the tokens' rotary positions.
            positions: of the tokens in the sequence, stored with their rows.
            counts: 1 for sequences to which a row is appended, 0 for ended ones.
            pool: keys and values as `Store.held` gives them, and positions, written in place if they are donated.
            start: first row of each segment of all layers.
            chunks: from `deal`.
            layer: index of the layer.
            score: attention that rows have received so far; None if it is not accumulated.
            begin: initial scores of the new rows.
            widest: the most rows a segment has; None if unknown.
            picks: rows that are read, if not all: the fields of `pallas_kernels.Picks`.
            dtype: the model's; by default that of the keys, which has to be given with codes.
            shaping: of the logits.

        Returns:
            The output `[M, K, G, D]`, undefined from B on; keys, values and positions; and scores, if there are any.
        """
        raise NotImplementedError

    def add_norm(
        self,
        x: Float[Array, "M N E"],
        added: Float[Array, "n M N E"],
        scale: Float[Array, " E"],
        *,
        eps: float,
        dtype: jnp.dtype,
    ) -> tuple[Float[Array, "M N E"], Float[Array, "M N E"]]:
        """Adds split-K parts to hidden states; returns sum and RMS norm; NotImplementedError in this base class.

        Args:
            x: hidden states.
            added: n split-K parts of a product.
            scale: of the norm.
            eps: of the norm.
            dtype: of the returned sum.

        Returns:
            The sum, and its norm in the scale's dtype.
        """
        raise NotImplementedError

    def joins(self, k: Any) -> bool:
        """True if `append_and_attend` and `attend` take pools of such rows; always False in the base class.

        Args:
            k: keys or values of a pool as `Store.held` gives them, of which shapes and dtypes count.

        Returns:
            True or False.
        """
        return False

    def append_and_attend(
        self,
        q: Float[Array, "B K G D"],
        new: tuple[Any, Any],
        pool: tuple[Any, Any],
        start: Int[Array, "B K"],
        length: Int[Array, "B K"],
        counts: Int[Array, " B"],
        *,
        shaping: Shaping = PLAIN,
    ) -> tuple[Float[Array, "B K G D"], Float[Array, "B K G"], Any, Any]:
        """Writes a token's row behind each segment and attends to both; NotImplementedError in this base class.

        Args:
            q: rotated queries.
            new: the token's keys, rotated, and values, `[B, K, D]` or encoded as the pool's are.
            pool: keys and values as `Store.held` gives them, written in place if they are donated.
            start: first row of each segment that is read.
            length: rows of each segment from `start` on, before the token.
            counts: 1 for sequences to which a row is appended, 0 for ended ones.
            shaping: of the logits.

        Returns:
            The output in q's dtype, the natural log-sum-exp of the scaled logits, and the pool's keys and values.
        """
        raise NotImplementedError

    def evict_rows(
        self, *args: Array | None, weigh: Any
    ) -> tuple[Array, Array, Array, Array | None, Array]:
        """Evicts a row of segments over a limit; returns pool and i32 flags; NotImplementedError in this base class.

        Args:
            *args: keys, values, positions and scores of a pool, and `start`, `length`, `limit`, `recent`, `seen` and
                `prompt` of its segments, as for `pallas_kernels.evict_rows`.
            weigh: hashable function of scores, positions, `seen` and `prompt`; returns ranks and the evictable rows.

        Returns:
            Keys, values, positions and scores; and i32 `[B, K]`, 1 for each segment that lost a row, else 0.
        """
        raise NotImplementedError

    def replace_rows(self, *args: Array | None) -> tuple[Array, Array, Array, Array | None]:
        """Overwrites a row of masked segments by another; returns the pool; NotImplementedError in this base class.

        Args:
            *args: keys, values, positions and scores of a pool; rows that are overwritten, rows that are moved, and a
                mask of the segments, each `[B, K]`, as for `pallas_kernels.replace_rows`.

        Returns:
            Keys, values, positions and scores.
        """
        raise NotImplementedError

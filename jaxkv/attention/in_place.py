"""`InPlace`: the part of a backend that writes rows of pools in place, and all of which is optional."""

from typing import Any, ClassVar

from jaxtyping import Array, Float, Int, Num

from jaxkv.attention.xla import Walk


class InPlace:
    """Base class of a backend's kernels that write new rows while they attend, and move rows to evict others.

    Attributes:
        fused_eviction: True if it has `evict_rows` and `replace_rows`.
    """

    fused_eviction: ClassVar[bool] = False

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
        softcap: float | None = None,
    ) -> tuple[Float[Array, "B K G D"], Float[Array, "B K G"], Any, Any]:
        """Writes a token's row behind each segment and attends to both; NotImplementedError in this base class.

        Args:
            q: rotated queries.
            new: the token's keys, rotated, and values, `[B, K, D]` or encoded as the pool's are.
            pool: keys and values as `Store.held` gives them, written in place if they are donated.
            start: first row of each segment that is read.
            length: rows of each segment from `start` on, before the token.
            counts: 1 for sequences to which a row is appended, 0 for ended ones.
            softcap: of the scaled logits, as in `prefill`.

        Returns:
            The output in q's dtype, the natural log-sum-exp of the scaled logits, and the pool's keys and values.
        """
        raise NotImplementedError

    def joins_scored(
        self,
        q: Float[Array, "B K G one D"],
        k: Float[Array, "B P D"],
        walk: Walk,
        widest: int | None = None,
    ) -> bool:
        """True if `append_and_score` takes such queries and pools; always False in the base class.

        Args:
            q: queries of one token, of which the shape counts.
            k: keys of a pool, of which shape and dtype count.
            walk: how segments lie in it.
            widest: most rows of a segment of a shared pool that `windowed` is True for; None for other pools.

        Returns:
            True or False.
        """
        return False

    def append_and_score(
        self,
        q: Float[Array, "B K G D"],
        new: tuple[Float[Array, "B K D"], Float[Array, "B K D"]],
        pool: tuple[Float[Array, "B P D"], Float[Array, "B P D"]],
        start: Int[Array, "B K"],
        length: Int[Array, "B K"],
        counts: Int[Array, " B"],
        *,
        walk: Walk,
        widest: int | None = None,
        sink_logits: Float[Array, "K G"] | None = None,
        softcap: float | None = None,
    ) -> tuple[
        Float[Array, "B K G D"],
        Float[Array, "B *of n"],
        Float[Array, "B P D"],
        Float[Array, "B P D"],
    ]:
        """Writes a token's row behind each segment, attends to both, scores; NotImplementedError in this base class.

        Args:
            q: rotated queries.
            new: the token's keys, rotated, and values.
            pool: keys and values, written in place if they are donated.
            start: first row of each segment.
            length: rows of each segment, before the token.
            counts: 1 for sequences to which a row is appended, 0 for ended ones.
            walk: how segments lie in the pool.
            widest: as for `joins_scored`.
            sink_logits: learned logits that take part in the softmax; given for models that have some.
            softcap: of the scaled logits, as in `prefill`.

        Returns:
            The output in q's dtype; attention that each row received from the token, mean over the query heads, 0 in
            ended sequences: `[B, P]`, in a shared pool windows `[B, K, n]` for `add_windows`; and the pool's keys and
            values.
        """
        raise NotImplementedError

    def windowed(self, k: Float[Array, "B P D"], segments: int, widest: int | None) -> bool:
        """True if `take_windows` reaches all segments of a shared pool at once; always False in the base class.

        Args:
            k: keys of the pool, of which shape and dtype count.
            segments: of all layers, of a sequence.
            widest: the most rows that one of them can have; None if unknown.

        Returns:
            True or False.
        """
        return False

    def take_windows(
        self, leaf: Num[Array, "B P"], start: Int[Array, "B S"], *, widest: int
    ) -> tuple[Int[Array, "B S"], Num[Array, "B S n"]]:
        """Copies each segment's numbers out of a shared pool, into a window; NotImplementedError in this base class.

        Args:
            leaf: positions or scores.
            start: first row of each segment.
            widest: the most rows that a segment can have.

        Returns:
            First pool row of each window, and the windows, undefined outside of the segments.
        """
        raise NotImplementedError

    def add_windows(
        self, score: Float[Array, "B P"], start: Int[Array, "B S"], new: Float[Array, "B S n"]
    ) -> Float[Array, "B P"]:
        """Scores of a shared pool with windows of numbers added; NotImplementedError in this base class.

        Args:
            score: scores of the pool's rows.
            start: first row of each segment.
            new: windows, 0 outside of the segments; of `append_and_score`.

        Returns:
            The scores.
        """
        raise NotImplementedError

    def cosines(
        self,
        rows: Float[Array, "B P D"],
        of: Float[Array, "B S D"],
        start: Int[Array, "B S"],
        length: Int[Array, "B S"],
        *,
        widest: int,
    ) -> Float[Array, "B S n"]:
        """Cosines of each segment's rows with a vector, float32 windows; NotImplementedError in this base class.

        Args:
            rows: keys or values of a shared pool.
            of: the vectors.
            start: first row of each segment.
            length: rows of each segment.
            widest: the most rows that a segment can have.

        Returns:
            Windows as of `take_windows`, 0 outside of the segments; norms count as 1e-6 at least.
        """
        raise NotImplementedError

    def moves(self, k: Float[Array, "B P D"]) -> bool:
        """True if `replace_rows` takes pools of such rows; by default wherever eviction is fused.

        Args:
            k: keys of a pool, of which shape and dtype count.

        Returns:
            True or False.
        """
        return self.fused_eviction

    def ranks(self, k: Float[Array, "B P D"]) -> bool:
        """True if `evict_rows` takes pools of such rows, of which `moves` is True; by default wherever that is so.

        Args:
            k: keys of a pool, of which shape and dtype count.

        Returns:
            True or False.
        """
        return self.fused_eviction

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

"""The kernels, imported by those who use them, and what only they do."""

from types import ModuleType
from typing import Any

from jaxtyping import Array, Float, Int

from jaxkv.attention.choice import Implementation


def kernels_of(implementation: Implementation) -> tuple[ModuleType, bool]:
    """The GPU kernels.

    Args:
        implementation: one that uses them.

    Returns:
        Their package, and whether they are interpreted.
    """
    # Pallas takes half a second and tens of megabytes to import, which nobody pays who does not use it.
    import jaxkv.pallas_kernels as pallas_kernels

    return pallas_kernels, implementation is Implementation.INTERPRETED


def mosaic_kernels() -> ModuleType:
    """The kernels in Mosaic GPU, whose compiler takes longer still to import."""
    import jaxkv.pallas_kernels.mosaic as mosaic

    return mosaic


def dealt(
    start: Int[Array, "L B K"],
    length: Int[Array, "L B K"],
    *,
    dim: int,
    itemsize: int,
    implementation: Implementation,
) -> Any:
    """Which rows each program of a decode step reads: one table for all layers, made of actual lengths.

    Args:
        start: first row of each segment.
        length: rows of each segment, before the step.
        dim: D.
        itemsize: bytes of a number.
        implementation: one of the kernels.

    Returns:
        The table, as `token_over_pool` takes it.
    """
    kernels, interpret = kernels_of(implementation)
    return kernels.deal(start, length, programs=kernels.programs(dim=dim, itemsize=itemsize, interpret=interpret))


def token_over_pool(
    q: Float[Array, "n M K G D"],
    kv: Float[Array, "n M two K D"],
    angles: tuple[Float[Array, "B half"], Float[Array, "B half"]],
    positions: Int[Array, " B"],
    counts: Int[Array, " B"],
    pool: tuple[Float[Array, "B P D"], Float[Array, "B P D"], Int[Array, "B P"]],
    start: Int[Array, "L B K"],
    chunks: Any,
    *,
    layer: int,
    score: Float[Array, "B P"] | None = None,
    begin: Float[Array, "B K"] | None = None,
    widest: int | None = None,
    picks: tuple[Array, ...] | None = None,
    implementation: Implementation,
) -> tuple[Array, ...]:
    """A new token of each sequence is rotated, joins its segments, and attends to them, in one kernel.

    Args:
        q: parts of the queries before rotation; M is B, or more sequences that nobody looks at.
        kv: parts of keys, before rotation, and of values.
        angles: cosines and sines of the tokens' places.
        positions: of the tokens in the text.
        counts: 0 for sequences that have ended: no row joins them; else 1.
        pool: keys, values and positions, written in place if the caller gives them up.
        start: first row of each segment of all layers.
        chunks: from `dealt`.
        layer: which of them.
        score: what rows have received so far, if they are to go on.
        begin: what the new rows' scores begin with.
        widest: the most rows a segment has, if that is known.
        picks: which rows are read, if not all: the fields of `pallas_kernels.Picks`.
        implementation: one of the kernels.

    Returns:
        The output `[M, K, G, D]`, undefined behind B; keys, values and positions; and scores, if there are any.
    """
    kernels, interpret = kernels_of(implementation)
    of = (q, kv, *angles, positions, counts, *pool, start, chunks)
    options = {"score": score, "begin": begin, "widest": widest}
    options["picks"] = None if picks is None else kernels.Picks(*picks)
    return kernels.decode_token(*of, layer=layer, **options, interpret=interpret)

"""Reads of models with window layers: which layers choose and read a choice, counted among those without a window."""

import dataclasses

import numpy as np
from jaxtyping import Int

from jaxkv.policies.reading import WHOLE, FilteredReads, Reading, Reads, without_window


def reading_beside(
    read: Reads, windows: tuple[int | None, ...], slots: int, *, every_row: bool
) -> Reading:
    """Makes `Reading`, the static config of which rows each layer of a model reads; window layers read all they hold.

    `windows` are `ModelConfig.windows`, `slots` the prompts' bucket; with `every_row` all rows of a prompt are kept.
    """
    reading = _among(read, windows).reading(windows.count(None), slots, every_row=every_row)
    if not any(windows):
        return reading
    index, sources = without_window(windows), [WHOLE] * len(windows)
    for layer, source in zip(index, reading.sources, strict=True):
        sources[layer] = source if source == WHOLE else index[source]
    filters, offloaded = (
        tuple(index[layer] for layer in layers) for layers in (reading.filters, reading.offloaded)
    )
    return dataclasses.replace(
        reading, filters=filters, sources=tuple(sources), offloaded=offloaded
    )


def tokens_read(
    read: Reads, lengths: Int[np.ndarray, " B"], windows: tuple[int | None, ...]
) -> Int[np.ndarray, " B"]:
    """Integers `[B]`: number of each prompt's tokens that a sparse layer reads per step, from `ModelConfig.windows`."""
    return np.asarray(_among(read, windows).tokens(lengths, windows.count(None)), np.int64)


def _among(read: Reads, windows: tuple[int | None, ...]) -> Reads:
    """Config of the same reads, its filter layers counted among the layers without a window; unchanged without any."""
    return read.among(windows) if isinstance(read, FilteredReads) and any(windows) else read

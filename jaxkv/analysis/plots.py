"""Plots of arrays: lines by name, and heat maps side by side."""

import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxkv._plotting import get_line_style


def plot_lines(
    figure: Any,
    lines: Mapping[str, tuple[np.ndarray, np.ndarray]],
    *,
    across: str,
    up: str,
    log: str = "",
) -> None:
    """Plot lines by name, with a legend, in one new panel of a matplotlib figure.

    Args:
        figure: matplotlib figure, such as `pyplot.figure(layout="constrained")`.
        lines: coordinates across and up, by name.
        across: label of the horizontal axis.
        up: label of the vertical axis.
        log: axes with a logarithmic scale: "", "x", "y" or "xy".
    """
    panel = figure.add_subplot()
    for at, (name, (x, y)) in enumerate(lines.items()):
        panel.plot(x, y, label=name, markersize=3.5, **get_line_style(at))
    scales = {f"{axis}scale": "log" if axis in log else "linear" for axis in "xy"}
    panel.set(xlabel=across, ylabel=up, **scales)
    panel.legend(frameon=False, fontsize=8)


def plot_maps(
    figure: Any,
    maps: Mapping[str, np.ndarray],
    *,
    across: str,
    down: str,
    label: str,
    most: int | float | None = None,
) -> None:
    """Plot arrays by title as heat maps in a matplotlib figure, five a row, on one colour scale; NaN cells are empty.

    Args:
        figure: matplotlib figure, such as `pyplot.figure(layout="constrained")`.
        maps: arrays of two axes, by title; their rows are shown from top to bottom.
        across: label of the arrays' columns.
        down: label of their rows.
        label: label of the colours.
        most: end of the scale; by default the largest number.
    """
    wide = min(len(maps), 5)
    grid = figure.subplots(-(-len(maps) // wide), wide, squeeze=False, sharey=True)
    panels = grid.flat[: len(maps)]
    spare = grid.flat[len(maps) :]
    if most is None:
        most = max(float(np.nanmax(each)) for each in maps.values())
    for panel, (title, values) in zip(panels, maps.items(), strict=True):
        image = panel.imshow(values, vmin=0, vmax=most, cmap="viridis", aspect="auto")
        panel.set_title("\n".join(textwrap.wrap(title, 24)), fontsize=8)
        panel.set_xlabel(across)
    for panel in spare:
        panel.remove()
    for panel in grid[:, 0]:
        panel.set_ylabel(down)
    figure.colorbar(image, ax=list(panels), label=label)

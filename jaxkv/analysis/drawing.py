"""Pictures of arrays: lines by name, and heat maps side by side."""

import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxkv._drawing import style


def draw_lines(
    figure: Any,
    lines: Mapping[str, tuple[np.ndarray, np.ndarray]],
    *,
    across: str,
    up: str,
    log: str = "",
) -> None:
    """Draws lines into one panel.

    Args:
        figure: matplotlib's, such as `pyplot.figure(layout="constrained")`.
        lines: numbers across and up, by name.
        across: what the horizontal axis shows.
        up: what the vertical axis shows.
        log: axes with a logarithmic scale: "", "x", "y" or "xy".
    """
    panel = figure.add_subplot()
    for at, (name, (x, y)) in enumerate(lines.items()):
        panel.plot(x, y, label=name, markersize=3.5, **style(at))
    panel.set(xlabel=across, ylabel=up)
    panel.set_xscale("log" if "x" in log else "linear")
    panel.set_yscale("log" if "y" in log else "linear")
    panel.legend(frameon=False, fontsize=8)


def draw_maps(
    figure: Any, maps: Mapping[str, np.ndarray], *, across: str, down: str, label: str
) -> None:
    """Draws heat maps side by side, all on one scale of colours.

    Args:
        figure: matplotlib's, such as `pyplot.figure(layout="constrained")`.
        maps: arrays of two axes, by title; their rows are drawn from top to bottom.
        across: what the arrays' columns are.
        down: what their rows are.
        label: what the colours show.
    """
    panels = figure.subplots(1, len(maps), squeeze=False, sharey=True)[0]
    largest = max(float(each.max()) for each in maps.values())
    for panel, (title, values) in zip(panels, maps.items(), strict=True):
        image = panel.imshow(values, vmin=0, vmax=largest, cmap="viridis", aspect="auto")
        panel.set_title("\n".join(textwrap.wrap(title, 24)), fontsize=8)
        panel.set_xlabel(across)
    panels[0].set_ylabel(down)
    figure.colorbar(image, ax=list(panels), label=label)

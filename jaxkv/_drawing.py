"""Matplotlib, an optional dependency, and the common style of all pictures."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxkv.checkpoints.whole_files import write_whole

# Okabe and Ito's colours, which colour-blind people tell apart; dashes and markers tell them apart in grey as well.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_DASHES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# Widths in inches of one column of a paper, and of the page.
COLUMN, PAGE = 3.4, 7.0
_PAPER = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "axes.linewidth": 0.6,
}


def drawing() -> Any:
    """Imports and returns matplotlib; ImportError with the extra to install if it is missing.

    pyplot is not imported: its backend is the user's choice, and notebooks would show the figures.
    """
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install 'jaxkv[plots]'") from None
    return matplotlib


def sheet(width: float, height: float) -> Any:
    """Empty matplotlib `Figure` of this size in inches, not managed by pyplot."""
    return drawing().figure.Figure(figsize=(width, height), layout="constrained")


def style(at: int) -> dict[str, str]:
    """Colour, dash and marker of the line with index `at`, as keyword arguments of matplotlib's `plot`."""
    dash, marker = _DASHES[at % len(_DASHES)], _MARKERS[at % len(_MARKERS)]
    return {"color": _COLOURS[at % len(_COLOURS)], "linestyle": dash, "marker": marker}


def saved(figure: Any, kind: str, dpi: int = 150) -> bytes:
    """Bytes of a matplotlib figure saved as png, svg or pdf; equal figures give equal bytes."""
    file = io.BytesIO()
    # Without a salt the ids of an SVG's parts are drawn at random; both kinds carry the date by default.
    with drawing().rc_context({"svg.hashsalt": "jaxkv"}):
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
        figure.savefig(file, format=kind, dpi=dpi, metadata=metadata)
    return file.getvalue()


def whole_numbers(axis: Any) -> None:
    """Restricts the ticks of a matplotlib axis to whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


@contextmanager
def paper(path: str | Path, *, width: float, height: float) -> Iterator[Any]:
    """Context manager that yields a matplotlib figure in a paper's style and writes it to `path` at the end.

    The path's suffix names the format, such as .png or .svg.
    """
    path = Path(path)
    with drawing().rc_context(_PAPER):
        figure = sheet(width, height)
        yield figure
        data = saved(figure, path.suffix[1:].lower() or "png", dpi=250)
    # For a symbolic link, its target file is replaced, not the link.
    write_whole(Path(os.path.realpath(path)), data)


def layer_names(axis: Any, layers: tuple[int, ...]) -> None:
    """Labels an axis of layer positions with the `layers` there, as indices in the model; unchanged for 0 to L - 1."""
    if layers != tuple(range(len(layers))):
        names = dict(enumerate(map(str, layers)))
        axis.set_major_formatter(lambda at, _: names.get(at, ""))

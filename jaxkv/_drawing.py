"""The one door to what draws pictures, an extra."""

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
# Inches: a column of a paper, and both.
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
    """What draws.

    Returns:
        `matplotlib`, without pyplot: its backend is the user's, who may look at figures of his own in a notebook.

    Raises:
        ImportError: without matplotlib, naming the extra that brings it.
    """
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install 'jaxkv[plots]'") from None
    return matplotlib


def sheet(width: float, height: float) -> Any:
    """What is drawn on: no window shows it, and nobody has to close it.

    Args:
        width: in inches.
        height: in inches.

    Returns:
        matplotlib's figure, without panels yet.

    Raises:
        ImportError: without matplotlib, naming the extra that brings it.
    """
    return drawing().figure.Figure(figsize=(width, height), layout="constrained")


def style(at: int) -> dict[str, str]:
    """How the line of this number looks, so that everybody tells it from the others.

    Args:
        at: its number.

    Returns:
        Colour, dash and marker, as `plot` takes them.
    """
    dash, marker = _DASHES[at % len(_DASHES)], _MARKERS[at % len(_MARKERS)]
    return {"color": _COLOURS[at % len(_COLOURS)], "linestyle": dash, "marker": marker}


def saved(figure: Any, kind: str, dpi: int = 150) -> bytes:
    """A figure as a file, the same bytes for the same figure.

    Args:
        figure: matplotlib's.
        kind: png, svg or pdf.
        dpi: dots per inch, of a PNG.

    Returns:
        The file.
    """
    file = io.BytesIO()
    # Without a salt the ids of an SVG's parts are drawn at random; both kinds carry the date by default.
    with drawing().rc_context({"svg.hashsalt": "jaxkv"}):
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
        figure.savefig(file, format=kind, dpi=dpi, metadata=metadata)
    return file.getvalue()


def whole_numbers(axis: Any) -> None:
    """Ticks of an axis that counts, at whole numbers only.

    Args:
        axis: a panel's `xaxis` or `yaxis`.
    """
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


@contextmanager
def paper(path: str | Path, *, width: float, height: float) -> Iterator[Any]:
    """A picture fit for a paper, written whole at the end: fonts of its size, the same bytes every time.

    Args:
        path: where to; the suffix says how, such as .png or .svg.
        width: of the picture, in inches.
        height: of it.

    Yields:
        The figure, without panels yet.

    Raises:
        ImportError: without matplotlib, naming the extra that brings it.
    """
    path = Path(path)
    with drawing().rc_context(_PAPER):
        figure = sheet(width, height)
        yield figure
        data = saved(figure, path.suffix[1:].lower() or "png", dpi=250)
    # Behind a link its file is replaced, not the link.
    write_whole(Path(os.path.realpath(path)), data)

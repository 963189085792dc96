"""Matplotlib, an optional dependency, and the common style of all pictures."""

import io
from typing import Any

# Okabe and Ito's colours, distinct for colour-blind readers; dashes and markers are distinct in grey, too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_DASHES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def import_matplotlib() -> Any:
    """Import and return matplotlib; raise an ImportError that names the extra to install if it is missing.

    pyplot is not imported: its backend is the user's choice, and notebooks would show the figures twice.
    """
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install 'jaxkv[plots]'") from None
    return matplotlib


def make_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib `Figure` of this width and height in inches, not managed by pyplot."""
    return import_matplotlib().figure.Figure(figsize=(width, height), layout="constrained")


def get_line_style(at: int) -> dict[str, str]:
    """Return a dict of colour, dash and marker of the line at index `at`, cycled: arguments of matplotlib's `plot`."""
    dash = _DASHES[at % len(_DASHES)]
    marker = _MARKERS[at % len(_MARKERS)]
    return {"color": _COLOURS[at % len(_COLOURS)], "linestyle": dash, "marker": marker}


def render_figure(figure: Any, kind: str, dpi: int = 150) -> bytes:
    """Return a matplotlib figure as the bytes of a png, svg or pdf file; equal figures have equal bytes."""
    file = io.BytesIO()
    # Without a salt the ids of an SVG's parts are random; both formats carry the date by default.
    with import_matplotlib().rc_context({"svg.hashsalt": "jaxkv"}):
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
        figure.savefig(file, format=kind, dpi=dpi, metadata=metadata)
    return file.getvalue()

"""The one door to what draws pictures, an extra."""

from typing import Any


def drawing() -> Any:
    """What draws, to files only.

    Returns:
        `matplotlib.pyplot`.

    Raises:
        ImportError: without matplotlib, naming the extra that brings it.
    """
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install 'jaxkv[plots]'") from None
    return pyplot

"""Runs a notebook and stores what its cells print and plot, without Jupyter: `make notebooks`.

python notebooks/run.py notebooks/01_quickstart.ipynb                    replaces the outputs in the file
python notebooks/run.py notebooks/01_quickstart.ipynb --out other.ipynb  writes another file
"""

import argparse
import ast
import base64
import contextlib
import io
import json
import linecache
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Pictures are stored in at most so many pixels, width and height, and colours: a notebook stays below 200 KB.
_SIZE, _COLOURS = (640, 360), 64
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def ran(cells: list[dict[str, Any]]) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
    """Runs the code cells of a notebook in this process.

    Args:
        cells: a notebook's cells, as its JSON has them.

    Returns:
        The names that the cells defined, and each code cell's outputs in the notebook format.

    Raises:
        RuntimeError: if a cell writes to stderr, where warnings and progress bars go.
    """
    names, outputs = {"__name__": "__main__"}, []
    for number, cell in enumerate((each for each in cells if each["cell_type"] == "code"), start=1):
        source, place = "".join(cell["source"]), f"<code cell {number}>"
        # Tracebacks then show the cell's lines.
        linecache.cache[place] = (len(source), None, source.splitlines(keepends=True), place)
        said, warned = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(warned):
            value = _run(source, place, names)
        if warned.getvalue():
            raise RuntimeError(f"{place} wrote to stderr: {warned.getvalue()[-2000:]}")
        text = (
            [{"name": "stdout", "output_type": "stream", "text": _lines(said.getvalue())}]
            if said.tell()
            else []
        )
        outputs.append([*text, *_result(value, number), *_open_pictures()])
    return names, outputs


def stored(path: Path, out: Path) -> None:
    """Runs a notebook in its own folder and writes it with its outputs.

    Args:
        path: the notebook.
        out: the file to write, which may be the notebook.
    """
    path, out = path.resolve(), out.resolve()
    cells = json.loads(path.read_text("utf-8"))["cells"]
    os.chdir(path.parent)
    outputs = enumerate(ran(cells)[1], start=1)
    book = {
        "cells": [_plain(cell, index, outputs) for index, cell in enumerate(cells)],
        "metadata": _METADATA,
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    out.write_text(json.dumps(book, indent=1, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")


def _run(source: str, place: str, names: dict[str, Any]) -> Any:
    """Runs a cell and returns the value of its last expression; None without one, or if a semicolon ends it."""
    tree = ast.parse(source, place)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, place, "exec"), names)
    value = (
        None if last is None else eval(compile(ast.Expression(last.value), place, "eval"), names)
    )
    return None if source.rstrip().endswith(";") else value


def _result(value: Any, number: int) -> list[dict[str, Any]]:
    """Output of a cell's last expression: its picture if it has one, else its text."""
    if value is None:
        return []
    picture = value._repr_png_() if hasattr(value, "_repr_png_") else None
    shown = f"<{type(value).__name__}>" if picture else repr(value)
    data = {"text/plain": _lines(shown)} | ({"image/png": _small(picture)} if picture else {})
    return [
        {"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"}
    ]


def _open_pictures() -> list[dict[str, Any]]:
    """Outputs of the figures that pyplot holds open, which are closed."""
    pyplot, outputs = sys.modules.get("matplotlib.pyplot"), []
    for number in pyplot.get_fignums() if pyplot else ():
        file = io.BytesIO()
        pyplot.figure(number).savefig(file, format="png", dpi=72)
        data = {"image/png": _small(file.getvalue()), "text/plain": ["<Figure>"]}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    if pyplot:
        pyplot.close("all")
    return outputs


def _small(png: bytes) -> str:
    """A picture in few pixels and colours, as base64 text."""
    from PIL import Image

    picture, file = Image.open(io.BytesIO(png)).convert("RGB"), io.BytesIO()
    picture.thumbnail(_SIZE)
    picture.quantize(_COLOURS).save(file, "png", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def _lines(text: str) -> list[str]:
    """Text as the notebook format has it: a list of lines with their ends."""
    return text.splitlines(keepends=True)


def _plain(cell: dict[str, Any], index: int, outputs: Iterator[tuple[int, list]]) -> dict[str, Any]:
    """A cell with its next outputs, and without metadata but its tags."""
    tags = cell["metadata"].get("tags")
    kept = {
        "cell_type": cell["cell_type"],
        "id": f"cell-{index}",
        "metadata": {"tags": tags} if tags else {},
    }
    if cell["cell_type"] == "code":
        kept["execution_count"], kept["outputs"] = next(outputs)
    return kept | {"source": _lines("".join(cell["source"]))}


def main() -> None:
    """Runs one notebook."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebook", type=Path)
    parser.add_argument(
        "--out", type=Path, help="the file to write; by default the notebook itself"
    )
    options = parser.parse_args()
    # Figures are made without a screen.
    os.environ["MPLBACKEND"] = "agg"
    stored(options.notebook, options.out or options.notebook)


if __name__ == "__main__":
    main()

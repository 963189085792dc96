"""Every notebook runs from its first cell to its last, and what pages of docs/ say can be run."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
DOCS = FOLDER.parent / "docs"
REAL = {"quickstart.ipynb"}
# Run by `make test-foreign`, in an environment with another's model.
ELSEWHERE = {"03_bring_your_own_model.ipynb"}


def script_of(path: Path) -> str:
    """The code cells, one after the other."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def run(script: str, folder: Path) -> None:
    path = folder / "cells.py"
    path.write_text(script, encoding="utf-8")
    done = subprocess.run([sys.executable, path], cwd=FOLDER, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.name, marks=[pytest.mark.real] if path.name in REAL else [])
        for path in sorted(FOLDER.glob("*.ipynb"))
        if path.name not in ELSEWHERE
    ],
)
def test_a_notebook_runs(name, tmp_path):
    run(script_of(FOLDER / name), tmp_path)


def blocks_of(page: Path) -> list[str]:
    """Those that are said to be run."""
    return re.findall(r"```python run\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("name", [path.name for path in sorted(DOCS.glob("*.md")) if blocks_of(path)])
def test_a_page_runs(name, tmp_path):
    run("\n".join(blocks_of(DOCS / name)), tmp_path)


def test_notebooks_hold_no_results():
    for path in FOLDER.glob("*.ipynb"):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            assert not cell.get("outputs") and cell.get("execution_count") is None, path.name

"""Every notebook runs and gives the outputs that are stored in it; what pages of docs/ say can be run does."""

import re
import subprocess
import sys
from pathlib import Path

import notebook_outputs as outputs
import pytest

FOLDER = outputs.FOLDER
DOCS = FOLDER.parent / "docs"
BOOKS = sorted(FOLDER.glob("*.ipynb"))
REAL = {"01_quickstart.ipynb", "09_many_requests.ipynb"}
# Run by `make test-foreign`, in an environment with another's model.
ELSEWHERE = {"04_bring_your_own_model.ipynb"}
# Bytes of a picture, and of a notebook.
PICTURE, BOOK = 60_000, 200_000


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.name, marks=[pytest.mark.real] if path.name in REAL else [])
        for path in BOOKS
        if path.name not in ELSEWHERE
    ],
)
def test_a_notebook_gives_what_is_stored(name, tmp_path):
    fresh = outputs.run(FOLDER / name, tmp_path / name)
    found = outputs.differences(outputs.code_cells(FOLDER / name), fresh)
    assert not found, "\n".join([*found, "`make notebooks` stores what a run gives"])


def cell(*texts, tags=()):
    """A code cell that printed lines."""
    out = [{"output_type": "stream", "name": "stdout", "text": [each]} for each in texts]
    return {"metadata": {"tags": list(tags)}, "outputs": out}


STORED = "3 of 3 right, 12.50 MB, loss 0.021, 1,463 entries\n"


def test_small_differences_are_none():
    fresh = cell("3 of 3 right,  12.51 MB, loss 0.022, 1,463 entries\n")
    assert not outputs.differences([cell(STORED)], [fresh])


@pytest.mark.parametrize(
    "fresh",
    [
        cell(STORED.replace("1,463", "1,464")),
        cell(STORED.replace("12.50", "13.00")),
        cell(STORED.replace("right", "wrong")),
        cell(STORED, STORED),
        cell(),
    ],
)
def test_other_outputs_are_found(fresh):
    assert outputs.differences([cell(STORED)], [fresh])


def test_of_what_varies_the_kinds_are_compared():
    stored = [cell("3 s\n", tags=[outputs.VARIES])]
    assert not outputs.differences(stored, [cell("4 s, on a busy machine\n")])
    assert outputs.differences(stored, [cell()])


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.name)
def test_stored_outputs_are_small_and_of_no_machine(path):
    assert path.stat().st_size <= BOOK
    for each in outputs.code_cells(path):
        for output in each["outputs"]:
            png = outputs.png_of(output)
            assert png is None or len(png) <= PICTURE
            assert output.get("name", "stdout") == "stdout", (
                "warnings and progress bars are not stored"
            )
            places = r"(?<![\w.])/(home|root|tmp|work|Users|usr|var)/|0x[0-9a-f]{6,}"
            assert not re.search(places, outputs.text_of(output))
        assert set(each["metadata"]) <= {"tags"}


def test_each_notebook_leads_to_the_next():
    texts = [outputs.json.loads(path.read_text("utf-8"))["cells"][-1]["source"] for path in BOOKS]
    assert len(BOOKS) == 9
    for text, following in zip(texts, [*BOOKS[1:], BOOKS[0]], strict=True):
        assert f"]({following.name})" in "".join(text)


def blocks_of(page: Path) -> list[str]:
    """Those that are said to be run."""
    return re.findall(r"```python run\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize(
    "name", [path.name for path in sorted(DOCS.glob("*.md")) if blocks_of(path)]
)
def test_a_page_runs(name, tmp_path):
    path = tmp_path / "page.py"
    path.write_text("\n".join(blocks_of(DOCS / name)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, path], cwd=FOLDER, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]

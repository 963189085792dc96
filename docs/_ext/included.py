"""Pages that are files of the repository: `{include}` takes notebooks too, and links lead to the page of a file.

Files lie where their readers look for them (a README beside its code); a page of two lines includes one.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

HERE = Path(__file__).parent.parent
ROOT = HERE.parent
# Files that are a page each, by the folder of docs/ that these are written to.
MADE = {
    "notebooks": sorted(ROOT.glob("notebooks/*.ipynb")),
    "results": sorted(ROOT.glob("benchmarks/results/*.md")),
}
# Files of the repository by the page that shows them.
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "pallas_kernels/README.md": "kernels.md",
    **{
        str(file.relative_to(ROOT)): f"{folder}/{file.stem}.md"
        for folder, files in MADE.items()
        for file in files
    },
}
_LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")


def as_markdown(notebook: str) -> str:
    """A notebook's cells and their outputs, one after the other.

    Args:
        notebook: its JSON.

    Returns:
        Markdown, with code and printed text in blocks, and with the pictures.
    """
    texts = []
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"])
        texts.append(f"````python\n{source}\n````" if cell["cell_type"] == "code" else source)
        texts += map(_shown, cell.get("outputs", ()))
    return "\n\n".join(texts) + "\n"


def _shown(output: dict[str, Any]) -> str:
    """A stored output as Markdown: a picture, which the page then holds, or a block of text."""
    data = output.get("data", {"text/plain": output.get("text")})
    if "image/png" in data:
        return f"![Output of the cell](data:image/png;base64,{''.join(data['image/png']).strip()})"
    return f"````text\n{''.join(data['text/plain']).rstrip()}\n````"


def leading_to_pages(text: str, folder: Path, page: Path) -> str:
    """Links to files that have a page lead there; those to other files of the repository are kept.

    Args:
        text: Markdown.
        folder: where its links begin.
        page: the page that it is shown on.

    Returns:
        The text, its links as from the page.
    """

    def replaced(match: re.Match[str]) -> str:
        file = (folder / match[1]).resolve()
        if not file.is_relative_to(ROOT):
            return match[1]
        shown = PAGES.get(str(file.relative_to(ROOT)))
        return os.path.relpath(HERE / shown if shown else file, page.parent)

    return _LINK.sub(replaced, text)


def _make_pages(app: Sphinx) -> None:
    """A new notebook or table is a page by itself."""
    for folder, files in MADE.items():
        (HERE / folder).mkdir(exist_ok=True)
        for page in set((HERE / folder).glob("*.md")) - {
            HERE / folder / f"{file.stem}.md" for file in files
        }:
            page.unlink()
        for file in files:
            shown = f"```{{include}} {os.path.relpath(file, HERE / folder)}\n```\n"
            (HERE / folder / f"{file.stem}.md").write_text(shown, encoding="utf-8")


def _read(app: Sphinx, name: str, text: list[str]) -> None:
    page = Path(app.env.doc2path(name))
    text[0] = leading_to_pages(text[0], page.parent, page)


def _include(app: Sphinx, path: Path, _: str, text: list[str]) -> None:
    file = HERE / path
    if file.suffix == ".ipynb":
        text[0] = as_markdown(text[0])
    text[0] = leading_to_pages(
        text[0], file.resolve().parent, Path(app.env.doc2path(app.env.docname))
    )


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx' hook."""
    app.connect("builder-inited", _make_pages)
    app.connect("source-read", _read)
    app.connect("include-read", _include)
    return {"parallel_read_safe": True}

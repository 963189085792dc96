"""Follows the links of pages, READMEs and notebooks: files that exist, headings that exist, addresses that can be one.

`python docs/links.py` needs no network. `--outside` asks the addresses of others, too, one host at a time.
"""

import argparse
import json
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "pallas_kernels/README.md",
    "docs/**/*.md",
    "notebooks/*.ipynb",
)
_MARKDOWN = MarkdownIt("commonmark").enable("table")
# Some hosts reject what does not say that it is a browser, which is no fault of the link.
_REFUSED = {401, 403, 405, 429, 503}


def text_of(file: Path) -> str:
    """A file's Markdown: of a notebook that of its cells that are no code.

    Args:
        file: Markdown or a notebook.

    Returns:
        The text.
    """
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".ipynb":
        return text
    return "\n\n".join(
        "".join(cell["source"])
        for cell in json.loads(text)["cells"]
        if cell["cell_type"] == "markdown"
    )


def _inline(text: str) -> Iterator[tuple[int, Token]]:
    for block in _MARKDOWN.parse(text):
        for token in block.children or ():
            yield (block.map or [0])[0] + 1, token


def links_of(text: str) -> list[tuple[int, str]]:
    """Where a text's links and pictures lead.

    Args:
        text: Markdown.

    Returns:
        Each with the line that its paragraph begins in.
    """
    found = []
    for line, token in _inline(text):
        target = token.attrGet("href" if token.type == "link_open" else "src")
        if token.type in ("link_open", "image"):
            found.append((line, str(target or "")))
    return found


def anchors_of(text: str) -> set[str]:
    """The names by which links reach a text's headings.

    Args:
        text: Markdown.

    Returns:
        Lower case, hyphens for spaces, no punctuation; a number behind those that come again.
    """
    blocks, seen, anchors = _MARKDOWN.parse(text), dict[str, int](), set()
    for at, block in enumerate(blocks):
        if block.type == "heading_open":
            title = "".join(token.content for token in blocks[at + 1].children or ())
            name = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            anchors.add(f"{name}-{seen[name]}" if name in seen else name)
            seen[name] = seen.get(name, 0) + 1
    return anchors


def fault_of(target: str, file: Path) -> str | None:
    """What is wrong with a link, as far as this machine can tell.

    Args:
        target: where it leads.
        file: where it stands.

    Returns:
        The fault, or None.
    """
    try:
        parts = urlsplit(target)
    except ValueError as error:
        return str(error)
    if parts.scheme or parts.netloc:
        sound = (
            parts.scheme in ("http", "https")
            and "." in (parts.hostname or "")
            and not re.search(r"\s", target)
        )
        return None if sound else "no address that begins with https:// and a host"
    there = (file.parent / unquote(parts.path)).resolve() if parts.path else file
    if not there.is_file():
        return "a folder: name a file of it" if there.is_dir() else "no such file"
    if not there.is_relative_to(ROOT):
        return "outside the repository"
    if parts.fragment and there.suffix == ".md":
        known = anchors_of(_with_included(there))
        if parts.fragment not in known:
            return f"no such heading; there are {', '.join(sorted(known)) or 'none'}"
    return None


def _with_included(page: Path) -> str:
    """A page, and behind it the file that it includes."""
    text = text_of(page)
    included = re.findall(r"^```\{include\} (\S+)$", text, flags=re.MULTILINE)
    return "\n\n".join([text, *(text_of(page.parent / name) for name in included)])


def answer_of(address: str) -> str | None:
    """What a host answers that does not have an address.

    Args:
        address: an http one.

    Returns:
        The fault, or None.
    """
    asked = urllib.request.Request(
        address, headers={"User-Agent": "Mozilla/5.0 (links.py of jaxkv)"}
    )
    for seconds in (3, 0):
        try:
            with urllib.request.urlopen(asked, timeout=30):
                return None
        except urllib.error.HTTPError as error:
            if error.code in _REFUSED:
                return None
            if error.code in (404, 410) or not seconds:
                return f"HTTP {error.code}"
        except OSError as error:
            if not seconds:
                return str(error)
        time.sleep(seconds)
    return None


def main(argv: list[str] | None = None) -> int:
    """Follows all links.

    Args:
        argv: the arguments; those of the process if None.

    Returns:
        How many lead nowhere, at most 1.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outside", action="store_true", help="ask other hosts, too")
    outside = parser.parse_args(argv).outside
    files = sorted(
        {file for pattern in PAGES for file in ROOT.glob(pattern) if "_build" not in file.parts}
    )
    faults, hosts = [], dict[str, dict[str, str]]()
    for file in files:
        for line, target in links_of(text_of(file)):
            place = f"{file.relative_to(ROOT)}:{line}: {target}"
            if fault := fault_of(target, file):
                faults.append(f"{place}: {fault}")
            elif host := urlsplit(target).hostname:
                hosts.setdefault(host, {}).setdefault(target, place)
    asked = sum(map(len, hosts.values()))
    if outside:
        with ThreadPoolExecutor(8) as pool:
            answers = pool.map(
                lambda them: [(place, answer_of(each)) for each, place in them.items()],
                hosts.values(),
            )
            faults += [f"{place}: {fault}" for host in answers for place, fault in host if fault]
    print(
        "\n".join(faults)
        or f"links: {len(files)} files, {asked} addresses of others {'' if outside else 'not '}asked"
    )
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())

"""Texts for evaluations: a file, a folder of files, JSON lines, or the packaged documents."""

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jaxkv._errors import require


def read_packaged_file(name: str) -> str:
    """Return the text of a file packaged with `jaxkv.evals`; .gz files are decompressed."""
    content = resources.files("jaxkv.evals").joinpath(name).read_bytes()
    return (gzip.decompress(content) if name.endswith(".gz") else content).decode("utf-8")


def read_texts(data: str | None, count: int = 0) -> Mapping[str, str]:
    """Read the first `count` texts (0: all) of a file, a folder, a .jsonl file or (None) the package, as dict by title.

    None reads the packaged documents. Raises FileNotFoundError for a path without texts.
    """
    if data is None:
        rows = json.loads(read_packaged_file("data/documents.json.gz"))
        return {row["title"]: row["text"] for row in rows[: count or None]}
    path = Path(data).expanduser()
    if path.suffix == ".jsonl" and path.is_file():
        return {
            f"{number:03d} {row.get('title', '')}".strip(): row["text"]
            for number, row in enumerate(read_json_lines(path, ("text",), count))
        }
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        remedy = "use a text file, a .jsonl file of texts, or a folder of .txt files, such as PG-19's test set"
        raise FileNotFoundError(f"data={data!r}: no text found: {remedy}")
    return {each.stem: read_utf8_file(each) for each in files[: count or None]}


def read_utf8_file(path: Path, name: str = "data") -> str:
    """Read a UTF-8 text file, without byte order mark; ValueError for other encodings, FileNotFoundError if missing."""
    _require_file(path, name)
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name}={str(path)!r}: not UTF-8 text ({error}): convert it to UTF-8"
        ) from None


def parse_json_lines(
    lines: Iterable[bytes], where: str, keys: Sequence[str], count: int = 0
) -> list[dict[str, Any]]:
    """Parse the first `count` rows (0: all) of JSON lines as dicts; ValueError for bad JSON or missing `keys`.

    Only line feeds end lines. Empty lines and a leading byte order mark are skipped.
    """
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if count and len(rows) == count:
            break
        if line.strip():
            try:
                rows.append(json.loads(line.decode("utf-8-sig")))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"data={where!r}: line {number} is not JSON ({error})") from None
            fits = isinstance(rows[-1], dict) and rows[-1].keys() >= set(keys)
            remedy = f"line {number} is not an object with {', '.join(keys)}: check that it is the right file"
            require(fits, "data", where, remedy)
    return rows


def read_json_lines(path: Path, keys: Sequence[str], count: int = 0) -> list[dict[str, Any]]:
    """Read the first `count` rows (0: all) of a JSON lines file as dicts; ValueError for bad JSON or missing `keys`."""
    _require_file(path, "data")
    with path.open("rb") as file:
        return parse_json_lines(file, str(path), keys, count)


def _require_file(path: Path, name: str) -> None:
    """Raise FileNotFoundError, which names the argument `name`, unless the file exists."""
    if not path.is_file():
        raise FileNotFoundError(f"{name}={str(path)!r}: no such file")

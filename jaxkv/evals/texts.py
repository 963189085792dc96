"""Texts that evaluations read: a file, a folder of files, lines of JSON, or the documents that come with jaxkv."""

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jaxkv._errors import require


def shipped(name: str) -> str:
    """Text of a file that comes with jaxkv's evaluations, decompressed."""
    content = resources.files("jaxkv.evals").joinpath(name).read_bytes()
    return (gzip.decompress(content) if name.endswith(".gz") else content).decode("utf-8")


def texts_of(data: str | None, count: int = 0) -> Mapping[str, str]:
    """Dict {title: text} of the first `count` texts (0: all) in a text file, a folder of .txt files or a .jsonl file.

    None gives the documents that come with jaxkv. A path without texts is a FileNotFoundError that says what to give.
    """
    if data is None:
        rows = json.loads(shipped("data/documents.json.gz"))
        return {row["title"]: row["text"] for row in rows[: count or None]}
    path = Path(data).expanduser()
    if path.suffix == ".jsonl" and path.is_file():
        return {
            f"{number:03d} {row.get('title', '')}".strip(): row["text"]
            for number, row in enumerate(rows_of_file(path, ("text",), count))
        }
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        remedy = "give a text, a .jsonl file of texts, or a folder of .txt files, such as PG-19's test set"
        raise FileNotFoundError(f"data={data!r}: no text there; {remedy}")
    return {each.stem: text_of_file(each) for each in files[: count or None]}


def text_of_file(path: Path, name: str = "data") -> str:
    """Text of a UTF-8 file, without byte order mark; ValueError for other encodings, FileNotFoundError for no file."""
    _require_file(path, name)
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name}={str(path)!r}: not UTF-8 text ({error}); save it as such"
        ) from None


def json_lines(
    lines: Iterable[bytes], where: str, keys: Sequence[str], count: int = 0
) -> list[dict[str, Any]]:
    """List of the first `count` rows (0: all), as dicts, of JSON lines; ValueError for bad JSON or missing `keys`.

    Lines end with a line feed alone; empty lines are skipped, a leading byte order mark too.
    """
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if count and len(rows) == count:
            break
        if line.strip():
            try:
                rows.append(json.loads(line.decode("utf-8-sig")))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"data={where!r}: line {number} is no JSON ({error})") from None
            fits = isinstance(rows[-1], dict) and rows[-1].keys() >= set(keys)
            remedy = f"line {number} is no object with {', '.join(keys)}: is it the right file?"
            require(fits, "data", where, remedy)
    return rows


def rows_of_file(path: Path, keys: Sequence[str], count: int = 0) -> list[dict[str, Any]]:
    """`json_lines` of a file; FileNotFoundError if there is none."""
    _require_file(path, "data")
    with path.open("rb") as file:
        return json_lines(file, str(path), keys, count)


def _require_file(path: Path, name: str) -> None:
    """Raise FileNotFoundError unless there is a file."""
    if not path.is_file():
        raise FileNotFoundError(f"{name}={str(path)!r}: no such file")

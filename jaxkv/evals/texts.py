"""Texts that evaluations read: a file, a folder of files, lines of JSON, or the documents that come with jaxkv."""

import gzip
import json
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from jaxkv._errors import require
from jaxkv.evals.stored import json_lines


def texts_of(data: str | None, count: int = 0) -> Mapping[str, str]:
    """Dict {title: text} of the first `count` texts (0: all) in a text file, a folder of .txt files or a .jsonl file.

    None gives the documents that come with jaxkv. A path without texts is a FileNotFoundError that says what to give.
    """
    if data is None:
        packed = (resources.files("jaxkv.evals") / "data" / "documents.json.gz").read_bytes()
        rows = json.loads(gzip.decompress(packed))
        return {row["title"]: row["text"] for row in rows[: count or None]}
    path = Path(os.path.expanduser(data))
    if path.suffix == ".jsonl" and path.is_file():
        read = json_lines(path, ("text",), count)
        odd = next((row["text"] for row in read if not isinstance(row["text"], str)), None)
        require(odd is None, "data", odd, 'give lines such as {"text": "..."}')
        return {
            f"{number:03d} {row.get('title', '')}".strip(): row["text"]
            for number, row in enumerate(read)
        }
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        remedy = "give a text, a .jsonl file of texts, or a folder of .txt files, such as PG-19's test set"
        raise FileNotFoundError(f"data={data!r}: no text there; {remedy}")
    return {each.stem: text_of_file(each) for each in files[: count or None]}


def text_of_file(path: Path) -> str:
    """Text of a UTF-8 file, without byte order mark; ValueError for other encodings."""
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"data={str(path)!r}: not UTF-8 text ({error}); save it as such") from None

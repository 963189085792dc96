"""JSON and text files of a checkpoint, which are untrusted: of any size, depth and content."""

import json
from pathlib import Path
from typing import Any

from jaxkv._errors import build_value_error, require
from jaxkv.checkpoints.whole_files import write_file_atomically

AGAIN = "copy or download the file again"
# Settings are kilobytes, the index of a large model megabytes; parsed JSON needs up to 30 times as much memory.
_MOST_BYTES = 32 << 20


def check_file_size(path: Path, most: int = _MOST_BYTES) -> None:
    """Raise ValueError if a file has more than `most` bytes, by default 32 MiB."""
    size = path.stat().st_size
    require(size <= most, "file", path, f"{size:,} bytes are more than {most:,}: {AGAIN}")


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file of at most 32 MiB, without its byte order mark; ValueError for other files.

    Raises:
        ValueError: if it cannot be read, is not UTF-8, or is too large.
    """
    check_file_size(path)
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise build_value_error("file", path, f"not UTF-8 ({error}): {AGAIN}") from error
    except OSError as error:
        raise build_value_error(
            "file", path, f"it cannot be read ({error.strerror}): {AGAIN}"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of at most 32 MiB whose value is an object; return it as a dictionary; ValueError for others.

    Raises:
        ValueError: if the file is not a JSON object, or too deeply nested.
    """
    text = read_text(path)
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise build_value_error("file", path, f"JSON nested too deeply: {AGAIN}") from error
    except ValueError as error:
        raise build_value_error("file", path, f"not valid JSON ({error}): {AGAIN}") from error
    require(isinstance(value, dict), "file", path, f"not a JSON object: {AGAIN}")
    return value


def write_json(path: Path, value: Any) -> None:
    """Write a value to a file as indented JSON, atomically; after an OSError the old file is unchanged."""
    write_file_atomically(path, (json.dumps(value, indent=2) + "\n").encode())

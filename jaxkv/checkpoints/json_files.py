"""JSON and text files of a checkpoint, which are untrusted: of any size, depth and content."""

import json
from pathlib import Path
from typing import Any

from jaxkv._errors import invalid, require
from jaxkv.checkpoints.whole_files import write_whole

AGAIN = "copy or download the file again"
# Settings are kilobytes, the index of a large model megabytes; parsed JSON needs up to 30 times as much memory.
_MOST_BYTES = 32 << 20


def check_size(path: Path, most: int = _MOST_BYTES) -> None:
    """Raise a ValueError if a file has more than `most` bytes."""
    size = path.stat().st_size
    require(size <= most, "file", path, f"{size:,} bytes are more than {most:,}: {AGAIN}")


def read_text(path: Path) -> str:
    """Read a UTF-8 file without its byte order mark.

    Raises:
        ValueError: if it cannot be read, is not UTF-8, or is too large.
    """
    check_size(path)
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise invalid("file", path, f"not UTF-8 ({error}): {AGAIN}") from error
    except OSError as error:
        raise invalid("file", path, f"it cannot be read ({error.strerror}): {AGAIN}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a file of one JSON object as a dictionary.

    Raises:
        ValueError: if the file is not a JSON object, or too deeply nested.
    """
    text = read_text(path)
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise invalid("file", path, f"JSON nested too deeply: {AGAIN}") from error
    except ValueError as error:
        raise invalid("file", path, f"not valid JSON ({error}): {AGAIN}") from error
    require(isinstance(value, dict), "file", path, f"not a JSON object: {AGAIN}")
    return value


def write_json(path: Path, value: Any) -> None:
    """Write a value to a file as JSON, atomically; an OSError leaves the old file unchanged."""
    write_whole(path, (json.dumps(value, indent=2) + "\n").encode())

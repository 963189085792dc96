"""JSON and text files of a checkpoint: from elsewhere, so of any size, depth and kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ._errors import refusal, require
from .whole_files import write_whole

AGAIN = "copy or download the file again"
# Settings take kilobytes, the index of a large model a few megabytes; JSON takes up to thirty times that in memory.
_MOST_BYTES = 32 << 20


def check_size(path: Path, most: int = _MOST_BYTES) -> None:
    """Refuses a file that is too large to be what it should.

    Args:
        path: the file.
        most: bytes.

    Raises:
        ValueError: naming the file.
    """
    size = path.stat().st_size
    require(size <= most, "file", path, f"{size:,} bytes, at most {most:,} are read; {AGAIN}")


def read_text(path: Path) -> str:
    """Reads a text file in UTF-8, with or without a byte order mark.

    Args:
        path: the file.

    Returns:
        Its text.

    Raises:
        ValueError: where the file cannot be read, is not UTF-8, or is too large to be what it should.
    """
    check_size(path)
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise refusal("file", path, f"not UTF-8 ({error}); {AGAIN}") from error
    except OSError as error:
        raise refusal("file", path, f"it cannot be read ({error.strerror}); {AGAIN}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Args:
        path: the file.

    Returns:
        The object.

    Raises:
        ValueError: where the file is not a JSON object, or nests deeper than Python reads.
    """
    text = read_text(path)
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise refusal("file", path, f"JSON nested too deeply; {AGAIN}") from error
    except ValueError as error:
        raise refusal("file", path, f"not valid JSON ({error}); {AGAIN}") from error
    require(isinstance(value, dict), "file", path, f"a JSON object is expected; {AGAIN}")
    return value


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file, whole or not at all; a new one has the mode that the umask gives, an old one's successor its.

    Args:
        path: the file.
        value: what goes into it.

    Raises:
        OSError: where it cannot be written; the old file is then as it was.
    """
    write_whole(path, (json.dumps(value, indent=2) + "\n").encode())

"""Checks the path of the folder that an export makes."""

import os
from pathlib import Path
from typing import Any

from jaxkv._support.errors import refusal, require


def as_folder(given: Any) -> Path:
    """Path of the export's folder with `~` expanded; TypeError if it is no path, ValueError if none can exist."""
    path = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(path, str):
        raise TypeError(f"directory={given!r}: give the path of the folder to make")
    require("\0" not in path, "directory", given, "no name holds null characters: leave them out")
    try:
        folder = Path(path).expanduser()
    except RuntimeError as error:
        raise refusal(
            "directory", given, "there is no such user's home: write the path out"
        ) from error
    return folder

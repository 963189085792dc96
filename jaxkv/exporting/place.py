"""The folder of an export, which appears whole or not at all."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxkv._errors import require
from jaxkv.checkpoints._errors import refusal
from jaxkv.checkpoints.orbax_files import require_free


def as_folder(given: Any) -> Path:
    """Path given as `directory`, at which nothing lies, with `~` expanded; TypeError for anything but a path."""
    path = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(path, str):
        raise TypeError(f"directory={given!r}: give the path of the folder to make")
    require("\0" not in path, "directory", given, "no name holds null characters: leave them out")
    try:
        folder = Path(path).expanduser()
    except RuntimeError as error:
        raise refusal("directory", given, "there is no such user's home: write the path out") from error
    require_free(folder, "directory")
    return folder


@contextlib.contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """Context of a temporary folder to write into, renamed to `folder` at its end; removed if the body fails.

    ValueError where no folder can be made, or where something has appeared at `folder` meanwhile.
    """
    # A short name: the folder's own may be as long as names can be.
    part = folder.with_name(f".{secrets.token_hex(8)}.partial")
    missing = [each for each in (part, *part.parents) if not os.path.lexists(each)]
    try:
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            part.mkdir()
            with contextlib.suppress(FileNotFoundError):
                folder.lstat()  # raises for a name that is too long, say
        except OSError as error:
            raise refusal("directory", folder, f"no folder can be made there ({error}): choose another") from error
        yield part
        require_free(folder, "directory")
        os.rename(part, folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        for parent in missing[1:]:
            with contextlib.suppress(OSError):  # not empty: somebody else's files
                parent.rmdir()
        raise

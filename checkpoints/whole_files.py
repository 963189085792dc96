"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from pathlib import Path

# What a file is called until it is whole.
_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file through to the disk; a new one has the mode that the umask gives, an old one's successor its.

    Args:
        path: the file.
        data: what goes into it.

    Raises:
        OSError: where it cannot be written, naming it; the old file is then as it was.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        mode = path.stat().st_mode & 0o777 if path.exists() else None
        # Not read by others before it has its mode.
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            os.chmod(part, mode)
        os.replace(part, path)
        settle(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(part)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        raise


def settle(folder: Path) -> None:
    """Writes a folder's names through to the disk; a file whose name is lost is lost with it.

    Args:
        folder: in which a file was made or renamed.
    """
    if os.name == "nt":  # folders are not opened there
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        # Some file systems have no such thing for folders; a disk that fails is told.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(number)


def remove_unfinished(folder: Path) -> None:
    """Removes what `write_whole` leaves in a folder where it was killed.

    Args:
        folder: one that nobody else writes to.
    """
    for path in folder.iterdir():
        if _UNFINISHED.fullmatch(path.name):
            path.unlink()

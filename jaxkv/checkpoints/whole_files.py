"""Atomic writes of files: written under a temporary name, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Writes bytes to a file by a temporary file and a rename, flushed to disk; OSError, naming the file, if it fails.

    The bytes may come in parts, which are written as they come.
    A new file gets the mode that the umask gives; a replaced one hands on its mode.

    Raises:
        OSError: where it cannot be written, naming the file.
    """
    # A short name, since the file's own may have the maximal length.
    part = path.with_name(f".jaxkv.{secrets.token_hex(8)}.tmp")
    try:
        old = path.stat() if path.exists() else None
        # Not readable by others until its final mode is set.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        handle = os.open(part, flags, 0o666 if old is None else 0o600)
        with os.fdopen(handle, "wb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
        if old is not None:
            os.chmod(part, old.st_mode & 0o777)
        os.replace(part, path)
        sync_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(part)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        raise


def sync_folder(folder: Path) -> None:
    """Flushes a folder's directory entries to disk, so that a rename survives a crash; does nothing on Windows."""
    if os.name == "nt":  # Windows does not open folders
        return
    try:
        number = os.open(folder, os.O_RDONLY)
    except PermissionError:  # a folder that takes files but does not list them
        return
    try:
        os.fsync(number)
    except OSError as error:
        # Some file systems do not sync folders; failing disks are reported.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(number)

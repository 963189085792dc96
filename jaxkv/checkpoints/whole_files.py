"""Atomic writes of files: written under a temporary name, then renamed."""

import contextlib
import os
import secrets
from pathlib import Path


def write_file_atomically(path: Path, data: bytes) -> None:
    """Write bytes to a file atomically: to a temporary file, flushed to disk, then renamed.

    A new file gets the mode of the umask; a replaced file keeps its mode.

    Raises:
        OSError: if it cannot be written, with the name of the file.
    """
    # A short name, because the file's own may have the maximum length.
    part = path.with_name(f".jaxkv.{secrets.token_hex(8)}.tmp")
    try:
        old = path.stat().st_mode & 0o777 if path.exists() else None
        # Not readable by others until the final mode is set.
        mode = 0o666 if old is None else 0o600
        with open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if old is not None:
            os.chmod(part, old)
        os.replace(part, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(part)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        raise

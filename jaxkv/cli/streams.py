"""Writes to stdout and stderr, which may be closed, full, in a limited encoding, or a pipe whose reader has exited."""

import contextlib
import errno
import io
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any


class Unwritten(Exception):
    """Raised when a write to stdout fails; `gone` is True if its reader has left, as `head` does, which is no error."""

    def __init__(self, message: str, *, gone: bool = False):
        super().__init__(f"stdout: {message}")
        self.gone = gone


class _Closed(io.TextIOBase):
    """Stands in for a stdin or stdout that was closed before Python started; reading and writing raise an OSError."""

    def _refuse(self, *_: Any) -> Any:
        # Reading nothing would be taken for an empty prompt, and discarding output for success.
        raise OSError(errno.EBADF, "it is closed")

    buffer = property(_refuse)
    read = write = _refuse


def prepare_streams() -> None:
    """Replaces closed standard streams and lets stdout escape characters it cannot encode; call it before any output.

    Their descriptors are opened on the null device: the next opened file would get them, and text that libraries write
    to descriptor 2 would land in it. stdout escapes characters with backslashes, unless the user chose otherwise
    (`PYTHONIOENCODING=ascii:replace`).
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # stdin is opened for writing and stdout for reading, so that using either raises an error.
            holder = os.open(os.devnull, os.O_WRONLY if number == 0 else os.O_RDONLY)
            if holder != number:
                os.dup2(holder, number)
                os.close(holder)
    # mypy takes these for streams always; Python sets them to None where they are closed.
    streams: dict[str, Any] = {"stdin": sys.stdin, "stdout": sys.stdout, "stderr": sys.stderr}
    for name, stream in streams.items():
        if stream is None:  # work goes on without stderr: the exit code tells how it ended
            setattr(sys, name, io.StringIO() if name == "stderr" else _Closed())
    out: Any = sys.stdout
    if getattr(out, "errors", None) in ("strict", "surrogateescape") and hasattr(
        out, "reconfigure"
    ):
        out.reconfigure(errors="backslashreplace")


def stdout_is_closed() -> bool:
    """True if the process was started without stdout."""
    return isinstance(sys.stdout, _Closed)


def to_stdout(text: str, *, end: str = "\n") -> None:
    """Writes and flushes text to stdout; raises `Unwritten` if that fails, and discards all later output."""
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        _silence(sys.stdout)
        raise Unwritten(
            error.strerror or str(error), gone=isinstance(error, BrokenPipeError)
        ) from None


def to_stderr(text: str) -> None:
    """Writes a line of text to stderr; errors are ignored."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr)


@contextlib.contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Context manager in which warnings are printed to stderr as one line each."""
    with warnings.catch_warnings():
        warnings.showwarning = _show
        yield


def _show(message: Warning | str, *_: Any, **__: Any) -> None:
    """Replacement for `warnings.showwarning` that writes a warning to stderr as one line, without file and line."""
    to_stderr(f"jaxkv: warning: {' '.join(str(message).split())}")


def _silence(stream: Any) -> None:
    """Redirects a stream to the null device, because a failing flush at exit would end Python with code 120."""
    with contextlib.suppress(OSError, ValueError):
        number = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)

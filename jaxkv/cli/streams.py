"""Standard streams as a shell hands them over: closed, full, of another encoding, with a reader that has gone."""

import contextlib
import errno
import io
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn


class Unwritten(Exception):
    """stdout took no more.

    Attributes:
        gone: its reader has gone, `head` say, which is no error.
    """

    def __init__(self, message: str, *, gone: bool = False):
        super().__init__(f"stdout: {message}")
        self.gone = gone


class _Closed(io.TextIOBase):
    """In place of a stream that was closed before Python started, where Python has None."""

    @property
    def buffer(self) -> Any:
        """Raises: there is nothing to read bytes from, and a caller that looks for them must not read text instead."""
        self._refuse()

    def read(self, size: int | None = -1, /) -> str:
        """Raises as a closed file's would: an empty text would pass for a prompt."""
        self._refuse()

    def write(self, text: str, /) -> int:
        """Raises as a closed file's would, so that nothing passes for written."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise OSError(errno.EBADF, "it is closed")


class _Discarding(io.TextIOBase):
    """stderr, where it was closed: figures and errors have nowhere to go, the exit code tells."""

    def write(self, text: str, /) -> int:
        """Drops the text and counts it as written: a lost figure must not end the work."""
        return len(text)


def prepare_streams() -> None:
    """Makes the standard streams fit to use; call it before any file is opened.

    Closed ones get a stand-in, and their numbers a place holder: the next file that is opened would get them, and what
    libraries write to number 2 would land in it. What stdout's encoding cannot say is written with backslashes, so
    that no answer is lost to it, unless the user chose otherwise (`PYTHONIOENCODING=ascii:replace`).
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The wrong way round, so that neither reading nor writing passes for success.
            holder = os.open(os.devnull, os.O_WRONLY if number == 0 else os.O_RDONLY)
            if holder != number:
                os.dup2(holder, number)
                os.close(holder)
    # mypy takes these for streams always; Python sets them to None where they are closed.
    streams: dict[str, Any] = {"stdin": sys.stdin, "stdout": sys.stdout, "stderr": sys.stderr}
    for name, stream in streams.items():
        if stream is None:
            setattr(sys, name, _Discarding() if name == "stderr" else _Closed())
    out: Any = sys.stdout
    if getattr(out, "errors", None) in ("strict", "surrogateescape") and hasattr(out, "reconfigure"):
        out.reconfigure(errors="backslashreplace")


def stdout_is_closed() -> bool:
    """Whether there is no stdout to write to."""
    return isinstance(sys.stdout, _Closed)


def to_stdout(text: str, *, end: str = "\n") -> None:
    """Writes to stdout, at once.

    Args:
        text: what to write.
        end: what follows.

    Raises:
        Unwritten: if stdout does not take it; nothing more may be written to it then.
    """
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        _silence(sys.stdout)
        raise Unwritten(error.strerror or str(error), gone=isinstance(error, BrokenPipeError)) from None


def to_stderr(text: str) -> None:
    """Writes to stderr; where that fails there is nobody left to tell.

    Args:
        text: what to write.
    """
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr)


@contextlib.contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Shows warnings as the command line shows errors: one line each on stderr, without the place in the code."""
    # What is set here ends with the command: a program that calls this has its own way to show warnings.
    with warnings.catch_warnings():
        warnings.showwarning = _show
        yield


def _show(message: Warning | str, *_: Any, **__: Any) -> None:
    """Writes one warning to stderr, as one line."""
    to_stderr(f"jaxkv: warning: {' '.join(str(message).split())}")


def _silence(stream: Any) -> None:
    """Leads what is still buffered nowhere: Python flushes at exit, and would end with a complaint and code 120."""
    with contextlib.suppress(OSError, ValueError):
        number = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)

"""Files that the command line reads and writes: bounded texts in, results out without the loss of either."""

import contextlib
import dataclasses
import errno
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkv.checkpoints.whole_files import write_whole
from jaxkv.cli.streams import stdout_is_closed, to_stderr

# More than any model's positions; /dev/zero ends here.
MOST_BYTES = 64 * 2**20
# Where a file cannot be replaced by another one, though it can be written: a mount of its own (as containers make
# them), a folder that is read-only or sticky.
_NOT_REPLACED = (errno.EBUSY, errno.EXDEV, errno.EPERM, errno.EACCES, errno.EROFS)


def read_text(name: str, flag: str) -> str:
    """Reads a UTF-8 text, whatever the locale: a mark at its start is dropped, line ends become newlines.

    Args:
        name: a file, a FIFO, or - for stdin.
        flag: the option that names it.

    Returns:
        The text.

    Raises:
        ValueError: for more than 64 MiB, or what is not UTF-8.
        OSError: if it cannot be read.
    """
    try:
        if name == "-":
            data = _stdin()
        else:
            with open(os.path.expanduser(name), "rb") as file:
                data = file.read(MOST_BYTES + 1)
    except OSError as error:
        what = "stdin: " if name == "-" else ""
        raise OSError(f"{flag}={name}: {what}{error.strerror or error}; give a readable text file") from None
    if len(data) > MOST_BYTES:
        raise ValueError(f"{flag}={name}: more than {MOST_BYTES >> 20} MiB; give a shorter text")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag}={name}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _stdin() -> bytes:
    if sys.stdin.isatty():
        to_stderr("jaxkv: reading the text from the terminal; Ctrl-D on a line of its own ends it")
    source: Any = getattr(sys.stdin, "buffer", None)
    if source is None:  # a program's own stand-in
        return sys.stdin.read(MOST_BYTES + 1).encode("utf-8", "surrogatepass")
    return source.read(MOST_BYTES + 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A file that takes a result: look at it before the work, write it after.

    Links are followed. A regular file is replaced by a whole new one under its name, with its mode and, where
    possible, its owner; where it cannot be replaced it is written in place. What is no regular file, a FIFO or a
    character device, is never replaced but written to. A FIFO is opened only when the result is there, and writing
    waits for its reader, as any program's would.

    Attributes:
        flag: the option that names it.
        name: the file.
    """

    flag: str
    name: str

    def check(self, inputs: Mapping[str, str]) -> None:
        """Refuses what could not be written, and what the result must not overwrite. Nothing is opened.

        Args:
            inputs: option to file, of what is read.

        Raises:
            ValueError: naming the remedy.
        """
        path, state = self._path, self._state()
        if state is None:
            folder = os.path.dirname(os.path.realpath(path))
            if not os.path.isdir(folder):
                raise self._refusal(f"there is no folder {folder}; make it first")
            if not os.access(folder, os.W_OK | os.X_OK):
                raise self._refusal(f"the folder {folder} cannot be written to; give another")
            return
        if not os.access(path, os.W_OK):
            raise self._refusal("the file cannot be written to; give another")
        for flag, name in inputs.items():
            its = _state_of(name)
            if its is not None and os.path.samestat(state, its) and not stat.S_ISCHR(state.st_mode):
                raise self._refusal(f"it is the file of {flag}={name}; give another")

    def write(self, data: bytes) -> None:
        """Writes the result.

        Args:
            data: all of it.

        Raises:
            OSError: if it could not be written. A regular file is then as it was, unless it can only be written in
                place.
            ValueError: if it has become a folder, say.
        """
        try:
            state, real = self._state(), os.path.realpath(self._path)
            if state is not None and not _is_file(real, state):
                _write_through(self._path, state, data)
                return
            try:
                write_whole(Path(real), data)
            except OSError as error:
                if state is None or error.errno not in _NOT_REPLACED:
                    raise
                with os.fdopen(os.open(real, os.O_WRONLY | os.O_TRUNC), "wb") as file:
                    file.write(data)
        except OSError as error:
            # Of no finer kind: a reader that leaves a FIFO is not stdout's.
            raise OSError(f"{self.flag}={self.name}: {error.strerror or error}") from error

    @property
    def _path(self) -> str:
        return os.path.expanduser(self.name)

    def _refusal(self, remedy: str) -> ValueError:
        return ValueError(f"{self.flag}={self.name!r}: {remedy}")

    def _state(self) -> os.stat_result | None:
        """What is there, links followed; None if nothing is."""
        path = self._path
        if not path:
            raise self._refusal("give a file")
        try:
            state = os.stat(path)
        except FileNotFoundError:
            state = None
        except (OSError, ValueError) as error:
            raise self._refusal(f"{getattr(error, 'strerror', None) or error}; give another file") from None
        separators = tuple(filter(None, (os.sep, os.altsep)))
        if path.endswith(separators) or (state is not None and stat.S_ISDIR(state.st_mode)):
            raise self._refusal("it is a folder; name a file in it")
        if state is not None and (stat.S_ISBLK(state.st_mode) or stat.S_ISSOCK(state.st_mode)):
            raise self._refusal("a disk or a socket takes no results; give a file")
        return state


def _state_of(name: str) -> os.stat_result | None:
    try:
        return os.fstat(0) if name == "-" else os.stat(os.path.expanduser(name))
    except (OSError, ValueError):
        return None  # whoever reads it says so


def _is_file(real: str, state: os.stat_result) -> bool:
    """Whether the path names a regular file, to be replaced; /dev/fd/3 may stand for one without a name."""
    if not stat.S_ISREG(state.st_mode) or _our_own(state) is not None:
        return False
    there = _state_of(real)
    return there is not None and os.path.samestat(there, state)


def _our_own(state: os.stat_result) -> int | None:
    """The number of stdout or stderr, if it is this file: a new one in its place would part them."""
    for number in (2,) if stdout_is_closed() else (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(number), state):
                return number
    return None


def _write_through(path: str, state: os.stat_result, data: bytes) -> None:
    own = _our_own(state)
    if own is not None:
        # Behind what has been written there, where opening it anew would begin at the start.
        (sys.stdout if own == 1 else sys.stderr).flush()
    number = os.open(path, os.O_WRONLY) if own is None else os.dup(own)
    with os.fdopen(number, "wb") as file:
        file.write(data)

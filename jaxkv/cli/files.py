"""Files of the command line: reads UTF-8 texts of bounded size, checks output files early, writes them atomically."""

import contextlib
import dataclasses
import errno
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkv._errors import require
from jaxkv.checkpoints.whole_files import write_whole
from jaxkv.cli.streams import stdout_is_closed, to_stderr

# More text than any model has positions for; also stops reading from /dev/zero.
MOST_BYTES = 64 * 2**20
# Where a file can be written but not replaced: a mount of its own (as containers make them), a folder that is
# read-only or sticky.
_NOT_REPLACED = (errno.EBUSY, errno.EXDEV, errno.EPERM, errno.EACCES, errno.EROFS)


def read_text(name: str, flag: str) -> str:
    """Text of a UTF-8 file, or stdin for "-", without byte order mark, line ends as newlines; ValueError above 64 MiB.

    `flag` is the option that names the file, for the error message.
    """
    try:
        if name == "-":
            data = _stdin()
        else:
            with open(os.path.expanduser(name), "rb") as file:
                data = file.read(MOST_BYTES + 1)
    except OSError as error:
        where = "stdin: " if name == "-" else ""
        raise OSError(
            f"{flag}={name}: {where}{error.strerror or error}; give a readable text file"
        ) from None
    if len(data) > MOST_BYTES:
        raise ValueError(f"{flag}={name}: more than {MOST_BYTES >> 20} MiB; give a shorter text")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{flag}={name}: not UTF-8 text ({error.reason} at byte {error.start})"
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_long_text(name: str, flag: str) -> str:
    """Text of a file as from `read_text`; ValueError if it is empty or only white space."""
    text = read_text(name, flag)
    require(bool(text.strip()), flag, name, "it is empty: give a long text")
    return text


def _stdin() -> bytes:
    """Bytes of stdin, `MOST_BYTES + 1` at most; on a terminal, first writes to stderr how to end the text."""
    if sys.stdin.isatty():
        to_stderr("jaxkv: reading the text from the terminal; Ctrl-D on a line of its own ends it")
    source: Any = getattr(sys.stdin, "buffer", None)
    if source is None:  # a program's own replacement of stdin, of text
        return sys.stdin.read(MOST_BYTES + 1).encode("utf-8", "surrogatepass")
    return source.read(MOST_BYTES + 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Output file `name` given by option `flag`: `check` it before the work, `write` it once afterwards.

    Links are followed. A regular file is replaced by a new one with its mode and owner, or written in place where it
    cannot be replaced. A FIFO or character device is opened and written to only when the result is ready.
    """

    flag: str
    name: str

    def check(self, inputs: Mapping[str, str]) -> None:
        """Raises ValueError if the file cannot be written or is one of `inputs` (option to file name)."""
        path, state = self._path, self._state()
        if state is None:
            folder = os.path.dirname(os.path.realpath(path))
            self._require(os.path.isdir(folder), f"there is no folder {folder}; make it first")
            writable = os.access(folder, os.W_OK | os.X_OK)
            self._require(writable, f"the folder {folder} cannot be written to; give another")
            return
        self._require(os.access(path, os.W_OK), "the file cannot be written to; give another")
        for flag, name in inputs.items():
            same = _is_file(name, state) and not stat.S_ISCHR(state.st_mode)
            self._require(not same, f"it is the file of {flag}={name}; give another")

    def write(self, data: bytes) -> None:
        """Writes `data` to the file, atomically if the file can be replaced; an OSError names the option."""
        state, real = self._state(), os.path.realpath(self._path)
        try:
            number = None if state is None else _standard_stream(state)
            if number is not None:
                # Appends to what the stream has written; opening the file again would overwrite it from its start.
                (sys.stdout if number == 1 else sys.stderr).flush()
                with os.fdopen(os.dup(number), "wb") as stream:
                    stream.write(data)
            # /dev/fd/3 may be a regular file without a name, which nothing can replace.
            elif state is None or (stat.S_ISREG(state.st_mode) and _is_file(real, state)):
                try:
                    write_whole(Path(real), data)
                except OSError as error:
                    if state is None or error.errno not in _NOT_REPLACED:
                        raise
                    _write_in_place(real, data)
            else:
                _write_in_place(self._path, data)
        except OSError as error:
            # A plain OSError, so that a FIFO's BrokenPipeError is not taken for stdout's.
            raise OSError(f"{self.flag}={self.name}: {error.strerror or error}") from error

    @property
    def _path(self) -> str:
        """File name with ~ expanded."""
        return os.path.expanduser(self.name)

    def _require(self, condition: bool, remedy: str) -> None:
        """Raises a ValueError that names the option and the file unless `condition` holds."""
        require(condition, self.flag, self.name, remedy)

    def _state(self) -> os.stat_result | None:
        """`os.stat` of the file, links followed; None if there is none; ValueError for folders, disks and sockets."""
        path = self._path
        self._require(bool(path), "give a file")
        try:
            state = os.stat(path)
        except FileNotFoundError:
            state = None
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self.flag}={self.name!r}: {getattr(error, 'strerror', None) or error}; give another file"
            ) from None
        separators = tuple(filter(None, (os.sep, os.altsep)))
        folder = path.endswith(separators) or (state is not None and stat.S_ISDIR(state.st_mode))
        self._require(not folder, "it is a folder; name a file in it")
        odd = state is not None and (stat.S_ISBLK(state.st_mode) or stat.S_ISSOCK(state.st_mode))
        self._require(not odd, "a disk or a socket takes no results; give a file")
        return state


def _is_file(name: str, state: os.stat_result) -> bool:
    """True if `name` ("-" for stdin) is the file that `state` describes, also by a hard or symbolic link."""
    try:
        return os.path.samestat(
            os.fstat(0) if name == "-" else os.stat(os.path.expanduser(name)), state
        )
    except (OSError, ValueError):
        return False


def _standard_stream(state: os.stat_result) -> int | None:
    """File descriptor of stdout (1) or stderr (2) if it is the file that `state` describes, else None."""
    for number in (2,) if stdout_is_closed() else (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(number), state):
                return number
    return None


def _write_in_place(path: str, data: bytes) -> None:
    """Overwrites an existing file, FIFO or device with bytes.

    Not by `open`: O_CREAT is refused for others' FIFOs in /tmp.
    """
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_TRUNC), "wb") as file:
        file.write(data)

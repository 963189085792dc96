"""Standard streams, input texts, and outputs: `-` or a path, checked before any computation."""

import contextlib
import dataclasses
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxkv._errors import require
from jaxkv._plotting import import_matplotlib

# More text than any model has positions for; also stops reading from /dev/zero.
MOST_BYTES = 64 * 2**20


class Unwritten(Exception):
    """Raised when a write to stdout fails; `gone` is True if its reader has ended, as `head` does: not an error."""

    def __init__(self, error: OSError):
        super().__init__(f"stdout: {error.strerror or error}")
        self.gone = isinstance(error, BrokenPipeError)


def prepare_streams() -> None:
    """Open closed standard streams on the null device; let stdout escape characters that its encoding lacks."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+", encoding="utf-8"))
    out: Any = sys.stdout
    if getattr(out, "errors", "") in ("strict", "surrogateescape"):
        out.reconfigure(errors="backslashreplace")


def to_stdout(text: str, *, end: str = "\n") -> None:
    """Write text to stdout and flush; raise `Unwritten` if that fails, and discard all later output."""
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        _silence(sys.stdout)
        raise Unwritten(error) from None


def to_stderr(text: str) -> None:
    """Write a line of text to stderr; ignore errors."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr)


def _silence(stream: Any) -> None:
    """Redirect a stream to the null device: a failing flush at exit would end Python with code 120."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


@contextlib.contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Context manager that prints each warning to stderr as one line."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        to_stderr(f"jaxkv: warning: {' '.join(str(message).split())}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def read_text(name: str, flag: str) -> str:
    """Read a UTF-8 file, or stdin for "-", without byte order mark, with newlines as line ends; at most 64 MiB.

    `flag` is the option that names the file, for errors. Raises ValueError for invalid texts, OSError for files.
    """
    if name == "-" and sys.stdin.isatty():
        to_stderr(
            "jaxkv: reading the text from the terminal; end it with Ctrl-D on a line of its own"
        )
    try:
        with contextlib.ExitStack() as stack:
            file: Any = sys.stdin.buffer
            if name != "-":
                file = stack.enter_context(open(os.path.expanduser(name), "rb"))
            data = file.read(MOST_BYTES + 1)
        most = f"more than {MOST_BYTES >> 20} MiB: use a shorter text"
        require(len(data) <= MOST_BYTES, flag, name, most)
        text = data.decode("utf-8-sig")
    except OSError as error:
        said = error.strerror or error
        raise OSError(f"{flag}={name}: {said}: use a readable text file") from None
    except UnicodeDecodeError as error:
        said = f"{error.reason} at byte {error.start}"
        raise ValueError(f"{flag}={name}: not UTF-8 text ({said})") from None
    require(bool(text.strip()), flag, name, "the text is empty: use another one")
    return text.replace("\r\n", "\n").replace("\r", "\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """Output of a command: stdout for `-`, or a path; call `check` before the work, `write` once afterwards.

    A missing path or a regular file is written to a temporary file and renamed; links are followed. A device or a FIFO
    is written to directly.
    """

    flag: str
    name: str

    def check(self, inputs: Iterable[str] = ()) -> None:
        """Raise ValueError if the output cannot be written or is one of the files `inputs`."""
        if self.name == "-":
            return
        path = Path(os.path.expanduser(self.name))
        # A regular file is replaced in its folder; a folder itself is not a valid output.
        folder = path.resolve().parent
        place = path if path.exists() and not path.is_file() else folder
        fits = os.access(place, os.W_OK) and folder.is_dir() and not path.is_dir()
        fits = fits and (place is path or not path.exists() or os.access(path, os.W_OK))
        remedy = "cannot be written: use a writable file in an existing folder"
        require(fits, self.flag, self.name, remedy)
        files = [each for each in map(os.path.expanduser, inputs) if os.path.isfile(each)]
        read = path.exists() and any(path.samefile(each) for each in files)
        require(not read, self.flag, self.name, "it is an input file: use another one")

    def write(self, data: bytes) -> None:
        """Write `data`; an OSError names the option."""
        # Imported here, because `jaxkv --help` needs no numpy.
        from jaxkv.checkpoints.whole_files import write_whole

        path = Path(os.path.expanduser(self.name))
        try:
            if self.name == "-":
                sys.stdout.buffer.write(data)
                sys.stdout.flush()
            elif path.exists() and not path.is_file():
                # Not with `open`: O_CREAT is rejected for FIFOs of other users in /tmp.
                with os.fdopen(os.open(path, os.O_WRONLY), "wb") as file:
                    file.write(data)
            else:
                write_whole(path.resolve(), data)
        except OSError as error:
            # A plain OSError, so that a FIFO's BrokenPipeError is not mistaken for that of stdout.
            raise OSError(f"{self.flag}={self.name}: {error.strerror or error}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture(Output):
    """Output of a picture in the format of its suffix; PNG on stdout."""

    @property
    def kind(self) -> str:
        """Format of the picture: png, svg or pdf; ValueError for another suffix."""
        kind = "png" if self.name == "-" else Path(self.name).suffix[1:].lower()
        remedy = "unknown suffix: use a file that ends in .png, .svg or .pdf"
        require(kind in ("png", "svg", "pdf"), self.flag, self.name, remedy)
        return kind

    def check(self, inputs: Iterable[str] = ()) -> None:
        """Raise ValueError as `Output` does, and for an unknown format; ImportError without matplotlib."""
        _ = self.kind  # raises
        super().check(inputs)
        import_matplotlib()

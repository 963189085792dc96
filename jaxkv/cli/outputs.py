"""Standard streams, input texts, and outputs: `-` or a path, checked before any computation."""

import contextlib
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv._plotting import import_matplotlib

# More text than any model has positions for; also stops reading from /dev/zero.
MOST_BYTES = 64 * 2**20


class StdoutWriteError(Exception):
    """Error of a write to stdout that failed; `gone` is True if the reader has closed the pipe, as `head` does."""

    def __init__(self, error: OSError):
        super().__init__(f"stdout: {error.strerror or error}")
        self.gone = isinstance(error, BrokenPipeError)


def prepare_standard_streams() -> None:
    """Open missing standard streams on the null device; let stdout escape characters that its encoding lacks."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+", encoding="utf-8"))
    out: Any = sys.stdout
    if getattr(out, "errors", "") in ("strict", "surrogateescape"):
        out.reconfigure(errors="backslashreplace")


def write_to_stdout(text: str, *, end: str = "\n") -> None:
    """Write text to stdout and flush; after a failure, raise `StdoutWriteError` and discard all later output."""
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        _redirect_to_null(sys.stdout)
        raise StdoutWriteError(error) from None


def write_to_stderr(text: str) -> None:
    """Write a line of text to stderr and flush; after a failure, discard it and all later output silently."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _redirect_to_null(sys.stderr)


def _redirect_to_null(stream: Any) -> None:
    """Redirect a failing stream to the null device, so that Python's flush at exit does not end with code 120."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


@contextlib.contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Context manager that prints each Python warning to stderr as one line, without file and source line."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        write_to_stderr(f"jaxkv: warning: {' '.join(str(message).split())}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def read_text(name: str, flag: str) -> str:
    """Read a UTF-8 text file, or stdin for "-", of at most 64 MiB; without byte order mark, line ends as newlines.

    `flag` is the option that names the file, for errors. Raises ValueError for invalid texts, OSError for files.
    """
    if name == "-" and sys.stdin.isatty():
        write_to_stderr(
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


@frozen_dataclass
class OutputTarget:
    """Target of a command's output, stdout or a path; call `require_writable` first, `write_bytes` once after the work.

    A missing path or a regular file is written to a temporary file and renamed; links are followed. A device or a FIFO
    is written to directly.
    """

    flag: str
    name: str

    def require_writable(self, inputs: Iterable[str] = ()) -> None:
        """Raise ValueError if the output cannot be written, or is one of the files `inputs`; never for stdout."""
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

    def write_bytes(self, data: bytes) -> None:
        """Write bytes to stdout, a device, a FIFO, or atomically to a file; an OSError names the option."""
        # Imported here, because `jaxkv --help` needs no numpy.
        from jaxkv.checkpoints.whole_files import write_file_atomically

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
                write_file_atomically(path.resolve(), data)
        except OSError as error:
            # A plain OSError, so that a FIFO's BrokenPipeError is not mistaken for that of stdout.
            raise OSError(f"{self.flag}={self.name}: {error.strerror or error}") from error


@frozen_dataclass
class PictureOutputTarget(OutputTarget):
    """Target of a picture: a .png, .svg or .pdf file in the format of its suffix, or PNG on stdout."""

    @property
    def image_format(self) -> str:
        """Format of the picture from the file's suffix: png, svg or pdf, png on stdout; ValueError for others."""
        kind = "png" if self.name == "-" else Path(self.name).suffix[1:].lower()
        remedy = "unknown suffix: use a file that ends in .png, .svg or .pdf"
        require(kind in ("png", "svg", "pdf"), self.flag, self.name, remedy)
        return kind

    def require_writable(self, inputs: Iterable[str] = ()) -> None:
        """Raise ValueError for an unwritable or input file, or an unknown suffix; ImportError without matplotlib."""
        _ = self.image_format  # raises
        super().require_writable(inputs)
        import_matplotlib()

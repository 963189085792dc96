"""The folder of an evaluation: who may write into it, and how nothing is ever half-written there."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from jaxkv._errors import require
from jaxkv.checkpoints.whole_files import settle
from jaxkv.evals.records import RUN, SAMPLES, Record, read_record

try:
    import fcntl
except ImportError:  # Windows: nobody is kept out there
    fcntl = None  # type: ignore[assignment]

_LOCK = ".lock"


def require_folder(out: str | os.PathLike[str], name: str = "out") -> Path:
    """The folder of an evaluation, refused where it cannot be one. Nothing is made.

    Args:
        out: what was given.
        name: the argument's.

    Returns:
        The folder, which need not be there.

    Raises:
        ValueError: naming the remedy.
        TypeError: for what is no path.
    """
    if not isinstance(out, (str, os.PathLike)):
        raise TypeError(f"{name}={out!r}: give a folder")
    require("\0" not in str(out), name, str(out), "give a folder: no name has this character")
    path = Path(out).expanduser()
    require(bool(str(out).strip()), name, str(out), "give a folder")
    try:
        inside = {each.name for each in path.iterdir() if not each.name.startswith(".")} if path.exists() else set()
        above = next(each for each in (path, *path.absolute().parents) if each.exists())
    except NotADirectoryError:
        require(False, name, str(out), "it is a file, or lies in one: give a folder")
    except OSError as error:
        require(False, name, str(out), f"{error.strerror or error}: give another folder")
    require(above.is_dir(), name, str(out), f"{above} is a file: give a folder")
    require(os.access(above, os.W_OK | os.X_OK), name, str(out), f"{above} cannot be written to: give another folder")
    require(
        not inside or RUN in inside, name, str(out), "it holds something else than an evaluation: give a new folder"
    )
    for each in (path / RUN, path / SAMPLES):
        # To read a pipe is to wait for ever.
        require(not each.exists() or each.is_file(), name, str(out), f"{each.name} there is no file: give a new folder")
    return path


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes the folder, and keeps other processes out of it until the block ends, however it ends.

    Args:
        folder: of an evaluation.

    Raises:
        ValueError: while another process is at it.
        OSError: where nothing can be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        number = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise OSError(f"out={folder}: {error.strerror or error}; give another folder") from error
    try:
        if fcntl is not None:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                remedy = "another process is at it: wait for its end, or give another folder"
                raise ValueError(f"out={str(folder)!r}: {remedy}") from None
            except OSError as error:
                what = f"{error.strerror or error}: the file system keeps no locks, and two runs would mix their lines"
                raise OSError(f"out={str(folder)!r}: {what}; give a folder on another one") from error
        for left in folder.glob(f".*.{'[0-9a-f]' * 16}.tmp"):  # of a process that was killed while it wrote one
            left.unlink(missing_ok=True)
        yield
    finally:
        os.close(number)


def read_lines(folder: Path) -> list[bytes]:
    """The whole lines of a folder.

    Args:
        folder: of an evaluation.

    Returns:
        Each with the newline at its end; one that was cut is left out.
    """
    try:
        whole, end, _ = (folder / SAMPLES).read_bytes().rpartition(b"\n")
    except FileNotFoundError:
        return []
    return [line + b"\n" for line in whole.split(b"\n")] if end else []


class Lines:
    """`samples.jsonl`, open for more; only while the folder is `locked`.

    Attributes:
        records: the whole lines, in their order.
    """

    def __init__(self, folder: Path):
        self._path = folder / SAMPLES
        whole = read_lines(folder)
        self.records = [read_record(line, f"{self._path}:{at}") for at, line in enumerate(whole, start=1)]
        self._ends = [0, *np.cumsum([len(line) for line in whole], dtype=np.int64).tolist()]
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
        self._number = os.open(self._path, flags, 0o666)
        settle(folder)

    def keep(self, count: int) -> None:
        """Drops lines, and what was cut behind them.

        Args:
            count: that stay.
        """
        del self.records[count:], self._ends[count + 1 :]
        os.ftruncate(self._number, self._ends[-1])

    def add(self, records: Sequence[Record]) -> None:
        """Writes lines through to the disk: all or none.

        Args:
            records: of one batch.

        Raises:
            OSError: where the disk takes no more.
        """
        made = [record.line() for record in records]
        os.lseek(self._number, self._ends[-1], os.SEEK_SET)
        try:
            rest = memoryview(b"".join(made))
            while rest:
                rest = rest[os.write(self._number, rest) :]
            os.fsync(self._number)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._number, self._ends[-1])
            if not isinstance(error, OSError):
                raise
            there = f"{len(self.records)} lines are whole: make room, and the same command goes on from there"
            raise OSError(f"{self._path}: {error.strerror or error}; {there}") from error
        self.records += records
        self._ends += (self._ends[-1] + np.cumsum([len(line) for line in made], dtype=np.int64)).tolist()

    def __enter__(self) -> "Lines":
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Closes the file."""
        os.close(self._number)

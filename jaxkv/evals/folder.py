"""The folder of an evaluation: its lock, which keeps other processes out, and appending to its `samples.jsonl`."""

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxkv._errors import require
from jaxkv.checkpoints.whole_files import sync_folder
from jaxkv.evals.records import RUN, SAMPLES, Record, read_record, whole_lines


def require_folder(out: str | os.PathLike[str], name: str = "out") -> Path:
    """Returns `out` as a Path; ValueError for files, unwritable places, folders with other contents; writes nothing."""
    if not isinstance(out, (str, os.PathLike)):
        raise TypeError(f"{name}={out!r}: give a folder")
    require("\0" not in str(out), name, str(out), "give a folder: no name has this character")
    require(bool(str(out).strip()), name, str(out), "give a folder")
    path = Path(os.path.expanduser(out))
    try:
        inside = (
            {each.name for each in path.iterdir() if not each.name.startswith(".")}
            if path.exists()
            else set()
        )
        above = next(each for each in (path, *path.absolute().parents) if each.exists())
    except NotADirectoryError:
        require(False, name, str(out), "it is a file, or lies in one: give a folder")
    except OSError as error:
        require(False, name, str(out), f"{error.strerror or error}: give another folder")
    require(above.is_dir(), name, str(out), f"{above} is a file: give a folder")
    require(
        os.access(above, os.W_OK | os.X_OK),
        name,
        str(out),
        f"{above} cannot be written to: give another folder",
    )
    other = "it holds something else than an evaluation: give a new folder"
    require(not inside or RUN in inside, name, str(out), other)
    for each in (path / RUN, path / SAMPLES):
        # Reading a pipe would block.
        require(
            not each.exists() or each.is_file(),
            name,
            str(out),
            f"{each.name} there is no file: give a new folder",
        )
    return path


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context manager: makes the folder, locks it, removes leftover temporary files; ValueError if it is locked."""
    import filelock  # 50 ms

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"out={folder}: {error.strerror or error}; give another folder") from error
    lock = filelock.FileLock(folder / ".lock")
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        remedy = "another process is at it: wait for its end, or give another folder"
        raise ValueError(f"out={str(folder)!r}: {remedy}") from None
    except (OSError, NotImplementedError) as error:
        reason = f"{getattr(error, 'strerror', None) or error}: it cannot be locked, and two runs would mix their lines"
        raise OSError(
            f"out={str(folder)!r}: {reason}; give another folder, perhaps on another file system"
        ) from error
    try:
        for left in folder.glob(
            f".*.{'[0-9a-f]' * 16}.tmp"
        ):  # of a process that was killed while it wrote one
            left.unlink(missing_ok=True)
        yield
    finally:
        lock.release()


class Lines:
    """Reads, appends to and truncates `samples.jsonl` of a locked folder, whose records are its complete lines."""

    def __init__(self, folder: Path):
        self._path = folder / SAMPLES
        whole = whole_lines(folder)
        self.records = [
            read_record(line, f"{self._path}:{at}") for at, line in enumerate(whole, start=1)
        ]
        self._ends = [0, *itertools.accumulate(map(len, whole))]

    def keep(self, count: int) -> None:
        """Truncates the file and `records` to the first `count` lines; creates the file if it is missing."""
        del self.records[count:], self._ends[count + 1 :]
        with open(self._path, "ab") as file:
            file.truncate(self._ends[-1])
        sync_folder(self._path.parent)

    def add(self, records: Sequence[Record]) -> None:
        """Appends the records of one batch as lines and syncs them to disk; on an error, truncates to the old end."""
        lines, end, file = [record.line() for record in records], self._ends[-1], None
        try:
            file = os.open(self._path, os.O_WRONLY | getattr(os, "O_BINARY", 0))
            os.lseek(file, end, os.SEEK_SET)
            rest = memoryview(b"".join(lines))
            while rest:
                rest = rest[os.write(file, rest) :]
            os.fsync(file)
        except BaseException as error:
            if file is not None:
                with contextlib.suppress(OSError):
                    os.ftruncate(file, end)
            if not isinstance(error, OSError):
                raise
            there = f"{len(self.records)} lines are whole: make room, and the same command goes on from there"
            raise OSError(f"{self._path}: {error.strerror or error}; {there}") from error
        finally:
            if file is not None:
                os.close(file)
        self.records += records
        self._ends += itertools.islice(itertools.accumulate(map(len, lines), initial=end), 1, None)

"""What an evaluation leaves on disk: `run.json` says what was asked, `samples.jsonl` has a line for every sample.

Lines are in one order, policy by policy and within each sample by sample, and are never changed once they are whole. So
a run that was ended anywhere goes on behind the last whole batch, and ends with the same bytes as one that was not.
"""

import contextlib
import dataclasses
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from jaxkv._errors import require
from jaxkv._values import shortened

try:
    import fcntl
except ImportError:  # Windows: nobody is kept out there
    fcntl = None  # type: ignore[assignment]

RUN, SAMPLES, _LOCK = "run.json", "samples.jsonl", ".lock"
_FORMAT = 1
# The same weights may lie elsewhere on another machine.
_NOT_COMPARED = ("model",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """All that the lines of an evaluation depend on.

    Attributes:
        task: its name.
        settings: its fields, as JSON has them.
        unit: what a score is: "%", of shares in [0, 1], or another.
        higher: whether more is better.
        model: what was loaded.
        fingerprint: of its weights.
        dtype: of weights and cache.
        policies: by row, such as "adakv@128", what the policy is in full.
        budgets: by row, the policy's budget; None keeps everything.
        agnostic: whether contexts were compressed before questions were seen.
        raw: whether the chat template was left out.
        seed: of policies that draw.
        batch: samples that are run together.
        shard: which part of how many this is; None is all of it.
        samples: cases of the whole task.
        digest: of the cases.
        made_with: versions, and the device.
    """

    task: str
    settings: Mapping[str, Any]
    unit: str
    higher: bool
    model: str
    fingerprint: str
    dtype: str
    policies: Mapping[str, str]
    budgets: Mapping[str, int | float | None]
    agnostic: bool
    raw: bool
    seed: int
    batch: int
    shard: tuple[int, int] | None
    samples: int
    digest: str
    made_with: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return json.loads(dumped({"format": _FORMAT, **dataclasses.asdict(self)}))

    def batches(self) -> list[range]:
        """Of this shard: places of samples in the task's list that are run together.

        They are the same in all shards, each of which takes every n-th: a batch's results may depend on who is in it.
        """
        every = [range(at, min(at + self.batch, self.samples)) for at in range(0, self.samples, self.batch)]
        return every if self.shard is None else every[self.shard[0] :: self.shard[1]]

    @property
    def lines(self) -> int:
        """Lines of a finished evaluation."""
        return len(self.policies) * sum(map(len, self.batches()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One line: what became of one sample under one policy.

    Attributes:
        task: its name.
        policy: the row, such as "adakv@128".
        budget: the policy's.
        id: the sample's.
        group: the row of the table that it counts in.
        tags: numbers and names that pictures are drawn over.
        prediction: the text drawn.
        answers: what is right.
        score: as the task gives it.
        tokens: of the prompt; None where the task does not count them.
        rows: kept of it per kv head and layer, averaged; None likewise.
        nbytes: that they weigh on the device; None likewise.
        figures: numbers, and lists of numbers, besides.
    """

    task: str
    policy: str
    budget: int | float | None
    id: str
    group: str
    tags: Mapping[str, Any]
    prediction: str
    answers: Sequence[str]
    score: float
    tokens: int | None = None
    rows: float | None = None
    nbytes: int | None = None
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def line(self) -> bytes:
        """As the file has it."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return (dumped(given) + "\n").encode()


_FIELDS = {field.name for field in dataclasses.fields(Record)}


def dumped(value: Any, **options: Any) -> str:
    """JSON with its letters as they are, numpy's numbers among them.

    Args:
        value: anything that JSON has, and numbers and arrays of numpy.
        **options: of `json.dumps`.

    Returns:
        The text.

    Raises:
        ValueError: for NaN and infinities, which JSON has not.
        TypeError: for anything else.
    """
    options = {"allow_nan": False, "default": _plain, **options}
    text = json.dumps(value, ensure_ascii=False, **options)
    # A lone surrogate has no UTF-8.
    return text if text.isascii() or _encodes(text) else json.dumps(value, **options)


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} {shortened(repr(value))}: give numbers, texts, lists and mappings")


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file, whole or not at all.

    Args:
        path: the file.
        data: what goes into it.

    Raises:
        OSError: where it cannot be written; what was there is as it was.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(part, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(part)
        if isinstance(error, OSError):
            raise OSError(f"{path}: {error.strerror or error}") from error
        raise


def require_folder(out: str | os.PathLike[str], name: str = "out") -> Path:
    """The folder of an evaluation, refused where it cannot be one. Nothing is made.

    Args:
        out: what was given.
        name: the argument's.

    Returns:
        The folder, which need not be there.

    Raises:
        ValueError: naming the remedy.
    """
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
    return path


def read_run(folder: Path) -> Run | None:
    """What a folder's lines are of.

    Args:
        folder: of an evaluation.

    Returns:
        The run; None where none has begun.

    Raises:
        ValueError: for a file that is none of ours.
    """
    path = folder / RUN
    remedy = "no evaluation's file, or one of another version: give another folder"
    try:
        said = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}; {remedy}") from None
    names = {field.name for field in dataclasses.fields(Run)}
    require(isinstance(said, dict) and said.pop("format", None) == _FORMAT, str(path), "format", remedy)
    require(said.keys() == names, str(path), ", ".join(sorted(said.keys() ^ names)), remedy)
    shard = said.pop("shard")
    return Run(**said, shard=None if shard is None else tuple(shard))


def differences(one: Mapping[str, Any], other: Mapping[str, Any], but: Sequence[str] = ()) -> list[str]:
    """What differs between two runs, or parts of them, in words.

    Args:
        one: of `Run.as_dict`.
        other: another one; what either has not is not compared.
        but: names that may differ.

    Returns:
        A piece for each difference: "batch: 8, not 4".
    """
    found = []
    for name in (name for name in one if name in other and name not in (*_NOT_COMPARED, *but)):
        mine, theirs = one[name], other[name]
        if isinstance(mine, dict) and isinstance(theirs, dict):
            if name == "policies" and list(mine) != list(theirs):
                found.append(f"{name}: {', '.join(mine)}, not {', '.join(theirs)}")
                continue
            keys = dict.fromkeys([*mine, *theirs])
            found += [f"{name}.{k}: {_told(mine, k)}, not {_told(theirs, k)}" for k in keys if _differ(mine, theirs, k)]
        elif mine != theirs:
            found.append(f"{name}: {shortened(dumped(mine))}, not {shortened(dumped(theirs))}")
    return found


def _told(of: Mapping[str, Any], key: str) -> str:
    return shortened(dumped(of[key])) if key in of else "nothing"


def _differ(mine: Mapping[str, Any], theirs: Mapping[str, Any], key: str) -> bool:
    return (key in mine) != (key in theirs) or mine.get(key) != theirs.get(key)


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
        for left in folder.glob(".*.tmp"):  # of a process that was killed while it wrote one
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


def read_record(line: bytes, where: str) -> Record:
    """One line's record.

    Args:
        line: of `samples.jsonl`.
        where: it stands, for the error.

    Returns:
        The record.

    Raises:
        ValueError: for a line that none has written.
    """
    try:
        said = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {error}; the file was changed: remove the line and those behind it") from None
    fits = isinstance(said, dict) and said.keys() == _FIELDS
    require(fits, where, shortened(repr(line)), "no line of an evaluation: remove it and those behind it")
    return Record(**said)


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
        data = b"".join(record.line() for record in records)
        os.lseek(self._number, self._ends[-1], os.SEEK_SET)
        try:
            rest = memoryview(data)
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
        for record in records:
            self.records.append(record)
            self._ends.append(self._ends[-1] + len(record.line()))

    def __enter__(self) -> "Lines":
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Closes the file."""
        os.close(self._number)

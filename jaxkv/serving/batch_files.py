"""`Ledger`: which lines of a batch are answered; appends answers to a partial file, and completes it."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxkv._errors import invalid, require
from jaxkv.checkpoints.whole_files import write_whole
from jaxkv.serving.batch_lines import PREFIX, Line, lines_of

# First bytes of a partial file.
_BEGIN = f'{{"id":"{PREFIX}'.encode()


class Ledger:
    """Answers of a batch: those of earlier runs are kept, new ones are appended to a partial file.

    Attributes:
        lines: number of lines with a request or a fault.
        kept: number of lines answered by earlier runs.
        partial: path of the partial file.
    """

    def __init__(self, requests: Path, out: Path, about: str):
        """Read all lines and earlier answers; ValueError if the files contain answers to other requests.

        `about` names what else decides the answers. A line whose answer has not status 200 is answered again.
        """
        self._requests, self._out, self._about = requests, out, about
        self.partial = out.with_name(out.name + ".partial")
        # The first line of each custom_id, and answers by line id.
        self._named, self._answers = dict[str, int](), dict[str, bytes]()
        self._ids = [line.id for line in self._checked()]
        wanted, self._end = set(self._ids), 0
        if out.exists():
            self._find(out, wanted)
        if self.partial.exists():
            self._end = self._find(self.partial, wanted)
        self.lines, self.kept = len(self._ids), len(self._answers)
        self._file: Any = None

    def left(self) -> Iterator[Line]:
        """Yield the unanswered lines; a repeated custom_id is a fault."""
        for line in self._checked():
            if line.id not in self._answers:
                yield line

    def add(self, line: Line, answer: dict[str, Any]) -> None:
        """Append the answer of a line to the partial file."""
        if self._file is None:
            self._file = open(self.partial, "ab")
            self._file.truncate(self._end)
        data = json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        self._file.write(data)
        self._file.flush()
        self._answers[line.id] = data

    def finish(self) -> int:
        """Write the output file in the order of the requests, and remove the partial file.

        Returns:
            Number of lines without status 200.
        """
        self.close()
        answered = sum(each in self._answers for each in self._ids)
        remedy = f"only {answered} of {self.lines} lines are answered: the file was changed: run the command again"
        require(answered == self.lines, "FILE", str(self._requests), remedy)
        whole = [self._answers[each] for each in self._ids]
        write_whole(self._out, b"".join(whole))
        self.partial.unlink(missing_ok=True)
        return sum(_status(json.loads(each)) != 200 for each in whole)

    def close(self) -> None:
        """Close the partial file."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def _checked(self) -> Iterator[Line]:
        """Yield all lines; one that repeats a custom_id gets a fault and an id of its own."""
        for line in lines_of(self._requests, self._about):
            first = line.number
            if line.fault is None and line.custom_id is not None:
                first = self._named.setdefault(line.custom_id, line.number)
            if first == line.number:
                yield line
            else:
                said = f"custom_id={line.custom_id!r}: line {first} has the same: use a unique one"
                yield dataclasses.replace(
                    line,
                    id=f"{line.id}-{line.number}",
                    fault=f"line {line.number}: {said}",
                )

    def _find(self, path: Path, wanted: set[str]) -> int:
        """Collect the answers in a file; return the bytes of its complete lines before the first invalid one."""
        end = total = ours = 0
        with open(path, "rb") as lines:
            for data in lines:
                answer = _answer(data)
                if answer is None:
                    break
                total, same = total + 1, answer["id"] in wanted
                ours += same
                if same and _status(answer) == 200:
                    self._answers[answer["id"]] = data
                end += len(data)
        if path == self._out:
            strange = path.stat().st_size > end
        else:
            strange = not _BEGIN.startswith(_head(path))
        if strange or (total and not ours):
            remedy = "it holds other data than answers to these requests under this model, policy and limits"
            raise invalid("-o", str(path), f"{remedy}: remove it, or use another file")
        return end


def _answer(data: bytes) -> dict[str, Any] | None:
    """Return the output object of a complete line; None for anything else."""
    try:
        found = json.loads(data) if data.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return (
        found
        if isinstance(found, dict) and isinstance(found.get("id"), str) and "response" in found
        else None
    )


def _head(path: Path) -> bytes:
    """Return the first bytes of a file, as many as all partial files share."""
    with open(path, "rb") as file:
        return file.read(len(_BEGIN))


def _status(answer: dict[str, Any]) -> int | None:
    """Return the status of an output object's response; None without a response."""
    response = answer["response"]
    return response.get("status_code") if isinstance(response, dict) else None


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """Context manager that keeps other processes from writing the same output file."""
    import filelock  # 50 ms

    path = out.with_name(out.name + ".lock")
    # A lock is an empty file; a file with contents is the user's, and must not be truncated.
    ours = not os.path.lexists(path) or (path.is_file() and path.stat().st_size == 0)
    require(
        ours,
        "-o",
        str(out),
        f"{path.name} exists and is not a lock of a batch: move it, or use another file",
    )
    lock = filelock.FileLock(path)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise invalid(
            "-o", str(out), "another process writes it: wait for its end, or use another file"
        ) from None
    try:
        yield
    finally:
        lock.release()
        path.unlink(missing_ok=True)

"""`ResumableBatchOutput`: which lines of a batch are answered; appends answers to a partial file, and completes it."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxkv._errors import build_value_error, require
from jaxkv.checkpoints.whole_files import write_file_atomically
from jaxkv.serving.batch_lines import PREFIX, ParsedBatchLine, read_batch_lines

# First bytes of a partial file.
_BEGIN = f'{{"id":"{PREFIX}'.encode()


class ResumableBatchOutput:
    """Output of a batch that a later run resumes: keeps earlier answers, appends new ones to a partial file.

    Attributes:
        lines: number of lines with a request or a fault.
        kept: number of lines answered by earlier runs.
        partial: path of the partial file.
    """

    def __init__(self, requests: Path, out: Path, about: str):
        """Read all request lines, and earlier answers from output and partial file; ValueError if one has other data.

        `about` names what else decides the answers. A line whose answer has not status 200 is answered again.
        """
        self._requests, self._out, self._about = requests, out, about
        self.partial = out.with_name(out.name + ".partial")
        # The first line of each custom_id, and answers by line id.
        self._named, self._answers = dict[str, int](), dict[str, bytes]()
        self._ids = [line.id for line in self._mark_repeated_ids()]
        wanted, self._end = set(self._ids), 0
        if out.exists():
            self._collect_file_answers(out, wanted)
        if self.partial.exists():
            self._end = self._collect_file_answers(self.partial, wanted)
        self.lines, self.kept = len(self._ids), len(self._answers)
        self._file: Any = None

    def iterate_unanswered_lines(self) -> Iterator[ParsedBatchLine]:
        """Yield each `ParsedBatchLine` without an answer; one that repeats a custom_id is marked as invalid."""
        for line in self._mark_repeated_ids():
            if line.id not in self._answers:
                yield line

    def append_answer(self, line: ParsedBatchLine, answer: dict[str, Any]) -> None:
        """Append a line's answer as JSON to the partial file; the first call cuts off all after its last valid line."""
        if self._file is None:
            self._file = open(self.partial, "ab")
            self._file.truncate(self._end)
        data = json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        self._file.write(data)
        self._file.flush()
        self._answers[line.id] = data

    def write_output_file(self) -> int:
        """Write answers in request order, remove the partial file; return how many failed; ValueError if incomplete.

        Returns:
            Number of lines without status 200.
        """
        self.close_partial_file()
        answered = sum(each in self._answers for each in self._ids)
        remedy = f"only {answered} of {self.lines} lines are answered: the file was changed: run the command again"
        require(answered == self.lines, "FILE", str(self._requests), remedy)
        whole = [self._answers[each] for each in self._ids]
        write_file_atomically(self._out, b"".join(whole))
        self.partial.unlink(missing_ok=True)
        return sum(_get_status_code(json.loads(each)) != 200 for each in whole)

    def close_partial_file(self) -> None:
        """Sync the partial file to disk and close it; nothing if it is not open."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def _mark_repeated_ids(self) -> Iterator[ParsedBatchLine]:
        """Yield all lines; one that repeats an earlier custom_id gets an error text and its own answer id."""
        for line in read_batch_lines(self._requests, self._about):
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

    def _collect_file_answers(self, path: Path, wanted: set[str]) -> int:
        """Store a file's status-200 answers to `wanted`; return bytes in valid lines; foreign: ValueError."""
        end = total = ours = 0
        with open(path, "rb") as lines:
            for data in lines:
                answer = _parse_answer_line(data)
                if answer is None:
                    break
                total, same = total + 1, answer["id"] in wanted
                ours += same
                if same and _get_status_code(answer) == 200:
                    self._answers[answer["id"]] = data
                end += len(data)
        if path == self._out:
            strange = path.stat().st_size > end
        else:
            strange = not _BEGIN.startswith(_read_first_bytes(path))
        if strange or (total and not ours):
            remedy = "it holds other data than answers to these requests under this model, policy and limits"
            raise build_value_error("-o", str(path), f"{remedy}: remove it, or use another file")
        return end


def _parse_answer_line(data: bytes) -> dict[str, Any] | None:
    """Return the output object in a complete line of an answer file; None for anything else."""
    try:
        found = json.loads(data) if data.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return (
        found
        if isinstance(found, dict) and isinstance(found.get("id"), str) and "response" in found
        else None
    )


def _read_first_bytes(path: Path) -> bytes:
    """Return a file's first bytes, as many as the text with which every partial file begins."""
    with open(path, "rb") as file:
        return file.read(len(_BEGIN))


def _get_status_code(answer: dict[str, Any]) -> int | None:
    """Return the HTTP status in an output object; None if it has an error instead of a response."""
    response = answer["response"]
    return response.get("status_code") if isinstance(response, dict) else None


@contextlib.contextmanager
def lock_output_file(out: Path) -> Iterator[None]:
    """Context manager that locks an output file; ValueError if it is locked, or the lock's path is a user's file."""
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
        raise build_value_error(
            "-o", str(out), "another process writes it: wait for its end, or use another file"
        ) from None
    try:
        yield
    finally:
        lock.release()
        path.unlink(missing_ok=True)

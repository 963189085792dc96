"""Rows of figures in a file that a killed run cannot spoil: one line each, appended as it is measured.

A row stands under a key: its part, its case, and what it depends on (device, versions, a hash of the sources). Those
that stand are not measured again. Nothing here imports JAX: who keeps the rows must not hold the device.
"""

import datetime
import fcntl
import hashlib
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIELDS = {"part", "case", "device", "versions", "sources", "date", "took"}


class RowsError(ValueError):
    """A file of rows that cannot be used, with what to do about it."""


def slug(device):
    """A device's name as file names have it."""
    return device.lower().replace(" ", "-")


def sources(patterns, root=ROOT):
    """A short hash of the sources that figures depend on: a commit would change with every word of a README."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in patterns for path in root.glob(pattern)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def key(row):
    """What a row stands under."""
    return json.dumps(
        [row[field] for field in ("part", "case", "device", "versions", "sources")],
        sort_keys=True,
    )


class Rows:
    """A file of rows, open for one run at a time.

    Attributes:
        path: the file, a JSON object a line.
        all: the rows in it, in its order.
    """

    def __init__(self, path, device):
        """Opens or makes the file; a last line that was only half written is dropped.

        Args:
            path: of the file.
            device: the device whose rows it holds.

        Raises:
            RowsError: if it cannot be written, is in use, holds another device's rows, or a line that is no row.
        """
        self.path, self.device, self.all = Path(path), device, []
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise RowsError(
                f"{self.path}: cannot be written ({error.strerror}): give another --out"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            raise RowsError(
                f"{self.path}: another run writes it: wait for it, or give another --out"
            ) from error
        try:
            self._read()
        except BaseException:
            os.close(self._file)
            raise
        _sync(self.path.parent)  # or a file just made may be gone after a power cut
        self._standing = {key(row): row for row in self.all}

    def _read(self):
        whole = self.path.read_bytes()
        end = whole.rfind(b"\n") + 1
        if end < len(whole):
            print(
                f"{self.path}: dropped {len(whole) - end} bytes of a row that was only half written",
                file=sys.stderr,
            )
            os.ftruncate(self._file, end)
        for number, line in enumerate(whole[:end].split(b"\n")[:-1], 1):
            try:
                row = json.loads(line)
                good = (
                    isinstance(row, dict)
                    and row.keys() >= FIELDS
                    and ("figures" in row) != ("failed" in row)
                )
            except ValueError:
                good = False
            if not good:
                raise RowsError(
                    f"{self.path}: line {number} is no row: remove that line, or give another --out"
                )
            if row["device"] != self.device:
                raise RowsError(
                    f"{self.path}: line {number} is of {row['device']}, this is {self.device}: give another --out"
                )
            self.all.append(row)

    def standing(self, row, *, retry=False):
        """The row that stands under the same key, or None; failures do not stand if they are to be tried again."""
        found = self._standing.get(key(row))
        return None if found is None or (retry and "failed" in found) else found

    def append(self, row):
        """Adds a row: when this returns, it is on the disk.

        Raises:
            RowsError: if it cannot be written whole; the next run drops what there is of it.
        """
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        try:
            # One call on a file opened for appending: a kill leaves all of it, or a last line without its end.
            if os.write(self._file, line) != len(line):
                raise RowsError(
                    f"{self.path}: the disk is full: make room, and run the same command again"
                )
            os.fsync(self._file)
        except OSError as error:
            raise RowsError(
                f"{self.path}: cannot be written ({error.strerror}): give another --out"
            ) from error
        self.all.append(row)
        self._standing[key(row)] = row

    def close(self):
        """Lets other runs have the file."""
        os.close(self._file)


def load(path):
    """The rows of a file, for those who only reads; a half-written last line is left out."""
    try:
        whole = Path(path).read_bytes()
    except OSError as error:
        raise RowsError(
            f"{path}: cannot be read ({error.strerror}): name a file of rows"
        ) from error
    rows = []
    for number, line in enumerate(whole.split(b"\n")[:-1], 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise RowsError(f"{path}: line {number} is no row: remove that line") from error
    return rows


def now():
    """The time, for a row."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _sync(folder):
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

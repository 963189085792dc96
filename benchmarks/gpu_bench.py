"""Measures rows in processes of their own: one that crashes, hangs or runs out of memory costs its own row.

This process keeps the rows and the clock and never touches the device, and one worker is ended before the next begins.
Workers are asked with a JSON object a line and
answer with one: `{"figures": ...}` or `{"failed": ...}`, after a first line that says where they run.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks import gpu_rows

# Starting Python, JAX and the device; and letting go of it.
START_SECONDS, END_SECONDS = 120, 20


class OutOfTime(Exception):
    """The time that a command was given is over; what is left is measured by the same command again."""


class Worker:
    """A process that measures.

    Attributes:
        where: what it said of its device and versions.
    """

    def __init__(self, command, environment):
        """Starts it, and waits until it knows its device.

        Raises:
            RuntimeError: if it does not come up.
        """
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            command,
            cwd=gpu_rows.ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        self._rest = b""
        answer = self._answer(START_SECONDS)
        if "device" not in answer:
            self.kill()
            raise RuntimeError(f"no process that measures could be started: {answer['failed']}")
        self.where = answer

    def ask(self, request, seconds):
        """Sends a request and returns the answer; one that does not come in time ends the process.

        Returns:
            The answer, and whether the process can be asked again.
        """
        try:
            self._process.stdin.write((json.dumps(request) + "\n").encode())
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended, and the answer says how
        answer = self._answer(seconds)
        return answer, self._process.poll() is None

    def _answer(self, seconds):
        until = time.monotonic() + seconds
        out = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            left = until - time.monotonic()
            if left <= 0 or not select.select([out], [], [], left)[0]:
                self.kill()
                return {"failed": f"not done in {seconds:.0f} s"}
            part = os.read(out, 1 << 16)
            if not part:
                code = self._process.wait()
                said = self._said()
                self.kill()
                return {"failed": f"the process ended with {_named(code)}: {said}"}
            self._rest += part
        line, self._rest = self._rest.split(b"\n", 1)
        return json.loads(line)

    def _said(self):
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return " | ".join(lines[-3:])[:600]

    def end(self):
        """Lets it end by itself, or kills it if it does not."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self.kill()

    def kill(self):
        """Kills it, with whatever it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(OSError):
                file.close()


class Bench:
    """Rows, and the processes that measure what is missing of them.

    Attributes:
        device: the device's name.
        where: what a worker says of it.
        rows: the file.
    """

    def __init__(self, out, command, *, minutes, quick=False, retry=False, environment=None):
        """Asks a worker for the device and opens its file.

        Args:
            out: folder of the file.
            command: what starts a worker.
            minutes: after which no row is begun, and the row in hand is ended.
            quick: keep a file of its own, for figures that mean nothing.
            retry: measure again what has failed.
            environment: of the workers, beside this process'.

        Raises:
            RowsError: if the file cannot be used.
            RuntimeError: if no worker comes up.
        """
        self._until = time.monotonic() + 60 * minutes
        self._command, self._retry = command, retry
        self._environment = os.environ | (environment or {})
        self._worker = None
        self.device = None
        self.where = self._started().where
        self.device = self.where["device"]
        try:
            self.rows = gpu_rows.Rows(
                Path(out) / f"{gpu_rows.slug(self.device)}{'-quick' * quick}.jsonl", self.device
            )
        except BaseException:
            self._end()
            raise
        self.failed = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._end()
        self.rows.close()

    @property
    def seconds_left(self):
        """Seconds of this command."""
        return self._until - time.monotonic()

    def measure(self, part, case, *, limit, sources, alone=False):
        """The row of a case: the one that stands, or a new one.

        Args:
            part: its name.
            case: what is measured, as JSON has it.
            limit: seconds it may take.
            sources: hash of what it depends on.
            alone: give it a process that has measured nothing else.

        Returns:
            The row.

        Raises:
            OutOfTime: if there is no time left to begin it, or it was ended because of that.
        """
        row = self._row(part, case, sources)
        found = self.rows.standing(row, retry=self._retry)
        if found is not None:
            return found
        if self.seconds_left <= 0:
            raise OutOfTime(f"{part} {named(case)}")
        if alone:
            self._end()
        begin, left = time.monotonic(), self.seconds_left
        answer, alive = self._started().ask({"part": part, "case": case}, min(limit, left))
        if alone or not alive:
            self._end()
        if not alive and left < limit and self.seconds_left <= 0:
            raise OutOfTime(f"{part} {named(case)}")
        row |= {"date": gpu_rows.now(), "took": round(time.monotonic() - begin, 3)} | answer
        self.rows.append(row)
        what = f"FAILED: {row['failed']}" if "failed" in row else _brief(row["figures"])
        print(f"[{row['took']:6.1f} s] {part} {named(case)}: {what}", flush=True)
        if "failed" in row:
            self.failed.append(row)
        return row

    def note(self, part, figures):
        """Writes down what this process knows by itself, once."""
        row = self._row(part, {}, "")
        if self.rows.standing(row) is None:
            self.rows.append(row | {"date": gpu_rows.now(), "took": 0, "figures": figures})

    def _row(self, part, case, sources):
        return {
            "part": part,
            "case": case,
            "device": self.device,
            "versions": self.where["versions"],
            "sources": sources,
        }

    def _started(self):
        if self._worker is None:
            self._worker = Worker(self._command, self._environment)
            found = self._worker.where["device"]
            # JAX takes the CPU, without a word, where it cannot have the device.
            if self.device not in (None, found):
                self._end()
                raise RuntimeError(
                    f"this was {self.device}, now it is {found}: see whether another process holds it"
                )
        return self._worker

    def _end(self):
        if self._worker is not None:
            self._worker.end()
            self._worker = None


def named(case):
    """A case in a few words."""
    return case["name"] if "name" in case else " ".join(str(value) for value in case.values())


def _named(code):
    return signal.Signals(-code).name if code < 0 else f"code {code}"


def _brief(figures):
    said = {name: value for name, value in figures.items() if isinstance(value, str | int | float)}
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in said.items()
    )

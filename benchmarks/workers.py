"""Processes that measure, each in an environment of its own: who asks them, and how they answer.

They speak JSON, one object a line: requests on standard input, responses on standard output. Nothing here imports JAX:
a peer's environment may not have it.
"""

import contextlib
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path


def status_bytes(field):
    """Returns a size of this process (``VmRSS``, ``VmHWM``) in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None


def reset_peak():
    """Gives freed memory back and lowers the recorded peak to what is resident now. Returns whether that worked."""
    gc.collect()
    # Freed blocks that malloc still holds would count into the next cell's peak.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


class Worker:
    """A process that answers requests; one that died (of memory, say) is started again.

    Attributes:
        ready: what it wrote once it could answer.
    """

    def __init__(self, command, **options):
        """Starts the process, with `subprocess.Popen`'s options, and waits until it can answer."""
        self._command, self._options = command, options
        self._start()

    def _start(self):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self._process = subprocess.Popen(self._command, **pipes, **self._options)
        self.ready = self._read()
        if "error" in self.ready:
            raise SystemExit(f"{self._command}: {self.ready['error']}; its messages are above")

    def _read(self):
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        return {"error": f"the process ended with status {self._process.wait()}"}

    def ask(self, request):
        """Sends a request and returns the response."""
        self._process.stdin.write(json.dumps(request) + "\n")
        response = self._read()
        if self._process.poll() is not None:
            self._start()
        return response

    def stop(self):
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait()


def serve(load):
    """Answers the requests of standard input until it ends.

    Args:
        load: gives what is written once this process can answer, and the function that answers a request.
    """
    # Standard output is for answers; what libraries print there goes to standard error.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    begun = time.perf_counter()
    ready, answer = load()
    ready |= {"load_seconds": time.perf_counter() - begun, "load_peak_rss": status_bytes("VmHWM")}
    print(json.dumps(ready), file=out)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            response = answer(request)
        except Exception as error:  # Whatever it is, the next request is answered.
            traceback.print_exc()
            response = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"id": request.get("id")} | response), file=out)


def measured(request, warm, run):
    """The figures of a cell of `bench_peer`, whose docstring says what they are.

    Args:
        request: what is asked.
        warm: runs whatever must not be timed.
        run: gives seconds of the prefill, seconds of each step, rows kept in each layer, bytes of the cache, tokens.
    """
    begun = time.perf_counter()
    warm()
    warmup, per_cell = time.perf_counter() - begun, reset_peak()
    base = status_bytes("VmRSS")
    runs = [run() for _ in range(request["repeats"])]
    peak = status_bytes("VmHWM")
    prefills, steps = [each[0] for each in runs], [step for each in runs for step in each[1]]
    _, _, kept, cache_bytes, tokens = runs[-1]
    return {
        "policy": request["policy"],
        "warmup_seconds": warmup,
        "prefill_seconds": prefills,
        "prefill_median": statistics.median(prefills),
        "decode_median": statistics.median(steps),
        "decode_mean": statistics.fmean(steps),
        "kept_per_layer": kept,
        "kept_mean": statistics.fmean(kept),
        "cache_bytes": cache_bytes,
        "base_rss": base,
        "peak_rss": peak,
        "peak_is_per_cell": per_cell,
        "tokens": tokens,
    }

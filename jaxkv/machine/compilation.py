"""JAX's compile cache on disk, and clocks that count compilation separately from wall-clock seconds."""

import dataclasses
import hashlib
import logging
import os
import platform
import threading
import time
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.checkpoints import cache_dir

_LOG = logging.getLogger("jaxkv")
# Seconds of compilation that are worth a message.
_SLOW = 10.0
_told = False


def enable_compilation_cache(path: str | os.PathLike[str] | None = None) -> Path:
    """Enable JAX's disk cache for all programs of the process, in `path` or jaxkv's cache folder; return the folder.

    Every JAX program that the process compiles after the call is stored. The command line calls this; library users may
    call it.

    Args:
        path: the folder; by default one for this type of processor in jaxkv's cache folder.

    Returns:
        The folder, as an absolute path.

    Raises:
        ValueError: for the path of a file, or an empty one.
        TypeError: for anything but a path.
    """
    if not (path is None or isinstance(path, (str, os.PathLike))):
        raise TypeError(f"path={path!r}: not a path: use a folder")
    require(path is None or bool(str(path).strip()), "path", path, "empty: use a folder")
    # JAX opens the folder for each program, possibly after a change of the working folder.
    folder = (
        cache_dir() / "compiled" / _identify_processor()
        if path is None
        else Path(os.path.expanduser(path))
    ).absolute()
    require(
        not folder.exists() or folder.is_dir(), "path", str(folder), "it is a file: use a folder"
    )
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Prefill and decode are dozens of small programs, most of which JAX's defaults would leave out.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # JAX decides at the first compilation whether there is a cache; this makes it decide again.
    compilation_cache.reset_cache()
    return folder


def log_slow_compilation(seconds: float) -> None:
    """Log a warning, once per process, if a call compiled for over 10 s and no compile cache on disk is enabled."""
    global _told
    kept = jax.config.values["jax_compilation_cache_dir"] is not None
    if _told or seconds <= _SLOW or kept:
        return
    _told = True
    remedy = "call enable_compilation_cache() of jaxkv.machine.compilation first to keep programs on disk"
    _LOG.warning("compiling took %.0f s of this call: %s", seconds, remedy)


def _identify_processor() -> str:
    """Return a folder name for this type of processor: its architecture and a hash of its features."""
    flags = platform.processor()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            flags = next((line for line in lines if line.startswith(("flags", "Features"))), flags)
    except OSError:
        pass  # not Linux: only architecture and name
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


# JAX's events of compilation; tracing and lowering may be nested.
_BACKEND = "/jax/core/compile/backend_compile_duration"
_EVENTS = (
    _BACKEND,
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
)


class StageClock:
    """Context manager that sums wall-clock seconds, and this thread's compile seconds (waits included) and programs.

    A device runs while the host compiles, so the difference of the two is not a meaningful time.

    Attributes:
        seconds: wall-clock seconds inside, including compilation.
        compile_seconds: seconds of tracing, lowering and compiling, or of reading programs from a cache on disk.
        programs: number of programs compiled or read.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.compile_seconds = 0.0
        self.programs = 0
        self._started = 0.0
        self._spans: list[tuple[float, float]] = []

    def __enter__(self) -> "StageClock":
        """Start the clock, which then also counts this thread's compile events; return it."""
        self._started = time.perf_counter()
        _RUNNING.clocks.append(self)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Stop the clock; add its wall-clock and compile seconds to its totals."""
        _RUNNING.clocks.remove(self)
        self.seconds += time.perf_counter() - self._started
        self.compile_seconds += sum(end - begin for begin, end in self._spans)
        self._spans = []

    def add_compile_event(self, event: str, duration: float) -> None:
        """Add to the clock a compile event (last `duration` seconds), nested time once, and its program."""
        end = time.perf_counter()
        begin = end - duration
        self.programs += event == _BACKEND
        # Events nested inside this one were recorded before it.
        while self._spans and self._spans[-1][0] >= begin:
            self._spans.pop()
        inside = self._spans[-1][1] if self._spans else self._started
        self._spans.append((max(begin, inside), end))

    def add_waiting(self, seconds: float, programs: int) -> None:
        """Add to the clock a wait of `seconds` for a compiling thread, as compile time, and its `programs`."""
        end = time.perf_counter()
        self._spans.append((end - seconds, end))
        self.programs += programs


@frozen_dataclass
class StageClocks:
    """Two clocks of a call's stages, prefill and decode, with sums of compile seconds and programs over both.

    Attributes:
        prefill: up to the first logits, including planning and compilation.
        decode: from the first logits to the last token.
    """

    prefill: StageClock = dataclasses.field(default_factory=StageClock)
    decode: StageClock = dataclasses.field(default_factory=StageClock)

    @property
    def compile_seconds(self) -> float:
        """Seconds of tracing, lowering, compiling (or reading the cache, or waiting), prefill and decode together."""
        return self.prefill.compile_seconds + self.decode.compile_seconds

    @property
    def program_count(self) -> int:
        """Number of programs that prefill and decode compiled, or read from the compile cache on disk."""
        return self.prefill.programs + self.decode.programs


class _RunningClocks(threading.local):
    """Thread-local list of the running clocks (`clocks`); JAX reports events in the thread that compiles."""

    def __init__(self) -> None:
        self.clocks: list[StageClock] = []


_RUNNING = _RunningClocks()


def _record_compile_event(event: str, duration_secs: float, **kwargs: str | int) -> None:
    """Listener of JAX's events: add a compile event to all running clocks of this thread; ignore other events."""
    if event in _EVENTS:
        for clock in _RUNNING.clocks:
            clock.add_compile_event(event, duration_secs)


jax.monitoring.register_event_duration_secs_listener(_record_compile_event)

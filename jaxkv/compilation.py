"""Compilation: a cache on disk, so that a second process does not compile what a first one did, and what it takes."""

import dataclasses
import hashlib
import os
import platform
import threading
import time
from pathlib import Path
from types import TracebackType

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxkv.checkpoints import cache_dir


def enable_compilation_cache(path: str | os.PathLike[str] | None = None) -> Path:
    """Keeps compiled programs on disk for later processes; the CLI and the demo do, a library's user opts in.

    It is a setting of the whole process: every JAX program compiled after the call is kept, jaxkv's or not.

    Args:
        path: the folder; by default one for this kind of processor under jaxkv's cache folder.

    Returns:
        The folder.
    """
    folder = cache_dir() / "compiled" / _processor() if path is None else Path(path).expanduser()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Prefill and decode are dozens of small programs: the defaults, made for single large ones, would leave most out.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # JAX decides at the first compilation whether there is a cache; this makes it look again.
    compilation_cache.reset_cache()
    return folder


def _processor() -> str:
    """Tells processors apart: code compiled for one need not run on another that shares the home folder."""
    flags = platform.processor()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            flags = next((line for line in lines if line.startswith(("flags", "Features"))), flags)
    except OSError:
        pass  # not Linux: the architecture and the name must do
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


# What JAX says of its own work, whoever asks for it; tracing and lowering may lie within one another.
_BACKEND = "/jax/core/compile/backend_compile_duration"
_EVENTS = (_BACKEND, "/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/jaxpr_to_mlir_module_duration")


class Clock:
    """A stop watch that knows how much of its time went into compiling, as JAX reports it.

    It runs while it is entered, as often as one likes; what other threads compile is not its business.

    Attributes:
        seconds: it has run for, compilation included.
        compile_seconds: of these: tracing, lowering and compiling, or reading programs from a cache on disk.
        programs: compiled or read.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.compile_seconds = 0.0
        self.programs = 0
        self._started = 0.0
        self._spans: list[tuple[float, float]] = []

    @property
    def running_seconds(self) -> float:
        """Seconds without those of compilation."""
        return max(0.0, self.seconds - self.compile_seconds)

    def __enter__(self) -> "Clock":
        """Starts to run, or goes on where it was left."""
        self._started = time.perf_counter()
        _RUNNING.clocks.append(self)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stops, and adds what was compiled meanwhile to its sums."""
        _RUNNING.clocks.remove(self)
        self.seconds += time.perf_counter() - self._started
        self.compile_seconds += sum(end - begin for begin, end in self._spans)
        self._spans = []

    def record(self, event: str, duration: float) -> None:
        """Takes in an event of JAX's that ends now.

        Args:
            event: its name.
            duration: in seconds.
        """
        end = time.perf_counter()
        begin = end - duration
        self.programs += event == _BACKEND
        # What an outer event contains has been told before.
        while self._spans and self._spans[-1][0] >= begin:
            self._spans.pop()
        inside = self._spans[-1][1] if self._spans else self._started
        self._spans.append((max(begin, inside), end))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clocks:
    """What a call takes. Compilation is told apart wherever it happens.

    Attributes:
        making: programs made before they are needed, so that no other clock waits for them.
        prefill: from ids to the first logits.
        decode: drawing.
    """

    making: Clock = dataclasses.field(default_factory=Clock)
    prefill: Clock = dataclasses.field(default_factory=Clock)
    decode: Clock = dataclasses.field(default_factory=Clock)

    @property
    def compile_seconds(self) -> float:
        """Seconds of compilation, wherever it happened."""
        return self.making.compile_seconds + self.prefill.compile_seconds + self.decode.compile_seconds

    @property
    def programs(self) -> int:
        """Programs compiled, or read from a cache on disk."""
        return self.making.programs + self.prefill.programs + self.decode.programs


class _Running(threading.local):
    """Clocks that run, thread by thread: JAX reports in the thread that compiles."""

    def __init__(self) -> None:
        self.clocks: list[Clock] = []


_RUNNING = _Running()


def _on_event(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event in _EVENTS:
        for clock in _RUNNING.clocks:
            clock.record(event, duration_secs)


jax.monitoring.register_event_duration_secs_listener(_on_event)

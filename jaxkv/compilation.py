"""A compilation cache on disk, so that a second process does not compile what a first one did."""

import hashlib
import os
import platform
from pathlib import Path

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

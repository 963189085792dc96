"""What all tests share: eight devices on the CPU, strict dtypes, reproducible hypothesis."""

import gc
import os
import pathlib

# Before jax starts its backend: tests of anything sharded need several devices, and the count cannot change later.
_DEVICES = "--xla_force_host_platform_device_count=8"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

# An implicit float32 + bfloat16 or int + float is a bug in a library that promises a dtype.
jax.config.update("jax_numpy_dtype_promotion", "strict")

# One example may compile a program, so no deadline; the same examples on every machine, so that CI does not flicker.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci")


# The kernel gives a process 65,530 memory mappings, and XLA takes a few for every function it compiles.
_MOST_MAPPINGS = 30_000


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Frees compiled programs file by file, sooner where a file compiles thousands: out of mappings XLA crashes."""
    if nextitem is None or nextitem.path != item.path or _mappings() > _MOST_MAPPINGS:
        # Not at the top: jaxtyping must see the package being imported.
        from jaxkv.models.prefill import forget_compiled

        jax.clear_caches()
        forget_compiled()
        gc.collect()


def _mappings() -> int:
    maps = pathlib.Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0

"""What all tests share: eight devices on the CPU, strict dtypes, reproducible hypothesis."""

import gc
import os

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


@pytest.fixture(autouse=True, scope="module")
def _let_go_of_programs():
    """Frees compiled programs file by file: thousands of them in one process exhaust the kernel's memory mappings."""
    yield
    jax.clear_caches()
    gc.collect()

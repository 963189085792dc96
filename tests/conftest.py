"""What all tests share: eight devices on the CPU, a quick compiler, strict dtypes, reproducible hypothesis."""

import gc
import os
import pathlib
import time

import annotations
import compiling
import hypothesis
import jax
import jaxtyping
import pytest

annotations.check("jaxkv")

# They need packages that are not in this environment: `make test-foreign`, `-page`, `-ray`, `-clients`.
collect_ignore = ["foreign", "page", "ray_cluster", "clients"]

# Tests of anything sharded need several devices, and XLA's CPU client three threads for each: with one for each, on a
# busy machine of two cores, all of them wait in one collective and XLA ends the process.
_DEVICES, _THREADS = "--xla_force_host_platform_device_count=8", "24"
# Thousands of small programs, run once or twice, wait mostly for their compiler: XLA's older emitters take half as long
# for the same arithmetic, LLVM half as long again where it does not optimise what runs for a millisecond, and threads
# that compile one program in parts are in each other's way beside other workers. Large programs they slow down.
_QUICK = (
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option to run kernels' tests on a GPU."""
    parser.addoption(
        "--gpu", action="store_true", help="compile the kernels for this machine's GPU to test them"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before jax starts its backend, whose flags cannot change later; `make test` runs SmolLM2 in a run of its own."""
    if config.option.gpu:
        import on_gpu

        on_gpu.compile_kernels()
        return
    small = config.option.markexpr == "not real"
    wanted = (_DEVICES, *(_QUICK if small else ()))
    given = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join([*given, *(flag for flag in wanted if flag not in given)])
    os.environ.setdefault("NPROC", _THREADS)
    if small:
        compiling.install()


# An implicit float32 + bfloat16 or int + float is a bug in a library that promises a dtype.
jax.config.update("jax_numpy_dtype_promotion", "strict")

# One example may compile a program, so no deadline; the same examples on every machine, so that CI does not flicker.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci")


@pytest.fixture(autouse=True)
def warnings_come_once_a_test():
    """What jaxkv warns of once per process comes in each test, whichever ran before."""
    # Here, for jaxkv's own arrays start JAX, whose flags are not set yet above.
    from jaxkv import _checks

    _checks.clear_issued_warnings()


@pytest.fixture(autouse=True)
def annotations_are_checked_in_every_test():
    """In a function's first calls of each."""
    annotations.begin_test()


@pytest.fixture
def as_users_call():
    """Users run without the hook that checks annotations: what they give of the wrong type reaches the library."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


# Collections of all that lives take half a second here, and tracing makes enough objects to ask for many.
_COLLECT = (50_000, 20, 20)


def pytest_collection_finish() -> None:
    """Modules and tests live to the end: no collection looks through them again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT)


# The kernel gives a process 65,530 memory mappings, and XLA takes a few for every function it compiles: some hundreds
# a second. To count them takes a hundredth of a second.
_MOST_MAPPINGS = 30_000
_SECONDS = 2.0
_counted = time.monotonic()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Frees compiled programs file by file, sooner where a file compiles thousands: out of mappings XLA crashes."""
    full = _mappings() > _MOST_MAPPINGS
    if full:
        compiling.forget()
    if full or nextitem is None or nextitem.path != item.path:
        jax.clear_caches()
        gc.collect()


def _mappings() -> int:
    """How many there are, or none if they were counted a moment ago."""
    global _counted
    maps = pathlib.Path("/proc/self/maps")
    if time.monotonic() - _counted < _SECONDS or not maps.exists():
        return 0
    _counted = time.monotonic()
    return maps.read_bytes().count(b"\n")

"""Threads of XLA's CPU client: as many as the environment says, and a warning where a mesh has too few of them."""

import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from running import GOLDEN

import jaxkv
from jaxkv.machine import cpu_threads

ROOT = Path(__file__).parent.parent
PROMPTS = tiny.prompts(3, (20, 13))
# One core, wherever the test runs: on 24 of them eight devices have threads enough.
ONE_CORE = """
import os, sys, time, warnings
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.cpu_count = lambda: 1
"""
LIBRARY = """
import jax
from jaxkv import ModelConfig
from jaxkv.sharding.parameters import make_model_mesh
config = ModelConfig(vocab=64, layers=1, embed=24, hidden=32, heads=8, kv_heads=4, head_dim=8)
def told(*shape):
    mesh = jax.make_mesh(shape, ("data", "model"), devices=jax.devices()[:shape[0] * shape[1]])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        make_model_mesh(mesh, config)
    return [str(each.message) for each in found]
for shape in ((1, 1), (1, 2), (2, 4), (2, 4), (1, 8)):
    print(*told(*shape))
def name(thread):
    try:
        return open(f"/proc/self/task/{thread}/comm").read()
    except OSError:
        return ""  # it ended meanwhile
def threads():
    return sum("XLAEigen" in name(each) for each in os.listdir("/proc/self/task"))
# A thread names itself, as soon as the one core has time for it.
counts = [threads()]
while len(counts) < 20 or counts[-1] != counts[-20]:
    time.sleep(0.05)
    counts.append(threads())
print(counts[-1])
"""
COMMAND = """
from jaxkv import ModelConfig, cli
from jaxkv.cli import exporting
from jaxkv.loading import LanguageModel
from jaxkv.sharding.parameters import make_model_mesh
config = ModelConfig(vocab=64, layers=1, embed=24, hidden=32, heads=8, kv_heads=4, head_dim=8)
def export(params, folder, *, mesh, **_):
    make_model_mesh(mesh, config)
    make_model_mesh(mesh, config)
    raise ValueError("seen")
exporting.ExportCommand.load_model = lambda self, **options: object.__new__(LanguageModel)
exporting.export = export
sys.exit(cli.main(["export", sys.argv[1], "--mesh", "2x4"]))
"""


def run(code, *arguments, **environment):
    """Runs Python on one core with eight CPU devices and without these tests' NPROC; what it wrote."""
    others = {
        name: value for name, value in os.environ.items() if name not in ("NPROC", "PJRT_NPROC")
    }
    command = [sys.executable, "-c", ONE_CORE + code, *map(str, arguments)]
    environment = others | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_few_threads_are_warned_of_once():
    done = run(LIBRARY)
    one, two, first, second, another, threads = done.stdout.split("\n")[:-1]
    assert not (one or two or second or another), (
        "one device needs no more, two have eight, and eight are told once"
    )
    assert first == (
        "mesh: 8 CPU devices share 8 threads, NPROC is not set: on a busy machine they may wait for a thread"
        " for ever, and XLA ends the process; set os.environ['NPROC'] = '24' before JAX starts, or start with"
        " NPROC=24 python"
    )
    assert threads == "8", "as XLA counts them"


def test_three_threads_for_each_device_are_enough():
    done = run(LIBRARY, NPROC="24")
    assert done.stdout == "\n" * 5 + "24\n", done.stderr


@pytest.mark.parametrize("given, warned", [({}, ""), ({"NPROC": "9"}, "NPROC is '9'")])
def test_the_command_line_sets_it_and_tells_of_a_smaller_one_in_one_line(tmp_path, given, warned):
    done = run(COMMAND, tmp_path / "out", XLA_FLAGS="", **given)
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and lines[-1] == "jaxkv: error: seen"
    told = [
        line
        for line in lines
        if line.startswith("jaxkv: warning: mesh: 8 CPU devices share 9 threads")
    ]
    assert lines[:-1] == told and len(told) == bool(warned) and warned in "".join(told)


# As XLA's client was seen to read it: spaces and signs, but no other number than one of 32 bits.
@pytest.mark.parametrize(
    "nproc, other, threads",
    [
        (None, None, 8),
        ("24", None, 24),
        (" +024 ", None, 24),
        ("-24", None, 8),
        ("\u0662\u0664", None, 8),
        ("100000000000", None, 8),
        ("24", "20", 20),
        ("24", "x", 24),
    ],
)
def test_threads_are_counted_as_xla_counts_them(monkeypatch, nproc, other, threads):
    monkeypatch.setattr(cpu_threads, "_count_cores", lambda: 2)
    for name, value in {"NPROC": nproc, "PJRT_NPROC": other}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert cpu_threads.count_client_threads(8) == threads


def test_cores_are_threads_too(monkeypatch):
    monkeypatch.setattr(cpu_threads, "_count_cores", lambda: 64)
    monkeypatch.delenv("NPROC")
    assert (
        cpu_threads.count_client_threads(8),
        cpu_threads.compute_needed_threads(8),
        cpu_threads.compute_needed_threads(32),
    ) == (64, 64, 96)
    cpu_threads.warn_of_few_threads(jax.make_mesh((2, 4), ("data", "model")))


DOORS = {
    "generate": lambda model, cache, mesh: jaxkv.generate(model, PROMPTS, mesh=mesh),
    "prefill": lambda model, cache, mesh: jaxkv.prefill(model, PROMPTS, mesh=mesh),
    "on": lambda model, cache, mesh: model.on(mesh),
    "load": lambda model, cache, mesh: jaxkv.load(GOLDEN / "models" / "llama_gqa8", mesh=mesh),
    "reshard": lambda model, cache, mesh: jaxkv.reshard(cache, mesh),
}


@pytest.mark.parametrize("door", DOORS)
def test_each_door_of_a_mesh_warns_and_is_an_error_each_time_where_warnings_are(door, monkeypatch):
    model = tiny.tiny(tiny.shape(layers=1, kv_heads=4, group=2, dim=8))
    cache = jaxkv.prefill(model, PROMPTS) if door == "reshard" else None
    monkeypatch.setenv("NPROC", "23")
    for _ in range(2):
        with pytest.raises(RuntimeWarning, match="NPROC is '23'.*NPROC=24"):
            DOORS[door](model, cache, jax.make_mesh((2, 4), ("data", "model")))


def test_gpus_need_no_threads_of_the_cpu_client(monkeypatch):
    monkeypatch.setenv("NPROC", "1")
    client = types.SimpleNamespace(process_index=lambda: 0)
    kinds = {"platform": "gpu", "process_index": 0, "device_kind": "H100", "client": client}
    gpus = np.empty(8, object)
    gpus[:] = [type("Gpu", (), kinds | {"id": at})() for at in range(8)]
    cpu_threads.warn_of_few_threads(jax.sharding.Mesh(gpus.reshape(2, 4), ("data", "model")))

"""Benchmarks run from end to end, at tiny shapes, so that they cannot rot."""

import ast
import importlib
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import tiny

ROOT = Path(__file__).parent.parent


@pytest.fixture
def run(tmp_path):
    """Runs a benchmark of a device at tiny shapes."""

    def run(module, *options):
        command = [
            sys.executable,
            "-m",
            f"benchmarks.{module}",
            "--quick",
            "--out",
            str(tmp_path),
            *options,
        ]
        # One device, as a user has it, and the tests' quick compiler.
        flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
        environment = os.environ | {"XLA_FLAGS": " ".join(flags)}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_a_gpu_is_measured_in_parts(benchmark, run, tmp_path):
    run("gpu")
    (path,) = tmp_path.glob("*.jsonl")
    rows = benchmark("gpu_rows").load(path)
    assert not any("failed" in row for row in rows)
    parts = {part.name for part in benchmark("gpu_parts").PARTS if part.quick}
    assert {row["part"] for row in rows} == parts | {"device"}
    text = benchmark("gpu_report").report(rows)
    assert "## Decode attention\n" in text and "SnapKV 2 x 64" in text and "Failed" not in text


@pytest.fixture
def benchmark(monkeypatch):
    """Imports a benchmark, as `python -m` in the checkout does."""
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def test_copies_of_pools(benchmark):
    text = """
      %copy.3 = bf16[4,2304,128]{2,1,0} copy(%p)
      %copy.4 = bf16[4,17,128]{2,1,0} copy(%q)
      %copied = (bf16[4,2304,128]{2,1,0}, bf16[4,2304,128]{2,1,0}, u32[]) copy-start(%p)
    """
    assert benchmark("aot").copies_of(text, {("bf16", (4, 2304, 128))}) == 2


PTXAS = """ptxas info    : Compiling entry function 'ragged_decode' for 'sm_90a'
ptxas info    : Function properties for ragged_decode
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 88 registers, used 1 barriers, 71680 bytes smem
"""


def test_spills_are_read(benchmark):
    (kernel,) = benchmark("ptxas").said(PTXAS)
    assert (kernel.name, kernel.registers, kernel.spills) == ("ragged_decode", 88, 20)


def test_loops_within_loops(benchmark):
    nested = benchmark("aot").nested
    outer = "%body (x: s32[]) -> s32[] {\n  %y = s32[] while(%x), body=%inner\n}"
    entry = "ENTRY %main (x: s32[]) -> s32[] {\n  %z = s32[] while(%x), body=%body\n}"
    assert nested(f"{outer}\n\n{entry}") == 1 and nested(entry) == 0


@pytest.mark.parametrize("device", ["h100", "a100", "tpu"])
def test_compiled_cases_are_apart(benchmark, device):
    cases = benchmark("aot_cases").cases
    for quick in (True, False):
        names = [each.name for each in cases([device], quick)]
        assert len(names) == len(set(names)) >= 2


def test_decode_steps_are_measured_side_by_side(benchmark, capsys, as_users_call):
    steps, model = benchmark("decode_step"), tiny.tiny(tiny.TWO_LAYERS)
    found = steps.measure(model, tiny.prompts(0, (60, 60)), budget=40, rounds=2, steps=3)
    steps.show("tiny", found)
    assert all(
        len(row["milliseconds"]) == 2 and row["rows"] == 40 for row in found["policies"].values()
    )
    assert "D2O-no-merging" in capsys.readouterr().out


def test_ways_of_reading_are_measured_side_by_side(benchmark, capsys, as_users_call):
    omnikv, config = benchmark("omnikv"), tiny.shape(layers=5, kv_heads=2, group=2, dim=8)
    model, filters = tiny.tiny(config), (1,)
    found = omnikv.measure(
        model, batch=2, tokens=60, budgets=[8], filters=filters, rounds=1, steps=2
    )
    omnikv.show("tiny", found)
    assert len(capsys.readouterr().out.splitlines()) == 3 + len(found["ways"])
    sent = {name: way["transfers_per_token"] for name, way in found["ways"].items()}
    assert (
        sent["FullKV"]
        == sent["OmniKV-8"]
        == 0
        < min(sent["OmniKV-8-offloaded"], sent["BrutalOffload"])
    )
    prefill = omnikv.measure_prefill(model, tokens=60, filters=filters, ratios=[2], rounds=1)
    assert all(len(way["seconds"]) == 1 for way in prefill["ways"].values())


def missing(path):
    """Names of jaxkv that a script imports, or takes from modules that it imports, and that are not there."""
    tree, modules = ast.parse(path.read_text("utf-8")), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jaxkv":
            module = importlib.import_module(node.module)
            for each in node.names:
                inner = f"{node.module}.{each.name}"
                if not hasattr(module, each.name) and importlib.util.find_spec(inner) is None:
                    yield inner
                elif not hasattr(module, each.name) or isinstance(
                    getattr(module, each.name), types.ModuleType
                ):
                    modules[each.asname or each.name] = importlib.import_module(inner)
    local = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in modules.keys() - local
        ):
            if not hasattr(modules[node.value.id], node.attr):
                yield f"{modules[node.value.id].__name__}.{node.attr}"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks").rglob("*.py")), ids=lambda path: path.stem
)
def test_scripts_name_what_exists(path):
    """Most of them run for minutes, and on other machines: what is renamed would break them unnoticed."""
    assert not [*missing(path)]

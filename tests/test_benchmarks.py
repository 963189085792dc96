"""The GPU's benchmark and the search for tiles run from end to end, at tiny shapes, so that they cannot rot."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("module", ["gpu", "tune"])
def test_quick_run(module, tmp_path):
    command = [sys.executable, "-m", f"benchmarks.{module}", "--quick", "--out", str(tmp_path)]
    # One device, as a user has it; the tests' eight would only slow it down.
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"XLA_FLAGS": ""}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.iterdir()
    results = json.loads(path.read_text())
    if module == "gpu":
        assert {"checks", "decode", "gather", "prefill", "decode_step", "prefill_layer"} <= results.keys()
        assert len(results["checks"]) == 10
    else:
        assert all(results[kernel] for kernel in ("decode", "gather", "prefill"))

"""The soak of sharded generations counts what is right, what is wrong, and what ended its process."""

import importlib
import sys
from pathlib import Path

import pytest

# Right, wrong, an abort, right: each process goes on behind the one that ended.
WORKER = """
import json, os, sys
for index in range(int(sys.argv[1]), int(sys.argv[2])):
    if index == 2:
        print("rendezvous may be stuck", file=sys.stderr, flush=True)
        os.abort()
    print(json.dumps({"index": index, "what": f"policy {index}", "right": index != 1, "seconds": 1.0}), flush=True)
"""


@pytest.fixture
def soak(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent)
    return importlib.import_module("benchmarks.sharded_soak")


def test_aborts_and_wrong_answers_are_counted(soak):
    start = lambda first, total: ([sys.executable, "-c", WORKER, str(first), str(total)], None)  # noqa: E731
    right, wrong, aborts = soak.generations(4, start)
    assert (right, wrong) == (2, ["policy 1"])
    assert [(each["index"], each["code"], each["said"].strip()) for each in aborts] == [
        (2, -6, "rendezvous may be stuck")
    ]


def test_every_policy_meets_every_mesh_in_thirty(soak):
    assert (
        len({soak.drawn(index)[:2] for index in range(30)})
        == len(soak.POLICIES) * len(soak.MESHES)
        == 30
    )


def test_a_generation_runs_in_a_process_of_eight_devices(soak):
    command, environment = soak.worker(0, 1, 24)
    assert environment["NPROC"] == "24"
    assert soak.generations(1, lambda *of: (command, environment)) == (1, [], [])


def test_busy_processes_are_ended(soak):
    with soak.beside(1) as busy:
        assert busy[0].poll() is None
    assert busy[0].returncode == -9

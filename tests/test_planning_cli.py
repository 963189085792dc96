"""`jaxkv plan`: what it prints, and what it rejects in one line."""

import json

import pytest
from cli_runs import refused

import jaxkv
from jaxkv import cli
from jaxkv.cli import outputs
from jaxkv.planning import picture
from jaxkv.planning.planner import plan

ASKED = "--model llama-3.1-70b --gpus h100x8 --context 131072 --batch 4".split()


def run(capsys, *arguments):
    assert cli.main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_a_plan_is_printed(capsys):
    """The report of `jaxkv.plan`."""
    made = plan("llama-3.1-70b", gpus="h100x8", context=131072, batch=4, policy="snapkv")
    assert run(capsys, *ASKED, "--policy", "snapkv") == f"{made}\n"
    for figure in ("17.64 GB", f"{made.largest_batch}", "46.5 s", "80.00 GB"):
        assert figure in str(made)


def test_a_table(capsys):
    """A row for each policy; memory, speed of prefill and of decoding apart, slots of an engine."""
    asked = (*ASKED, "--budget", "2048", "--serve")
    lines = run(capsys, *asked, "--compare", "full,snapkv,adakv,brutaloffload").splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith("policy"))
    rows = [line.replace(",", "").split() for line in lines[at + 1 : at + 5]]
    assert [row[0].split("(")[0] for row in rows] == ["FullKV", "SnapKV", "AdaKV", "BrutalOffload"]
    full, snapkv = (list(map(float, row[-6:])) for row in rows[:2])
    # Compression does not help prefill.
    assert full[0] == pytest.approx(snapkv[0], rel=0.01) and 1.2 * full[1] < snapkv[1]
    assert rows[3][-6:] == ["-"] * 6


def test_json(capsys):
    one = json.loads(run(capsys, *ASKED, "--policy", "full", "--json", "--mesh", "2x4"))
    assert one["mesh"] == {"data": 2, "model": 4} and one["fits"] and one["speed"]["batch"] == 4
    assert one["decode_peak_bytes"] > one["weights_bytes"] and "served" not in one
    asked = "--model llama-3.1-8b --gpus l4 --context 32K --batch 4 --json".split()
    large = json.loads(run(capsys, *asked))
    assert not large["fits"] and large["speed"] is None and large["would_fit"]
    assert large["speed_of_largest_batch"]["batch"] == large["largest_batch"] == 1


def test_options_behind_a_name_come_before_those_of_the_command(capsys):
    """Equal bytes in three stores are as many rows as fit; a budget of its own takes another's place."""
    names = "snapkv,snapkv --store int8,adakv --base pyramidkv --store int4,snapkv --budget 512"
    found = json.loads(
        run(capsys, *ASKED, "--compare", names, "--budget", "1GB", "--window", "16", "--json")
    )
    layers, heads, dim = 80, 8, 128
    each = [
        layers * heads * (bits + 4)
        for bits in (2 * 2 * dim, 2 * (dim + 2), 2 * (dim // 2 + 4 * dim // 32))
    ]
    rows = [10**9 // size for size in each]
    assert [plan["policy"] for plan in found] == [
        f"SnapKV(budget={rows[0]}, window=16)",
        f"SnapKV(budget={rows[1]}, store='int8', window=16)",
        f"AdaKV(base=PyramidKV(budget={rows[2]}, store='int4', window=16))",
        "SnapKV(budget=512, window=16)",
    ]


def test_a_process_here(capsys):
    asked = "--model smollm2-135m-instruct --gpus cpu --context 4096 --budget 256".split()
    one = json.loads(run(capsys, *asked, "--policy", "snapkv", "--dtype", "bfloat16", "--json"))
    assert one["dtype"] == "bfloat16" and one["weights_bytes"] == 2 * 134515008
    names = ("process", "weights", "cache", "prefill_activation")
    assert one["prefill_peak_bytes"] == sum(one[f"{name}_bytes"] for name in names)


BAD = {
    "--gpus=": ["--gpus", "h10x8"],
    "--policy=": ["--compare", "full,h2o", "--policy", "snapkv"],
    "--budget=": ["--compare", "full,brutaloffload", "--budget", "64"],
    "h2oo": ["--compare", "full,h2oo"],
    "--plot=": ["--plot", "memory.gif"],
    "--batch": ["--batch", "0"],
    "pip install": ["--compile"],
}


@pytest.mark.parametrize("named", BAD)
def test_what_is_refused(capsys, monkeypatch, named):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(outputs, "import_matplotlib", lambda: None)
    assert named.strip("-=") in refused(capsys, "plan", *ASKED, *BAD[named])


def test_what_a_picture_shows():
    """The peak of each length up to what the model was made for; without those that a budget cannot be had for."""
    policy = jaxkv.SnapKV(budget=0.02, min_budget="raise")
    made = plan("llama-3.1-8b", gpus="h100", context=131072, policy=policy)
    lengths, sizes = zip(*picture.peaks(made.setting), strict=True)
    assert lengths == tuple(2**power for power in range(11, 18)) and list(sizes) == sorted(sizes)
    assert sizes[-1] == made.sizes.peak_device_bytes


def test_pictures(tmp_path, capsys):
    path = tmp_path / "memory.png"
    run(capsys, *ASKED, "--compare", "full,snapkv,h2o", "--plot", str(path))
    assert path.read_bytes()[:4] == b"\x89PNG"

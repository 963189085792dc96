"""`jaxkv plan`: what it prints, and what it refuses in one line."""

import json
import resource
import signal
import sys

import pytest
from cli_runs import refused

from jaxkv import cli
from jaxkv.cli import planning
from jaxkv.planning import picture

ASKED = "--model llama-3.1-70b --gpus h100x8 --context 131072 --batch 4".split()
PRINTED = """\
llama-3.1-70b, bfloat16, on 8 x h100: split over 8
AdaKV(base=SnapKV(budget=2048)): 4 prompts of 131,072 tokens, 256 new tokens each

  weights          17.64 GB
  cache             0.55 GB  2,048 of 131,072 rows a head; uncompressed 21.47 GB
    of it          42.27 MB  for new tokens' room
    of it           0.17 GB  for capacity (1.5 times a device's even share)
  activations      11.08 GB  of prefill; 2.85 MB of a decode step
  peak of prefill  29.27 GB  37% of 80.00 GB
  peak of decode   18.19 GB  23% of 80.00 GB

It fits, with 50.73 GB of 80.00 GB to spare on each GPU.
Largest batch of such prompts: 21. Longest context of 4 prompts: 131,072 (the model's own limit).
"""
COMPARED = """\
policy                                             cache      peak  fits  largest batch  largest context
FullKV()                                        21.68 GB  49.88 GB   yes              7          131,072
SnapKV(budget=2048)                              0.38 GB  29.10 GB   yes             21          131,072
AdaKV(base=SnapKV(budget=2048))                  0.55 GB  29.27 GB   yes             21          131,072
OmniKV(budget=2048, filter_layers=(5, 20, 45))  21.68 GB  49.88 GB   yes              7          131,072
"""
BEYOND = (
    "beyond the budget's rows",
    "-",
    "42.27 MB room",
    "42.27 MB room; 0.17 GB capacity (1.5 times a device's even share)",
    "-",
)


def run(capsys, *arguments):
    assert cli.main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_a_plan(capsys):
    out = run(capsys, *ASKED, "--policy", "adakv", "--budget", "2048")
    assert out.startswith(PRINTED)
    assert (
        "\nEstimated, with rates of one H200: " in out
        and "\n  requests, 4 at a time: 49.3 s each, 292 an hour" in out
    )
    assert (
        "\n  assumed: prefill's matrix products at 60% and its attention at 55% of the data sheet's FLOP/s"
        in out
    )
    assert "\nCompression pays at once, with the first answer: prefill takes " in out
    assert out.endswith(
        "0 of 256 new tokens have one; all have one behind a context of at most 130,816.\n"
    )


def test_a_table(capsys):
    out = run(capsys, *ASKED, "--compare", "full,snapkv,adakv,omnikv", "--budget", "2048")
    lines = out.splitlines()
    for line, memory, beyond in zip(lines[3:8], COMPARED.splitlines(), BEYOND, strict=True):
        assert line.startswith(memory) and line.removeprefix(memory).strip() == beyond
    times = [line.split() for line in lines[10:14]]
    assert lines[9].split("  ")[-1] == "pays from answer" and [each[-1] for each in times] == [
        "-",
        "1",
        "1",
        "1",
    ]
    requests = [float(each[-4].replace(",", "")) for each in times]
    assert requests[0] < requests[1] == requests[2]
    assert (
        "a GPU with 80.00 GB" in lines[1]
        and "Speeds are estimates, with rates that one H200 reached." in lines
    )


def test_what_jax_must_be_told(capsys):
    asked = "--model llama-3.1-70b --gpus h100x4 --batch 12 --policy snapkv --budget 1024".split()
    told = "Note: JAX takes three quarters of a GPU unless told: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95.\n"
    assert told in run(capsys, *asked, "--context", "131072")
    assert "XLA_" not in run(capsys, *asked, "--context", "4096")


def test_numbers_as_people_write_them(capsys):
    asked = [
        "--model",
        "llama-3.1-70b",
        "--context",
        "128K",
        "--batch",
        "4",
        "--policy",
        "adakv",
        "--budget",
        "2048",
    ]
    for written in ("8xh100", "h100:8", "8 H100"):
        assert run(capsys, *asked, "--gpus", written).startswith(PRINTED)


def test_prices_and_what_does_not_fit(capsys):
    asked = "--model llama-3.1-8b --gpus a100-80gb --context 32K --batch 13 --budget 1024 --price 2".split()
    out = run(capsys, *asked, "--compare", "full,snapkv")
    full, snapkv = (
        next(line for line in out.splitlines()[8:] if line.startswith(name))
        for name in ("Full", "Snap")
    )
    assert full.split()[1:4] == ["-", "-", "-"] and "1M tokens cost" in out
    one, other = (float(line.split()[-2]) for line in (full, snapkv))
    assert other < one < 1.5 * other
    record = json.loads(run(capsys, *asked, "--policy", "snapkv", "--json"))
    assert record["pays"] == {
        "answers": 1,
        "extra_prefill_seconds": None,
        "saved_answer_seconds": None,
    }
    price = record["requests_of_largest_batch"]["price"]
    assert price["per_hour"] == 2 and price["per_thousand_requests"] == pytest.approx(
        other, rel=1e-2
    )
    asked.remove("--budget"), asked.remove("1024")
    record = json.loads(run(capsys, *asked, "--policy", "full", "--json"))
    assert (
        record["estimated"] is record["requests"] is record["pays"] is None and not record["fits"]
    )
    assert record["requests_of_largest_batch"]["batch"] == 12
    assert "\nNo estimate of speed: it does not fit.\n" in run(capsys, *asked, "--policy", "full")


def test_questions_share_a_prefill(capsys):
    asked = "--model llama-3.1-8b --gpus h100 --context 32K --batch 4 --policy snapkv --budget 1024 --price 2".split()
    alone = json.loads(run(capsys, *asked, "--json"))
    out, shared = (run(capsys, *asked, "--questions", "10", *more) for more in ([], ["--json"]))
    assert ": 4 prompts of 32,768 tokens, each asked 10 times, 256 new tokens each" in out
    shared = json.loads(shared)
    assert (alone["questions"], shared["questions"]) == (1, 10)
    once, often = alone["requests"], shared["requests"]
    seconds = once["prefill_seconds"] / 10 + once["decode_seconds"]
    assert often["request_seconds"] == pytest.approx(seconds)
    assert often["price"]["per_thousand_requests"] == pytest.approx(2 * 1000 * seconds / 4 / 3600)


def test_json(capsys):
    one = json.loads(run(capsys, *ASKED, "--policy", "full", "--json", "--mesh", "2x4"))
    assert (
        one["mesh"] == {"data": 2, "model": 4}
        and one["fits"]
        and one["decode_peak_bytes"] > one["weights_bytes"]
    )
    several = json.loads(
        run(capsys, *ASKED, "--compare", "full,h2o, H2O", "--budget", "512", "--json")
    )
    assert [each["policy"] for each in several] == ["FullKV()", "H2O(budget=512)"]
    assert several[1]["cache_bytes"] < several[0]["cache_bytes"] / 100


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


def test_an_engine(capsys):
    """`--serve`: one line of a plan, three columns of a table; a policy that slots do not take says why."""
    asked = [*ASKED, "--budget", "512", "--serve"]
    assert "\n  served: " in run(capsys, *asked, "--policy", "adakv")
    rows = run(capsys, *asked, "--compare", "full,adakv,brutaloffload").splitlines()
    head = next(row for row in rows if "served/s" in row)
    full, ada = (row.split() for row in rows[rows.index(head) + 1 :][:2])
    assert int(ada[-3].replace(",", "")) > 4 * int(full[-3].replace(",", ""))
    assert rows[rows.index(head) + 3].split()[-3:] == ["-"] * 3
    assert "\nNot served: policy='rows wait in host memory'" in run(
        capsys, *ASKED, "--serve", "--policy", "brutaloffload"
    )


def test_a_process_here(capsys, monkeypatch):
    """Of its parts, the peak; all policies of a table."""
    monkeypatch.setattr(planning, "drawing", lambda: None)
    asked = [
        "--model",
        "smollm2-135m-instruct",
        "--gpus",
        "cpu",
        "--context",
        "4096",
        "--budget",
        "256",
    ]
    out = run(capsys, *asked, "--policy", "adakv")
    assert (
        out.startswith("smollm2-135m, float32, in a process on this machine's CPU\n")
        and "in a first run" in out
    )
    rows = run(capsys, *asked, "--compare", "full,adakv").splitlines()
    assert rows[3].split()[:2] == ["policy", "cache"] and rows[4].startswith("FullKV()  ")
    assert rows[8].startswith("FullKV()  ") and rows[9].split()[-1] in {
        "1",
        "never",
        *map(str, range(2, 100)),
    }
    one = json.loads(run(capsys, *asked, "--policy", "snapkv", "--dtype", "bfloat16", "--json"))
    assert one["dtype"] == "bfloat16" and one["weights_bytes"] == 2 * 134515008
    whole = sum(
        one[f"{name}_bytes"]
        for name in ("started", "weights", "left", "cache", "activations", "programs")
    )
    assert (
        one["peak_bytes"] >= whole
        and one["first_peak_bytes"] == one["peak_bytes"] + one["compiling_bytes"]
    )
    for more in (["--mesh", "1x2"], ["--compile"], ["--plot", "memory.png"]):
        assert ": leave it out" in refused(capsys, "plan", *asked, "--policy", "snapkv", *more)


BAD = {
    "no such GPU": ["--gpus", "h10x8"],
    "give 1 or more of them": ["--gpus", "h100x0"],
    "did you mean llama-3.1-70b": ["--model", "llama-3.1-70"],
    "it does not divide": ["--gpus", "h100x3"],
    "give groups and GPUs": ["--mesh", "8"],
    "was made for 131072": ["--context", "131073"],
    "below sinks + window": ["--policy", "snapkv", "--budget", "4"],
    "full has no such option": ["--budget", "4"],
    "none of them has --budget=64": ["--compare", "full,brutaloffload", "--budget", "64"],
    "give it among those of --compare": ["--compare", "full,h2o", "--policy", "snapkv"],
    "no such policy": ["--compare", "full,h2oo"],
    "give some of full": ["--compare", ","],
    "give a file that ends in .png, .svg, .pdf": ["--plot", "memory.gif"],
    "there is no folder": ["--plot", "/nowhere/memory.png"],
    "'0': give at least 1": ["--batch", "0"],
    "give a number of tokens, such as 131072 or 128K": ["--context", "128KB"],
    "price=-1": ["--price", "-1"],
    "no evaluation lies there": ["--quality", "/nowhere"],
    "pip install --no-deps jax-cuda13-plugin==": ["--compile"],
}


@pytest.mark.parametrize("message", BAD)
def test_what_is_refused(capsys, monkeypatch, message):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(planning, "drawing", lambda: None)
    assert message in refused(capsys, "plan", *ASKED, *BAD[message])


def test_pictures_need_matplotlib(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'jaxkv[plots]'" in refused(
        capsys, "plan", *ASKED, "--plot", str(tmp_path / "memory.png")
    )
    assert not list(tmp_path.iterdir())


def test_a_full_disk(capsys, monkeypatch, tmp_path):
    """The plan is printed; of the picture nothing is left, and what was there stays."""
    monkeypatch.setattr(planning, "drawing", lambda: None)
    monkeypatch.setattr(picture, "drawn", lambda plans, kind: b"x" * 100_000)
    path = tmp_path / "memory.svg"
    path.write_bytes(b"before")
    before, handler = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        assert cli.main(["plan", *ASKED, "--plot", str(path)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    captured = capsys.readouterr()
    assert (
        captured.out.startswith("llama-3.1-70b")
        and f"--plot={path}: File too large" in captured.err
    )
    assert [each.name for each in tmp_path.iterdir()] == [
        "memory.svg"
    ] and path.read_bytes() == b"before"


def test_what_a_picture_shows():
    """The peak of each length up to what the model was made for; without those that a budget cannot be had for."""
    from jaxkv import SnapKV
    from jaxkv.planning.planner import plan

    made = plan(
        "llama-3.1-8b", gpus="h100", context=131072, policy=SnapKV(budget=0.02, min_budget="raise")
    )
    points = picture.peaks(made.setting)
    lengths, sizes = zip(*points, strict=True)
    assert lengths == tuple(2**power for power in range(11, 18)) and list(sizes) == sorted(sizes)
    assert points[-1] == (131072, made.sizes.peak)


@pytest.mark.parametrize("kind", picture.KINDS)
def test_pictures(tmp_path, capsys, kind):
    path = tmp_path / f"memory.{kind}"
    run(capsys, *ASKED, "--compare", "full,snapkv,h2o", "--plot", str(path))
    assert path.read_bytes()[:4] in (b"\x89PNG", b"%PDF", b"<?xm")

"""Rows of a GPU's figures outlive kills, crashes and hangs; what cannot be used is rejected by name."""

import importlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A process that measures, without JAX: it writes down what it was asked, and does as the case says.
WORKER = textwrap.dedent("""
    import json, os, sys, time
    where = {"device": os.environ["DEVICE"], "backend": "gpu", "versions": {"jax": "1"}, "told": {}}
    print(json.dumps(where), flush=True)
    for line in sys.stdin:
        case = json.loads(line)["case"]
        with open(os.environ["ASKED"], "a") as asked:
            asked.write(case["name"] + "\\n")
        if case.get("does") == "hang":
            time.sleep(60)
        if case.get("does") == "die":
            sys.exit("the driver is gone")
        time.sleep(case.get("seconds", 0))
        print(json.dumps({"figures": {"pid": os.getpid()}}), flush=True)
    with open(os.environ["ASKED"] + "-ended", "a") as ended:
        ended.write(f"{os.getpid()}\\n")
""")
DOOR = textwrap.dedent("""
    import sys
    from benchmarks.gpu_bench import Bench
    with Bench(sys.argv[1], [sys.executable, sys.argv[2]], minutes=1) as bench:
        for number in range(60):
            bench.measure("fake", {"name": f"row {number}", "seconds": 0.02}, limit=10, sources="s")
""")


@pytest.fixture
def benchmark(monkeypatch):
    """Imports a benchmark, as `python -m` in the checkout does."""
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"benchmarks.{name}")


@pytest.fixture
def bench(benchmark, tmp_path, monkeypatch):
    """Opens a bench with the worker above; `asked` are the cases that it was asked for."""
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    monkeypatch.setenv("DEVICE", "Fake 1")

    def opened(**options):
        command = [sys.executable, str(tmp_path / "worker.py")]
        return benchmark("gpu_bench").Bench(tmp_path / "out", command, **{"minutes": 1, **options})

    return opened


def asked(tmp_path):
    return (tmp_path / "asked").read_text().split("\n")[:-1]


def row_of(name, *, part="fake", device="Fake 1", **said):
    of = {
        "part": part,
        "case": {"name": name},
        "device": device,
        "versions": {},
        "sources": "s",
    }
    return of | {"date": "today", "took": 1} | (said or {"figures": {}})


def test_a_killed_run_loses_the_row_in_hand_at_most(bench, tmp_path):
    (tmp_path / "door.py").write_text(DOOR)
    rng, kills = random.Random(0), 0
    command = [
        sys.executable,
        str(tmp_path / "door.py"),
        str(tmp_path / "out"),
        str(tmp_path / "worker.py"),
    ]
    path = tmp_path / "out" / "fake-1.jsonl"
    before = 0
    while True:
        run = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL
        )
        try:
            if kills < 6:
                # From before the first row on.
                time.sleep(rng.uniform(0.02, 0.5))
                run.send_signal(signal.SIGKILL)
                kills += run.wait() == -signal.SIGKILL
            if run.wait(timeout=60) == 0:
                break
        finally:
            run.kill()
            run.wait()
        # Nothing that stood is gone, and no line is spoilt.
        lines = path.read_text().splitlines() if path.exists() else []
        assert len([json.loads(line) for line in lines]) >= before
        before = len(lines)
    assert kills >= 3
    names = [json.loads(line)["case"]["name"] for line in path.read_text().splitlines()]
    assert names == [f"row {number}" for number in range(60)]
    assert len(asked(tmp_path)) <= 60 + kills


def test_half_a_line_is_dropped_with_a_word(benchmark, tmp_path, capsys):
    rows, path = benchmark("gpu_rows"), tmp_path / "rows.jsonl"
    lines = [json.dumps(row_of(name)) + "\n" for name in ("one", "two")]
    path.write_text(lines[0] + lines[1][:-1])
    opened = rows.Rows(path, "Fake 1")
    assert [row["case"]["name"] for row in opened.all] == ["one"] and path.read_text() == lines[0]
    assert "half written" in capsys.readouterr().err
    opened.append(row_of("two"))
    opened.close()
    assert path.read_text() == "".join(lines)


def test_rows_stand_for_what_they_depend_on(bench, tmp_path, capsys):
    case, other = {"name": "a"}, {"name": "b"}
    with bench() as one:
        first = one.measure("fake", case, limit=10, sources="s")
        assert one.measure("fake", dict(case), limit=10, sources="s") is first
        one.measure("fake", other, limit=10, sources="s")
        one.measure("fake", case, limit=10, sources="s2")
    with bench() as two:
        assert two.measure("fake", case, limit=10, sources="s") == first
    assert asked(tmp_path) == ["a", "b", "a"]
    assert capsys.readouterr().out.count("fake a") == 2


def test_what_hangs_or_dies_is_a_row_and_the_next_goes_on(bench, tmp_path):
    with bench() as one:
        hangs = one.measure("fake", {"name": "hangs", "does": "hang"}, limit=0.3, sources="s")
        dies = one.measure("fake", {"name": "dies", "does": "die"}, limit=10, sources="s")
        fine = one.measure("fake", {"name": "fine"}, limit=10, sources="s")
    assert hangs["failed"] == "not done in 0 s" and hangs["took"] < 5
    assert dies["failed"] == "the process ended with code 1: the driver is gone"
    assert fine["figures"] and one.failed == [hangs, dies]
    with bench() as two:
        assert two.measure("fake", {"name": "dies", "does": "die"}, limit=10, sources="s") == dies
    with bench(retry=True) as three:
        three.measure("fake", {"name": "dies", "does": "die"}, limit=10, sources="s")
        assert three.measure("fake", {"name": "fine"}, limit=10, sources="s") == fine
    assert asked(tmp_path) == ["hangs", "dies", "fine", "dies"]


def test_rows_of_their_own_get_processes_of_their_own(bench):
    with bench() as one:

        def pid(name, **how):
            return one.measure("fake", {"name": name}, limit=10, sources="s", **how)["figures"][
                "pid"
            ]  # noqa: E731

        first, second = pid("a"), pid("b")
        alone = [pid(name, alone=True) for name in "cd"]
        assert first == second and len({first, *alone, pid("e")}) == 4


def test_another_device_than_before_ends_the_run(bench, tmp_path, monkeypatch):
    """JAX takes the CPU where it cannot have the device: its figures must not stand among the device's."""
    with bench() as one:
        one.measure("fake", {"name": "a"}, limit=10, sources="s")
        monkeypatch.setattr(one, "_environment", os.environ | {"DEVICE": "cpu"})
        with pytest.raises(RuntimeError, match="this was Fake 1, now it is cpu"):
            one.measure("fake", {"name": "b"}, limit=10, sources="s", alone=True)
    assert asked(tmp_path) == ["a"]


def test_time_that_is_over_begins_no_row(bench, benchmark, tmp_path):
    late = benchmark("gpu_bench").OutOfTime
    with bench(minutes=0.5 / 60) as one:
        # A row that the end of the time cuts off is not one that failed.
        with pytest.raises(late, match="fake long"):
            one.measure("fake", {"name": "long", "does": "hang"}, limit=30, sources="s")
        with pytest.raises(late, match="fake next"):
            one.measure("fake", {"name": "next"}, limit=30, sources="s")
        assert one.rows.all == one.failed == []
    assert asked(tmp_path) == ["long"]


def test_files_that_cannot_be_used_are_refused(benchmark, tmp_path):
    rows, path = benchmark("gpu_rows"), tmp_path / "rows.jsonl"
    good = json.dumps(row_of("one")) + "\n"
    for bad in ("not JSON", '{"part": "fake"}', json.dumps(row_of("x", device="Other 2"))):
        path.write_text(good + bad + "\n" + good)
        with pytest.raises(rows.RowsError, match="line 2"):
            rows.Rows(path, "Fake 1")
        assert path.read_text() == good + bad + "\n" + good
    with pytest.raises(rows.RowsError, match="cannot be written"):
        rows.Rows(path / "below" / "a.jsonl", "Fake 1")
    path.unlink()
    first = rows.Rows(path, "Fake 1")
    with pytest.raises(rows.RowsError, match="another run writes it"):
        rows.Rows(path, "Fake 1")
    first.close()
    rows.Rows(path, "Fake 1").close()


def test_a_worker_that_does_not_start_is_told(bench, tmp_path):
    (tmp_path / "worker.py").write_text("raise SystemExit('no driver here')")
    with pytest.raises(RuntimeError, match="no driver here"):
        bench()
    assert not (tmp_path / "out").exists()


def test_parts_are_plain_data(benchmark):
    for part in benchmark("gpu_parts").PARTS:
        for cases in (part.cases, part.quick):
            assert json.loads(json.dumps(cases)) == list(cases)
            assert all(
                max(case.get("filter_layers", [0])) < case.get("layers", 32) for case in cases
            )
            names = [json.dumps(case, sort_keys=True) for case in cases]
            assert len(set(names)) == len(names) and all(case["name"] for case in cases)
        module, name = part.function.split(":")
        assert f"def {name}(case" in (ROOT / "benchmarks" / f"{module}.py").read_text()
        assert all(list(ROOT.glob(pattern)) for pattern in part.sources), part.name


def test_no_two_processes_hold_the_device(benchmark):
    """Who keeps the rows imports neither JAX nor what imports it."""
    asked = "import sys\nimport benchmarks.gpu, benchmarks.gpu_report\n"
    asked += "assert not {'jax', 'numpy', 'jaxkv'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", asked], cwd=ROOT, check=True)


def test_a_report_counts_the_last_row_of_a_name(benchmark):
    figures = {"seconds": 2e-5, "range": [1e-5, 4e-5], "bytes_per_second": 2e12}
    copy = {"copy_bytes_per_second": 4e12, "read_bytes_per_second": 4.4e12}
    rows = [
        row_of("2048 MiB", part="copy", figures=copy),
        row_of("70B/8 4 x 8192", part="decode", failed="first it failed"),
        row_of("70B/8 4 x 8192", part="decode", figures=figures),
        row_of("H2O 1 x 32768", part="end", failed="out of memory | no more"),
    ]
    text = benchmark("gpu_report").report(rows)
    assert "| 70B/8 4 x 8192 | 20.0 (10.0 to 40.0) | 50% |" in text
    assert "| end | H2O 1 x 32768 | out of memory / no more |" in text
    assert "first it failed" not in text

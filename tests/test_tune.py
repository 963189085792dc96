"""The search for tiles: what it leaves out, what it finds, how it keeps its time, and the table it writes."""

import importlib
import json
import math
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RULES = {
    "decode": {
        "chunk": 64,
        "block": 64,
        "queries": 64,
        "resident": 3,
        "launch": {"warps": 4, "stages": 3},
    },
    "flash": {"queries": 128, "keys": 64, "launch": {"warps": 8, "stages": 2}},
    "gather": {"block": 64, "launch": {"warps": 4, "stages": 1}},
    "window": {"rows": 128, "keys": 128, "chunk": 512, "launch": {"warps": 8, "stages": 2}},
    "sums": {"queries": 128, "keys": 64, "scores_launch": {"warps": 8, "stages": 2}},
}


@pytest.fixture
def tune(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("benchmarks.tune")


class Bench:
    """Times as a function of tiles has it; every row takes a second of a clock of its own."""

    def __init__(self, tune, monkeypatch, seconds, *, wrong=(), broken=()):
        self.device, self.where = "Fake 1", {"told": {"core_count": 132}, "versions": {"jax": "1"}}
        self.seconds, self.wrong, self.broken, self.now, self.timed, self.table = (
            seconds,
            wrong,
            broken,
            0.0,
            [],
            None,
        )
        monkeypatch.setattr(tune.time, "monotonic", lambda: self.now)

    def use(self, table):
        self.table = table

    def measure(self, part, case, **_):
        self.now += 1
        kernel, tiles = part.removeprefix("tune_"), case["tiles"]
        if kernel == "check":
            return {"failed": "WRONG"} if tiles in self.wrong else {"figures": {}}
        self.timed.append((tiles, case["repeats"]))
        if tiles in self.broken:
            return {"failed": "too much shared memory"}
        whole = RULES["decode" if kernel == "codes" else kernel] | tiles
        return {"figures": {"seconds": self.seconds(whole), "tiles": whole}}


def far_from(best):
    """Seconds that grow with the distance of some fields from the best ones."""
    return lambda tiles: (
        1.0 + sum(abs(math.log2(tiles[name] / value)) for name, value in best.items())
    )


def searched(tune, bench, kernel="decode", seconds=1000, **base):
    return tune.Search(bench, kernel, 128, "bfloat16", base=base, quick=False).run(seconds)


def test_it_finds_the_fastest(tune, monkeypatch):
    bench = Bench(tune, monkeypatch, far_from({"block": 32}))
    assert searched(tune, bench)["block"] == 32
    # Short rounds for all, long ones for few; the rule of thumb is in each of them.
    counts = {
        repeats: [tiles for tiles, each in bench.timed if each == repeats]
        for repeats, _ in tune.ROUNDS
    }
    assert all({} in tiles for tiles in counts.values())
    sizes = [len(tiles) for tiles in counts.values()]
    assert sizes[0] > 20 and sizes[1:] == [survivors + 1 for _, survivors in tune.ROUNDS[:2]]


def test_the_rule_of_thumb_stays_where_nothing_beats_it(tune, monkeypatch):
    assert searched(tune, Bench(tune, monkeypatch, far_from({"block": 64}))) == {}
    # Faster by less than noise is not faster.
    slightly = lambda tiles: 1.0 if tiles["block"] == 64 else 0.995  # noqa: E731
    assert searched(tune, Bench(tune, monkeypatch, slightly)) == {}


def test_what_is_wrong_or_does_not_run_is_passed_over(tune, monkeypatch):
    first = searched(tune, Bench(tune, monkeypatch, far_from({"block": 32})))
    second = searched(tune, Bench(tune, monkeypatch, far_from({"block": 32}), wrong=[first]))
    assert second not in (first, {}) and second["block"] == 32
    third = searched(
        tune, Bench(tune, monkeypatch, far_from({"block": 32}), wrong=[second], broken=[first])
    )
    assert third not in (first, second, {})
    assert searched(tune, Bench(tune, monkeypatch, far_from({"block": 32}), broken=[{}])) == {}


def test_it_keeps_its_time(tune, monkeypatch):
    bench = Bench(tune, monkeypatch, far_from({"block": 32}))
    assert searched(tune, bench, seconds=20)["block"] == 32
    # Likely candidates came first, and the later rounds had their share.
    assert bench.now <= 24 and {repeats for _, repeats in bench.timed} == {
        repeats for repeats, _ in tune.ROUNDS
    }
    assert searched(tune, Bench(tune, monkeypatch, far_from({"block": 32})), seconds=0) == {}


def test_candidates_fit_the_device(tune):
    told = {"shared_memory_per_block_optin": 101376, "core_count": 108}
    small = tune.candidates("flash", RULES["flash"], told, 128, 2)
    large = tune.candidates("flash", RULES["flash"], {}, 128, 2)
    assert 0 < len(small) < len(large) < len(tune.options("flash"))
    for fields in large:
        shared, registers = tune.needs("flash", RULES["flash"] | fields, 128, 2)
        assert shared <= 232448 and registers <= tune.REGISTERS
    # Twice the bytes an element, fewer that fit; the rule of thumb itself is not among them.
    assert (
        len(tune.candidates("decode", RULES["decode"], told, 256, 4))
        < len(tune.options("decode")) - 1
    )
    for kernel, rule in RULES.items():
        assert all(
            any(rule[n] != v for n, v in f.items())
            for f in tune.candidates(kernel, rule, told, 64, 2)
        )


def test_a_table_keeps_what_others_have_found(tune, monkeypatch, tmp_path):
    path = tune.table_path(tmp_path, "Fake 1")
    path.parent.mkdir()
    old = {"dim": 64, "itemsize": 2, "block": 32}
    entry = {"dim": 128, "itemsize": 2, "block": 16}
    path.write_text(json.dumps({"decode": [old, entry], "gather": [], "prefill": [entry]}))
    best = {"block": 32, "queries": 64, "chunk": 256}
    fast = lambda tiles: far_from({name: best[name] for name in best if name in tiles})(tiles)  # noqa: E731
    bench = Bench(tune, monkeypatch, fast)
    assert tune.search(bench, tmp_path, [128], ["bfloat16"], 4000) == path
    assert json.loads(bench.table.read_text()) == {
        "decode": [],
        "gather": [],
        "prefill": [],
        "window": [],
    }
    table = json.loads(path.read_text())
    assert (table["device"], table["jax"]) == ("Fake 1", "1") and table["decode"][0] == old
    kernels = ("decode", "gather", "prefill", "window")
    found = {kernel: [each for each in table[kernel] if each["dim"] == 128] for kernel in kernels}
    # Of decode attention one over rows as the model computes them, and one over rows in 8 bits.
    assert [len(each) for each in found.values()] == [2, 1, 1, 1]
    assert [each["itemsize"] for each in found["decode"]] == [2, 1]
    assert found["decode"][0]["block"] == 32 and found["prefill"][0]["queries"] == 64

    # What is no faster than the rule of thumb leaves no entry.
    tune.search(Bench(tune, monkeypatch, lambda _: 1.0), tmp_path, [128], ["bfloat16"], 4000)
    table = json.loads(path.read_text())
    assert table["decode"] == [old] and table["gather"] == table["prefill"] == []


def test_the_kernels_read_the_table(tune, monkeypatch, tmp_path):
    from jaxkv.pallas_kernels import tuning

    path = tune.table_path(tmp_path, "cpu")
    fields = {
        "queries": 64,
        "keys": 32,
        "launch": {"warps": 4, "stages": 3},
        "scores_launch": {"warps": 2, "stages": 1},
    }
    tune.enter(
        path, tmp_path / "none", {"device": "cpu"}, "prefill", {"dim": 128, "itemsize": 2, **fields}
    )
    monkeypatch.setenv("JAXKV_TUNING", str(path))
    tiles = tuning.prefill_tiles(dim=128, itemsize=2)
    assert (tiles.queries, tiles.keys, tiles.launch.stages, tiles.scores_launch.warps) == (
        64,
        32,
        3,
        2,
    )
    monkeypatch.setenv("JAXKV_TUNING", str(tune.NO_TILES))
    assert tuning.prefill_tiles(dim=128, itemsize=2) != tiles

"""What a plan says beside memory: work by arithmetic written anew, requests an hour, break-even, scores of a folder."""

import dataclasses
import json
import statistics
from pathlib import Path

import pytest
from test_planning_speed import BLOCK, CONFIG, WEIGHTS, setting_of

import jaxkv
from jaxkv._values import amount
from jaxkv.evals.results import Record, Run, dumped
from jaxkv.planning import host_speed
from jaxkv.planning.host_rates import HostRates
from jaxkv.planning.named import accelerators_named
from jaxkv.planning.outlook import Payback, Service
from jaxkv.planning.planner import outlook_of, plan, planned, served_of, speed_of
from jaxkv.planning.served import Slot
from jaxkv.planning.setting import HostSetting, tokens_of
from jaxkv.planning.sizes import sizes_of
from jaxkv.planning.speed import estimate
from jaxkv.planning.work import prefill_work, step_scores

# Layers times query heads, and times kv heads, times channels of a head.
HEADS, KV = 32 * 32 * 128, 32 * 8 * 128


def test_service():
    made = Service(batch=4, new=100, prefill=2.0, decode=8.0, price=36.0)
    assert (made.seconds, made.requests, made.tokens) == (10.0, 1440.0, 144000.0)
    assert made.price_of_requests == 25.0 and made.price_of_tokens == 250.0
    assert dataclasses.replace(made, new=0, decode=0.0).price_of_tokens is None
    assert "price" not in dataclasses.replace(made, price=None).as_dict()
    shared = dataclasses.replace(made, questions=4)
    assert (shared.seconds, shared.requests, shared.as_dict()["questions"]) == (
        8.5,
        4 * 3600 / 8.5,
        4,
    )
    assert str(shared).startswith("requests, 4 at a time, 4 of each prompt: 8.50 s each")
    assert [amount(each) for each in (0.00123456, 0.5, 12.345, 999.6, 123456.7)] == [
        *("0.00123", "0.500", "12.3", "1,000", "123,457")
    ]


@pytest.mark.parametrize(
    ("extra", "saved", "answers", "said"),
    [
        (0.0, 1.0, 1, "pays at once"),
        (-1.0, 1.0, 1, "pays at once"),
        (2.5, 1.0, 3, "from answer 3 of a document on"),
        (2.0, 1.0, 3, "from answer 3"),
        (1.0, 0.0, None, "never pays in time"),
        (1.0, -0.5, None, "an answer 0.500 s more"),
        (None, None, 1, "the full cache of this batch does not fit"),
    ],
)
def test_payback(extra, saved, answers, said):
    made = Payback(extra=extra, saved=saved)
    assert made.answers == answers and said in str(made)


def test_work_of_policies():
    """Attention of all pairs before the diagonal; sums, windows, cosines and second passes on top."""
    work = lambda policy, **more: prefill_work(setting_of(policy, 2, 4096, **more), WEIGHTS)  # noqa: E731
    full, pairs = work("FullKV"), 2 * 4096 * 4096 / 2
    assert full.products == pytest.approx(2 * 8192 * (32 * BLOCK + 4096)) and full.scores == 0
    assert full.attention == 4 * pairs * HEADS
    assert work("H2O").scores == 2 * pairs * HEADS
    window = 2 * 2 * 4096 * HEADS
    assert work("SnapKV").scores == jaxkv.SnapKV(budget=1024).window * window
    cosines = 2 * 2 * 4096**2 * KV
    assert work("RKV").scores == 8 * window + cosines
    again = work("KVzip")
    assert (
        again.products == pytest.approx((2 + 8 / 2048) * full.products)
        and again.attention > 2.9 * full.attention
    )


def test_steps_that_score_the_cache_again():
    """R-KV's 1,024 rows and, on average, half of 128 new ones before it compresses again."""
    setting = setting_of("RKV", 2, 4096, new=256)
    held = 1024 + 64 + 64
    assert step_scores(setting) == pytest.approx(
        (2 * 2 * 8 * held * HEADS + 2 * 2 * held**2 * KV) / 128
    )
    once = dataclasses.replace(setting, policy=jaxkv.RKV(budget=1024, every=None))
    assert step_scores(once) == step_scores(dataclasses.replace(setting, new=64)) == 0
    assert estimate(setting, WEIGHTS).scores > 0 == estimate(once, WEIGHTS).scores


def test_the_largest_batch_pays_for_its_prefill_too():
    setting = setting_of("SnapKV", 8, 32768, new=256)
    made = outlook_of(setting, 16, price=3.0)
    assert made.asked.seconds == pytest.approx(made.speed.prefill + 256 * made.speed.step)
    assert made.best.batch == 16 and made.best.prefill == pytest.approx(2 * made.asked.prefill)
    assert (
        made.best.requests > made.asked.requests
        and made.best.price_of_requests < made.asked.price_of_requests
    )
    # Eight GPUs cost eight times as much an hour.
    apart = outlook_of(dataclasses.replace(setting, gpus=8, data=8), 8, price=3.0)
    assert apart.asked.price == 24.0 and apart.best is apart.asked
    assert outlook_of(setting_of("FullKV", 8, 32768), 16).payback is None
    # Ten questions of each prompt share its prefill, in both batches; memory and the break-even stay as they are.
    shared = outlook_of(dataclasses.replace(setting, questions=10), 16, price=3.0)
    assert shared.asked.seconds == pytest.approx(made.speed.prefill / 10 + 256 * made.speed.step)
    assert shared.best.seconds == pytest.approx(made.best.prefill / 10 + made.best.decode)
    assert shared.payback == made.payback


def test_what_just_does_not_fit_takes_over_100_per_cent():
    setting = setting_of("FullKV", 8, 32768)
    memory = sizes_of(setting).peak - 1
    made = planned(
        dataclasses.replace(setting, gpu=dataclasses.replace(setting.gpu, memory=memory))
    )
    assert f"over 100% of {memory / 1e9:.2f} GB" in str(made) and not made.fits


def test_an_engine_is_planned():
    """Slots fill the memory beside one prefill; a request costs its prefill and its share of all slots' steps."""
    setting = setting_of("SnapKV", 1, 32768, new=256)
    made = served_of(setting, price=3.0)
    slot = Slot.of(setting)
    one, every = sizes_of(setting), sizes_of(dataclasses.replace(setting, batch=made.slots))
    beside = one.weights + one.prefill + every.decode
    assert (
        beside + slot.held(made.slots)
        <= setting.memory
        < beside + slot.held(made.slots + 1) + one.weights / 1e4
    )
    # 32 layers and 8 kv heads of 1024 rows and 256 new ones, rounded up; positions are 4 bytes a row.
    assert (
        32 * 8 * (1024 + 256) * (2 * 128 * 2 + 4)
        <= slot.nbytes
        <= 1.02 * 32 * 8 * (1024 + 256) * (2 * 128 * 2 + 4)
    )
    prefill = speed_of(setting).prefill
    step = speed_of(dataclasses.replace(setting, batch=made.slots)).step
    assert (
        made.seconds == pytest.approx(prefill + 256 * step / made.slots)
        and made.requests == 1 / made.seconds
    )
    assert made.pause == pytest.approx(2 * prefill / 32 + step)
    assert made.price_of_requests == pytest.approx(1000 * 3.0 * made.seconds / 3600)
    # Each of two groups has room for the prompts that wait for both: s + 2 * s / 4 slots instead of s + s / 4.
    both = served_of(dataclasses.replace(setting, gpus=2, data=2))
    assert (
        2 * made.slots * 1.25 / 1.5 == pytest.approx(both.slots, rel=0.01)
        and both.price_of_requests is None
    )
    shared = served_of(dataclasses.replace(setting, questions=10))
    assert (
        shared.seconds == pytest.approx(prefill / 10 + 256 * step / made.slots)
        and shared.slots == made.slots
    )
    full = served_of(dataclasses.replace(setting, policy=jaxkv.FullKV()))
    assert full.slots < made.slots / 20 and full.requests < made.requests


def test_an_engine_that_cannot_be():
    setting = setting_of("SnapKV", 1, 32768, new=256)
    filters = dataclasses.replace(
        setting, policy=jaxkv.OmniKV(budget=1024, filter_layers=(2, 8, 18), offload=True)
    )
    assert "slots keep every row on the device" in served_of(filters)
    made = plan(
        "llama-3.1-70b", gpus="h100", context="128K", policy=jaxkv.SnapKV(budget=1024), serve=True
    )
    assert made.outlook.served.slots == 0 and "not one slot of" in str(made)
    assert made.as_dict()["served"]["requests_per_second"] is None


def test_no_speed_where_nothing_fits():
    made = plan("llama-3.1-70b", gpus="h100", context="128K", policy=jaxkv.SnapKV(budget=1024))
    assert (
        not made.fits
        and made.speed is None
        and made.outlook.best is None
        and "it does not fit" in str(made)
    )


@pytest.mark.parametrize(
    ("policy", "gpus", "why"),
    [
        (jaxkv.AdaKV(budget=1024), 4, "capacity (1.5 times a device's even share)"),
        (jaxkv.AdaKV(budget=1024), 1, ""),
        (jaxkv.SnapKV(budget=0.1), 1, "prompts of up to 32,768 tokens"),
        (jaxkv.H2O(budget=1024), 1, ""),
        (jaxkv.FullKV(), 2, "prompts of up to 32,768 tokens"),
    ],
    ids=str,
)
def test_what_a_cache_is_made_of(policy, gpus, why):
    setting = dataclasses.replace(setting_of("FullKV", 4, 30000, new=256, gpus=gpus), policy=policy)
    sizes = sizes_of(setting)
    parts = sizes.parts
    assert parts.rows + parts.room + parts.spare + parts.state == sizes.grown
    row = 2 * 128 * 2 + 4 + 4 * isinstance(policy, jaxkv.H2O)
    assert parts.rows == pytest.approx(4 * 32 * 8 * sizes.kept * row / gpus, rel=1e-3)
    assert bool(parts.spare) == bool(why) and parts.why == why


def test_a_cpu_by_its_rates(monkeypatch):
    """Work divided by rates, which are measured for the batch that is asked for."""
    rates = HostRates(products=1e11, attention=5e10, sums=2e10, weights=1e10, rows=5e9)
    monkeypatch.setattr(host_speed, "host_rates", lambda config, dtype, batch: rates)
    request = {
        "model": "8b",
        "config": CONFIG,
        "batch": 1,
        "context": 4096,
        "new": 0,
        "dtype": "float32",
    }
    made = HostSetting(policy=jaxkv.H2O(budget=1024), memory=None, **request)
    speed, work = host_speed.host_estimate(made, 2 * WEIGHTS), prefill_work(made, 2 * WEIGHTS)
    assert speed.prefill == pytest.approx(
        work.products / 1e11 + work.attention / 5e10 + work.scores / 2e10
    )
    read = 2 * WEIGHTS - 4 * 128256 * 4096
    # Keys are read twice.
    assert speed.step == pytest.approx(read / 1e10 + 1.5 * 2 * 1024 * KV * 4 / 5e9)
    away = dataclasses.replace(
        made, policy=jaxkv.OmniKV(budget=64, filter_layers=(2, 8, 18), offload=True)
    )
    assert host_speed.host_estimate(away, 2 * WEIGHTS) is None


def test_requests_an_hour_were_measured():
    """`make plan-requests`: three policies, within 25% in the median of rounds."""
    found = json.loads(
        (Path(__file__).parents[1] / "benchmarks/results/plan_requests.json").read_text()
    )
    cells = {name: rounds for name, rounds in found.items() if name not in ("machine", "load")}
    assert {name.split(",")[0] for name in cells} == {"FullKV", "SnapKV", "H2O"} and len(cells) >= 9
    for name, rounds in cells.items():
        ratio = statistics.median(sum(each["measured"]) / sum(each["predicted"]) for each in rounds)
        assert len(rounds) >= 5 and ratio == pytest.approx(1, abs=0.25), name


def test_numbers_as_people_write_them():
    found = [
        tokens_of(each) for each in ("131072", "131_072", "128K", "128k", "0.5K", "1M", " 32 K ", 7)
    ]
    assert found == [131072, 131072, 131072, 131072, 512, 1 << 20, 32768, 7]
    for written in ("4xh100", "h100x4", "h100:4", "4 h100", "4:H100", "4 x h100"):
        assert accelerators_named(written)[0].name == "h100" and accelerators_named(written)[1] == 4
    assert (
        accelerators_named("2xrtx4090")[1] == accelerators_named("rtx4090x2")[1] == 2
        and accelerators_named("rtx4090")[1] == 1
    )


def evaluation(folder, missing=0):
    """Writes the files of an evaluation of two policies on four samples, without its last lines."""
    policies = {"snapkv@1024": jaxkv.SnapKV(budget=1024), "h2o@1024": jaxkv.H2O(budget=1024)}
    run = Run(
        task="needle", settings={}, unit="%", higher=True, model="llama-3.1-8b", fingerprint="0", dtype="float32",
        agnostic=True, raw=False, seed=0, batch=2, shard=None, samples=4, digest="0", versions={}, devices="",
    )  # fmt: skip
    records = [
        Record(
            policy=name, method=repr(each), budget=1024, number=at, id=str(at), group="all", tags={}, question="",
            prediction="", answers=[], score=float(at > 0 or name == "h2o@1024"), tokens=2000, rows=None, nbytes=None,
            figures={},
        )
        for name, each in policies.items() for at in range(4)
    ]  # fmt: skip
    lines = [dumped(vars(each)) for each in (run, *records[: len(records) - missing])]
    (folder / "results.jsonl").write_bytes(b"".join(lines))
    return folder


def test_quality_of_a_folder(tmp_path):
    scored = lambda policy, **more: plan(  # noqa: E731
        "llama-3.1-8b", gpus="h100", context=2048, policy=policy, quality=tmp_path, **more
    )
    evaluation(tmp_path)
    made = scored(jaxkv.SnapKV(budget=1024))
    assert made.outlook.quality.mean == 0.75 and made.as_dict()["quality"]["row"] == "snapkv@1024"
    assert "\nQuality: 75.0% (95% interval " in str(made) and not made.notes
    assert "4 samples of 2,000 tokens on average, llama-3.1-8b.\n" in str(made) + "\n"
    other = scored(jaxkv.SnapKV(budget=512))
    assert other.outlook.quality is None and "it has snapkv@1024, h2o@1024" in other.notes[-1]
    elsewhere = plan(
        "llama-3.1-70b",
        gpus="h100x8",
        context="8K",
        policy=jaxkv.SnapKV(budget=1024),
        quality=tmp_path,
    )
    assert [note.partition(" are of ")[2] for note in elsewhere.notes[-2:]] == [
        "prompts with 2,000 tokens on average, the plan's have 8,192: a budget in rows keeps another share of them",
        "llama-3.1-8b, the plan is of llama-3.1-70b",
    ]
    evaluation(tmp_path, missing=3)
    made = scored(jaxkv.H2O(budget=1024))
    assert made.outlook.quality.word == "100.0*" and "1 of 4 samples" in str(made)
    assert "Not finished" in made.notes[-1]

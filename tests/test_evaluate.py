"""Evaluations: lines that a model gave, the same bytes however often a run was ended, shards that are the whole."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evaluating import POLICIES, Told, Words, told, words
from policy_table import BY_NAME

import jaxkv
from jaxkv.evals import (
    Evaluation,
    How,
    TaskSample,
    at_budgets,
    evaluate,
    question_tasks,
    results,
    runs,
)
from jaxkv.evals.runs import derive_seed

FEW = {"few": jaxkv.KNorm(budget=9)}


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """No picture is made: a picture takes longer than everything else here."""
    monkeypatch.setattr(runs, "PLOTS_MISSING", True)


@pytest.fixture
def whole(tmp_path):
    return told(tmp_path / "whole")


# --- a model's answers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("agnostic", [False, True])
def test_lines_are_what_the_model_says(tmp_path, agnostic):
    task, how = Words(), How(agnostic=agnostic)
    policies = {**FEW, **({} if agnostic else {"full": jaxkv.FullKV()})}
    found = evaluate(words(), task, policies, tmp_path / "out", how=how, batch=3)
    samples = task.samples(words())
    for name, policy in policies.items():
        parts = (samples[:3], samples[3:])
        drawn = [
            each
            for part in parts
            for each in question_tasks.answer_samples(words(), policy, part, how)
        ]
        said = [each.prediction for each in drawn]
        records = found.select_records(name)
        assert [record.prediction for record in records] == said
        assert [record.score for record in records] == [task.score(samples[0], x) for x in said]
        assert [record.tokens for record in records] == [22 + at for at in range(6)]
        # What an agnostic run's question brings comes on top of what was compressed.
        kept = [9] * 6 if name == "few" else [22 + at for at in range(6)]
        assert [record.rows for record in records] == kept
        heads = words().config.layers * words().config.kv_heads
        assert [record.nbytes for record in records] == [n * heads * 2 * 8 * 4 for n in kept]
    assert found.run.agnostic is agnostic


def test_a_mesh_says_the_same(tmp_path):
    mesh = jax.make_mesh((2, 1), ("data", "model"), devices=jax.devices()[:2])
    places = (("one", None), ("several", mesh))
    one, other = (
        evaluate(words(), Words(count=3), FEW, tmp_path / name, batch=3, mesh=at)
        for name, at in places
    )
    assert one.records == other.records and one.run.fingerprint == other.run.fingerprint
    assert one.run.devices != other.run.devices


def test_settings_of_jax_change_no_line(tmp_path):
    usual = told(tmp_path / "usual", Words(count=3), policies=FEW)
    with jax.enable_x64(True):
        assert told(tmp_path / "other", Words(count=3), policies=FEW) == usual


# --- ended, and gone on with ----------------------------------------------------------------------------------------


def test_a_run_that_is_cut_anywhere_ends_with_the_same_bytes(tmp_path, whole, monkeypatch):
    ran, run = [], Told.run
    monkeypatch.setattr(Told, "run", lambda self, *each: ran.append(each[2]) or run(self, *each))
    _, *lines = whole.split(b"\n")[:-1]
    said = [(record["policy"], record["id"]) for record in map(json.loads, lines)]
    assert said[:3] == [("full", "00"), ("full", "10"), ("full", "01")]
    assert [name for name, _ in said] == [name for name in POLICIES for _ in range(14)]
    out = tmp_path / "out"
    told(out)
    cuts = {0, 1, len(whole) - 1, *np.random.default_rng(0).integers(0, len(whole), 5)}
    for cut in sorted(int(each) for each in cuts):
        (out / "results.jsonl").write_bytes(whole[:cut])
        assert told(out) == whole, cut
    # One size for all, so that programs are compiled once.
    assert {len(batch) for batch in ran} == {3}
    ran.clear()
    assert told(out) == whole and not ran
    more = {**POLICIES, "more": jaxkv.KNorm(budget=8)}
    assert told(out, policies=more).startswith(whole) and len(ran) == 5
    assert Evaluation.read(out).policy_names == tuple(more)


def test_programs_are_freed_before_there_are_too_many(tmp_path, monkeypatch):
    freed = []
    monkeypatch.setattr(jax, "clear_caches", lambda: freed.append(1))
    told(tmp_path / "few")
    assert not freed
    monkeypatch.setattr(runs, "_MOST_MAPPINGS", 0)
    told(tmp_path / "many")
    assert len(freed) == len(POLICIES) - 1


@pytest.mark.parametrize(
    "odd",
    [
        {"score": float("nan")},
        {"rows": float("nan")},
        {"figures": {"loss": jnp.ones(2)}},
        None,
    ],
    ids=str,
)
def test_what_cannot_be_judged_is_named_and_earlier_lines_stay(tmp_path, odd):
    class Odd(Told):
        def run(self, params, policy, samples, how):
            said = super().run(params, policy, samples, how)
            if "02" not in {sample.id for sample in samples}:
                return said
            return [] if odd is None else [dataclasses.replace(each, **odd) for each in said]

    with pytest.raises((ValueError, TypeError)) as failed:
        told(tmp_path / "out", Odd(), policies=FEW)
    assert failed.value.__notes__[0].startswith("few, samples 11 to 12:")
    assert (tmp_path / "out" / "results.jsonl").read_bytes().count(b"\n") == 4


# --- rejected --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"task": Told(count=8)}, "settings.count: 7 there, 8"),
        ({"batch": 4}, "batch: 3 there, 4"),
        ({"how": How(seed=1)}, "seed: "),
        ({"shard": (0, 2)}, "shard: "),
        ({"policies": {"knorm@9": jaxkv.KNorm(budget=8)}}, "policies.*knorm@9"),
    ],
)
def test_another_evaluation_in_the_folder_is_refused(tmp_path, whole, options, named):
    with pytest.raises(ValueError, match=named):
        told(tmp_path / "whole", **options)
    assert (tmp_path / "whole" / "results.jsonl").read_bytes() == whole


def test_other_samples_weights_and_versions_are_refused(tmp_path, whole):
    path = tmp_path / "whole" / "results.jsonl"
    head, rest = whole.split(b"\n", 1)
    for changed in ({"digest": "0"}, {"fingerprint": "0"}, {"versions": {"jax": "0.1"}}):
        path.write_bytes(json.dumps(json.loads(head) | changed).encode() + b"\n" + rest)
        with pytest.raises(ValueError, match=f"^out=.*{next(iter(changed))}: "):
            told(tmp_path / "whole")
    # Where the model lies does not matter.
    moved = json.dumps(json.loads(head) | {"model": "elsewhere"}).encode() + b"\n" + rest
    path.write_bytes(moved)
    assert told(tmp_path / "whole") == moved
    for changed in (b"{}\n" + rest, head + b"\n[]\n"):
        path.write_bytes(changed)
        with pytest.raises(ValueError, match="^folder="):
            Evaluation.read(tmp_path / "whole")


def test_folders_that_are_none_are_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    (tmp_path / "run.json").mkdir()
    (tmp_path / "run.json" / "thesis.tex").write_text("mine")
    for out in (file, tmp_path / "run.json"):
        with pytest.raises(ValueError, match="^out="):
            told(out)
    with results.lock_folder(tmp_path / "busy"), pytest.raises(ValueError, match="^out="):
        told(tmp_path / "busy")


def test_rows_of_names_and_budgets():
    rows = at_budgets(["full", "SnapKV", "omnikv"], [64, 0.2])
    assert list(rows) == ["full", "snapkv@64", "snapkv@0.2", "omnikv@64", "omnikv@0.2"]
    assert rows["snapkv@0.2"] == jaxkv.SnapKV(budget=0.2) and rows["full"] == jaxkv.FullKV()


# --- shards ---------------------------------------------------------------------------------------------------------


def test_shards_are_the_whole(tmp_path, whole):
    parts = [tmp_path / f"{at}" for at in range(3)]
    lines = [told(part, shard=(at, 3)) for at, part in enumerate(parts)]
    assert sum(each.count(b"\n") - 1 for each in lines) == whole.count(b"\n") - 1
    one, joined = Evaluation.read(tmp_path / "whole"), Evaluation.read(*parts[::-1])
    assert joined.records == one.records and joined.table() == one.table()
    some = Evaluation.read(*parts[1:])
    assert (
        some.result_warnings
        and not one.result_warnings
        and some.cell("full").n < one.cell("full").n
    )
    # Further policies from a folder of their own, and the same folder twice.
    told(tmp_path / "more", policies={"more": jaxkv.KNorm(budget=8)})
    more = Evaluation.read(*parts, parts[0], tmp_path / "more")
    assert (
        more.policy_names == (*POLICIES, "more") and more.records[: len(one.records)] == one.records
    )
    told(tmp_path / "other", Told(count=6), shard=(0, 3))
    with pytest.raises(ValueError, match="^folder=.*settings.count"):
        Evaluation.read(*parts, tmp_path / "other")
    changed = lines[0].replace(b'"score": 1.0', b'"score": 0.0')
    (parts[0] / "results.jsonl").write_bytes(changed)
    with pytest.raises(ValueError, match="^folder="):
        Evaluation.read(*parts, tmp_path / "whole")


# --- policies that use random numbers -------------------------------------------------------------


def test_parts_say_whether_they_draw():
    said = {
        name for name, row in BY_NAME.items() if row.policy(24).build_policy_parts().uses_random_key
    }
    drawn = ("random", "cam", "compactor")
    assert said == {name for name in BY_NAME if name.startswith(drawn) and "expected" not in name}
    assert jaxkv.AdaKV(base=jaxkv.RandomKV(budget=9)).build_policy_parts().uses_random_key


def test_every_sample_has_draws_of_its_own(tmp_path, monkeypatch):
    found, run = {}, Told.run

    def seen(self, params, policy, samples, how):
        found[policy, tuple(sample.id for sample in samples)] = how.seed
        return run(self, params, policy, samples, how)

    monkeypatch.setattr(Told, "run", seen)
    drawing, other = jaxkv.RandomKV(budget=9), jaxkv.KNorm(budget=9)
    told(tmp_path / "out", policies={"random": drawing, "knorm": other}, how=How(seed=3))
    seeds = {ids: seed for (policy, ids), seed in found.items() if policy == drawing}
    assert len(seeds) == len(set(seeds.values())) == 14 and 3 not in seeds.values()
    assert seeds["00",] == derive_seed(3, "00") != derive_seed(4, "00")
    assert {seed for (policy, _), seed in found.items() if policy == other} == {3}


def test_a_models_answers_under_chance_do_not_depend_on_the_batch(tmp_path):
    policies = {"random@9": jaxkv.RandomKV(budget=9)}
    one, other = (
        evaluate(words(), Words(count=2), policies, tmp_path / f"{n}", batch=n) for n in (1, 2)
    )
    assert one.records == other.records


# --- batches of questions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("agnostic", [True, False])
def test_what_is_asked_of_one_sample_changes_none_beside_it(agnostic):
    """One has no question; or one may answer longer, and one prompt leaves room for its own answer alone."""
    one, two, three = Words(count=3).samples(words())
    longest = " ".join(["w5"] * (words().config.max_positions - 5))
    if agnostic:
        given = [dataclasses.replace(one, question=""), two, three]
    else:
        given = [
            one,
            dataclasses.replace(two, new_tokens=9),
            dataclasses.replace(three, context=longest),
        ]
    policy, how = jaxkv.StreamingLLM(budget=0.5), How(agnostic=agnostic, raw=True)
    together = question_tasks.answer_samples(words(), policy, given, how)
    assert together == [
        question_tasks.answer_samples(words(), policy, [each], how)[0] for each in given
    ]
    # Of 20 and 21 words, and of the question's two where the policy sees them.
    assert [each.rows for each in together[:2]] == ([10, 10] if agnostic else [11, 11])


def test_a_prefix_is_kept_from_the_policy_with_the_question():
    sample = TaskSample(id="0", group="g", context="w1 w2 w3", prefix=" w4", new_tokens=1)
    context, question = question_tasks.encode_sample(words().text, sample)
    assert (len(context), len(question)) == (3, 1)

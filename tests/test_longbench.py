"""LongBench and InfiniteBench on rows in their own format; official/ holds some, written by hand."""

import dataclasses
import json
import shutil
import zipfile
from pathlib import Path

import eval_models
import pytest

import jaxkv
from jaxkv.evals import How, TaskSample, encode_sample
from jaxkv.evals.published import InfiniteBench, LongBench, load_benchmark_table

OFFICIAL = Path(__file__).parent / "official"
LONG = LongBench(data=str(OFFICIAL / "longbench"))
INFINITE = InfiniteBench(data=str(OFFICIAL / "infinitebench"), new_tokens=8)


def samples(task, **changes):
    model = eval_models.speaking(positions=8192)
    return {sample.id: sample for sample in dataclasses.replace(task, **changes).samples(model)}


def test_longbench_has_all_sets_in_the_official_prompts():
    made = samples(LONG)
    assert {sample.group for sample in made.values()} == set(
        load_benchmark_table("longbench")
    ) and len(load_benchmark_table("longbench")) == 16
    first = made["hotpotqa-000"]
    row = json.loads((OFFICIAL / "longbench" / "hotpotqa.jsonl").read_text("utf-8"))
    asked = (
        "Answer the question based on the given passages. Only "
        "give me the answer and do not output any other words."
    )
    assert first.context == f"{asked}\n\nThe following are given passages.\n{row['context']}"
    assert first.question == f"\n\n{asked}\n\nQuestion: {row['input']}\nAnswer:"
    assert (
        first.answers == ("Oslo",)
        and first.tags["prompt_tokens"] == len(first.context + first.question) + 1
    )
    # A document's own braces are no fields.
    assert "{until}" in made["narrativeqa-000"].context
    assert made["lcc-000"].question == "Next line of code:\n"
    assert made["trec-000"].tags["classes"][0] == "Date" and "classes" not in first.tags
    raw = {sample.group for sample in made.values() if sample.raw}
    assert raw == {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}


def test_answers_have_the_official_lengths():
    long, infinite = (
        {name: of["new_tokens"] for name, of in load_benchmark_table(each).items()}
        for each in ("longbench", "infinitebench")
    )
    assert long.items() >= {"narrativeqa": 128, "gov_report": 512, "trec": 64}.items()
    assert infinite.items() >= {"math_calc": 30000, "passkey": 6}.items()
    assert samples(LONG)["gov_report-000"].new_tokens == 512


def test_few_shot_prompts_have_no_chat_template():
    text = eval_models.speaking(chat=True).text
    given = {"id": "1", "group": "x", "context": "abc", "question": "?"}
    chat, plain = (
        sum(encode_sample(text, TaskSample(**given, raw=raw)), []) for raw in (False, True)
    )
    assert text.decode(chat) == "user:abc?assistant:"
    assert plain == text.encode("abc?", bos=True)


def test_long_prompts_lose_their_middle():
    whole = samples(LONG, tasks=("narrativeqa",))["narrativeqa-000"]
    prompt = whole.context + whole.question
    cut = samples(LONG, tasks=("narrativeqa",), longest=600)["narrativeqa-000"]
    # Of bytes, the first is the bos token.
    assert cut.context + cut.question == prompt[:299] + prompt[-300:] and len(prompt) > 700
    assert cut.question == whole.question and cut.tags["prompt_tokens"] == 600
    # What is asked is longer than the half that stays of it.
    short = samples(LONG, tasks=("narrativeqa",), longest=200)["narrativeqa-000"]
    assert short.context == prompt[:99] and short.question == prompt[-100:]


def test_the_models_positions_decide_where_nothing_else_does():
    model = eval_models.speaking(chat=True, positions=640)
    made = dataclasses.replace(LONG, tasks=("narrativeqa",)).samples(model)
    context, question = encode_sample(model.text, made[0])
    assert made[0].tags["prompt_tokens"] < len(context + question) <= 640 - 128
    with pytest.raises(ValueError, match="^new_tokens="):
        dataclasses.replace(LONG, tasks=("lcc",), new_tokens=600).samples(model)


def test_infinitebench_has_all_tasks_in_the_official_prompts():
    made = samples(INFINITE)
    assert {sample.group for sample in made.values()} == set(load_benchmark_table("infinitebench"))
    assert all(sample.raw for sample in made.values())
    assert made["passkey-000"].question == "\n\nWhat is the pass key?\n\nThe pass key is"
    assert made["math_find-000"].context.startswith(
        "What is the largest number in the following list?\n\n[5, 17"
    )
    assert made["math_find-001"].answers == ("1.25",) and made["math_calc-000"].answers == (
        "[1, 4, 8, 6]",
    )
    assert made["code_run-000"].question.endswith("The value of func_0(-6) is")
    assert made["code_run-000"].context.startswith("There is a function called func_0 in")
    assert made["code_debug-000"].answers == ("half", "B") and made[
        "longbook_choice_eng-000"
    ].answers == ("Oslo", "B")
    assert "\nA. Bergen\nB. Oslo\nC. Rome\nD. Lima\n" in made["longbook_choice_eng-000"].question


def test_some_samples_run():
    model, policy = eval_models.speaking(positions=8192), jaxkv.SnapKV(budget=96)
    made = dataclasses.replace(LONG, tasks=("triviaqa", "lcc"), new_tokens=3).samples(model)
    outcomes = LONG.run(model, policy, made, How(agnostic=True))
    assert len(outcomes) == len(made) == 2 and all(0 <= each.score <= 1 for each in outcomes)
    assert all(each.prediction for each in outcomes)


def test_without_data_and_network_the_error_says_what_to_put_where(monkeypatch, tmp_path):
    def offline(*args, **options):
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    model = eval_models.speaking()
    with pytest.raises(FileNotFoundError, match=r"^data=.*THUDM/LongBench.*narrativeqa\.jsonl"):
        LongBench().samples(model)
    with pytest.raises(FileNotFoundError, match=r"^data=.*lcc\.jsonl"):
        LongBench(data=str(tmp_path), tasks=("lcc",)).samples(model)


def test_the_hubs_files_are_read_as_they_lie_there(monkeypatch, tmp_path):
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.write(OFFICIAL / "longbench" / "lcc.jsonl", "data/lcc.jsonl")
    shutil.copy(OFFICIAL / "infinitebench" / "passkey.jsonl", tmp_path)
    asked = []

    def fetched(repo, file, *, repo_type):
        asked.append((repo, file, repo_type))
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetched)
    assert samples(LongBench(tasks=("lcc",))) == samples(LONG, tasks=("lcc",))
    passkey = {"tasks": ("passkey",), "new_tokens": 8}
    assert samples(InfiniteBench(**passkey)) == samples(INFINITE, **passkey)
    assert asked[0] == ("THUDM/LongBench", "data.zip", "dataset")
    assert asked[1] == ("xinrongzhang2022/InfiniteBench", "passkey.jsonl", "dataset")


def test_other_files_are_refused_by_name(tmp_path):
    model = eval_models.speaking()
    for text in ('\n{"input": "x"}\n', "<html>"):
        (tmp_path / "lcc.jsonl").write_text(text)
        with pytest.raises(ValueError, match="^data="):
            LongBench(data=str(tmp_path), tasks=("lcc",)).samples(model)
    assert len(samples(LONG, tasks=("narrativeqa",), count=1)) == 1

"""Conversations on one cache: it stays within its budget, and what was told is asked for."""

import json

import eval_models
import pytest

import jaxkv
from jaxkv.evals import TASKS, How
from jaxkv.evals.turns import Turns


def stored(tmp_path, *rows):
    path = tmp_path / "question.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def turns_of(sample):
    return sample.context.split("\x1e")


def test_what_is_told_first_is_asked_for_last():
    model = eval_models.speaking(positions=1 << 16)
    made = Turns(count=6, turns=10, words=20).samples(model)
    assert TASKS["turns"] is Turns and len({sample.context for sample in made}) == len(made) == 6
    for sample in made:
        turns, right = turns_of(sample), sample.answers
        assert len(turns) == len(right) == 10 == sample.tags["turns"]
        assert right[:7] == ("",) * 7 and all(right[7:])
        for value in right[7:]:
            assert sum(value in turn for turn in turns[:3]) == 1
        assert all(
            turn.startswith('Here is a passage: "') and len(turn.split()) == 33
            for turn in turns[3:7]
        )
        assert all(turn.endswith("?") for turn in turns[7:])
    assert made == Turns(count=6, turns=10, words=20).samples(model)
    # More conversations leave the first ones as they are; another seed makes others.
    assert Turns(count=7, turns=10, words=20).samples(model)[:6] == made
    assert Turns(count=6, turns=10, words=20, seed=1).samples(model)[0].context != made[0].context


def test_no_fact_is_a_part_of_anothers_question():
    """Else an answer that repeats the question would count."""
    from jaxkv.evals import turns

    asked = " ".join(question + text for text, question, _ in turns._FACTS).lower()
    values = [value for *_, several in turns._FACTS for value in several.lower().split()]
    assert len(values) > 40 and not [value for value in values if value in asked]


def test_the_cache_stays_within_its_budget_turn_after_turn(tmp_path):
    """And says what it does in the same conversations held by hand."""
    model, policy = eval_models.speaking(chat=True), jaxkv.H2O(budget=24)
    talks = (
        ["My dog is called Juno, remember it.", "It rains.", "The dog?"],
        ["I am Ada, a welder.", "So.", "My name?"],
    )
    rows = [{"turns": talk, "reference": ["", "", "x"]} for talk in talks]
    task = Turns(data=stored(tmp_path, *rows), new_tokens=4)
    outcomes = task.run(model, policy, task.samples(model), How())
    cache, told = None, []
    for said in zip(*talks, strict=True):
        given = {"policy": policy} if cache is None else {"cache": cache}
        out = jaxkv.generate(model, list(said), **given, max_new_tokens=4)
        cache, told = out.cache, [*told, out.text]
    for outcome, answers in zip(outcomes, zip(*told, strict=True), strict=True):
        assert outcome.figures["rows"] == [24] * 3 and outcome.figures["most_rows"] == [24] * 3
        assert outcome.rows == 24 and outcome.tokens > 60
        assert (
            json.loads(outcome.prediction) == list(answers) and len(outcome.figures["scores"]) == 1
        )


def test_conversations_of_mt_benchs_file_run_where_they_have_references(tmp_path):
    model = eval_models.speaking(positions=4096)
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
        {
            "question_id": 101,
            "category": "reasoning",
            "turns": ["One?", "Two?"],
            "reference": ["First.", ""],
        },
        {
            "question_id": 111,
            "category": "math",
            "turns": ["Sum?", "And?", "So?"],
            "reference": ["", "7", "12"],
        },
    ]
    task = Turns(data=stored(tmp_path, *rows), count=0, new_tokens=3)
    samples = task.samples(model)
    assert [(each.id, each.group) for each in samples] == [("101", "reasoning"), ("111", "math")]
    assert samples[0].answers == ("First.", "") and samples[1].answers == ("", "7", "12")
    outcomes = task.run(model, jaxkv.FullKV(), samples, How())
    assert [len(json.loads(each.prediction)) for each in outcomes] == [2, 3]
    assert [len(each.figures["scores"]) for each in outcomes] == [1, 2]
    # Without a template, lines part turns: every token of them is in the cache.
    assert outcomes[0].figures["rows"] == [
        1 + len("One?\n") + 3,
        1 + len("One?\n") + 3 + len("\n\nTwo?\n") + 3,
    ]


@pytest.mark.parametrize(
    "judge, said, score",
    [("substring", "It is OSLO, I think", 1.0), ("rouge-l", "oslo", 1.0), ("substring", "Os", 0.0)],
)
def test_answers_are_judged_as_asked(judge, said, score):
    assert Turns(judge=judge)._score(said, "oslo") == pytest.approx(score, abs=1e-6)


def test_what_cannot_be_held_is_refused(tmp_path):
    model = eval_models.speaking()
    with pytest.raises(ValueError, match="^data="):
        Turns(data=stored(tmp_path, {"turns": ["a"]})).samples(model)
    with pytest.raises(ValueError, match="^data="):
        Turns(data=stored(tmp_path, {"prompt": "a"})).samples(model)

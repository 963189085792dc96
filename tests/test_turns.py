"""Conversations on one cache: it stays within its budget, and what was told is asked for."""

import dataclasses
import json

import eval_models

import jaxkv
from jaxkv.evals import How
from jaxkv.evals.turns import ConversationTask


def turns_of(sample):
    return sample.context.split("\x1e")


def test_what_is_told_first_is_asked_for_last():
    model = eval_models.speaking(positions=1 << 16)
    made = ConversationTask(count=6, turns=10, words=20).samples(model)
    assert len({sample.context for sample in made}) == len(made) == 6
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
    assert made == ConversationTask(count=6, turns=10, words=20).samples(model)
    # More conversations leave the first ones as they are; another seed makes others.
    assert ConversationTask(count=7, turns=10, words=20).samples(model)[:6] == made
    assert (
        ConversationTask(count=6, turns=10, words=20, seed=1).samples(model)[0].context
        != made[0].context
    )


def test_no_fact_is_a_part_of_anothers_question():
    """Else an answer that repeats the question would count."""
    from jaxkv.evals import turns

    asked = " ".join(question + text for text, question, _ in turns.load_facts()).lower()
    values = [value for *_, several in turns.load_facts() for value in several.lower().split()]
    assert len(values) > 40 and not [value for value in values if value in asked]


def test_the_cache_stays_within_its_budget_turn_after_turn():
    """And says what it does in the same conversations held by hand."""
    model, policy = eval_models.speaking(chat=True), jaxkv.H2O(budget=24)
    talks = (
        ["My dog is called Juno, remember it.", "It rains.", "The dog?"],
        ["I am Ada, a welder.", "So.", "My name?"],
    )
    task = ConversationTask(count=2, turns=3, new_tokens=4)
    samples = [
        dataclasses.replace(sample, context="\x1e".join(talk))
        for sample, talk in zip(
            task.samples(eval_models.speaking(positions=4096)), talks, strict=True
        )
    ]
    outcomes = task.run(model, policy, samples, How())
    cache, told = None, []
    for said in zip(*talks, strict=True):
        given = {"policy": policy} if cache is None else {"cache": cache}
        out = jaxkv.generate(model, list(said), **given, max_new_tokens=4)
        cache, told = out.cache, [*told, [each.text for each in out]]
    for outcome, answers in zip(outcomes, zip(*told, strict=True), strict=True):
        assert outcome.figures["rows"] == [24] * 3 and outcome.figures["most_rows"] == [24] * 3
        assert outcome.rows == 24 and outcome.tokens > 60
        assert (
            json.loads(outcome.prediction) == list(answers) and len(outcome.figures["scores"]) == 1
        )


def test_without_a_template_lines_part_turns():
    """Every token of them is in the cache; an answer that has the fact, in any case, counts."""
    model, task = eval_models.speaking(), ConversationTask(count=1, turns=2, new_tokens=3)
    (sample,) = task.samples(model)
    short = dataclasses.replace(sample, context="One?\x1eTwo?", answers=("", "7"))
    (outcome,) = task.run(model, jaxkv.FullKV(), [short], How())
    first = 1 + len("One?\n") + 3
    assert outcome.figures["rows"] == [first, first + len("\n\nTwo?\n") + 3]
    right = json.loads(outcome.prediction)[1][1:].upper()
    (again,) = task.run(
        model, jaxkv.FullKV(), [dataclasses.replace(short, answers=("", right))], How()
    )
    assert (outcome.score, again.score) == (0, 1) and len(again.figures["scores"]) == 1

"""Questions on one's own documents, and losses of one's own texts."""

import dataclasses
import json
from unittest import mock

import eval_models
import pytest

import jaxkv
from jaxkv.evals import (
    TASKS,
    DocumentQuestionsTask,
    How,
    answer_samples,
    evaluate,
    metrics,
    question_tasks,
)

LONG, OTHER = "The mill stands by the river. " * 3, "Ada keeps bees on the roof. " * 4
ROWS = [
    {
        "document": LONG,
        "questions": [{"question": f"Where {n}?", "answer": "by the river"} for n in range(3)],
    },
    {
        "document": OTHER,
        "question": "What does Ada keep?",
        "answers": ["bees", "Bees!"],
        "group": "bees",
    },
    {"document": OTHER, "question": "How many?", "answer": 7},
    {
        "file": "third.txt",
        "id": "third",
        "question": "Which?",
        "choices": ["tea", "green tea"],
        "answer": "B",
    },
]


@pytest.fixture
def data(tmp_path):
    (tmp_path / "third.txt").write_text("Green tea is served.")
    return written(tmp_path, ROWS)


def written(tmp_path, rows):
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in rows))
    return str(path)


def test_lines_become_questions(data):
    model = eval_models.speaking(chat=True)
    task = DocumentQuestionsTask(
        data=data, prompt="Read: {document}\nQ: {question} A:", prefix=" It", new_tokens=5
    )
    made = task.samples(model)
    assert TASKS["qa"] is DocumentQuestionsTask
    assert [each.id for each in made] == ["000-0", "000-1", "000-2", "001-0", "002-0", "third-0"]
    assert [each.context for each in made[2:4]] == [f"Read: {LONG}", f"Read: {OTHER}"]
    assert (made[1].question, made[1].prefix) == ("\nQ: Where 1? A:", " It")
    assert [each.group for each in made] == ["questions"] * 3 + ["bees", "questions", "questions"]
    assert [each.answers for each in made[3:]] == [("bees", "Bees!"), ("7",), ("green tea",)]
    assert "Which?\nA. tea\nB. green tea\nAnswer with the letter." in made[5].question
    assert [each.id for each in DocumentQuestionsTask(data=data, count=2).samples(model)] == [
        each.id for each in made[:4]
    ]
    assert task.score(made[5], "B") == 1 and task.score(made[5], "A.") == 0
    assert task.score(made[3], "Some BEES.") == 1 and task.score(made[3], "beeswax") == 0


@pytest.mark.parametrize(
    "judge, said, right, score",
    [
        ("contains", "It is 17.", "7", 0),
        ("contains", "It is 17, or 7.", "7", 1),
        ("contains", "他在北京工作", "北京", 1),
        ("contains", "It weighs 3.5 of 17,000 kg.", "5", 0),
        ("contains", "1,2,3.", "2", 1),
        ("contains", "Un cafe\u0301.", "caf\u00e9", 1),
        ("contains", "price: $5", "$5", 1),
        ("exact", "The roof.", "roof", 1),
        ("f1", "green roof", "the roof", 2 / 3),
        ("rouge-l", "a b c d", "a b", 2 / 3),
    ],
)
def test_judges(judge, said, right, score):
    task = DocumentQuestionsTask(data="none", judge=judge)
    sample = question_tasks.TaskSample(
        id="1", group="x", context="x", answers=("nothing like it", right)
    )
    assert task.score(sample, said) == pytest.approx(score)


@pytest.mark.parametrize(
    "said, right",
    [
        ("B", 1),
        ("(b) because", 1),
        ("B is right", 1),
        ("A isotope of coffee", 2),
        ("Answer: C", 2),
        ("It was tea, not coffee", 0),
        ("Not coffee but green\n tea.", 2),
        ("Bread", None),
    ],
)
def test_choices_are_read_from_answers(said, right):
    choices = ("tea", "green  tea", "coffee")
    assert [metrics.score_choice(said, choices, at) for at in range(3)] == [
        float(at == right) for at in range(3)
    ]


def test_a_document_is_compressed_once_for_its_questions(data):
    model, task = eval_models.speaking(), DocumentQuestionsTask(data=data, new_tokens=6)
    made = task.samples(model)
    samples = [*made[1:4], made[3]]
    how, policy = How(agnostic=True), jaxkv.SnapKV(budget=24, window=4)
    alone = [answer_samples(model, policy, [each], how)[0] for each in samples]
    with mock.patch.object(question_tasks, "prefill", wraps=question_tasks.prefill) as prefills:
        together = task.run(model, policy, samples, how)
    assert [len(call.args[1]) for call in prefills.call_args_list] == [2]
    assert [dataclasses.replace(each, score=0.0) for each in together] == alone


@pytest.mark.parametrize(
    "row",
    [
        {"question": "?", "answer": "x"},
        {"document": "x", "file": "y", "question": "?", "answer": "x"},
        {"document": "x", "question": "?", "answer": True},
        {"document": "x", "question": "?", "answer": "C", "choices": ["a", "b"]},
        {"document": "x" * 600, "question": "?", "answer": "a"},
        "{",
    ],
)
def test_other_lines_are_refused(tmp_path, row):
    with pytest.raises(ValueError, match="^data="):
        DocumentQuestionsTask(data=written(tmp_path, [row])).samples(eval_models.speaking())


def test_what_is_missing_is_named(tmp_path):
    model = eval_models.speaking()
    row = {"file": "none.txt", "question": "?", "answer": "x"}
    for data in (str(tmp_path / "none"), written(tmp_path, [row])):
        with pytest.raises(FileNotFoundError, match="^data="):
            DocumentQuestionsTask(data=data).samples(model)
    for name, value in (("judge", "fair"), ("prompt", "{question} {document}"), ("new_tokens", 0)):
        with pytest.raises(ValueError, match=f"^{name}="):
            DocumentQuestionsTask(data="x", **{name: value})
    with pytest.raises(TypeError, match="data"):
        evaluate(model, "qa", {"full": jaxkv.FullKV()}, tmp_path / "out")

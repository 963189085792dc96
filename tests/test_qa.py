"""Questions on one's own documents, and losses of one's own texts."""

import json
from unittest import mock

import eval_models
import numpy as np
import pytest

import jaxkv
from jaxkv.evals import TASKS, DocumentQuestions, How, OwnTexts, asked, asking, evaluate, metrics
from jaxkv.evals.perplexity import losses_of

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
    task = DocumentQuestions(
        data=data, prompt="Read: {document}\nQ: {question} A:", prefix=" It", new_tokens=5
    )
    made = task.samples(model)
    assert TASKS["qa"] is DocumentQuestions
    assert [each.id for each in made] == ["000-0", "000-1", "000-2", "001-0", "001-1", "third-0"]
    assert [each.context for each in made[2:4]] == [f"Read: {LONG}", f"Read: {OTHER}"]
    assert (
        made[1].question == "\nQ: Where 1? A:"
        and made[1].prefix == " It"
        and made[1].new_tokens == 5
    )
    assert [each.group for each in made] == ["questions"] * 3 + ["bees", "questions", "questions"]
    assert (
        made[3].answers == ("bees", "Bees!")
        and made[4].answers == ("7",)
        and made[5].answers == ("green tea",)
    )
    assert "Which?\nA. tea\nB. green tea\nAnswer with the letter." in made[5].question
    assert [each.id for each in DocumentQuestions(data=data, count=2).samples(model)] == [
        each.id for each in made[:5]
    ]
    assert task.score(made[5], "B") == 1 and task.score(made[5], "A.") == 0
    assert task.score(made[3], "Some BEES.") == 1 and task.score(made[3], "beeswax") == 0


@pytest.mark.parametrize(
    "judge, said, right, score",
    [
        ("contains", "It is 17.", "7", 0),
        ("contains", "It is 17, or 7.", "7", 1),
        ("contains", "On the\n  ROOF!", "on the roof", 1),
        ("contains", "roofs", "roof", 0),
        ("contains", "他在北京工作", "北京", 1),
        ("contains", "It weighs 3.5 of 17,000 kg.", "5", 0),
        ("contains", "It weighs 3.5 of 17,000 kg.", "17", 0),
        ("contains", "1,2,3.", "2", 1),
        ("contains", "Un cafe\u0301.", "caf\u00e9", 1),
        ("contains", "Un cafe\u0301.", "cafe", 0),
        ("contains", "", "a", 0),
        ("contains", "price: $5", "$5", 1),
        ("exact", "The roof.", "roof", 1),
        ("exact", "", "the", 0),
        ("exact", "THE", "the", 1),
        ("exact", "a roof there", "roof", 0),
        ("f1", "green roof", "the roof", 2 / 3),
        ("rouge-l", "a b c d", "a b", 2 / 3),
    ],
)
def test_judges(judge, said, right, score):
    task = DocumentQuestions(data="none", judge=judge)
    sample = asking.Sample(id="1", group="x", context="x", answers=("nothing like it", right))
    assert task.score(sample, said) == pytest.approx(score)


@pytest.mark.parametrize(
    "said, right",
    [
        ("B", 1),
        ("(b) because", 1),
        ("b. green", 1),
        ("B is right", 1),
        ("a is the right one.", 0),
        ("A isotope of coffee", 2),
        ("A cat, so the answer is C.", 2),
        ("Answer: C", 2),
        ("green tea", 1),
        ("It was tea, not coffee", 0),
        ("Coffee, not tea", 2),
        ("B\nTea leaves are green.", 1),
        ("A teapot of coffee, not tea", 2),
        ("Not coffee but green\n tea.", 2),
        ("Green\n tea, not coffee.", 1),
        ("D", None),
        ("", None),
        ("Bread", None),
    ],
)
def test_choices_are_read_from_answers(said, right):
    choices = ("tea", "green  tea", "coffee")
    assert [metrics.choice(said, choices, at) for at in range(3)] == [
        float(at == right) for at in range(3)
    ]


def test_a_document_is_compressed_once_for_its_questions(data):
    model, task = eval_models.speaking(), DocumentQuestions(data=data, new_tokens=6)
    samples = [*task.samples(model), task.samples(model)[-1]]
    how, policy = How(agnostic=True), jaxkv.SnapKV(budget=24, window=4)
    alone = [asked(model, policy, [each], how)[0] for each in samples]
    with mock.patch.object(asking, "prefill", wraps=asking.prefill) as prefills:
        together = task.run(model, policy, samples, how)
    assert [len(call.args[1]) for call in prefills.call_args_list] == [4]
    assert [each.prediction for each in together] == [each.prediction for each in alone]
    assert [(each.tokens, each.rows, each.nbytes) for each in together] == [
        (each.tokens, each.rows, each.nbytes) for each in alone
    ]
    # A policy that sees the question compresses document and question.
    assert all(each.rows <= 24 for each in task.run(model, policy, samples, How()))


@pytest.mark.parametrize(
    "row",
    [
        {"question": "?", "answer": "x"},
        {"document": "x", "file": "y", "question": "?", "answer": "x"},
        {"document": " ", "question": "?", "answer": "x"},
        {"document": "x\ud800", "question": "?", "answer": "x"},
        {"document": "x", "questions": []},
        {"document": "x", "questions": ["?"]},
        {"document": "x", "question": "?", "answer": True},
        {"document": "x", "question": "?", "answers": []},
        {"document": "x", "question": "?", "answer": "C", "choices": ["a", "b"]},
        {"document": "x", "question": "?", "answer": "a", "choices": ["a", "a"]},
        {"document": "x", "question": "?", "answer": "a", "group": None},
        {"document": "x" * 600, "question": "?", "answer": "a"},
        "[1, 2]",
        "{",
        "",
    ],
)
def test_other_lines_are_refused(tmp_path, row):
    with pytest.raises(ValueError, match="^data="):
        DocumentQuestions(data=written(tmp_path, [row])).samples(eval_models.speaking())


def test_what_is_missing_is_named(tmp_path):
    model = eval_models.speaking()
    row = {"file": "none.txt", "question": "?", "answer": "x"}
    for data in (str(tmp_path / "none"), written(tmp_path, [row])):
        with pytest.raises(FileNotFoundError, match="^data="):
            DocumentQuestions(data=data).samples(model)
    same = {"document": "x", "id": 1, "question": "?", "answer": "x"}
    again = [same, same | {"document": "y", "id": 2}, same | {"question": "again?"}]
    made = DocumentQuestions(data=written(tmp_path, again)).samples(model)
    assert [each.id for each in made] == ["1-0", "1-1", "2-0"] and made[1].question == "\n\nagain?"
    with pytest.raises(ValueError, match="^data="):
        DocumentQuestions(data=written(tmp_path, [same, same | {"document": "y"}])).samples(model)
    for name, value in (
        ("judge", "fair"),
        ("prompt", "{question} {document}"),
        ("prompt", "{document}"),
        ("new_tokens", 0),
        ("count", -1),
    ):
        with pytest.raises(ValueError, match=f"^{name}="):
            DocumentQuestions(data="x", **{name: value})
    with pytest.raises(ValueError, match="^task='qa': .*data"):
        evaluate(model, "qa", {"full": jaxkv.FullKV()}, tmp_path / "out")


def test_ends_of_own_texts_are_measured(tmp_path):
    texts = [
        "The river ran past the mill. " * 2,
        "Ada counted the boats that came up it. " * 2,
        LONG,
    ]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    model, policy = eval_models.speaking(), jaxkv.SnapKV(budget=24, window=4)
    task = OwnTexts(data=str(tmp_path), prefix=70, tokens=8)
    samples = task.samples(model)
    assert [each.tags["title"] for each in samples] == ["1", "2", "0"] and TASKS["text"] is OwnTexts
    outcomes = task.run(model, policy, samples, How())
    for sample, outcome in zip(samples, outcomes, strict=True):
        ids = model.text.encode(sample.context, bos=True)
        end = min(len(ids) - 8, 70)
        alone = losses_of(model, policy, [ids[:end]], np.asarray([ids[end : end + 8]], np.int32))
        assert (
            outcome.score == pytest.approx(alone.losses.mean(), abs=1e-4)
            and outcome.tokens == end + 8
        )
        assert outcome.figures["positions"] == [*range(1, 9)]
    for tokens in (30, 300):
        with pytest.raises(ValueError, match="^tokens="):
            OwnTexts(data=str(tmp_path), tokens=tokens, prefix=70).samples(model)


def test_texts_that_the_tokenizer_does_not_know_are_warned_of(tmp_path):
    model = jaxkv.load("tiny-retrieval")
    known = model.text.decode(list(range(40, 60)))
    data = written(tmp_path, [{"document": LONG, "question": "Where?", "answer": "x"}])
    with pytest.warns(UserWarning, match="does not know"):
        DocumentQuestions(data=data, new_tokens=4).samples(model)
    # Words that it knows need no warning, which would be an error here.
    data = written(tmp_path, [{"document": known, "question": known, "answer": "x"}])
    assert DocumentQuestions(data=data, new_tokens=4).samples(model)

"""Questions on one's own documents, and losses of one's own texts."""

import json
from unittest import mock

import eval_models
import numpy as np
import pytest

import jaxkv
from jaxkv.evals import TASKS, DocumentQuestions, How, OwnTexts, asked, asking, evaluate, metrics
from jaxkv.evals.perplexity import losses_of
from jaxkv.policies.checks import Share

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
POLICIES = {"full": jaxkv.FullKV(), "knorm@0.5": jaxkv.KNorm(budget=0.5)}


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
    assert [each.prediction for each in together] == [each.text for each in alone]
    assert [(each.tokens, each.rows, each.nbytes) for each in together] == [
        (each.tokens, each.rows, each.nbytes) for each in alone
    ]
    # A policy that sees the question compresses document and question.
    assert all(each.rows <= 24 for each in task.run(model, policy, samples, How()))


def test_policies_are_added_to_a_folder(data, tmp_path):
    model, task = eval_models.speaking(), DocumentQuestions(data=data, new_tokens=4)
    options = {"how": How(agnostic=True), "batch": 4}
    whole = evaluate(model, task, POLICIES, tmp_path / "whole", **options)
    lines = (tmp_path / "whole" / "samples.jsonl").read_bytes()
    first = {"full": POLICIES["full"]}
    evaluate(model, task, first, tmp_path / "grown", **options)
    with mock.patch.object(
        DocumentQuestions, "run", autospec=True, side_effect=DocumentQuestions.run
    ) as runs:
        # In whichever order they are given, policies that were there come first.
        grown = evaluate(
            model, task, dict(reversed(POLICIES.items())), tmp_path / "grown", **options
        )
    assert runs.call_count == 2 and all(
        call.args[2].composed.budget == Share(0.5) for call in runs.call_args_list
    )
    assert (
        tmp_path / "grown" / "samples.jsonl"
    ).read_bytes() == lines and grown.table() == whole.table()
    run = json.loads((tmp_path / "grown" / "run.json").read_text())
    assert run == json.loads((tmp_path / "whole" / "run.json").read_text())
    with pytest.raises(
        ValueError, match="policies: full, knorm@0.5 there, full asked for.*further policies"
    ):
        evaluate(model, task, first, tmp_path / "grown", **options)
    # Cut anywhere and run again, it ends with the same bytes.
    (tmp_path / "grown" / "samples.jsonl").write_bytes(lines[: len(lines) * 3 // 4])
    evaluate(model, task, POLICIES, tmp_path / "grown", **options)
    assert (tmp_path / "grown" / "samples.jsonl").read_bytes() == lines


@pytest.mark.parametrize(
    "row, message",
    [
        ({"question": "?", "answer": "x"}, 'row 1.*one of "document" and "file"'),
        (
            {"document": "x", "file": "y", "question": "?", "answer": "x"},
            'one of "document" and "file"',
        ),
        ({"document": " ", "question": "?", "answer": "x"}, '"document" is .*give a text'),
        (
            {"document": "x\ud800", "question": "?", "answer": "x"},
            'row 1.: its "document" is .*give a text',
        ),
        (
            {"document": "x", "question": "?\ud800", "answer": "x"},
            'row 1, question 1.*no text as its "question"',
        ),
        ({"document": "x", "question": "?", "answer": float("nan")}, '"answers" are .nan.'),
        (
            {"document": "x", "question": "?", "answer": "x", "id": None},
            '"id" is None: give a text or a whole number',
        ),
        ({"document": "x"}, 'it needs "questions"'),
        ({"document": "x", "questions": []}, 'it needs "questions"'),
        ({"document": "x", "questions": ["?"]}, 'question 1.*no text as its "question"'),
        ({"document": "x", "questions": [{"question": "?"}]}, '"answers" are'),
        ({"document": "x", "question": "?", "answer": True}, '"answers" are'),
        ({"document": "x", "question": "?", "answers": [""]}, '"answers" are'),
        (
            {"document": "x", "question": "?", "answer": "C", "choices": ["a", "b"]},
            "one of the choices, or its letter",
        ),
        ({"document": "x", "question": "?", "answer": "a", "choices": ["a", "a"]}, "all different"),
        ({"document": "x", "question": "?", "answer": "a", "group": 3}, '"group" is 3'),
        (
            {"document": "x" * 600, "question": "?", "answer": "a"},
            "000-0.*exceed the model's 512 positions",
        ),
        ("[1, 2]", "line 1 is no object of JSON"),
        ("{", "line 1 is no JSON"),
        ("", "it has no line"),
    ],
)
def test_other_lines_are_refused(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        DocumentQuestions(data=written(tmp_path, [row])).samples(eval_models.speaking())


def test_what_is_missing_is_named(tmp_path):
    model = eval_models.speaking()
    with pytest.raises(FileNotFoundError, match="no such file; give lines such as"):
        DocumentQuestions(data=str(tmp_path / "none")).samples(model)
    row = {"file": "none.txt", "question": "?", "answer": "x"}
    with pytest.raises(FileNotFoundError, match="row 1.*no file 'none.txt' beside it"):
        DocumentQuestions(data=written(tmp_path, [row])).samples(model)
    same = {"document": "x", "id": 1, "question": "?", "answer": "x"}
    again = [same, same | {"document": "y", "id": 2}, same | {"question": "again?"}]
    made = DocumentQuestions(data=written(tmp_path, again)).samples(model)
    assert [each.id for each in made] == ["1-0", "1-1", "2-0"] and made[1].question == "\n\nagain?"
    with pytest.raises(ValueError, match="row 2.*the id '1' is that of another document"):
        DocumentQuestions(data=written(tmp_path, [same, same | {"document": "y"}])).samples(model)
    for settings, message in (
        ({"judge": "fair"}, "judge='fair': choose among contains"),
        ({"prompt": "{question} {document}"}, "name {document}, and {question} behind it"),
        ({"prompt": "{document}"}, "name {document}"),
        ({"new_tokens": 0}, "new_tokens=0"),
        ({"count": -1}, "count=-1"),
    ):
        with pytest.raises(ValueError, match=message):
            DocumentQuestions(data="x", **settings)
    for task in ("qa", "text"):
        with pytest.raises(
            ValueError, match=f"task='{task}': its settings data have no default: give"
        ):
            evaluate(model, task, POLICIES, tmp_path / "out")
    assert not (tmp_path / "out").exists()


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
    with pytest.raises(ValueError, match="tokens=30: more than half of {'0': 59}"):
        OwnTexts(data=str(tmp_path), tokens=30, prefix=70).samples(model)
    # No more are prefilled than the model has positions for.
    assert (
        OwnTexts(data="x").prefix_of(9000, 512) == 512 - 128
        and OwnTexts(data="x").prefix_of(300, 512) == 172
    )
    with pytest.raises(ValueError, match="tokens=300: more than half of the model's 512 positions"):
        OwnTexts(data=str(tmp_path), tokens=300).samples(model)


def test_texts_that_the_tokenizer_does_not_know_are_warned_of(tmp_path):
    model = jaxkv.load("tiny-retrieval")
    known = model.text.decode(list(range(40, 60)))
    data = written(tmp_path, [{"document": LONG, "question": "Where?", "answer": "x"}])
    with pytest.warns(UserWarning, match="unknown tokens in prompts"):
        DocumentQuestions(data=data, new_tokens=4).samples(model)
    # Words that it knows need no warning, which would be an error here.
    data = written(tmp_path, [{"document": known, "question": known, "answer": "x"}])
    assert DocumentQuestions(data=data, new_tokens=4).samples(model)

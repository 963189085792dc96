"""RULER's tasks as jaxkv makes them: counts, forms, places, lengths."""

import dataclasses
import re
import uuid
from collections import Counter

import numpy as np
import pytest

from jaxkv.evals import Ruler, encode_sample
from jaxkv.evals.ruler.document_qa import load_data_set
from jaxkv.evals.ruler.niah import NEEDLE
from jaxkv.evals.ruler.recipe import PromptFactory, fit_haystack_size
from jaxkv.evals.ruler.ruler_task import MADE, make_recipe
from jaxkv.evals.ruler.wording import SMALL_WORDS, load_word_lists, select_wording, split_sentences
from tests.ruler_cases import GOLDEN, count, model, pieces, small_vocabulary

_TOLD = NEEDLE.format(kind="(numbers|uuids)", key="(.+?)", value=r"([\w-]+)")
# Task of synthetic.yaml -> haystack, kinds of key and value, different keys, values of each, keys asked for.
NEEDLES = {
    "niah_single_1": ("noise", "words", "numbers", 1, 1, 1),
    "niah_single_2": ("essay", "words", "numbers", 1, 1, 1),
    "niah_single_3": ("essay", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": ("essay", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": ("needle", "words", "numbers", 1, 1, 1),
    "niah_multikey_3": ("needle", "uuids", "uuids", 1, 1, 1),
    "niah_multivalue": ("essay", "words", "numbers", 1, 4, 1),
    "niah_multiquery": ("essay", "words", "numbers", 4, 1, 4),
}
LENGTH = 768


def cell(name: str, wording: str, length: int = LENGTH) -> PromptFactory:
    made = make_recipe(
        name, wording=select_wording(wording), length=length, count=count, data=str(GOLDEN)
    )
    return PromptFactory(made, length, count, fit_haystack_size(made, length, count))


def is_uuid4(text: str) -> bool:
    return str(uuid.UUID(text)) == text and uuid.UUID(text).version == 4


FORMS = {
    ("official", "words"): lambda text: (
        text.partition("-")[0] in load_word_lists()["adjectives"] or text.count("-") > 1
    ),
    ("official", "numbers"): lambda text: re.fullmatch(r"[1-9]\d{6}", text),
    ("official", "uuids"): is_uuid4,
    ("small", "words"): lambda text: text in SMALL_WORDS,
    ("small", "numbers"): lambda text: re.fullmatch(r"[1-9]\d{3}", text),
    ("small", "uuids"): lambda text: re.fullmatch(r"[1-9]\d{3}-[1-9]\d{3}", text),
}


@pytest.mark.parametrize("wording", ["official", "small"])
@pytest.mark.parametrize("name", NEEDLES)
def test_needles(name, wording):
    haystack, key_kind, value_kind, keys, values, queries = NEEDLES[name]
    made, rng = cell(name, wording), np.random.default_rng(0)
    for _ in range(5):
        prompt = made.make_fitting_prompt(rng)
        told = re.findall(_TOLD, prompt.context)
        others = len(told) - keys * values
        assert others >= 3 if haystack == "needle" else others == 0
        assert {kind for kind, _, _ in told} == {value_kind}
        assert all(
            FORMS[wording, key_kind](key) and FORMS[wording, value_kind](value)
            for _, key, value in told
        )
        # What is asked for has these values and no others, wherever they stand.
        asked = re.search(r"for (.+) mentioned in the provided text\?$", prompt.question)[1]
        asked = re.split(", and |, ", asked)
        assert len(asked) == len(set(asked)) == queries and len(prompt.answers) == queries * values
        found = [{value for _, key, value in told if key == each} for each in asked]
        assert [
            set(prompt.answers[at * values : (at + 1) * values]) for at in range(queries)
        ] == found
        assert len({key for _, key, _ in told}) >= keys
        many = queries * values > 1
        assert prompt.question.startswith("\nWhat are all" if many else "\nWhat is the")
        assert prompt.prefix.endswith(" are" if many else " is") and prompt.context.startswith(
            "Some" if many else "A "
        )
        assert 0 <= prompt.depth <= 1 and all(answer in prompt.target for answer in prompt.answers)
        if haystack == "noise":
            assert prompt.context.count("There and back again.") >= 5


@pytest.mark.parametrize("wording", ["official", "small"])
def test_a_chain_of_four_hops(wording):
    made, rng = cell("vt", wording, 1200), np.random.default_rng(0)
    for _ in range(5):
        prompt = made.make_fitting_prompt(rng)
        *shot, text = re.split(r"(?=Memorize and track)", prompt.context)[1:]
        # RULER shows a solved one first; a tiny model was trained on the task.
        assert len(shot) == (wording == "official")
        ((start, value),) = re.findall(r"VAR (\w+) = (\d+)", text)
        hops = re.findall(r"VAR (\w+) = VAR (\w+)", text)
        names = [start, *(name for name, _ in hops)]
        assert [before for _, before in hops] == names[:-1] and tuple(names) == prompt.answers
        assert len(set(names)) == 5 and f"assigned the value {value} in" in prompt.question
        assert len(value) == (5 if wording == "official" else 4)
        known = [re.fullmatch("[A-Z]{5}", name) or name.lower() in SMALL_WORDS for name in names]
        assert all(known) and all(name.isupper() for name in names)
        assert "5 variables are assigned" in prompt.prefix and prompt.target.split() == names
        if shot:
            solved = re.findall(r"VAR (\w{3}) =", shot[0])
            assert len(solved) == 5 and shot[0].rstrip().endswith(" ".join(solved))


@pytest.mark.parametrize(
    "wording, length, often, seldom",
    [
        ("official", 1024, 6, 1),
        ("official", 4096, 30, 3),
        ("small", 768, 6, 1),
        ("small", 1536, 12, 2),
        ("small", 3072, 30, 3),
    ],
)
def test_ten_common_words(wording, length, often, seldom):
    prompt = cell("cwe", wording, length).make_fitting_prompt(np.random.default_rng(0))
    *shot, text = prompt.context.split("Below is a numbered list")[1:]
    entries = Counter(re.findall(r"\d+\. (.+?)(?= \d+\. |$)", text.partition("\n")[2]))
    assert Counter(entries.values()) == {often: 10, seldom: len(entries) - 10}
    assert {word for word, _ in entries.most_common(10)} == set(prompt.answers)
    assert (
        re.findall(r"\d+\. (\S+)", prompt.target) == list(prompt.answers) or wording == "official"
    )
    assert len(shot) == (wording == "official")
    if shot:
        # 20 or 40 words, of which 10 are common and stand behind the prefix.
        listed, solved = shot[0].split(prompt.prefix)
        words = Counter(
            re.findall(r"\d+\. (.+?)(?= \d+\. |\n|$)", listed.partition("most often.\n")[2])
        )
        assert len(words) == (20 if length < 4096 else 40) and solved.count(". ") == 10


@pytest.mark.parametrize("name", ["qa_1", "qa_2"])
def test_documents(name):
    data = load_data_set(str(GOLDEN), name)
    made, rng = cell(name, "official", 375), np.random.default_rng(0)
    for index, asked in enumerate(data.questions):
        prompt = made.make_fitting_prompt(rng, index)
        texts = re.findall(r"Document \d+:\n(.+?)(?=\n\nDocument|\Z)", prompt.context, re.S)
        own = {data.documents[each] for each in asked.context}
        assert len(set(texts)) == len(texts) and own <= set(texts)
        assert prompt.answers == asked.answers
    # Questions without an answer are left out; a question of two hops has several documents.
    assert len(data.questions) == (12 if name == "qa_1" else 4)
    assert {len(each.context) for each in data.questions} == ({1} if name == "qa_1" else {10})
    with pytest.raises(ValueError, match="^count="):
        made.make_fitting_prompt(rng, len(data.questions))


@pytest.mark.parametrize("wording", ["official", "small"])
@pytest.mark.parametrize("name", MADE)
def test_lengths_are_near_what_is_asked(name, wording):
    # A unit of the haystack, and what samples differ by; fwe rounds all counts down at once.
    slack = {"fwe": 0.1, "niah_multikey_3": 0.1}.get(name, 0.05)
    for length in (1200, 2400):
        made, rng = cell(name, wording, length), np.random.default_rng(0)
        taken = [count(made.make_fitting_prompt(rng)) + made.recipe.new_tokens for _ in range(3)]
        assert (1 - slack) * length <= min(taken) <= max(taken) <= length


def test_the_small_wording_is_made_of_its_vocabulary():
    known, rng = small_vocabulary(), np.random.default_rng(0)
    assert len(SMALL_WORDS) == len(set(SMALL_WORDS)) == 256 and len(known) < 700
    seen = set()
    for name in MADE:
        made = cell(name, "small")
        for _ in range(5):
            prompt = made.make_fitting_prompt(rng)
            seen |= set(pieces(prompt.full_text + prompt.target))
    assert seen <= known
    # Nothing is in it that no prompt says, but for nouns not sampled.
    nouns = {*SMALL_WORDS, *(word.upper() for word in SMALL_WORDS)}
    assert known - seen <= nouns


def test_no_word_is_found_in_another():
    said = small_vocabulary() - {word.upper() for word in SMALL_WORDS} | set(
        "red blue green yellow purple".split()
    )
    assert not [
        (word, other)
        for word in SMALL_WORDS
        for other in said
        if word != other and word in other.lower()
    ]


def test_sentences():
    text = 'Call me Ishmael. "Who?" Mr. Coffin asked! It cost 3.50 dollars... and more. (So it was.) The end'
    assert split_sentences(text) == [
        "Call me Ishmael.",
        '"Who?"',
        "Mr. Coffin asked!",
        "It cost 3.50 dollars... and more.",
        "(So it was.)",
        "The end",
    ]


class TestTask:
    def test_samples(self):
        asked = Ruler(tasks=("vt", "niah_multiquery"), lengths=(512, 256), count=3, wording="small")
        made = asked.samples(model())
        grid = [(name, length) for name in asked.tasks for length in asked.lengths]
        assert [(each.group, each.tags["length"]) for each in made[::3]] == grid
        assert len({each.id for each in made}) == len({each.context for each in made}) == 12
        for each in made:
            assert (
                sum(map(len, encode_sample(model().text, each))) + each.new_tokens
                <= each.tags["length"]
            )
        assert asked.samples(model()) == made
        # More of them begin with the same; other seeds do not.
        more = dataclasses.replace(asked, count=5).samples(model())
        assert more[:3] == made[:3] and more[5:8] == made[3:6]
        assert dataclasses.replace(asked, seed=1).samples(model())[0] != made[0]

    def test_scores(self):
        asked = Ruler(
            tasks=("niah_multiquery", "qa_1"),
            lengths=(440,),
            count=2,
            wording="official",
            data=str(GOLDEN),
        )
        many, _, one, _ = asked.samples(model())
        assert asked.score(many, f"They are {many.answers[0]} and {many.answers[2]}.") == 0.5
        assert (
            asked.score(one, one.answers[1].upper()) == 1 and asked.score(one, "I do not know") == 0
        )
        assert (many.new_tokens, one.new_tokens) == (128, 32)


def test_files_of_another_format(tmp_path):
    (tmp_path / "squad.json").write_text('{"data": [{"paragraphs": 3}]}', "utf-8")
    with pytest.raises(ValueError, match="^data="):
        Ruler(tasks=("qa_1",), data=str(tmp_path)).samples(model())

"""The task `qa`: questions on one's own documents, from a file of JSON lines, scored against their right answers."""

import dataclasses
import itertools
import math
import os
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxkv._errors import require
from jaxkv._values import shortened
from jaxkv._warnings import warn_once
from jaxkv.evals import metrics
from jaxkv.evals.asking import QuestionTask, ids_of
from jaxkv.evals.stored import json_lines
from jaxkv.evals.task import Sample, task
from jaxkv.evals.texts import text_of_file
from jaxkv.loading import LanguageModel

JUDGES: dict[str, Callable[[str, str], float]] = {
    "contains": metrics.contains,
    "exact": metrics.exact,
    "f1": metrics.answer_f1,
    "rouge-l": metrics.rouge_l,
}
# Half of a surrogate pair, which JSON can hold and UTF-8 cannot.
_HALF = re.compile("[\ud800-\udfff]")
_LETTERS = string.ascii_uppercase
_FORM = 'lines such as {"document": "...", "questions": [{"question": "...", "answer": "..."}]}'
_FIELDS = ("{document}", "{question}")


@task("qa")
@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentQuestions(QuestionTask):
    """Task: questions on your own documents, each answer scored against the right ones that the file gives.

    A line of the file is a document, "document" with its text or "file" with the path of a text beside the file, and
    its "questions": each has a "question" and an "answer", or several right "answers", or "choices" and the "answer"
    among them. A line may also have one "question" and "answer" itself. "id" names a document, "group" on a line or
    question the row of the table by group. A question-agnostic run compresses each document once for all of its
    questions in a batch.

    Attributes:
        data: file of JSON lines.
        judge: score of an answer: "contains" (1 if a right answer occurs in it), "exact" (1 if its words are a right
            answer's), "f1" (of words in common) or "rouge-l"; questions with choices score 1 for the right choice.
        count: number of documents, from the first on; 0 for all.
        prompt: the prompt, in which {document} and {question} stand for their texts.
        prefix: the answer's first words, which end the prompt.
        new_tokens: most tokens of an answer.
    """

    shares_contexts = True

    data: str
    judge: str = "contains"
    count: int = 0
    prompt: str = "{document}\n\n{question}"
    prefix: str = ""
    new_tokens: int = 32

    def __post_init__(self):
        super().__post_init__()
        require(self.judge in JUDGES, "judge", self.judge, f"choose among {', '.join(JUDGES)}")
        require(self.count >= 0, "count", self.count, "give 0 or more")
        require(self.new_tokens >= 1, "new_tokens", self.new_tokens, "give 1 or more")
        once = all(self.prompt.count(each) == 1 for each in _FIELDS)
        ordered = once and self.prompt.index(_FIELDS[0]) < self.prompt.index(_FIELDS[1])
        require(
            ordered, "prompt", self.prompt, "name {document}, and {question} behind it, once each"
        )

    def samples(self, params: LanguageModel) -> Sequence[Sample]:
        """List of one sample per question, by document; ValueError if prompt plus answer exceed the positions."""
        before, rest = self.prompt.split(_FIELDS[0])
        between, after = rest.split(_FIELDS[1])
        made = []
        for document in _documents(self.data, self.count):
            for number, asked in enumerate(document.questions):
                sample = Sample(
                    id=f"{document.name}-{number}",
                    group=asked.group,
                    context=before + document.text,
                    question=between + asked.text + after,
                    answers=asked.answers,
                    new_tokens=self.new_tokens,
                    prefix=self.prefix,
                    tags={
                        "document": document.name,
                        **({"choices": asked.choices} if asked.choices else {}),
                    },
                )
                made.append(sample)
        self._check_lengths(params, made)
        return made

    def score(self, sample: Sample, prediction: str) -> float:
        """Highest score in [0, 1] of a prediction over the sample's right answers, by the judge or for its choices."""
        choices = sample.tags.get("choices", ())
        if choices:
            return metrics.choice(prediction, choices, choices.index(sample.answers[0]))
        return max(JUDGES[self.judge](prediction, answer) for answer in sample.answers)

    def _check_lengths(self, params: LanguageModel, samples: Sequence[Sample]) -> None:
        """Raises ValueError if a prompt and its answer exceed the model's positions; warns of many unknown tokens."""
        most = params.config.max_positions
        for sample in samples:
            context, question = ids_of(params.text, sample)
            length = len(context) + len(question)
            unknown = [
                each
                for each in context + question
                if params.text and each == params.text.unknown_id
            ]
            if 10 * len(unknown) > length:
                remedy = "the tokenizer does not know their text, so that this compares nothing: give another model"
                warn_once(
                    UserWarning,
                    params.name,
                    f"model={params.name}: unknown tokens in prompts: {remedy}",
                )
            remedy = f"its prompt of {length} tokens and {self.new_tokens} of the answer exceed the model's {most}"
            require(
                length + self.new_tokens <= most,
                "data",
                sample.id,
                f"{remedy} positions: shorten the document",
            )


class _Asked(NamedTuple):
    """One question of a document: its text, right answers, choices (empty for a free answer), group of the scores."""

    text: str
    answers: tuple[str, ...]
    choices: tuple[str, ...]
    group: str


class _Document(NamedTuple):
    """One document of the file: its id, text and questions."""

    name: str
    text: str
    questions: tuple[_Asked, ...]


def _documents(data: str, count: int) -> Iterator[_Document]:
    """Yields the documents of a JSON-lines file; lines of one id, or successive lines of one text, are one document."""
    path = Path(os.path.expanduser(data))
    if not path.is_file():
        raise FileNotFoundError(f"data={data!r}: no such file; give {_FORM}")
    rows = json_lines(path, ())
    require(bool(rows), "data", data, f"it has no line: give {_FORM}")
    found: dict[str, _Document] = {}
    for number, row in enumerate(rows, start=1):
        where = f"{data}, row {number}"
        text, asked = _text(row, path.parent, where), _questions(row, where)
        last = next(reversed(found.values()), None)
        new = f"{len(found):03d}" if last is None or last.text != text else last.name
        name = _id(row["id"], where) if "id" in row else new
        if name in found:
            remedy = f"the id {name!r} is that of another document: give each its own"
            require(found[name].text == text, "data", where, remedy)
            found[name] = found[name]._replace(questions=found[name].questions + asked)
            continue
        found[name] = _Document(name, text, asked)
    # Cut only now: questions of the first documents may stand in the file's last lines.
    yield from itertools.islice(found.values(), count or None)


def _id(given: Any, where: str) -> str:
    """A document's id as text, from the text or whole number that its line gives; refuses other values."""
    fits = _is_text(given) or (isinstance(given, int) and not isinstance(given, bool))
    require(
        fits, "data", where, f'its "id" is {shortened(repr(given))}: give a text or a whole number'
    )
    return str(given)


def _is_text(given: Any) -> bool:
    """True if a value is a str of more than whitespace and without lone surrogates, which no tokenizer encodes."""
    return isinstance(given, str) and bool(given.strip()) and not _HALF.search(given)


def _text(row: Mapping[str, Any], folder: Path, where: str) -> str:
    """Text of a line's document: its "document" or "context", or the content of the "file" it names; refuses others."""
    keys = [key for key in ("document", "context", "file") if key in row]
    require(len(keys) == 1, "data", where, f'it needs one of "document" and "file": give {_FORM}')
    given = row[keys[0]]
    require(
        _is_text(given), "data", where, f'its "{keys[0]}" is {shortened(repr(given))}: give a text'
    )
    if keys[0] != "file":
        return given
    path = folder / given
    if not path.is_file():
        raise FileNotFoundError(f"data={where!r}: no file {given!r} beside it")
    text = text_of_file(path)
    require(bool(text.strip()), "data", where, f"its file {given!r} is empty")
    return text


def _questions(row: Mapping[str, Any], where: str) -> tuple[_Asked, ...]:
    """Tuple of a line's questions: its list "questions", or the single "question" beside its "answer"."""
    given = row.get("questions", [row] if "question" in row else None)
    remedy = f'it needs "questions", a list of at least one: give {_FORM}'
    require(isinstance(given, list) and bool(given), "data", where, remedy)
    group = row.get("group", "questions")
    return tuple(
        _asked(each, group, f"{where}, question {number}")
        for number, each in enumerate(given, start=1)
    )


def _asked(given: Any, group: Any, where: str) -> _Asked:
    """Question (`_Asked`) of the file, parsed and checked; its choices, if any, are appended to its text by letter."""
    fits = isinstance(given, dict) and _is_text(given.get("question"))
    require(fits, "data", where, f'it has no text as its "question": give {_FORM}')
    right = given.get("answers", given.get("answer"))
    answers = _texts(right if isinstance(right, list) else [right], "answers", where)
    group = given.get("group", group)
    require(
        isinstance(group, str) and bool(group),
        "data",
        where,
        f'its "group" is {group!r}: give a text',
    )
    if "choices" not in given:
        return _Asked(given["question"], answers, (), group)
    raw = given["choices"]
    choices = _texts(raw if isinstance(raw, list) else [raw], "choices", where)
    fits = 2 <= len(choices) <= len(_LETTERS) and len(set(choices)) == len(choices)
    require(
        fits,
        "data",
        where,
        f'its "choices" are {len(choices)}: give 2 to {len(_LETTERS)}, all different',
    )
    letters = dict(zip(_LETTERS, choices, strict=False))
    meant = tuple(each if each in choices else letters.get(each, each) for each in answers)
    fits = len(meant) == 1 and meant[0] in choices
    require(
        fits,
        "data",
        where,
        f'its "answer" is {", ".join(answers)}: give one of the choices, or its letter',
    )
    listed = "\n".join(f"{letter}. {text}" for letter, text in letters.items())
    return _Asked(f"{given['question']}\n{listed}\nAnswer with the letter.", meant, choices, group)


def _texts(given: Sequence[Any], name: str, where: str) -> tuple[str, ...]:
    """Tuple of texts from a list of texts and numbers, made texts; refuses other values and empty lists or texts."""
    numbers = [
        str(each) if type(each) in (int, float) and math.isfinite(each) else each for each in given
    ]
    fits = bool(numbers) and all(map(_is_text, numbers))
    require(fits, "data", where, f'its "{name}" are {shortened(repr(given))}: give texts')
    return tuple(numbers)

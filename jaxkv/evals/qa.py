"""The task `qa`: questions on your own documents, from a file of JSON lines, scored against their right answers."""

import re
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.evals import metrics
from jaxkv.evals.question_tasks import QuestionTask, encode_sample
from jaxkv.evals.task import TaskSample, task
from jaxkv.evals.texts import read_json_lines, read_utf8_file
from jaxkv.loading import LanguageModel

JUDGES: dict[str, Callable[[str, str], float]] = {
    "contains": metrics.contains_answer,
    "exact": metrics.exact_match,
    "f1": metrics.answer_f1,
    "rouge-l": metrics.rouge_l,
}
_FORM = 'lines such as {"document": "...", "questions": [{"question": "...", "answer": "..."}]}'


@task("qa")
@frozen_dataclass
class DocumentQuestionsTask(QuestionTask):
    """Task: questions on your own documents, each answer scored against the right ones in the file.

    A line of the file is a document: "document" with its text, or "file" with the path of a text relative to the file,
    and its "questions". Each has a "question" and an "answer", or several right "answers", or "choices" and the
    "answer" among them. A line may also have one "question" and "answer" itself. "id" names a document, "group" on a
    line or question the row of the table by group. A question-agnostic run compresses each document once for all of
    its questions in a batch.

    Attributes:
        data: file of JSON lines.
        judge: score of an answer: "contains" (1 if a right answer occurs in it), "exact" (1 if its words are those of
            a right answer), "f1" (of common words) or "rouge-l"; questions with choices score 1 for the right choice.
        count: number of documents, from the first on; 0 for all.
        prompt: prompt with {document} and {question} for their texts.
        prefix: first words of the answer, which end the prompt.
        new_tokens: maximum tokens of an answer.
    """

    data: str
    judge: str = "contains"
    count: int = 0
    prompt: str = "{document}\n\n{question}"
    prefix: str = ""
    new_tokens: int = 32

    def __post_init__(self):
        super().__post_init__()
        require(
            self.judge in JUDGES, "judge", self.judge, f"unknown: use one of {', '.join(JUDGES)}"
        )
        self.require_at_least(0, "count")
        self.require_at_least(1, "new_tokens")
        fields = re.findall(r"\{document\}|\{question\}", self.prompt)
        remedy = "incomplete: use {document}, and {question} after it, once each"
        require(fields == ["{document}", "{question}"], "prompt", self.prompt, remedy)

    def samples(self, params: LanguageModel) -> Sequence[TaskSample]:
        """Make a sample per question of the first `count` documents (0: all); ValueError if one exceeds positions."""
        before, between, after = re.split(r"\{document\}|\{question\}", self.prompt)
        made = []
        most = params.config.max_positions
        for name, text, questions in _read_documents(self.data, self.count):
            for number, asked in enumerate(questions):
                tags = {"document": name, **({"choices": asked.choices} if asked.choices else {})}
                sample = TaskSample(
                    id=f"{name}-{number}",
                    group=asked.group,
                    context=before + text,
                    question=between + asked.text + after,
                    answers=asked.answers,
                    new_tokens=self.new_tokens,
                    prefix=self.prefix,
                    tags=tags,
                )
                length = sum(map(len, encode_sample(params.tokenizer, sample))) + self.new_tokens
                remedy = f"it has {length} tokens with its answer, but the model {most} positions: shorten it"
                require(length <= most, "data", sample.id, remedy)
                made.append(sample)
        return made

    def score(self, sample: TaskSample, prediction: str) -> float:
        """Score in [0, 1] of a prediction: the judge's highest over the answers; with choices, 1 for the right one."""
        choices = sample.tags.get("choices", ())
        if choices:
            return metrics.score_choice(prediction, choices, choices.index(sample.answers[0]))
        return max(JUDGES[self.judge](prediction, answer) for answer in sample.answers)


class _ParsedQuestion(NamedTuple):
    """One question of a document in the file: text, right answers, choices (empty for a free answer), and group."""

    text: str
    answers: tuple[str, ...]
    choices: tuple[str, ...]
    group: str


def _read_documents(data: str, count: int) -> list[tuple[str, str, list[_ParsedQuestion]]]:
    """List (name, text, list of `_ParsedQuestion`) of the first `count` documents (0: all) of a JSON lines file."""
    path = Path(data).expanduser()
    found = []
    for number, row in enumerate(read_json_lines(path, (), count)):
        where = f"{data}, row {number + 1}"
        given = row.get("questions", [row])
        group = row.get("group", "questions")
        fits = isinstance(given, list) and bool(given) and all(isinstance(x, dict) for x in given)
        require(fits, "data", where, f'it has no list of "questions": use {_FORM}')
        questions = [_parse_question({"group": group, **each}, where) for each in given]
        name = str(row.get("id", f"{number:03d}"))
        remedy = f'it needs one of "document" and "file": use {_FORM}'
        require(("document" in row) != ("file" in row), "data", where, remedy)
        given = row["document"] if "document" in row else read_utf8_file(path.parent / row["file"])
        (text,) = _parse_texts(given, "document", where)
        found.append((name, text, questions))
    return found


def _parse_question(given: Mapping[str, Any], where: str) -> _ParsedQuestion:
    """Convert a question to a `_ParsedQuestion`; choices are added to its text, a letter becomes the choice meant."""
    (text,) = _parse_texts(given.get("question"), "question", where)
    (group,) = _parse_texts(given["group"], "group", where)
    answers = _parse_texts(given.get("answers", given.get("answer")), "answers", where)
    if "choices" not in given:
        return _ParsedQuestion(text, answers, (), group)
    choices = _parse_texts(given["choices"], "choices", where)
    letters = dict(zip(string.ascii_uppercase, choices, strict=False))
    meant = answers[0] if answers[0] in choices else letters.get(answers[0])
    fits = 2 <= len({*choices}) == len(choices) == len(letters)
    fits = fits and len(answers) == 1 and meant is not None
    remedy = 'invalid: use 2 to 26 different "choices", and as "answer" one of them, or its letter'
    require(fits, "data", where, remedy)
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in letters.items())
    return _ParsedQuestion(
        f"{text}\n{listed}\nAnswer with the letter.", (str(meant),), choices, group
    )


def _parse_texts(given: Any, name: str, where: str) -> tuple[str, ...]:
    """Return a text, or a list of texts, as a tuple, with numbers as texts; ValueError for other or empty values."""
    several = given if isinstance(given, list) else [given]
    texts = [str(each) if type(each) in (int, float) else each for each in several]
    fits = all(isinstance(each, str) and each.strip() for each in texts)
    require(bool(texts) and fits, "data", where, f'its "{name}" is {given!r:.60}: use {_FORM}')
    return tuple(texts)

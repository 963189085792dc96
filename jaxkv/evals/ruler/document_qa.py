"""RULER's question answering: documents with the answer among other documents of the same data set."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from numpy.random import Generator

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import build_value_error, require
from jaxkv.evals.ruler.recipe import PromptRecipe, RulerPrompt
from jaxkv.evals.texts import read_utf8_file

# RULER's, scripts/data/synthetic/{qa,constants}.py.
_ORDER = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
_OPENING = f"{_ORDER}\n\nThe following are given documents.\n\n"
_QUESTION = f"\n\n{_ORDER}\n\nQuestion: {{asked}}"
_PREFIX = " Answer:"
# RULER's file names, and the URLs of the files.
FILES = {
    "qa_1": ("squad.json", "https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json"),
    "qa_2": (
        "hotpotqa.json",
        "http://curtis.ml.cmu.edu/datasets/hotpot/hotpot_dev_distractor_v1.json",
    ),
}


class DocumentQuestion(NamedTuple):
    """One question with its right answers, and indices of its own documents and of others from the same article.

    Attributes:
        text: the question.
        answers: right answers, any of which counts.
        context: indices of the question's documents; in HotpotQA, with the distractors.
        near: indices of documents of the same article, which are used before all others.
    """

    text: str
    answers: tuple[str, ...]
    context: tuple[int, ...]
    near: tuple[int, ...] = ()


class QuestionDataSet(NamedTuple):
    """Questions of a data set in the order of the file, and its distinct documents, sorted."""

    questions: tuple[DocumentQuestion, ...]
    documents: tuple[str, ...]


@frozen_dataclass
class DocumentQuestionRecipe(PromptRecipe):
    """Recipe of RULER's question answering over a data set's documents; haystack sizes are numbers of documents."""

    data: QuestionDataSet

    @property
    def min_haystack_size(self) -> int:
        """Smallest number of documents in a prompt: the largest number that a question needs."""
        return max(len(each.context) for each in self.data.questions)

    def make_prompt(self, size: int, rng: Generator, index: int = 0) -> RulerPrompt:
        """Make a `RulerPrompt`: the file's question `index` (ValueError beyond the last), `size` shuffled documents."""
        have = len(self.data.questions)
        require(
            index < have,
            "count",
            index + 1,
            f"the file has only {have} questions: use at most that many",
        )
        asked = self.data.questions[index]
        return self.render_prompt(asked, self.sample_document_indices(asked, size, rng))

    def sample_document_indices(
        self, asked: DocumentQuestion, size: int, rng: Generator
    ) -> tuple[int, ...]:
        """Sample `size` shuffled document indices: the question's, its article's, then others; repeats if too few."""
        have = len(self.data.documents)
        more = size - len(asked.context)
        if size >= have:
            chosen = [each % have for each in range(size)]
        elif more <= len(asked.near):
            chosen = [*asked.context, *_sample_indices(asked.near, more, rng)]
        else:
            taken = {*asked.context, *asked.near}
            others = [each for each in range(have) if each not in taken]
            chosen = [
                *asked.context,
                *asked.near,
                *_sample_indices(others, more - len(asked.near), rng),
            ]
        return tuple(_sample_indices(chosen, len(chosen), rng))

    def render_prompt(self, asked: DocumentQuestion, order: Sequence[int]) -> RulerPrompt:
        """Render a question as a `RulerPrompt`, with the documents of these indices in this order."""
        texts = [
            f"Document {at}:\n{self.data.documents[each]}" for at, each in enumerate(order, start=1)
        ]
        stand = [at for at, each in enumerate(order) if each in asked.context]
        return RulerPrompt(
            context=_OPENING + "\n\n".join(texts),
            question=_QUESTION.format(asked=asked.text),
            prefix=_PREFIX,
            answers=asked.answers,
            target=f" {asked.answers[0]}",
            depth=sum(stand) / len(stand) / len(order),
        )


def load_data_set(folder: str | None, name: str) -> QuestionDataSet:
    """Load the `QuestionDataSet` of "qa_1" (SQuAD 2.0) or "qa_2" (HotpotQA) from a JSON file in `folder`.

    Raises FileNotFoundError for a missing file, with its URL, and ValueError for another format.
    """
    file, address = FILES[name]
    path = Path(folder or ".").expanduser() / file
    if folder is None or not path.is_file():
        raise FileNotFoundError(
            f"data={folder!r}: {name} needs a file of questions: download {address} there as {file}"
        )
    try:
        content = json.loads(read_utf8_file(path))
        return _parse_squad(content) if name == "qa_1" else _parse_hotpot(content)
    except (KeyError, TypeError, ValueError):
        remedy = f"not in the format of {address}: download it again"
        raise build_value_error("data", str(path), remedy) from None


def _parse_squad(content: dict[str, Any]) -> QuestionDataSet:
    """Build the `QuestionDataSet` of answerable questions in SQuAD 2.0's parsed JSON; documents are paragraphs."""
    articles = [[part["context"] for part in article["paragraphs"]] for article in content["data"]]
    documents = sorted({text for texts in articles for text in texts})
    places = {text: at for at, text in enumerate(documents)}
    questions = []
    for article, texts in zip(content["data"], articles, strict=True):
        for part in article["paragraphs"]:
            mine = places[part["context"]]
            near = tuple(places[text] for text in texts if places[text] != mine)
            for asked in part["qas"]:
                if not asked["is_impossible"]:
                    answers = tuple(each["text"] for each in asked["answers"])
                    questions.append(DocumentQuestion(asked["question"], answers, (mine,), near))
    return QuestionDataSet(tuple(questions), tuple(documents))


def _parse_hotpot(content: list[dict[str, Any]]) -> QuestionDataSet:
    """Build the `QuestionDataSet` of HotpotQA's parsed JSON; documents are articles with their titles."""

    def document(title: str, lines: list[str]) -> str:
        return f"{title}\n{''.join(lines)}"

    documents = sorted({document(*each) for case in content for each in case["context"]})
    places = {text: at for at, text in enumerate(documents)}
    questions = [
        DocumentQuestion(
            case["question"],
            (case["answer"],),
            tuple(places[document(*each)] for each in case["context"]),
        )
        for case in content
    ]
    return QuestionDataSet(tuple(questions), tuple(documents))


def _sample_indices(places: Sequence[int], count: int, rng: Generator) -> list[int]:
    """Sample `count` of the given indices without replacement, in random order."""
    return [places[each] for each in rng.permutation(len(places))[:count].tolist()]

"""The task `needle`: a needle in a haystack over lengths and depths, the papers' heat map."""

import bisect
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv._errors import require
from jaxkv.evals.asking import QuestionTask
from jaxkv.evals.ruler.metrics import string_match_all
from jaxkv.evals.ruler.niah import Needles
from jaxkv.evals.ruler.recipe import Cell, Prompt, Recipe, fit
from jaxkv.evals.ruler.task import as_sample, check_grid, counter, lengths_for, read_wording
from jaxkv.evals.ruler.wording import Official, Wording, sentences
from jaxkv.evals.task import Sample, task
from jaxkv.loading import LanguageModel

# Kamradt's, in the template of PyramidKV's authors (run_needle_in_haystack.py) but for its marks of a chat. Theirs
# gives no first words, and models of 100M parameters then answer nothing: the prefix gives them, as RULER does.
NEEDLE = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
QUESTION = "What is the best thing to do in San Francisco?"
PREFIX = "The best thing to do in San Francisco is"
ANSWER = "eat a sandwich and sit in Dolores Park on a sunny day."
_OPENING = "This is a very long story book: <book> "
_ASKED = " </book>.\n Based on the content of the book, Question: {question}\n"
_PREFIX = "Answer:"
_LENGTHS = (512, 1024, 2048, 4096)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Story(Recipe):
    """Recipe (it makes prompts) for one sentence, the needle, hidden in a text; haystack sizes are numbers of words.

    Attributes:
        wording: the text.
        depth: depth of the needle in the text, in [0, 1]; it stands at the last end of a sentence before it.
        needle: the sentence.
        question: the question about it.
        prefix: the answer's first words.
        answer: the words after the prefix.
    """

    wording: Official
    depth: float
    needle: str
    question: str
    prefix: str
    answer: str

    def make(self, size: int, rng: np.random.Generator, index: int = 0) -> Prompt:
        """Makes a `Prompt`: the needle at `depth` of `size` words, from the text's start (`index` 0) or at random."""
        start = int(rng.integers(2**31)) if index else 0
        text = sentences(self.wording.passage(size, start))
        ends = [0, *itertools.accumulate(len(each) + 1 for each in text)]
        place = bisect.bisect_right(ends, self.depth * ends[-1]) - 1
        return Prompt(
            context=_OPENING + " ".join([*text[:place], self.needle, *text[place:]]),
            question=_ASKED.format(question=self.question),
            # Without a space at its end, which tokenizers write before the next word.
            prefix=f"{_PREFIX} {self.prefix}".rstrip(),
            answers=(self.answer,),
            target=f" {self.answer}",
            depth=self.depth,
        )


@task("needle")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Needle(QuestionTask):
    """Task: find one sentence in a long text, over lengths and depths, as in the papers' needle heat maps.

    The official wording is Kamradt's sentence and question in the template of PyramidKV's authors; a score is the share
    of the answer's distinct words in the prediction, as their maps show: common words such as "a" and "in" give
    some wrong answers a third. The small wording is RULER's needle among sentences made of a few hundred words, and
    its number has to occur in the prediction. Lengths count template, question and answer.

    Attributes:
        lengths: tokens of prompts, answer and chat template included; by default those of 512, 1024, 2048 and 4096
            that are within the model's positions.
        depths: places of the needle, from 0, the beginning, to 1, the end.
        count: samples for each length and depth; all but the first take the text from a random word on.
        wording: "official", or "small" for models that know a few hundred words.
        needle: the sentence; another one has its own question, prefix and answer.
        question: the question about it.
        prefix: the answer's first words, which end the prompt; "" for none.
        answer: the words after the prefix.
        haystack: a text file that haystacks of the official wording are cut from, instead of a novel of 1851.
        new_tokens: tokens of an answer in the official wording; only its first line is scored.
        seed: seed of all random choices.

    References:
        Kamradt 2023, "Needle In A Haystack - Pressure Testing LLMs"; PyramidKV, section 5.4 and appendix P.
    """

    lengths: tuple[int, ...] | None = None
    depths: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    count: int = 1
    wording: str = "official"
    needle: str = NEEDLE
    question: str = QUESTION
    prefix: str = PREFIX
    answer: str = ANSWER
    haystack: str | None = None
    new_tokens: int = 30
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_grid(self)
        require(bool(self.depths), "depths", self.depths, "name at least one, from 0 to 1")
        require(
            all(0 <= each <= 1 for each in self.depths),
            "depths",
            self.depths,
            "give shares from 0 to 1",
        )
        require(len(set(self.depths)) == len(self.depths), "depths", self.depths, "name each once")
        require(self.new_tokens >= 1, "new_tokens", self.new_tokens, "draw at least 1")
        for name in ("needle", "question", "prefix", "answer"):
            value = getattr(self, name)
            require(name == "prefix" or bool(value.strip()), name, value, "say it in words")
            default = type(self).__dataclass_fields__[name].default
            mine = self.wording == "official" or value == default
            require(mine, name, value, "the small wording has its own: take wording='official'")
            its = self.needle == NEEDLE or value != default
            require(
                its,
                name,
                value,
                f"it belongs to another needle than {self.needle!r}: give that one's",
            )

    @classmethod
    def unused(cls, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Tuple of the names of settings without effect: the official wording's if `wording` is small, else none."""
        official = ("needle", "question", "prefix", "answer", "haystack", "new_tokens")
        return () if settings.get("wording") == "official" else official

    def samples(self, params: LanguageModel) -> Sequence[Sample]:
        """Makes a list of needle-in-a-haystack samples, `count` for each prompt length and needle depth."""
        lengths = lengths_for(params, self.lengths, usual=_LENGTHS)
        wording, count, made = read_wording(self), counter(params), []
        for length in lengths:
            size = fit(self._recipe(wording, 0.5), length, count)
            for at, depth in enumerate(self.depths):
                cell = Cell(self._recipe(wording, depth), length, count, size)
                rng = np.random.default_rng([self.seed, length, at])
                for index in range(self.count):
                    name, tags = (
                        f"{length}-{depth:g}-{index:04d}",
                        {"length": length, "depth": depth},
                    )
                    made.append(
                        as_sample(
                            name, "needle", cell.make(rng, index), cell.recipe.new_tokens, **tags
                        )
                    )
        return made

    def score(self, sample: Sample, prediction: str) -> float:
        """Share in [0, 1] of the answer's words in the first line; small wording: 1 if the number occurs, else 0."""
        if self.wording == "small":
            return string_match_all(prediction, sample.answers)
        wanted, line = set(sample.answers[0].lower().split()), prediction.strip().partition("\n")[0]
        return len(wanted & set(line.lower().split())) / len(wanted)

    def _recipe(self, wording: Wording, depth: float) -> Recipe:
        """Recipe (it makes prompts) with the needle at `depth`, 0 to 1: `Story`, or `Needles` for the small wording."""
        if not isinstance(wording, Official):
            return Needles(wording=wording, new_tokens=8, haystack="essay", depth=depth)
        return Story(
            wording=wording,
            new_tokens=self.new_tokens,
            depth=depth,
            needle=self.needle,
            question=self.question,
            prefix=self.prefix,
            answer=self.answer,
        )

"""The task `needle`: a needle in a haystack over lengths and depths, for the papers' heat maps."""

import bisect
import itertools
from collections.abc import Sequence

import numpy as np

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.evals.ruler.niah import NeedlesRecipe
from jaxkv.evals.ruler.recipe import PromptFactory, PromptRecipe, RulerPrompt, fit_haystack_size
from jaxkv.evals.ruler.ruler_task import SyntheticTask, make_token_counter, string_match_all
from jaxkv.evals.ruler.wording import RulerWording, split_sentences
from jaxkv.evals.task import TaskSample, task
from jaxkv.loading import LanguageModel

# Kamradt's, in the template of PyramidKV's authors (run_needle_in_haystack.py) without its chat markers. The prefix is
# an addition, as in RULER: without first words of the answer, models of 100M parameters answer nothing.
NEEDLE = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
PREFIX = "Answer: The best thing to do in San Francisco is"
ANSWER = "eat a sandwich and sit in Dolores Park on a sunny day."
_OPENING = "This is a very long story book: <book> "
_ASKED = (
    " </book>.\n Based on the content of the book, "
    "Question: What is the best thing to do in San Francisco?\n"
)


@frozen_dataclass
class StoryNeedleRecipe(PromptRecipe):
    """Recipe of prompts that hide one sentence, the needle, in a text; haystack sizes are numbers of words.

    Attributes:
        depth: depth of the needle in the text, in [0, 1]; it is placed at the last end of a sentence before it.
    """

    depth: float

    def make_prompt(self, size: int, rng: np.random.Generator, index: int = 0) -> RulerPrompt:
        """Make a `RulerPrompt`: needle near `depth` in `size` essay words, from word 0 (`index` 0) or a random one."""
        start = int(rng.integers(2**31)) if index else 0
        text = split_sentences(self.wording.get_essay_passage(size, start))
        ends = [0, *itertools.accumulate(len(each) + 1 for each in text)]
        place = bisect.bisect_right(ends, self.depth * ends[-1]) - 1
        return RulerPrompt(
            context=_OPENING + " ".join([*text[:place], NEEDLE, *text[place:]]),
            question=_ASKED,
            prefix=PREFIX,
            answers=(ANSWER,),
            target=f" {ANSWER}",
            depth=self.depth,
        )


@task("needle")
@frozen_dataclass
class Needle(SyntheticTask):
    """Task: find one sentence in a long text, over lengths and depths, as in the papers' needle heat maps.

    The official wording is Kamradt's sentence and question in the template of PyramidKV's authors. As in their maps, a
    score is the share of the answer's distinct words in the prediction: common words such as "a" and "in" give some
    wrong answers a third. The small wording is RULER's needle among sentences of a few hundred words, and its number
    has to occur in the prediction. Lengths include template, question and answer.

    Attributes:
        lengths: tokens of prompts, with answer and chat template; by default those of 512, 1024, 2048 and 4096
            within the model's positions.
        depths: depths of the needle, from 0, the beginning, to 1, the end.
        count: samples per length and depth; all but the first start the text at a random word.
        wording: "official", or "small" for models that know a few hundred words.
        haystack: text file for the haystacks of the official wording (default: a novel of 1851).
        new_tokens: maximum tokens of an answer in the official wording; only its first line is scored.
        seed: seed of all random choices.

    References:
        Kamradt 2023, "Needle In A Haystack - Pressure Testing LLMs"; PyramidKV, section 5.4 and appendix P.
    """

    usual = (512, 1024, 2048, 4096)

    depths: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    count: int = 1
    new_tokens: int = 30

    def __post_init__(self):
        super().__post_init__()
        fits = all(0 <= each <= 1 for each in self.depths)
        require(fits, "depths", self.depths, "out of range: use shares from 0 to 1")
        self.require_at_least(1, "new_tokens")

    def samples(self, params: LanguageModel) -> Sequence[TaskSample]:
        """Make the list of needle samples for a model: `count` per prompt length, in its tokens, and needle depth."""
        lengths = self.resolve_prompt_lengths(params)
        wording = self.make_wording()
        count = make_token_counter(params)
        made = list[TaskSample]()
        for length in lengths:
            size = fit_haystack_size(self._make_recipe(wording, 0.5), length, count)
            for at, depth in enumerate(self.depths):
                cell = PromptFactory(self._make_recipe(wording, depth), length, count, size)
                name = f"{length}-{depth:g}"
                tags = {"length": length, "depth": depth}
                made += self.make_samples(cell, name, "needle", [length, at], **tags)
        return made

    def score(self, sample: TaskSample, prediction: str) -> float:
        """Share of the answer's distinct words in a prediction's first line; small wording: 1 if the number occurs."""
        if self.wording == "small":
            return string_match_all(prediction, sample.answers)
        wanted = set(sample.answers[0].lower().split())
        line = prediction.strip().partition("\n")[0]
        return len(wanted & set(line.lower().split())) / len(wanted)

    def _make_recipe(self, wording: RulerWording, depth: float) -> PromptRecipe:
        """Return the recipe for a needle at `depth`, 0 to 1: `StoryNeedleRecipe`; small wording: `NeedlesRecipe`."""
        if wording.name == "small":
            return NeedlesRecipe(wording=wording, new_tokens=8, haystack="essay", depth=depth)
        return StoryNeedleRecipe(wording=wording, new_tokens=self.new_tokens, depth=depth)

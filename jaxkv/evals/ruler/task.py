"""The task `ruler`, with functions that the task `needle` shares: lengths, wordings, samples of prompts."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxkv._errors import require
from jaxkv.evals.asking import QuestionTask, ids_of
from jaxkv.evals.ruler.metrics import string_match_all, string_match_part
from jaxkv.evals.ruler.qa import FILES
from jaxkv.evals.ruler.recipe import Cell, Counter, Prompt
from jaxkv.evals.ruler.recipes import MADE, NAMES, recipe_of
from jaxkv.evals.ruler.wording import Wording, wording_of
from jaxkv.evals.task import Sample, task
from jaxkv.evals.texts import text_of_file
from jaxkv.loading import LanguageModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class MadeTask(QuestionTask):
    """Base of `Ruler` and `Needle`, whose prompts are made at lengths in the model's tokens.

    Attributes:
        usual: lengths by default, those of them within the model's positions.
        lengths: tokens of prompts, answer and chat template included.
        count: samples of each kind and length.
        wording: "official" or "small".
        haystack: a text file that haystacks of the official wording are cut from.
        seed: seed of all random choices.
    """

    usual: ClassVar[tuple[int, ...]]

    lengths: tuple[int, ...] | None = None
    count: int = 20
    wording: str = "official"
    haystack: str | None = None
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        require(self.count >= 1, "count", self.count, "make at least 1 sample")
        lengths = (1,) if self.lengths is None else self.lengths
        fits = min(lengths, default=0) >= 1 and len(set(lengths)) == len(lengths)
        require(fits, "lengths", lengths, "name at least one, in tokens, each once")
        require(self.seed >= 0, "seed", self.seed, "give 0 or more")
        known = self.wording in ("official", "small")
        require(known, "wording", self.wording, "take 'official' or 'small'")
        mine = self.haystack is None or self.wording == "official"
        remedy = "the small wording makes its own: take wording='official'"
        require(mine, "haystack", self.haystack, remedy)

    def lengths_for(self, params: LanguageModel) -> tuple[int, ...]:
        """Lengths of the prompts: those given, else the `usual` ones, or the model's positions if all are longer."""
        most = params.config.max_positions
        if self.lengths is None:
            return tuple(each for each in self.usual if each <= most) or (most,)
        longest = max(self.lengths)
        require(longest <= most, "lengths", longest, f"the model was made for {most} tokens")
        return self.lengths

    def words(self) -> Wording:
        """`Wording`, which draws prompts' random texts, with the text of the haystack's file, if any."""
        if self.haystack is None:
            return wording_of(self.wording)
        text = text_of_file(Path(self.haystack).expanduser(), "haystack")
        require(bool(text.split()), "haystack", self.haystack, "it holds no word: give a text")
        return wording_of(self.wording, text)


@task("ruler")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ruler(MadeTask):
    """RULER's 13 tasks: needles in a haystack, variable tracking, words to count, questions over documents.

    Made here with RULER's templates, counts and metrics, at lengths in the model's tokens. `niah_single_*` have 1
    needle, `niah_multikey_*` others with another key (4 in all, or a haystack of needles alone), `niah_multivalue` has
    4 values of one key, `niah_multiquery` asks for 4 keys; `vt` is a chain of 5 variables, `cwe` a list of words of
    which 10 occur 10 times as often (6 below 4096 tokens), `fwe` words of a zeta distribution; `qa_1` is SQuAD 2.0
    and `qa_2` HotpotQA, from files.

    Attributes:
        tasks: some of the 13; by default all but qa_1 and qa_2, which need files.
        lengths: tokens of prompts, answer and chat template included; by default 4096, or the model's positions if
            there are fewer.
        count: samples for each task and length; RULER takes 500.
        wording: "official", or "small" for models that know a few hundred words.
        haystack: a text file that haystacks of the official wording are cut from, instead of a novel of 1851.
        data: the folder with squad.json and hotpotqa.json, for qa_1 and qa_2.
        seed: seed of all random choices.

    References:
        Hsieh et al. 2024, "RULER: What's the Real Context Size of Your Long-Context Language Models?"
    """

    usual = (4096,)

    tasks: tuple[str, ...] = MADE
    data: str | None = None

    def __post_init__(self):
        super().__post_init__()
        for name in self.tasks:
            require(name in NAMES, "tasks", name, f"take some of {', '.join(NAMES)}")
        distinct = len(set(self.tasks)) == len(self.tasks) > 0
        require(distinct, "tasks", self.tasks, "name at least one, each once")
        read = self.data is None or not set(self.tasks).isdisjoint(FILES)
        remedy = f"only {' and '.join(FILES)} read files: name them among the tasks, or none"
        require(read, "data", self.data, remedy)

    def samples(self, params: LanguageModel) -> Sequence[Sample]:
        """Makes a list of samples, `count` for each of the chosen RULER tasks at each prompt length."""
        lengths = self.lengths_for(params)
        wording, count, made = self.words(), counter(params), []
        for name in self.tasks:
            for length in lengths:
                recipe = recipe_of(
                    name, wording=wording, length=length, count=count, data=self.data
                )
                cell = Cell.of(recipe, length, count)
                rng = np.random.default_rng([self.seed, NAMES.index(name), length])
                for index in range(self.count):
                    label, prompt = f"{name}-{length}-{index:04d}", cell.make(rng, index)
                    made.append(as_sample(label, name, prompt, recipe.new_tokens, length=length))
        return made

    def score(self, sample: Sample, prediction: str) -> float:
        """Share in [0, 1] of the right answers that occur in the prediction; qa_1 and qa_2: 1 if any occurs, else 0."""
        metric = string_match_part if sample.group in FILES else string_match_all
        return metric(prediction, sample.answers)


def counter(params: LanguageModel) -> Counter:
    """Returns a function that counts the tokens of a `Prompt`, those of the chat template included."""

    def count(prompt: Prompt) -> int:
        return sum(map(len, ids_of(params.text, as_sample("count", "count", prompt, 1))))

    return count


def as_sample(name: str, group: str, prompt: Prompt, new_tokens: int, **tags: Any) -> Sample:
    """Converts a `Prompt` to a `Sample` of this id and group; the prompt's depth is added to the tags."""
    if prompt.depth is not None:
        tags.setdefault("depth", round(prompt.depth, 4))
    return Sample(
        id=name,
        group=group,
        context=prompt.context,
        question=prompt.question,
        answers=prompt.answers,
        new_tokens=new_tokens,
        prefix=prompt.prefix,
        tags=tags,
    )

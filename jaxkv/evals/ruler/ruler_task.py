"""The task `ruler`: its recipes by name, its metrics, and the base class that it shares with the task `needle`."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.evals.question_tasks import QuestionTask, encode_sample
from jaxkv.evals.ruler.chains import VariableTrackingRecipe
from jaxkv.evals.ruler.counted import CommonWordsRecipe, FrequentWordsRecipe
from jaxkv.evals.ruler.document_qa import FILES, DocumentQuestionRecipe, load_data_set
from jaxkv.evals.ruler.niah import NeedlesRecipe
from jaxkv.evals.ruler.recipe import (
    Counter,
    PromptFactory,
    PromptRecipe,
    RulerPrompt,
    fit_haystack_size,
)
from jaxkv.evals.ruler.wording import SMALL_WORDS, RulerWording, select_wording
from jaxkv.evals.task import TaskSample, task
from jaxkv.evals.texts import read_packaged_file, read_utf8_file
from jaxkv.loading import LanguageModel

# Settings of RULER's scripts/synthetic.yaml.
_NIAH: dict[str, dict[str, Any]] = json.loads(read_packaged_file("ruler/data/niah.json"))
# Tasks made from words alone; the others read questions from files.
MADE = (*_NIAH, "vt", "cwe", "fwe")
NAMES = (*MADE, *FILES)
# RULER's: tokens of a solved example of variable tracking, and the length from which lists are long.
_SHOT_TOKENS = 500
_LONG = 4096
_CONTROL = re.compile(r"[\x00-\x1f]")


@frozen_dataclass
class SyntheticTask(QuestionTask):
    """Base class of `Ruler` and `Needle`, whose synthetic prompts are made at given lengths in the model's tokens.

    Attributes:
        usual: default lengths, of which those within the model's positions are used.
        lengths: tokens of prompts, with answer and chat template.
        count: samples per kind and length.
        wording: "official" or "small".
        haystack: text file for the haystacks of the official wording.
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
        self.require_at_least(1, "count")
        self.require_at_least(0, "seed")
        known = self.wording in ("official", "small")
        require(known, "wording", self.wording, "unknown: use 'official' or 'small'")
        mine = self.haystack is None or self.wording == "official"
        remedy = "the small wording makes its own haystack: use wording='official'"
        require(mine, "haystack", self.haystack, remedy)

    def resolve_prompt_lengths(self, params: LanguageModel) -> tuple[int, ...]:
        """Return `lengths`, ValueError above the positions; if None, those of `usual` that fit, else the positions."""
        most = params.config.max_positions
        if self.lengths is None:
            return tuple(each for each in self.usual if each <= most) or (most,)
        longest = max(self.lengths, default=0)
        require(
            longest <= most, "lengths", longest, f"the model has {most} positions: use shorter ones"
        )
        return self.lengths

    def make_samples(
        self, cell: PromptFactory, name: str, group: str, seeds: Sequence[int], **tags: Any
    ) -> list[TaskSample]:
        """Make `count` samples of a `PromptFactory` with these tags; random choices depend on `seed` and `seeds`."""
        rng = np.random.default_rng([self.seed, *seeds])
        new = cell.recipe.new_tokens
        return [
            convert_prompt_to_sample(
                f"{name}-{index:04d}", group, cell.make_fitting_prompt(rng, index), new, **tags
            )
            for index in range(self.count)
        ]

    def make_wording(self) -> RulerWording:
        """Return the task's `RulerWording`, the sampler of random texts, with the haystack's file if given."""
        if self.haystack is None:
            return select_wording(self.wording)
        text = read_utf8_file(Path(self.haystack).expanduser(), "haystack")
        require(
            bool(text.split()), "haystack", self.haystack, "the file has no words: use another text"
        )
        return select_wording(self.wording, text)


@task("ruler")
@frozen_dataclass
class Ruler(SyntheticTask):
    """Task: RULER's 13 tasks of needles in a haystack, variable tracking, words to count, questions over documents.

    Templates, counts and metrics are RULER's, and lengths are in the model's tokens. `niah_single_*` have 1 needle.
    `niah_multikey_*` add needles with other keys (4 in all, or a haystack of needles). `niah_multivalue` has 4 values
    of one key, and `niah_multiquery` asks for 4 keys. `vt` is a chain of 5 variables. `cwe` is a list in which 10 words
    occur 10 times as often as others (6 times below 4096 tokens). `fwe` has words of a zeta distribution. `qa_1` is
    SQuAD 2.0 and `qa_2` HotpotQA, from files.

    Attributes:
        tasks: some of the 13 (default: all but qa_1 and qa_2, which need files).
        lengths: tokens of prompts, with answer and chat template (default: 4096, or the model's positions if
            fewer).
        count: samples per task and length; RULER uses 500.
        wording: "official", or "small" for models that know a few hundred words.
        haystack: text file for the haystacks of the official wording (default: a novel of 1851).
        data: folder with squad.json and hotpotqa.json, for qa_1 and qa_2.
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
            require(name in NAMES, "tasks", name, f"unknown: use some of {', '.join(NAMES)}")
        read = self.data is None or not set(self.tasks).isdisjoint(FILES)
        remedy = f"only {' and '.join(FILES)} read files: add them to the tasks, or leave data out"
        require(read, "data", self.data, remedy)

    def samples(self, params: LanguageModel) -> Sequence[TaskSample]:
        """Make the list of samples for a model: `count` per selected RULER task and prompt length, in its tokens."""
        lengths = self.resolve_prompt_lengths(params)
        wording = self.make_wording()
        count = make_token_counter(params)
        made = list[TaskSample]()
        for name in self.tasks:
            for length in lengths:
                recipe = make_recipe(
                    name, wording=wording, length=length, count=count, data=self.data
                )
                cell = PromptFactory(
                    recipe, length, count, fit_haystack_size(recipe, length, count)
                )
                seeds = [NAMES.index(name), length]
                made += self.make_samples(cell, f"{name}-{length}", name, seeds, length=length)
        return made

    def score(self, sample: TaskSample, prediction: str) -> float:
        """Share in [0, 1] of the right answers that occur in the prediction; qa_1 and qa_2: 1 if any occurs, else 0."""
        metric = string_match_part if sample.group in FILES else string_match_all
        return metric(prediction, sample.answers)


def make_token_counter(params: LanguageModel) -> Counter:
    """Return a function that counts a `RulerPrompt`'s tokens with the model's tokenizer and chat template."""

    def count(prompt: RulerPrompt) -> int:
        return sum(
            map(
                len,
                encode_sample(
                    params.tokenizer, convert_prompt_to_sample("count", "count", prompt, 1)
                ),
            )
        )

    return count


def convert_prompt_to_sample(
    name: str, group: str, prompt: RulerPrompt, new_tokens: int, **tags: Any
) -> TaskSample:
    """Convert a `RulerPrompt` to a `TaskSample` with this id and group; tags without a depth get the prompt's."""
    if prompt.depth is not None:
        tags.setdefault("depth", round(prompt.depth, 4))
    return TaskSample(
        id=name,
        group=group,
        context=prompt.context,
        question=prompt.question,
        answers=prompt.answers,
        new_tokens=new_tokens,
        prefix=prompt.prefix,
        tags=tags,
    )


def make_recipe(
    name: str, *, wording: RulerWording, length: int, count: Counter, data: str | None = None
) -> PromptRecipe:
    """Return the `PromptRecipe` of the RULER task `name`, for `length` tokens of prompt and answer together.

    `data` is the folder of the files of qa_1 and qa_2; a missing file raises FileNotFoundError. Unknown tasks, and
    tasks for which the small wording has no words, raise ValueError.
    """
    small = wording.name == "small"
    if name in _NIAH:
        recipe = NeedlesRecipe(wording=wording, new_tokens=128, **_NIAH[name])
        # Digits, followed by a comma and a space or similar, and a mark in front.
        digits = 11 if recipe.value_kind == "uuids" else 6
        few = digits * recipe.values * recipe.queries + 2
        return dataclasses.replace(recipe, new_tokens=few) if small else recipe
    if name == "vt":
        if small:
            return VariableTrackingRecipe(wording=wording, new_tokens=8)
        # With a solved example before each text.
        alone = VariableTrackingRecipe(wording=wording, new_tokens=0)
        shot = fit_haystack_size(alone, min(_SHOT_TOKENS, length), count)
        return VariableTrackingRecipe(wording=wording, new_tokens=30, shot=shot)
    if name == "cwe":
        return _make_common_words_recipe(wording, length)
    if name == "fwe":
        new = 10 if small else 50
        # At least five words, so that the three answers are more frequent than a fourth.
        different = max(5, (length - new) // 50)
        return FrequentWordsRecipe(
            wording=wording,
            new_tokens=new,
            vocabulary=min(different, len(SMALL_WORDS) + 1) if small else different,
        )
    require(not small, "tasks", name, "the small wording has no documents: use the official one")
    return DocumentQuestionRecipe(wording=wording, new_tokens=32, data=load_data_set(data, name))


def _make_common_words_recipe(wording: RulerWording, length: int) -> CommonWordsRecipe:
    """Return a `CommonWordsRecipe`; wording and prompt length choose how often words occur, and the solved example."""
    if wording.name == "small":
        # With so few words, they have to occur more often in longer lists.
        often, seldom = (6, 1) if length < 1024 else (12, 2) if length < 2560 else (30, 3)
        return CommonWordsRecipe(wording=wording, new_tokens=34, often=often, seldom=seldom)
    if length < _LONG:
        return CommonWordsRecipe(
            wording=wording, new_tokens=120, often=6, seldom=1, shot=(20, 3, 1)
        )
    return CommonWordsRecipe(wording=wording, new_tokens=120, often=30, seldom=3, shot=(40, 10, 3))


# RULER's metrics of one answer: scripts/eval/synthetic/constants.py, scripts/eval/evaluate.py.


def clean_prediction(prediction: str) -> str:
    """Strip whitespace at both ends of a prediction, and replace control characters by line feeds."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """Share in [0, 1] of the references that occur in the prediction, ignoring case and also inside a word."""
    text = clean_prediction(prediction).lower()
    return sum(each.lower() in text for each in references) / len(references)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """Return 1.0 if any of the references occurs in the prediction, ignoring case and also inside a word, else 0.0."""
    text = clean_prediction(prediction).lower()
    return float(any(each.lower() in text for each in references))

"""The task `ruler`: its recipes by name and metrics, and lengths, wordings, samples that the task `needle` shares."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxkv._errors import require
from jaxkv.evals.question_tasks import QuestionTask, ids_of
from jaxkv.evals.ruler.chains import Chains
from jaxkv.evals.ruler.counted import Common, Frequent
from jaxkv.evals.ruler.document_qa import FILES, DocumentQA, read
from jaxkv.evals.ruler.niah import Needles
from jaxkv.evals.ruler.recipe import Counter, Prompt, PromptFactory, Recipe, fit
from jaxkv.evals.ruler.wording import SMALL_WORDS, Wording, wording_of
from jaxkv.evals.task import Sample, task
from jaxkv.evals.texts import shipped, text_of_file
from jaxkv.loading import LanguageModel

# As its scripts/synthetic.yaml configures them.
_NIAH: dict[str, dict[str, Any]] = json.loads(shipped("ruler/data/niah.json"))
# Made from words alone; the others read questions from files.
MADE = (*_NIAH, "vt", "cwe", "fwe")
NAMES = (*MADE, *FILES)
# RULER's: tokens of a solved example of variable tracking, and from where on lists are long.
_SHOT_TOKENS = 500
_LONG = 4096
_CONTROL = re.compile(r"[\x00-\x1f]")


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
        self.require_least(1, "count")
        self.require_least(0, "seed")
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
        longest = max(self.lengths, default=0)
        require(longest <= most, "lengths", longest, f"the model was made for {most} tokens")
        return self.lengths

    def samples_of(
        self, cell: PromptFactory, name: str, group: str, draws: Sequence[int], **tags: Any
    ) -> list[Sample]:
        """List of `count` samples with these tags, their random choices by numbers besides the seed."""
        rng, new = np.random.default_rng([self.seed, *draws]), cell.recipe.new_tokens
        return [
            as_sample(f"{name}-{index:04d}", group, cell.make(rng, index), new, **tags)
            for index in range(self.count)
        ]

    def words(self) -> Wording:
        """`Wording`, which samples prompts' random texts, with the text of the haystack's file, if any."""
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
        read = self.data is None or not set(self.tasks).isdisjoint(FILES)
        remedy = f"only {' and '.join(FILES)} read files: name them among the tasks, or none"
        require(read, "data", self.data, remedy)

    def samples(self, params: LanguageModel) -> Sequence[Sample]:
        """Make a list of samples, `count` for each of the chosen RULER tasks at each prompt length."""
        lengths = self.lengths_for(params)
        wording, count, made = self.words(), counter(params), list[Sample]()
        for name in self.tasks:
            for length in lengths:
                recipe = recipe_of(
                    name, wording=wording, length=length, count=count, data=self.data
                )
                cell = PromptFactory(recipe, length, count, fit(recipe, length, count))
                draws = [NAMES.index(name), length]
                made += self.samples_of(cell, f"{name}-{length}", name, draws, length=length)
        return made

    def score(self, sample: Sample, prediction: str) -> float:
        """Share in [0, 1] of the right answers that occur in the prediction; qa_1 and qa_2: 1 if any occurs, else 0."""
        metric = string_match_part if sample.group in FILES else string_match_all
        return metric(prediction, sample.answers)


def counter(params: LanguageModel) -> Counter:
    """Return a function that counts the tokens of a `Prompt`, those of the chat template included."""

    def count(prompt: Prompt) -> int:
        return sum(map(len, ids_of(params.tokenizer, as_sample("count", "count", prompt, 1))))

    return count


def as_sample(name: str, group: str, prompt: Prompt, new_tokens: int, **tags: Any) -> Sample:
    """Convert a `Prompt` to a `Sample` of this id and group; the prompt's depth is added to the tags."""
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


def recipe_of(
    name: str, *, wording: Wording, length: int, count: Counter, data: str | None = None
) -> Recipe:
    """Recipe of the RULER task `name`, configured for prompts and answers of `length` tokens together.

    `data` is the folder of the files of qa_1 and qa_2; without them it is a FileNotFoundError that names them. Unknown
    tasks, and those that the small wording has no words for, are rejected.
    """
    small = wording.name == "small"
    if name in _NIAH:
        recipe = Needles(wording=wording, new_tokens=128, **_NIAH[name])
        # Digits, with a comma and a space or the like behind them, and a mark in front.
        digits = 11 if recipe.value_kind == "uuids" else 6
        few = digits * recipe.values * recipe.queries + 2
        return dataclasses.replace(recipe, new_tokens=few) if small else recipe
    if name == "vt":
        if small:
            return Chains(wording=wording, new_tokens=8)
        # With a solved example before each text.
        alone = Chains(wording=wording, new_tokens=0)
        shot = fit(alone, min(_SHOT_TOKENS, length), count)
        return Chains(wording=wording, new_tokens=30, shot=shot)
    if name == "cwe":
        return _common(wording, length)
    if name == "fwe":
        new = 10 if small else 50
        # At least a fifth word, so that the answer's three are more frequent than another.
        different = max(5, (length - new) // 50)
        return Frequent(
            wording=wording,
            new_tokens=new,
            vocabulary=min(different, len(SMALL_WORDS) + 1) if small else different,
        )
    require(not small, "tasks", name, "the small wording has no documents: take the official one")
    return DocumentQA(wording=wording, new_tokens=32, data=read(data, name))


def _common(wording: Wording, length: int) -> Common:
    """`Common` recipe of common words extraction, with counts of words for the wording and prompt length."""
    if wording.name == "small":
        # So few words that they have to occur more often as lists grow.
        often, seldom = (6, 1) if length < 1024 else (12, 2) if length < 2560 else (30, 3)
        return Common(wording=wording, new_tokens=34, often=often, seldom=seldom)
    if length < _LONG:
        return Common(wording=wording, new_tokens=120, often=6, seldom=1, shot=(20, 3, 1))
    return Common(wording=wording, new_tokens=120, often=30, seldom=3, shot=(40, 10, 3))


# RULER's metrics of one answer: scripts/eval/synthetic/constants.py, scripts/eval/evaluate.py.


def cleaned(prediction: str) -> str:
    """The prediction without whitespace at its ends, and with control characters replaced by line feeds."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """Share in [0, 1] of the references that occur in the prediction, in any case and also inside a word."""
    text = cleaned(prediction).lower()
    return sum(each.lower() in text for each in references) / len(references)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """1 if any of the references occurs in the prediction, in any case and also inside a word; else 0."""
    text = cleaned(prediction).lower()
    return float(any(each.lower() in text for each in references))

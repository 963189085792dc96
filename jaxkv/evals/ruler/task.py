"""The task `ruler`, with functions that the task `needle` shares: lengths, wordings, samples of prompts."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxkv._errors import require
from jaxkv.evals.asking import QuestionTask, ids_of
from jaxkv.evals.ruler.metrics import string_match_all, string_match_part
from jaxkv.evals.ruler.qa import FILES
from jaxkv.evals.ruler.recipe import Cell, Counter, Prompt
from jaxkv.evals.ruler.recipes import MADE, NAMES, recipe_of
from jaxkv.evals.ruler.wording import Wording, wording_of
from jaxkv.evals.task import Sample, task
from jaxkv.loading import LanguageModel


@task("ruler")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ruler(QuestionTask):
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

    tasks: tuple[str, ...] = MADE
    lengths: tuple[int, ...] | None = None
    count: int = 20
    wording: str = "official"
    haystack: str | None = None
    data: str | None = None
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        for name in self.tasks:
            require(name in NAMES, "tasks", name, f"take some of {', '.join(NAMES)}")
        require(bool(self.tasks), "tasks", self.tasks, "name at least one")
        require(len(set(self.tasks)) == len(self.tasks), "tasks", self.tasks, "name each once")
        read = self.data is None or not set(self.tasks).isdisjoint(FILES)
        require(
            read,
            "data",
            self.data,
            f"only {' and '.join(FILES)} read files: name them among the tasks, or none",
        )
        check_grid(self)

    def samples(self, params: LanguageModel) -> Sequence[Sample]:
        """Makes a list of samples, `count` for each of the chosen RULER tasks at each prompt length."""
        lengths = lengths_for(params, self.lengths, usual=(4096,))
        wording, count, made = read_wording(self), counter(params), []
        for name in self.tasks:
            for length in lengths:
                recipe = recipe_of(
                    name, wording=wording, length=length, count=count, data=self.data
                )
                cell = Cell.of(recipe, length, count)
                rng = np.random.default_rng([self.seed, NAMES.index(name), length])
                for index in range(self.count):
                    prompt = cell.make(rng, index)
                    made.append(
                        as_sample(
                            f"{name}-{length}-{index:04d}",
                            name,
                            prompt,
                            recipe.new_tokens,
                            length=length,
                        )
                    )
        return made

    def score(self, sample: Sample, prediction: str) -> float:
        """Share in [0, 1] of the right answers that occur in the prediction; qa_1 and qa_2: 1 if any occurs, else 0."""
        metric = string_match_part if sample.group in FILES else string_match_all
        return metric(prediction, sample.answers)


def check_grid(settings: Any) -> None:
    """Raises ValueError for a wrong count, seed, wording or length, and for a haystack file with the small wording."""
    require(settings.count >= 1, "count", settings.count, "make at least 1 sample")
    lengths = settings.lengths
    if lengths is not None:
        require(bool(lengths), "lengths", lengths, "name at least one, in tokens")
        require(min(lengths) >= 1, "lengths", lengths, "count tokens")
        require(len(set(lengths)) == len(lengths), "lengths", lengths, "name each once")
    require(settings.seed >= 0, "seed", settings.seed, "give 0 or more")
    require(
        settings.wording in ("official", "small"),
        "wording",
        settings.wording,
        "take 'official' or 'small'",
    )
    mine = settings.haystack is None or settings.wording == "official"
    require(
        mine,
        "haystack",
        settings.haystack,
        "the small wording makes its own: take wording='official'",
    )


def lengths_for(
    params: LanguageModel, given: Sequence[int] | None, *, usual: Sequence[int]
) -> tuple[int, ...]:
    """Tuple of prompt lengths in tokens: `given`, or if that is None the `usual` ones within the model's positions.

    If all usual lengths are longer, the model's number of positions. Given lengths that are longer are refused.
    """
    most = params.config.max_positions
    if given is None:
        return tuple(each for each in usual if each <= most) or (most,)
    require(
        max(given) <= most,
        "lengths",
        max(given),
        f"the model was made for {most} tokens: ask for no more",
    )
    return tuple(given)


def read_wording(settings: Any) -> Wording:
    """`Wording` (it draws prompts' random texts) that a task's settings name, with their haystack file's text, if any.

    A missing file is a FileNotFoundError; one without text is refused.
    """
    if settings.haystack is None:
        return wording_of(settings.wording)
    path = Path(os.path.expanduser(settings.haystack))
    if not path.is_file():
        raise FileNotFoundError(
            f"haystack={settings.haystack!r}: no such file; give a text file, or leave it out"
        )
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"haystack={settings.haystack!r}: not UTF-8 text; save it as such"
        ) from error
    require(bool(text.split()), "haystack", settings.haystack, "it holds no word: give a text")
    return wording_of(settings.wording, text)


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
        tags=MappingProxyType(tags),
    )

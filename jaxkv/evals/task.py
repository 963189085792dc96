"""Base classes of evaluations: samples, the tasks that make and score them, and their outcomes."""

import abc
import dataclasses
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np

from jaxkv import _checks as checks
from jaxkv._checks import FARTHEST, plain
from jaxkv._errors import refusal, require
from jaxkv.loading import LanguageModel
from jaxkv.policies.policy import Method
from jaxkv.text.tokenizer import Text

# A random key is made of 32 bits.
_SEEDS = 2**32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample of a task: its prompt is `context + question`, and the answer begins with `prefix`.

    Attributes:
        id: unique within the task; the same for the same settings.
        group: row of the table that the sample counts in, such as "niah_single_1".
        context: text that a question-agnostic run compresses before it has seen the question.
        question: text after the context.
        answers: right answers, as the task's metric takes them.
        new_tokens: largest number of tokens to draw.
        prefix: the answer's first words, which end the prompt.
        raw: True for no chat template, whatever `How` says: few-shot prompts and code are continued as they are.
        tags: numbers and names that pictures are drawn over, such as length and depth.
    """

    id: str
    group: str
    context: str
    question: str = ""
    answers: tuple[str, ...] = ()
    new_tokens: int = 1
    prefix: str = ""
    raw: bool = False
    tags: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        _settle(self)
        for name in ("id", "context"):
            require(
                bool(getattr(self, name)), name, "", "a sample has at least one character of it"
            )
        require(self.new_tokens >= 1, "new_tokens", self.new_tokens, "draw at least 1 token")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one sample under one policy: score, drawn text, and tokens, rows and bytes of its cache.

    Attributes:
        score: a share in [0, 1], or a number of the task's `unit`.
        prediction: the text drawn, if any was.
        figures: further numbers, and lists of numbers, for the task's pictures.
        tokens: number of tokens of the prompt, its question included; None if the task does not count them.
        rows: rows kept of the prompt per kv head and layer, averaged; None if the task does not count them.
        nbytes: bytes of these rows, on the device or in host memory; None if the task does not count them.
    """

    score: float
    prediction: str = ""
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tokens: int | None = None
    rows: float | None = None
    nbytes: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class How:
    """Settings of a run besides its task: whether policies see questions, chat template or none, and the seed.

    Attributes:
        agnostic: True compresses the context before the question is seen, as Ada-KV's harder setting does. A sample
            without a question is the same in both settings.
        raw: True leaves the chat template out.
        seed: seed of policies that draw random numbers. `evaluate` hashes it with each sample's id and runs these
            samples one by one: in a batch, all prompts would share their draws.
    """

    agnostic: bool = False
    raw: bool = False
    seed: int = 0

    def __post_init__(self):
        checks.field(self, "agnostic", checks.flag)
        checks.field(self, "raw", checks.flag)
        checks.field(self, "seed", checks.whole, least=0, most=_SEEDS - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(abc.ABC):
    """Base of tasks, which make samples and run policies on them; its fields are the settings and command-line options.

    A task is a frozen dataclass. Its settings are converted to their annotations: numbers to plain ones, lists to
    tuples, paths to texts; other values are refused. A `__post_init__` of its own calls this one's first.

    Attributes:
        unit: unit of scores: "%" for shares in [0, 1], or another such as "nats".
        higher: True if a higher score is better.
        asks: True if samples have a question, which a question-agnostic run keeps from the policy.
    """

    unit: ClassVar[str] = "%"
    higher: ClassVar[bool] = True
    asks: ClassVar[bool] = True

    def __post_init__(self):
        _settle(self)

    def require_least(self, least: int, *names: str) -> None:
        """Raises ValueError for the first of these settings that is below `least`."""
        for name in names:
            require(
                getattr(self, name) >= least, name, getattr(self, name), f"give {least} or more"
            )

    @abc.abstractmethod
    def samples(self, params: LanguageModel) -> Sequence[Sample]:
        """Makes the sequence of the task's `Sample` values for a model; the same for equal settings and tokenizer.

        Args:
            params: the model, whose tokenizer counts tokens and whose positions limit them.

        Returns:
            The samples.

        Raises:
            ValueError: for settings that the model cannot honour.
            FileNotFoundError: where data are missing, saying what to put where.
        """

    @abc.abstractmethod
    def run(
        self, params: LanguageModel, policy: Method, samples: Sequence[Sample], how: How
    ) -> list[Outcome]:
        """Runs a batch of samples under one policy and returns one Outcome, with its score, per sample.

        Args:
            params: the model.
            policy: the compression.
            samples: a batch of this task's samples.
            how: settings of the run.

        Returns:
            One outcome per sample, in order.
        """

    def compressed(self, params: LanguageModel, sample: Sample, how: How) -> list[int]:
        """Ids of the tokens of a sample that are compressed, which the report shows; empty if the task does not say."""
        return []


def tokenizer_of(params: LanguageModel) -> Text:
    """Tokenizer of a model; ValueError if it has none."""
    return require_text(params.text)


def require_text(text: Text | None) -> Text:
    """Returns the given tokenizer unchanged; ValueError if it is None, as of a model without one."""
    if text is None:
        raise refusal("params", "no tokenizer", "tasks are texts: load a checkpoint that has one")
    return text


def _settle(given: Any) -> None:
    """Checks a dataclass's fields, and converts them to their annotations."""
    hints = typing.get_type_hints(type(given))
    for field in dataclasses.fields(given):
        value = _setting(hints[field.name], getattr(given, field.name), field.name)
        object.__setattr__(given, field.name, value)


def _setting(hint: Any, value: Any, name: str) -> Any:
    """Value of a task's setting, checked and converted to its annotation: a bool, int, float, text or tuple."""
    value = value.tolist() if isinstance(value, np.ndarray) else plain(value)
    kinds = typing.get_args(hint)
    if type(None) in kinds:
        return None if value is None else _setting(kinds[0], value, name)
    if typing.get_origin(hint) is tuple:
        require(isinstance(value, (list, tuple)), name, value, "give a tuple")
        return tuple(_setting(kinds[0], each, name) for each in value)
    if hint is bool:
        return checks.flag(name, value)
    if hint is int:
        return checks.whole(name, value, least=-FARTHEST)
    if hint is float:
        return checks.real(name, value, "give a number", low=-FARTHEST, high=FARTHEST)
    if hint is str:
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        require(isinstance(value, str), name, value, "give a text")
    return value


class Tasks(dict[str, type[Task]]):
    """Dict {name: registered task class}; the decorator `task` adds to it."""


TASKS = Tasks()
_Task = TypeVar("_Task", bound=type[Task])


def task(name: str) -> Callable[[_Task], _Task]:
    """Class decorator that registers a task under a name, for `evaluate` and the command line.

    Args:
        name: one word.

    Returns:
        A decorator, which returns the class unchanged.

    Raises:
        ValueError: for "report", which the command line has.
    """
    require(name != "report", "name", name, "`jaxkv eval` has a command of that name")

    def registered(cls: _Task) -> _Task:
        # Running a notebook's cell again defines its class again: the new one replaces the old.
        TASKS[name] = cls
        return cls

    return registered

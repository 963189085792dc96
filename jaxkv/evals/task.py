"""Base classes of evaluations: samples, the tasks that make and score them, and their outcomes."""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from jaxkv import _checks as checks
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.loading import LanguageModel
from jaxkv.policies.policy import Policy


@frozen_dataclass
class TaskSample:
    """One sample of a task: a prompt of `context`, `question` and the answer's first words `prefix`, and right answers.

    Attributes:
        id: unique id within the task; the same for the same settings.
        group: row of the table that counts the sample, such as "niah_single_1".
        context: text that a question-agnostic run compresses before it sees the question.
        question: text after the context.
        answers: right answers, in the form of the task's metric.
        new_tokens: maximum number of tokens to sample.
        prefix: first words of the answer, which end the prompt.
        raw: True for no chat template, independent of `How`: few-shot prompts and code are continued unchanged.
        tags: numbers and names for plots, such as length and depth.
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


@frozen_dataclass
class SampleOutcome:
    """Result of one sample under one policy: score, sampled text, prompt tokens, kept entries and bytes, plot figures.

    Attributes:
        score: a share in [0, 1], or a number in the task's `unit`.
        prediction: sampled text, if any.
        figures: further numbers, and lists of numbers, for the task's plots.
        tokens: tokens of the prompt with its question; 0 if the task does not count them.
        rows: entries of the prompt kept per kv head and layer, on average; None if the task does not count them.
        nbytes: bytes of these entries, on the device or in host memory; None if the task does not count them.
    """

    score: float
    prediction: str = ""
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tokens: int = 0
    rows: float | None = None
    nbytes: int | None = None


@frozen_dataclass
class How:
    """Settings of a run that belong to no task: question-agnostic or not, with or without chat template, and seed.

    Attributes:
        agnostic: True to compress the context before the question is seen, as in Ada-KV's harder setting. A sample
            without a question is the same in both settings.
        raw: True to leave out the chat template.
        seed: seed of policies that use random numbers. `evaluate` hashes it with the id of each sample, and runs these
            samples one by one: in a batch, all prompts would share their random numbers.
    """

    agnostic: bool = False
    raw: bool = False
    seed: int = 0


@frozen_dataclass
class EvaluationTask(abc.ABC):
    """Base class of evaluation tasks, which make samples and run policies on them; fields are settings and CLI options.

    A task is a frozen dataclass. NumPy scalars become Python numbers, and lists become tuples. A `__post_init__` of a
    subclass calls this one first.

    Attributes:
        unit: unit of scores: "%" for shares in [0, 1], or another such as "nats".
        higher: True if a higher score is better.
        asks: True if samples have a question, which a question-agnostic run hides from the policy.
    """

    unit: ClassVar[str] = "%"
    higher: ClassVar[bool] = True
    asks: ClassVar[bool] = True

    def __post_init__(self):
        checks.normalise_fields(self)

    def require_at_least(self, least: int, *names: str) -> None:
        """Raise ValueError for the first of the task's fields `names` whose value is below `least`."""
        for name in names:
            require(
                getattr(self, name) >= least,
                name,
                getattr(self, name),
                f"too small: use {least} or more",
            )

    @abc.abstractmethod
    def samples(self, params: LanguageModel) -> Sequence[TaskSample]:
        """Abstract: make the task's list of `TaskSample` for a model; equal for equal settings and tokenizer.

        Args:
            params: the model, whose tokenizer counts tokens and whose positions limit them.

        Returns:
            The samples.

        Raises:
            ValueError: for settings that the model does not support.
            FileNotFoundError: for missing data, with the file to add and its folder.
        """

    @abc.abstractmethod
    def run(
        self, params: LanguageModel, policy: Policy, samples: Sequence[TaskSample], how: How
    ) -> list[SampleOutcome]:
        """Abstract: run a batch of samples under one policy; return one scored `SampleOutcome` per sample.

        Args:
            params: the model.
            policy: compression policy.
            samples: a batch of this task's samples.
            how: settings of the run.

        Returns:
            One outcome per sample, in order.
        """

    def list_compressed_ids(self, params: LanguageModel, sample: TaskSample, how: How) -> list[int]:
        """Return the ids of a sample's tokens that a policy compresses, for the report's shading; empty by default."""
        return []


class TaskRegistry(dict[str, type[EvaluationTask]]):
    """Dict of registered task classes by name; the decorator `task` adds to it."""


TASKS = TaskRegistry()
_Task = TypeVar("_Task", bound=type[EvaluationTask])


def task(name: str) -> Callable[[_Task], _Task]:
    """Return a class decorator that registers a task under a name, replacing an earlier one, for `evaluate` and CLI.

    Args:
        name: one word.

    Returns:
        A decorator, which returns the class unchanged.
    """

    def registered(cls: _Task) -> _Task:
        # Running a notebook cell again defines its class again: the new class replaces the old one.
        TASKS[name] = cls
        return cls

    return registered

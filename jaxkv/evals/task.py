"""Base classes of evaluations: samples, the tasks that make and score them, and their outcomes."""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from jaxkv import _checks as checks
from jaxkv._errors import require
from jaxkv.loading import LanguageModel
from jaxkv.policies.policy import Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample of a task: its prompt is `context + question`, and the answer begins with `prefix`.

    Attributes:
        id: unique within the task; the same for the same settings.
        group: row of the table that the sample counts in, such as "niah_single_1".
        context: text that a question-agnostic run compresses before it has seen the question.
        question: text after the context.
        answers: right answers, as the task's metric takes them.
        new_tokens: largest number of tokens to sample.
        prefix: the answer's first words, which end the prompt.
        raw: True for no chat template, whatever `How` says: few-shot prompts and code are continued as they are.
        tags: numbers and names that pictures are sampled over, such as length and depth.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one sample under one policy: score, sampled text, and tokens, rows and bytes of its cache.

    Attributes:
        score: a share in [0, 1], or a number of the task's `unit`.
        prediction: the text sampled, if any was.
        figures: further numbers, and lists of numbers, for the task's pictures.
        tokens: number of tokens of the prompt, its question included; 0 if the task does not count them.
        rows: rows kept of the prompt per kv head and layer, averaged; None if the task does not count them.
        nbytes: bytes of these rows, on the device or in host memory; None if the task does not count them.
    """

    score: float
    prediction: str = ""
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tokens: int = 0
    rows: float | None = None
    nbytes: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class How:
    """Settings of a run besides its task: whether policies see questions, chat template or none, and the seed.

    Attributes:
        agnostic: True compresses the context before the question is seen, as Ada-KV's harder setting does. A sample
            without a question is the same in both settings.
        raw: True leaves the chat template out.
        seed: seed of policies that uses random numbers. `evaluate` hashes it with each sample's id and runs these
            samples one by one: in a batch, all prompts would share their samples.
    """

    agnostic: bool = False
    raw: bool = False
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(abc.ABC):
    """Base of tasks, which make samples and run policies on them; its fields are the settings and command-line options.

    A task is a frozen dataclass. Numbers of numpy become plain ones, and lists tuples. A `__post_init__` of its own
    calls this one's first.

    Attributes:
        unit: unit of scores: "%" for shares in [0, 1], or another such as "nats".
        higher: True if a higher score is better.
        asks: True if samples have a question, which a question-agnostic run keeps from the policy.
    """

    unit: ClassVar[str] = "%"
    higher: ClassVar[bool] = True
    asks: ClassVar[bool] = True

    def __post_init__(self):
        checks.normalise(self)

    def require_least(self, least: int, *names: str) -> None:
        """Raise ValueError for the first of these settings that is below `least`."""
        for name in names:
            require(
                getattr(self, name) >= least, name, getattr(self, name), f"give {least} or more"
            )

    @abc.abstractmethod
    def samples(self, params: LanguageModel) -> Sequence[Sample]:
        """Make the sequence of the task's `Sample` values for a model; the same for equal settings and tokenizer.

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
        self, params: LanguageModel, policy: Policy, samples: Sequence[Sample], how: How
    ) -> list[Outcome]:
        """Run a batch of samples under one policy and return one Outcome, with its score, per sample.

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


class TaskRegistry(dict[str, type[Task]]):
    """Dict {name: registered task class}; the decorator `task` adds to it."""


TASKS = TaskRegistry()
_Task = TypeVar("_Task", bound=type[Task])


def task(name: str) -> Callable[[_Task], _Task]:
    """Class decorator that registers a task under a name, for `evaluate` and the command line.

    Args:
        name: one word.

    Returns:
        A decorator, which returns the class unchanged.
    """

    def registered(cls: _Task) -> _Task:
        # Running a notebook's cell again defines its class again: the new one replaces the old.
        TASKS[name] = cls
        return cls

    return registered

"""What an evaluation is made of: samples, the tasks that make and judge them, and what comes out of each."""

import abc
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from jaxkv._errors import require
from jaxkv._values import flag, is_whole, plain
from jaxkv.loading import LanguageModel
from jaxkv.policies.policy import Method

# A random key is made of 32 bits.
_SEEDS = 2**32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One case of a task: the prompt is `context + question`, and the answer begins with `prefix`.

    Attributes:
        id: tells it from all others of the task; the same for the same settings.
        group: the row of the table that it counts in, such as "niah_single_1".
        context: what a question-agnostic run compresses before it has seen the question.
        question: what stands behind it.
        answers: what is right, as the task's metric takes it.
        new_tokens: tokens to draw at most.
        prefix: the answer's first words, put into the model's mouth.
        stop: strings that end an answer.
        raw: no chat template around it, whatever `How` says: few-shot prompts and code are to be gone on with.
        tags: numbers and names that pictures are drawn over, such as length and depth.
    """

    id: str
    group: str
    context: str
    question: str = ""
    answers: tuple[str, ...] = ()
    new_tokens: int = 1
    prefix: str = ""
    stop: tuple[str, ...] = ()
    raw: bool = False
    tags: Mapping[str, Any] = dataclasses.field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self):
        for name in ("id", "group", "context", "question", "prefix"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name}={getattr(self, name)!r}: give a text")
        require(bool(self.id), "id", self.id, "name the sample")
        require(bool(self.context), "context", self.context, "a sample has at least one character of it")
        require(self.new_tokens >= 1, "new_tokens", self.new_tokens, "draw at least 1 token")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one sample under one policy.

    Attributes:
        score: what is averaged; in [0, 1] where more is better, or nats where `Task.unit` says so.
        prediction: the text drawn, if any was.
        figures: numbers, and lists of numbers, that the task's pictures need besides.
        tokens: of the prompt, its question included; None where the task does not count them.
        rows: kept of it per kv head and layer, averaged; None likewise.
        nbytes: that they weigh on the device; None likewise.
    """

    score: float
    prediction: str = ""
    figures: Mapping[str, Any] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    tokens: int | None = None
    rows: float | None = None
    nbytes: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class How:
    """How samples are run, whatever the task.

    Attributes:
        agnostic: compress the context before the question is seen, as Ada-KV's harder setting does. A sample without a
            question is the same in both settings.
        raw: no chat template.
        seed: of policies that draw. `evaluate` makes a seed of this one and the sample's id for each sample, which
            then runs alone: otherwise all prompts of a batch would share their draws.
    """

    agnostic: bool = False
    raw: bool = False
    seed: int = 0

    def __post_init__(self):
        flag(self, "agnostic")
        flag(self, "raw")
        seed = plain(self.seed)
        require(is_whole(seed) and seed < _SEEDS, "seed", seed, f"give a whole number from 0 to {_SEEDS - 1}")
        object.__setattr__(self, "seed", seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(abc.ABC):
    """A task: a frozen dataclass whose fields are its settings, and the command line's options.

    Attributes:
        unit: what a score is: "%", of shares in [0, 1], or another, such as "nats".
        higher: whether more is better.
        asks: whether samples have a question, which can be kept from the policy.
    """

    unit: ClassVar[str] = "%"
    higher: ClassVar[bool] = True
    asks: ClassVar[bool] = True

    @abc.abstractmethod
    def samples(self, params: LanguageModel) -> Sequence[Sample]:
        """All cases, in order; the same for the same settings and tokenizer.

        Args:
            params: the model, whose tokenizer counts tokens and whose positions end somewhere.

        Returns:
            The cases.

        Raises:
            ValueError: for settings that the model cannot honour.
            FileNotFoundError: where data are missing, saying what to put where.
        """

    @abc.abstractmethod
    def run(self, params: LanguageModel, policy: Method, samples: Sequence[Sample], how: How) -> list[Outcome]:
        """Runs a batch.

        Args:
            params: the model.
            policy: the compression.
            samples: some of this task's.
            how: the way.

        Returns:
            An outcome for each.
        """


class Tasks(dict[str, type[Task]]):
    """Tasks' classes by name; `task` adds one."""


TASKS = Tasks()
# What `jaxkv eval` does beside tasks.
_TAKEN = ("merge", "report")
_Task = TypeVar("_Task", bound=type[Task])


def task(name: str) -> Callable[[_Task], _Task]:
    """Makes a task's class known by name, to the command line with all its settings.

    Args:
        name: the name.

    Returns:
        A decorator.

    Raises:
        ValueError: for a name that another task has, and for one that the command line could not have.
        TypeError: for a name that is no text.
    """
    if not isinstance(name, str):
        raise TypeError(f"name={name!r}: give a text")
    fits = re.fullmatch(r"\w[\w.+-]*", name) is not None and name not in _TAKEN
    require(fits, "name", name, f"give one word, none of {', '.join(_TAKEN)}: the command line has those")

    def known(cls: _Task) -> _Task:
        mine = TASKS.setdefault(name, cls)
        same = (mine.__module__, mine.__qualname__) == (cls.__module__, cls.__qualname__)
        require(same, "name", name, f"{mine.__module__}.{mine.__qualname__} has it: choose another")
        # A notebook's cell that is run again makes its class anew.
        TASKS[name] = cls
        return cls

    return known

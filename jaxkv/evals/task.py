"""What an evaluation is made of: samples, the tasks that make and judge them, and what comes out of each."""

import abc
import dataclasses
import math
import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, Union

import numpy as np

from jaxkv._errors import require
from jaxkv._values import FARTHEST, as_real, flag, is_whole, plain
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
        for name in ("answers", "stop"):
            given = getattr(self, name)
            # A text is a sequence of texts, too: its letters.
            if not isinstance(given, (tuple, list)) or not all(isinstance(each, str) for each in given):
                raise TypeError(f"{name}={given!r}: give a tuple of texts")
            object.__setattr__(self, name, tuple(given))
        if not isinstance(self.tags, Mapping):
            raise TypeError(f"tags={self.tags!r}: give a mapping")
        require(all(self.stop), "stop", self.stop, "every answer has the empty text: leave it out")
        require(bool(self.id), "id", self.id, "name the sample")
        require(bool(self.context), "context", self.context, "a sample has at least one character of it")
        new = plain(self.new_tokens)
        require(is_whole(new, 1), "new_tokens", new, "draw at least 1 token")
        object.__setattr__(self, "new_tokens", new)
        flag(self, "raw")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one sample under one policy.

    Attributes:
        score: what is averaged; in [0, 1] where more is better, or nats where `Task.unit` says so.
        prediction: the text drawn, if any was.
        figures: numbers, and lists of numbers, that the task's pictures need besides.
        tokens: of the prompt, its question included; None where the task does not count them.
        rows: kept of it per kv head and layer, averaged; None likewise.
        nbytes: that they weigh, wherever they lie; None likewise.
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

    Settings are made what their annotations say: numbers plain, lists tuples, paths texts; what is no such thing is
    refused. A task with a `__post_init__` of its own calls this one's first.

    Attributes:
        unit: what a score is: "%", of shares in [0, 1], or another, such as "nats".
        higher: whether more is better.
        asks: whether samples have a question, which can be kept from the policy.
    """

    unit: ClassVar[str] = "%"
    higher: ClassVar[bool] = True
    asks: ClassVar[bool] = True

    def __post_init__(self):
        try:
            hints = typing.get_type_hints(type(self))
        except NameError:  # of a class inside a function, whose annotations are texts
            return
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _made(hints[field.name], getattr(self, field.name), field.name))

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


def _made(hint: Any, value: Any, name: str) -> Any:
    """A setting as its annotation says; as it is where the command line could not write it."""
    value = plain(value)
    if typing.get_origin(hint) in (Union, types.UnionType):
        kinds = typing.get_args(hint)
        some = [kind for kind in kinds if kind is not type(None)]
        return value if len(some) != 1 or (value is None and len(some) < len(kinds)) else _made(some[0], value, name)
    of = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and len(of) == 2 and of[1] is ...:
        several = isinstance(value, (list, tuple, range)) or (isinstance(value, np.ndarray) and value.ndim == 1)
        require(several, name, value, "give a tuple")
        return tuple(_made(of[0], each, name) for each in value)
    if hint is bool:
        require(isinstance(value, bool), name, value, "give True or False")
    elif hint is int:
        require(isinstance(value, int) and not isinstance(value, bool), name, value, "give a whole number")
        if name == "seed":  # numpy's generators take no others, however large
            require(value >= 0, name, value, "give 0 or more")
        else:
            require(abs(value) <= FARTHEST, name, value, f"give at most {FARTHEST}")
    elif hint is float:
        number = as_real(value)
        require(number is not None and math.isfinite(number), name, value, "give a number")
        return number
    elif hint is str:
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        require(isinstance(value, str), name, value, "give a text")
    return value


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

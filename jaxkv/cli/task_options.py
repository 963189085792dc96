"""A task's options, derived from its class: fields that can be written as text, with the docstring's lines as help."""

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Any, Union

from jaxkv._values import shortened
from jaxkv.cli.numbers import argument, real, whole
from jaxkv.evals.task import Task
from jaxkv.policies.registry import documented

_PREFIX = "task "
_READERS: dict[Any, tuple[Callable[[str], Any], str]] = {int: (whole, "N"), float: (real, "X"), str: (str, "WORD")}


def add_task_options(parser: argparse.ArgumentParser, cls: type[Task]) -> None:
    """Adds an option for each of a task's fields.

    Args:
        parser: one that has its other options; a field of their name is called --task-NAME, but for the seed: one
            --seed is for samples that are drawn and for policies that draw.
        cls: the task's class.
    """
    group = parser.add_argument_group("settings of the task")
    hints, about = typing.get_type_hints(cls), documented(cls)
    for field in dataclasses.fields(cls):
        words = None if field.name == "seed" else _words(hints[field.name])
        if words is None or not field.init:
            continue
        flag = field.name.replace("_", "-")
        told = about.get(field.name, "").rstrip(".").replace("%", "%%")
        told = f"{told} (default: {_told(field)})" if _told(field) else told
        taken = f"--{flag}" in parser._option_string_actions
        spelled = f"--task-{flag}" if taken else f"--{flag}"
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        given: dict[str, Any] = {"dest": _PREFIX + field.name, "help": told, "required": required}
        group.add_argument(spelled, **given, default=argparse.SUPPRESS, **words)


def task_from(options: argparse.Namespace, cls: type[Task]) -> Task:
    """The task that was asked for.

    Args:
        options: of a parser with `add_task_options`.
        cls: the task's class.

    Returns:
        The task.

    Raises:
        ValueError: for settings that cannot be.
    """
    given = {name.removeprefix(_PREFIX): value for name, value in vars(options).items() if name.startswith(_PREFIX)}
    given = {name: _flat(value) for name, value in given.items()}
    if options.seed is not None and any(field.name == "seed" for field in dataclasses.fields(cls)):
        given["seed"] = options.seed
    return cls(**given)


def _flat(value: Any) -> Any:
    """Words of one option, each with several between commas, as the one tuple that they are."""
    return tuple(each for part in value for each in part) if isinstance(value, list) else value


def _words(hint: Any) -> dict[str, Any] | None:
    """What argparse is told of the words behind an option; None for a field that only Python can write."""
    union = typing.get_origin(hint) in (Union, types.UnionType)
    kinds = [kind for kind in (typing.get_args(hint) if union else (hint,)) if kind is not type(None)]
    if len(kinds) != 1:
        return None
    kind = kinds[0]
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind in _READERS:
        read, metavar = _READERS[kind]
        return {"type": argument(read), "metavar": metavar}
    if typing.get_origin(kind) is typing.Literal:
        return {"choices": typing.get_args(kind)}
    of = typing.get_args(kind)
    if typing.get_origin(kind) is tuple and len(of) == 2 and of[1] is ... and of[0] in _READERS:
        read, metavar = _READERS[of[0]]
        several = argument(lambda text: [read(word) for word in text.split(",") if word])
        return {"type": several, "nargs": "+", "metavar": f"{metavar},{metavar}"}
    return None


def _told(field: dataclasses.Field) -> str:
    value = field.default
    if value is dataclasses.MISSING or value is None or value == () or value == "":
        return ""
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return shortened(text).replace("%", "%%")

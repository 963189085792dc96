"""Options of an evaluation task: its dataclass fields that can be written as text, their docstring lines as help."""

import argparse
import dataclasses
import typing
from collections.abc import Callable

from jaxkv._checks import shortened
from jaxkv.cli.fields import Arity, Words, kinds_of, words_of
from jaxkv.cli.numbers import argument
from jaxkv.evals.task import Task, must_be_given
from jaxkv.policies.registry import documented

_PREFIX = "task "


def add_task_options(parser: argparse.ArgumentParser, cls: type[Task]) -> None:
    """Adds an option for each field of a task class, except `seed`, to a parser that has all its other options.

    A field whose name is taken by another option is called --task-NAME; --seed is shared with policies that draw.
    """
    group = parser.add_argument_group("settings of the task")
    hints, about = typing.get_type_hints(cls), documented(cls)
    for field in dataclasses.fields(cls):
        words = words_of(kinds_of(hints[field.name]))
        if field.name == "seed" or not field.init or words is None:
            continue
        dashed, default = field.name.replace("_", "-"), _default(field)
        text = about.get(field.name, "").rstrip(".").replace("%", "%%")
        several = words.arity in (Arity.SEVERAL, Arity.REPEATED)
        words.add_to(
            group,
            [
                f"--task-{dashed}"
                if f"--{dashed}" in parser._option_string_actions
                else f"--{dashed}"
            ],
            dest=_PREFIX + field.name,
            about=f"{text} (default: {default})" if default else text,
            metavar=f"{words.metavar},{words.metavar}" if several else words.metavar,
            required=must_be_given(field),
            read=argument(_with_commas(words) if several else words.read),
        )


def _with_commas(words: Words) -> Callable[[str], list]:
    """Returns a function that parses comma-separated text into a list of values."""
    return lambda text: [words.read(word) for word in text.split(",") if word]


def task_from(options: argparse.Namespace, cls: type[Task]) -> Task:
    """Task of class `cls` with the settings (and `seed`) that the parsed options give; others keep their defaults."""
    given = {
        # Comma-separated values arrive as one list per word and are joined into one tuple.
        name.removeprefix(_PREFIX): tuple(sum(value, [])) if isinstance(value, list) else value
        for name, value in vars(options).items()
        if name.startswith(_PREFIX) and value is not None
    }
    if options.seed is not None and any(field.name == "seed" for field in dataclasses.fields(cls)):
        given["seed"] = options.seed
    return cls(**given)


def _default(field: dataclasses.Field) -> str:
    """Text of a field's default for the help; empty if there is none to show."""
    value = field.default
    if value is dataclasses.MISSING or value is None or value == () or value == "":
        return ""
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return shortened(text).replace("%", "%%")

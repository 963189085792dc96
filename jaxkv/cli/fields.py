"""Dataclass fields as command-line options: how an option's words are parsed, by the field's type annotation."""

import argparse
import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, Union

import numpy as np

from jaxkv.cli.numbers import budget, real, span, whole, whole_or_real


class Arity(enum.Enum):
    """Enum of how many words an option takes: none (a switch with a --no- twin), one, several, one per repetition."""

    SWITCH = "switch"
    ONE = "one"
    SEVERAL = "several"
    REPEATED = "repeated"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Words:
    """How an option's words become a field's value: parser of one word, its name in the help, and `Arity`.

    Attributes:
        read: from a word to a value; its ValueError says what to write.
        metavar: a word's name in the help.
        arity: how many words there are.
    """

    read: Callable[[Any], Any]
    metavar: str | None = None
    arity: Arity = Arity.ONE

    def value(self, given: Any) -> Any:
        """The field's value parsed from the option's word, or a tuple parsed from its words."""
        many = self.arity in (Arity.SEVERAL, Arity.REPEATED)
        return tuple(map(self.read, given)) if many else self.read(given)

    def add_to(
        self,
        group: Any,
        spellings: Iterable[str],
        *,
        dest: str,
        about: str,
        metavar: str | None,
        required: bool = False,
        read: Callable[[str], Any] = str,
    ) -> None:
        """Adds an option (switch, one word, several, or repeated) to an argparse group, with None as its default."""
        shared = partial(group.add_argument, *spellings, dest=dest, help=about, required=required)
        if self.arity is Arity.SWITCH:
            shared(action=argparse.BooleanOptionalAction, default=None)
        elif self.arity is Arity.REPEATED:
            shared(action="append", type=read, metavar=metavar)
        else:
            shared(nargs="+" if self.arity is Arity.SEVERAL else None, type=read, metavar=metavar)


_ONE = {
    frozenset({int}): Words(read=whole, metavar="N"),
    frozenset({float}): Words(read=real, metavar="X"),
    frozenset({int, float}): Words(read=whole_or_real, metavar="N"),
    frozenset({int, float, str}): Words(read=budget, metavar="N"),
    frozenset({str}): Words(read=str, metavar="WORD"),
    frozenset({str, tuple[int, ...]}): Words(read=str, metavar="TEXT"),
    frozenset({str, tuple[tuple[float, ...], ...]}): Words(read=str, metavar="FILE"),
    frozenset({str, tuple[tuple[tuple[float, ...], ...], ...]}): Words(read=str, metavar="FILE"),
    frozenset({bool}): Words(read=bool, arity=Arity.SWITCH),
    frozenset({tuple[int, ...]}): Words(read=whole, metavar="N", arity=Arity.SEVERAL),
    frozenset({tuple[float, ...]}): Words(read=real, metavar="X", arity=Arity.SEVERAL),
    frozenset({tuple[str, ...]}): Words(read=str, metavar="WORD", arity=Arity.SEVERAL),
    frozenset({tuple[tuple[int, int], ...]}): Words(read=span, metavar="A:B", arity=Arity.REPEATED),
}


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """Tuple of the types in a type annotation, with a union split up, without None and numpy scalar types."""
    union = typing.get_origin(hint) in (Union, types.UnionType)
    return tuple(
        kind
        for kind in (typing.get_args(hint) if union else (hint,))
        if not _is_none_or_numpy(kind)
    )


def _is_none_or_numpy(kind: Any) -> bool:
    """True if a type is None's or a numpy scalar type."""
    return isinstance(kind, type) and issubclass(kind, (type(None), np.generic))


def words_of(kinds: tuple[Any, ...]) -> Words | None:
    """`Words` (an option's parser) by a field's types; None unless number, text, bool, enum, literal or tuple."""
    if frozenset(kinds) in _ONE:
        return _ONE[frozenset(kinds)]
    if choices := _choices(kinds):
        return Words(read=partial(chosen, choices), metavar="{" + ",".join(choices) + "}")
    return None


def _choices(kinds: tuple[Any, ...]) -> dict[str, Any]:
    """Dict from word to enum member or literal string, for a field of one enum or literal; empty for other types."""
    if len(kinds) == 1 and typing.get_origin(kinds[0]) is Literal:
        return {word: word for word in typing.get_args(kinds[0]) if isinstance(word, str)}
    enums = [each for each in kinds if isinstance(each, type) and issubclass(each, enum.Enum)]
    if len(enums) != 1 or not set(kinds) <= {enums[0], str}:
        return {}
    return {str(member.value): member for member in enums[0]}


def chosen(choices: dict[str, Any], word: str) -> Any:
    """Value of `word` in the dict `choices`; ValueError, which lists the choices, for an unknown word."""
    if word not in choices:
        raise ValueError(f"use one of {', '.join(choices)}")
    return choices[word]

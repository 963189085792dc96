"""The policy's options, derived from the registered classes: a field that can be written as text is an option.

A new policy needs no line here. What its fields are called, take and mean is read from the dataclass and its docstring.
"""

import argparse
import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, Union

import numpy as np

from jaxkv._errors import require
from jaxkv.cli.numbers import real, shown, span, whole, whole_or_real
from jaxkv.policies import MaxPool, Merge, Method, NoPool
from jaxkv.policies.budgets import LayerBudgets
from jaxkv.policies.merger import Merger
from jaxkv.policies.registry import POLICIES, documented, policy_class
from jaxkv.policies.scorers import Pooling

# What AdaKV and CriticalKV are built on where nothing is said.
_BASE = "snapkv"
# Spellings that differ from the field's.
_ALIASES = {"--filter-layers": "--filters"}
_PREFIX = "policy "


class Arity(enum.Enum):
    """How many words follow an option: none (it has a twin with "no-"), one, several, or one each time it is given."""

    NONE = enum.auto()
    ONE = enum.auto()
    SEVERAL = enum.auto()
    AGAIN = enum.auto()

    def keywords(self) -> dict[str, Any]:
        """What argparse is told."""
        if self is Arity.ONE:
            return {}
        return {"nargs": "+"} if self is Arity.SEVERAL else {"action": _ACTIONS[self]}


_ACTIONS: dict[Arity, Any] = {Arity.NONE: argparse.BooleanOptionalAction, Arity.AGAIN: "append"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """One field as the command line writes it.

    Attributes:
        field: the policy's.
        flag: the option.
        read: from the word, the words, or True or False, to the field's value; its ValueError says what to write.
        about: the help.
        arity: words behind it.
        metavar: what stands for them in the help.
    """

    field: str
    flag: str
    read: Callable[[Any], Any]
    about: str
    arity: Arity = Arity.ONE
    metavar: str | None = None


def options_of(cls: type[Method]) -> dict[str, Option]:
    """The options of a policy.

    Args:
        cls: the class.

    Returns:
        By flag, in the fields' order.
    """
    hints, about, open_fields = typing.get_type_hints(cls), documented(cls), _meaningful(cls)
    options = {}
    for field in dataclasses.fields(cls):
        if field.init and field.name in open_fields:
            option = _option(field.name, hints[field.name], field.default, about.get(field.name, ""))
            if option is not None:
                options[option.flag] = option
    return options


def drops_rows(cls: type[Method]) -> bool:
    """Whether a policy keeps less than everything.

    Args:
        cls: the class.

    Returns:
        False for FullKV, and for OmniKV, which reads less.
    """
    return cls().parts().scorer is not None


def takes_base(cls: type[Method]) -> bool:
    """Whether a policy is built on another one, whose budget is its own.

    OmniKV may have a base, and then two budgets: that is said in Python.

    Args:
        cls: the class.

    Returns:
        True for AdaKV, say.
    """
    return any(field.name == "base" for field in dataclasses.fields(cls)) and drops_rows(cls)


def own_options_of(cls: type[Method]) -> dict[str, Option]:
    """The options that go to a policy itself which is built on another; all others are the base's.

    Args:
        cls: a class that takes a base.

    Returns:
        By flag, in the fields' order.
    """
    return {flag: option for flag, option in options_of(cls).items() if option.field not in _shared()}


def flags_of(cls: type[Method]) -> list[str]:
    """Every option that `--policy` of this name takes.

    Args:
        cls: the class.

    Returns:
        The flags; where it takes a base, its own and those of the base that it has by default.
    """
    if not takes_base(cls):
        return list(options_of(cls))
    return list(dict.fromkeys(["--base", *own_options_of(cls), *options_of(policy_class(_BASE))]))


def _shared() -> set[str]:
    return {field.name for field in dataclasses.fields(Method)}


def _meaningful(cls: type[Method]) -> set[str]:
    """Fields that change something: where every row is kept, those about what goes do not."""
    names = {field.name for field in dataclasses.fields(cls)}
    if drops_rows(cls):
        return names
    try:
        cls(budget=1)
    except ValueError:
        return names - _shared()
    return names - (_shared() - {"budget"})


def _option(name: str, hint: Any, default: Any, about: str) -> Option | None:
    """The option for a field; None for one that only Python can write."""
    # A policy's number may be numpy's as well; on a command line that is the same.
    kinds = tuple(each for each in _members(hint) if each is not type(None) and not _is_numpy(each))
    one = kinds[0] if len(kinds) == 1 else None
    dashed = "--" + name.replace("_", "-")

    made = partial(Option, field=name, flag=dashed, about=about)
    if one is bool:
        return made(read=bool, arity=Arity.NONE)
    if set(kinds) == {int}:
        return made(read=whole, metavar="N")
    if set(kinds) == {float}:
        return made(read=real, metavar="X")
    if set(kinds) == {int, float}:
        return made(read=whole_or_real, metavar="N")
    if one is str:
        return made(read=str, metavar="WORD")
    choices = _choices(kinds)
    if choices:
        return made(read=partial(_chosen, choices), metavar="{" + ",".join(choices) + "}")
    inside = _elements(one)
    if inside in (int, float):
        read = whole if inside is int else real
        return made(read=lambda words: tuple(map(read, words)), metavar="N", arity=Arity.SEVERAL)
    if inside == tuple[int, int]:
        return made(read=lambda words: tuple(map(span, words)), metavar="A:B", arity=Arity.AGAIN)
    return _short(name, kinds, default)


def _short(name: str, kinds: tuple[Any, ...], default: Any) -> Option | None:
    """Parts of a policy of which a number, or yes and no, says enough for a command line."""
    dashed = "--" + name.replace("_", "-")
    if kinds and set(kinds) <= set(typing.get_args(Pooling)):
        return Option(
            field=name,
            flag="--pool-kernel" if name == "pooling" else f"{dashed}-kernel",
            metavar="K",
            read=_pooling,
            about="width of the pooling over neighbours, odd; 1 for none",
        )
    if kinds == (LayerBudgets,) and hasattr(default, "beta"):
        return Option(
            field=name,
            flag="--beta" if name == "allocation" else f"{dashed}-beta",
            metavar="X",
            read=lambda word: dataclasses.replace(default, beta=real(word)),
            about="steepness of the budgets over layers, 1 is flat",
        )
    if kinds == (Merger,):
        on = Merge() if default is None else default
        about = "fold dropped rows into their nearest kept rows, or drop them"
        return Option(field=name, flag=dashed, arity=Arity.NONE, read=lambda yes: on if yes else None, about=about)
    return None


def _members(hint: Any) -> tuple[Any, ...]:
    union = typing.get_origin(hint) in (Union, types.UnionType)
    return typing.get_args(hint) if union else (hint,)


def _is_numpy(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, np.generic)


def _elements(kind: Any) -> Any:
    """What a tuple of any length holds."""
    inside = typing.get_args(kind)
    several = typing.get_origin(kind) is tuple and len(inside) == 2 and inside[1] is ...
    return inside[0] if several else None


def _choices(kinds: tuple[Any, ...]) -> dict[str, Any]:
    """Values by their spelling, of an enum (or its value) or of literal words."""
    if len(kinds) == 1 and typing.get_origin(kinds[0]) is Literal:
        return {word: word for word in typing.get_args(kinds[0]) if isinstance(word, str)}
    enums = [each for each in kinds if isinstance(each, type) and issubclass(each, enum.Enum)]
    if len(enums) != 1 or not set(kinds) <= {enums[0], str}:
        return {}
    return {str(member.value): member for member in enums[0]}


def _chosen(choices: dict[str, Any], word: str) -> Any:
    if word not in choices:
        raise ValueError(f"use one of {', '.join(choices)}")
    return choices[word]


def _pooling(word: str) -> MaxPool | NoPool:
    kernel = whole(word)
    return NoPool() if kernel == 1 else MaxPool(kernel)


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--policy`, `--base` and every registered policy's options.

    Args:
        parser: one that has its other options; an option of theirs is called --policy-NAME here.

    Raises:
        TypeError: if policies disagree on how many words follow an option.
    """
    group = parser.add_argument_group("policy", "An option that the policy does not have is refused.")
    group.add_argument("--policy", default="full", metavar="NAME", help=f"{', '.join(POLICIES)} (default: full)")
    bases = [name for name, cls in POLICIES.items() if takes_base(cls)]
    group.add_argument(
        "--base", metavar="NAME", help=f"{', '.join(bases)}: the policy it is built on (default: {_BASE})"
    )
    dropping = {name for name, cls in POLICIES.items() if drops_rows(cls)}
    spelled = {}
    for flag, having in _by_flag().items():
        first = next(iter(having.values()))
        if any(option.arity is not first.arity for option in having.values()):
            raise TypeError(f"{flag}: {', '.join(having)} differ in the words behind it; rename the field in one")
        keywords: dict[str, Any] = {
            "dest": _PREFIX + flag,
            "default": None,
            "help": _help(having, dropping),
            **first.arity.keywords(),
        }
        if first.metavar is not None:
            keywords["metavar"] = "|".join(dict.fromkeys(str(option.metavar) for option in having.values()))
        for spelling in (flag, "--policy-" + flag[2:]):
            try:
                group.add_argument(spelling, *filter(None, [_ALIASES.get(flag)]), **keywords)
            except argparse.ArgumentError:
                continue  # another option of the command has that name
            spelled[flag] = spelling
            break
    parser.set_defaults(policy_spellings=spelled)


def _by_flag() -> dict[str, dict[str, Option]]:
    found: dict[str, dict[str, Option]] = {}
    for name, cls in POLICIES.items():
        for flag, option in options_of(cls).items():
            found.setdefault(flag, {})[name] = option
    return found


def _help(having: dict[str, Option], dropping: set[str]) -> str:
    """What the policies' docstrings say, each once, and whose it is where not all that drop rows share it."""
    by_text: dict[str, list[str]] = {}
    for name, option in having.items():
        by_text.setdefault(option.about.rstrip("."), []).append(name)
    lines = [
        text if dropping <= set(names) else f"{', '.join(names)}: {text}" if text else ", ".join(names)
        for text, names in by_text.items()
    ]
    return ". ".join(lines).replace("%", "%%")


def policy_from(options: argparse.Namespace) -> Method:
    """The policy that was asked for; what it does not have is refused, never passed over.

    Args:
        options: of a parser with `add_policy_options`.

    Returns:
        The policy.

    Raises:
        ValueError: naming the option at fault.
    """
    cls = policy_class(options.policy)
    nested = takes_base(cls)
    require(options.base is None or nested, "--base", options.base, f"{options.policy} is not built on a policy")
    name = (options.base or _BASE) if nested else options.policy
    inner = policy_class(name) if nested else cls
    own, theirs = own_options_of(cls) if nested else {}, options_of(inner)
    mine: dict[str, Any] = {}
    given: dict[str, Any] = {}
    for flag, said, words in _said(options):
        option = own.get(flag) or theirs.get(flag)
        if option is None:
            raise ValueError(f"{said}: {name} has no such option; leave it out")
        try:
            value = option.read(words)
        except ValueError as error:
            raise ValueError(f"{said}: {error}") from None
        (mine if flag in own else given)[option.field] = value
    policy = cls(base=inner(**given), **mine) if nested else cls(**given)  # type: ignore[call-arg]
    if given.get("merge", ...) is None and policy.parts().merge is not None:
        raise ValueError(f"--no-merge: {name} always folds; leave it out")
    return policy


def _said(options: argparse.Namespace) -> Iterator[tuple[str, str, Any]]:
    """Each option that was given: its flag, how the user wrote it, and the words."""
    for flag, spelling in options.policy_spellings.items():
        words = getattr(options, _PREFIX + flag)
        if isinstance(words, bool):
            yield flag, spelling if words else f"--no-{spelling[2:]}", words
        elif words is not None:
            text = words if isinstance(words, str) else " ".join(words)
            yield flag, f"{spelling}={shown(text)}", words

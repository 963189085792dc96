"""The policy's options, derived from the registered classes: a field that can be written as text is an option.

A new policy needs no line here. What its fields are called, take and mean is read from the dataclass and its docstring.
"""

import argparse
import contextlib
import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, Union

import numpy as np

from jaxkv._errors import require
from jaxkv._values import shortened
from jaxkv.cli.numbers import real, span, whole, whole_or_real
from jaxkv.policies import MaxPool, Merge, Method, NoPool
from jaxkv.policies.attended import Pooling
from jaxkv.policies.layers import LayerBudgets
from jaxkv.policies.merger import Merger
from jaxkv.policies.registry import POLICIES, documented, policy_class, takes_budget

# What AdaKV and CriticalKV are built on where nothing is said.
_BASE = "snapkv"
# Spellings that differ from the field's.
_ALIASES = {"--filter-layers": "--filters"}
_PREFIX = "policy "
_SHARED = frozenset(field.name for field in dataclasses.fields(Method))
# What argparse is told of the words behind an option: none (it has a twin with "no-"), several, one at each mention.
_SWITCH: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
_SEVERAL: dict[str, Any] = {"nargs": "+"}
_REPEATED: dict[str, Any] = {"action": "append"}
# How a field of these types is read, and what stands for it in the help.
_WORDS: dict[frozenset[Any], tuple[Callable[[str], Any], str]] = {
    frozenset({int}): (whole, "N"),
    frozenset({float}): (real, "X"),
    frozenset({int, float}): (whole_or_real, "N"),
    frozenset({str}): (str, "WORD"),
}
_TUPLES: dict[Any, tuple[Callable[[str], Any], str, dict[str, Any]]] = {
    tuple[int, ...]: (whole, "N", _SEVERAL),
    tuple[float, ...]: (real, "N", _SEVERAL),
    tuple[tuple[int, int], ...]: (span, "A:B", _REPEATED),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """One field as the command line writes it.

    Attributes:
        field: the policy's.
        flag: the option.
        read: from the word, the words, or True or False, to the field's value; its ValueError says what to write.
        about: the help.
        words: what argparse is told of the words behind it; one word if nothing.
        metavar: what stands for them in the help.
    """

    field: str
    flag: str
    read: Callable[[Any], Any]
    about: str
    words: Mapping[str, Any] = dataclasses.field(default_factory=dict)
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


def flags_of(cls: type[Method]) -> list[str]:
    """Every option that `--policy` of this name takes.

    Args:
        cls: the class.

    Returns:
        The flags; where it takes a base, its own and those of the base that it has by default.
    """
    if not _takes_base(cls):
        return list(options_of(cls))
    return list(dict.fromkeys(["--base", *_own_options_of(cls), *options_of(policy_class(_BASE))]))


def _drops_rows(cls: type[Method]) -> bool:
    """Whether a policy keeps less than everything: not FullKV, nor OmniKV, which reads less."""
    return cls().parts().scorer is not None


def _takes_base(cls: type[Method]) -> bool:
    """Whether a policy is built on another one, whose budget is its own, as AdaKV is.

    OmniKV may have a base, and then two budgets: that is said in Python.
    """
    return any(field.name == "base" for field in dataclasses.fields(cls)) and _drops_rows(cls)


def _own_options_of(cls: type[Method]) -> dict[str, Option]:
    """The options that go to a policy itself which is built on another; all others are the base's."""
    return {flag: option for flag, option in options_of(cls).items() if option.field not in _SHARED}


def _meaningful(cls: type[Method]) -> set[str]:
    """Fields that change something: where every row is kept, those about what goes do not."""
    names = {field.name for field in dataclasses.fields(cls)}
    if _drops_rows(cls):
        return names
    return names - (_SHARED - {"budget"} if takes_budget(cls) else _SHARED)


def _option(name: str, hint: Any, default: Any, about: str) -> Option | None:
    """The option for a field; None for one that only Python can write."""
    union = typing.get_origin(hint) in (Union, types.UnionType)
    # A policy's number may be numpy's as well; on a command line that is the same.
    kinds = tuple(kind for kind in (typing.get_args(hint) if union else (hint,)) if not _is_none_or_numpy(kind))
    one = kinds[0] if len(kinds) == 1 else None
    dashed = "--" + name.replace("_", "-")
    made = partial(Option, field=name, flag=dashed, about=about)
    if one is bool:
        return made(read=bool, words=_SWITCH)
    if frozenset(kinds) in _WORDS:
        read, metavar = _WORDS[frozenset(kinds)]
        return made(read=read, metavar=metavar)
    if choices := _choices(kinds):
        return made(read=partial(_chosen, choices), metavar="{" + ",".join(choices) + "}")
    if one in _TUPLES:
        each, metavar, words = _TUPLES[one]
        return made(read=lambda given: tuple(map(each, given)), metavar=metavar, words=words)
    # Parts of a policy of which a number, or yes and no, says enough for a command line.
    if kinds and set(kinds) <= set(typing.get_args(Pooling)):
        flag = "--pool-kernel" if name == "pooling" else f"{dashed}-kernel"
        about = "width of the pooling over neighbours, odd; 1 for none"
        return made(flag=flag, metavar="K", read=_pooling, about=about)
    if one is LayerBudgets and hasattr(default, "beta"):
        flag = "--beta" if name == "allocation" else f"{dashed}-beta"
        steeper = lambda word: dataclasses.replace(default, beta=real(word))  # noqa: E731
        return made(flag=flag, metavar="X", read=steeper, about="steepness of the budgets over layers, 1 is flat")
    if one is Merger:
        on = Merge() if default is None else default
        about = "fold dropped rows into their nearest kept rows, or drop them"
        return made(words=_SWITCH, read=lambda yes: on if yes else None, about=about)
    return None


def _is_none_or_numpy(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, (type(None), np.generic))


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
    bases = ", ".join(name for name, cls in POLICIES.items() if _takes_base(cls))
    group.add_argument("--base", metavar="NAME", help=f"{bases}: the policy it is built on (default: {_BASE})")
    dropping = {name for name, cls in POLICIES.items() if _drops_rows(cls)}
    having: dict[str, dict[str, Option]] = {}
    for name, cls in POLICIES.items():
        for flag, option in options_of(cls).items():
            having.setdefault(flag, {})[name] = option
    spelled = {}
    for flag, options in having.items():
        words = next(iter(options.values())).words
        if any(option.words != words for option in options.values()):
            raise TypeError(f"{flag}: {', '.join(options)} differ in the words behind it; rename the field in one")
        metavar = "|".join(dict.fromkeys(option.metavar for option in options.values() if option.metavar))
        keywords = {"dest": _PREFIX + flag, "help": _help(options, dropping), **words}
        keywords |= {"metavar": metavar} if metavar else {}
        for spelling in (flag, "--policy-" + flag[2:]):
            # Another option of the command may have that name.
            with contextlib.suppress(argparse.ArgumentError):
                group.add_argument(spelling, *filter(None, [_ALIASES.get(flag)]), **keywords)
                spelled[flag] = spelling
                break
    parser.set_defaults(policy_spellings=spelled)


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
    nested = _takes_base(cls)
    require(options.base is None or nested, "--base", options.base, f"{options.policy} is not built on a policy")
    name = (options.base or _BASE) if nested else options.policy
    inner = policy_class(name) if nested else cls
    own, theirs = _own_options_of(cls) if nested else {}, options_of(inner)
    mine: dict[str, Any] = {}
    given: dict[str, Any] = {}
    for flag, said, words in _given(options):
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


def given_flags(options: argparse.Namespace) -> dict[str, str]:
    """Policies' options that were given, and how the user wrote each.

    Args:
        options: of a parser with `add_policy_options`.

    Returns:
        By flag.
    """
    base = {} if options.base is None else {"--base": f"--base={options.base}"}
    return base | {flag: said for flag, said, _ in _given(options)}


def only(options: argparse.Namespace, name: str, flags: set[str]) -> argparse.Namespace:
    """The options as if another policy had been asked for, with no more of policies' options than it has.

    Args:
        options: of a parser with `add_policy_options`.
        name: the policy.
        flags: its own, from `flags_of`.

    Returns:
        A copy.
    """
    given = vars(options) | {"policy": name}
    for flag in given_flags(options).keys() - flags:
        given["base" if flag == "--base" else _PREFIX + flag] = None
    return argparse.Namespace(**given)


def _given(options: argparse.Namespace) -> Iterator[tuple[str, str, Any]]:
    """Each option that was given: its flag, how the user wrote it, and the words."""
    for flag, spelling in options.policy_spellings.items():
        words = getattr(options, _PREFIX + flag)
        if isinstance(words, bool):
            yield flag, spelling if words else f"--no-{spelling[2:]}", words
        elif words is not None:
            text = words if isinstance(words, str) else " ".join(words)
            yield flag, f"{spelling}={shortened(text)}", words

"""Dataclasses as options: flags, types and defaults from the fields, help from the docstring's "Attributes".

Commands, tasks, the sampling and policies say their options in this one way. A new policy or task needs no line here.
"""

import argparse
import dataclasses
import enum
import math
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import MISSING
from functools import lru_cache, partial
from typing import Annotated, Any, NoReturn, Union

from jaxkv._checks import FARTHEST, shortened
from jaxkv._errors import require
from jaxkv.policies import AvgPool, MaxPool, Merge, NoPool, Policy
from jaxkv.policies.checks import Budget, bytes_of
from jaxkv.policies.layer_budgets import LayerBudgets
from jaxkv.policies.merger import Merger
from jaxkv.policies.registry import POLICIES, documented, policy_class, takes_budget
from jaxkv.policies.wrapper import Wrapper

# Second spellings of flags.
_ALIASES = {"--filter-layers": ["--filters"], "--out": ["-o"]}
_POLICY = "policy "
# mypy takes classes for values without a hash.
_cached: Any = lru_cache(maxsize=None)
_SHARED = frozenset(field.name for field in dataclasses.fields(Policy))
# Options that set how many entries are kept or read, as a budget does.
_SIZES = frozenset({"--budget", "--mem"})


def whole(text: str, least: int = -FARTHEST, most: int = FARTHEST) -> int:
    """Integer from `least` to `most` parsed from text; ValueError for other text."""
    try:
        value = int(text)
    except ValueError:
        raise ValueError("give a whole number") from None
    if not least <= value <= most:
        raise ValueError(f"give a whole number from {least} to {most}")
    return value


def real(text: str) -> float:
    """Finite float parsed from text; ValueError for other text."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError("give a number, such as 0.2") from None
    if not math.isfinite(value):
        raise ValueError("give a finite number")
    return value


def _number(text: str) -> int | float:
    """Int parsed from text that is written as one, else a float: as a budget, 1 is one entry and 1.0 is all entries."""
    try:
        return whole(text)
    except ValueError:
        return real(text)


def budget(text: str) -> int | float | str:
    """Budget parsed from text: entries (int), a share (float), or bytes such as "64MB" as they stand; else ValueError."""
    return text if bytes_of(text) else _number(text)


def _span(text: str) -> tuple[int, int]:
    """Pair (first position, last + 1) of a span, parsed from text such as 100:200; ValueError for other text."""
    first, colon, last = text.partition(":")
    if not colon:
        raise ValueError("give first and last + 1, such as 100:200")
    return whole(first), whole(last)


def one_of(choices: Iterable[Any]) -> Callable[[str], Any]:
    """Returns a function from text to that of the choices that is written so; its ValueError lists them."""
    named = {str(getattr(each, "value", each)): each for each in choices}

    def read(text: str) -> Any:
        if text not in named:
            raise ValueError(f"use one of {', '.join(named)}")
        return named[text]

    return read


def _each(read: Callable[[str], Any], words: Iterable[str]) -> tuple[Any, ...]:
    """Tuple of what `read` parses from each part of the words, which commas part as well."""
    return tuple(read(part) for word in words for part in word.split(",") if part)


@dataclasses.dataclass(frozen=True)
class Word:
    """How the words behind an option become a value; `Annotated[int, Word(...)]` gives a field its own.

    Attributes:
        metavar: a word's name in the help.
        read: from the word, or a list of words, or a switch's bool, to the value; its ValueError says what to give.
        action: argparse's: "store" for a word, "extend" for several, "append" for one each time, or a switch's class.
        place: True for an argument without a flag, which its place tells.
    """

    metavar: str
    read: Callable[[Any], Any] = str
    action: Any = "store"
    place: bool = False


Count = Annotated[int, Word("N", partial(whole, least=1))]
Natural = Annotated[int, Word("N", partial(whole, least=0))]
Seed = Annotated[int, Word("N", partial(whole, least=-(2**63), most=2**64 - 1))]
File = Annotated[str, Word("FILE")]
Folder = Annotated[str, Word("DIR")]
Name = Annotated[str, Word("NAME")]
Mesh = Annotated[str, Word("DxM")]


def commas(read: Callable[[str], Any], metavar: str = "N,N") -> Word:
    """`Word` of one word that holds several values with commas between them; they become a tuple."""
    return Word(metavar, lambda text: _each(read, [text]))


def _word(hint: Any) -> Word | None:
    """`Word` by a type annotation; None for what cannot be written as text."""
    union = typing.get_origin(hint) in (Union, types.UnionType)
    kinds = [*typing.get_args(hint)] if union else [hint]
    for kind in kinds:
        if typing.get_origin(kind) is Annotated:
            return kind.__metadata__[0]
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            values = ",".join(str(member.value) for member in kind)
            return Word("{" + values + "}", one_of(kind))
    if str in kinds:
        return Word("N", budget) if float in kinds else Word("TEXT")
    if float in kinds:
        return Word("N", _number) if int in kinds else Word("X", real)
    if int in kinds:
        return Word("N", whole)
    if hint is bool:
        return Word("", bool, argparse.BooleanOptionalAction)
    if typing.get_origin(kinds[0]) is not tuple:
        return None
    item = typing.get_args(kinds[0])[0]
    if item == tuple[int, int]:
        return Word("A:B", partial(_each, _span), "append")
    one = _word(item)
    return one and Word(one.metavar, partial(_each, one.read), "extend")


@dataclasses.dataclass(frozen=True)
class Option:
    """A dataclass's field as an option: its flag or place, how its words are read, and its help.

    Attributes:
        name: the field's name.
        flag: the option's first spelling; what stands for it in the help, if its place tells it.
        word: how its words become the value.
        about: its help.
        default: the field's default; `MISSING` if it must be given.
    """

    name: str
    flag: str
    word: Word
    about: str
    default: Any

    def value(self, words: Any) -> Any:
        """The field's value read from what argparse has; a ValueError names the option."""
        try:
            return self.word.read(words)
        except ValueError as error:
            raise ValueError(f"{written(self.flag, words)}: {error}") from None

    @property
    def help(self) -> str:
        """Its help, with the default where there is one to show."""
        default = self.default.value if isinstance(self.default, enum.Enum) else self.default
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        hidden = default in (MISSING, None, "", ()) or isinstance(default, bool)
        return self.about if hidden else f"{self.about} (default: {shortened(shown)})"

    def add_to(self, parser: argparse.ArgumentParser, group: Any, prefix: str = "") -> None:
        """Adds the option to a parser's group; if its flag is taken, with the prefix in it, such as --task-batch."""
        more: dict[str, Any] = {"action": self.word.action, "help": self.help.replace("%", "%%")}
        if isinstance(self.word.action, str):
            more["metavar"] = self.word.metavar
        if self.word.action == "extend":
            more["nargs"] = "+"
        if not self.word.place:
            taken = self.flag in parser._option_string_actions
            flag = f"--{prefix.strip()}-{self.flag[2:]}" if taken else self.flag
            more["dest"], more["required"] = prefix + self.flag, self.default is MISSING
            group.add_argument(flag, *_ALIASES.get(self.flag, ()), **more)
        else:
            group.add_argument(self.flag, **more)


def written(flag: str, words: Any) -> str:
    """An option as it was written, from its flag and what argparse has: --budget=64, --no-merge."""
    if isinstance(words, bool):
        return flag if words else f"--no-{flag[2:]}"
    return f"{flag}={shortened(words if isinstance(words, str) else ' '.join(words))}"


@_cached
def _options_of(cls: type) -> dict[str, Option]:
    """Dict from flag to `Option` of a dataclass's fields that can be written as text, in their order."""
    hints, about = typing.get_type_hints(cls, include_extras=True), documented(cls)
    found: dict[str, Option] = {}
    for field in dataclasses.fields(cls):
        said = about.get(field.name, "").rstrip(".")
        if field.init and (option := _option(field, hints[field.name], said)):
            found[option.flag] = option
    return found


def _option(field: dataclasses.Field, hint: Any, about: str) -> Option | None:
    """A field's `Option`; None if its type cannot be written as text."""
    word, default = _word(hint), typing.cast(Any, field.default)
    flag = ("--" if len(field.name) > 1 else "-") + field.name.replace("_", "-")
    # Parts of a policy that one number or a switch says.
    if MaxPool in typing.get_args(hint):
        kind = AvgPool if isinstance(default, AvgPool) else MaxPool
        flag, word = "--pool-kernel", Word("K", partial(_pooling, kind))
        about = "width of the pooling over neighbours, odd; 1 for none"
    elif isinstance(default, LayerBudgets) and hasattr(default, "beta"):
        part: Any = default
        flag, word = "--beta", Word("X", lambda text: dataclasses.replace(part, beta=real(text)))
        about = "steepness of the budgets over layers, 1 is flat"
    elif Merger in (hint, *typing.get_args(hint)):
        folding = Merge() if default is None else default
        read = lambda yes: folding if yes else None  # noqa: E731
        word = Word("", read, argparse.BooleanOptionalAction)
        about = "fold dropped entries into their nearest kept entries, or drop them"
    if word is None:
        return None
    flag = word.metavar if word.place else flag
    return Option(field.name, flag, word, about, default)


def _pooling(kind: Any, text: str) -> MaxPool | AvgPool | NoPool:
    """Pooling of a class with the kernel width parsed from text; `NoPool` for width 1."""
    kernel = whole(text)
    return NoPool() if kernel == 1 else kind(kernel)


def _nested(cls: type, prefix: str) -> dict[str, Any]:
    """Dict of a command's fields that are dataclasses, or policies, with options of their own, and their classes."""
    hints = {} if prefix else typing.get_type_hints(cls)
    return {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}


def add_options(
    parser: argparse.ArgumentParser, cls: type, prefix: str = "", leave: Iterable[str] = ()
) -> None:
    """Adds an option for each field of a dataclass, but those in `leave`, to a parser.

    An option whose name is taken has `prefix` before it, such as --task-batch.
    """
    group: Any = parser.add_argument_group(prefix.strip()) if prefix else parser
    for option in _options_of(cls).values():
        if option.name not in leave:
            option.add_to(parser, group, prefix)
    for name, kind in _nested(cls, prefix).items():
        if kind is Spelled:
            add_policy_options(parser)
        else:
            add_options(parser, kind, f"{name} ")


def picked(command: Any, names: str) -> dict[str, Any]:
    """Dict of these fields of a command."""
    return {name: getattr(command, name) for name in names.split()}


def add_command(parser: argparse.ArgumentParser, cls: Any) -> None:
    """Adds a command's options, and what its class `add`s, to its parser, which then runs it."""
    add_options(parser, cls)
    if hasattr(cls, "add"):
        cls.add(parser)
    parser.set_defaults(run=lambda options: made(cls, options).run(), command=parser)


def made(cls: Any, options: argparse.Namespace, prefix: str = "", **more: Any) -> Any:
    """Makes a dataclass of the parsed options that were given, and `more`; other fields keep their defaults."""
    values, given = more, vars(options)
    for flag, option in _options_of(cls).items():
        words = given.get(prefix + flag)
        if words is not None:
            values[option.name] = option.value(words)
    for name, kind in _nested(cls, prefix).items():
        if kind is Spelled:
            values[name] = chosen(options)
        elif any(given.get(f"{name} {flag}") is not None for flag in _options_of(kind)):
            values[name] = made(kind, options, f"{name} ")
    return cls(**values)


# --- Policies ----------------------------------------------------------------------------------------------------


@_cached
def policy_options(cls: type[Policy]) -> dict[str, Option]:
    """Dict from flag to `Option` of a policy class's fields that have an effect."""
    without = {"base"} if takes_budget(cls) else {"base", "budget", "min_budget"}
    if not cls().composed.drops:  # it keeps all entries, and may read fewer
        without |= _SHARED - {"budget", "store"}
    return {flag: each for flag, each in _options_of(cls).items() if each.name not in without}


def _own_options(cls: type[Policy]) -> dict[str, Option]:
    """Dict from flag to `Option` of a wrapper policy's own fields; all others are its base's, or no wrapper's."""
    wraps = issubclass(cls, Wrapper)
    mine = policy_options(cls).items() if wraps else ()
    return {flag: each for flag, each in mine if each.name not in _SHARED | {"base"}}


def flags_of(cls: type[Policy]) -> list[str]:
    """List of flags that a policy class accepts on the command line; for a wrapper, its default base's flags too."""
    if not issubclass(cls, Wrapper):
        return list(policy_options(cls))
    return list({"--base": None, **_own_options(cls), **policy_options(policy_class(cls.usual))})


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--policy`, `--base` and all registered policies' options to a parser, after its other options."""
    about = "An option that the policy does not have is rejected."
    group = parser.add_argument_group("policy", about)
    about = f"{', '.join(POLICIES)} (default: full)"
    group.add_argument("--policy", default="full", metavar="NAME", help=about)
    bases = ", ".join(
        f"{cls.usual} of {name}" for name, cls in POLICIES.items() if issubclass(cls, Wrapper)
    )
    about = f"the policy that another is built on (default: {bases})"
    group.add_argument("--base", dest=_POLICY + "--base", metavar="NAME", help=about)
    having: dict[str, dict[str, Option]] = {}
    for name, cls in POLICIES.items():
        for flag, option in policy_options(cls).items():
            having.setdefault(flag, {})[name] = option
    for flag, options in having.items():
        word = next(iter(options.values())).word
        metavar = "|".join(dict.fromkeys(each.word.metavar for each in options.values()))
        word = dataclasses.replace(word, metavar=metavar)
        Option(flag, flag, word, _help(options), None).add_to(parser, group, _POLICY)


def _help(having: dict[str, Option]) -> str:
    """Help text of an option: its distinct texts, each after its policies' names, or those without it if fewer."""
    texts: dict[str, list[str]] = {}
    for name, option in having.items():
        texts.setdefault(option.about, []).append(name)
    lines = []
    for text, names in texts.items():
        others = [name for name in POLICIES if name not in names]
        whose = f"all but {', '.join(others)}" if len(others) < len(names) else ", ".join(names)
        lines.append(f"{whose}: {text}" if others else text)
    return ". ".join(lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spelled:
    """One policy as it was written: its name and the words behind its options.

    Attributes:
        name: the policy's name.
        given: what argparse has for each flag that was given, `--base` among them.
        text: its words, a space between them, where it stands in a list of policies.
        where: begins its errors: the option that it stands in.
    """

    name: str
    given: dict[str, Any]
    text: str = ""
    where: str = ""

    @property
    def takes_budget(self) -> bool:
        """True if it may be given a budget: its class takes one, and its own words say none."""
        return takes_budget(policy_class(self.name)) and not _SIZES & self.given.keys()

    @property
    def flags(self) -> set[str]:
        """Set of the flags that the policy accepts."""
        return set(flags_of(policy_class(self.name)))

    def over(self, shared: dict[str, Any]) -> "Spelled":
        """Adds to a policy's options those of `shared` that it has and does not say itself."""
        theirs = {flag: words for flag, words in shared.items() if flag in self.flags}
        return dataclasses.replace(self, given=theirs | self.given)

    def at(self, budget: Budget) -> Policy:
        """Builds the policy at a budget, entries, a share or bytes; ValueError for bad options."""
        return self.over({"--budget": str(budget)}).policy()

    def policy(self) -> Policy:
        """Builds the policy; ValueError for an option that it does not have, and for bad ones."""
        try:
            return self._made()
        except ValueError as error:
            raise ValueError(f"{self.where}{error}") from None

    def _made(self) -> Policy:
        cls, given = policy_class(self.name), dict(self.given)
        base, own, inner = given.pop("--base", None), _own_options(cls), cls
        if issubclass(cls, Wrapper):
            base = base or cls.usual
            inner = policy_class(base)
        else:
            require(base is None, "--base", base, f"{self.name} is not supported on a policy")
        mine: dict[str, Any] = {}
        fields: dict[str, Any] = {}
        for flag, words in given.items():
            option = own.get(flag) or policy_options(inner).get(flag)
            if option is None:
                of = f"{self.name} over {base}" if base else self.name
                raise ValueError(f"{written(flag, words)}: {of} has no such option; leave it out")
            (mine if flag in own else fields)[option.name] = option.value(words)
        policy = inner(**fields)
        if issubclass(cls, Wrapper):
            policy = cls(base=policy, **mine)
        if fields.get("merge", ...) is None and policy.parts().merge is not None:
            raise ValueError(f"--no-merge: {self.name} always folds; leave it out")
        return policy


def chosen(options: argparse.Namespace) -> Spelled:
    """`Spelled` policy of a command's parsed options."""
    given = {
        name.removeprefix(_POLICY): words
        for name, words in vars(options).items()
        if name.startswith(_POLICY) and words is not None
    }
    return Spelled(name=options.policy, given=given)


class _Parser(argparse.ArgumentParser):
    """Argument parser of one policy's words that raises ValueError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def spelled(given: str, option: str) -> list[Spelled]:
    """List of the policies in an option's text, such as "full,adakv --alpha 0"; ValueError if there is none."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_policy_options(parser)
    entries = list(filter(None, (" ".join(each.split()) for each in given.split(","))))
    require(bool(entries), option, given, f"give some of {', '.join(POLICIES)}")
    found = []
    for text in entries:
        where = f"{option}={text!r}: "
        try:
            one = chosen(parser.parse_args(["--policy", *text.split()]))
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None
        cls = policy_class(one.name)
        known = next(name for name, each in POLICIES.items() if each is cls)
        words = " ".join([known, *text.split()[1:]])
        found.append(dataclasses.replace(one, name=known, text=words, where=where))
    return found

"""Dataclasses as options: flags, types and defaults from the fields, help from the docstring's "Attributes".

Commands, tasks, sampling and policies all declare their options in this way. New ones need no code here.
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

# Alternative spellings of flags.
_ALIASES = {"--filter-layers": ["--filters"], "--out": ["-o"]}
_POLICY = "policy "
# mypy treats classes as unhashable.
_cached: Any = lru_cache(maxsize=None)
_SHARED = frozenset(field.name for field in dataclasses.fields(Policy))
# Options that set how many entries are kept or read, as a budget does.
_SIZES = frozenset({"--budget", "--mem"})


def whole(text: str, least: int = -FARTHEST, most: int = FARTHEST) -> int:
    """Parse an integer from `least` to `most`; ValueError for other text."""
    try:
        value = int(text)
    except ValueError:
        raise ValueError("not a whole number: use one") from None
    if not least <= value <= most:
        raise ValueError(f"out of range: use a whole number from {least} to {most}")
    return value


def real(text: str) -> float:
    """Parse a finite float; ValueError for other text."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError("not a number: use one, such as 0.2") from None
    if not math.isfinite(value):
        raise ValueError("not finite: use a finite number")
    return value


def _number(text: str) -> int | float:
    """Parse an int, or else a float: as a budget, 1 is one entry and 1.0 is all entries."""
    try:
        return whole(text)
    except ValueError:
        return real(text)


def budget(text: str) -> int | float | str:
    """Parse a budget: entries (int), a share (float), or bytes such as "64MB" as text; ValueError for other text."""
    return text if bytes_of(text) else _number(text)


def _span(text: str) -> tuple[int, int]:
    """Parse a span such as 100:200, from its first position to its last + 1; ValueError for other text."""
    first, colon, last = text.partition(":")
    if not colon:
        raise ValueError("not a span: use first:last+1, such as 100:200")
    return whole(first), whole(last)


def one_of(choices: Iterable[Any]) -> Callable[[str], Any]:
    """Return a function that parses one of the choices; its ValueError lists them."""
    named = {str(getattr(each, "value", each)): each for each in choices}

    def read(text: str) -> Any:
        if text not in named:
            raise ValueError(f"use one of {', '.join(named)}")
        return named[text]

    return read


def _each(read: Callable[[str], Any], words: Iterable[str]) -> tuple[Any, ...]:
    """Parse each part of the words, which commas separate as well, with `read`; return a tuple."""
    return tuple(read(part) for word in words for part in word.split(",") if part)


@dataclasses.dataclass(frozen=True)
class Word:
    """How the words of an option become a value; `Annotated[int, Word(...)]` sets it for one field.

    Attributes:
        metavar: name of a word in the help.
        read: converts the word, a list of words, or a switch's bool to the value; its ValueError states the remedy.
        action: argparse's action: "store", "extend" for several words, "append" for one each time, or a switch's class.
        place: True for a positional argument.
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
    """`Word` of one word with several values, separated by commas; the value is a tuple."""
    return Word(metavar, lambda text: _each(read, [text]))


def _word(hint: Any) -> Word | None:
    """Return the `Word` of a type annotation; None for types without a text form."""
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
    """A dataclass field as an option: its flag or position, how its words are parsed, and its help.

    Attributes:
        name: name of the field.
        flag: first spelling of the option; for a positional argument, its name in the help.
        word: how its words become the value.
        about: help text.
        default: default of the field; `MISSING` if it is required.
    """

    name: str
    flag: str
    word: Word
    about: str
    default: Any

    def value(self, words: Any) -> Any:
        """Parse the field's value from argparse's words; a ValueError names the option."""
        try:
            return self.word.read(words)
        except ValueError as error:
            raise ValueError(f"{written(self.flag, words)}: {error}") from None

    @property
    def help(self) -> str:
        """Help text, with the default if it is shown."""
        default = self.default.value if isinstance(self.default, enum.Enum) else self.default
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        hidden = default in (MISSING, None, "", ()) or isinstance(default, bool)
        return self.about if hidden else f"{self.about} (default: {shortened(shown)})"

    def add_to(self, parser: argparse.ArgumentParser, group: Any, prefix: str = "") -> None:
        """Add the option to a group of a parser; if its flag is taken, with the prefix, such as --task-batch."""
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
    """Format an option as on the command line, from its flag and argparse's words: --budget=64, --no-merge."""
    if isinstance(words, bool):
        return flag if words else f"--no-{flag[2:]}"
    return f"{flag}={shortened(words if isinstance(words, str) else ' '.join(words))}"


@_cached
def _options_of(cls: type) -> dict[str, Option]:
    """Return options by flag, one per field of a dataclass that has a text form, in order."""
    hints, about = typing.get_type_hints(cls, include_extras=True), documented(cls)
    found: dict[str, Option] = {}
    for field in dataclasses.fields(cls):
        said = about.get(field.name, "").rstrip(".")
        if field.init and (option := _option(field, hints[field.name], said)):
            found[option.flag] = option
    return found


def _option(field: dataclasses.Field, hint: Any, about: str) -> Option | None:
    """Return the `Option` of a field; None if its type has no text form."""
    word, default = _word(hint), typing.cast(Any, field.default)
    flag = ("--" if len(field.name) > 1 else "-") + field.name.replace("_", "-")
    # Parts of a policy that one number or a switch sets.
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
        about = "merge evicted entries into their nearest kept entries, or only evict them"
    if word is None:
        return None
    flag = word.metavar if word.place else flag
    return Option(field.name, flag, word, about, default)


def _pooling(kind: Any, text: str) -> MaxPool | AvgPool | NoPool:
    """Parse the kernel width of a pooling class; `NoPool` for width 1."""
    kernel = whole(text)
    return NoPool() if kernel == 1 else kind(kernel)


def _nested(cls: type, prefix: str) -> dict[str, Any]:
    """Return the fields of a command that are dataclasses or policies with options of their own, by name."""
    hints = {} if prefix else typing.get_type_hints(cls)
    return {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}


def add_options(
    parser: argparse.ArgumentParser, cls: type, prefix: str = "", leave: Iterable[str] = ()
) -> None:
    """Add an option for each field of a dataclass, except those in `leave`, to a parser.

    An option whose name is taken gets the prefix `prefix`, such as --task-batch.
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
    """Return these fields of a command by name."""
    return {name: getattr(command, name) for name in names.split()}


def add_command(parser: argparse.ArgumentParser, cls: Any) -> None:
    """Add a command's options, and those of its class's `add`, to its parser, and set the command to run."""
    add_options(parser, cls)
    if hasattr(cls, "add"):
        cls.add(parser)
    parser.set_defaults(run=lambda options: made(cls, options).run(), command=parser)


def made(cls: Any, options: argparse.Namespace, prefix: str = "", **more: Any) -> Any:
    """Build a dataclass from the parsed options and `more`; other fields keep their defaults."""
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
    """Return options by flag for the fields of a policy class that have an effect."""
    without = {"base"} if takes_budget(cls) else {"base", "budget", "min_budget"}
    if not cls().composed.drops:  # evicts nothing, but may read fewer entries
        without |= _SHARED - {"budget", "store"}
    return {flag: each for flag, each in _options_of(cls).items() if each.name not in without}


def _own_options(cls: type[Policy]) -> dict[str, Option]:
    """Return options by flag for a wrapper's own fields; all others belong to its base."""
    wraps = issubclass(cls, Wrapper)
    mine = policy_options(cls).items() if wraps else ()
    return {flag: each for flag, each in mine if each.name not in _SHARED | {"base"}}


def flags_of(cls: type[Policy]) -> list[str]:
    """List the flags of a policy class on the command line; for a wrapper, with those of its default base."""
    if not issubclass(cls, Wrapper):
        return list(policy_options(cls))
    return list({"--base": None, **_own_options(cls), **policy_options(policy_class(cls.usual))})


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Add `--policy`, `--base` and the options of all registered policies to a parser, after its other options."""
    about = "An option that the policy does not support is rejected."
    group = parser.add_argument_group("policy", about)
    about = f"{', '.join(POLICIES)} (default: full)"
    group.add_argument("--policy", default="full", metavar="NAME", help=about)
    bases = ", ".join(
        f"{cls.usual} of {name}" for name, cls in POLICIES.items() if issubclass(cls, Wrapper)
    )
    about = f"base policy of a wrapper (default: {bases})"
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
    """Format the help of an option: its distinct texts, each after the names of its policies or of the others."""
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
    """One policy as written on the command line: its name and the words of its options.

    Attributes:
        name: name of the policy.
        given: argparse's words of each flag, including `--base`.
        text: the words, separated by spaces, for a policy in a list.
        where: prefix of its errors: the option that contains it.
    """

    name: str
    given: dict[str, Any]
    text: str = ""
    where: str = ""

    @property
    def takes_budget(self) -> bool:
        """True if a budget may be added: the class supports one, and the words set none."""
        return takes_budget(policy_class(self.name)) and not _SIZES & self.given.keys()

    @property
    def flags(self) -> set[str]:
        """Flags that the policy accepts."""
        return set(flags_of(policy_class(self.name)))

    def over(self, shared: dict[str, Any]) -> "Spelled":
        """Add the options of `shared` that the policy supports and does not set itself."""
        theirs = {flag: words for flag, words in shared.items() if flag in self.flags}
        return dataclasses.replace(self, given=theirs | self.given)

    def at(self, budget: Budget) -> Policy:
        """Build the policy at a budget in entries, as a share or in bytes; ValueError for invalid options."""
        return self.over({"--budget": str(budget)}).policy()

    def policy(self) -> Policy:
        """Build the policy; ValueError for unsupported or invalid options."""
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
            require(base is None, "--base", base, f"{self.name} supports no base: leave it out")
        mine: dict[str, Any] = {}
        fields: dict[str, Any] = {}
        for flag, words in given.items():
            option = own.get(flag) or policy_options(inner).get(flag)
            if option is None:
                of = f"{self.name} over {base}" if base else self.name
                raise ValueError(f"{written(flag, words)}: {of} has no such option: leave it out")
            (mine if flag in own else fields)[option.name] = option.value(words)
        policy = inner(**fields)
        if issubclass(cls, Wrapper):
            policy = cls(base=policy, **mine)
        if fields.get("merge", ...) is None and policy.parts().merge is not None:
            raise ValueError(f"--no-merge: {self.name} always merges: leave it out")
        return policy


def chosen(options: argparse.Namespace) -> Spelled:
    """Return the `Spelled` policy of a command's parsed options."""
    given = {
        name.removeprefix(_POLICY): words
        for name, words in vars(options).items()
        if name.startswith(_POLICY) and words is not None
    }
    return Spelled(name=options.policy, given=given)


class _Parser(argparse.ArgumentParser):
    """Parser of one policy's words that raises ValueError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def spelled(given: str, option: str) -> list[Spelled]:
    """Parse the policies in an option's text, such as "full,adakv --alpha 0"; ValueError if there is none."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_policy_options(parser)
    entries = list(filter(None, (" ".join(each.split()) for each in given.split(","))))
    require(bool(entries), option, given, f"no policy: use some of {', '.join(POLICIES)}")
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

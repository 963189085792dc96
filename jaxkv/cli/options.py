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
from typing import Annotated, Any, Literal, NoReturn, Union

from jaxkv._checks import FARTHEST, shorten_text
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.cli.outputs import write_to_stderr
from jaxkv.policies import AvgPool, MaxPool, Merge, NoPool, Policy
from jaxkv.policies.checks import Budget, parse_byte_count
from jaxkv.policies.layer_budgets import LayerBudgets
from jaxkv.policies.merger import Merger
from jaxkv.policies.methods.auto import Auto
from jaxkv.policies.registry import (
    POLICIES,
    find_policy_class,
    parse_field_descriptions,
    takes_budget,
)
from jaxkv.policies.wrapper import PolicyWrapper

# Alternative spellings of flags.
_ALIASES = {"--filter-layers": ["--filters"], "--out": ["-o"]}
_POLICY = "policy "
# mypy treats classes as unhashable.
_cached: Any = lru_cache(maxsize=None)
_SHARED = frozenset(field.name for field in dataclasses.fields(Policy))
# Options that set how many entries are kept or read, as a budget does.
_SIZES = frozenset({"--budget", "--mem"})


def parse_integer(text: str, least: int = -FARTHEST, most: int = FARTHEST) -> int:
    """Parse text as an int from `least` to `most`, both inclusive; ValueError for other text."""
    try:
        value = int(text)
    except ValueError:
        raise ValueError("not a whole number: use one") from None
    if not least <= value <= most:
        raise ValueError(f"out of range: use a whole number from {least} to {most}")
    return value


def parse_finite_float(text: str) -> float:
    """Parse text as a finite float; ValueError for other text, inf and nan."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError("not a number: use one, such as 0.2") from None
    if not math.isfinite(value):
        raise ValueError("not finite: use a finite number")
    return value


def _parse_int_or_float(text: str) -> int | float:
    """Parse text as an int, or else as a finite float: as a budget, 1 is one entry and 1.0 is all entries."""
    try:
        return parse_integer(text)
    except ValueError:
        return parse_finite_float(text)


def parse_budget(text: str) -> int | float | str:
    """Parse a budget: entries as int, a share as float, bytes such as "64MB" as unchanged text; else ValueError."""
    return text if parse_byte_count(text) else _parse_int_or_float(text)


def _parse_span(text: str) -> tuple[int, int]:
    """Parse a span of positions such as 100:200 to (first, last + 1); ValueError for other text."""
    first, colon, last = text.partition(":")
    if not colon:
        raise ValueError("not a span: use first:last+1, such as 100:200")
    return parse_integer(first), parse_integer(last)


def make_choice_parser(choices: Iterable[Any]) -> Callable[[str], Any]:
    """Return a parser from text to the one of `choices` with this text or enum value; its ValueError lists them all."""
    named = {str(getattr(each, "value", each)): each for each in choices}

    def read(text: str) -> Any:
        if text not in named:
            raise ValueError(f"use one of {', '.join(named)}")
        return named[text]

    return read


def _parse_comma_separated(read: Callable[[str], Any], words: Iterable[str]) -> tuple[Any, ...]:
    """Split each word at commas and parse all non-empty parts with `read`; return the values as a tuple."""
    return tuple(read(part) for word in words for part in word.split(",") if part)


@dataclasses.dataclass(frozen=True)
class ArgumentSpec:
    """How an option's words become a value; `Annotated[int, ArgumentSpec(...)]` sets it for one dataclass field.

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


Count = Annotated[int, ArgumentSpec("N", partial(parse_integer, least=1))]
Natural = Annotated[int, ArgumentSpec("N", partial(parse_integer, least=0))]
Seed = Annotated[int, ArgumentSpec("N", partial(parse_integer, least=-(2**63), most=2**64 - 1))]
File = Annotated[str, ArgumentSpec("FILE")]
Folder = Annotated[str, ArgumentSpec("DIR")]
Name = Annotated[str, ArgumentSpec("NAME")]
Mesh = Annotated[str, ArgumentSpec("DxM")]


def make_comma_list_spec(read: Callable[[str], Any], metavar: str = "N,N") -> ArgumentSpec:
    """Return an `ArgumentSpec` whose one word holds values separated by commas; the parsed value is a tuple."""
    return ArgumentSpec(metavar, lambda text: _parse_comma_separated(read, [text]))


def _derive_argument_spec(hint: Any) -> ArgumentSpec | None:
    """Return the `ArgumentSpec` that parses words to a value of type `hint`; None for types without a text form."""
    union = typing.get_origin(hint) in (Union, types.UnionType)
    kinds = [*typing.get_args(hint)] if union else [hint]
    for kind in kinds:
        if typing.get_origin(kind) is Annotated:
            return kind.__metadata__[0]
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            values = ",".join(str(member.value) for member in kind)
            return ArgumentSpec("{" + values + "}", make_choice_parser(kind))
    if str in kinds:
        return ArgumentSpec("N", parse_budget) if float in kinds else ArgumentSpec("TEXT")
    if float in kinds:
        return (
            ArgumentSpec("N", _parse_int_or_float)
            if int in kinds
            else ArgumentSpec("X", parse_finite_float)
        )
    if Literal["question"] in kinds:
        return ArgumentSpec("N", lambda text: text if text == "question" else parse_integer(text))
    if int in kinds:
        return ArgumentSpec("N", parse_integer)
    if hint is bool:
        return ArgumentSpec("", bool, argparse.BooleanOptionalAction)
    if typing.get_origin(kinds[0]) is not tuple:
        return None
    item = typing.get_args(kinds[0])[0]
    if item == tuple[int, int]:
        return ArgumentSpec("A:B", partial(_parse_comma_separated, _parse_span), "append")
    one = _derive_argument_spec(item)
    return one and ArgumentSpec(one.metavar, partial(_parse_comma_separated, one.read), "extend")


@dataclasses.dataclass(frozen=True)
class FieldOption:
    """A dataclass field as a command-line option: its flag or position, how its words are parsed, and its help.

    Attributes:
        name: name of the field.
        flag: first spelling of the option; for a positional argument, its name in the help.
        word: how its words become the value.
        about: help text.
        default: default of the field; `MISSING` if it is required.
    """

    name: str
    flag: str
    word: ArgumentSpec
    about: str
    default: Any

    def parse_value(self, words: Any) -> Any:
        """Convert argparse's words to the field's value; a ValueError names the option and its words."""
        try:
            return self.word.read(words)
        except ValueError as error:
            raise ValueError(f"{format_option(self.flag, words)}: {error}") from None

    @property
    def help_text(self) -> str:
        """Help text of a command-line option, with its default unless None, empty, a bool or missing."""
        default = self.default.value if isinstance(self.default, enum.Enum) else self.default
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        hidden = default in (MISSING, None, "", ()) or isinstance(default, bool)
        return self.about if hidden else f"{self.about} (default: {shorten_text(shown)})"

    def add_to_parser(self, parser: argparse.ArgumentParser, group: Any, prefix: str = "") -> None:
        """Add a field's option to a parser's group; a flag that exists already is prefixed: --task-batch."""
        more: dict[str, Any] = {
            "action": self.word.action,
            "help": self.help_text.replace("%", "%%"),
        }
        if isinstance(self.word.action, str):
            more["metavar"] = self.word.metavar
        if self.word.action == "extend":
            more["nargs"] = "+"
        if not self.word.place:
            taken = self.flag in parser._option_string_actions
            flag = f"--{prefix.strip()}-{self.flag[2:]}" if taken else self.flag
            more["dest"] = prefix + self.flag
            more["required"] = self.default is MISSING
            group.add_argument(flag, *_ALIASES.get(self.flag, ()), **more)
        else:
            group.add_argument(self.flag, **more)


def format_option(flag: str, words: Any) -> str:
    """Format a flag and argparse's words, shortened, as on the command line: --budget=64; a switch as --no-merge."""
    if isinstance(words, bool):
        return flag if words else f"--no-{flag[2:]}"
    return f"{flag}={shorten_text(words if isinstance(words, str) else ' '.join(words))}"


@_cached
def _collect_field_options(cls: type) -> dict[str, FieldOption]:
    """Return a dataclass's `FieldOption` by flag, in order of its fields; fields without a text form have none."""
    hints = typing.get_type_hints(cls, include_extras=True)
    about = parse_field_descriptions(cls)
    found: dict[str, FieldOption] = {}
    for field in dataclasses.fields(cls):
        said = about.get(field.name, "").rstrip(".")
        if field.init and (option := _make_field_option(field, hints[field.name], said)):
            found[option.flag] = option
    return found


def _make_field_option(field: dataclasses.Field, hint: Any, about: str) -> FieldOption | None:
    """Return a dataclass field's `FieldOption`, also for some policy parts; None if it has no text form."""
    word = _derive_argument_spec(hint)
    default = typing.cast(Any, field.default)
    flag = ("--" if len(field.name) > 1 else "-") + field.name.replace("_", "-")
    # Parts of a policy that one number or a switch sets.
    if MaxPool in typing.get_args(hint):
        kind = AvgPool if isinstance(default, AvgPool) else MaxPool
        flag = "--pool-kernel"
        word = ArgumentSpec("K", partial(_parse_pool_kernel, kind))
        about = "width of the pooling over neighbours, odd; 1 for none"
    elif isinstance(default, LayerBudgets) and hasattr(default, "beta"):
        part: Any = default
        flag = "--beta"
        word = ArgumentSpec(
            "X", lambda text: dataclasses.replace(part, beta=parse_finite_float(text))
        )
        about = "steepness of the budgets over layers, 1 is flat"
    elif Merger in (hint, *typing.get_args(hint)):
        folding = Merge() if default is None else default
        read = lambda yes: folding if yes else None  # noqa: E731
        word = ArgumentSpec("", read, argparse.BooleanOptionalAction)
        about = "merge evicted entries into their nearest kept entries, or only evict them"
    if word is None:
        return None
    flag = word.metavar if word.place else flag
    return FieldOption(field.name, flag, word, about, default)


def _parse_pool_kernel(kind: Any, text: str) -> MaxPool | AvgPool | NoPool:
    """Parse a kernel width; return a `kind` (`MaxPool` or `AvgPool`) of that width, or `NoPool` for width 1."""
    kernel = parse_integer(text)
    return NoPool() if kernel == 1 else kind(kernel)


def _find_nested_dataclasses(cls: type, prefix: str) -> dict[str, Any]:
    """Return the classes of a command's dataclass-typed fields by field name; an empty dict if `prefix` is set."""
    hints = {} if prefix else typing.get_type_hints(cls)
    return {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}


def add_dataclass_options(
    parser: argparse.ArgumentParser, cls: type, prefix: str = "", leave: Iterable[str] = ()
) -> None:
    """Add an option to a parser per field of a dataclass and of its nested dataclasses, except fields in `leave`.

    An option whose name is taken gets the prefix `prefix`, such as --task-batch.
    """
    group: Any = parser.add_argument_group(prefix.strip()) if prefix else parser
    for option in _collect_field_options(cls).values():
        if option.name not in leave:
            option.add_to_parser(parser, group, prefix)
    for name, kind in _find_nested_dataclasses(cls, prefix).items():
        if kind is PolicyArguments:
            add_policy_options(parser)
        else:
            add_dataclass_options(parser, kind, f"{name} ")


def pick_fields(command: Any, names: str) -> dict[str, Any]:
    """Return a command's fields as a dict by name; `names` holds the names, separated by spaces."""
    return {name: getattr(command, name) for name in names.split()}


def configure_command_parser(parser: argparse.ArgumentParser, cls: Any) -> None:
    """Add the options of a command class to its subparser, and set the function that builds and runs the command."""
    add_dataclass_options(parser, cls)
    if hasattr(cls, "add_task_subcommands"):
        cls.add_task_subcommands(parser)
    parser.set_defaults(
        run=lambda options: build_dataclass_from_options(cls, options).run_command(), command=parser
    )


def build_dataclass_from_options(
    cls: Any, options: argparse.Namespace, prefix: str = "", **more: Any
) -> Any:
    """Build an instance of `cls` from argparse's parsed options and field values `more`; other fields keep defaults."""
    values = more
    given = vars(options)
    for flag, option in _collect_field_options(cls).items():
        words = given.get(prefix + flag)
        if words is not None:
            values[option.name] = option.parse_value(words)
    for name, kind in _find_nested_dataclasses(cls, prefix).items():
        if kind is PolicyArguments:
            values[name] = extract_policy_arguments(options)
        elif any(given.get(f"{name} {flag}") is not None for flag in _collect_field_options(kind)):
            values[name] = build_dataclass_from_options(kind, options, f"{name} ")
    return cls(**values)


# --- Policies ----------------------------------------------------------------------------------------------------


@_cached
def collect_policy_options(cls: type[Policy]) -> dict[str, FieldOption]:
    """Return a policy class's `FieldOption` objects by flag, without `base` and the fields that have no effect."""
    without = {"base"} if takes_budget(cls) else {"base", "budget", "min_budget"}
    if not cls().composed.compresses_prompts:  # evicts nothing, but may read fewer entries
        without |= _SHARED - {"budget", "store"}
    return {
        flag: each for flag, each in _collect_field_options(cls).items() if each.name not in without
    }


def _collect_wrapper_options(cls: type[Policy]) -> dict[str, FieldOption]:
    """Return the `FieldOption` objects of a wrapper policy's own fields by flag; empty for other policy classes."""
    wraps = issubclass(cls, PolicyWrapper)
    mine = collect_policy_options(cls).items() if wraps else ()
    return {flag: each for flag, each in mine if each.name not in _SHARED | {"base"}}


def list_policy_flags(cls: type[Policy]) -> list[str]:
    """List the command-line flags of a policy class; of a wrapper, with --base and those of its default base."""
    if not issubclass(cls, PolicyWrapper):
        return list(collect_policy_options(cls))
    return list(
        {
            "--base": None,
            **_collect_wrapper_options(cls),
            **collect_policy_options(find_policy_class(cls.usual)),
        }
    )


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Add --policy, --base and registered policies' options, each once, to a parser; flags that it has get a prefix."""
    about = "An option that the policy does not support is rejected."
    group = parser.add_argument_group("policy", about)
    about = f"{', '.join(POLICIES)} (default: full)"
    group.add_argument("--policy", default="full", metavar="NAME", help=about)
    bases = ", ".join(
        f"{cls.usual} of {name}" for name, cls in POLICIES.items() if issubclass(cls, PolicyWrapper)
    )
    about = f"base policy of a wrapper (default: {bases})"
    group.add_argument("--base", dest=_POLICY + "--base", metavar="NAME", help=about)
    having: dict[str, dict[str, FieldOption]] = {}
    for name, cls in POLICIES.items():
        for flag, option in collect_policy_options(cls).items():
            having.setdefault(flag, {})[name] = option
    for flag, options in having.items():
        word = next(iter(options.values())).word
        metavar = "|".join(dict.fromkeys(each.word.metavar for each in options.values()))
        word = dataclasses.replace(word, metavar=metavar)
        FieldOption(flag, flag, word, _format_shared_help(options), None).add_to_parser(
            parser, group, _POLICY
        )


def _format_shared_help(having: dict[str, FieldOption]) -> str:
    """Format the help of an option that policies share: each distinct text, after the names of its policies."""
    texts: dict[str, list[str]] = {}
    for name, option in having.items():
        texts.setdefault(option.about, []).append(name)
    lines = []
    for text, names in texts.items():
        others = [name for name in POLICIES if name not in names]
        whose = f"all but {', '.join(others)}" if len(others) < len(names) else ", ".join(names)
        lines.append(f"{whose}: {text}" if others else text)
    return ". ".join(lines)


@frozen_dataclass
class PolicyArguments:
    """One policy as written on the command line: its name, and the unparsed words of its options by flag.

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
    def has_unset_budget(self) -> bool:
        """True if the policy supports a budget, and its words set neither --budget nor --mem."""
        return takes_budget(find_policy_class(self.name)) and not _SIZES & self.given.keys()

    @property
    def accepted_flags(self) -> set[str]:
        """Command-line flags that the policy accepts; of a wrapper, with those of its default base."""
        return set(list_policy_flags(find_policy_class(self.name)))

    def add_shared_options(self, shared: dict[str, Any]) -> "PolicyArguments":
        """Return a copy of a policy's arguments with those options of `shared` that it accepts and lacks."""
        theirs = {flag: words for flag, words in shared.items() if flag in self.accepted_flags}
        return dataclasses.replace(self, given=theirs | self.given)

    def build_with_budget(self, budget: Budget) -> Policy:
        """Build the `Policy`, with this budget (entries, share, bytes) if it supports one and sets none."""
        return self.add_shared_options({"--budget": str(budget)}).build_policy()

    def build_policy(self) -> Policy:
        """Parse the words of the options and build the `Policy`; ValueError for unsupported or invalid options."""
        try:
            return self._made()
        except ValueError as error:
            raise ValueError(f"{self.where}{error}") from None

    def _made(self) -> Policy:
        cls = find_policy_class(self.name)
        given = dict(self.given)
        base = given.pop("--base", None)
        own = _collect_wrapper_options(cls)
        inner = cls
        if issubclass(cls, PolicyWrapper):
            base = base or cls.usual
            inner = find_policy_class(base)
        else:
            require(base is None, "--base", base, f"{self.name} supports no base: leave it out")
        mine: dict[str, Any] = {}
        fields: dict[str, Any] = {}
        for flag, words in given.items():
            option = own.get(flag) or collect_policy_options(inner).get(flag)
            if option is None:
                of = f"{self.name} over {base}" if base else self.name
                raise ValueError(
                    f"{format_option(flag, words)}: {of} has no such option: leave it out"
                )
            (mine if flag in own else fields)[option.name] = option.parse_value(words)
        policy = inner(**fields)
        if issubclass(cls, PolicyWrapper):
            policy = cls(base=policy, **mine)
        if fields.get("merge", ...) is None and policy.build_policy_parts().merge is not None:
            raise ValueError(f"--no-merge: {self.name} always merges: leave it out")
        if isinstance(policy, Auto):
            write_to_stderr(f"jaxkv: --policy auto is {policy.chosen}: {policy.reason}")
        return policy


def extract_policy_arguments(options: argparse.Namespace) -> PolicyArguments:
    """Return the policy of a command's parsed options, as `PolicyArguments` with words that are not parsed yet."""
    given = {
        name.removeprefix(_POLICY): words
        for name, words in vars(options).items()
        if name.startswith(_POLICY) and words is not None
    }
    return PolicyArguments(name=options.policy, given=given)


class _PolicyParser(argparse.ArgumentParser):
    """`ArgumentParser` of one policy's name and options; raises ValueError where argparse would exit."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse_policy_list(given: str, option: str) -> list[PolicyArguments]:
    """Parse text such as "full,adakv --alpha 0" to a list of `PolicyArguments`; ValueError if empty or not parsable."""
    parser = _PolicyParser(add_help=False, allow_abbrev=False)
    add_policy_options(parser)
    entries = list(filter(None, (" ".join(each.split()) for each in given.split(","))))
    require(bool(entries), option, given, f"no policy: use some of {', '.join(POLICIES)}")
    found = []
    for text in entries:
        where = f"{option}={text!r}: "
        try:
            one = extract_policy_arguments(parser.parse_args(["--policy", *text.split()]))
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None
        cls = find_policy_class(one.name)
        known = next(name for name, each in POLICIES.items() if each is cls)
        words = " ".join([known, *text.split()[1:]])
        found.append(dataclasses.replace(one, name=known, text=words, where=where))
    return found

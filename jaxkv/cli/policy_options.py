"""Options of policies, from the registered classes: a field that can be written as text is one.

A new policy needs no line here: names, types and help are read from its dataclass and its docstring.
"""

import argparse
import contextlib
import dataclasses
import typing
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any, TypeVar

from jaxkv._checks import shortened
from jaxkv._errors import require
from jaxkv.cache.quantised import STORES
from jaxkv.cache.stores import Store
from jaxkv.cli.fields import Arity, Words, chosen, kinds_of, words_of
from jaxkv.cli.numbers import real, whole
from jaxkv.policies import AvgPool, MaxPool, Merge, Method, NoPool
from jaxkv.policies.attended import Pooling
from jaxkv.policies.layers import LayerBudgets
from jaxkv.policies.merger import Merger
from jaxkv.policies.of_model import FileArrays
from jaxkv.policies.registry import POLICIES, documented, policy_class, takes_budget

# Default base of wrapper policies that name none.
_BASE = "snapkv"
# Second spellings of flags.
_ALIASES = {"--filter-layers": "--filters"}
_PREFIX = "policy "
_SHARED = frozenset(field.name for field in dataclasses.fields(Method))

Function = TypeVar("Function")


def _cached(function: Function) -> Function:
    """Decorator: `functools.cache` with the function's own type, for arguments that mypy takes for unhashable."""
    return typing.cast(Function, lru_cache(maxsize=None)(typing.cast(Any, function)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """A policy's field as a command-line option: the flag, how its words are parsed, and its help text."""

    field: str
    flag: str
    words: Words
    about: str


@_cached
def options_of(cls: type[Method]) -> dict[str, Option]:
    """Dict from flag to `Option` of a policy class, in the order of its fields; cached."""
    hints, about, meaningful = typing.get_type_hints(cls), documented(cls), _meaningful(cls)
    fields = [field for field in dataclasses.fields(cls) if field.init and field.name in meaningful]
    options = [_option(field, hints[field.name], about.get(field.name, "")) for field in fields]
    return {option.flag: option for option in options if option is not None}


def flags_of(cls: type[Method]) -> list[str]:
    """List of flags that a policy class accepts on the command line; for a wrapper, its default base's flags too."""
    if not _takes_base(cls):
        return list(options_of(cls))
    return list(
        dict.fromkeys(["--base", *_own_options_of(cls), *options_of(policy_class(_usual_of(cls)))])
    )


def _usual_of(cls: type[Method]) -> str:
    """Name of the base policy of a wrapper policy without `--base`: its class's `usual`, else snapkv."""
    return getattr(cls, "usual", "") or _BASE


@_cached
def _drops_rows(cls: type[Method]) -> bool:
    """True if a policy class drops rows: not FullKV, nor OmniKV, which keeps all rows and reads fewer."""
    return cls().parts().scorer is not None


def _takes_base(cls: type[Method]) -> bool:
    """True if a policy class wraps a base policy and has that policy's budget, as AdaKV does.

    OmniKV may also wrap a base, with a second budget; that is only available in Python.
    """
    return any(field.name == "base" for field in dataclasses.fields(cls)) and _drops_rows(cls)


def _own_options_of(cls: type[Method]) -> dict[str, Option]:
    """Dict from flag to `Option` of a wrapper policy's own fields; all other options set its base's fields."""
    return {flag: option for flag, option in options_of(cls).items() if option.field not in _SHARED}


def _meaningful(cls: type[Method]) -> set[str]:
    """Set of names of a policy class's fields that have an effect; none on dropped rows if it drops no rows."""
    names = {field.name for field in dataclasses.fields(cls)}
    if _drops_rows(cls):
        return names if takes_budget(cls) else names - {"budget", "min_budget"}
    return names - (_SHARED - ({"budget", "store"} if takes_budget(cls) else {"store"}))


def _option(field: dataclasses.Field, hint: Any, about: str) -> Option | None:
    """Command-line `Option` of one policy field; None if the field's type cannot be written as text."""
    kinds, flag = kinds_of(hint), "--" + field.name.replace("_", "-")
    words, default = words_of(kinds), typing.cast(Any, field.default)
    # Fields that hold a part of a policy, which the command line sets by one number or a switch.
    if kinds and set(kinds) <= set(typing.get_args(Pooling)):
        words = Words(
            read=partial(_pooling, AvgPool if isinstance(default, AvgPool) else MaxPool),
            metavar="K",
        )
        flag = "--pool-kernel" if field.name == "pooling" else f"{flag}-kernel"
        about = "width of the pooling over neighbours, odd; 1 for none"
    elif kinds == (LayerBudgets,) and hasattr(default, "beta"):
        words = Words(read=lambda word: dataclasses.replace(default, beta=real(word)), metavar="X")
        flag = "--beta" if field.name == "allocation" else f"{flag}-beta"
        about = "steepness of the budgets over layers, 1 is flat"
    elif any(isinstance(kind, type) and issubclass(kind, FileArrays) for kind in kinds):
        words = Words(read=str, metavar="FILE")
    elif kinds == (str, type[Store]):
        words = Words(
            read=partial(chosen, {name: name for name in STORES}),
            metavar="{" + ",".join(STORES) + "}",
        )
        about = (
            "how rows are held: in the model's dtype, in 8 bits, in 4, or keys in 8 and values in 4"
        )
    elif kinds == (Merger,):
        merge = Merge() if default is None else default
        words = Words(read=lambda yes: merge if yes else None, arity=Arity.SWITCH)
        about = "fold dropped rows into their nearest kept rows, or drop them"
    return None if words is None else Option(field=field.name, flag=flag, words=words, about=about)


def _pooling(kind: type[AvgPool | MaxPool], word: str) -> Pooling:
    """Pooling of class `kind` with the kernel width parsed from `word`; `NoPool` for width 1."""
    kernel = whole(word)
    return NoPool() if kernel == 1 else kind(kernel)


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--policy`, `--base` and all registered policies' options to a parser, after its other options.

    An option whose name is taken is called --policy-NAME. Raises TypeError if policies disagree on how many words
    follow an option.
    """
    group = parser.add_argument_group(
        "policy", "An option that the policy does not have is refused."
    )
    group.add_argument(
        "--policy", default="full", metavar="NAME", help=f"{', '.join(POLICIES)} (default: full)"
    )
    bases = ", ".join(name for name, cls in POLICIES.items() if _takes_base(cls))
    others = ", ".join(
        f"{_usual_of(cls)} of {name}"
        for name, cls in POLICIES.items()
        if _takes_base(cls) and _usual_of(cls) != _BASE
    )
    about = f"{bases}: the policy it is built on (default: {_BASE}; {others})"
    group.add_argument("--base", metavar="NAME", help=about)
    dropping = {name for name, cls in POLICIES.items() if _drops_rows(cls)}
    having: dict[str, dict[str, Option]] = {}
    for name, cls in POLICIES.items():
        for flag, option in options_of(cls).items():
            having.setdefault(flag, {})[name] = option
    spelled = {}
    for flag, options in having.items():
        words = next(iter(options.values())).words
        if any(option.words.arity is not words.arity for option in options.values()):
            raise TypeError(
                f"{flag}: {', '.join(options)} differ in the words behind it; rename the field in one"
            )
        metavars = dict.fromkeys(
            each.words.metavar for each in options.values() if each.words.metavar
        )
        for spelling in (flag, "--policy-" + flag[2:]):
            # Another option of the command may already have this name.
            with contextlib.suppress(argparse.ArgumentError):
                words.add_to(
                    group,
                    filter(None, [spelling, _ALIASES.get(flag)]),
                    dest=_PREFIX + flag,
                    about=_help(options, dropping),
                    metavar="|".join(metavars) or None,
                )
                spelled[flag] = spelling
                break
    parser.set_defaults(policy_spellings=spelled)


def _help(having: dict[str, Option], dropping: set[str]) -> str:
    """Help text of an option: its distinct texts, each after its policies' names unless all that drop rows share it.

    A text that most policies share names those without it, `all but full, quest: ...`.
    """
    by_text: dict[str, list[str]] = {}
    for name, option in having.items():
        by_text.setdefault(option.about.rstrip("."), []).append(name)
    lines = []
    for text, names in by_text.items():
        others = [name for name in POLICIES if name not in names]
        whose = f"all but {', '.join(others)}" if len(others) < len(names) else ", ".join(names)
        lines.append(text if dropping <= set(names) else f"{whose}: {text}" if text else whose)
    return ". ".join(lines).replace("%", "%%")


def policy_from(options: argparse.Namespace) -> Method:
    """Policy (a `Method`) built from parsed options; ValueError for an option that the policy does not have."""
    cls = policy_class(options.policy)
    nested = _takes_base(cls)
    require(
        options.base is None or nested,
        "--base",
        options.base,
        f"{options.policy} is not built on a policy",
    )
    name = (options.base or _usual_of(cls)) if nested else options.policy
    inner = policy_class(name) if nested else cls
    own, theirs = _own_options_of(cls) if nested else {}, options_of(inner)
    of = f"{options.policy} over {name}" if nested else name
    of_wrapper: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    for flag, written, words in _given(options):
        option = own.get(flag) or theirs.get(flag)
        if option is None:
            raise ValueError(f"{written}: {of} has no such option; leave it out")
        try:
            value = option.words.value(words)
        except ValueError as error:
            raise ValueError(f"{written}: {error}") from None
        (of_wrapper if flag in own else fields)[option.field] = value
    policy = cls(base=inner(**fields), **of_wrapper) if nested else cls(**fields)  # type: ignore[call-arg]
    if fields.get("merge", ...) is None and policy.parts().merge is not None:
        raise ValueError(f"--no-merge: {name} always folds; leave it out")
    return policy


def given_flags(options: argparse.Namespace) -> dict[str, str]:
    """Dict from flag to flag and value, such as "--alpha=0", of the policy options that the user gave; `--base` too."""
    base = {} if options.base is None else {"--base": f"--base={options.base}"}
    return base | {flag: written for flag, written, _ in _given(options)}


def only(options: argparse.Namespace, name: str, flags: set[str]) -> argparse.Namespace:
    """Copy of parsed options with `--policy` set to `name`, and given policy options outside `flags` unset."""
    given = vars(options) | {"policy": name}
    for flag in given_flags(options).keys() - flags:
        given["base" if flag == "--base" else _PREFIX + flag] = None
    return argparse.Namespace(**given)


def with_options_of(options: argparse.Namespace, own: argparse.Namespace) -> argparse.Namespace:
    """Copy of parsed options in which the policy options that `own` has replace those of the same name."""
    theirs = {
        name: value
        for name, value in vars(own).items()
        if name == "base" or name.startswith(_PREFIX)
    }
    return argparse.Namespace(
        **(vars(options) | {name: value for name, value in theirs.items() if value is not None})
    )


def _given(options: argparse.Namespace) -> Iterator[tuple[str, str, Any]]:
    """Yields (flag, text as written, argparse's value) of each policy option that the user gave, without `--base`."""
    for flag, spelling in options.policy_spellings.items():
        words = getattr(options, _PREFIX + flag)
        if isinstance(words, bool):
            yield flag, spelling if words else f"--no-{spelling[2:]}", words
        elif words is not None:
            text = words if isinstance(words, str) else " ".join(words)
            yield flag, f"{spelling}={shortened(text)}", words

"""Parses `--policies` and `--also`: comma-separated policies, each followed by its own options."""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NoReturn

from jaxkv._errors import require
from jaxkv.cli.policy_options import (
    add_policy_options,
    flags_of,
    given_flags,
    only,
    policy_from,
    with_options_of,
)
from jaxkv.evals.arguments import at_budgets
from jaxkv.policies import Method
from jaxkv.policies.checks import Budget
from jaxkv.policies.registry import POLICIES, policy_class, takes_budget

# Options that set how many rows are kept or read, as a budget does.
_SIZES = frozenset({"--budget", "--mem"})


class _Parser(argparse.ArgumentParser):
    """Argument parser of one policy's words that raises ValueError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spelled:
    """One policy as written in an option: its text, name and parser, and if it has a budget of its own (`sized`).

    Attributes:
        text: its words, a space between them.
        name: the policy's name.
        sized: True if its options are a budget, so that it takes no other.
        parser: parser of its words.
        option: the option that it was written in.
    """

    text: str
    name: str
    sized: bool
    parser: argparse.ArgumentParser
    option: str

    @property
    def flags(self) -> set[str]:
        """Set of the flags that the policy accepts."""
        return set(flags_of(policy_class(self.name)))

    def beside(self, options: argparse.Namespace) -> Method:
        """Builds the policy of its own options, and of the command's where it has them and does not set them itself."""
        own = self.parser.parse_args(["--policy", *self.text.split()])
        shared = only(options, self.name, self.flags - given_flags(own).keys())
        try:
            return policy_from(with_options_of(shared, own))
        except ValueError as error:
            raise ValueError(f"{self.option}={self.text!r}: {error}") from None

    def policy(self, budget: Budget = None) -> Method:
        """Builds the policy at a budget (rows, a share or bytes; None for its own); ValueError for bad options."""
        more = [] if budget is None else ["--budget", str(budget)]
        try:
            return policy_from(self.parser.parse_args(["--policy", *self.text.split(), *more]))
        except ValueError as error:
            raise ValueError(f"{self.option}={self.text!r}: {error}") from None


def spelled(given: str, option: str = "--policies") -> Iterator[Spelled]:
    """Yields a `Spelled` for each comma-separated policy of text such as "full,adakv --alpha 0"; ValueError if none."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_policy_options(parser)
    entries = list(filter(None, (" ".join(each.split()) for each in given.split(","))))
    require(bool(entries), option, given, f"give some of {', '.join(POLICIES)}")
    for text in entries:
        name = text.split()[0]
        policy_class(name)
        try:
            options = parser.parse_args(["--policy", *text.split()])
        except ValueError as error:
            raise ValueError(f"{option}={text!r}: {error}") from None
        require(options.policy == name, option, text, "one policy at a time: a comma parts them")
        sized = bool(_SIZES & given_flags(options).keys())
        yield Spelled(text=text, name=name, sized=sized, parser=parser, option=option)


def rows_of(given: str, budgets: Sequence[int | float | str]) -> dict[str, Method]:
    """Dict from row name to policy of an evaluation's table: each policy of `--policies` at each budget.

    A policy that takes no budget, or whose options set one, has a single row.
    """
    rows: dict[str, Method] = {}
    for each in spelled(given):
        if each.text == each.name:
            rows |= at_budgets([each.name], budgets)
        elif each.sized or not takes_budget(policy_class(each.name)):
            rows[each.text] = each.policy()
        else:
            remedy = f"{each.name} keeps a part of each prompt: say which, such as 128 or 0.2"
            require(bool(budgets), "--budgets", "", remedy)
            rows |= {f"{each.text}@{budget}": each.policy(budget) for budget in budgets}
    return rows

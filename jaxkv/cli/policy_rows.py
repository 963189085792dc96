"""Policies as `--policies` writes them: names with commas between them, each with its options behind it."""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NoReturn

from jaxkv._errors import require
from jaxkv.cli.numbers import whole_or_real
from jaxkv.cli.policy_options import add_policy_options, given_flags, policy_from
from jaxkv.evals.arguments import at_budgets
from jaxkv.policies import Method
from jaxkv.policies.registry import POLICIES, policy_class, takes_budget

# Options that say how much is kept, or read, as a budget does.
_SIZES = frozenset({"--budget", "--mem"})


class _Words(argparse.ArgumentParser):
    """Reads one policy's words, and raises what it would complain of."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spelled:
    """One policy as it was written.

    Attributes:
        text: all of its words, a space between them.
        name: the policy's.
        sized: its options say how much is kept: it takes no other budget.
        parser: reads its words.
    """

    text: str
    name: str
    sized: bool
    parser: argparse.ArgumentParser

    def policy(self, budget: int | float | None = None) -> Method:
        """The policy.

        Args:
            budget: rows or a share; None leaves it as the policy has it.

        Returns:
            The policy.

        Raises:
            ValueError: for options that it does not have, or cannot honour.
        """
        more = [] if budget is None else ["--budget", str(budget)]
        try:
            return policy_from(self.parser.parse_args([*_words(self.text), *more]))
        except ValueError as error:
            raise ValueError(f"--policies={self.text!r}: {error}") from None


def _words(text: str) -> list[str]:
    return ["--policy", *text.split()]


def spelled(given: str) -> Iterator[Spelled]:
    """Reads `--policies`.

    Args:
        given: what was written, such as "full,adakv --base pyramidkv --alpha 0".

    Yields:
        Each policy.

    Raises:
        ValueError: where none is there, and for words that are no option of any policy.
    """
    parser = _Words(add_help=False, allow_abbrev=False)
    add_policy_options(parser)
    entries = list(filter(None, (" ".join(each.split()) for each in given.split(","))))
    require(bool(entries), "--policies", given, f"give some of {', '.join(POLICIES)}")
    for text in entries:
        name = text.split()[0]
        policy_class(name)
        try:
            options = parser.parse_args(_words(text))
        except ValueError as error:
            raise ValueError(f"--policies={text!r}: {error}") from None
        require(options.policy == name, "--policies", text, "one policy at a time: a comma parts them")
        yield Spelled(text=text, name=name, sized=bool(_SIZES & given_flags(options).keys()), parser=parser)


def budgets_of(given: str) -> list[int | float]:
    """Reads `--budgets`.

    Args:
        given: what was written, such as "64,128,0.2".

    Returns:
        Rows and shares; none where nothing was written.

    Raises:
        ValueError: for what is no number.
    """
    budgets = []
    for word in filter(str.strip, given.split(",")):
        try:
            budgets.append(whole_or_real(word.strip()))
        except ValueError as error:
            raise ValueError(f"--budgets={word.strip()!r}: {error}") from None
    return budgets


def rows_of(given: str, budgets: Sequence[int | float]) -> dict[str, Method]:
    """Rows of an evaluation: every policy at every budget; one that has none, or whose options say it, once.

    Args:
        given: as `spelled` reads it.
        budgets: rows, or shares of each prompt.

    Returns:
        Policies by row.

    Raises:
        ValueError: for what cannot be honoured.
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

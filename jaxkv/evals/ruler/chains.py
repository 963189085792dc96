"""RULER's variable tracking: variables assigned to one another, in a chain that starts with a number."""

import dataclasses
from typing import NamedTuple

from numpy.random import Generator

from jaxkv.evals.ruler.recipe import Prompt, Recipe, hidden

# RULER's, scripts/data/synthetic/{variable_tracking,constants}.py.
_OPENING = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
)
_QUESTION = "\nQuestion: Find all variables that are assigned the value {value} in the text above."
_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {value}, they are: "
)
# Variables per chain: the first is assigned the value, each of four others the one before.
_VARIABLES = 5
TEMPLATES = (_OPENING, _QUESTION, _PREFIX, "VAR =")


class Chain(NamedTuple):
    """Random parts of one prompt: variable names, the number assigned to them, and places of the assignments.

    Attributes:
        names: the variables; the first is assigned the value, each other the one before it.
        value: the number.
        places: index of the haystack's unit after each assignment, ascending.
        size: number of units of the haystack.
    """

    names: tuple[str, ...]
    value: str
    places: tuple[int, ...]
    size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chains(Recipe):
    """Recipe of RULER's variable tracking: prompts that hide one chain of assignments in lines of noise.

    Attributes:
        shot: haystack size of the solved example that comes first; 0 for no example.
    """

    shot: int = 0

    @property
    def least(self) -> int:
        """Smallest haystack size: the number of assignments, each of which needs a place of its own."""
        return _VARIABLES

    def make(self, size: int, rng: Generator, index: int = 0) -> Prompt:
        """Make a `Prompt`: one chain hidden in `size` lines of noise, after a solved example if `shot` is set."""
        shot = self.choose(self.shot, rng, short=True) if self.shot else None
        return self.write(self.choose(size, rng), shot)

    def choose(self, size: int, rng: Generator, *, short: bool = False) -> Chain:
        """Sample a `Chain`: variable names (`short` ones for a solved example), the number assigned to them, places."""
        names = self.wording.variables(rng, _VARIABLES, short=short)
        places = sorted(rng.permutation(size)[:_VARIABLES].tolist())
        return Chain(tuple(names), self.wording.amount(rng), tuple(places), size)

    def write(self, chain: Chain, shot: Chain | None = None) -> Prompt:
        """Render a chain as a `Prompt`, after the solved example `shot` if given."""
        front = ""
        if shot is not None:
            example = self.write(shot)
            front = f"{example.text}{example.target}\n\n"
        prefix = _PREFIX.format(count=_VARIABLES, value=chain.value)
        return Prompt(
            context=front + _OPENING + self._hide(chain),
            question=_QUESTION.format(value=chain.value),
            prefix=prefix.rstrip() if self.wording.tight else prefix,
            answers=chain.names,
            target=" " + " ".join(chain.names),
            depth=sum(chain.places) / len(chain.places) / chain.size,
        )

    def _hide(self, chain: Chain) -> str:
        """Join the haystack's lines of noise, with the chain's assignments inserted at their places."""
        # RULER ends these lines with a space.
        end = "" if self.wording.tight else " "
        first, *others = chain.names
        assignments = [f"VAR {first} = {chain.value}"]
        assignments += [
            f"VAR {name} = VAR {before}{end}"
            for before, name in zip(chain.names, others, strict=False)
        ]
        return hidden(self.wording.noisy(chain.size), assignments, chain.places)

"""RULER's variable tracking: variables assigned to one another, in a chain that starts with a number."""

from typing import NamedTuple

from numpy.random import Generator

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.evals.ruler.recipe import PromptRecipe, RulerPrompt, insert_lines

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


class VariableChain(NamedTuple):
    """Random parts of one prompt: variable names, the number assigned to the first, and places of the assignments.

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


@frozen_dataclass
class VariableTrackingRecipe(PromptRecipe):
    """Recipe of RULER's variable tracking: prompts that hide one chain of assignments in lines of noise.

    Attributes:
        shot: haystack size of the solved example that comes first; 0 for no example.
    """

    shot: int = 0

    @property
    def min_haystack_size(self) -> int:
        """Smallest haystack size: the number of assignments, each of which needs a place of its own."""
        return _VARIABLES

    def make_prompt(self, size: int, rng: Generator, index: int = 0) -> RulerPrompt:
        """Make a `RulerPrompt`: one chain in `size` lines of noise, after a solved example if `shot` is set."""
        shot = self.sample_chain(self.shot, rng, short=True) if self.shot else None
        return self.render_prompt(self.sample_chain(size, rng), shot)

    def sample_chain(self, size: int, rng: Generator, *, short: bool = False) -> VariableChain:
        """Sample a `VariableChain` for `size` lines: names (`short` ones for an example), number and places."""
        names = self.wording.sample_variable_names(rng, _VARIABLES, short=short)
        places = sorted(rng.permutation(size)[:_VARIABLES].tolist())
        return VariableChain(
            tuple(names), self.wording.sample_variable_value(rng), tuple(places), size
        )

    def render_prompt(self, chain: VariableChain, shot: VariableChain | None = None) -> RulerPrompt:
        """Render a chain as a `RulerPrompt`, after the solved example `shot` if given."""
        front = ""
        if shot is not None:
            example = self.render_prompt(shot)
            front = f"{example.full_text}{example.target}\n\n"
        prefix = _PREFIX.format(count=_VARIABLES, value=chain.value)
        return RulerPrompt(
            context=front + _OPENING + self._insert_assignments(chain),
            question=_QUESTION.format(value=chain.value),
            prefix=prefix.rstrip() if self.wording.tight else prefix,
            answers=chain.names,
            target=" " + " ".join(chain.names),
            depth=sum(chain.places) / len(chain.places) / chain.size,
        )

    def _insert_assignments(self, chain: VariableChain) -> str:
        """Return the haystack's lines of noise as one text, with the chain's assignments inserted at their places."""
        # RULER ends these lines with a space.
        end = "" if self.wording.tight else " "
        first, *others = chain.names
        assignments = [f"VAR {first} = {chain.value}"]
        assignments += [
            f"VAR {name} = VAR {before}{end}"
            for before, name in zip(chain.names, others, strict=False)
        ]
        return insert_lines(self.wording.repeat_noise(chain.size), assignments, chain.places)

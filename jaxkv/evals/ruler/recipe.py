"""What makes a kind of prompt, and how large a haystack fits a number of tokens."""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxkv._errors import require
from jaxkv.evals.ruler.wording import Wording


class Prompt(NamedTuple):
    """One prompt.

    Attributes:
        context: all up to the end of the haystack.
        question: the rest of the user's text.
        prefix: the answer's first words.
        answers: what is right.
        target: how a right answer goes on after the prefix.
        depth: where the answer stands in the haystack, from 0 to 1, the mean of several places; None for everywhere.
    """

    context: str
    question: str
    prefix: str
    answers: tuple[str, ...]
    target: str
    depth: float | None = None

    @property
    def text(self) -> str:
        """All that the model reads before it answers."""
        return self.context + self.question + self.prefix


Counter = Callable[[Prompt], int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(abc.ABC):
    """How prompts of one kind are made, of any size.

    Attributes:
        wording: the words.
        new_tokens: tokens that an answer may take.
    """

    wording: Wording
    new_tokens: int

    @property
    def least(self) -> int:
        """Units of the smallest haystack."""
        return 1

    @property
    def most(self) -> int | float:
        """Units of the largest haystack: there are words for no more."""
        return math.inf

    @abc.abstractmethod
    def make(self, size: int, rng: np.random.Generator, index: int = 0) -> Prompt:
        """Makes a prompt.

        Args:
            size: units of the haystack: words, sentences, documents.
            rng: the source of randomness.
            index: which of the samples it is, for those that read them from a file.

        Returns:
            The prompt.
        """


def fit(recipe: Recipe, length: int, count: Counter) -> int:
    """The largest haystack with which a prompt and its answer take no more than some tokens.

    Args:
        recipe: what makes the prompts.
        length: tokens, those of the answer included.
        count: a prompt's tokens.

    Returns:
        Units, for `Recipe.make`.

    Raises:
        ValueError: where not even the smallest fits.
    """

    def taken(size: int) -> int:
        return count(recipe.make(size, np.random.default_rng(0))) + recipe.new_tokens

    low = recipe.least
    shortest = taken(low)
    require(
        shortest <= length, "length", length, f"{type(recipe).__name__} takes {shortest} tokens at least: ask for more"
    )
    high = low + 1
    while taken(high) <= length:
        # Beyond the most, making one says what is short of.
        low, high = high, int(recipe.most) if high < recipe.most < 2 * high else 2 * high
    # A four-hundredth part is less than what samples differ by.
    while high - low > max(1, low // 400):
        middle = (low + high) // 2
        low, high = (middle, high) if taken(middle) <= length else (low, middle)
    return low


@dataclasses.dataclass(frozen=True)
class Cell:
    """Prompts of one kind and length.

    Attributes:
        recipe: what makes them.
        length: tokens of the longest, those of the answer included.
        count: a prompt's tokens.
        size: units of a haystack.
    """

    recipe: Recipe
    length: int
    count: Counter
    size: int

    @classmethod
    def of(cls, recipe: Recipe, length: int, count: Counter) -> "Cell":
        """Finds the size."""
        return cls(recipe, length, count, fit(recipe, length, count))

    def make(self, rng: np.random.Generator, index: int = 0) -> Prompt:
        """Makes a prompt that fits.

        Args:
            rng: the source of randomness.
            index: which of the samples it is.

        Returns:
            The prompt.

        Raises:
            ValueError: where not even the smallest haystack fits this sample.
        """
        seed = int(rng.integers(2**63))
        size = self.size
        while True:
            prompt = self.recipe.make(size, np.random.default_rng(seed), index)
            over = self.count(prompt) + self.recipe.new_tokens - self.length
            if over <= 0:
                return prompt
            require(size > self.recipe.least, "length", self.length, f"sample {index} takes {over} more: ask for more")
            # In shares, since a unit's tokens are not known.
            size = max(self.recipe.least, size - max(1, math.ceil(size * over / self.length)))

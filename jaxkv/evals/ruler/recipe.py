"""Recipes, which make prompts of one kind and any size, and the size that fits a number of tokens."""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.evals.ruler.wording import RulerWording


class RulerPrompt(NamedTuple):
    """One prompt in three parts (context, question, the answer's first words), with its right answers and their depth.

    Attributes:
        context: the user's text up to the end of the haystack.
        question: the rest of the user's text.
        prefix: first words of the answer.
        answers: right answers.
        target: text of a right answer that continues the prefix.
        depth: mean depth of the answer in the haystack, in [0, 1]; None without a place.
    """

    context: str
    question: str
    prefix: str
    answers: tuple[str, ...]
    target: str
    depth: float | None = None

    @property
    def full_text(self) -> str:
        """Text of the whole prompt: context, question and the answer's first words."""
        return self.context + self.question + self.prefix


Counter = Callable[[RulerPrompt], int]


@frozen_dataclass
class PromptRecipe(abc.ABC):
    """Base class of recipes: makes prompts of one kind with haystacks of any size; `new_tokens` limits the answer."""

    wording: RulerWording
    new_tokens: int

    @property
    def min_haystack_size(self) -> int:
        """Smallest haystack size of the recipe, in its units, such as words, lines or documents; 1 by default."""
        return 1

    @property
    def max_haystack_size(self) -> int | float:
        """Largest haystack size that the wording has words for, in the recipe's units; infinite by default."""
        return math.inf

    @abc.abstractmethod
    def make_prompt(self, size: int, rng: np.random.Generator, index: int = 0) -> RulerPrompt:
        """Abstract: make a `RulerPrompt` whose haystack has `size` units: words, lines or documents.

        `index` is the number of the sample, for recipes that read samples from a file.
        """


def insert_lines(lines: Sequence[str], told: Sequence[str], places: Sequence[int]) -> str:
    """Join a haystack's lines as one text, with other lines inserted before those at the ascending `places`."""
    lines = list(lines)
    for line, place in zip(reversed(told), reversed(places), strict=True):
        lines.insert(place, line)
    return "\n".join(lines)


def fit_haystack_size(recipe: PromptRecipe, length: int, count: Counter) -> int:
    """Return the largest haystack size, to within 1/400, with which prompt and answer have at most `length` tokens.

    Raises ValueError if not even the smallest haystack fits.
    """

    def count_tokens(size: int) -> int:
        """Count the tokens of a prompt with a haystack of `size` units, plus `new_tokens` for the answer."""
        return count(recipe.make_prompt(size, np.random.default_rng(0))) + recipe.new_tokens

    low = recipe.min_haystack_size
    shortest = count_tokens(low)
    require(
        shortest <= length,
        "length",
        length,
        f"{type(recipe).__name__} needs at least {shortest} tokens: raise it",
    )
    high = low + 1
    while count_tokens(high) <= length:
        # Above the largest size, `make` raises an error that names the missing words.
        low = high
        high = (
            int(recipe.max_haystack_size)
            if high < recipe.max_haystack_size < 2 * high
            else 2 * high
        )
    # 1/400 is less than the difference between samples.
    while high - low > max(1, low // 400):
        middle = (low + high) // 2
        low, high = (middle, high) if count_tokens(middle) <= length else (low, middle)
    return low


@dataclasses.dataclass(frozen=True)
class PromptFactory:
    """Factory of one recipe's prompts of at most `length` tokens with answers, starting from one haystack size."""

    recipe: PromptRecipe
    length: int
    count: Counter
    size: int

    def make_fitting_prompt(self, rng: np.random.Generator, index: int = 0) -> RulerPrompt:
        """Make a `RulerPrompt` that has at most `length` tokens with its answer, with a smaller haystack if needed.

        Raises ValueError if the sample does not fit with the smallest haystack.
        """
        seed = int(rng.integers(2**63))
        size = self.size
        while True:
            prompt = self.recipe.make_prompt(size, np.random.default_rng(seed), index)
            over = self.count(prompt) + self.recipe.new_tokens - self.length
            if over <= 0:
                return prompt
            require(
                size > self.recipe.min_haystack_size,
                "length",
                self.length,
                f"sample {index} needs {over} more tokens: raise it",
            )
            # Shrink by a share, because the tokens per unit are unknown.
            size = max(
                self.recipe.min_haystack_size, size - max(1, math.ceil(size * over / self.length))
            )

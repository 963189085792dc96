"""RULER's words to count: the ten most common of a list, and the three most frequent of a coded text."""

import dataclasses
import math
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from jaxkv.evals.ruler.recipe import Prompt, Recipe

# RULER's, scripts/data/synthetic/{common_words_extraction,freq_words_extraction,constants}.py.
_COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n",
    "\nQuestion: What are the 10 most common words in the above list?",
    " Answer: The top 10 words that appear most often in the list are:",
)
_FREQUENT = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. ",
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?",
    " Answer: According to the coded text above, the three most frequently appeared words are:",
)
# Number of common words, as in the question.
_WORDS = 10
TEMPLATES = (*_COMMON, *_FREQUENT)
# The most frequent word of coded texts: noise, not an answer.
DOTS = "..."
# Smallest size at which the second, third and fourth word each differ in count from the next.
_LEAST_CODED = 74


class Listed(NamedTuple):
    """Random parts of one word list: its common words, and all its words in order, with repeats."""

    common: tuple[str, ...]
    entries: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Common(Recipe):
    """Recipe of RULER's common words extraction: a list of words, its common ones asked for; size is distinct words.

    Attributes:
        often: occurrences of each common word.
        seldom: occurrences of each other word.
        shot: (distinct words, `often`, `seldom`) of a solved example; None for no example.
    """

    often: int = 30
    seldom: int = 3
    shot: tuple[int, int, int] | None = None

    @property
    def least(self) -> int:
        """Smallest number of distinct words in a list: the common words and one other."""
        return _WORDS + 1

    @property
    def most(self) -> int | float:
        """Largest number of distinct words in a list that the wording can sample, which may be infinite."""
        return self.wording.words_to_count

    def make(self, size: int, rng: Generator, index: int = 0) -> Prompt:
        """Make a `Prompt`: a list of `size` distinct words with repeats, after a solved example if `shot` is set."""
        shot = self.choose(*self.shot, rng) if self.shot else None
        return self.write(self.choose(size, self.often, self.seldom, rng), shot)

    def choose(self, size: int, often: int, seldom: int, rng: Generator) -> Listed:
        """Sample a shuffled `Listed` of `size` distinct words: common ones `often` times, others `seldom` times."""
        chosen = self.wording.plain(rng, size)
        common, others = chosen[:_WORDS], chosen[_WORDS:]
        entries = common * often + others * seldom
        return Listed(
            tuple(common), tuple(entries[each] for each in rng.permutation(len(entries)).tolist())
        )

    def write(self, chosen: Listed, shot: Listed | None = None) -> Prompt:
        """Render a word list as a `Prompt`, after the solved example `shot` if given."""
        front = ""
        if shot is not None:
            example = self.write(shot)
            front = f"{example.text}{example.target}\n"
        opening, question, prefix = _COMMON
        return Prompt(
            context=front + opening + _numbered(chosen.entries),
            question=question,
            prefix=prefix,
            answers=chosen.common,
            target=" " + _numbered(chosen.common),
        )


class Coded(NamedTuple):
    """Random parts of one coded text: its distinct words by frequency, dots first, and all its words in order."""

    ranks: tuple[str, ...]
    text: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frequent(Recipe):
    """Recipe of RULER's frequent words extraction: prompts that ask for a coded text's three most frequent words.

    Counts by rank follow a zeta distribution with exponent 2.

    Attributes:
        vocabulary: number of distinct words, with the dots.
    """

    vocabulary: int

    @property
    def least(self) -> int:
        """Smallest number of words at which the word of rank 4 occurs more often than the word of rank 5."""
        return _LEAST_CODED

    def make(self, size: int, rng: Generator, index: int = 0) -> Prompt:
        """Make a `Prompt` that asks for the most frequent of at most `size` coded words, a few less by rounding."""
        return self.write(self.choose(size, rng))

    def choose(self, size: int, rng: Generator) -> Coded:
        """Sample a `Coded` text of at most `size` words in random order; the count of each rank is rounded down."""
        ranks = (DOTS, *self.wording.codes(rng, self.vocabulary - 1))
        times = (size * np.arange(1, len(ranks) + 1.0) ** -2 / (math.pi**2 / 6)).astype(int)
        text = [
            word for word, often in zip(ranks, times.tolist(), strict=True) for _ in range(often)
        ]
        return Coded(ranks, tuple(text[each] for each in rng.permutation(len(text)).tolist()))

    def write(self, chosen: Coded) -> Prompt:
        """Render a coded text as a `Prompt` that asks for its three most frequent words besides the dots."""
        opening, question, prefix = _FREQUENT
        first, second, third = chosen.ranks[1:4]
        return Prompt(
            context=opening + " ".join(chosen.text),
            question=question,
            prefix=prefix,
            answers=(first, second, third),
            target=f" {first}, {second}, and {third}.",
        )


def _numbered(words: tuple[str, ...]) -> str:
    """Join words in one line, each after its number: "1. apple 2. boat"."""
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))

"""RULER's words to count: the ten most common of a list, and the three most frequent of a coded text."""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

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
TEMPLATES = (*_COMMON, *_FREQUENT)
# Noise: the most frequent word, which is no answer.
DOTS = "..."
# Counts of the second, third and fourth word differ from the next one's from here on.
_LEAST_CODED = 74


class Listed(NamedTuple):
    """Random draws of a list: the common words, and all entries in order."""

    common: tuple[str, ...]
    entries: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Common(Recipe):
    """Extraction of common words; the haystack's unit is a different word.

    Attributes:
        often: occurrences of each common word.
        seldom: occurrences of each other word.
        words: number of common words.
        shot: different words, `often` and `seldom` of a solved example; None for none.
    """

    often: int = 30
    seldom: int = 3
    words: int = 10
    shot: tuple[int, int, int] | None = None

    @property
    def least(self) -> int:
        """Number of common words and one other."""
        return self.words + 1

    @property
    def most(self) -> int | float:
        """Number of words that the wording has."""
        return self.wording.words_to_count

    def make(self, size: int, rng: np.random.Generator, index: int = 0) -> Prompt:
        """A prompt with a list of `size` different words, behind the solved example."""
        shot = self.draw(*self.shot, rng) if self.shot else None
        return self.write(self.draw(size, self.often, self.seldom, rng), shot)

    def draw(self, size: int, often: int, seldom: int, rng: np.random.Generator) -> Listed:
        """Draws a list of `size` different words in random order."""
        drawn = self.wording.plain(rng, size)
        common, others = drawn[: self.words], drawn[self.words :]
        entries = common * often + others * seldom
        return Listed(tuple(common), tuple(entries[each] for each in rng.permutation(len(entries)).tolist()))

    def write(self, drawn: Listed, shot: Listed | None = None) -> Prompt:
        """The prompt of a draw, behind the solved example `shot`."""
        front = ""
        if shot is not None:
            example = self.write(shot)
            front = f"{example.text}{example.target}\n"
        opening, question, prefix = _COMMON
        return Prompt(
            context=front + opening + _numbered(drawn.entries),
            question=question,
            prefix=prefix,
            answers=drawn.common,
            target=" " + _numbered(drawn.common),
        )


class Coded(NamedTuple):
    """Random draws of a coded text: the words by rank, dots first, and the text's words in order."""

    ranks: tuple[str, ...]
    text: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frequent(Recipe):
    """Extraction of frequent words, whose counts by rank follow a zeta distribution with exponent 2.

    Attributes:
        vocabulary: different words, the dots included.
    """

    vocabulary: int

    @property
    def least(self) -> int:
        """Smallest size at which the fourth word is more frequent than the fifth."""
        return _LEAST_CODED

    def make(self, size: int, rng: np.random.Generator, index: int = 0) -> Prompt:
        """A prompt with a coded text of about `size` words."""
        return self.write(self.draw(size, rng))

    def draw(self, size: int, rng: np.random.Generator) -> Coded:
        """Draws a text of `size` words, less those that rounding counts down takes."""
        ranks = (DOTS, *self.wording.codes(rng, self.vocabulary - 1))
        times = (size * np.arange(1, len(ranks) + 1.0) ** -2 / (math.pi**2 / 6)).astype(int)
        text = [word for word, often in zip(ranks, times.tolist(), strict=True) for _ in range(often)]
        return Coded(ranks, tuple(text[each] for each in rng.permutation(len(text)).tolist()))

    def write(self, drawn: Coded) -> Prompt:
        """The prompt of a draw."""
        opening, question, prefix = _FREQUENT
        first, second, third = drawn.ranks[1:4]
        return Prompt(
            context=opening + " ".join(drawn.text),
            question=question,
            prefix=prefix,
            answers=(first, second, third),
            target=f" {first}, {second}, and {third}.",
        )


def _numbered(words: tuple[str, ...]) -> str:
    """Words in one line, with their numbers in front."""
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))

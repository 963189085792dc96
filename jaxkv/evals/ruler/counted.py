"""RULER's words to count: the ten most common of a list, and the three most frequent of a coded text."""

import math
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.evals.ruler.recipe import PromptRecipe, RulerPrompt

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


class WordList(NamedTuple):
    """Random parts of one word list: its ten common words, and all its words in order, with repeats."""

    common: tuple[str, ...]
    entries: tuple[str, ...]


@frozen_dataclass
class CommonWordsRecipe(PromptRecipe):
    """Recipe of RULER's common words extraction: ask for the ten common words of a list; size counts distinct words.

    Attributes:
        often: occurrences of each common word.
        seldom: occurrences of each other word.
        shot: (distinct words, `often`, `seldom`) of a solved example; None for no example.
    """

    often: int = 30
    seldom: int = 3
    shot: tuple[int, int, int] | None = None

    @property
    def min_haystack_size(self) -> int:
        """Smallest number of distinct words in a list: the common words and one other."""
        return _WORDS + 1

    @property
    def max_haystack_size(self) -> int | float:
        """Largest number of distinct words in a list that the wording can sample, which may be infinite."""
        return self.wording.words_to_count

    def make_prompt(self, size: int, rng: Generator, index: int = 0) -> RulerPrompt:
        """Make a `RulerPrompt`: a list of `size` distinct words, repeated, after a solved example if `shot` is set."""
        shot = self.sample_word_list(*self.shot, rng) if self.shot else None
        return self.render_prompt(self.sample_word_list(size, self.often, self.seldom, rng), shot)

    def sample_word_list(self, size: int, often: int, seldom: int, rng: Generator) -> WordList:
        """Sample a shuffled `WordList` of `size` distinct words: ten of them `often` times, others `seldom` times."""
        chosen = self.wording.sample_distinct_words(rng, size)
        common = chosen[:_WORDS]
        others = chosen[_WORDS:]
        entries = common * often + others * seldom
        return WordList(
            tuple(common), tuple(entries[each] for each in rng.permutation(len(entries)).tolist())
        )

    def render_prompt(self, chosen: WordList, shot: WordList | None = None) -> RulerPrompt:
        """Render a word list as a `RulerPrompt`, after the solved example `shot` if given."""
        front = ""
        if shot is not None:
            example = self.render_prompt(shot)
            front = f"{example.full_text}{example.target}\n"
        opening, question, prefix = _COMMON
        return RulerPrompt(
            context=front + opening + _number_words(chosen.entries),
            question=question,
            prefix=prefix,
            answers=chosen.common,
            target=" " + _number_words(chosen.common),
        )


class CodedText(NamedTuple):
    """Random parts of one coded text: its distinct words by frequency, dots first, and all its words in order."""

    ranks: tuple[str, ...]
    text: tuple[str, ...]


@frozen_dataclass
class FrequentWordsRecipe(PromptRecipe):
    """Recipe of RULER's frequent words extraction: prompts that ask for a coded text's three most frequent words.

    Counts by rank follow a zeta distribution with exponent 2.

    Attributes:
        vocabulary: number of distinct words, with the dots.
    """

    vocabulary: int

    @property
    def min_haystack_size(self) -> int:
        """Smallest haystack size: 74 words, of which ranks 2, 3 and 4 (the answers) occur 11, 4 and 2 times."""
        return _LEAST_CODED

    def make_prompt(self, size: int, rng: Generator, index: int = 0) -> RulerPrompt:
        """Make a `RulerPrompt`: at most `size` coded words, and a question for the three most frequent but dots."""
        return self.render_prompt(self.sample_coded_text(size, rng))

    def sample_coded_text(self, size: int, rng: Generator) -> CodedText:
        """Sample a `CodedText` of at most `size` words in random order; each rank's count is rounded down."""
        ranks = (DOTS, *self.wording.sample_coded_words(rng, self.vocabulary - 1))
        times = (size * np.arange(1, len(ranks) + 1.0) ** -2 / (math.pi**2 / 6)).astype(int)
        text = [
            word for word, often in zip(ranks, times.tolist(), strict=True) for _ in range(often)
        ]
        return CodedText(ranks, tuple(text[each] for each in rng.permutation(len(text)).tolist()))

    def render_prompt(self, chosen: CodedText) -> RulerPrompt:
        """Render a coded text as a `RulerPrompt` that asks for its three most frequent words other than the dots."""
        opening, question, prefix = _FREQUENT
        first, second, third = chosen.ranks[1:4]
        return RulerPrompt(
            context=opening + " ".join(chosen.text),
            question=question,
            prefix=prefix,
            answers=(first, second, third),
            target=f" {first}, {second}, and {third}.",
        )


def _number_words(words: tuple[str, ...]) -> str:
    """Join words in one line of text, each after its number: "1. apple 2. boat"."""
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))

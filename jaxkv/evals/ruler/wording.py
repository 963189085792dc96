"""Wordings of prompts: RULER's own words, and a few hundred nouns for training a tiny model."""

import functools
import itertools
import json
import math
import re
import string
import uuid
from typing import ClassVar

from numpy.random import Generator

from jaxkv._errors import require
from jaxkv.evals.texts import read_packaged_file

# RULER's, scripts/data/synthetic/niah.py.
NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
# No noun is a part of another, of a colour's name, or of a template's word, because a score searches answers as parts
# of the prediction.
SMALL_WORDS = tuple(read_packaged_file("ruler/data/small_words.txt").split())
SENTENCES = (
    "The {} is near the {}.",
    "We see the {} and the {} here.",
    "There is one {} in the {}.",
    "Here is the {} of the {}.",
    "The {} and the {} go back to the {}.",
    "The {} is all we see.",
)
_TITLES = r"(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)"
_SENTENCE = re.compile(
    r"(?<=[.!?])" + _TITLES + r"[\"\u2019\u201d)]*\s+(?=[\"\u2018\u201c(]*[A-Z])"
)


def split_sentences(text: str) -> list[str]:
    """Split an English text into sentences, which end at ".", "!" or "?" and quotes before a capital.

    RULER uses NLTK's Punkt, which needs a data file; on English prose, nearly all sentences are the same.
    """
    ends = [each.end() for each in _SENTENCE.finditer(text)]
    return [text[begin:end].rstrip() for begin, end in itertools.pairwise([0, *ends, len(text)])]


class RulerWording:
    """Samples the random texts of prompts in RULER's own wording: keys, values, variables and haystacks.

    Keys are adjectives with nouns, values seven-digit numbers or version 4 UUIDs, variables have five letters.

    Attributes:
        name: value of the wording in settings.
        tight: True to leave out spaces and empty parts without meaning.
        noise: units of the haystack of noise, used in turn.
        words_to_count: number of distinct words that `sample_distinct_words` can sample.
    """

    name: ClassVar[str] = "official"
    tight: ClassVar[bool] = False
    noise: ClassVar[tuple[str, ...]] = (" ".join(NOISE),)
    words_to_count: ClassVar[int | float] = math.inf

    def __init__(self, text: str | None = None):
        """Create the wording with the text of essays, repeated if short; None for the packaged novel."""
        self._text = text

    @functools.cached_property
    def _essay_words(self) -> list[str]:
        """List of the words of the essays' text."""
        return (
            read_packaged_file("ruler/data/essay.txt.gz") if self._text is None else self._text
        ).split()

    def get_essay_passage(self, size: int, start: int = 0) -> str:
        """Return as one text `size` words of the essays' text from word `start` on, starting over after the last."""
        at = start % len(self._essay_words)
        times = -(-(at + size) // len(self._essay_words))
        return " ".join((self._essay_words * times)[at : at + size])

    def words(self, rng: Generator, count: int) -> list[str]:
        """Sample a list of `count` distinct words, each an adjective, a hyphen and a noun."""
        firsts = load_word_lists()["adjectives"]
        lasts = load_word_lists()["nouns"]
        chosen: dict[str, None] = {}
        while len(chosen) < count:
            first = firsts[int(rng.integers(len(firsts)))]
            last = lasts[int(rng.integers(len(lasts)))]
            chosen[f"{first}-{last}"] = None
        return list(chosen)

    def sample_distinct_words(self, rng: Generator, count: int) -> list[str]:
        """Sample `count` distinct nouns, adjectives and verbs, then adjective-noun pairs if these are too few."""
        every = _list_all_words()
        chosen = [every[each] for each in rng.permutation(len(every))[:count].tolist()]
        return chosen + self.words(rng, count - len(chosen))

    def sample_coded_words(self, rng: Generator, count: int) -> list[str]:
        """Sample a list of `count` distinct words of six random lower-case letters."""
        return _sample_letter_strings(rng, string.ascii_lowercase, 6, count)

    def numbers(self, rng: Generator, count: int) -> list[str]:
        """Sample a list of `count` seven-digit numbers as texts; the first digit is not 0."""
        return [str(each) for each in rng.integers(10**6, 10**7, count).tolist()]

    def uuids(self, rng: Generator, count: int) -> list[str]:
        """Sample a list of `count` version 4 UUIDs as texts."""
        return [str(uuid.UUID(bytes=rng.bytes(16), version=4)) for _ in range(count)]

    def sample_variable_names(
        self, rng: Generator, count: int, *, short: bool = False
    ) -> list[str]:
        """Sample a list of `count` distinct names of five random capital letters, or of three if `short`."""
        return _sample_letter_strings(rng, string.ascii_uppercase, 3 if short else 5, count)

    def repeat_noise(self, size: int) -> list[str]:
        """Return a list of `size` units of noise, each one or more sentences, used in turn."""
        return [self.noise[each % len(self.noise)] for each in range(size)]

    def sample_variable_value(self, rng: Generator) -> str:
        """Sample a five-digit number, as text, for a prompt to assign to a variable."""
        return str(int(rng.integers(10000, 99999)))

    def make_essay_sentences(self, rng: Generator, size: int) -> list[str]:
        """List the sentences of the essays' first `size` words, the last one perhaps cut off; `rng` has no effect."""
        return split_sentences(self.get_essay_passage(size))


class SmallWording(RulerWording):
    """Wording for tiny models: nouns of a short list, four-digit numbers, sentences made of the nouns."""

    name = "small"
    tight = True
    noise = NOISE
    words_to_count = len(SMALL_WORDS)

    def words(self, rng: Generator, count: int) -> list[str]:
        """Sample a list of `count` random nouns, distinct while there are enough."""
        chosen: list[int] = []
        while len(chosen) < count:
            chosen += rng.permutation(len(SMALL_WORDS))[: count - len(chosen)].tolist()
        return [SMALL_WORDS[each] for each in chosen]

    def numbers(self, rng: Generator, count: int) -> list[str]:
        """Sample a list of `count` four-digit numbers as texts; the first digit is not 0."""
        return [str(each) for each in rng.integers(1000, 10000, count).tolist()]

    def uuids(self, rng: Generator, count: int) -> list[str]:
        """Sample a list of `count` texts of four digits, a hyphen and four digits."""
        return [f"{first}-{last}" for first, last in rng.integers(1000, 10000, (count, 2)).tolist()]

    def sample_distinct_words(self, rng: Generator, count: int) -> list[str]:
        """Sample a list of `count` distinct nouns; ValueError if there are fewer."""
        few = "the small wording has no more words: use shorter prompts, or the official wording"
        require(count <= len(SMALL_WORDS), "length", f"{count} different words", few)
        return self.words(rng, count)

    sample_coded_words = sample_distinct_words

    def sample_variable_names(
        self, rng: Generator, count: int, *, short: bool = False
    ) -> list[str]:
        """Sample a list of `count` nouns in capitals, as names of variables; `short` has no effect."""
        return [each.upper() for each in self.words(rng, count)]

    def sample_variable_value(self, rng: Generator) -> str:
        """Sample a four-digit number, as text, for a prompt to assign to a variable."""
        return self.numbers(rng, 1)[0]

    def make_essay_sentences(self, rng: Generator, size: int) -> list[str]:
        """Make a list of `size` sentences (not words): templates filled with random nouns."""
        forms = rng.integers(0, len(SENTENCES), size).tolist()
        nouns = rng.integers(0, len(SMALL_WORDS), (size, 3)).tolist()
        return [
            SENTENCES[form].format(*(SMALL_WORDS[noun] for noun in three))
            for form, three in zip(forms, nouns, strict=True)
        ]


@functools.cache
def load_word_lists() -> dict[str, list[str]]:
    """Load RULER's word lists from a packaged file: lists of "nouns", "adjectives" and "verbs"; cached."""
    return json.loads(read_packaged_file("ruler/data/words.json.gz"))


@functools.cache
def _list_all_words() -> list[str]:
    """Return the distinct words of all of RULER's word lists, sorted; cached."""
    return sorted(set().union(*load_word_lists().values()))


def _sample_letter_strings(rng: Generator, alphabet: str, size: int, count: int) -> list[str]:
    """Sample a list of `count` distinct strings of `size` random letters of `alphabet`."""
    chosen: dict[str, None] = {}
    while len(chosen) < count:
        chosen["".join(alphabet[each] for each in rng.integers(0, len(alphabet), size))] = None
    return list(chosen)


def select_wording(name: str, text: str | None = None) -> RulerWording:
    """Return the `RulerWording` named "official", with essays from `text`, or the `SmallWording` named "small"."""
    return SmallWording() if name == "small" else RulerWording(text)

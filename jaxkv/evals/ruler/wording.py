"""The words that prompts are made of: RULER's own, and a few hundred that a tiny model can be trained on."""

import abc
import functools
import gzip
import itertools
import json
import math
import re
import string
import uuid
from importlib import resources
from typing import ClassVar

import numpy as np

from jaxkv._errors import require

# RULER's, scripts/data/synthetic/niah.py.
NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
# Nouns, none of which is a part of another, of a colour's name, or of what the templates say: answers are looked for as
# parts of what was said.
SMALL_WORDS: tuple[str, ...] = tuple(
    (
        "acorn airport anchor apple apron arch arrow axe badge bakery ball bamboo banana band barn barrel basin "
        "basket bath bay beach bead bean bear bee bell belt bench berry bike bird blanket boat bolt bone book boot "
        "bottle bowl box branch bread brick bridge broom brush bucket bush butter button cabin cable cactus cake "
        "camel camera candle cane canoe cap card carpet carrot castle cave chair chalk cheese cherry chest clock "
        "cloth cloud clover coat coconut coin comb copper coral cork couch cow crab crane crown cup curtain deer "
        "desert desk diamond dog doll donkey door dove dragon drum duck eagle egg elbow engine fan farm feather fence "
        "fern finger fish flag flame flower flute forest fork fountain fox frog garden gate ghost giraffe glass globe "
        "glove goat goose grape guitar hammer hand hawk helmet hill honey hook horse house igloo island ivory jacket "
        "jar jewel jungle kettle kite kitten knee knife ladder lake lamp leaf lemon lion lizard lobster log maple "
        "marble mask meadow melon milk mirror monkey moon moose mountain mouse muffin mug necklace nest oak oar ocean "
        "onion otter oven paddle palace panda paper peach pearl pebble pencil penguin piano pillow pine pipe plate "
        "plum pocket potato pumpkin rabbit raft ribbon ring river robin rocket roof rope rose sail salt scarf seal "
        "shark sheep shell ship shoe shovel silk snail snake soap sock spider spoon squirrel stable stove swan sword "
        "tent tiger toad tower train tree trumpet tulip turkey turtle umbrella valley vase violin wagon wall walnut "
        "whale wheel window wolf worm zebra "
    ).split()
)
SENTENCES = (
    "The {} is near the {}.",
    "We see the {} and the {} here.",
    "There is one {} in the {}.",
    "Here is the {} of the {}.",
    "The {} and the {} go back to the {}.",
    "The {} is all we see.",
)
_PIECE = re.compile(r"[A-Za-z]+|[0-9]|[^\sA-Za-z0-9]")
_TITLES = r"(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)"
_SENTENCE = re.compile(r"(?<=[.!?])" + _TITLES + r"[\"\u2019\u201d)]*\s+(?=[\"\u2018\u201c(]*[A-Z])")


def pieces(text: str) -> list[str]:
    """A text's words, digits and punctuation marks, without the space between them."""
    return _PIECE.findall(text)


def sentences(text: str) -> list[str]:
    """A text's sentences: they end with a mark and quotes, and the next begins with a capital.

    RULER asks NLTK's Punkt, whose parameters are data of their own; on English prose nearly all of these are its too.
    """
    ends = [each.end() for each in _SENTENCE.finditer(text)]
    return [text[begin:end].rstrip() for begin, end in itertools.pairwise([0, *ends, len(text)])]


class Wording(abc.ABC):
    """What keys, values, variables and haystacks are made of.

    Attributes:
        name: what `wording` calls it.
        tight: no spaces and empty sentences that carry nothing.
        noise: units of the haystack of noise, in turn.
        words_to_count: different ones that there are.
    """

    name: ClassVar[str]
    tight: ClassVar[bool]
    noise: ClassVar[tuple[str, ...]]
    words_to_count: ClassVar[int | float] = math.inf

    def draw(self, rng: np.random.Generator, kind: str, count: int) -> list[str]:
        """Draws keys or values.

        Args:
            rng: the source of randomness.
            kind: "words", "numbers" or "uuids".
            count: how many.

        Returns:
            The strings: words are all different while there are so many, others as chance has it.
        """
        return {"words": self.words, "numbers": self.numbers, "uuids": self.uuids}[kind](rng, count)

    @abc.abstractmethod
    def words(self, rng: np.random.Generator, count: int) -> list[str]:
        """Words, different while there are so many."""

    @abc.abstractmethod
    def numbers(self, rng: np.random.Generator, count: int) -> list[str]:
        """Numbers."""

    @abc.abstractmethod
    def uuids(self, rng: np.random.Generator, count: int) -> list[str]:
        """Long strings without a meaning."""

    @abc.abstractmethod
    def plain(self, rng: np.random.Generator, count: int) -> list[str]:
        """Words to count, all different."""

    @abc.abstractmethod
    def codes(self, rng: np.random.Generator, count: int) -> list[str]:
        """Coded words, all different."""

    @abc.abstractmethod
    def variables(self, rng: np.random.Generator, count: int, *, short: bool = False) -> list[str]:
        """Names of variables, all different; `short` ones stand in solved examples."""

    @abc.abstractmethod
    def amount(self, rng: np.random.Generator) -> str:
        """What a variable is assigned."""

    @abc.abstractmethod
    def essay(self, rng: np.random.Generator, size: int) -> list[str]:
        """A text that means something, as sentences, of so many units."""


class Small(Wording):
    """Keys are nouns of a short list, values four digits, and every text is made of a few hundred words."""

    name = "small"
    tight = True
    noise = NOISE
    words_to_count = len(SMALL_WORDS)

    def words(self, rng: np.random.Generator, count: int) -> list[str]:
        """Nouns; beyond the list's length some occur again."""
        drawn: list[int] = []
        while len(drawn) < count:
            drawn += rng.permutation(len(SMALL_WORDS))[: count - len(drawn)].tolist()
        return [SMALL_WORDS[each] for each in drawn]

    def numbers(self, rng: np.random.Generator, count: int) -> list[str]:
        """Four digits, of which the first is not 0."""
        return [str(each) for each in rng.integers(1000, 10000, count).tolist()]

    def uuids(self, rng: np.random.Generator, count: int) -> list[str]:
        """Twice four digits with a hyphen."""
        return [f"{first}-{last}" for first, last in rng.integers(1000, 10000, (count, 2)).tolist()]

    def plain(self, rng: np.random.Generator, count: int) -> list[str]:
        """Nouns."""
        few = "the small wording has no more words: ask for fewer tokens, or take the official one"
        require(count <= len(SMALL_WORDS), "length", f"{count} different words", few)
        return self.words(rng, count)

    def codes(self, rng: np.random.Generator, count: int) -> list[str]:
        """Nouns."""
        return self.plain(rng, count)

    def variables(self, rng: np.random.Generator, count: int, *, short: bool = False) -> list[str]:
        """Nouns in capitals."""
        return [each.upper() for each in self.words(rng, count)]

    def amount(self, rng: np.random.Generator) -> str:
        """Four digits."""
        return self.numbers(rng, 1)[0]

    def essay(self, rng: np.random.Generator, size: int) -> list[str]:
        """So many sentences, of the list's nouns."""
        forms = rng.integers(0, len(SENTENCES), size).tolist()
        nouns = rng.integers(0, len(SMALL_WORDS), (size, 3)).tolist()
        return [
            SENTENCES[form].format(*(SMALL_WORDS[noun] for noun in three))
            for form, three in zip(forms, nouns, strict=True)
        ]


class Official(Wording):
    """RULER's own words: adjectives with nouns, seven digits, version 4 UUIDs, variables of five letters.

    Attributes:
        text: what the haystack of an essay is cut from, from its beginning; a longer one repeats it.
    """

    name = "official"
    tight = False
    noise = (" ".join(NOISE),)

    def __init__(self, text: str | None = None):
        """Takes the haystack's text; the one that jaxkv brings for None."""
        self._given = text

    @functools.cached_property
    def _units(self) -> list[str]:
        return (shipped("essay.txt.gz") if self._given is None else self._given).split()

    def passage(self, size: int, start: int = 0) -> str:
        """So many words of the text from one of them on, and from the beginning again where it ends."""
        at = start % len(self._units)
        times = -(-(at + size) // len(self._units))
        return " ".join((self._units * times)[at : at + size])

    def words(self, rng: np.random.Generator, count: int) -> list[str]:
        """An adjective, a hyphen and a noun."""
        firsts, lasts = word_lists()["adjectives"], word_lists()["nouns"]
        drawn: dict[str, None] = {}
        while len(drawn) < count:
            drawn[f"{firsts[int(rng.integers(len(firsts)))]}-{lasts[int(rng.integers(len(lasts)))]}"] = None
        return list(drawn)

    def plain(self, rng: np.random.Generator, count: int) -> list[str]:
        """Nouns, adjectives and verbs; where the lists end, an adjective and a noun."""
        every = _every_word()
        drawn = [every[each] for each in rng.permutation(len(every))[:count].tolist()]
        return drawn + self.words(rng, count - len(drawn))

    def codes(self, rng: np.random.Generator, count: int) -> list[str]:
        """Six small letters."""
        return _letters(rng, string.ascii_lowercase, 6, count)

    def numbers(self, rng: np.random.Generator, count: int) -> list[str]:
        """Seven digits, of which the first is not 0."""
        return [str(each) for each in rng.integers(10**6, 10**7, count).tolist()]

    def uuids(self, rng: np.random.Generator, count: int) -> list[str]:
        """UUIDs of version 4."""
        return [str(uuid.UUID(bytes=rng.bytes(16), version=4)) for _ in range(count)]

    def variables(self, rng: np.random.Generator, count: int, *, short: bool = False) -> list[str]:
        """Five capital letters; three in solved examples."""
        return _letters(rng, string.ascii_uppercase, 3 if short else 5, count)

    def amount(self, rng: np.random.Generator) -> str:
        """Five digits."""
        return str(int(rng.integers(10000, 99999)))

    def essay(self, rng: np.random.Generator, size: int) -> list[str]:
        """So many words of the text, as sentences."""
        return sentences(self.passage(size))


def shipped(name: str) -> str:
    """A text that comes with jaxkv; the README beside it says from where."""
    return gzip.decompress((resources.files("jaxkv.evals.ruler") / "data" / name).read_bytes()).decode("utf-8")


@functools.cache
def word_lists() -> dict[str, list[str]]:
    """The lists that RULER draws words from: "nouns", "adjectives" and "verbs"."""
    return json.loads(shipped("words.json.gz"))


@functools.cache
def _every_word() -> list[str]:
    return sorted(set().union(*word_lists().values()))


def _letters(rng: np.random.Generator, alphabet: str, size: int, count: int) -> list[str]:
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn["".join(alphabet[each] for each in rng.integers(0, len(alphabet), size))] = None
    return list(drawn)


def wording_of(name: str, text: str | None = None) -> Wording:
    """A wording by its name.

    Args:
        name: "official" or "small".
        text: what essays are cut from.

    Returns:
        The wording.

    Raises:
        ValueError: for another name, or a text where sentences are made of the list's words.
    """
    require(name in ("official", "small"), "wording", name, "take 'official', or 'small' for tiny models")
    if name == "small":
        require(text is None, "wording", name, "its haystacks are made of its own words: take 'official' with a text")
        return Small()
    require(text is None or bool(text.split()), "text", text, "give at least a word")
    return Official(text)

"""The words of prompts: RULER's own, and a few hundred that a tiny model can be trained on."""

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
# Nouns, none of which is a part of another, of a colour's name, or of a template's word: a score looks for answers as
# parts of the prediction.
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
    """Words, digits and punctuation marks of a text, without the space between them."""
    return _PIECE.findall(text)


def sentences(text: str) -> list[str]:
    """Sentences of a text, which end with a mark and quotes where the next one begins with a capital.

    RULER uses NLTK's Punkt, whose parameters are data of their own; on English prose nearly all of these are its too.
    """
    ends = [each.end() for each in _SENTENCE.finditer(text)]
    return [text[begin:end].rstrip() for begin, end in itertools.pairwise([0, *ends, len(text)])]


class Wording(abc.ABC):
    """Base of wordings: draws keys, values, variables and haystacks.

    Attributes:
        name: the wording's value in settings.
        tight: True leaves out spaces and empty parts that carry no meaning.
        noise: units of the haystack of noise, used in turn.
        words_to_count: number of different words that `plain` has.
    """

    name: ClassVar[str]
    tight: ClassVar[bool]
    noise: ClassVar[tuple[str, ...]]
    words_to_count: ClassVar[int | float] = math.inf

    def draw(self, rng: np.random.Generator, kind: str, count: int) -> list[str]:
        """`count` keys or values of a kind, "words", "numbers" or "uuids"; words distinct while there are enough."""
        return {"words": self.words, "numbers": self.numbers, "uuids": self.uuids}[kind](rng, count)

    @abc.abstractmethod
    def words(self, rng: np.random.Generator, count: int) -> list[str]:
        """`count` words, distinct while there are enough."""

    @abc.abstractmethod
    def numbers(self, rng: np.random.Generator, count: int) -> list[str]:
        """`count` numbers, as texts."""

    @abc.abstractmethod
    def uuids(self, rng: np.random.Generator, count: int) -> list[str]:
        """`count` long strings without a meaning."""

    @abc.abstractmethod
    def plain(self, rng: np.random.Generator, count: int) -> list[str]:
        """`count` distinct words to be counted."""

    @abc.abstractmethod
    def codes(self, rng: np.random.Generator, count: int) -> list[str]:
        """`count` distinct words without a meaning."""

    @abc.abstractmethod
    def variables(self, rng: np.random.Generator, count: int, *, short: bool = False) -> list[str]:
        """`count` distinct names of variables; `short` ones are for solved examples."""

    @abc.abstractmethod
    def amount(self, rng: np.random.Generator) -> str:
        """The number that a variable is assigned, as text."""

    @abc.abstractmethod
    def essay(self, rng: np.random.Generator, size: int) -> list[str]:
        """Sentences of a meaningful text of `size` units."""


class Small(Wording):
    """Words for tiny models: nouns of a short list, numbers of four digits, texts of a few hundred words."""

    name = "small"
    tight = True
    noise = NOISE
    words_to_count = len(SMALL_WORDS)

    def words(self, rng: np.random.Generator, count: int) -> list[str]:
        """`count` nouns; beyond the list's length some occur again."""
        drawn: list[int] = []
        while len(drawn) < count:
            drawn += rng.permutation(len(SMALL_WORDS))[: count - len(drawn)].tolist()
        return [SMALL_WORDS[each] for each in drawn]

    def numbers(self, rng: np.random.Generator, count: int) -> list[str]:
        """`count` numbers of four digits, of which the first is not 0."""
        return [str(each) for each in rng.integers(1000, 10000, count).tolist()]

    def uuids(self, rng: np.random.Generator, count: int) -> list[str]:
        """`count` strings of four digits, a hyphen and four digits."""
        return [f"{first}-{last}" for first, last in rng.integers(1000, 10000, (count, 2)).tolist()]

    def plain(self, rng: np.random.Generator, count: int) -> list[str]:
        """`count` distinct nouns; refuses more than the list has."""
        few = "the small wording has no more words: ask for fewer tokens, or take the official one"
        require(count <= len(SMALL_WORDS), "length", f"{count} different words", few)
        return self.words(rng, count)

    def codes(self, rng: np.random.Generator, count: int) -> list[str]:
        """`count` distinct nouns; refuses more than the list has."""
        return self.plain(rng, count)

    def variables(self, rng: np.random.Generator, count: int, *, short: bool = False) -> list[str]:
        """`count` nouns in capitals."""
        return [each.upper() for each in self.words(rng, count)]

    def amount(self, rng: np.random.Generator) -> str:
        """A number of four digits."""
        return self.numbers(rng, 1)[0]

    def essay(self, rng: np.random.Generator, size: int) -> list[str]:
        """`size` sentences with nouns of the list."""
        forms = rng.integers(0, len(SENTENCES), size).tolist()
        nouns = rng.integers(0, len(SMALL_WORDS), (size, 3)).tolist()
        return [
            SENTENCES[form].format(*(SMALL_WORDS[noun] for noun in three))
            for form, three in zip(forms, nouns, strict=True)
        ]


class Official(Wording):
    """RULER's own words: adjectives with nouns, seven digits, version 4 UUIDs, variables of five letters."""

    name = "official"
    tight = False
    noise = (" ".join(NOISE),)

    def __init__(self, text: str | None = None):
        """Takes the text that haystacks are cut from and repeat; None for the novel that comes with jaxkv."""
        self._text = text

    @functools.cached_property
    def _units(self) -> list[str]:
        """Words of the text."""
        return (shipped("essay.txt.gz") if self._text is None else self._text).split()

    def passage(self, size: int, start: int = 0) -> str:
        """`size` words of the text from word `start` on, and from the beginning again where it ends."""
        at = start % len(self._units)
        times = -(-(at + size) // len(self._units))
        return " ".join((self._units * times)[at : at + size])

    def words(self, rng: np.random.Generator, count: int) -> list[str]:
        """`count` distinct words of an adjective, a hyphen and a noun."""
        firsts, lasts = word_lists()["adjectives"], word_lists()["nouns"]
        drawn: dict[str, None] = {}
        while len(drawn) < count:
            drawn[f"{firsts[int(rng.integers(len(firsts)))]}-{lasts[int(rng.integers(len(lasts)))]}"] = None
        return list(drawn)

    def plain(self, rng: np.random.Generator, count: int) -> list[str]:
        """`count` nouns, adjectives and verbs; beyond the lists, adjectives with nouns."""
        every = _every_word()
        drawn = [every[each] for each in rng.permutation(len(every))[:count].tolist()]
        return drawn + self.words(rng, count - len(drawn))

    def codes(self, rng: np.random.Generator, count: int) -> list[str]:
        """`count` distinct words of six small letters."""
        return _letters(rng, string.ascii_lowercase, 6, count)

    def numbers(self, rng: np.random.Generator, count: int) -> list[str]:
        """`count` numbers of seven digits, of which the first is not 0."""
        return [str(each) for each in rng.integers(10**6, 10**7, count).tolist()]

    def uuids(self, rng: np.random.Generator, count: int) -> list[str]:
        """`count` UUIDs of version 4."""
        return [str(uuid.UUID(bytes=rng.bytes(16), version=4)) for _ in range(count)]

    def variables(self, rng: np.random.Generator, count: int, *, short: bool = False) -> list[str]:
        """`count` distinct names of five capital letters; `short` ones of three."""
        return _letters(rng, string.ascii_uppercase, 3 if short else 5, count)

    def amount(self, rng: np.random.Generator) -> str:
        """A number of five digits."""
        return str(int(rng.integers(10000, 99999)))

    def essay(self, rng: np.random.Generator, size: int) -> list[str]:
        """The first `size` words of the text, as sentences."""
        return sentences(self.passage(size))


def shipped(name: str) -> str:
    """Text of a gzip file in `ruler/data`, whose README names its source."""
    return gzip.decompress((resources.files("jaxkv.evals.ruler") / "data" / name).read_bytes()).decode("utf-8")


@functools.cache
def word_lists() -> dict[str, list[str]]:
    """Lists of words that RULER draws from: "nouns", "adjectives" and "verbs"."""
    return json.loads(shipped("words.json.gz"))


@functools.cache
def _every_word() -> list[str]:
    """All words of the lists, sorted, each once."""
    return sorted(set().union(*word_lists().values()))


def _letters(rng: np.random.Generator, alphabet: str, size: int, count: int) -> list[str]:
    """`count` distinct strings of `size` random letters."""
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn["".join(alphabet[each] for each in rng.integers(0, len(alphabet), size))] = None
    return list(drawn)


def wording_of(name: str, text: str | None = None) -> Wording:
    """The wording "official", whose essays are cut from `text`, or "small", which takes no text."""
    require(name in ("official", "small"), "wording", name, "take 'official', or 'small' for tiny models")
    if name == "small":
        require(text is None, "wording", name, "its haystacks are made of its own words: take 'official' with a text")
        return Small()
    require(text is None or bool(text.split()), "text", text, "give at least a word")
    return Official(text)

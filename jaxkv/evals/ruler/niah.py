"""RULER's needles in a haystack: keys with values between sentences of noise, of an essay, or of more needles."""

from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.evals.ruler.recipe import PromptRecipe, RulerPrompt, insert_lines

# RULER's, scripts/data/synthetic/{niah,constants}.py: templates for several values, and for one.
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_MANY = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n",
    "\nWhat are all the special magic {kind} for {asked} mentioned in the provided text?",
    " The special magic {kind} for {asked} mentioned in the provided text are",
)
_ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n",
    "\nWhat is the special magic {kind} for {asked} mentioned in the provided text?",
    " The special magic {kind} for {asked} mentioned in the provided text is",
)
TEMPLATES = (*_MANY, *_ONE)
# RULER's depths: 40 from the first sentence to the last, in whole percent.
DEPTHS = np.round(np.linspace(0, 100, num=40)).astype(int)


class PlacedNeedle(NamedTuple):
    """One needle: key, value, and `place`, the index of the haystack's unit after it."""

    key: str
    value: str
    place: int


class NeedleParts(NamedTuple):
    """Random parts of one prompt: needles, haystack, and the keys `asked` for with their `values`.

    Attributes:
        needles: the needles, in the order of the text.
        asked: keys in the question, in its order.
        values: values of each of these keys, in the order of the answer.
        haystack: sentences or paragraphs.
    """

    needles: tuple[PlacedNeedle, ...]
    asked: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]
    haystack: tuple[str, ...]


@frozen_dataclass
class NeedlesRecipe(PromptRecipe):
    """Recipe of RULER's eight needle-in-a-haystack tasks, which differ in haystack, keys, values and queries.

    Attributes:
        haystack: "noise", "essay" or "needle".
        key_kind: "words" or "uuids".
        value_kind: "numbers" or "uuids".
        keys: number of needles with distinct keys.
        values: number of needles per key.
        queries: number of keys in the question.
        depth: depth of the needles, in [0, 1]; None for random depths.
    """

    haystack: str = "noise"
    key_kind: str = "words"
    value_kind: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1
    depth: float | None = None

    @property
    def min_haystack_size(self) -> int:
        """Smallest haystack size: the number of needles in the prompt."""
        return max(self.keys, self.queries) * self.values

    def make_prompt(self, size: int, rng: Generator, index: int = 0) -> RulerPrompt:
        """Make a `RulerPrompt`: needles in a haystack of `size` units: words or sentences of an essay, or lines."""
        return self.render_prompt(self.sample_needles(size, rng))

    def sample_needles(self, size: int, rng: Generator) -> NeedleParts:
        """Sample `NeedleParts`: needles with keys, values and places, haystack units, and the keys to ask for."""
        count = max(self.keys, self.queries)
        keys = getattr(self.wording, self.key_kind)(rng, count)
        flat = getattr(self.wording, self.value_kind)(rng, count * self.values)
        values = [tuple(flat[at : at + self.values]) for at in range(0, len(flat), self.values)]
        pairs = [(key, value) for key, mine in zip(keys, values, strict=True) for value in mine]
        haystack = self._make_haystack(size, rng, keys)
        stand = [pairs[which] for which in rng.permutation(len(pairs)).tolist()]
        places = self._choose_needle_places(len(haystack), len(pairs), rng)
        needles = tuple(
            PlacedNeedle(key, value, place)
            for (key, value), place in zip(stand, places, strict=True)
        )
        asked = rng.permutation(count)[: self.queries].tolist()
        return NeedleParts(
            needles=needles,
            asked=tuple(keys[each] for each in asked),
            values=tuple(values[each] for each in asked),
            haystack=tuple(haystack),
        )

    def render_prompt(self, chosen: NeedleParts) -> RulerPrompt:
        """Render `NeedleParts` as a `RulerPrompt`: the haystack with its needles, and the question for its keys."""
        many = len(chosen.asked) * self.values > 1
        opening, question, prefix = _MANY if many else _ONE
        kind = self.value_kind if many else self.value_kind[:-1]
        asked = _join_in_english(chosen.asked)
        answers = tuple(value for mine in chosen.values for value in mine)
        right = [each.place for each in chosen.needles if each.key in chosen.asked]
        return RulerPrompt(
            context=opening.format(kind=kind) + self._insert_needles(chosen),
            question=question.format(kind=kind, asked=asked),
            prefix=prefix.format(kind=kind, asked=asked),
            answers=answers,
            target=f" {_join_in_english(answers)}.",
            depth=sum(right) / len(right) / max(1, len(chosen.haystack)),
        )

    def _make_haystack(self, size: int, rng: Generator, keys: list[str]) -> list[str]:
        """Return the haystack as a list of texts: sentences of an essay, units of noise, or needles with other keys."""
        if self.haystack == "essay":
            return self.wording.make_essay_sentences(rng, size)
        if self.haystack == "noise":
            return self.wording.repeat_noise(size)
        others: list[str] = []
        while len(others) < size:
            # A key in the question has no second value.
            more = getattr(self.wording, self.key_kind)(rng, size + len(keys))
            others += [key for key in more if key not in keys]
        values = getattr(self.wording, self.value_kind)(rng, size)
        return [
            NEEDLE.format(kind=self.value_kind, key=key, value=value)
            for key, value in zip(others[:size], values, strict=True)
        ]

    def _choose_needle_places(self, size: int, count: int, rng: Generator) -> list[int]:
        """Return ascending indices of the haystack unit before which each needle is inserted: fixed depth or random."""
        if self.depth is not None:
            return [round(self.depth * size)] * count
        if self.haystack == "essay":
            return convert_depths_to_indices(
                DEPTHS[rng.permutation(len(DEPTHS))[:count]].tolist(), size
            )
        return sorted(rng.permutation(size)[:count].tolist())

    def _insert_needles(self, chosen: NeedleParts) -> str:
        """Return the haystack as one text, with the needles' sentences inserted at their places."""
        told = [
            NEEDLE.format(kind=self.value_kind, key=each.key, value=each.value)
            for each in chosen.needles
        ]
        if self.haystack == "essay":
            begins = [0, *(each.place for each in chosen.needles), len(chosen.haystack)]
            parts = [" ".join(chosen.haystack[begins[0] : begins[1]])]
            for at, needle in enumerate(told, start=1):
                parts += [needle, " ".join(chosen.haystack[begins[at] : begins[at + 1]])]
            # RULER writes a space on either side of an empty part, too.
            return " ".join(part for part in parts if part or not self.wording.tight)
        return insert_lines(chosen.haystack, told, [each.place for each in chosen.needles])


def convert_depths_to_indices(depths: list[int], size: int) -> list[int]:
    """Convert depths in percent to ascending indices among `size` sentences, rounded down."""
    return sorted(int(size * (depth / 100)) for depth in depths)


def _join_in_english(words: tuple[str, ...]) -> str:
    """Join words as an English list, with RULER's commas: `a`, `a, and b`, `a, b, and c`."""
    return ", ".join(words[:-1]) + ", and " + words[-1] if len(words) > 1 else words[0]

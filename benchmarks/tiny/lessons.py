"""What the tiny model is trained on: contexts, each with many questions and their answers behind it."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxkv.evals.retrieval import COLOURS
from jaxkv.evals.ruler import chains, counted, niah
from jaxkv.evals.ruler.niah import NEEDLE
from jaxkv.evals.ruler.wording import NOISE, SENTENCES, SMALL_WORDS, SmallWording

WORDING = SmallWording()
MANY, ONE = niah.TEMPLATES[:3], niah.TEMPLATES[3:]
TRACK = chains.TEMPLATES[:3]

# 2StageRetr's, as `jaxkv.evals.two_stage` writes them.
OPENING = (
    "Let's play a game. You have a dictionary and an addition equation. The keys of the dictionary are "
    "numbers. Find the value in the dictionary whose key is the result of the addition, and output it.\n"
)
AT_ONCE = "Answer the corresponding color based on the addition result."
REASONING = "First work out the addition step by step, then look its result up and say the corresponding color."
# How often a question is only what tells it from others, the answer's first words, or all of a prompt's end: the
# briefer it is, the more of them fit a text, and the sooner attention learns to look things up.
BRIEF = (0.6, 0.2, 0.2)

# A text, and without end questions with their answers.
Lesson = tuple[str, Iterator[tuple[str, str]]]


def endless(rng: np.random.Generator, count: int) -> Iterator[int]:
    """All of so many, in an order of their own each time."""
    while True:
        yield from rng.permutation(count).tolist()


def pairs(rng: np.random.Generator, headroom: int) -> Lesson:
    """Words and what stands for each."""
    kind = str(rng.choice(["number", "colour", "word", "noun"]))
    count = int(np.clip(headroom // (4 if kind in ("colour", "word") else 7), 2, len(SMALL_WORDS)))
    keys, values = WORDING.words(rng, count), WORDING.numbers(rng, count)
    if kind == "noun":
        keys, values = [str(each) for each in 1000 + rng.permutation(9000)[:count]], keys
    elif kind != "number":
        values = [
            str(each) for each in rng.choice(COLOURS if kind == "colour" else SMALL_WORDS, count)
        ]
    sign = str(rng.choice([":", ":", " is:", " is", " ="]))
    text = (
        "\nThe dictionary is {"
        + ",".join(f" {key}{sign} {value}" for key, value in zip(keys, values, strict=True))
        + "}"
    )
    sign = str(rng.choice([":", " is", sign]))

    def asked():
        for at in endless(rng, count):
            yield f"\n {keys[at]}{sign}", f" {values[at]}"

    return text, asked()


def two_stage(rng: np.random.Generator, headroom: int) -> Lesson:
    """2StageRetr: sums whose results are looked up, after the working or at once."""
    size = int(rng.integers(4, np.clip((headroom - 40) // 4, 6, 48)))
    colours = rng.choice(COLOURS, size)
    entries = ", ".join(f"{at}: {colour}" for at, colour in enumerate(colours))
    text = (
        f"{OPENING if headroom > 80 or rng.random() < 0.3 else ''}The dictionary is {{{entries}}}"
    )

    def asked():
        for at in endless(rng, size):
            kind = rng.choice(["look", "reason", "reason", "short", "short"])
            if kind == "look":
                yield f"\n {at}:", f" {colours[at]}"
                continue
            key = max(at, 2)
            first = int(rng.integers(1, key))
            equation = f"\nThe equation is {first} + {key - first} = ?\n"
            if kind == "reason":
                yield (
                    equation + REASONING,
                    f" {first} + {key - first} = {key}, {key}: {colours[key]}",
                )
            else:
                yield equation + AT_ONCE, f" {colours[key]}"

    return text, asked()


def listed(words: Sequence[str]) -> str:
    """As RULER lists keys and values."""
    return ", ".join(words[:-1]) + ", and " + words[-1] if len(words) > 1 else words[0]


def scattered(rng: np.random.Generator, filler: list[str], lines: list[str]) -> list[str]:
    """Lines in their order, anywhere among others."""
    places = sorted(rng.integers(0, len(filler) + 1, len(lines)).tolist(), reverse=True)
    for at, each in zip(places, reversed(lines), strict=True):
        filler.insert(at, each)
    return filler


def needles(rng: np.random.Generator, headroom: int) -> Lesson:
    """RULER's needles: one or several values of one or several keys, in noise, sentences, or nothing but needles."""
    form = str(rng.choice(["keys", "keys", "noise", "words"]))
    kind = "uuids" if rng.random() < 0.06 else "numbers"
    sample = WORDING.numbers if kind == "numbers" else WORDING.uuids
    line = 17 if kind == "numbers" else 22
    many = max(headroom // line, 1)
    each_has = 1 if rng.random() < 0.75 else int(rng.integers(1, 5))
    if form == "keys":
        count = int(np.clip(many // each_has, 1, len(SMALL_WORDS)))
    else:
        count = int(rng.integers(1, max(2, min(8, many // 2 + 1))))
    keys = (
        WORDING.uuids
        if kind == "uuids" and form == "keys" and rng.random() < 0.5
        else WORDING.words
    )(rng, count)
    values = [sample(rng, each_has) for _ in keys]
    told = [(key, value) for key, of in zip(keys, values, strict=True) for value in of]
    told = [told[at] for at in rng.permutation(len(told))]
    lines = [NEEDLE.format(kind=kind, key=key, value=value) for key, value in told]
    left = headroom - line * len(lines)
    if form == "noise" and left > 0:
        lines = scattered(rng, [NOISE[at % len(NOISE)] for at in range(left // 6)], lines)
    if form == "words" and left > 0:
        lines = scattered(rng, WORDING.make_essay_sentences(rng, left // 9), lines)
    text = (" " if form == "words" else "\n").join(lines)
    style = MANY if rng.random() < 0.5 else ONE
    name = kind if style is MANY else kind[:-1]
    text = (style[0].format(kind=name) if headroom > 60 else "") + text
    of = {key: [value for each, value in told if each == key] for key in keys}

    def asked():
        for at in endless(rng, count):
            wanted = [keys[at]]
            if each_has == 1 and count > 1 and rng.random() < 0.25:
                wanted = [
                    keys[each]
                    for each in rng.choice(
                        count, min(count, int(rng.integers(2, 5))), replace=False
                    )
                ]
            single = len(wanted) * each_has == 1
            style, name = (ONE, kind[:-1]) if single else (MANY, kind)
            _, question, prefix = (each.format(kind=name, asked=listed(wanted)) for each in style)
            answer = " " + listed([value for key in wanted for value in of[key]]) + "."
            # Most often only what tells questions apart: more of them then fit a text.
            brief = f"\n for {listed(wanted)} {'is' if single else 'are'}"
            yield (brief, "\n" + prefix, question + prefix)[rng.choice(3, p=BRIEF)], answer

    return text, asked()


def variables(rng: np.random.Generator, headroom: int) -> Lesson:
    """RULER's variables, of one chain in noise or many."""
    dense = rng.random() < 0.6
    most = max(headroom // (8 if dense else 30), 1)
    total = int(np.clip(most, 1, 60)) if dense else int(rng.integers(1, min(most, 12) + 1))
    chains = []
    left = total
    while left > 0:
        chains.append(min(int(rng.integers(1, 6)), left))
        left -= chains[-1]
    names = WORDING.sample_variable_names(rng, total)
    ends = list(itertools.accumulate(chains))
    of = [names[end - hops : end] for end, hops in zip(ends, chains, strict=True)]
    values = WORDING.numbers(rng, len(chains))
    told = [
        iter(
            [
                f"VAR {mine[0]} = {value}",
                *(f"VAR {b} = VAR {a}" for a, b in itertools.pairwise(mine)),
            ]
        )
        for mine, value in zip(of, values, strict=True)
    ]
    owner = rng.permutation(np.repeat(np.arange(len(chains)), chains)).tolist()
    lines = [next(told[each]) for each in owner]
    spare = headroom - 8 * total
    if spare > 0:
        lines = scattered(rng, [NOISE[at % len(NOISE)] for at in range(spare // 6)], lines)
    text = (TRACK[0] if headroom > 60 else "") + "\n".join(lines)

    def asked():
        for at in endless(rng, len(chains)):
            _, question, prefix = (
                each.format(value=values[at], count=len(of[at])).rstrip(" ") for each in TRACK
            )
            form = (f"\n {values[at]}:", "\n" + prefix, question + prefix)[rng.choice(3, p=BRIEF)]
            yield form, "".join(f" {each}" for each in of[at])

    return text, asked()


def sums(rng: np.random.Generator, headroom: int) -> Lesson:
    """Sums of numbers up to 50."""

    def asked():
        while True:
            key = int(rng.integers(2, 50))
            first = int(rng.integers(1, key))
            yield f"\n {first} + {key - first} =", f" {key}"

    return "\n", asked()


LESSONS: dict[str, Callable[[np.random.Generator, int], Lesson]] = {
    "pairs": pairs,
    "needles": needles,
    "variables": variables,
    "two_stage": two_stage,
    "sums": sums,
}


def texts() -> Iterator[str]:
    """Texts in which every token of a template occurs."""
    yield from (
        *NOISE,
        *SENTENCES,
        *MANY,
        *ONE,
        NEEDLE,
        *chains.TEMPLATES,
        *counted.TEMPLATES,
        counted.DOTS,
    )
    rng = np.random.default_rng(0)
    for make in LESSONS.values():
        for headroom in range(60, 400, 4):
            text, asked = make(rng, headroom)
            yield text
            for both in itertools.islice(asked, 8):
                yield from both

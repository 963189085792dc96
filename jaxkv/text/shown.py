"""`pieces_of`: the text of each token of a prompt; `Shown`: text shaded by how much of each token a cache keeps."""

import dataclasses
import html
import itertools
import math
import operator
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jaxkv.text.tokenizer import StreamDecoder, Text

# Escape sequences in a document could control the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Passage(NamedTuple):
    """Text of neighbouring tokens that equally many kv heads keep, and the number of these heads."""

    text: str
    heads: float


def joined(pieces: Sequence[str], counts: Iterable[int]) -> list[Passage]:
    """Join neighbouring tokens with equal numbers of kv heads, from each token's text and number.

    A token without text is a part of the next token's character.
    """
    whole, waiting = list[Passage](), list[int]()
    for text, count in zip(pieces, counts, strict=True):
        waiting.append(count)
        if text:
            whole.append(Passage(text, sum(waiting) / len(waiting)))
            waiting = []
    parts = itertools.groupby(whole, key=operator.attrgetter("heads"))
    return [Passage("".join(each.text for each in part), heads) for heads, part in parts]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Shown:
    """Prompts shaded by how many kv heads keep each token: HTML in a notebook, colours in a terminal, else plain text.

    Attributes:
        passages: the text of each prompt, in parts that equally many heads keep.
        heads: number of kv heads over layers that could keep a token.
    """

    passages: tuple[Sequence[Passage], ...]
    heads: int

    def __repr__(self) -> str:
        """Text of the prompts, with colours if stdout is a terminal."""
        return "\n\n".join(self._written(_coloured if sys.stdout.isatty() else _plain))

    def _repr_html_(self) -> str:
        """HTML of the prompts: kept text is marked, evicted text is struck through."""
        return f"<div style='white-space: pre-wrap'>{'<hr>'.join(self._written(_marked))}</div>"

    def _written(self, shaded: Callable[[str, float], str]) -> list[str]:
        """Return each prompt's text, in parts that `shaded` formats by the share of kv heads that keep them."""
        return [
            "".join(shaded(each.text, each.heads / self.heads) for each in prompt)
            for prompt in self.passages
        ]


def _plain(text: str, share: float) -> str:
    """Replace control characters of a text, except tabs and line feeds."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _coloured(text: str, share: float) -> str:
    """Colour a text for a terminal, on a blue that is brighter for larger shares; faint for a share of 0."""
    code = f"\x1b[97;48;5;{16 + math.ceil(5 * share)}m" if share else "\x1b[2m"
    # A background that continues over a line break would fill the rest of the line.
    return "\n".join(f"{code}{line}\x1b[0m" for line in _plain(text, share).split("\n"))


def _marked(text: str, share: float) -> str:
    """Return the HTML element of a text: marked, stronger for larger shares, or struck through for a share of 0."""
    shade = (
        f"mark style='color: inherit; background: rgb(0 114 178 / {0.1 + 0.45 * share:.2f})'"
        if share
        else "s"
    )
    return f"<{shade} title='{share:.0%} of the kv heads'>{html.escape(text)}</{shade.split()[0]}>"


class Pieces(NamedTuple):
    """Text of each token, and the indices of special tokens."""

    texts: list[str]
    special: list[int]


def pieces_of(ids: Iterable[int], text: Text) -> Pieces:
    """Return `Pieces`: each token's text, "" if its character ends in a later one, a name for a special token."""
    decoder, texts, special = StreamDecoder(text), list[str](), list[int]()
    for at, each in enumerate(ids):
        piece = decoder.push([each])
        if not piece and not text.decode([each]):  # a special token
            piece = text.decode([each], skip_special=False)
            special.append(at)
        texts.append(piece)
    if texts:
        texts[-1] += decoder.flush()
    return Pieces(texts, special)

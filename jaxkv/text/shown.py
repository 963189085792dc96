"""`decode_token_texts`: the text of each token; `KeptTokensDisplay`: text shaded by how much of a token is kept."""

import dataclasses
import html
import itertools
import math
import operator
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jaxkv.text.tokenizer import ChatTokenizer, StreamDecoder

# Escape sequences in a document could control the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class KeptPassage(NamedTuple):
    """NamedTuple: text of neighbouring tokens that equally many kv heads keep, and the number of these heads."""

    text: str
    heads: float


def join_equally_kept_tokens(pieces: Sequence[str], counts: Iterable[int]) -> list[KeptPassage]:
    """Join adjacent tokens kept by equally many kv heads to `KeptPassage`; tokens of one character get their mean.

    A token without text is a part of the next token's character.
    """
    whole, waiting = list[KeptPassage](), list[int]()
    for text, count in zip(pieces, counts, strict=True):
        waiting.append(count)
        if text:
            whole.append(KeptPassage(text, sum(waiting) / len(waiting)))
            waiting = []
    parts = itertools.groupby(whole, key=operator.attrgetter("heads"))
    return [KeptPassage("".join(each.text for each in part), heads) for heads, part in parts]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class KeptTokensDisplay:
    """Prompts shaded by how many kv heads keep each token: HTML in a notebook, colours in a terminal, else plain.

    Attributes:
        passages: the text of each prompt, in parts that equally many heads keep.
        heads: number of kv heads over layers that could keep a token.
    """

    passages: tuple[Sequence[KeptPassage], ...]
    heads: int

    def __repr__(self) -> str:
        """Return the prompts' text, coloured by how many kv heads keep it if stdout is a terminal; else plain."""
        return "\n\n".join(
            self._format_prompts(
                _format_terminal_text if sys.stdout.isatty() else _replace_control_characters
            )
        )

    def _repr_html_(self) -> str:
        """Return HTML of the prompts: text that any kv head keeps is marked, the rest is struck through."""
        return f"<div style='white-space: pre-wrap'>{'<hr>'.join(self._format_prompts(_format_html_text))}</div>"

    def _format_prompts(self, shaded: Callable[[str, float], str]) -> list[str]:
        """Return a list of texts, one per prompt, each passage formatted by `shaded` for its share of kv heads."""
        return [
            "".join(shaded(each.text, each.heads / self.heads) for each in prompt)
            for prompt in self.passages
        ]


def _replace_control_characters(text: str, share: float) -> str:
    """Return a text with control characters, except tabs and line feeds, replaced by U+FFFD; `share` is not used."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _format_terminal_text(text: str, share: float) -> str:
    """Return a text with terminal colours: on a blue that is brighter for larger shares of kv heads; faint if 0."""
    code = f"\x1b[97;48;5;{16 + math.ceil(5 * share)}m" if share else "\x1b[2m"
    # A background that continues over a line break would fill the rest of the line.
    return "\n".join(
        f"{code}{line}\x1b[0m" for line in _replace_control_characters(text, share).split("\n")
    )


def _format_html_text(text: str, share: float) -> str:
    """Return a text's HTML element: marked, stronger for larger shares of kv heads; struck through for a share of 0."""
    shade = (
        f"mark style='color: inherit; background: rgb(0 114 178 / {0.1 + 0.45 * share:.2f})'"
        if share
        else "s"
    )
    return f"<{shade} title='{share:.0%} of the kv heads'>{html.escape(text)}</{shade.split()[0]}>"


class TokenTexts(NamedTuple):
    """NamedTuple: a list of each token's text in a prompt, and a list of special tokens' indices in it, not ids."""

    texts: list[str]
    special: list[int]


def decode_token_texts(ids: Iterable[int], text: ChatTokenizer) -> TokenTexts:
    """Return `TokenTexts` of ids: each token's text, "" if its character ends later; special tokens are spelled out."""
    decoder, texts, special = StreamDecoder(text), list[str](), list[int]()
    for at, each in enumerate(ids):
        piece = decoder.push_ids([each])
        if not piece and not text.decode([each]):  # a special token
            piece = text.decode([each], skip_special=False)
            special.append(at)
        texts.append(piece)
    if texts:
        texts[-1] += decoder.flush_text()
    return TokenTexts(texts, special)

"""`pieces_of`: the text of each token of a prompt, special tokens by their names."""

from collections.abc import Iterable
from typing import NamedTuple

from jaxkv.text.tokenizer import StreamDecoder, Text


class Pieces(NamedTuple):
    """Texts of tokens, one each, and the indices of the special ones among them."""

    texts: list[str]
    special: list[int]


def pieces_of(ids: Iterable[int], text: Text) -> Pieces:
    """Text of each token; an empty one for a token whose character ends in a later one, a name for a special token."""
    decoder, texts, special = StreamDecoder(text), list[str](), list[int]()
    for at, each in enumerate(ids):
        piece = decoder.push([each])
        if not piece and not text.decode([each]):  # a special token, such as the first of all
            piece = text.decode([each], skip_special=False)
            special.append(at)
        texts.append(piece)
    if texts:
        texts[-1] += decoder.flush()
    return Pieces(texts, special)

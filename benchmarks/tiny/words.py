"""The tiny model's tokens: words, with the space before them where one stands, and digits by twos."""

import re
from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

PIECES = r" ?[A-Za-z]+| ?[0-9]{1,2}| ?[^\sA-Za-z0-9]|\s"
UNKNOWN, BEGIN, END = "<unk>", "<bos>", "<eos>"


def pieces(text: str) -> list[str]:
    """What a text is cut into."""
    return re.findall(PIECES, text)


def tokenizer_of(texts: Iterable[str], words: Sequence[str]) -> tokenizers.Tokenizer:
    """A tokenizer that gives every text of these words and templates back as it was.

    Args:
        texts: templates, of which every piece becomes a token.
        words: nouns; each becomes a token in lower and in upper case, with and without a space before it.

    Returns:
        The tokenizer; what it does not know is `UNKNOWN`.
    """
    known = {UNKNOWN: 0, BEGIN: 1, END: 2}
    for piece in [
        *(f"{space}{digit}" for space in ("", " ") for digit in range(100)),
        *(f"{space}0{digit}" for space in ("", " ") for digit in range(10)),
        *(f"{space}{mark}" for mark in ".,:;?!=+-*/(){}[]'\"" for space in ("", " ")),
        " ",
        "\n",
        *(f" {word}" for word in words),
        *(f" {word.upper()}" for word in words),
        *(word for word in words),
        *(piece for text in texts for piece in pieces(text)),
    ]:
        known.setdefault(piece, len(known))
    made = tokenizers.Tokenizer(models.WordLevel(known, unk_token=UNKNOWN))
    made.add_special_tokens([UNKNOWN, BEGIN, END])
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(PIECES), behavior="isolated")
    made.decoder = decoders.Fuse()
    return made

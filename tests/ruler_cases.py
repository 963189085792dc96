"""What the tests of RULER and of the needle map share: a tokenizer of words, and what RULER's own scripts made."""

import dataclasses
import functools
import gzip
import json
import re
import string
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from jaxkv.evals.ruler import chains, counted, niah
from jaxkv.evals.ruler.wording import NOISE, SENTENCES, SMALL_WORDS
from jaxkv.loading import LanguageModel
from jaxkv.testing import tiny_model
from jaxkv.text.tokenizer import ChatTokenizer

GOLDEN = Path(__file__).parent / "golden" / "ruler"


def pieces(text: str) -> list[str]:
    """A text's words, single digits and marks."""
    return re.findall(r"[A-Za-z]+|[0-9]|[^\sA-Za-z0-9]", text)


def count(prompt) -> int:
    """Tokens of a prompt: words, digits and marks."""
    return len(pieces(prompt.full_text))


@functools.cache
def model(positions: int = 65536) -> LanguageModel:
    """A model whose tokens are words, digits and marks; the same token is every one."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    pattern = Regex(r"[A-Za-z]+|[0-9]|[^\sA-Za-z0-9]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="removed", invert=True)
    made = tiny_model(dataclasses.replace(tiny_model().config, max_positions=positions))
    made.text = ChatTokenizer(tokenizer)
    return made


@functools.cache
def golden() -> dict:
    """What `tests/golden/make_ruler.py` wrote."""
    return json.loads(gzip.decompress((GOLDEN / "golden.json.gz").read_bytes()))


def small_vocabulary() -> set[str]:
    """Words, digits and punctuation marks in prompts and answers of the small wording."""
    templates = (*NOISE, *SENTENCES, *niah.TEMPLATES, niah.NEEDLE, *chains.TEMPLATES)
    # Names of the templates' fields are no words of a prompt.
    parsed = (string.Formatter().parse(each) for each in (*templates, *counted.TEMPLATES))
    fixed = [text for template in parsed for text, *_ in template]
    found = pieces(" ".join([*fixed, "number numbers uuid uuids 0123456789 , and . - ="]))
    return {*found, *SMALL_WORDS, *(word.upper() for word in SMALL_WORDS)}

"""What tests of `generate` share: a small model that speaks characters, prompts for it, and how caches are compared."""

import functools
from pathlib import Path

import numpy as np
from tiny import segments
from tokenizers import Tokenizer, decoders, models

import jaxkv
from jaxkv.loading import LanguageModel
from jaxkv.text.tokenizer import ChatTokenizer, StreamDecoder

FOLDER = Path(__file__).parent / "golden" / "models" / "llama_gqa"
BOS, EOS, NEW = 1, 2, 12
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}[{{ m.content }}]{% else %}={{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
DOC = "the quick brown fox jumps over the lazy dog"
POLICY = jaxkv.SnapKV(budget=16, window=4)
DRAWING = {"stop_at_eos": False, "max_new_tokens": NEW}


def characters(template=TEMPLATE):
    """A tokenizer with one token a character: pieces of text meet at any seam as they do in one text."""
    letters = [" ", "\n", *map(chr, range(33, 124))]
    vocab = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTokenizer(
        tokenizer, specials=specials, adds_bos=True, template=template, origin="characters"
    )


@functools.cache
def tiny(template: str | None = TEMPLATE):
    return LanguageModel(jaxkv.load(FOLDER).decoder, text=characters(template), name="tiny")


def ids(seed, *lengths):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 96, n).tolist() for n in lengths]


def assert_same_rows(one, other):
    np.testing.assert_array_equal(one.seen, other.seen)
    np.testing.assert_array_equal(one.kept, other.kept)
    for a, b in zip(segments(one), segments(other), strict=True):
        for x, y in zip(a[3:], b[3:], strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)


def shown(model, tokens):
    """What a reader sees of these tokens."""
    stream = StreamDecoder(model.text)
    return (
        "".join(stream.push_ids([each]) for each in np.asarray(tokens).tolist())
        + stream.flush_text()
    )

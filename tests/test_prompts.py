"""Prompts of every kind and of several kinds at once: each sequence has its own turn, and what is no prompt says so."""

import array
import collections
import enum
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_generation import BOS, DOC, DRAWING, characters, tiny

import jaxkv
from jaxkv.cache import Turn
from jaxkv.text.prompts import encode

CHAT = [
    {"role": "user", "content": "What is tin?"},
    {"role": "assistant", "content": "A metal."},
    {"role": "user", "content": DOC},
]


class Named(enum.StrEnum):
    DOC = DOC


@pytest.fixture(scope="module")
def model():
    return tiny()


def encoded(prompt, *, close=True, **options):
    return encode(prompt, characters(), tiny().config, close=close, **options)


def tokens(out):
    return [row.tolist() for row in out.tokens]


# --- turns ----------------------------------------------------------------------------------------------------------


def test_each_sequence_has_its_own_turn():
    ids = [BOS, 5, 6]
    mixed = encoded([ids, DOC, CHAT])
    assert mixed.turns == (Turn.RAW, Turn.ANSWER, Turn.ANSWER) and mixed.turn == mixed.turns
    assert encoded([DOC, CHAT]).turn is Turn.ANSWER and encoded([ids, ids], close=False).turn is Turn.RAW
    after = encoded(["So?"] * 3, turn=mixed.turns)
    alone = [encoded("So?", turn=turn) for turn in mixed.turns]
    assert after.ids == [each.ids[0] for each in alone] and after.turns == tuple(each.turn for each in alone)
    assert after.ids[0] == characters().encode("So?", bos=False) and after.ids[1] == after.ids[2] != after.ids[0]


def test_a_mixed_list_is_answered_as_each_alone(model):
    """Ids, text, a conversation: prefilled, asked, and asked again, beside each other and alone."""
    prompts = [[BOS, *model.text.encode("tin is", bos=False)], DOC, CHAT]
    questions = [" why?", " who?", [7, 8, 9]]
    cache = jaxkv.prefill(model, prompts)
    assert cache.turn == (Turn.RAW, Turn.USER, Turn.USER)
    first = jaxkv.generate(model, questions, cache=cache, **DRAWING)
    second = jaxkv.generate(model, ["So?"] * 3, cache=first.cache, **DRAWING)
    assert first.cache.turn == (Turn.RAW, Turn.ANSWER, Turn.RAW)
    for row, (prompt, question) in enumerate(zip(prompts, questions, strict=True)):
        alone = jaxkv.generate(model, [question], cache=jaxkv.prefill(model, [prompt]), **DRAWING)
        assert tokens(alone)[0] == tokens(first)[row], row
        again = jaxkv.generate(model, "So?", cache=alone.cache, **DRAWING)
        assert again.tokens.tolist() == tokens(second)[row], row
    # The other way round: what came first does not decide.
    turned = jaxkv.generate(model, prompts[::-1], **DRAWING)
    straight = jaxkv.generate(model, prompts, **DRAWING)
    assert tokens(turned)[::-1] == tokens(straight) and turned.cache.turn == straight.cache.turn[::-1]


def test_one_cache_is_asked_in_several_ways(model):
    cache = jaxkv.prefill(model, DOC)
    questions = [" why?", [7, 8, 9], [{"role": "user", "content": " why?"}]]
    out = jaxkv.generate(model, questions, cache=cache, **DRAWING)
    assert out.cache.turn == (Turn.ANSWER, Turn.RAW, Turn.ANSWER)
    for row, question in enumerate(questions):
        assert tokens(jaxkv.generate(model, [question], cache=cache, **DRAWING))[0] == tokens(out)[row]
    # A cache whose sequences differ is a pytree like any other, and copies as one.
    same = jax.tree.map(lambda leaf: leaf, out.cache)
    assert same.turn == out.cache.turn and hash(jax.tree.structure(same)) == hash(jax.tree.structure(out.cache))
    with pytest.raises(ValueError, match="prompt='2 prompts': the cache holds 3 sequences: give as many"):
        jaxkv.generate(model, ["So?"] * 2, cache=out.cache, **DRAWING)


# --- kinds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt, same_as",
    [
        (np.str_(DOC), DOC),
        (Named.DOC, DOC),
        (np.asarray(DOC), DOC),
        (np.asarray([DOC, "Hi"]), [DOC, "Hi"]),
        (np.asarray([DOC, [5, 6]], object), [DOC, [5, 6]]),
        ([jnp.int32(5), jnp.int32(6)], [5, 6]),
        ([np.asarray(5), np.int8(6)], [5, 6]),
        (jnp.asarray([5, 6], jnp.uint8), [5, 6]),
        (np.asarray([5, 6], np.uint64), [5, 6]),
        (np.asarray([np.asarray([5]), np.asarray([6, 7])], object), [[5], [6, 7]]),
        (range(5, 8), [5, 6, 7]),
        (array.array("i", [5, 6]), [5, 6]),
        (collections.deque([5, 6]), [5, 6]),
        (tuple(CHAT), CHAT),
    ],
)
def test_what_else_is_a_prompt(prompt, same_as):
    one, other = encoded(prompt), encoded(same_as)
    assert one == other and all(type(each) is int for ids in one.ids for each in ids)


@pytest.mark.parametrize(
    "prompt, message",
    [
        (b"Hello", r"prompt=bytes: bytes are neither text nor ids: give prompt\.decode\(\"utf-8\"\), or list"),
        (bytearray(b"Hello"), r"prompt=bytearray: .*decode"),
        (memoryview(b"Hello"), r"prompt=memoryview: .*decode"),
        (np.bytes_(b"Hello"), r"prompt=bytes_?: .*decode|prompt=\|S5"),
        (np.asarray([b"Hello"]), r"prompt=\|S5: token ids are integers"),
        ([b"Hello", b"Hi"], r"prompt=bytes: .*decode"),
        (pathlib.Path("question.txt"), r"prompt=PosixPath: give the file's text: prompt\.read_text"),
        ([pathlib.Path("question.txt")], r"prompt=PosixPath: .*read_text"),
        ((word for word in ["a"]), r"prompt=generator: .*list\(prompt\)"),
        (iter([5, 6]), r"prompt=list_iterator: .*list\(prompt\)"),
        ({5, 6}, r"prompt=set: .*list\(prompt\)"),
        ({"role": "user", "content": "Hi"}, r"prompt=dict: .*one message goes into a list: \[message\]"),
        ({"input_ids": [5, 6]}, r"prompt=dict: give its ids: prompt\['input_ids'\]"),
        ([[[5, 6]]], "prompt=list: give text, chat messages.*this is a list of list"),
        ([5, "six"], "prompt=list: give text.*a list of int, str"),
        ([{"role": "user", "content": "Hi"}, "Hi"], "prompt=list: give text.*a list of dict, str"),
        ([5, 6.5], "prompt=list: give text.*a list of float, int"),
        ([5, True], "prompt=list: give text.*a list of bool, int"),
        ([True, False], "prompt=bool: give text"),
        (np.asarray([True, False]), "prompt=bool: token ids are integers"),
        (np.asarray(5), r"prompt=\(\): give ids as \[S\] or \[B, S\]"),
        (np.zeros((1, 1, 2), np.int32), r"prompt=\(1, 1, 2\): give ids as"),
        (np.asarray([2**63 + 5], np.uint64), "token ids lie in"),
        ([2**80], "token ids lie in"),
        (5, "prompt=int: give text"),
        (object(), "prompt=object: give text"),
        ("half \ud83d a face", r"prompt='half \\ud83d': half a character at 5: decode with errors='replace'"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isascii() else type(value).__name__,
)
def test_what_is_no_prompt(prompt, message):
    with pytest.raises((ValueError, TypeError), match=message):
        encoded(prompt)


def test_messages_are_no_plain_text():
    with pytest.raises(ValueError, match="raw=True: messages are no plain text: leave it out, or give text"):
        encoded(CHAT, raw=True)

"""Prompts of every kind and of several kinds at once: each sequence has its own turn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lettered import BOS, DOC, DRAWING, characters, tiny

import jaxkv
from jaxkv.cache import ConversationState
from jaxkv.text.prompts import encode_prompts

CHAT = [
    {"role": "user", "content": "What is tin?"},
    {"role": "assistant", "content": "A metal."},
    {"role": "user", "content": DOC},
]


@pytest.fixture(scope="module")
def model():
    return tiny()


def encoded(prompt, *, close=True, **options):
    return encode_prompts(prompt, characters(), tiny().config, close=close, **options)


def tokens(out):
    return [row.tokens.tolist() for row in out]


# --- turns ----------------------------------------------------------------------------------------------------------


def test_each_sequence_has_its_own_turn():
    ids = [BOS, 5, 6]
    mixed = encoded([ids, DOC, CHAT])
    assert (
        mixed.turns == (ConversationState.RAW, ConversationState.ANSWER, ConversationState.ANSWER)
        and mixed.conversation_state == mixed.turns
    )
    assert (
        encoded([DOC, CHAT]).conversation_state is ConversationState.ANSWER
        and encoded([ids, ids], close=False).conversation_state is ConversationState.RAW
    )
    after = encoded(["So?"] * 3, turn=mixed.turns)
    alone = [encoded("So?", turn=turn) for turn in mixed.turns]
    assert after.ids == [each.ids[0] for each in alone] and after.turns == tuple(
        each.conversation_state for each in alone
    )
    assert (
        after.ids[0] == characters().encode("So?", bos=False)
        and after.ids[1] == after.ids[2] != after.ids[0]
    )


@pytest.mark.parametrize(
    ("question", "read"),
    [
        ("Why?", "\n\nWhy?]="),
        ("\nWhy?", "\nWhy?]="),
        ("\n\nWhy?", "\n\nWhy?]="),
    ],
)
def test_a_question_stands_behind_a_blank_line(question, read):
    """Where the user's turn is open: nowhere else, and ids are as they are."""
    wanted = characters().encode(read, bos=False)
    assert encoded(question, turn=ConversationState.USER).ids == [wanted]
    assert encoded([{"role": "user", "content": question}], turn=ConversationState.USER).ids == [
        wanted
    ]
    for turn in (ConversationState.USER, ConversationState.RAW):
        assert encoded(question, turn=turn, raw=True).ids == [
            characters().encode(question, bos=False)
        ]
    assert encoded([5, 6], turn=ConversationState.USER).ids == [[5, 6]]
    assert encoded(question, turn=ConversationState.ANSWER).ids == [
        characters().encode(f"</s>[{question}]=", bos=False)
    ]


def test_a_conversation_goes_on_in_an_open_turn():
    """A text is the beginning of the first user's message, whatever follows."""
    start, rest = encoded(DOC, close=False), encoded(CHAT, turn=ConversationState.USER)
    first = {"role": "user", "content": f"{DOC}\n\n{CHAT[0]['content']}"}
    assert start.ids[0] + rest.ids[0] == encoded([first, *CHAT[1:]]).ids[0]
    assert rest.conversation_state is ConversationState.ANSWER
    for turn, messages in (
        (ConversationState.USER, CHAT[1:]),
        (ConversationState.ANSWER, CHAT),
        (ConversationState.RAW, CHAT),
    ):
        with pytest.raises(ValueError, match="prompt"):
            encoded(messages, turn=turn)


def test_a_carriage_return_is_a_line_break():
    given = encode_prompts(
        "\r\nWhy?", characters(), tiny().config, turn=ConversationState.USER, close=True
    )
    assert len(given.ids[0]) == len("\r\nWhy?]=")


def test_a_mixed_list_is_answered_as_each_alone(model):
    """Ids, text, a conversation: prefilled, asked, and asked again, beside each other and alone."""
    # All of one bucket.
    chat = [*CHAT[:2], {"role": "user", "content": "And copper?"}]
    prompts = [[BOS, *model.text.encode(DOC, bos=False)], DOC[::-1], chat]
    questions = [" why?", " who?", [7, 8, 9]]
    cache = jaxkv.prefill(model, prompts)
    assert cache.turn == (ConversationState.RAW, ConversationState.USER, ConversationState.USER)
    first = jaxkv.generate(model, questions, cache=cache, **DRAWING)
    second = jaxkv.generate(model, ["So?"] * 3, cache=first.cache, **DRAWING)
    assert first.cache.turn == (
        ConversationState.RAW,
        ConversationState.ANSWER,
        ConversationState.RAW,
    )
    for row, (prompt, question) in enumerate(zip(prompts, questions, strict=True)):
        alone = jaxkv.generate(model, [question], cache=jaxkv.prefill(model, [prompt]), **DRAWING)
        assert tokens(alone)[0] == tokens(first)[row], row
        again = jaxkv.generate(model, "So?", cache=alone.cache, **DRAWING)
        assert again.tokens.tolist() == tokens(second)[row], row


def test_one_cache_is_asked_in_several_ways(model):
    cache = jaxkv.prefill(model, DOC)
    questions = [" why?", [7, 8, 9], [{"role": "user", "content": " why?"}]]
    out = jaxkv.generate(model, questions, cache=cache, **DRAWING)
    assert out.cache.turn == (
        ConversationState.ANSWER,
        ConversationState.RAW,
        ConversationState.ANSWER,
    )
    for row, question in enumerate(questions):
        assert (
            tokens(jaxkv.generate(model, [question], cache=cache, **DRAWING))[0] == tokens(out)[row]
        )
    # A cache whose sequences differ is a pytree like any other, and copies as one.
    same = jax.tree.map(lambda leaf: leaf, out.cache)
    assert same.turn == out.cache.turn and hash(jax.tree.structure(same)) == hash(
        jax.tree.structure(out.cache)
    )
    with pytest.raises(
        ValueError, match="prompt='2 prompts': the cache holds 3 sequences: use as many"
    ):
        jaxkv.generate(model, ["So?"] * 2, cache=out.cache, **DRAWING)


# --- kinds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt, same_as",
    [
        (np.str_(DOC), DOC),
        (np.asarray([DOC, "Hi"]), [DOC, "Hi"]),
        (np.asarray([DOC, [5, 6]], object), [DOC, [5, 6]]),
        (jnp.asarray([5, 6], jnp.uint8), [5, 6]),
        (np.asarray([np.asarray([5]), np.asarray([6, 7])], object), [[5], [6, 7]]),
        (range(5, 8), [5, 6, 7]),
        (tuple(CHAT), CHAT),
    ],
)
def test_what_else_is_a_prompt(prompt, same_as):
    one, other = encoded(prompt), encoded(same_as)
    assert one == other and all(type(each) is int for ids in one.ids for each in ids)

"""`prefill` and `generate` as a user meets them: prompts of every kind, turns, many questions, statistics, dtypes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import running
from lettered import (
    BOS,
    DOC,
    DRAWING,
    NEW,
    POLICY,
    TEMPLATE,
    assert_same_rows,
    ids,
    shown,
    tiny,
)

import jaxkv
from jaxkv.cache import ConversationState


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture(scope="module")
def smol():
    return running.smollm2()


# --- prompts --------------------------------------------------------------------------------------------------------


def test_every_kind_of_prompt_of_the_same_ids_gives_the_same_answer(model):
    plain = [BOS, *model.text.encode(DOC, bos=False)]
    user = [BOS, *model.text.encode(f"[{DOC}]=", bos=False)]
    chat = [{"role": "user", "content": DOC}]
    kinds = [
        (DOC, user),
        ([DOC], user),
        (chat, user),
        ([chat], user),
        (plain, plain),
        ([plain], plain),
        (np.asarray(plain), plain),
        (jnp.asarray([plain], jnp.uint16), plain),
        ([np.asarray(plain)], plain),
    ]
    want = {tuple(each): jaxkv.generate(model, each, **DRAWING) for each in (user, plain)}
    assert want[tuple(user)].tokens.tolist() != want[tuple(plain)].tokens.tolist()
    for prompt, same_as in kinds:
        out, expected = jaxkv.generate(model, prompt, **DRAWING), want[tuple(same_as)]
        tokens, text = out.tokens, out.text
        assert len(out) == 1 and out[0].tokens is tokens
        assert tokens.dtype == np.int32
        np.testing.assert_array_equal(tokens, expected.tokens)
        assert text == expected.text == shown(model, expected.tokens)
        assert int(out.cache.seen[0]) == len(same_as) + NEW
    out = jaxkv.generate(model, DOC, raw=True, **DRAWING)
    np.testing.assert_array_equal(out.tokens, want[tuple(plain)].tokens)
    bare = tiny(None)
    np.testing.assert_array_equal(
        jaxkv.generate(bare, DOC, **DRAWING).tokens, want[tuple(plain)].tokens
    )


def test_conversations_and_batches_of_them(model):
    long = [
        {"role": "user", "content": "What is tin?"},
        {"role": "assistant", "content": "A metal."},
        {"role": "user", "content": "And copper? Is it one as well?"},
    ]
    chats = [long, [{"role": "user", "content": DOC}], [{"role": "user", "content": "Hi"}]]
    out = jaxkv.generate(model, chats, **DRAWING)
    rendered = [
        "<s>[What is tin?]=A metal.</s>[And copper? Is it one as well?]=",
        f"<s>[{DOC}]=",
        "<s>[Hi]=",
    ]
    wanted = [model.text.encode(each, bos=False) for each in rendered]
    assert out.stats.prompt_tokens == sum(map(len, wanted))
    for row, alone in enumerate(wanted):
        np.testing.assert_array_equal(
            out[row].tokens, jaxkv.generate(model, alone, **DRAWING).tokens
        )
    # A prefilled conversation leaves its last turn open.
    cache = jaxkv.prefill(model, long)
    assert cache.turn is ConversationState.USER and int(cache.seen[0]) == len(wanted[0]) - 2


@pytest.mark.real
def test_the_real_model_batched_streamed_and_asked_twice(smol):
    prompts = ["What is the capital of France?", "Hi"]
    out = jaxkv.generate(smol, prompts, max_new_tokens=16)
    assert "Paris" in out[0].text
    for row, prompt in enumerate(prompts):
        alone = jaxkv.generate(smol, prompt, max_new_tokens=16, stream=True)
        assert "".join(alone) == alone.result.text == out[row].text
        np.testing.assert_array_equal(out[row].tokens, alone.result.tokens)
        assert alone.result.text == smol.text.decode(alone.result.tokens.tolist())
    # The piece "document, then question" is tokenized here as the whole is: a sentence each.
    document, question = (
        "The password of the old gate is swordfish.",
        "\n\nWhat is the password of the old gate?",
    )
    cache = jaxkv.prefill(smol, document)
    pieces = [smol.text.turn_texts.opening + document, question + smol.text.turn_texts.closing]
    first, second = (smol.text.encode(each, bos=False) for each in pieces)
    assert first + second == smol.text.encode("".join(pieces), bos=False)
    whole = jaxkv.generate(smol, document + question, max_new_tokens=16)
    asked = [jaxkv.generate(smol, question, cache=cache, max_new_tokens=16) for _ in range(2)]
    assert int(cache.seen[0]) == len(first) and asked[0].stats.prompt_tokens == len(second)
    assert "swordfish" in whole.text.lower() and asked[0].text == asked[1].text == whole.text


# --- turns ----------------------------------------------------------------------------------------------------------


def test_prefill_leaves_the_turn_open_and_the_question_closes_it(model):
    cache = jaxkv.prefill(model, DOC)
    assert cache.turn is ConversationState.USER and int(cache.seen[0]) == len(DOC) + 2
    out = jaxkv.generate(model, "why?", cache=cache, **DRAWING)
    assert (
        out.stats.prompt_tokens == len("\n\nwhy?]=") and out.cache.turn is ConversationState.ANSWER
    )
    whole = jaxkv.generate(model, DOC + "\n\nwhy?", **DRAWING)
    np.testing.assert_array_equal(out.tokens, whole.tokens)
    np.testing.assert_array_equal(
        out.tokens, jaxkv.generate(model, "\n\nwhy?", cache=cache, **DRAWING).tokens
    )
    assert_same_rows(out.cache, whole.cache)
    # The next question ends the answer's turn first, which the model left without an end.
    again = jaxkv.generate(model, "So?", cache=out.cache, **DRAWING)
    assert (
        again.stats.prompt_tokens == 1 + len("[So?]=")
        and again.cache.turn is ConversationState.ANSWER
    )
    spelled = [*model.text.encode(f"<s>[{DOC}\n\nwhy?]=", bos=False), *out.tokens.tolist()]
    spelled += model.text.encode("</s>[So?]=", bos=False)
    np.testing.assert_array_equal(again.tokens, jaxkv.generate(model, spelled, **DRAWING).tokens)
    message = [{"role": "user", "content": "So?"}]
    np.testing.assert_array_equal(
        again.tokens, jaxkv.generate(model, message, cache=out.cache, **DRAWING).tokens
    )


def test_bos_only_where_nothing_has_been_seen():
    bare = tiny(None)
    cache = jaxkv.prefill(bare, DOC)
    assert cache.turn is ConversationState.RAW and int(cache.seen[0]) == len(DOC) + 1
    out = jaxkv.generate(bare, " why?", cache=cache, **DRAWING)
    assert out.stats.prompt_tokens == len(" why?")
    np.testing.assert_array_equal(out.tokens, jaxkv.generate(bare, DOC + " why?", **DRAWING).tokens)
    third = jaxkv.generate(bare, " so.", cache=out.cache, **DRAWING)
    assert third.stats.prompt_tokens == len(" so.")
    # A template that writes the bos itself does not get a second one, one that writes none gets none.
    for template, specials in ((TEMPLATE, 1), (TEMPLATE.removeprefix("{{ bos_token }}"), 0)):
        for prompt in (DOC, [{"role": "user", "content": DOC}]):
            assert int(jaxkv.prefill(tiny(template), prompt).seen[0]) == specials + len("[" + DOC)


# --- one cache, many questions --------------------------------------------------------------------------------------


# --- statistics, spans, dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, jaxkv.AdaKV(base=POLICY)], ids=["full", "adakv"])
def test_statistics(model, policy):
    rows = ids(1, 60, 38, 45)
    out = jaxkv.generate(model, rows, policy=policy, **DRAWING)
    cache, stats, config = jaxkv.prefill(model, rows, policy=policy), out.stats, model.config
    assert stats.cache_bytes == cache.nbytes
    assert (
        stats.full_bytes
        == (60 + 38 + 45) * config.layers * config.kv_heads * config.head_dim * 2 * 4
    )
    assert stats.allocated_bytes == out.cache.nbytes > stats.cache_bytes
    assert stats.kept == pytest.approx((60 + 38 + 45) / 3 if policy is None else 16)
    assert stats.prompt_tokens == 143 and stats.new_tokens == 3 * NEW
    assert stats.slack_bytes == stats.cache_bytes - stats.kept_bytes > 0
    assert stats.prefill_seconds > 0 and stats.decode_seconds > 0 and stats.compile_seconds >= 0
    assert stats.decode_tokens_per_second == pytest.approx(3 * NEW / stats.decode_seconds)
    assert stats.layout == cache.layout.value and stats.attention


def test_kept_and_full_count_entries_alone(model):
    """Keys and values, with a quantised store's scales: no headroom, padding, position, score or table."""
    store, rows, config = "int4", ids(1, 50, 38, 45), model.config
    heads, dim = config.layers * config.kv_heads, config.head_dim
    for policy, held in ((jaxkv.FullKV(store=store), 133), (jaxkv.H2O(budget=16, store=store), 48)):
        out = jaxkv.generate(model, rows, policy=policy, **DRAWING)
        cache, stats = jaxkv.prefill(model, rows, policy=policy), out.stats
        assert stats.full_bytes == cache.full_nbytes == 133 * heads * 8 * dim
        assert (
            stats.kept_bytes == cache.kept_nbytes == held * heads * cache.entry_bytes < cache.nbytes
        )
        stored = jax.tree.leaves(cache.pools[0].store)
        entry = sum(leaf.nbytes // math.prod(leaf.shape[:2]) for leaf in stored)
        assert cache.entry_bytes == entry
        # With headroom and the answer's entries: those of both, and no headroom, are counted.
        more = jaxkv.generate(model, rows, cache=out.cache, **DRAWING).stats
        assert more.kept_bytes == int(out.cache.kept.sum()) * entry < more.cache_bytes


def test_on_top_of_a_cache_statistics_are_the_given_caches(model):
    with pytest.warns(jaxkv.policies.UnseenQuestionWarning):
        cache = jaxkv.prefill(model, DOC, policy=POLICY)
    stats = jaxkv.generate(model, [" why?", " or?"], cache=cache, **DRAWING).stats
    assert stats.cache_bytes == cache.nbytes and stats.prompt_tokens == len("\n\n why?]=\n\n or?]=")
    config = model.config
    each = config.layers * config.kv_heads * config.head_dim * 2 * 4
    assert stats.full_bytes == int(cache.seen[0]) * each > stats.kept_bytes == cache.kept_nbytes

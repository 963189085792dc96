"""`prefill` and `generate` as a user meets them: prompts of every kind, turns, stops, batches, streams, statistics."""

import dataclasses
import functools
import json
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import running
from tiny import segments
from tokenizers import Tokenizer, decoders, models

import jaxkv
from jaxkv.cache import Turn
from jaxkv.loading import LanguageModel
from jaxkv.policies import EntropyLayers
from jaxkv.text.tokenizer import StreamDecoder, Text

FOLDER = Path(__file__).parent / "golden" / "models" / "llama_gqa"
BOS, EOS, NEW = 1, 2, 12
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% else %}{{ m.content }}</s>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
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
    return Text(tokenizer, specials=specials, adds_bos=True, template=template, origin="characters")


@functools.cache
def tiny(template: str | None = TEMPLATE):
    return LanguageModel(jaxkv.load(FOLDER).decoder, text=characters(template), name="tiny")


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture(scope="module")
def smol():
    return running.smollm2()


def with_eos(tmp_path, ids):
    folder = tmp_path / "eos"
    shutil.copytree(FOLDER, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": ids}))
    return jaxkv.load(folder)


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
    return "".join(stream.push([each]) for each in np.asarray(tokens).tolist()) + stream.flush()


# --- prompts --------------------------------------------------------------------------------------------------------


def test_every_kind_of_prompt_of_the_same_ids_gives_the_same_answer(model):
    plain = [BOS, *model.text.encode(DOC, bos=False)]
    user = [BOS, *model.text.encode(f"[{DOC}]=", bos=False)]
    chat = [{"role": "user", "content": DOC}]
    kinds = [
        (DOC, user, True),
        ([DOC], user, False),
        (chat, user, True),
        ([chat], user, False),
        (tuple(chat), user, True),
        (plain, plain, True),
        ([plain], plain, False),
        (np.asarray(plain), plain, True),
        (np.asarray([plain], np.uint16), plain, False),
        (jnp.asarray(plain), plain, True),
        (jnp.asarray([plain]), plain, False),
        ([np.asarray(plain)], plain, False),
    ]
    want = {tuple(each): jaxkv.generate(model, each, **DRAWING) for each in (user, plain)}
    assert want[tuple(user)].tokens.tolist() != want[tuple(plain)].tokens.tolist()
    for prompt, same_as, single in kinds:
        out, expected = jaxkv.generate(model, prompt, **DRAWING), want[tuple(same_as)]
        tokens, text = (out.tokens, out.text) if single else (out.tokens[0], out.text[0])
        assert isinstance(out.tokens, np.ndarray) == single and isinstance(out.text, str) == single
        assert tokens.dtype == np.int32
        np.testing.assert_array_equal(tokens, expected.tokens)
        assert text == expected.text == shown(model, expected.tokens)
        assert int(out.cache.seen[0]) == len(same_as) + NEW
    out = jaxkv.generate(model, DOC, raw=True, **DRAWING)
    np.testing.assert_array_equal(out.tokens, want[tuple(plain)].tokens)
    bare = tiny(None)
    np.testing.assert_array_equal(jaxkv.generate(bare, DOC, **DRAWING).tokens, want[tuple(plain)].tokens)


def test_conversations_and_batches_of_them(model):
    long = [
        {"role": "user", "content": "What is tin?"},
        {"role": "assistant", "content": "A metal."},
        {"role": "user", "content": "And copper? Is it one as well?"},
    ]
    chats = [long, [{"role": "user", "content": DOC}], [{"role": "user", "content": "Hi"}]]
    out = jaxkv.generate(model, chats, **DRAWING)
    rendered = ["<s>[What is tin?]A metal.</s>[And copper? Is it one as well?]=", f"<s>[{DOC}]=", "<s>[Hi]="]
    wanted = [model.text.encode(each, bos=False) for each in rendered]
    assert out.stats.prompt_tokens == sum(map(len, wanted))
    for row, alone in enumerate(wanted):
        np.testing.assert_array_equal(out.tokens[row], jaxkv.generate(model, alone, **DRAWING).tokens)
    # A prefilled conversation leaves its last turn open.
    cache = jaxkv.prefill(model, long)
    assert cache.turn is Turn.USER and int(cache.seen[0]) == len(wanted[0]) - 2


@pytest.mark.parametrize(
    "policy", [jaxkv.FullKV(), POLICY, jaxkv.AdaKV(base=jaxkv.PyramidKV(budget=16, window=4)), jaxkv.KNorm(budget=0.5)]
)
def test_a_row_of_a_batch_gets_what_it_gets_alone(model, policy):
    rows = ids(1, 60, 38, 45)
    out = jaxkv.generate(model, rows, policy=policy, **DRAWING)
    for row, each in enumerate(rows):
        np.testing.assert_array_equal(
            out.tokens[row], jaxkv.generate(model, each, policy=policy, **DRAWING).tokens, str(row)
        )
    assert out.cache.batch == 3 and out.cache.seen.tolist() == [72, 50, 57]


@pytest.mark.real
def test_the_real_model_batched_streamed_and_asked_twice(smol):
    prompts = ["What is the capital of France?", "Hi", "Name three colours of the rainbow, please, and one more."]
    out = jaxkv.generate(smol, prompts, max_new_tokens=16)
    assert "Paris" in out.text[0]
    for row, prompt in enumerate(prompts):
        alone = jaxkv.generate(smol, prompt, max_new_tokens=16)
        np.testing.assert_array_equal(out.tokens[row], alone.tokens)
        assert alone.text == out.text[row] == smol.text.decode(alone.tokens.tolist())
    stream = jaxkv.generate(smol, prompts[2], max_new_tokens=16, stream=True)
    assert "".join(stream) == stream.result.text == out.text[2]
    # The piece "document, then question" is tokenized here as the whole is: a sentence each.
    document, question = "The password of the old gate is swordfish.", "\n\nWhat is the password of the old gate?"
    cache = jaxkv.prefill(smol, document)
    pieces = [smol.text.turns.opening + document, question + smol.text.turns.closing]
    first, second = (smol.text.encode(each, bos=False) for each in pieces)
    assert first + second == smol.text.encode("".join(pieces), bos=False)
    whole = jaxkv.generate(smol, document + question, max_new_tokens=16)
    asked = [jaxkv.generate(smol, question, cache=cache, max_new_tokens=16) for _ in range(2)]
    assert int(cache.seen[0]) == len(first) and asked[0].stats.prompt_tokens == len(second)
    assert "swordfish" in whole.text.lower() and asked[0].text == asked[1].text == whole.text


# --- turns ----------------------------------------------------------------------------------------------------------


def test_prefill_leaves_the_turn_open_and_the_question_closes_it(model):
    cache = jaxkv.prefill(model, DOC)
    assert cache.turn is Turn.USER and int(cache.seen[0]) == len(DOC) + 2
    out = jaxkv.generate(model, "why?", cache=cache, **DRAWING)
    assert out.stats.prompt_tokens == len("\n\nwhy?]=") and out.cache.turn is Turn.ANSWER
    whole = jaxkv.generate(model, DOC + "\n\nwhy?", **DRAWING)
    np.testing.assert_array_equal(out.tokens, whole.tokens)
    np.testing.assert_array_equal(out.tokens, jaxkv.generate(model, "\n\nwhy?", cache=cache, **DRAWING).tokens)
    assert_same_rows(out.cache, whole.cache)
    # The next question ends the answer's turn first, which the model left without an end.
    again = jaxkv.generate(model, "So?", cache=out.cache, **DRAWING)
    assert again.stats.prompt_tokens == 1 + len("[So?]=") and again.cache.turn is Turn.ANSWER
    spelled = [*model.text.encode(f"<s>[{DOC}\n\nwhy?]=", bos=False), *out.tokens.tolist()]
    spelled += model.text.encode("</s>[So?]=", bos=False)
    np.testing.assert_array_equal(again.tokens, jaxkv.generate(model, spelled, **DRAWING).tokens)
    message = [{"role": "user", "content": "So?"}]
    np.testing.assert_array_equal(again.tokens, jaxkv.generate(model, message, cache=out.cache, **DRAWING).tokens)


def test_bos_only_where_nothing_has_been_seen():
    bare = tiny(None)
    cache = jaxkv.prefill(bare, DOC)
    assert cache.turn is Turn.RAW and int(cache.seen[0]) == len(DOC) + 1
    out = jaxkv.generate(bare, " why?", cache=cache, **DRAWING)
    assert out.stats.prompt_tokens == len(" why?")
    np.testing.assert_array_equal(out.tokens, jaxkv.generate(bare, DOC + " why?", **DRAWING).tokens)
    third = jaxkv.generate(bare, " so.", cache=out.cache, **DRAWING)
    assert third.stats.prompt_tokens == len(" so.")
    # A template that writes the bos itself does not get a second one.
    own = tiny("{{ bos_token }}" + TEMPLATE)
    assert int(jaxkv.prefill(own, DOC).seen[0]) == len(DOC) + 2


# --- one cache, many questions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [POLICY, jaxkv.AdaKV(base=POLICY), jaxkv.PyramidKV(budget=16, window=4, allocation=EntropyLayers())],
    ids=["equal", "ragged", "shared"],
)
def test_a_cache_is_a_value(model, policy):
    with pytest.warns(jaxkv.UnseenQuestionWarning):  # how well these answer is not asked here
        cache = jaxkv.prefill(model, DOC, policy=policy)
    before = [np.array(leaf) for leaf in jax.tree.leaves(cache)]
    questions = [" why?", " who jumps over it?", " or?"]
    many = jaxkv.generate(model, questions, cache=cache, **DRAWING)
    twice = [jaxkv.generate(model, questions[1], cache=cache, **DRAWING) for _ in range(2)]
    np.testing.assert_array_equal(twice[0].tokens, twice[1].tokens)
    np.testing.assert_array_equal(twice[0].tokens, many.tokens[1])
    after = jax.tree.leaves(cache)
    assert not any(leaf.is_deleted() for leaf in after)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    # Nor does a second turn change the first one's cache.
    first = [np.array(leaf) for leaf in jax.tree.leaves(twice[0].cache)]
    jaxkv.generate(model, "So?", cache=twice[0].cache, **DRAWING)
    for old, new in zip(first, jax.tree.leaves(twice[0].cache), strict=True):
        np.testing.assert_array_equal(old, new)


# --- ends -----------------------------------------------------------------------------------------------------------


def test_max_new_tokens_is_exact_across_blocks(model):
    # A small cache's rows grow by blocks; the answer must not notice.
    whole = jaxkv.generate(model, ids(2, 20)[0], stop_at_eos=False, max_new_tokens=100)
    assert len(whole.tokens) == whole.stats.new_tokens == 100
    for n in (1, 2, 9, 16):
        out = jaxkv.generate(model, ids(2, 20)[0], stop_at_eos=False, max_new_tokens=n)
        np.testing.assert_array_equal(out.tokens, whole.tokens[:n])
        assert out.stats.new_tokens == n and int(out.cache.seen[0]) == 20 + n


def test_answers_longer_than_a_block(monkeypatch, model):
    expected = jaxkv.generate(model, ids(2, 20)[0], policy=POLICY, stop_at_eos=False, max_new_tokens=40)
    # By module object: the package's attribute of this name is the function.
    monkeypatch.setattr(sys.modules["jaxkv.engine.lengths"], "BLOCK", 16)
    out = jaxkv.generate(model, ids(2, 20)[0], policy=POLICY, stop_at_eos=False, max_new_tokens=40)
    np.testing.assert_array_equal(out.tokens, expected.tokens)
    assert_same_rows(out.cache, expected.cache)


def test_eos_ends_rows_separately(tmp_path, model):
    rows = ids(1, 60, 38, 45)
    free = jaxkv.generate(model, rows, **DRAWING)
    # Ids that the first two rows say early.
    enders = [int(free.tokens[0][3]), int(free.tokens[1][6])]
    other = with_eos(tmp_path, enders)
    out = jaxkv.generate(other, rows, max_new_tokens=NEW)
    for row, tokens in enumerate(free.tokens):
        at = [index for index, token in enumerate(tokens.tolist()) if token in enders]
        want = tokens[: at[0] + 1] if at else tokens
        np.testing.assert_array_equal(out.tokens[row], want)
        # What ended the answer was drawn, but is not in the cache: the next turn's text brings its own.
        assert int(out.cache.seen[row]) == len(rows[row]) + len(want) - bool(at)
    assert len(out.tokens[0]) <= 4 and len(out.tokens[1]) <= 7
    ended = ["stop" if tokens[-1] in enders else "length" for tokens in out.tokens]
    assert out.finish_reason == ended and ended[:2] == ["stop"] * 2 and out.stop_reason == [None] * 3
    assert out.text is None and out.stats.new_tokens == sum(map(len, out.tokens))
    ignored = jaxkv.generate(other, rows, **DRAWING)
    for a, b in zip(ignored.tokens, free.tokens, strict=True):
        np.testing.assert_array_equal(a, b)
    assert ignored.finish_reason == ["length"] * 3


def expected_stop(model, tokens, stops):
    """How many tokens are drawn and what text is left, by looking at every beginning."""
    for count in range(1, len(tokens) + 1):
        text = shown(model, tokens[:count])
        found = [text.find(stop) for stop in stops if stop in text]
        if found:
            return count, text[: min(found)]
    return len(tokens), shown(model, tokens)


def test_stop_strings(model):
    rows = ids(1, 60, 38, 45)
    free = jaxkv.generate(model, rows, stop_at_eos=False, max_new_tokens=16)
    # One string over a seam of three tokens of the first row, another of the second; the third never meets either.
    stops = [free.text[0][2:5], free.text[1][9:11]]
    assert all(stop not in free.text[2] for stop in stops)
    out = jaxkv.generate(model, rows, stop=stops, stop_at_eos=False, max_new_tokens=16)
    for row in range(3):
        count, text = expected_stop(model, free.tokens[row], stops)
        np.testing.assert_array_equal(out.tokens[row], free.tokens[row][:count])
        assert out.text[row] == text and not any(stop in out.text[row] for stop in stops)
        assert int(out.cache.seen[row]) == len(rows[row]) + count
    assert [len(each) for each in out.tokens][0] < [len(each) for each in out.tokens][1] < 16 == len(out.tokens[2])
    assert out.finish_reason == ["stop", "stop", "length"] and out.stop_reason == [*stops, None]
    # Alone, and streamed: nothing of a stop string is ever shown.
    for row in range(2):
        stream = jaxkv.generate(model, rows[row], stop=stops, stop_at_eos=False, max_new_tokens=16, stream=True)
        assert stream.result is None
        pieces = list(stream)
        assert "".join(pieces) == stream.result.text == out.text[row]
        np.testing.assert_array_equal(stream.result.tokens, out.tokens[row])
        assert (stream.result.finish_reason, stream.result.stop_reason) == ("stop", stops[row])
    # The prompts' answers one by one: as a sequence, though the result is none.
    texts = [each.text for each in out]
    assert len(out) == 3 and texts == out.text and [each.stop_reason for each in out[1:]] == [stops[1], None]
    for row in (1, -2, np.int64(1)):
        each = out[row]
        assert (each.text, each.finish_reason, each.stop_reason) == (texts[1], "stop", stops[1])
        assert each.tokens is out.tokens[1]
    assert repr(out[1]) == f"Completion({texts[1]!r}, {len(out.tokens[1])} tokens, stop at {stops[1]!r})"
    # Each is equal to itself alone: no array is asked for its truth.
    first, again = out[1], out[1]
    assert first != again and first == first
    alone = stream.result
    assert len(alone) == 1 and alone[0].text == alone.text and [each.tokens for each in alone] == [alone.tokens]
    for result, at in ((out, 3), (out, -4), (alone, 1)):
        with pytest.raises(IndexError):
            result[at]


def test_behind_a_stop_the_cache_is_as_if_nothing_had_been_drawn(model):
    prompt = ids(1, 60)[0]
    free = jaxkv.generate(model, prompt, policy=POLICY, stop_at_eos=False, max_new_tokens=16)
    stop = free.text[1:3]
    count, _ = expected_stop(model, free.tokens, [stop])
    assert count < 8  # tokens are looked at in eights: some were drawn for nothing
    out = jaxkv.generate(model, prompt, policy=POLICY, stop=stop, stop_at_eos=False, max_new_tokens=16)
    exact = jaxkv.generate(model, prompt, policy=POLICY, stop_at_eos=False, max_new_tokens=count)
    assert_same_rows(out.cache, exact.cache)
    nexts = [jaxkv.generate(model, "So?", cache=each.cache, **DRAWING) for each in (out, exact)]
    np.testing.assert_array_equal(nexts[0].tokens, nexts[1].tokens)
    assert_same_rows(nexts[0].cache, nexts[1].cache)


def test_an_end_behind_a_stop_string_is_no_row(tmp_path, model):
    prompt = ids(1, 60)[0]
    free = jaxkv.generate(model, prompt, stop_at_eos=False, max_new_tokens=16)
    stop = free.text[1:3]
    count, _ = expected_stop(model, free.tokens, [stop])
    ender = int(free.tokens[count + 1])
    assert ender not in free.tokens[: count + 1]
    other = with_eos(tmp_path, [ender])
    other.text = model.text
    out = jaxkv.generate(other, prompt, stop=stop, max_new_tokens=16)
    assert len(out.tokens) == count and int(out.cache.seen[0]) == 60 + count
    assert_same_rows(out.cache, jaxkv.generate(other, prompt, max_new_tokens=count).cache)


def test_streams_of_lists(model):
    rows = ids(1, 60, 38, 45)
    stream = jaxkv.generate(model, rows, stream=True, stop_at_eos=False, max_new_tokens=16)
    pieces = list(stream)
    # A token is a letter here, or a special one without text.
    spoken = zip(*stream.result.tokens, strict=True)
    assert pieces == [[shown(model, [token]) for token in tokens] for tokens in spoken] and len(pieces) == 16
    assert ["".join(each) for each in zip(*pieces, strict=True)] == stream.result.text
    assert next(stream, None) is None and stream.result.stats.new_tokens == 48


@pytest.mark.parametrize("stop", [(), "~~~"])
def test_a_stream_yields_as_many_tokens_at_once_as_asked(model, stop):
    """Also where stop strings are looked for more often."""
    options = {"stop": stop, "stop_at_eos": False, "max_new_tokens": 16, "stream": True}
    for interval, lengths in ((5, [5, 5, 5, 1]), (12, [12, 4]), (99, [16])):
        stream = jaxkv.generate(model, ids(1, 60)[0], stream_interval=interval, **options)
        pieces = list(stream)
        assert [len(piece) for piece in pieces] == lengths and "".join(pieces) == stream.result.text


# --- statistics, spans, dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, POLICY, jaxkv.AdaKV(base=POLICY)], ids=["full", "snapkv", "adakv"])
def test_statistics(model, policy):
    rows = ids(1, 60, 38, 45)
    out = jaxkv.generate(model, rows, policy=policy, **DRAWING)
    cache, stats, config = jaxkv.prefill(model, rows, policy=policy), out.stats, model.config
    assert stats.cache_bytes == cache.nbytes
    assert stats.full_bytes == (60 + 38 + 45) * config.layers * config.kv_heads * config.head_dim * 2 * 4
    assert stats.allocated_bytes == out.cache.nbytes > stats.cache_bytes
    assert stats.kept == pytest.approx((60 + 38 + 45) / 3 if policy is None else 16)
    assert stats.prompt_tokens == 143 and stats.new_tokens == 3 * NEW
    assert 0 <= stats.slack_bytes < stats.cache_bytes and (policy is None) == (stats.slack_bytes > 0)
    assert stats.prefill_seconds > 0 and stats.decode_seconds > 0 and stats.compile_seconds >= 0
    assert stats.decode_tokens_per_second == pytest.approx(3 * NEW / stats.decode_seconds)
    assert stats.layout == cache.layout.value and stats.attention


def test_on_top_of_a_cache_statistics_are_the_given_caches(model):
    with pytest.warns(jaxkv.UnseenQuestionWarning):
        cache = jaxkv.prefill(model, DOC, policy=POLICY)
    stats = jaxkv.generate(model, [" why?", " or?"], cache=cache, **DRAWING).stats
    assert stats.cache_bytes == cache.nbytes and stats.prompt_tokens == len("\n\n why?]=\n\n or?]=")
    config = model.config
    each = config.layers * config.kv_heads * config.head_dim * 2 * 4
    assert stats.full_bytes == int(cache.seen[0]) * each


def test_negative_spans_are_protected_from_the_end(model):
    policy = dataclasses.replace(POLICY, protect=((-20, -15), (2, 4)))
    cache = jaxkv.prefill(model, ids(1, 60, 45), policy=policy)
    for _, row, _, _, _, pos in segments(cache):
        n = (60, 45)[row]
        assert {2, 3, *range(n - 20, n - 15), *range(n - 4, n)} <= set(pos.tolist()) and len(pos) == 16


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype):
    half = jaxkv.load(FOLDER, dtype=dtype)
    assert half.dtype == jnp.dtype(dtype)
    cache = jaxkv.prefill(half, ids(1, 60, 38), policy=jaxkv.AdaKV(base=POLICY))
    assert all(pool.k.dtype == pool.v.dtype == jnp.dtype(dtype) for pool in cache.pools)
    assert all(bool(jnp.isfinite(pool.k.astype(jnp.float32)).all()) for pool in cache.pools)
    out = jaxkv.generate(half, ids(5, 5, 5), cache=cache, **DRAWING)
    assert [len(each) for each in out.tokens] == [NEW, NEW]
    assert out.cache.pools[0].k.dtype == jnp.dtype(dtype)

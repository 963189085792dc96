"""Where answers end and how they stream: numbers of tokens, end tokens, stop strings, pieces of text."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from lettered import DRAWING, FOLDER, NEW, POLICY, assert_same_rows, ids, shown, tiny

import jaxkv


@pytest.fixture(scope="module")
def model():
    return tiny()


def with_eos(tmp_path, ids):
    folder = tmp_path / "eos"
    shutil.copytree(FOLDER, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": ids}))
    return jaxkv.load(folder)


def test_max_new_tokens_is_exact_across_blocks(model):
    # A small cache's rows grow by blocks; the answer must not notice.
    whole = jaxkv.generate(model, ids(2, 20)[0], stop_at_eos=False, max_new_tokens=100)
    assert len(whole.tokens) == whole.stats.new_tokens == 100
    for n in (1, 2, 9, 16):
        out = jaxkv.generate(model, ids(2, 20)[0], stop_at_eos=False, max_new_tokens=n)
        np.testing.assert_array_equal(out.tokens, whole.tokens[:n])
        assert out.stats.new_tokens == n and int(out.cache.seen[0]) == 20 + n


def test_eos_ends_rows_separately(tmp_path, model):
    rows = ids(1, 60, 38, 45)
    free = jaxkv.generate(model, rows, **DRAWING)
    # Ids that the first two rows say early.
    enders = [int(free[0].tokens[3]), int(free[1].tokens[6])]
    other = with_eos(tmp_path, enders)
    out = jaxkv.generate(other, rows, max_new_tokens=NEW)
    for row, tokens in enumerate(each.tokens for each in free):
        at = [index for index, token in enumerate(tokens.tolist()) if token in enders]
        want = tokens[: at[0] + 1] if at else tokens
        np.testing.assert_array_equal(out[row].tokens, want)
        # What ended the answer was sampled, but is not in the cache: the next turn's text brings its own.
        assert int(out.cache.seen[row]) == len(rows[row]) + len(want) - bool(at)
    assert len(out[0].tokens) <= 4 and len(out[1].tokens) <= 7
    ended = ["stop" if each.tokens[-1] in enders else "length" for each in out]
    assert (
        [each.finish_reason for each in out] == ended
        and ended[:2] == ["stop"] * 2
        and not any(each.stop_reason for each in out)
    )
    assert all(each.text is None for each in out)
    assert out.stats.new_tokens == sum(len(each.tokens) for each in out)
    ignored = jaxkv.generate(other, rows, **DRAWING)
    for a, b in zip((each.tokens for each in ignored), (each.tokens for each in free), strict=True):
        np.testing.assert_array_equal(a, b)
    assert {each.finish_reason for each in ignored} == {"length"}


def expected_stop(model, tokens, stops):
    """How many tokens are sampled and what text is left, by looking at every beginning."""
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
    stops = [free[0].text[2:5], free[1].text[9:11]]
    assert all(stop not in free[2].text for stop in stops)
    out = jaxkv.generate(model, rows, stop=stops, stop_at_eos=False, max_new_tokens=16)
    for row in range(3):
        count, text = expected_stop(model, free[row].tokens, stops)
        np.testing.assert_array_equal(out[row].tokens, free[row].tokens[:count])
        assert out[row].text == text and not any(stop in out[row].text for stop in stops)
        assert int(out.cache.seen[row]) == len(rows[row]) + count
    assert len(out[0].tokens) < len(out[1].tokens) < 16 == len(out[2].tokens)
    assert [each.finish_reason for each in out] == ["stop", "stop", "length"]
    assert [each.stop_reason for each in out] == [*stops, None]
    # Alone, and streamed: nothing of a stop string is ever shown.
    for row in range(2):
        stream = jaxkv.generate(
            model, rows[row], stop=stops, stop_at_eos=False, max_new_tokens=16, stream=True
        )
        assert stream.result is None
        pieces = list(stream)
        assert "".join(pieces) == stream.result.text == out[row].text
        np.testing.assert_array_equal(stream.result.tokens, out[row].tokens)
        assert (stream.result.finish_reason, stream.result.stop_reason) == ("stop", stops[row])
    # The prompts' answers one by one: as a sequence, though the result is none.
    texts = [each.text for each in out]
    assert len(out) == 3 and [each.stop_reason for each in out[1:]] == [stops[1], None]
    for row in (1, -2, np.int64(1)):
        each = out[row]
        assert (each.text, each.finish_reason, each.stop_reason) == (texts[1], "stop", stops[1])
        assert each.tokens is out[1].tokens
    # Each is equal to itself alone: no array is asked for its truth.
    assert dataclasses.replace(out[1]) != out[1] and out[1] == out[1]
    alone = stream.result
    assert (
        len(alone) == 1
        and alone[0].text == alone.text
        and [each.tokens for each in alone] == [alone.tokens]
    )
    with pytest.raises(IndexError):
        out[3]


def test_behind_a_stop_the_cache_is_as_if_nothing_had_been_drawn(model):
    prompt = ids(1, 60)[0]
    free = jaxkv.generate(model, prompt, policy=POLICY, stop_at_eos=False, max_new_tokens=16)
    stop = free.text[1:3]
    count, _ = expected_stop(model, free.tokens, [stop])
    assert count < 8  # tokens are looked at in eights: some were sampled for nothing
    out = jaxkv.generate(
        model, prompt, policy=POLICY, stop=stop, stop_at_eos=False, max_new_tokens=16
    )
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
    spoken = zip(*(each.tokens for each in stream.result), strict=True)
    assert (
        pieces == [[shown(model, [token]) for token in tokens] for tokens in spoken]
        and len(pieces) == 16
    )
    assert ["".join(each) for each in zip(*pieces, strict=True)] == [
        each.text for each in stream.result
    ]
    assert next(stream, None) is None and stream.result.stats.new_tokens == 48


@pytest.mark.parametrize("stop", [(), "~~~"])
def test_a_stream_yields_as_many_tokens_at_once_as_asked(model, stop):
    """Also where stop strings are looked for more often."""
    options = {"stop": stop, "stop_at_eos": False, "max_new_tokens": 16, "stream": True}
    for interval, lengths in ((5, [5, 5, 5, 1]), (12, [12, 4]), (99, [16])):
        stream = jaxkv.generate(model, ids(1, 60)[0], stream_interval=interval, **options)
        pieces = list(stream)
        assert [len(piece) for piece in pieces] == lengths and "".join(pieces) == stream.result.text

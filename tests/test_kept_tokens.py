"""Which tokens a cache keeps, as it says itself: counts, positions, and text shaded by them."""

import re
import sys

import lettered
import numpy as np
import omnikv_cases
import pytest
import test_windows as windowed
import tiny
from lettered import DOC, DRAWING, POLICY
from meshes import mesh_of, model_of

import jaxkv
from jaxkv.testing import segments
from jaxkv.text.shown import KeptPassage, KeptTokensDisplay

LENGTHS = (60, 23, 41)
POLICIES = {
    "adakv": jaxkv.AdaKV(base=jaxkv.PyramidKV(budget=16, window=4)),
    "d2o": jaxkv.D2O(budget=16),
}


def expected(cache, layers):
    """Counts by a loop over segments."""
    found = [np.zeros(seen, int) for seen in np.asarray(cache.seen)[: cache.batch]]
    for part in segments(cache):
        if part.layer in layers:
            found[part.sequence][part.pos] += 1
    return found


@pytest.mark.parametrize("name", POLICIES)
def test_counts_and_positions_are_those_of_the_segments(name):
    model, ids = tiny.tiny(tiny.MODELS["gqa3"]), tiny.prompts(5, LENGTHS)
    session = jaxkv.Session(model, POLICIES[name])
    cache = session.prefill(ids, new=9)
    later, _ = session.sample(cache, 9)
    for each in (cache, later):
        counts = each.counts()
        assert [len(one) for one in counts] == np.asarray(each.seen).tolist()
        for mine, theirs in zip(counts, expected(each, range(3)), strict=True):
            np.testing.assert_array_equal(mine, theirs)
            assert mine.max() <= 3 * 2
        for part in segments(each):
            np.testing.assert_array_equal(
                each.positions(part.layer, part.head)[part.sequence], np.sort(part.pos)
            )
    with pytest.raises(IndexError):
        cache.positions(3, 0)


def test_layers_of_a_window_are_left_out_unless_all_are():
    cache = jaxkv.prefill(
        tiny.tiny(windowed.SHAPE), windowed.prompts(), policy=jaxkv.SnapKV(budget=16, window=4)
    )
    whole = [layer for layer, width in enumerate(windowed.SHAPE.sliding_windows) if width is None]
    assert cache.compressed_layers == whole and len(whole) < windowed.SHAPE.layers
    for mine, theirs in zip(cache.counts(), expected(cache, whole), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    every = jaxkv.prefill(tiny.tiny(windowed.ALL), windowed.prompts())
    assert every.compressed_layers == [0, 1]
    for seen, counts in zip(windowed.LENGTHS, every.counts(), strict=True):
        assert counts.tolist() == [0] * (seen - windowed.WINDOW) + [4] * min(seen, windowed.WINDOW)


OFFLOADED = {
    "omni": omnikv_cases.omni(12, offload=True),
    "brutal": jaxkv.BrutalOffload(resident_layers=1),
}


@pytest.mark.parametrize("policy", OFFLOADED.values(), ids=OFFLOADED)
def test_entries_in_host_memory_are_kept(policy):
    model, config = tiny.tiny(omnikv_cases.CONFIG), omnikv_cases.CONFIG
    ids = tiny.prompts(4, omnikv_cases.LENGTHS)
    cache = jaxkv.generate(model, ids, policy=policy, max_new_tokens=3, stop_at_eos=False).cache
    assert cache.host_store is not None
    for seen, counts in zip(np.asarray(cache.seen), cache.counts(), strict=True):
        assert counts.tolist() == [config.layers * config.kv_heads] * seen
    last = cache.host_store.layers[-1]
    assert [each.tolist() for each in cache.positions(last, 0)] == [
        [*range(seen)] for seen in np.asarray(cache.seen)
    ]


def test_a_mesh_keeps_the_same_tokens():
    ids = tiny.prompts(5, LENGTHS)
    alone, there = (
        jaxkv.prefill(model_of(4), ids, policy=POLICY, mesh=mesh) for mesh in (None, mesh_of(2, 4))
    )
    for mine, theirs in zip(alone.counts(), there.counts(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.fixture(scope="module")
def held():
    """A model that speaks, two documents, and their cache."""
    model, documents = lettered.tiny(), [DOC, f"{DOC[:9]}\n<b> & so on"]
    return model, documents, jaxkv.prefill(model, documents, policy=jaxkv.KeyDiff(budget=8))


def test_a_notebook_shows_kept_text_shaded(held):
    model, documents, cache = held
    page = cache.show(model, documents)._repr_html_()
    texts = [re.sub(r"<[^>]*>", "", part) for part in page.split("<hr>")]
    assert texts[0] == f"<s>[{DOC}".replace("<", "&lt;").replace(">", "&gt;")
    assert "&lt;b&gt; &amp; so on" in texts[1]
    found = re.findall(r"<(s|mark)[^>]* title='(\d+)% of the kv heads'>(.*?)</", page, re.DOTALL)
    counts = np.concatenate(cache.counts())
    # Equal neighbours are one element; what no head keeps is struck through.
    assert len(found) == sum(1 + (np.diff(each) != 0).sum() for each in cache.counts())
    assert {share for tag, share, _ in found if tag == "s"} == {"0"} and 0 in counts
    assert all(share != "0" for tag, share, _ in found if tag == "mark")


def test_a_terminal_shows_colours_and_a_file_plain_text(held, monkeypatch):
    model, documents, cache = held
    shown = cache.show(model, documents)
    plain = repr(shown)
    assert plain == f"<s>[{DOC}\n\n<s>[{documents[1]}"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    coloured = str(shown)
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
    # No colour goes on over a line break.
    assert all(line.count("\x1b[0m") * 2 == line.count("\x1b[") for line in coloured.split("\n"))
    # A document's own sequences do not reach the terminal.
    steering = KeptTokensDisplay(passages=([KeptPassage("a\x1b[2Jb\tc", 1.0)],), heads=2)
    assert "\x1b[2J" not in repr(steering) and "b\tc" in repr(steering)


def test_the_prompt_is_given_as_it_was(held):
    model, documents, cache = held
    whole = repr(cache.show(model, documents))
    out = jaxkv.generate(model, documents, policy=jaxkv.KeyDiff(budget=8), **DRAWING)
    assert repr(out.cache.show(model, documents)) == whole
    chats = [[{"role": "user", "content": each}] for each in documents]
    assert repr(cache.show(model, chats)) == whole
    raw = jaxkv.prefill(model, DOC, policy=jaxkv.KeyDiff(budget=8), raw=True)
    assert repr(raw.show(model, DOC)) == f"<s>{DOC}"
    ids = model.text.encode(DOC, bos=True)
    assert repr(raw.show(model, ids)) == f"<s>{DOC}"


def test_what_cannot_be_shown(held):
    model, documents, cache = held
    with pytest.raises(ValueError, match="prompt=.*tokens.*the cache has seen"):
        cache.show(model, [documents[0] * 3, documents[1]])
    with pytest.raises(ValueError, match="prompt=.*the cache holds 2"):
        cache.show(model, DOC)
    with pytest.raises(ValueError, match="params=.*another model"):
        cache.show(jaxkv.testing.tiny_model(), documents)
    silent = tiny.tiny(tiny.MODELS["gqa3"])
    with pytest.raises(ValueError, match="params=.*no tokenizer"):
        jaxkv.prefill(silent, [5, 6, 7]).show(silent, [5, 6, 7])
    with pytest.raises(TypeError, match="params=str"):
        cache.show(DOC, model)
    with pytest.raises(TypeError, match="prompt"):
        cache.show(model)

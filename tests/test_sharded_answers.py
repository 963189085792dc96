"""Texts on a mesh: streams, stop strings, turns and forks are those of one device."""

import functools

from lettered import ids, tiny
from meshes import mesh_of

import jaxkv

OPTIONS = {"stop_at_eos": False, "max_new_tokens": 16, "progress": False}


@functools.cache
def moved():
    return tiny().on(mesh_of(2, 2))


def told(made):
    """Text, tokens and what is kept of a generation."""
    kept = [each.tolist() for each in (made.cache.kept, made.cache.seen[: made.cache.batch])]
    return (
        [each.text for each in made],
        [each.tokens.tolist() for each in made],
        kept,
        made.cache.turn,
    )


def test_streams_stop_strings_and_turns():
    """Three texts for two groups: one ends at a stop string before the others; then a question on top of each."""
    rows, out, policy = ids(1, 60, 38, 45), [], jaxkv.H2O(budget=16)
    free = jaxkv.generate(tiny(), rows, policy=policy, **OPTIONS)
    stops = [free[0].text[2:5], free[1].text[9:11]]
    for model in (tiny(), moved()):
        stream = jaxkv.generate(model, rows, policy=policy, stop=stops, stream=True, **OPTIONS)
        pieces = list(stream)
        more = jaxkv.generate(model, ids(2, 3, 9, 5), cache=stream.result.cache, **OPTIONS)
        out.append((pieces, told(stream.result), told(more)))
    assert out[0] == out[1]
    (_, (texts, tokens, *_), _) = out[0]
    assert min(map(len, tokens)) < 16 and not any(stop in text for stop in stops for text in texts)


def test_forks():
    """One document's cache for many questions, which it serves again unchanged."""
    out, policy = [], jaxkv.SnapKV(budget=16, window=4)
    for model in (tiny(), moved()):
        cache = jaxkv.prefill(model, ids(3, 50)[0], policy=policy, progress=False)
        several = jaxkv.generate(model, ids(2, 3, 9, 5), cache=cache, **OPTIONS)
        again = jaxkv.generate(model, ids(2, 3, 9, 5), cache=cache, **OPTIONS)
        assert told(again) == told(several)
        out.append(told(several))
    assert out[0] == out[1]

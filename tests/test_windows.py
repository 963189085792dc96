"""Models with sliding-window layers: what caches hold, against prefill of the longer text; meshes."""

import dataclasses
from unittest import mock

import numpy as np
import pytest
import tiny
from meshes import mesh_of

import jaxkv
from jaxkv.engine import headroom as sizes
from jaxkv.engine.headroom import compute_prefill_headroom
from jaxkv.engine.plan import plan_prefill
from jaxkv.models.values import LayerSpec, Rope

WINDOW, LENGTHS, NEW = 8, (30, 7, 21), 14
# A layer of a window below one that attends to everything, by angles of its own, as in Gemma 3.
KINDS = (LayerSpec(sliding_window=WINDOW), LayerSpec(rope=Rope(theta=5e4)))
SHAPE = dataclasses.replace(tiny.shape(layers=2, kv_heads=2, group=2, dim=16), kinds=KINDS)
ALL = dataclasses.replace(SHAPE, kinds=KINDS[:1])
POLICIES = {
    "full": lambda budget: jaxkv.FullKV(),
    "snapkv": lambda budget: jaxkv.SnapKV(budget=budget, window=6),
    "adakv": lambda budget: jaxkv.AdaKV(base=jaxkv.SnapKV(budget=budget, window=6)),
    "compactor": lambda budget: jaxkv.Compactor(budget=budget),
    "expected": lambda budget: jaxkv.ExpectedAttention(budget=budget),
    "criticalkv": lambda budget: jaxkv.CriticalKV(base=jaxkv.SnapKV(budget=budget, window=6)),
    "h2o": lambda budget: jaxkv.H2O(budget=budget),
    "every": lambda budget: jaxkv.SnapKV(budget=budget, window=6, every=3),
    "every, ada": lambda budget: jaxkv.AdaKV(base=jaxkv.SnapKV(budget=budget, window=6, every=4)),
}


def prompts(seed=0, lengths=LENGTHS):
    return [list(each) for each in tiny.prompts(seed, lengths)]


@pytest.mark.parametrize("name", ["full", "adakv", "compactor", "expected", "criticalkv"])
def test_rows_that_are_held(name):
    """Sliding-window layers hold their last rows and take part in no budget; bytes are as planned."""
    model, policy = tiny.tiny(SHAPE), POLICIES[name](16)
    session = jaxkv.Session(model, policy)
    cache = session.prefill(prompts(), new=NEW)
    length, seen = np.asarray(cache.length), np.asarray(LENGTHS)
    for layer, width in enumerate(SHAPE.sliding_windows):
        held = length[layer]
        if width is not None:
            assert (held == np.minimum(seen, width)[:, None]).all()
    whole = length[[layer for layer, width in enumerate(SHAPE.sliding_windows) if width is None]]
    kept = seen if name == "full" else np.minimum(seen, 16)
    assert (whole.sum(axis=(0, 2)) == whole.shape[0] * whole.shape[2] * kept).all()
    for layer, row, _, _, _, positions in tiny.segments(cache):
        if SHAPE.sliding_windows[layer] is not None:
            assert positions.tolist() == list(range(max(0, LENGTHS[row] - WINDOW), LENGTHS[row]))
    headroom = compute_prefill_headroom(
        policy.build_policy_parts(), SHAPE.sliding_windows, np.asarray(LENGTHS), NEW
    )
    assert cache.nbytes == plan_prefill(SHAPE, policy, LENGTHS, headroom=headroom).cache_bytes


def test_entries_behind_a_window_are_counted_on_neither_side():
    out = jaxkv.generate(
        tiny.tiny(SHAPE), prompts(), max_new_tokens=NEW, stop_at_eos=False, progress=False
    )
    assert out.stats.kept_bytes == out.stats.full_bytes < out.stats.cache_bytes
    assert out.cache.kept_nbytes == out.cache.full_nbytes < out.cache.nbytes


@pytest.mark.parametrize("config", [SHAPE, ALL], ids=["some layers", "all layers"])
def test_drawn_tokens_are_those_of_the_longer_prompt(config):
    """Past several windows, unequal lengths."""
    session = jaxkv.Session(tiny.tiny(config), jaxkv.FullKV())
    _, drawn = session.sample(session.prefill(prompts(), new=NEW), NEW)
    texts = [text + tokens for text, tokens in zip(prompts(), drawn.tolist(), strict=True)]
    for count in (3, NEW - 1):
        again = session.prefill(
            [text[: size + count] for text, size in zip(texts, LENGTHS, strict=True)]
        )
        following = [text[size + count] for text, size in zip(texts, LENGTHS, strict=True)]
        assert np.asarray(again.logits).argmax(axis=-1).tolist() == following


def test_a_budget_of_the_whole_prompt_gives_the_full_caches_tokens():
    options = {"max_new_tokens": NEW, "stop_at_eos": False}
    model, policy = tiny.tiny(SHAPE), POLICIES["every, ada"](64)
    full = jaxkv.generate(model, prompts(), policy=jaxkv.FullKV(), **options)
    ours = jaxkv.generate(model, prompts(), policy=policy, **options)
    alone = jaxkv.generate(model, prompts()[2:], policy=policy, **options)
    assert [each.tokens.tolist() for each in ours] == [each.tokens.tolist() for each in full]
    assert alone[0].tokens.tolist() == full[2].tokens.tolist()


def test_kernels():
    """A segment of the kernels' table is what the window leaves."""
    plain, found = (
        jaxkv.generate(
            tiny.tiny(SHAPE),
            prompts(),
            policy=POLICIES["adakv"](16),
            max_new_tokens=12,
            stop_at_eos=False,
            implementation=each,
        )
        for each in ("xla", "pallas")
    )
    assert [each.tokens.tolist() for each in found] == [each.tokens.tolist() for each in plain]


def test_stores():
    """Rows of windows are held as the policy's store holds rows, but never also as they were before."""
    session = jaxkv.Session(tiny.tiny(SHAPE), jaxkv.FullKV(store="int4-residual"))
    dense = jaxkv.Session(tiny.tiny(SHAPE), jaxkv.FullKV())
    cache, full = session.prefill(prompts(), new=4), dense.prefill(prompts(), new=4)
    assert cache.kept_nbytes < 0.6 * full.kept_nbytes
    windows = [width is not None for width in SHAPE.sliding_windows]
    assert [pool.residual is None for pool in cache.pools] == windows and not all(windows)
    asked = [[5, 6, 7]] * 3
    found, want = session.extend(cache, asked).logits, dense.extend(full, asked).logits
    assert np.abs(np.asarray(found) - np.asarray(want)).max() < 0.1 * np.abs(np.asarray(want)).max()


def test_policies_that_roll_positions_are_refused():
    with pytest.raises(ValueError, match="rolling="):
        jaxkv.Session(tiny.tiny(SHAPE), jaxkv.StreamingLLM(budget=32, rolling_positions=True))


def test_a_policy_needs_a_layer_that_attends_to_the_whole_prompt():
    with pytest.raises(ValueError, match="use FullKV"):
        jaxkv.Session(tiny.tiny(ALL), jaxkv.SnapKV(budget=32, window=6))


def test_a_plan_counts_windows_and_gives_no_speed():
    """Of 131,072 tokens sliding-window layers hold 1,024 rows, whatever the policy."""
    config = jaxkv.ModelConfig(
        vocab=1000, layers=6, embed=512, hidden=1024, heads=8, kv_heads=4, head_dim=64, max_positions=131072,
        kinds=(LayerSpec(sliding_window=1024),) * 5 + (LayerSpec(),),
    )  # fmt: skip
    given = {"context": 131072 - 256, "new": 256, "batch": 2, "gpus": "h100x1"}
    row = 2 * 2 * 64 + 4
    for policy, rows in ((jaxkv.FullKV(), 131072 - 256), (jaxkv.SnapKV(budget=4096), 4096)):
        made = jaxkv.plan(config, policy=policy, **given)
        held = 2 * 4 * row * (5 * 1024 + rows)
        assert held < made.cache < 1.05 * held + 2 * 4 * row * 6 * 512
        assert "windows has not been measured" in str(made)


def test_eviction_spares_windows(tmp_path):
    """Layers that attend to everything stay at their budget, whichever rows they lose; windows' keep all new rows."""
    session = jaxkv.Session(tiny.tiny(SHAPE), jaxkv.H2O(budget=16))
    made = session.prefill(prompts(), new=NEW)
    made.save(tmp_path / "cache")
    cache, drawn = session.sample(made, NEW)
    seen = np.asarray(cache.seen)
    for layer, row, _, _, _, positions in tiny.segments(cache):
        if SHAPE.sliding_windows[layer] is None:
            assert len(positions) == min(16, seen[row]) and positions.max() == seen[row] - 1
        else:
            assert positions.tolist() == list(range(max(0, LENGTHS[row] - WINDOW), seen[row]))
    _, saved = session.sample(jaxkv.load_cache(tmp_path / "cache"), NEW)
    assert saved.tolist() == drawn.tolist()
    # One row more than the budget evicts one, and a longer answer than was planned for finds room.
    again, more = session.sample(cache, NEW)
    assert (
        again.kept[1].max() == 16
        and again.kept[0].min() >= WINDOW
        and (np.asarray(more) >= 0).all()
    )


# Tokens that are sampled, past several windows, and rows that sliding-window layers gain before they drop some.
LONG, LEAST = 60, 16


@pytest.mark.parametrize("name", ["full", "every"])
def test_long_answers_drop_what_left_the_window(name):
    """Of 60 tokens layers hold no more than 16 beyond their window; tokens are those of one large cache."""
    model, policy = tiny.tiny(SHAPE), POLICIES[name](16)
    session = jaxkv.Session(model, policy)
    # Of 540 tokens they would hold 256.
    headroom = compute_prefill_headroom(
        policy.build_policy_parts(), SHAPE.sliding_windows, np.asarray(LENGTHS), 540
    )
    assert headroom[0] == (256 if name == "full" else 19)
    with mock.patch.object(sizes, "_LEAST_BEYOND", LEAST):
        cache, drawn = session.sample(session.prefill(prompts(), new=LONG), LONG)
    assert cache.pools[0].row_count == 2 * (WINDOW + LEAST)
    assert cache.kept[0].max() <= WINDOW + LEAST and cache.kept[0].min() >= WINDOW
    for layer, row, _, _, _, positions in tiny.segments(cache):
        if SHAPE.sliding_windows[layer] is not None:
            seen = int(np.asarray(cache.seen)[row])
            assert positions.tolist() == list(range(seen - len(positions), seen))
    with mock.patch.object(sizes, "_LEAST_BEYOND", 4096):
        whole, again = session.sample(session.prefill(prompts(), new=LONG), LONG)
    assert name == "every" or whole.kept[0].min() >= LONG
    assert again.tolist() == drawn.tolist()
    # A question, and further tokens, on top of what is left.
    asked = [
        session.sample(session.extend(each, prompts(3, (11, 2, 40)), new=9), 9)[1].tolist()
        for each in (cache, whole)
    ]
    assert asked[0] == asked[1]


def test_long_answers_on_a_mesh():
    """Each device has its heads' windows, and drops their rows; one device drops none."""
    options = {"policy": POLICIES["h2o"](16), "max_new_tokens": LONG, "stop_at_eos": False}
    with mock.patch.object(sizes, "_LEAST_BEYOND", LEAST):
        split = jaxkv.generate(tiny.tiny(SHAPE), prompts(), mesh=mesh_of(2, 2), **options)
    with mock.patch.object(sizes, "_LEAST_BEYOND", 4096):
        alone = jaxkv.generate(tiny.tiny(SHAPE), prompts(), **options)
    assert [each.tokens.tolist() for each in split] == [each.tokens.tolist() for each in alone]
    assert split.cache.pools[0].row_count == 2 * (WINDOW + LEAST) < alone.cache.pools[0].row_count

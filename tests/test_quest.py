"""Quest and RocketKV: sampled tokens read the pages whose keys bound their logits highest, or that weigh most."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import oracles as o
import pytest
import running
import slot_runs as runs
import tiny
from test_sharded_parts import agree

import jaxkv
from jaxkv import FullKV, PyramidKV, Quest, RocketKV, SnapKV
from jaxkv.attention.filters import bound_page_logits
from jaxkv.cache import repack_cache
from jaxkv.cache.page_bounds import compute_page_bounds, list_appended_page_rows
from jaxkv.engine import token_loop
from jaxkv.engine.layers.paged import QuestCacheLayer
from jaxkv.engine.pages import count_full_pages
from jaxkv.engine.plan import plan_prefill
from jaxkv.engine.spec import create_cache_spec

CONFIG, LENGTHS, NEW = tiny.MODELS["gqa3"], (60, 33), 20
SNAPKV = SnapKV(budget=24, window=4)


def quest(budget=20, **options):
    return Quest(**{"budget": budget, "page": 4, "dense_layers": 1} | options)


def rocket(budget):
    return RocketKV(budget=budget, dense_layers=1, channels=3, base=SNAPKV)


# --- bounds and budgets ----------------------------------------------------------------------------------------------


def test_the_bound_is_the_oracles_and_never_below_a_logit():
    rng = np.random.default_rng(0)
    q, keys = (
        rng.normal(size=(6, 8)).astype(np.float32),
        rng.normal(size=(2, 12, 8)).astype(np.float32),
    )
    low, high = (getattr(keys.reshape(1, 2, 3, 4, 8), name)(axis=3) for name in ("min", "max"))
    found = np.asarray(
        bound_page_logits(
            jnp.asarray(q.reshape(1, 2, 3, 8)), jnp.asarray(low), jnp.asarray(high), None
        )
    )[0]
    for head in range(2):
        logits = (q[head * 3 : head * 3 + 3] @ keys[head].T).reshape(3, 3, 4)
        assert (found[head] >= logits.max(axis=(0, 2)) - 1e-5).all()
        pages = [keys[head, 4 * page : 4 * page + 4] for page in range(3)]
        expected = [
            max(o.page_bound(each, page) for each in q[head * 3 : head * 3 + 3]) for page in pages
        ]
        np.testing.assert_allclose(found[head], expected, rtol=1e-5)


def test_bounds_renewed_by_new_rows_are_those_of_all_rows():
    """One or several rows at a time; one sequence gets none. Rows that were taken back leave no trace."""
    rng, page, each, dtype = np.random.default_rng(1), 4, 18, "bfloat16"
    keys = jnp.asarray(rng.normal(size=(2, 2 * each, 8)), dtype)
    others = keys + jnp.asarray(1, dtype)
    length = jnp.asarray([[7, 8], [5, 4]])
    store, wrong = (jaxkv.cache.DenseStore.encode_entries(a, a) for a in (keys, others))
    bounds = compute_page_bounds(store, length, page=page)

    def grown(bounds, store, length, count):
        row = jnp.minimum(list_appended_page_rows(length, max(count), page), each - 1)
        rows = store.k.reshape(2, 2, each, 8)
        return bounds.recompute_appended_pages(
            jnp.take_along_axis(rows, row[..., None], axis=2), length, jnp.asarray(count)
        )

    bounds = grown(bounds, wrong, length, (5, 0))
    for rows in (1, 1, 5, 3):
        bounds = grown(bounds, store, length, (rows, 0))
        length = length + jnp.asarray([[rows], [0]])
    expected = compute_page_bounds(store, length, page=page)
    assert expected.low.shape == (2, 2, 5, 8)
    for sequence, head in np.ndindex(2, 2):
        some = slice(-(-int(length[sequence, head]) // page))
        for mine, its in ((bounds.low, expected.low), (bounds.high, expected.high)):
            np.testing.assert_array_equal(
                np.asarray(mine[sequence, head, some]), np.asarray(its[sequence, head, some])
            )


def test_no_more_rows_are_read_than_the_budget():
    """Of a budget that is a multiple of the page as many pages as in the published code, else as many as fit."""
    for budget in (12, 13, 16, 50):
        length = jnp.arange(100)
        read = np.asarray(count_full_pages(length, jnp.int32(budget), 4) * 4 + length % 4 + 1)
        assert (read <= budget).all() and (read[:budget] == np.arange(1, budget + 1)).all()
        assert budget % 4 or (read[budget:] > budget - 4).all()


def test_rows_read_are_the_budget_and_a_share_is_of_each_prompt():
    lengths = np.asarray([1000, 100])
    assert Quest().build_policy_parts().read.count_attended_tokens(lengths, 8).tolist() == [
        1024,
        1024,
    ]
    assert Quest(budget=0.1).build_policy_parts().read.count_attended_tokens(
        lengths, 8
    ).tolist() == [100, 48]


# --- what is read ----------------------------------------------------------------------------------------------------


@pytest.fixture
def record(monkeypatch):
    """Of every token and layer that chose, in order: queries, rows before it, chosen rows, count, and output."""
    seen, choose, attend = (
        [],
        QuestCacheLayer.select_pages,
        QuestCacheLayer.append_tokens_and_attend,
    )

    def chosen_pages(layer, q, budget):
        chosen = choose(layer, q, budget)
        keep = lambda *arrays: seen.append([np.asarray(each) for each in arrays])  # noqa: E731
        jax.debug.callback(keep, q, layer.length, chosen.rows, chosen.held, ordered=True)
        return chosen

    def attended(layer, token, step):
        made = attend(layer, token, step)
        if not step.has_several_tokens:
            keep = lambda out: seen[-1].append(np.asarray(out))  # noqa: E731
            jax.debug.callback(keep, made.out[..., 0, :], ordered=True)
        return made

    monkeypatch.setattr(QuestCacheLayer, "select_pages", chosen_pages)
    monkeypatch.setattr(QuestCacheLayer, "append_tokens_and_attend", attended)
    return seen


@pytest.mark.parametrize(
    "policy",
    [quest(14), quest(14, base=SNAPKV), rocket(14)],
    ids=["full", "compressed", "rocketkv"],
)
def test_pages_and_attention_are_the_oracles(record, policy):
    """Each head's rows at every sampled token, by the keys that the cache holds in the end: rows never move."""
    jax.clear_caches()
    session = jaxkv.Session(tiny.tiny(CONFIG), policy)
    choice = {"budget": 14, "page": 4, "channels": getattr(policy, "channels", None)}
    cache = session.prefill(tiny.prompts(7, LENGTHS), new=NEW)
    cache, _ = session.sample(cache, NEW, donate=True)
    jax.effects_barrier()
    jax.clear_caches()
    held_rows = {part[:3]: part for part in tiny.segments(cache)}
    drawn = [each for each in record if len(each) == 5][-NEW * 2 :]
    assert len(drawn) == NEW * 2
    compared = chosen_by = 0
    for at, (q, length, chosen, held, out) in enumerate(drawn):
        layer = 1 + at % 2
        for sequence in range(2):
            n = int(length[sequence, 0]) + 1
            parts = [held_rows[layer, sequence, head] for head in range(2)]
            keys, values = (
                np.stack([getattr(part, name)[:n] for part in parts]).astype(np.float64)
                for name in "kv"
            )
            queries = q[sequence].reshape(6, 8).astype(np.float64)
            expected, gap = o.quest_rows(queries, keys, **choice)
            if gap < 1e-5:
                continue
            for head in range(2):
                full = chosen[sequence, head, : held[sequence, head]].tolist()
                assert full + list(range((n - 1) // 4 * 4, n)) == expected[head]
            result = o.attention_over(queries, keys, values, expected)
            np.testing.assert_allclose(
                out[sequence].reshape(6, 8).astype(np.float64),
                result,
                atol=2e-5,
            )
            compared, chosen_by = compared + 1, chosen_by + (expected[0] != expected[1])
    assert compared > 3 * NEW and chosen_by > NEW


def test_a_budget_of_the_whole_text_gives_the_full_cache():
    """Rows of the answer count, too: a share of the whole prompt reads all until the first page no longer fits."""
    model, ids, new = tiny.tiny(CONFIG), tiny.prompts(2, LENGTHS), 22
    steps = np.random.default_rng(3).integers(0, tiny.VOCAB, (new, 2)).tolist()
    full, logits, _ = tiny.run(model, ids, FullKV())
    expected, _ = tiny.decode(model, full, steps, headroom=new)
    for budget, same in ((82, True), (1.0, False)):
        cache, mine, _ = tiny.run(model, ids, quest(budget))
        assert running.gap(mine, logits) < 1e-5
        found, _ = tiny.decode(model, cache, steps, headroom=new)
        assert (
            running.gap(found, expected) < 1e-4
            if same
            else running.gap(found[0], expected[0]) > 1e-3
        )


def test_questions_attend_to_every_row_and_the_answer_to_pages():
    model, ids, question = tiny.tiny(CONFIG), tiny.prompts(4, LENGTHS), tiny.prompts(5, (9, 5))
    ours, full = (jaxkv.Session(model, policy) for policy in (quest(12), FullKV()))
    caches = [each.extend(each.prefill(ids), question, new=NEW) for each in (ours, full)]
    assert running.gap(caches[0].logits, caches[1].logits) < 1e-4
    # A token that is read alone, by `chunk=1`, reads pages, as a sampled one does.
    token, out = ours.sample(caches[0], 1, new=NEW), ours.sample(caches[0], NEW)[1]
    read = ours.extend(caches[0], token[1].tolist(), chunk=1)
    np.testing.assert_array_equal(ours.sample(read, NEW - 1, new=NEW)[1], out[:, 1:])
    assert out.tolist() != full.sample(caches[1], NEW)[1].tolist()


def bounds_are_those_of_all_rows(cache):
    """Asserts that layers above the dense one, and no others, have the bounds of their full pages' keys."""
    assert cache.pools[0].bounds is None
    for layer, pool in enumerate(cache.pools[1:], 1):
        length, bounds = cache.length[layer], pool.bounds
        expected = compute_page_bounds(pool.store, length, page=4)
        full = (jnp.arange(expected.low.shape[2]) < (length // 4)[..., None])[..., None]
        for mine, its in ((bounds.low, expected.low), (bounds.high, expected.high)):
            np.testing.assert_array_equal(jnp.where(full, mine, 0), jnp.where(full, its, 0))


def test_bounds_follow_the_rows():
    """Behind a prefill, a question, single tokens and blocks of them, and in larger buffers."""
    session = jaxkv.Session(tiny.tiny(CONFIG), quest(12))
    cache = session.prefill(tiny.prompts(6, LENGTHS))
    bounds_are_those_of_all_rows(cache)
    cache = session.extend(cache, tiny.prompts(5, (9, 5)), new=NEW)
    bounds_are_those_of_all_rows(cache)
    whole, tokens = session.sample(cache, NEW)
    bounds_are_those_of_all_rows(whole)
    for at in range(6):
        cache, one = session.sample(cache, 1, new=NEW, donate=True)
        np.testing.assert_array_equal(one[:, 0], tokens[:, at])
    bounds_are_those_of_all_rows(cache)
    cache = repack_cache(cache, headroom=70)
    bounds_are_those_of_all_rows(cache)
    np.testing.assert_array_equal(session.sample(cache, NEW - 6)[1], tokens[:, 6:])


def test_no_token_reads_the_keys_of_all_pages():
    """The compiled loop takes minima of the newest rows' pages alone, however long the cache is."""
    model, policy = tiny.tiny(CONFIG), quest(12)
    cache = jaxkv.Session(model, policy).prefill(tiny.prompts(6, LENGTHS), new=NEW)
    spec = create_cache_spec(model.flat_decoder, cache)
    draw = token_loop.create_sampling_state(
        cache.logits, jnp.zeros(2, bool), jax.random.key(0), jnp.asarray([-2])
    )
    given = token_loop.collect_loop_arguments(
        model.flat_decoder,
        cache.arrays,
        draw,
        1,
        jaxkv.Sampling(temperature=0),
        1,
        spec=spec,
    )
    text = str(token_loop._loop.trace(*given, spec=spec, size=1).jaxpr)
    reduced = re.findall(r"f32\[([\d,]+)\] = reduce_min", text)
    assert reduced == ["2,2,1,8"] * 2


def test_a_saved_cache_reads_the_same_pages(tmp_path):
    """In the middle of an answer."""
    session = jaxkv.Session(tiny.tiny(CONFIG), quest(0.3))
    cache, _ = session.sample(session.prefill(tiny.prompts(6, LENGTHS), new=NEW), 7, new=NEW)
    cache.save(tmp_path / "cache")
    loaded = jaxkv.load_cache(tmp_path / "cache")
    assert loaded.policy == session.policy
    bounds_are_those_of_all_rows(loaded)
    np.testing.assert_array_equal(session.sample(loaded, NEW)[1], session.sample(cache, NEW)[1])


@pytest.mark.parametrize(
    "policy",
    [quest(12, base=PyramidKV(budget=20, window=4)), rocket(12)],
    ids=["quest", "rocketkv"],
)
def test_pages_are_the_same_on_all_devices(policy):
    """With two kv heads their query heads are spread over devices, and choose together."""
    agree(policy, kv_heads=2)


@pytest.mark.parametrize("policy", [quest(0.3), rocket(12)], ids=["quest", "rocketkv"])
def test_slots_answer_as_alone(policy):
    runs.check(tiny.tiny(tiny.TWO_LAYERS), policy, runs.requests(1, 6, shortest=33))


# --- bytes -----------------------------------------------------------------------------------------------------------


def test_bounds_weigh_what_is_planned():
    """A minimum and a maximum for each page of the layers that choose, which the cache holds; a mesh divides them."""
    model, policy = tiny.tiny(CONFIG), quest()
    cache, _, needed = tiny.run(model, tiny.prompts(8, LENGTHS), policy, headroom=24)
    assert cache.nbytes == needed.cache_bytes
    size = sum(leaf.nbytes for pool in cache.pools for leaf in jax.tree.leaves(pool.bounds))
    assert size == 2 * 2 * (2 * -(-(64 + 24) // 4)) * 2 * 8 * 4
    plans = [
        plan_prefill(
            tiny.shape(layers=32, kv_heads=2, group=1, dim=8),
            quest(dense_layers=dense),
            [60] * 4,
            headroom=2048,
        )
        for dense in (1, 31)
    ]
    assert (
        plans[0].cache_bytes - plans[1].cache_bytes
        == 30 * 4 * (2 * -(-(64 + 2048) // 4)) * 2 * 8 * 4
    )
    assert cache.headroom_nbytes([8, 8, 8]) == 2 * (3 * 8 * (2 * 8 * 4 + 4) + 2 * 2 * 2 * 8 * 4)

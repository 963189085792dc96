"""What OmniKV's filters choose, against plain loops, and which rows of an evicted cache that means."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import running
import tiny
from omnikv_cases import CONFIG, FILTERS, LENGTHS, feed, omni, walk

import jaxkv
from jaxkv import D2O, AdaKV, FullKV, PyramidKV, SnapKV
from jaxkv.attention import filters
from jaxkv.attention.filters import FilterQuery, score_positions_by_row, score_positions_in_pool
from jaxkv.engine import sparse
from jaxkv.engine.sparse import SelectedPositions, find_pool_rows, select_top_positions
from jaxkv.engine.tokens import SelectionBounds
from jaxkv.policies import EntropyLayers, QueryWeighting

# --- what is chosen --------------------------------------------------------------------------------------------------


def received(query, keys, seen, prompt):
    """By position, the most that a head of one query `[H, D]` pays to it among the first `seen` keys `[K, S, D]`."""
    best = np.zeros(prompt)
    for head in range(len(query)):
        logits = (
            keys[head * len(keys) // len(query), :seen].astype(np.float64)
            @ query[head]
            / keys.shape[-1] ** 0.5
        )
        shares = np.exp(logits - logits.max())
        best[:seen] = np.maximum(best[:seen], shares / shares.sum())
    return best


def highest(scores, count):
    """The positions of so many of the highest scores, ascending; ties go to the lowest position."""
    return sorted(
        sorted(range(len(scores)), key=lambda position: (-scores[position], position))[:count]
    )


def oracle(selector, queries, keys, prompt, now, budget, window=16):
    """Chosen positions by plain loops: queries by position `[H, D]`, keys `[K, S, D]` of one sequence."""
    ages = {"last": range(1), "uniform": range(window), "exponential": range(window)}[selector]
    scores = np.zeros(prompt)
    for age in ages:
        at = now - age
        if at < 0:
            continue
        best = received(queries[at], keys, min(prompt, at + 1), prompt)
        scores += best * (0.5**age if selector == "exponential" else 1.0)
    if selector != "last":
        scores[max(0, now - window + 1) :] = np.inf
    return highest(scores, budget)


@pytest.fixture
def record(monkeypatch):
    """What every filter asked and chose, in order: `(layer's queries, positions, count)`."""
    seen, original = [], sparse.select_top_positions

    def recording(*given, **options):
        chosen = original(*given, **options)
        keep = lambda *arrays: seen.append([np.asarray(each) for each in arrays])  # noqa: E731
        jax.debug.callback(keep, chosen.positions, chosen.count, ordered=True)
        return chosen

    monkeypatch.setattr(sparse, "select_top_positions", recording)
    return seen


@pytest.fixture
def asked(monkeypatch):
    """The new tokens' queries of every filter, in order."""
    seen, original = [], sparse.build_filter_query

    def filter_query(q, *rest):
        jax.debug.callback(lambda a: seen.append(np.asarray(a)), q, ordered=True)
        return original(q, *rest)

    monkeypatch.setattr(sparse, "build_filter_query", filter_query)
    return seen


@pytest.mark.parametrize(
    ("selector", "offload"),
    [(QueryWeighting.LAST, True), (QueryWeighting.EXPONENTIAL, False)],
    ids=str,
)
def test_chosen_sets_are_the_oracles(selector, offload, record, asked):
    model, ids, steps = tiny.tiny(CONFIG), tiny.prompts(7, LENGTHS), 8
    jax.clear_caches()
    policy = omni(20, selector=selector, offload=offload)
    cache, _, _ = tiny.run(model, ids, policy)
    query_buffers = [np.asarray(query_buffer) for query_buffer in cache.state.query_buffers]
    _, after = feed(model, cache, walk(steps))
    jax.effects_barrier()
    jax.clear_caches()
    assert len(record) == len(asked) == steps * len(FILTERS)
    for index, layer in enumerate(FILTERS):
        keys = {(row, head): k for at, row, head, k, _, _ in tiny.segments(after) if at == layer}
        for row, prompt in enumerate(LENGTHS):
            own = np.stack([keys[row, head] for head in range(CONFIG.kv_heads)])
            queries = {}
            if query_buffers:
                size = query_buffers[index].shape[3]
                for position in range(max(0, prompt - 16), prompt):
                    queries[position] = query_buffers[index][row, :, :, position % size].reshape(
                        -1, CONFIG.head_dim
                    )
            for number in range(steps):
                now = prompt + number
                queries[now] = asked[number * len(FILTERS) + index][row, :, :, 0].reshape(
                    -1, CONFIG.head_dim
                )
                positions, count = record[number * len(FILTERS) + index]
                expected = oracle(selector.value, queries, own, prompt, now, min(20, prompt))
                assert positions[row, : count[row]].tolist() == expected, (layer, row, number)


def test_chunks_choose_among_earlier_tokens_by_all_their_queries(record, asked):
    lengths, chunk = (75, 45), 32
    model, ids = tiny.tiny(CONFIG), tiny.prompts(16, lengths)
    jax.clear_caches()
    cache = jaxkv.prefill(model, ids, policy=omni(12, prefill_ratio=0.25, prefill_chunk=chunk))
    jax.effects_barrier()
    jax.clear_caches()
    assert len(record) == len(asked) == 3 * len(FILTERS)
    for index, layer in enumerate(FILTERS):
        keys = {(row, head): k for at, row, head, k, _, _ in tiny.segments(cache) if at == layer}
        for (row, length), number in itertools.product(enumerate(lengths), range(3)):
            before, new = chunk * number, min(chunk, length - chunk * number)
            own = np.stack([keys[row, head] for head in range(CONFIG.kv_heads)])
            queries = asked[number * len(FILTERS) + index][row]
            positions, count = record[number * len(FILTERS) + index]
            if before and new > 0:
                by_token = np.moveaxis(queries, 2, 0)[:new].reshape(new, -1, CONFIG.head_dim)
                scores = sum(received(query, own, before, before) for query in by_token)
                assert positions[row, : count[row]].tolist() == highest(scores, chunk // 4), (
                    layer,
                    row,
                    number,
                )
            elif new > 0:
                assert count[row] == 0


def test_ties_go_to_the_lowest_position():
    keys = jnp.zeros((1, 16, 4)).at[0, 5].set(1.0)
    asked = FilterQuery(
        q=jnp.ones((1, 1, 1, 1, 4)),
        positions=jnp.asarray([[20]], jnp.int32),
        weights=jnp.ones((1, 1)),
    )
    reading = omni(4).build_policy_parts().build_read_config((None,) * 7, 16)
    below, budget, now = (jnp.asarray([n], jnp.int32) for n in (12, 4, 20))
    chosen = select_top_positions(
        score_positions_by_row(asked, keys, below, None),
        SelectionBounds(below, budget),
        reading,
        now=now,
    )
    assert chosen.positions[0, :4].tolist() == [0, 1, 2, 5]


def test_generated_tokens_can_have_to_be_chosen():
    model, ids = tiny.tiny(CONFIG), tiny.prompts(8, LENGTHS)
    full, _, _ = tiny.run(model, ids, FullKV())
    expected, _ = feed(model, full, walk(8))
    # As many as the longer prompt has: all of it and what comes after, unless that has to be chosen, too.
    for budget, generated, same in (
        (80, True, (True, True)),
        (60, True, (False, True)),
    ):
        cache, _, _ = tiny.run(model, ids, omni(budget, include_generated=generated))
        out, _ = feed(model, cache, walk(8))
        found = tuple(running.gap(out[:, row], expected[:, row]) < 1e-4 for row in range(2))
        assert found == same, (budget, generated)


@pytest.mark.parametrize(("candidates", "evicted"), (((60, 33), True), ((7, 0), False)), ids=str)
def test_few_logits_at_a_time_choose_the_same(evicted, candidates, monkeypatch):
    rng, window, heads, slots = np.random.default_rng(0), 8, 2, 64
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    k = normal(2, heads * slots, 8)
    pos = jnp.tile(jnp.arange(slots, dtype=jnp.int32), (2, heads))
    now = jnp.asarray([60, 33], jnp.int32)
    asked = FilterQuery(
        q=normal(2, heads, 3, window, 8),
        positions=now[:, None] - jnp.arange(window),
        weights=jnp.ones((2, window)),
    )
    start = jnp.asarray([[0, slots]] * 2, jnp.int32)
    known, budget = jnp.asarray(candidates, jnp.int32), jnp.asarray([20, 20], jnp.int32)
    kept = jnp.broadcast_to(known[:, None], start.shape)
    reading = dataclasses.replace(
        omni(20, selector="uniform").build_policy_parts().build_read_config((None,) * 7, slots),
        every_entry=not evicted,
    )
    out = []

    def scores():
        if evicted:
            return score_positions_in_pool(asked, k, pos, start, kept, reading.padded_len, None)
        return score_positions_by_row(asked, k, known, None)

    # All at once; blocks of 20 and, for an evicted cache, of few queries; a block for every key.
    for most in (1 << 24, 2000, 1):
        monkeypatch.setattr(filters, "_LOGITS", most)
        found = jax.jit(
            lambda: select_top_positions(scores(), SelectionBounds(known, budget), reading)
        )()
        count = np.asarray(found.count)
        out.append(
            [
                row[:each].tolist()
                for row, each in zip(np.asarray(found.positions), count, strict=True)
            ]
        )
    assert out[0] == out[1] == out[2]
    assert [len(row) for row in out[0]] == [min(20, each) for each in candidates]


# --- over an evicted cache -------------------------------------------------------------------------------------------

BASES = {
    "adakv": AdaKV(base=SnapKV(budget=24, window=8)),
    "recents": D2O(budget=24, mode="prefill", official=True),
    "shared": PyramidKV(budget=24, window=8, layers=EntropyLayers()),
}


@pytest.mark.parametrize("name", ["adakv", "shared"])
def test_reading_all_of_an_evicted_cache_gives_that_cache(name):
    model, ids = tiny.tiny(CONFIG), tiny.prompts(10, LENGTHS)
    base, _, _ = tiny.run(model, ids, BASES[name])
    cache, _, _ = tiny.run(model, ids, omni(64, base=BASES[name]))
    assert tiny.kept(cache) == tiny.kept(base)
    assert running.gap(feed(model, cache, walk(5))[0], feed(model, base, walk(5))[0]) < 1e-4


@pytest.mark.parametrize("name", BASES)
def test_heads_read_those_of_their_rows_that_are_chosen(name):
    model, ids = tiny.tiny(CONFIG), tiny.prompts(11, LENGTHS)
    policy = omni(10, base=BASES[name])
    cache, _, _ = tiny.run(model, ids, policy)
    positions = jnp.asarray(
        [[0, 3, 7, 20, 21, 40, 52, 58, 59, 59], [1, 2, 5, 9, 13, 20, 27, 31, 32, 32]], jnp.int32
    )
    chosen = SelectedPositions(positions=positions, count=jnp.asarray([9, 9], jnp.int32))
    reading = policy.build_policy_parts().build_read_config((None,) * 7, 64)
    for layer in (3, 6):
        pool = cache.pools[0 if len(cache.pools) == 1 else layer]
        rows, count = find_pool_rows(chosen, pool, cache.start[layer], cache.length[layer], reading)
        for row, head in np.ndindex(2, CONFIG.kv_heads):
            mine = np.asarray(rows[row, head])[: count[row, head]]
            found = np.asarray(pool.pos)[row, mine].tolist()
            held = tiny.kept(cache)[layer][row][head]
            assert found == [each for each in positions[row, :9].tolist() if each in held]
            start, length = int(cache.start[layer, row, head]), int(cache.length[layer, row, head])
            assert all(start <= each < start + length for each in mine)

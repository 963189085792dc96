"""What OmniKV's filters choose, against plain loops, and which rows of an evicted cache that means."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import running
import tiny
from omnikv_cases import CONFIG, FILTERS, LENGTHS, both, feed, omni, selectors, walk

from jaxkv import D2O, AdaKV, FullKV, PyramidKV, SnapKV
from jaxkv.cache import Pool
from jaxkv.models import sparse
from jaxkv.models.choosing import Asking, Chosen, choose, rows_of
from jaxkv.policies import EntropyLayers

# --- what is chosen --------------------------------------------------------------------------------------------------


def oracle(selector, queries, keys, prompt, now, budget, window=16):
    """Chosen positions by plain loops: queries by position `[H, D]`, keys `[K, S, D]` of one sequence."""
    heads, dim = len(queries[now]), keys.shape[-1]
    ages = {"last": range(1), "uniform": range(window), "exponential": range(window)}[selector]
    scores = np.zeros(prompt)
    for age in ages:
        at = now - age
        if at < 0:
            continue
        seen = min(prompt, at + 1)
        best = np.zeros(prompt)
        for head in range(heads):
            logits = keys[head * len(keys) // heads, :seen].astype(np.float64) @ queries[at][head] / dim**0.5
            shares = np.exp(logits - logits.max())
            best[:seen] = np.maximum(best[:seen], shares / shares.sum())
        scores += best * (0.5**age if selector == "exponential" else 1.0)
    if selector != "last":
        scores[max(0, now - window + 1) :] = np.inf
    order = sorted(range(prompt), key=lambda position: (-scores[position], position))
    return sorted(order[:budget])


@pytest.fixture
def record(monkeypatch):
    """What every filter asked and chose, in order: `(layer's queries, positions, count)`."""
    seen, original = [], sparse.choose

    def recording(*given, windowed):
        chosen = original(*given, windowed=windowed)
        keep = lambda *arrays: seen.append([np.asarray(each) for each in arrays])  # noqa: E731
        jax.debug.callback(keep, chosen.positions, chosen.count, ordered=True)
        return chosen

    monkeypatch.setattr(sparse, "choose", recording)
    return seen


@both
@selectors
def test_chosen_sets_are_the_oracles(selector, offload, record, monkeypatch):
    model, ids, steps = tiny.tiny(CONFIG), tiny.prompts(7, LENGTHS), 24
    asked, original = [], sparse.asking

    def asking(q, *rest):
        jax.debug.callback(lambda a: asked.append(np.asarray(a)), q, ordered=True)
        return original(q, *rest)

    monkeypatch.setattr(sparse, "asking", asking)
    jax.clear_caches()
    policy = omni(20, selector=selector, offload=offload)
    cache, _, _ = tiny.run(model, ids, policy)
    rings = [np.asarray(ring) for ring in cache.state.rings]
    _, after = feed(model, cache, walk(steps))
    jax.effects_barrier()
    jax.clear_caches()
    assert len(record) == len(asked) == steps * len(FILTERS)
    for index, layer in enumerate(FILTERS):
        keys = {(row, head): k for at, row, head, k, _, _ in tiny.segments(after) if at == layer}
        for row, prompt in enumerate(LENGTHS):
            own = np.stack([keys[row, head] for head in range(CONFIG.kv_heads)])
            queries = {}
            if rings:
                size = rings[index].shape[3]
                for position in range(max(0, prompt - 16), prompt):
                    queries[position] = rings[index][row, :, :, position % size].reshape(-1, CONFIG.head_dim)
            for number in range(steps):
                now = prompt + number
                queries[now] = asked[number * len(FILTERS) + index][row, :, :, 0].reshape(-1, CONFIG.head_dim)
                positions, count = record[number * len(FILTERS) + index]
                expected = oracle(selector.value, queries, own, prompt, now, min(20, prompt))
                assert positions[row, : count[row]].tolist() == expected, (layer, row, number)


def test_ties_go_to_the_lowest_position():
    keys = jnp.zeros((1, 16, 4)).at[0, 5].set(1.0)
    pool = Pool(k=keys, v=keys, pos=jnp.arange(16, dtype=jnp.int32)[None])
    asked = Asking(q=jnp.ones((1, 1, 1, 1, 4)), positions=jnp.asarray([[20]], jnp.int32), weights=jnp.ones((1, 1)))
    reading = omni(4).reading(7, 16)
    number = lambda n: jnp.asarray([n], jnp.int32)  # noqa: E731
    of = (number(0)[None], number(16)[None], number(12), number(4), number(20))
    chosen = choose(asked, pool, *of, reading, windowed=True)
    assert chosen.positions[0, :4].tolist() == [0, 1, 2, 5]


def test_generated_tokens_can_have_to_be_chosen():
    model, ids = tiny.tiny(CONFIG), tiny.prompts(8, LENGTHS)
    full, _, _ = tiny.run(model, ids, FullKV())
    expected, _ = feed(model, full, walk(8))
    for budget, same in ((80, True), (12, False)):
        cache, _, _ = tiny.run(model, ids, omni(budget, include_generated=True))
        out, _ = feed(model, cache, walk(8))
        assert (running.gap(out, expected) < 1e-4) is same


# --- over an evicted cache -------------------------------------------------------------------------------------------

BASES = {
    "snapkv": SnapKV(budget=24, window=8),
    "adakv": AdaKV(base=SnapKV(budget=24, window=8)),
    "recents": D2O(budget=24, mode="prefill", official=True),
    "shared": PyramidKV(budget=24, window=8, allocation=EntropyLayers()),
}


@pytest.mark.parametrize("name", BASES)
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
    positions = jnp.asarray([[0, 3, 7, 20, 21, 40, 52, 58, 59, 59], [1, 2, 5, 9, 13, 20, 27, 31, 32, 32]], jnp.int32)
    chosen = Chosen(positions=positions, count=jnp.asarray([9, 9], jnp.int32))
    reading = policy.reading(7, 64)
    for layer in (3, 6):
        pool = cache.pools[0 if len(cache.pools) == 1 else layer]
        rows, count = rows_of(chosen, pool, cache.start[layer], cache.length[layer], reading)
        for row, head in np.ndindex(2, CONFIG.kv_heads):
            mine = np.asarray(rows[row, head])[: count[row, head]]
            found = np.asarray(pool.pos)[row, mine].tolist()
            held = tiny.kept(cache)[layer][row][head]
            assert found == [each for each in positions[row, :9].tolist() if each in held]
            start, length = int(cache.start[layer, row, head]), int(cache.length[layer, row, head])
            assert all(start <= each < start + length for each in mine)

"""The cache's invariants, for every policy of the table: one contract, which looks at a cache in every way there is."""

import contextlib
import functools
import gc

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles as o
import pytest
import test_oracle_agreement as agreement
import tiny
from policy_row import Row
from policy_table import BY_NAME, TABLE

import jaxkv
from jaxkv.models.rope import apply_rope, compute_rope_tables
from jaxkv.policies import EntropyLayers, OfficialLayers

BUDGETS = (20, 0.5)
# Buckets of 64 and 32 slots together; with a share of each prompt, the second is shorter than its window.
LENGTHS = (60, 31)
SHORT = (50, 9)
# One model for all rows, so that they share programs, and others for a row of each kind of pool.
GQA, MQA = tiny.TWO_LAYERS, tiny.MODELS["mqa8"]
# A row of each kind of pool, and of each way in which entries go.
KINDS = ("full", "snapkv", "adakv", "pyramidkv-linear", "pyramidkv-entropy", "h2o", "d2o", "omnikv")
# Rows that are run alone, too: one of each way in which pools lie, one that evicts and one that reads a part.
ALONE = ("snapkv", "adakv", "pyramidkv-entropy", "d2o", "omnikv")
# Rows whose caches are asked.
ASKED = (*KINDS, "streaming-rolling")
each_kind = pytest.mark.parametrize("name", KINDS)


# --- checks: seeded faults call them too ---------------------------------------------------------------------------


def check_layout(cache, lengths, *, ordered=True):
    """Segments are disjoint and inside P; positions ascend and were seen; what is no segment's is marked so."""
    taken = [np.zeros(pool.pos.shape, int) for pool in cache.pools]
    start, length = np.asarray(cache.start), np.asarray(cache.length)
    for layer, row, head, k, _, pos in tiny.segments(cache):
        first, count = start[layer, row, head], length[layer, row, head]
        at = cache.layout.get_pool_index(layer)
        assert first >= 0 and count >= 0 and first + count <= cache.pools[at].row_count
        taken[at][row, first : first + count] += 1
        assert len(k) == len(pos) == count
        assert not ordered or (np.diff(pos) > 0).all()
        assert len(set(pos.tolist())) == count
        assert not count or (pos.min() >= 0 and pos.max() < lengths[row])
    for pool, used in zip(cache.pools, taken, strict=True):
        assert used.max() <= 1
        assert (np.asarray(pool.pos)[used == 0] == -1).all()
        assert pool.score is None or not np.asarray(pool.score)[used == 0].any()
    np.testing.assert_array_equal(cache.seen, lengths)


def check_rows(cache, full):
    """Every row is the one that FullKV holds at that position."""
    reference = {(layer, row, head): (k, v) for layer, row, head, k, v, _ in tiny.segments(full)}
    for layer, row, head, k, v, pos in tiny.segments(cache):
        if cache.policy.build_policy_parts().rolling:
            by = compute_rope_tables(jnp.asarray(pos)[None], cache.config.rope, k.shape[-1])
            k = np.asarray(apply_rope(jnp.asarray(k)[None], by))[0]
        all_k, all_v = reference[layer, row, head]
        np.testing.assert_allclose(k, all_k[pos], atol=1e-5)
        np.testing.assert_allclose(v, all_v[pos], atol=1e-5)


def check_spans(row: Row, kept, lengths):
    """Sinks, window and protected spans stay in every layer and head."""
    for layer in kept:
        for heads, n in zip(layer, lengths, strict=True):
            must = set(o.forced_positions(n, row.sinks, row.window, row.protect))
            assert all(must <= set(head) for head in heads)


def check_totals(row: Row, cache, needed, lengths, budget):
    """As many rows stay as the plan promised, and exact sums are the budget's by exact arithmetic."""
    kept, heads = cache.kept, cache.config.kv_heads
    if needed.rows is not None:
        np.testing.assert_array_equal(kept.sum(axis=2), heads * needed.rows)
    if row.uniform:
        assert (kept == kept[:, :, :1]).all()
    if row.level:
        assert (kept.sum(axis=2) == kept.sum(axis=2)[:1]).all()
    for index, n in enumerate(lengths):
        always_kept = len(o.forced_positions(n, row.sinks, row.window, row.protect))
        rows = n if row.keeps_all else max(o.resolve_budget(budget, n), always_kept)
        assert needed.budget[index] == rows
        if row.exact:
            assert kept[:, index].sum() == len(kept) * heads * rows
    goes_on = cache.policy.build_policy_parts().decoding_compression.compresses
    roomy = lengths_below(budget, lengths) if goes_on else needed.budget < 0
    np.testing.assert_array_equal(cache.limit, np.where(roomy[:, None], budget, cache.length))
    assert cache.nbytes == needed.cache_bytes


def lengths_below(budget, lengths):
    """Sequences whose cache may grow: prompts shorter than a budget in rows."""
    return np.asarray([isinstance(budget, int) and n < budget for n in lengths])


def check_merged(cache, full):
    """Kept rows of a merging policy: positions of the prompt, and none of them longer than the longest row."""
    longest = {
        (a, b, c): np.linalg.norm(k, axis=-1).max() for a, b, c, k, _, _ in tiny.segments(full)
    }
    for layer, row, head, k, v, _ in tiny.segments(cache):
        assert np.isfinite(k).all() and np.isfinite(v).all()
        assert np.linalg.norm(k, axis=-1).max() <= longest[layer, row, head] * (1 + 1e-5)


def check_prefill(row: Row, model, seed, lengths, budget):
    """All of the above, on one batch."""
    ids = tiny.prompts(seed, lengths)
    cache, _, needed = tiny.run(model, ids, row.policy(budget))
    full, _, _ = tiny.run(model, ids, jaxkv.FullKV())
    check_layout(cache, lengths)
    check_spans(row, tiny.kept(cache), lengths)
    check_totals(row, cache, needed, lengths, budget)
    (check_merged if row.merges else check_rows)(cache, full)
    return cache


def check_alone(row: Row, model, seed, lengths, budget, steps=2):
    """A sequence gets the same beside any other, and alone in a bucket of its own."""
    prompts = dict(zip("abo", tiny.prompts(seed, (*lengths, 40)), strict=True))
    policy = row.policy(budget)

    @functools.cache
    def result(names):
        cache, logits, _ = tiny.run(model, [prompts[name] for name in names], policy)
        kept, later = tiny.kept(cache), logits[None, :, :0]
        if not row.like:
            later, _ = tiny.decode(model, cache, [[step + 3] * len(names) for step in range(steps)])
        return {
            name: ([layer[index] for layer in kept], (logits[index], later[:, index]))
            for index, name in enumerate(names)
        }

    # Alone it is in a smaller bucket: programs of its own, of which a few rows show enough.
    alone = (("b", "ab", "b"),) if row.name in ALONE else ()
    for name, beside, other in (("a", "ab", "ao"), ("b", "ab", "ob"), *alone):
        (kept, logits), (same_kept, same_logits) = result(beside)[name], result(other)[name]
        assert kept == same_kept
        chex.assert_trees_all_close(logits, same_logits, atol=1e-4, rtol=0)


def check_decode(model, cache, lengths, steps=3):
    """Decoding appends to every segment at the positions of the text, and touches no entry that was there."""
    before = {(a, b, c): (k, v, pos) for a, b, c, k, v, pos in tiny.segments(cache)}
    _, after = tiny.decode(model, cache, [[5] * len(lengths)] * steps)
    check_layout(after, np.asarray(lengths) + steps)
    for layer, index, head, k, v, pos in tiny.segments(after):
        old_k, old_v, old = before[layer, index, head]
        n = lengths[index]
        assert pos.tolist() == [*old, *range(n, n + steps)]
        np.testing.assert_array_equal(k[:-steps], old_k)
        np.testing.assert_array_equal(v[:-steps], old_v)


def check_constant(row: Row, model, cache, lengths, steps=4):
    """One entry goes for each that comes: sizes stay, sinks and the newest entries too, nothing comes back."""
    limit, before = np.asarray(cache.limit), tiny.kept(cache)
    for step in range(1, steps + 1):
        # Room for a sequence below its budget comes once: another size of pools would be another program.
        _, cache = tiny.decode(
            model, cache, [[5 + step] * len(lengths)], headroom=steps if step == 1 else 0
        )
        seen = np.asarray(lengths) + step
        check_layout(cache, seen, ordered=False)
        np.testing.assert_array_equal(cache.limit, limit)
        grown = np.minimum(
            limit,
            np.asarray([[[len(head) + 1 for head in one] for one in layer] for layer in before]),
        )
        np.testing.assert_array_equal(cache.kept, grown)
        after = tiny.kept(cache)
        for layer, row_index, head in np.ndindex(*limit.shape):
            old, new = set(before[layer][row_index][head]), set(after[layer][row_index][head])
            n = seen[row_index]
            assert new <= old | {n - 1} and n - 1 in new
            recent = np.asarray(cache.state.recent)[layer, row_index]
            assert (
                set(range(min(row.sinks, n))) | set(range(max(0, n - min(recent, step)), n)) <= new
            )
        before = after


def check_tree(cache):
    """A cache is a pytree of arrays, whose static parts can be hashed."""
    leaves, structure = jax.tree.flatten(cache)
    chex.assert_trees_all_equal(jax.tree.unflatten(structure, leaves), cache)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    for static in (structure, cache.policy, cache.config):
        assert hash(static) == hash(static)
    chex.assert_trees_all_equal(jax.jit(lambda c: c)(cache), cache)


def check_again(row: Row, model, seed, lengths, budget):
    """Other prompts of the same lengths: nothing is compiled, and nothing but weights and cache lives afterwards."""
    policy, ids = row.policy(budget), tiny.prompts(seed + 1, lengths)
    # Constants of first calls are not the second's.
    first = jaxkv.prefill(model, ids, policy=policy)
    if isinstance(budget, int):
        ids = [each[4:] for each in ids]
    with held() as (before, now), compilations() as compiled:
        again = jaxkv.prefill(model, ids, policy=policy)
        # Weights lived before: what came since is the cache, to 2% and a key or two.
        assert again.nbytes <= now() <= 1.02 * again.nbytes + 256
        assert model.nbytes <= before
    assert not compiled
    assert jax.tree.structure(again) == jax.tree.structure(first)
    chex.assert_trees_all_equal_shapes_and_dtypes(again, first)


def check_questions(model, cache):
    """A cache answers alike as often as it is asked, is not changed, and no other question compiles anything."""
    before = _bytes(cache)

    def ask(*ids):
        return [
            each.tokens.tolist()
            for each in jaxkv.generate(model, [list(ids)] * 2, cache=cache, max_new_tokens=3)
        ]

    first = ask(7, 8, 9)
    with compilations() as compiled:
        second = ask(7, 8, 9)
        ask(4, 5)
    assert not compiled
    assert first == second
    assert _bytes(cache) == before


def contract(row: Row, model, seed, lengths, budget):
    """Prefills, and holds the cache to every promise; rows like another one stop where programs are the same."""
    cache = check_prefill(row, model, seed, lengths, budget)
    if row.like:
        return
    check_tree(cache)
    check_again(row, model, seed, lengths, budget)
    check_alone(row, model, seed, lengths, budget)
    if row.evicts:
        check_constant(row, model, cache, lengths)
    else:
        check_decode(model, cache, lengths)
    if row.name in ASKED:
        check_questions(model, cache)


def _bytes(cache):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(cache)]


# --- the properties --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_contract(row):
    contract(row, tiny.tiny(GQA), 1, LENGTHS, BUDGETS[0])


@each_kind
def test_contract_of_one_head_and_a_share_of_each_prompt(name):
    check_prefill(BY_NAME[name], tiny.tiny(MQA), 2, SHORT, BUDGETS[1])


@each_kind
@pytest.mark.parametrize("lengths", ((33, 1), (64, 32)), ids=str)
def test_prefill_at_any_length(name, lengths):
    check_prefill(BY_NAME[name], tiny.tiny(GQA), sum(lengths), lengths, BUDGETS[0])


@pytest.mark.parametrize(
    "name", ("adakv", "pyramidkv-entropy", "d2o", "omnikv", "streaming-rolling")
)
def test_a_budget_of_the_length_changes_nothing(name):
    model, row = tiny.tiny(GQA), BY_NAME[name]
    ids, tokens = tiny.prompts(3, LENGTHS), [[1, 2], [3, 4], [5, 6]]
    # Room for the three tokens as well, where their entries count.
    budget = (
        67 if row.evicts or getattr(row.policy(20).build_policy_parts().read, "page", None) else 64
    )
    results = []
    for policy in (jaxkv.FullKV(), row.policy(budget)):
        cache, logits, _ = tiny.run(model, ids, policy)
        steps, _ = tiny.decode(model, cache, tokens)
        results.append((logits, steps, tiny.kept(cache)))
    chex.assert_trees_all_close(results[0][:2], results[1][:2], atol=1e-4, rtol=0)
    assert results[0][2] == results[1][2]


def test_choosing_without_jit_is_choosing_with_it():
    """Budgets of layers and of heads."""
    q, k = agreement.draw_layers(0, 3, (40, 21))
    policy = BY_NAME["adakv-entropy"].policy(20)
    compiled = agreement.library_kept(policy, q[:2], k[:2], (40, 21))
    with jax.disable_jit():
        assert agreement.library_kept(policy, q[:2], k[:2], (40, 21)) == compiled


@pytest.mark.parametrize("layers", (OfficialLayers(), EntropyLayers()))
def test_what_must_stay_is_planned_for(layers):
    # The span is widest in the shortest prompts of the bucket, and wider than some layers' share of the budget.
    span, lengths = ((-30, 30),), (36, 34)
    policy = jaxkv.PyramidKV(
        budget=0.25, window=8, sinks=3, layers=layers, min_budget="clamp", protect=span
    )
    row = Row(
        name="span",
        make=lambda *_, **kw: policy,
        oracle=None,
        sinks=3,
        window=8,
        protect=span,
        exact=False,
    )
    cache, _, needed = tiny.run(tiny.tiny(GQA), tiny.prompts(8, lengths), policy)
    check_layout(cache, lengths)
    check_spans(row, tiny.kept(cache), lengths)
    rows = (
        np.broadcast_to(needed.budget, cache.kept.shape[:2]) if needed.rows is None else needed.rows
    )
    np.testing.assert_array_equal(cache.kept.sum(axis=2), GQA.kv_heads * rows)
    assert cache.nbytes == needed.cache_bytes


# --- caches as values ------------------------------------------------------------------------------------------------


def test_one_cache_serves_three_prompts():
    model = tiny.tiny(GQA)
    cache = jaxkv.prefill(model, tiny.prompts(4, (50,))[0], policy=BY_NAME["d2o"].policy(20))
    before = _bytes(cache)
    questions = [[1, 2, 3], [9], [20, 21]]
    forked = jaxkv.generate(model, questions, cache=cache, max_new_tokens=4)
    alone = [
        jaxkv.generate(model, question, cache=cache, max_new_tokens=4) for question in questions
    ]
    assert [row.tokens.tolist() for row in forked] == [each.tokens.tolist() for each in alone]
    assert _bytes(cache) == before


@pytest.mark.parametrize("budget", BUDGETS)
def test_adakv_weighs_what_snapkv_weighs(budget):
    model, ids = tiny.tiny(GQA), tiny.prompts(5, (60, 33))
    snap, ada = (
        tiny.run(model, ids, BY_NAME[name].policy(budget))[0] for name in ("snapkv", "adakv")
    )
    assert ada.nbytes == snap.nbytes
    assert ada.kept.sum() == snap.kept.sum()


# --- memory and compilations -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def held():
    """Bytes that came to live in the block and still do: `now()`. What lived before is not looked through for each."""
    gc.freeze()
    before = sum(array.nbytes for array in jax.live_arrays())

    def now() -> int:
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays()) - before

    try:
        yield before, now
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def compilations():
    """Collects the compilations of the block, by duration."""
    seen, open_ = [], [True]

    def listen(event, duration, **_):
        if open_[0] and event.endswith("backend_compile_duration"):
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        open_[0] = False  # jax has no public way to take a listener back


def test_compilations_are_counted():
    with compilations() as seen:
        jax.jit(lambda a: a + 17)(jnp.zeros(3, jnp.int32))
    assert len(seen) >= 1

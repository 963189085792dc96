"""Compression while generating: a policy that chooses again, over prompt and answer, chooses what it would at once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxkv
from jaxkv import (
    CAPKV,
    D2O,
    H2O,
    AdaKV,
    CriticalKV,
    GlobalBudget,
    LayerDefensiveKV,
    PyramidKV,
    SnapKV,
    StreamingLLM,
)
from jaxkv.cache import repack_cache
from jaxkv.engine.plan import bound_segment_length
from jaxkv.engine.recompress import count_entries_over_limit, find_due_sequences
from jaxkv.engine.spec import create_cache_spec
from jaxkv.policies import (
    KeyNorm,
    LinearLayers,
    Merge,
    Merged,
    Merger,
    PolicyWrapper,
    UniformLayers,
    VarianceLayers,
)

GQA = tiny.TWO_LAYERS
ROWS, EVERY = 24, 8
# Policies that choose again: one of each kind of scores, budgets and merging. Slots run one of them, too.
POLICIES = {
    "snapkv-sinks": SnapKV(budget=ROWS, window=8, sinks=3, protect=((5, 8), (-3, 20)), every=EVERY),
    "adakv-merge": AdaKV(
        base=SnapKV(budget=ROWS, window=8, merge=Merge(weights="average"), every=EVERY)
    ),
    "pyramidkv": PyramidKV(budget=ROWS, window=4, every=EVERY),
    "streaming-rolling": StreamingLLM(budget=ROWS, rolling_positions=True, every=EVERY),
    "h2o": H2O(budget=ROWS, mode="prefill", every=EVERY),
    "adakv-critical": AdaKV(base=CriticalKV(base=SnapKV(budget=ROWS, window=8, every=EVERY))),
    "capkv": CAPKV(budget=ROWS, every=EVERY),
    "layerdefensive": LayerDefensiveKV(budget=ROWS, window=8, every=EVERY),
}
# Rows that go one by one while sampling, and many at once behind a question.
EVICTING = {
    "h2o-sinks": H2O(budget=ROWS, sinks=2, recent=0.25, protect=((4, 6),)),
    "globalbudget-h2o": GlobalBudget(base=H2O(budget=ROWS)),
    "d2o": D2O(budget=ROWS, layers=UniformLayers()),
}
# Sequences that reach the point together, though their prompts differ.
LENGTHS = (20, 13)


def once(policy):
    """The policy without what it does while decoding."""
    if isinstance(policy, PolicyWrapper):
        return dataclasses.replace(
            policy, base=once(policy.base), budget=None, every=None, merge=None
        )
    return dataclasses.replace(policy, every=None)


def by_position(cache):
    """Rows of every segment in order of position."""
    out = {}
    for layer, row, head, k, v, pos in tiny.segments(cache):
        order = np.argsort(pos)
        out[layer, row, head] = pos[order].tolist(), k[order], v[order]
    return out


def same_rows(ours, theirs, rows, sequence):
    for key in [key for key in ours if key[1] == sequence]:
        pos, k, v = ours[key]
        expected = theirs[key[0], 0, key[2]]
        assert pos == expected[0], key
        np.testing.assert_allclose(k, expected[1], atol=2e-4)
        np.testing.assert_allclose(v, expected[2], atol=2e-4)


def feed(model, cache, tokens, *, chunk):
    """Tokens `[B, N]` on top of a copy with room for them, in chunks; evicting policies take one at a time."""
    needed = tokens.shape[1] + 1
    # Room for some calls at once: another size of pools is another program.
    copy = repack_cache(
        cache,
        headroom=0 if cache.compute_layer_headroom().min() >= needed else max(needed, EVERY + 2),
    )
    return jaxkv.Session(model, cache.policy).extend(copy, tokens, chunk=chunk, donate=True)


def check_chooses_again(policy, chunk, reference, sequences=(0, 1)):
    """Nothing was dropped before: choosing again is choosing once, on prompt and answer as one."""
    model, rng = tiny.tiny(GQA), np.random.default_rng(4)
    # No token twice: rows of the same token lie equally near to one between them, and rounding would choose.
    texts = [rng.permutation(tiny.VOCAB).astype(np.int32) for _ in LENGTHS]
    ids = [text[:n].tolist() for text, n in zip(texts, LENGTHS, strict=True)]
    more = np.stack([text[n : n + 40] for text, n in zip(texts, LENGTHS, strict=True)])
    for sequence in sequences:
        n = LENGTHS[sequence]
        new = ROWS + EVERY - n
        cache, _, _ = tiny.run(model, ids, policy)
        grown = feed(model, cache, more[:, :new], chunk=chunk)
        assert (
            count_entries_over_limit(grown)[sequence]
            >= (1 if policy.build_policy_parts().evicts_while_decoding else EVERY)
            and find_due_sequences(grown)[sequence]
        )
        after = jaxkv.Session(model, policy).recompress_sequences(grown)
        whole = [[*ids[sequence], *more[sequence, :new].tolist()]]
        # Twice, for a batch of two finds programs that the policy's own prompts have compiled.
        expected, _, _ = tiny.run(model, whole * 2, reference)
        same_rows(by_position(after), by_position(expected), ROWS, sequence)
        assert not find_due_sequences(after).any()
        # The other sequence: as it was, if it was not due.
        other = 1 - sequence
        if not find_due_sequences(grown)[other]:
            before, now = by_position(grown), by_position(after)
            for key in [key for key in now if key[1] == other]:
                assert now[key][0] == before[key][0]
                np.testing.assert_array_equal(now[key][1], before[key][1])


@pytest.mark.parametrize("name", POLICIES)
def test_choosing_again_is_choosing_at_once(name):
    policy = POLICIES[name]
    if any(edge < 0 for span in policy.protect for edge in span):
        # Spans count from the prompt's end: where that lies is not what a longer prompt would say.
        policy = dataclasses.replace(policy, protect=((5, 8),))
    # The longer and the shorter prompt in turns: each policy's programs are many.
    check_chooses_again(policy, 3, once(policy), [list(POLICIES).index(name) % len(LENGTHS)])


@pytest.mark.parametrize("name", EVICTING)
def test_a_question_is_cut_back_as_a_prompt_would_be(name):
    policy = EVICTING[name]
    check_chooses_again(policy, 40, policy)


def test_recent_rows_of_a_prompt_below_its_budget_fit_every_layer():
    """Half of the budget is more than a schedule gives its top layers."""
    keep = jaxkv.policies.Keep(recent=0.5)
    policy = jaxkv.CustomPolicy(
        budget=16, scorer=KeyNorm(), keep=keep, layers=LinearLayers(), every=4
    )
    session = jaxkv.Session(tiny.tiny(tiny.TWO_LAYERS), policy)
    grown = session.extend(session.prefill(tiny.prompts(5, (20, 3))), tiny.prompts(6, (17, 17)))
    after = session.recompress_sequences(grown)
    assert find_due_sequences(grown).all() and not find_due_sequences(after).any()
    assert (after.kept.mean(axis=(0, 2)) == 16).all()


def test_layers_ranked_by_scores_hold_what_always_stays_once_a_short_prompt_has_grown():
    """Layers' budgets are those of the prompt, here 3 rows each: fewer than the window."""
    policy = SnapKV(budget=1.0, window=8, every=4, layers=VarianceLayers())
    out = jaxkv.generate(
        tiny.tiny(GQA),
        tiny.prompts(5, (40, 3)),
        policy=policy,
        max_new_tokens=20,
        stop_at_eos=False,
    )
    assert not find_due_sequences(out.cache).any()
    # Compressed again for every fourth row beyond the 40 and the 8.
    assert out.cache.kept[:, 1].max() <= 8 + 3
    latest = [part.pos[-8:].tolist() for part in tiny.segments(out.cache) if part.sequence == 1]
    assert latest == [list(range(15, 23))] * (GQA.layers * GQA.kv_heads)


@dataclasses.dataclass(frozen=True)
class Counting(Merger):
    """Its threshold counts how often it was asked."""

    threshold_count = 1

    def merge_evicted_entries(self, k, v, kept, inside, mass, tau, key):
        return Merged(k, v, jnp.where(jnp.isneginf(tau), jnp.float32(1), tau + jnp.float32(1)))


def test_a_merger_learns_nothing_of_sequences_that_are_not_due():
    policy = jaxkv.CustomPolicy(budget=12, scorer=KeyNorm(), merge=Counting(), every=5)
    session = jaxkv.Session(tiny.tiny(GQA), policy)
    grown = session.extend(session.prefill(tiny.prompts(5, (40, 4))), tiny.prompts(6, (5, 5)))
    assert find_due_sequences(grown).tolist() == [True, False]
    tau = np.asarray(session.recompress_sequences(grown).state.tau)
    assert (tau[:, 0] == 2).all() and (tau[:, 1] == 1).all()


@pytest.mark.parametrize("name", ("snapkv-sinks", "streaming-rolling"))
def test_a_cache_never_exceeds_its_budget_and_n(name):
    policy, model = POLICIES[name], tiny.tiny(GQA)
    ids, more = (
        tiny.prompts(11, (50, 31)),
        np.random.default_rng(5).integers(0, tiny.VOCAB, (2, 3 * EVERY)),
    )
    cache, _, _ = tiny.run(model, ids, policy)
    seen = np.asarray([50, 31])
    for step in range(more.shape[1]):
        cache = feed(model, cache, more[:, step : step + 1].astype(np.int32), chunk=1)
        assert (cache.kept.mean(axis=(0, 2)) <= ROWS + EVERY).all()
        if find_due_sequences(cache).any():
            cache = jaxkv.Session(model, policy).recompress_sequences(cache)
            np.testing.assert_allclose(cache.kept.mean(axis=(0, 2)), ROWS, atol=0)
        for layer, row, head, _, _, pos in tiny.segments(cache):
            n = seen[row] + step + 1
            window = set(range(n - policy.build_policy_parts().keep.window, n))
            spans = {
                p for a, b in policy.protect for p in range(*slice(a, b).indices(int(seen[row])))
            }
            assert set(range(policy.build_policy_parts().keep.sinks)) | window | spans <= set(
                pos.tolist()
            ), (
                layer,
                head,
            )


@pytest.mark.parametrize(
    "policy",
    [
        D2O(budget=ROWS, official=True),
        AdaKV(base=SnapKV(budget=ROWS, window=8, layers=VarianceLayers(), every=EVERY)),
    ],
    ids=lambda policy: f"{type(policy).__name__}",
)
def test_generate_over_turns(policy):
    """Prompts shorter and longer than the budget, a question longer than the room, an answer of several blocks."""
    model = tiny.tiny(GQA)
    out = jaxkv.generate(
        model, tiny.prompts(12, (40, 9)), policy=policy, max_new_tokens=16, stop_at_eos=False
    )
    before = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(out.cache)]
    again_ = jaxkv.generate(
        model, tiny.prompts(13, (35, 3)), cache=out.cache, max_new_tokens=16, stop_at_eos=False
    )
    assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(out.cache)] == before
    assert np.asarray(again_.cache.seen).tolist() == [40 + 16 + 35 + 16, 9 + 16 + 3 + 16]
    for cache in (out.cache, again_.cache):
        over = cache.kept - np.asarray(cache.limit)
        assert over.max() <= (0 if policy.build_policy_parts().evicts_while_decoding else EVERY - 1)
        held = [set(pos.tolist()) for *_, pos in tiny.segments(cache)]
        assert all(
            len(rows) == count for rows, count in zip(held, cache.kept.reshape(-1), strict=True)
        )


def test_no_bound_is_taken_for_segments_that_a_later_choice_may_fill():
    """With one budget over layers and heads a segment may come to hold more rows than its prompt had."""
    assert (
        bound_segment_length(
            POLICIES["layerdefensive"].build_policy_parts(), 64, GQA.sliding_windows
        )
        is None
    )
    assert (
        bound_segment_length(
            EVICTING["globalbudget-h2o"].build_policy_parts(), 64, GQA.sliding_windows
        )
        == 65
    )


def test_the_shared_pool_of_d2o_holds_the_promised_rows_and_one_spare_each():
    config, rows = tiny.MODELS["gqa3"], 40
    out = jaxkv.generate(
        tiny.tiny(config),
        tiny.prompts(3, (128, 128)),
        policy=D2O(budget=rows),
        max_new_tokens=5,
        stop_at_eos=False,
    )
    cache, segments = out.cache, config.layers * config.kv_heads
    (pool,) = cache.pools
    assert pool.row_count == segments * (rows + 1)
    assert (
        len({int(n) for n in cache.kept[:, 0, 0]}) > 1
    )  # layers differ, and no layer's maximum was allocated
    each = 2 * config.head_dim * 4 + 4 + 4  # key, value, position, score
    tables = 4 * 2 * (3 * segments + 1)  # first row, length, limit; tokens seen
    state = 4 * 2 * (2 + config.layers + segments)  # prompt, budget; recent rows; thresholds
    assert cache.nbytes == 2 * pool.row_count * each + tables + state


@pytest.mark.parametrize(
    "policy",
    [
        D2O(budget=40, protect=((0, 30), (-5, 500))),
        SnapKV(budget=40, window=8, every=8, protect=((20, 1000),)),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_spans_end_with_the_prompt(policy):
    """One that reaches further protects the prompt's rows up to there, and nothing that is sampled."""
    model, prompt = tiny.tiny(GQA), tiny.prompts(1, [30])[0]
    spans = [range(*slice(*span).indices(len(prompt))) for span in policy.protect]
    out = jaxkv.generate(model, prompt, policy=policy, max_new_tokens=40, stop_at_eos=False)
    seen, heads = (
        int(out.cache.seen[0]),
        [head for layer in tiny.kept(out.cache) for head in layer[0]],
    )
    assert all({*span} <= {*head} for span in spans for head in heads)
    assert out.cache.kept.mean() <= 40 + 8 and max(map(max, heads)) == seen - 1
    assert any(not {*range(30, 38)} <= {*head} for head in heads), "the first that were sampled"


def test_layers_of_a_pyramid_hold_their_protected_rows_again_and_again():
    model, prompt = tiny.tiny(GQA), tiny.prompts(1, [80])[0]
    policy = PyramidKV(budget=40, window=4, every=8, protect=((0, 25),))
    out = jaxkv.generate(model, prompt, policy=policy, max_new_tokens=20, stop_at_eos=False)
    assert len(out.tokens) == 20 and out.cache.kept.mean() <= 40 + 8
    assert all({*range(25)} <= set(head) for layer in tiny.kept(out.cache) for head in layer[0])


def test_batches_of_short_and_long_prompts_compile_once():
    model, programs = tiny.tiny(GQA), []
    policy = SnapKV(budget=24, window=8, every=16)
    for seed, lengths in enumerate([(60, 20), (61, 21), (63, 19)]):
        prompts = tiny.prompts(seed, lengths)
        out = jaxkv.generate(model, prompts, policy=policy, max_new_tokens=40, stop_at_eos=False)
        programs.append(out.stats.compiled_programs)
    # One more size of the pools that hold sequences below their budget may come up.
    assert programs[0] > 0 and programs[-1] == 0 and sum(programs[1:]) <= 11, programs


@pytest.mark.parametrize(
    "policy", (GlobalBudget(base=H2O(budget=20)), D2O(budget=20)), ids=("heads", "layers")
)
def test_what_segments_hold_after_a_question_stays_below_the_bound_compiled_in(policy):
    """Heads that compete for a longer text's rows may get more than any prompt gives them."""
    model = tiny.tiny(tiny.TWO_LAYERS)
    session, beyond_it = jaxkv.Session(model, policy), False
    for seed in range(4):
        cache = session.prefill(tiny.prompts(seed, (14, 9)), new=4)
        bound = create_cache_spec(model.flat_decoder, cache).widest
        question = session.extend(cache, tiny.prompts(9 - seed, (90, 70)))
        assert create_cache_spec(model.flat_decoder, question).widest is None, (
            "entries have been added, and none has gone for them"
        )
        cache, _ = session.sample(session.extend(cache, tiny.prompts(9 - seed, (90, 70)), new=4), 2)
        found, holds = create_cache_spec(model.flat_decoder, cache).widest, int(cache.kept.max())
        assert holds < bound if found is not None else holds >= bound
        beyond_it |= holds >= bound
    assert beyond_it == (not policy.build_policy_parts().heads.is_uniform), (
        "some text must have shown it"
    )

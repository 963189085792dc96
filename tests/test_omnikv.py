"""OmniKV: filter layers choose, the others read what was chosen, on the device or from host memory."""

import dataclasses
from fractions import Fraction

import jax
import numpy as np
import pytest
import running
import tiny
from omnikv_cases import CONFIG, FILTERS, LENGTHS, both, feed, omni, walk

import jaxkv
from jaxkv import BrutalOffload, FullKV, OmniKV
from jaxkv.cache import host_store as banking
from jaxkv.engine import offloaded_decode
from jaxkv.engine.plan import plan_prefill
from jaxkv.policies import QueryWeighting
from jaxkv.policies.reads import WHOLE, find_unfiltered_layers, map_layers_to_filters

LLAMA_8B, YI, LLAMA_70B = ((2, 8, 18), 32), ((6, 11, 30), 48), ((4, 19, 41), 80)

# --- roles and sizes -------------------------------------------------------------------------------------------------


def test_roles_are_the_papers():
    filters, layers = LLAMA_8B
    assert find_unfiltered_layers(filters, 1, layers) == (0, 1, 2, 3, 8, 9, 18, 19)
    reads = map_layers_to_filters(filters, 1, layers)
    assert [reads[layer] for layer in (4, 7, 10, 17, 20, 31)] == [2, 2, 8, 8, 18, 18]
    assert reads.count(WHOLE) == 8
    # A layer behind one filter may be the next; the top may be a filter; none may wait.
    assert find_unfiltered_layers((0, 1), 2, 5) == (0, 1, 2, 3)
    assert find_unfiltered_layers((3,), 1, 4) == (0, 1, 2, 3)
    assert find_unfiltered_layers((0, 2), 0, 5) == (0, 2)


@pytest.mark.parametrize(
    ("shape", "share"), [(LLAMA_8B, (1, 4)), (YI, (1, 4)), (LLAMA_70B, (1, 8))], ids=str
)
def test_whole_layers_hold_the_share_the_paper_says(shape, share):
    filters, layers = shape
    expected = Fraction(*share)
    assert Fraction(len(find_unfiltered_layers(filters, 1, layers)), layers) == expected
    assert Fraction(2 * len(filters) + filters[0], layers) == expected


@pytest.mark.parametrize(
    ("shape", "mem", "share"),
    [(LLAMA_8B, 0.3, 0.0667), (YI, 0.3, 0.0667), (LLAMA_70B, 0.2, 0.0857)],
    ids=str,
)
def test_mem_is_solved_for_the_budget(shape, mem, share):
    filters, layers = shape
    tokens = (
        OmniKV(filter_layers=filters, mem=mem)
        .build_policy_parts()
        .read.count_attended_tokens(np.asarray([128_000, 739]), layers)
    )
    assert tokens[0] / 128_000 == pytest.approx(share, abs=5e-5)
    whole = Fraction(len(find_unfiltered_layers(filters, 1, layers)), layers)
    assert tokens[1] == int(739 * (Fraction(repr(mem)) - whole) / (1 - whole))


def test_tokens_read_are_the_budget_at_most_the_prompt_and_at_least_the_window():
    lengths = np.asarray([100, 7])
    assert omni(12).build_policy_parts().read.count_attended_tokens(lengths, 8).tolist() == [12, 7]
    assert omni(0.1).build_policy_parts().read.count_attended_tokens(lengths, 8).tolist() == [10, 1]
    assert omni(0.04, selector="uniform").build_policy_parts().read.count_attended_tokens(
        lengths, 8
    ).tolist() == [16, 7]


@both
def test_bytes_are_the_plans(offload):
    config = tiny.shape(layers=32, kv_heads=2, group=2, dim=8)
    model, policy = tiny.tiny(config), OmniKV(filter_layers=(2, 8, 18), budget=16, offload=offload)
    ids = tiny.prompts(1, (256, 200))
    cache = jaxkv.prefill(model, ids, policy=policy)
    needed = plan_prefill(config, policy, [256, 200])
    assert cache.nbytes == needed.cache_bytes
    assert cache.host_nbytes == needed.host_bytes
    rows = sum(leaf.nbytes for pool in cache.pools for leaf in (pool.k, pool.v))
    token = 2 * config.kv_heads * config.head_dim * 4
    full = 32 * 2 * 256 * token
    if not offload:
        assert rows == full and needed.host_bytes == needed.loaded_bytes == 0
        return
    spare = 24 * 2 * token
    assert rows == full // 4 + spare and needed.host_bytes == full * 3 // 4
    kinds = {each.sharding.memory_kind for each in cache.host_store.rows}
    assert kinds == {"pinned_host"}
    # The widest stage is the twelve layers above the last filter.
    assert needed.loaded_bytes == 12 * 2 * 16 * token


# --- the same answers ------------------------------------------------------------------------------------------------


def test_a_budget_of_the_prompt_gives_the_full_cache():
    selector = QueryWeighting.EXPONENTIAL
    model, ids = tiny.tiny(CONFIG), tiny.prompts(2, LENGTHS)
    full, logits, _ = tiny.run(model, ids, FullKV())
    cache, mine, _ = tiny.run(model, ids, omni(64, selector=selector))
    assert running.gap(mine, logits) < 1e-5
    assert running.gap(feed(model, cache, walk(6))[0], feed(model, full, walk(6))[0]) < 1e-4


def test_offloading_changes_no_token():
    model, ids = tiny.tiny(CONFIG), tiny.prompts(3, LENGTHS)
    out = [
        jaxkv.generate(
            model,
            ids,
            policy=omni(20, selector=QueryWeighting.UNIFORM, offload=offload),
            max_new_tokens=12,
            stop_at_eos=False,
        )
        for offload in (False, True)
    ]
    assert [each.tokens.tolist() for each in out[0]] == [each.tokens.tolist() for each in out[1]]
    full = jaxkv.generate(model, ids, max_new_tokens=12, stop_at_eos=False)
    assert [each.tokens.tolist() for each in out[0]] != [each.tokens.tolist() for each in full]
    assert out[1].stats.host_bytes > 0 and out[0].stats.host_bytes == 0
    assert out[0].stats.filter_layers == FILTERS


def test_offloading_changes_no_ending():
    """A sequence ends before the other, tokens are sampled by chance, and the cache outgrows its first block."""
    ids, options = tiny.prompts(17, LENGTHS), {"max_new_tokens": 80, "key": jax.random.key(2)}
    options["sampling"] = jaxkv.Sampling(temperature=1.5)
    free = jaxkv.generate(tiny.tiny(CONFIG), ids, policy=omni(12), stop_at_eos=False, **options)
    free = [each.tokens for each in free]
    end = next(token for token in free[0][4:].tolist() if token not in free[1].tolist())
    model, out = tiny.tiny(dataclasses.replace(CONFIG, eos=(end,))), []
    for offload in (False, True):
        out.append(jaxkv.generate(model, ids, policy=omni(12, offload=offload), **options))
        assert out[-1][0].tokens.tolist() == free[0][: free[0].tolist().index(end) + 1].tolist()
        assert out[-1][1].tokens.tolist() == free[1].tolist()
        assert np.asarray(out[-1].cache.seen).tolist() == [
            LENGTHS[0] + len(out[-1][0].tokens) - 1,
            LENGTHS[1] + 80,
        ]
    on_device, away = (each.cache for each in out)
    assert running.gap(feed(model, away, walk(3))[0], feed(model, on_device, walk(3))[0]) < 1e-4


def test_loading_whole_layers_changes_nothing():
    model, ids = tiny.tiny(CONFIG), tiny.prompts(4, LENGTHS)
    full, logits, _ = tiny.run(model, ids, FullKV())
    for ahead in (0, 2):
        cache, mine, _ = tiny.run(model, ids, BrutalOffload(resident_layers=3, ahead=ahead))
        assert running.gap(mine, logits) < 1e-5
        assert running.gap(feed(model, cache, walk(4))[0], feed(model, full, walk(4))[0]) < 1e-4


def test_questions_read_everything_and_forks_share_the_bank():
    model, document = tiny.tiny(CONFIG), tiny.prompts(5, (50,))[0]
    cache = jaxkv.prefill(model, document, policy=omni(64, offload=True))
    questions = [[1, 2, 3], [9], [20, 21]]
    before = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(cache)]
    forked = jaxkv.generate(model, questions, cache=cache, max_new_tokens=6, stop_at_eos=False)
    whole = jaxkv.generate(
        model, [document + each for each in questions], max_new_tokens=6, stop_at_eos=False
    )
    assert [each.tokens.tolist() for each in forked] == [each.tokens.tolist() for each in whole]
    assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(cache)] == before
    assert forked.cache.host_store is cache.host_store


# --- prompts in chunks -----------------------------------------------------------------------------------------------


def test_chunks_that_choose_everything_give_the_full_cache():
    model, ids = tiny.tiny(CONFIG), tiny.prompts(12, (150, 70))
    full = jaxkv.prefill(model, ids)
    cache = jaxkv.prefill(
        model, ids, policy=omni(160, prefill_ratio=8, prefill_chunk=32, offload=True)
    )
    assert running.gap(feed(model, cache, walk(3))[0], feed(model, full, walk(3))[0]) < 1e-4


def test_chunks_that_choose_little_change_upper_layers_only():
    model, ids = tiny.tiny(CONFIG), tiny.prompts(13, (150, 70))
    full = {
        (layer, row, head): k
        for layer, row, head, k, _, _ in tiny.segments(jaxkv.prefill(model, ids))
    }
    cache = jaxkv.prefill(model, ids, policy=omni(12, prefill_ratio=0.25, prefill_chunk=32))
    assert np.asarray(cache.seen).tolist() == [150, 70]
    for layer, row, head, k, _, pos in tiny.segments(cache):
        theirs = full[layer, row, head]
        assert pos.tolist() == list(range(len(theirs)))
        # Layers up to the first one that reads a choice see what they would have seen; above, the first chunk does.
        assert running.gap(k[:32], theirs[:32]) < 1e-4
        assert (running.gap(k, theirs) < 1e-4) == (layer <= 3)


def test_chunks_are_compiled_once_and_named_as_they_run():
    # Lengths of a bucket that no other test prefills.
    model, policy = tiny.tiny(CONFIG), omni(12, prefill_ratio=0.5, prefill_chunk=48)
    first, again = (
        jaxkv.generate(
            model,
            tiny.prompts(seed, (500, 400)),
            policy=policy,
            max_new_tokens=2,
            stop_at_eos=False,
        ).stats
        for seed in (19, 20)
    )
    assert again.compile_seconds < first.compile_seconds / 5
    assert first.prefill_seconds + first.decode_seconds >= first.compile_seconds > 0
    assert first.attention == "xla"
    with pytest.raises(ValueError, match="implementation=.*cuDNN"):
        jaxkv.prefill(model, [1, 2, 3], policy=policy, implementation="cudnn")


# --- transfers and memory --------------------------------------------------------------------------------------------


def test_each_filter_costs_one_transfer_of_the_bytes_computed(monkeypatch):
    model, ids = tiny.tiny(CONFIG), tiny.prompts(14, LENGTHS)
    cache, _, _ = tiny.run(model, ids, omni(20, selector=QueryWeighting.UNIFORM, offload=True))
    feed(model, cache, walk(5))  # A stretch's layer numbers go to the device once.
    sent, original = [], jax.device_put

    def counting(what, *rest):
        sent.append(what.nbytes)
        return original(what, *rest)

    monkeypatch.setattr(banking.jax, "device_put", counting)
    session = jaxkv.Session(model, cache.policy)
    feed(model, cache, walk(5), session=session)
    token = 2 * CONFIG.kv_heads * CONFIG.head_dim * 4
    assert sent == [2 * 20 * token, 2 * 20 * token] * 5
    assert (session.question_traffic.transfers, session.question_traffic.bytes) == (
        len(sent),
        sum(sent),
    )


def test_stats_report_transfers_and_bytes_of_a_step():
    model = tiny.tiny(CONFIG)
    policy = omni(20, selector=QueryWeighting.UNIFORM, offload=True)
    first = jaxkv.generate(
        model, tiny.prompts(14, LENGTHS), policy=policy, max_new_tokens=6, stop_at_eos=False
    )
    again = jaxkv.generate(
        model, [[1, 2, 3], [4, 5]], cache=first.cache, max_new_tokens=6, stop_at_eos=False
    )
    token = 2 * CONFIG.kv_heads * CONFIG.head_dim * 4
    for stats in (first.stats, again.stats):
        assert (stats.decode_steps, stats.transfers_per_step) == (6, len(FILTERS))
        assert stats.transferred_bytes_per_step == 2 * 2 * 20 * token
    # A prompt on top of the cache reads the whole of both layers that wait.
    slots = first.cache.host_store.rows[0].shape[1]
    assert (first.stats.loaded_bytes, again.stats.loaded_bytes) == (0, 2 * 2 * slots * token)


def test_no_program_of_a_step_holds_a_whole_sparse_layer(monkeypatch):
    config = tiny.shape(layers=8, kv_heads=2, group=3, dim=16)
    model = tiny.tiny(config)
    cache, _, needed = tiny.run(model, tiny.prompts(15, (440, 400)), omni(8, offload=True))
    whole, seen, original = (
        2 * 2 * needed.padded_len * config.kv_heads * config.head_dim * 4,
        [],
        offloaded_decode.run_layer_group,
    )

    def compiling(pools, given, *rest, **static):
        leaves, tree = jax.tree.flatten((pools, given, *rest))
        run = jax.jit(lambda leaves: original(*jax.tree.unflatten(tree, leaves), **static))
        memory = run.lower(leaves).compile().memory_analysis()
        # A filter's own layer and those that read everything are whole by right.
        right = (pools, given.blocks, given.filter)
        others = memory.argument_size_in_bytes - sum(leaf.nbytes for leaf in jax.tree.leaves(right))
        assert memory.temp_size_in_bytes + others < whole
        assert given.loaded is None or all(
            leaf.nbytes < whole // 8 for leaf in jax.tree.leaves(pools)
        )
        seen.append((given.filter is not None, given.loaded is not None))
        return original(pools, given, *rest, **static)

    monkeypatch.setattr(offloaded_decode, "run_layer_group", compiling)
    feed(model, cache, walk(1))
    assert seen == [(True, False), (False, False), (True, True), (False, False), (False, True)]

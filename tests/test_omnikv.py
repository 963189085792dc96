"""OmniKV: filter layers choose, the others read what was chosen, on the device or from host memory."""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import running
import tiny
from omnikv_cases import CONFIG, FILTERS, LENGTHS, both, feed, omni, selectors, walk

import jaxkv
from jaxkv import BrutalOffload, FullKV, OmniKV, SnapKV
from jaxkv import bank as banking
from jaxkv.bank import Traffic
from jaxkv.models import staged
from jaxkv.models.choosing import Chosen
from jaxkv.models.moving import Live, program_for
from jaxkv.policies import Selector
from jaxkv.policies.reading import WHOLE, sources, whole_layers

LLAMA_8B, YI, LLAMA_70B = ((2, 8, 18), 32), ((6, 11, 30), 48), ((4, 19, 41), 80)

# --- roles and sizes -------------------------------------------------------------------------------------------------


def test_roles_are_the_papers():
    filters, layers = LLAMA_8B
    assert whole_layers(filters, 1, layers) == (0, 1, 2, 3, 8, 9, 18, 19)
    reads = sources(filters, 1, layers)
    assert [reads[layer] for layer in (4, 7, 10, 17, 20, 31)] == [2, 2, 8, 8, 18, 18]
    assert reads.count(WHOLE) == 8
    # A layer behind one filter may be the next; the top may be a filter; none may wait.
    assert whole_layers((0, 1), 2, 5) == (0, 1, 2, 3)
    assert whole_layers((3,), 1, 4) == (0, 1, 2, 3)
    assert whole_layers((0, 2), 0, 5) == (0, 2)


@pytest.mark.parametrize(("shape", "share"), [(LLAMA_8B, (1, 4)), (YI, (1, 4)), (LLAMA_70B, (1, 8))], ids=str)
def test_whole_layers_hold_the_share_the_paper_says(shape, share):
    filters, layers = shape
    expected = Fraction(*share)
    assert Fraction(len(whole_layers(filters, 1, layers)), layers) == expected
    assert Fraction(2 * len(filters) + filters[0], layers) == expected


@pytest.mark.parametrize(
    ("shape", "mem", "share"), [(LLAMA_8B, 0.3, 0.0667), (YI, 0.3, 0.0667), (LLAMA_70B, 0.2, 0.0857)], ids=str
)
def test_mem_is_solved_for_the_budget(shape, mem, share):
    filters, layers = shape
    tokens = OmniKV(filter_layers=filters, mem=mem).tokens(np.asarray([128_000, 739]), layers)
    assert tokens[0] / 128_000 == pytest.approx(share, abs=5e-5)
    whole = Fraction(len(whole_layers(filters, 1, layers)), layers)
    assert tokens[1] == int(739 * (Fraction(repr(mem)) - whole) / (1 - whole))


def test_tokens_read_are_the_budget_at_most_the_prompt_and_at_least_the_window():
    lengths = np.asarray([100, 7])
    assert omni(12).tokens(lengths, 8).tolist() == [12, 7]
    assert omni(0.1).tokens(lengths, 8).tolist() == [10, 1]
    assert omni(4, selector="uniform").tokens(lengths, 8).tolist() == [16, 7]


@both
def test_bytes_are_the_plans(offload):
    config = tiny.shape(layers=32, kv_heads=2, group=2, dim=8)
    model, policy = tiny.tiny(config), OmniKV(filter_layers=(2, 8, 18), budget=16, offload=offload)
    ids = tiny.prompts(1, (256, 200))
    cache = jaxkv.prefill(model, ids, policy=policy)
    needed = jaxkv.plan(config, policy, [256, 200])
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
    kinds = {each.sharding.memory_kind for each in cache.bank.rows}
    assert kinds == {"pinned_host"}
    # The widest stage is the twelve layers above the last filter.
    assert needed.loaded_bytes == 12 * 2 * 16 * token


# --- the same answers ------------------------------------------------------------------------------------------------


@both
@selectors
def test_a_budget_of_the_prompt_gives_the_full_cache(selector, offload):
    model, ids = tiny.tiny(CONFIG), tiny.prompts(2, LENGTHS)
    full, logits, _ = tiny.run(model, ids, FullKV())
    cache, mine, _ = tiny.run(model, ids, omni(64, selector=selector, offload=offload))
    assert running.gap(mine, logits) < 1e-5
    assert running.gap(feed(model, cache, walk(6))[0], feed(model, full, walk(6))[0]) < 1e-4


@both
def test_a_budget_of_the_prompt_gives_the_full_cache_on_the_real_model(offload):
    model, ids = running.smollm2(), running.archive("parity/p600.npz")["input_ids"][:130].tolist()
    policy = OmniKV(filter_layers=(2, 9, 17), budget=130, offload=offload)
    expected, logits = running.prefill(model, [ids], FullKV())
    cache, mine = running.prefill(model, [ids], policy)
    assert running.gap(mine, logits) < 2e-3
    assert running.gap(feed(model, cache, [[29], [216]])[0], feed(model, expected, [[29], [216]])[0]) < 2e-3


@selectors
def test_offloading_changes_no_token(selector):
    model, ids = tiny.tiny(CONFIG), tiny.prompts(3, LENGTHS)
    out = [
        jaxkv.generate(
            model, ids, policy=omni(12, selector=selector, offload=offload), max_new_tokens=64, stop_at_eos=False
        )
        for offload in (False, True)
    ]
    assert [each.tolist() for each in out[0].tokens] == [each.tolist() for each in out[1].tokens]
    full = jaxkv.generate(model, ids, max_new_tokens=64, stop_at_eos=False)
    assert [each.tolist() for each in out[0].tokens] != [each.tolist() for each in full.tokens]
    assert out[1].stats.host_bytes > 0 and out[0].stats.host_bytes == 0
    assert out[0].stats.filter_layers == FILTERS


def test_loading_whole_layers_changes_nothing():
    model, ids = tiny.tiny(CONFIG), tiny.prompts(4, LENGTHS)
    full, logits, _ = tiny.run(model, ids, FullKV())
    for ahead in (0, 4):
        cache, mine, _ = tiny.run(model, ids, BrutalOffload(resident_layers=3, ahead=ahead))
        assert running.gap(mine, logits) < 1e-5
        assert running.gap(feed(model, cache, walk(4))[0], feed(model, full, walk(4))[0]) < 1e-4


@both
def test_questions_read_everything_and_forks_share_the_bank(offload):
    model, document = tiny.tiny(CONFIG), tiny.prompts(5, (50,))[0]
    cache = jaxkv.prefill(model, document, policy=omni(64, offload=offload))
    questions = [[1, 2, 3], [9], [20, 21]]
    before = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(cache)]
    forked = jaxkv.generate(model, questions, cache=cache, max_new_tokens=6, stop_at_eos=False)
    whole = jaxkv.generate(model, [document + each for each in questions], max_new_tokens=6, stop_at_eos=False)
    assert [each.tolist() for each in forked.tokens] == [each.tolist() for each in whole.tokens]
    assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(cache)] == before
    assert forked.cache.bank is cache.bank


def test_sixteen_bits_choose_as_float32_does():
    model = tiny.tiny(CONFIG)
    narrow = tiny.tiny(CONFIG, dtype="bfloat16")
    ids = tiny.prompts(6, LENGTHS)
    wide, half = (
        jaxkv.generate(each, ids, policy=omni(20), max_new_tokens=8, stop_at_eos=False) for each in (model, narrow)
    )
    again = jaxkv.generate(narrow, ids, policy=omni(64), max_new_tokens=8, stop_at_eos=False)
    full = jaxkv.generate(narrow, ids, policy=FullKV(), max_new_tokens=8, stop_at_eos=False)
    assert [each.tolist() for each in again.tokens] == [each.tolist() for each in full.tokens]
    assert half.cache.pools[0].k.dtype == jnp.bfloat16
    assert [len(each) for each in half.tokens] == [len(each) for each in wide.tokens]


# --- prompts in chunks -----------------------------------------------------------------------------------------------


@both
def test_chunks_that_choose_everything_give_the_full_cache(offload):
    model, ids = tiny.tiny(CONFIG), tiny.prompts(12, (150, 70))
    full = jaxkv.prefill(model, ids)
    cache = jaxkv.prefill(model, ids, policy=omni(160, prefill_ratio=8, prefill_chunk=32, offload=offload))
    assert running.gap(feed(model, cache, walk(3))[0], feed(model, full, walk(3))[0]) < 1e-4


def test_chunks_that_choose_little_change_upper_layers_only():
    model, ids = tiny.tiny(CONFIG), tiny.prompts(13, (150, 70))
    full = {(layer, row, head): k for layer, row, head, k, _, _ in tiny.segments(jaxkv.prefill(model, ids))}
    cache = jaxkv.prefill(model, ids, policy=omni(12, prefill_ratio=0.25, prefill_chunk=32))
    assert np.asarray(cache.seen).tolist() == [150, 70]
    for layer, row, head, k, _, pos in tiny.segments(cache):
        theirs = full[layer, row, head]
        assert pos.tolist() == list(range(len(theirs)))
        # Layers up to the first one that reads a choice see what they would have seen; above, the first chunk does.
        assert running.gap(k[:32], theirs[:32]) < 1e-4
        assert (running.gap(k, theirs) < 1e-4) == (layer <= 3)


# --- transfers and memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("selector", (Selector.LAST, Selector.UNIFORM), ids=lambda each: each.value)
def test_each_filter_costs_one_transfer_of_the_bytes_computed(selector, monkeypatch):
    model, ids = tiny.tiny(CONFIG), tiny.prompts(14, LENGTHS)
    cache, _, _ = tiny.run(model, ids, omni(20, selector=selector, offload=True))
    sent, original = [], jax.device_put

    def counting(what, *rest):
        sent.append(what.nbytes)
        return original(what, *rest)

    monkeypatch.setattr(banking.jax, "device_put", counting)
    traffic = Traffic()
    feed(model, cache, walk(5), traffic=traffic)
    token = 2 * CONFIG.kv_heads * CONFIG.head_dim * 4
    assert sent == [2 * 20 * token, 2 * 20 * token] * 5
    assert (traffic.transfers, traffic.bytes) == (len(sent), sum(sent))


def test_no_program_of_a_step_holds_a_whole_sparse_layer():
    config = tiny.shape(layers=8, kv_heads=2, group=3, dim=16)
    model, slots = tiny.tiny(config), 448
    cache, _, needed = tiny.run(model, tiny.prompts(15, (440, 400)), omni(8, offload=True), room=4)
    flat, program = tiny.flat(model), program_for(tiny.flat(model), cache)
    live = Live.of(cache)
    whole = 2 * 2 * needed.slots * config.kv_heads * config.head_dim * 4
    for part in staged.stretches(program.reading, config.layers, whole=False):
        if not part.loaded:
            continue
        given = (
            tuple(flat.blocks[layer] for layer in part.layers),
            tuple(cache.pools[layer] for layer in part.layers),
            (None,) * len(part.layers),
            dataclasses.replace(live, pools=()),
            jnp.zeros((2, 1, config.embed)),
            jnp.zeros((2, len(part.layers), 8, 2, config.kv_heads, config.head_dim)),
            Chosen(positions=jnp.zeros((2, 8), jnp.int32), count=jnp.full((2,), 8, jnp.int32)),
            jnp.ones((2,), jnp.int32),
        )
        leaves, tree = jax.tree.flatten(given)

        def run(leaves, tree=tree, layers=part.layers):
            given = jax.tree.unflatten(tree, leaves)
            return staged.run_stretch(*given, None, program=program, layers=layers, ask=None)

        lowered = jax.jit(run).lower(leaves)
        memory = lowered.compile().memory_analysis()
        weights = sum(leaf.nbytes for layer in part.layers for leaf in flat.blocks[layer])
        assert memory.temp_size_in_bytes + memory.argument_size_in_bytes - weights < whole
    assert slots <= needed.slots


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"filter_layers": ()}, "filter_layers"),
        ({"filter_layers": (4, 2)}, "filter_layers"),
        ({"filter_layers": (-1,)}, "filter_layers"),
        ({"budget": 0}, "budget"),
        ({"budget": 1.5}, "budget"),
        ({"budget": 10, "mem": 0.3}, "mem"),
        ({"mem": 0.0}, "mem"),
        ({"selector": "first"}, "selector"),
        ({"window": 0}, "window"),
        ({"adjacent": -1}, "adjacent"),
        ({"prefill_ratio": 0}, "prefill_ratio"),
        ({"prefill_chunk": 300}, "prefill_chunk"),
        ({"every": 5}, "every"),
        ({"protect": ((0, 3),)}, "protect"),
        ({"offload": True, "include_generated": True}, "include_generated"),
        ({"offload": True, "base": SnapKV(budget=40)}, "offload"),
        ({"prefill_ratio": 2, "base": SnapKV(budget=40)}, "prefill_ratio"),
        ({"base": jaxkv.H2O(budget=40)}, "base"),
        ({"base": FullKV()}, "base"),
        ({"base": OmniKV(base=SnapKV(budget=40))}, "base"),
        ({"prefill_ratio": float("inf")}, "prefill_ratio"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        OmniKV(**{"filter_layers": FILTERS, **options})


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (OmniKV(), "filter_layers=None"),
        (OmniKV(filter_layers=(2, 8)), "layers are 0 to 6"),
        (OmniKV(filter_layers=(6,)), "no layer is left"),
        (OmniKV(filter_layers=FILTERS, mem=0.5), "mem=0.5"),
        (BrutalOffload(resident_layers=7), "resident_layers=7"),
    ],
    ids=str,
)
def test_policies_that_the_model_cannot_honour_are_refused(policy, message):
    with pytest.raises(ValueError, match=message):
        jaxkv.prefill(tiny.tiny(CONFIG), [1, 2, 3], policy=policy)

"""Heads that compete for rows on a mesh: no device's hold more than its pools have room for, and none is lost."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from meshes import mesh_of, model_of, positions, prompts

import jaxkv
from jaxkv.policies import AdaptiveHeads, EntropyLayers, ProtectedHeads, topk
from jaxkv.policies.head_budgets import ScoredEntries, limit_entries_per_device

BUDGET, WINDOW, LENGTHS = 24, 8, (61, 37)
# Scores of what is no candidate.
NONE = -1.0
BASES = {
    "layer": jaxkv.SnapKV(budget=BUDGET, window=WINDOW),
    "shared": jaxkv.PyramidKV(budget=BUDGET, window=WINDOW, layers=EntropyLayers()),
    "critical": jaxkv.CriticalKV(base=jaxkv.SnapKV(budget=BUDGET, window=WINDOW)),
}


def oracle(chosen, scores, floor, most, devices):
    """The same with plain loops, for one sequence: the mask, and rows given up."""
    heads, slots = scores.shape
    mask, mine = chosen.copy(), heads // devices
    best = lambda cells: sorted(cells, key=lambda at: (-scores[at], at))  # noqa: E731
    given = 0
    for device in range(devices):
        of = range(device * mine, (device + 1) * mine)
        loose = [
            cell
            for head in of
            for cell in best((head, s) for s in range(slots) if chosen[head, s])[floor:]
        ]
        for cell in best(loose)[::-1][: max(0, int(chosen[list(of)].sum()) - most)]:
            mask[cell] = False
            given += 1
    stayed = mask.copy()
    left = best(
        (h, s)
        for h in range(heads)
        for s in range(slots)
        if not stayed[h, s] and scores[h, s] > NONE
    )
    for allowed in (most, slots * heads):
        for head, slot in left:
            first = head // mine * mine
            full = mask[first : first + mine].sum() >= allowed
            if mask.sum() < chosen.sum() and not full:
                mask[head, slot] = True
    return mask, given


def test_a_device_without_rows_leaves_the_others_more():
    """As of a cache that another mesh has made: totals are exact, whatever the capacity."""
    rng = np.random.default_rng(0)
    scores = rng.random((4, 30))
    scores[2:, 4:] = NONE
    chosen = np.zeros((4, 30), bool)
    chosen[:2, :15], chosen[2:, :3] = True, True
    keys = jnp.where(
        jnp.asarray(scores > NONE),
        topk.encode_sort_keys(jnp.asarray(scores, jnp.float32)),
        jnp.uint32(0),
    )
    of = [jnp.asarray([each], jnp.int32) for each in (0, 18)]
    mask, moved = limit_entries_per_device(jnp.asarray(chosen)[None], keys[None], *of, 2)
    wanted, given = oracle(chosen, scores, 0, 18, 2)
    np.testing.assert_array_equal(np.asarray(mask)[0], wanted)
    assert int(moved[0]) == given == 12 and wanted.sum() == 36 and wanted[2:].sum() == 8


@pytest.mark.parametrize(
    ("levels", "heads"), [(5, AdaptiveHeads(alpha=0.1)), (10_000, ProtectedHeads(alpha=0.3))]
)
def test_the_weakest_rows_of_full_devices_go_and_the_best_of_the_others_come(heads, levels):
    """Scores in few levels tie: among equals the lowest head stays and comes first, then the lowest position."""
    rng, fired = np.random.default_rng(3), 0
    for capacity, devices in [(1.0, 2), (1.25, 4), (1.5, 2), (1.1, 4)]:
        # Heads of different strength, so that a device wants too many.
        scores = np.floor(
            rng.random((2, 4, 30)) * levels * np.asarray([1.0, 0.9, 0.3, 0.5])[:, None]
        )
        base, always_kept = np.asarray([9, 6]), np.asarray([2, 0])
        given = [jnp.asarray(each, jnp.int32) for each in (base, always_kept)]
        rows = jnp.asarray(scores, jnp.float32), jnp.ones((2, 1, 30), bool)
        chosen = heads.choose_entries(ScoredEntries(*rows, *given))
        mine = 4 // devices
        most, floor = (
            np.floor(capacity * mine * base + 1e-9).astype(int),
            np.asarray(heads.count_guaranteed_entries(*given)),
        )
        keys = topk.encode_sort_keys(jnp.asarray(scores, jnp.float32))
        mask, moved = limit_entries_per_device(
            chosen, keys, jnp.asarray(floor), jnp.asarray(most, jnp.int32), devices
        )
        for row in range(2):
            wanted, gone = oracle(
                np.asarray(chosen)[row], scores[row], floor[row], most[row], devices
            )
            np.testing.assert_array_equal(np.asarray(mask)[row], wanted)
            assert int(moved[row]) == gone and wanted.sum() == 4 * base[row]
            assert wanted.reshape(devices, -1).sum(axis=1).max() <= most[row]
            fired += gone > 0
    assert fired > 2


def adakv(base, capacity, **options):
    return jaxkv.AdaKV(base=BASES[base], capacity=capacity, alpha=0.0, **options)


@functools.cache
def alone(base):
    return jaxkv.prefill(model_of(8), prompts(5, LENGTHS), policy=adakv(base, 1.5), progress=False)


def per_device(cache, devices):
    """Rows of each device's heads `[L, B, devices]`."""
    kept = cache.kept
    return kept.reshape(*kept.shape[:2], devices, -1).sum(axis=3)


@pytest.mark.parametrize("base, data, model", [("shared", 2, 4), ("critical", 1, 8)])
def test_prompts_within_the_capacity(base, data, model):
    """Totals are those of one device, rows move where a device is full alone, and what they were is counted."""
    policy = adakv(base, 1.125)
    there = jaxkv.prefill(
        model_of(8), prompts(5, LENGTHS), policy=policy, mesh=mesh_of(data, model), progress=False
    )
    here, free = alone(base), adakv(base, 8.0)
    np.testing.assert_array_equal(there.kept.sum(axis=2), here.kept.sum(axis=2))
    most = np.floor(1.125 * here.kept.sum(axis=2) / model + 1e-9)[..., None]
    assert (per_device(there, model) <= most).all()
    beyond = np.maximum(per_device(here, model) - most, 0)
    np.testing.assert_array_equal(np.asarray(there.tally.moved), beyond.sum(axis=(0, 2)))
    assert beyond.any() and not beyond.all()
    mine, theirs = positions(there), positions(here)
    for (layer, row, head), rows in mine.items():
        full = beyond[layer, row, head // (8 // model)] > 0
        more, less = (theirs[layer, row, head], rows) if full else (rows, theirs[layer, row, head])
        assert set(less) <= set(more)
    roomy = jaxkv.prefill(
        model_of(8), prompts(5, LENGTHS), policy=free, mesh=mesh_of(data, model), progress=False
    )
    assert positions(roomy) == theirs and roomy.tally.moved is None
    assert there.nbytes < roomy.nbytes


def test_compressed_again_within_the_capacity():
    """Pools are sized by what a device may hold: other prompts of the same lengths find every program there."""
    policy = jaxkv.AdaKV(
        base=jaxkv.SnapKV(budget=BUDGET, window=WINDOW, every=4), capacity=1.125, alpha=0.0
    )
    options = {"policy": policy, "max_new_tokens": 8, "stop_at_eos": False, "progress": False}
    made, other = (
        jaxkv.generate(model_of(8), prompts(seed, LENGTHS), mesh=mesh_of(2, 4), **options)
        for seed in (5, 17)
    )
    assert made.stats.compiled_programs > 0 and other.stats.compiled_programs == 0
    assert 0 < made.stats.moved_entries != other.stats.moved_entries > 0
    assert made.stats.allocated_bytes == other.stats.allocated_bytes
    cache = made.cache
    assert (cache.kept.sum(axis=2) == 8 * BUDGET).all() and made.stats.moved_entries == int(
        cache.tally.moved.sum()
    )
    assert per_device(cache, 4).max() == 1.125 * 2 * BUDGET
    again = jaxkv.generate(model_of(8), prompts(5, LENGTHS), **options)
    assert again.stats.moved_entries == 0 and again.cache.tally.moved is None
    # What a prompt moved is not told once more of the answer on top of it.
    more = jaxkv.generate(
        model_of(8).on(mesh_of(2, 4)), prompts(9, (3, 5)), cache=cache, max_new_tokens=1
    )
    assert more.stats.moved_entries == int(more.cache.tally.moved.sum()) - made.stats.moved_entries
    # One device moves none, and what others have moved stays known.
    here = jaxkv.generate(
        model_of(8), prompts(9, (3, 5)), cache=jaxkv.reshard(cache, None), max_new_tokens=1
    )
    assert (
        here.stats.moved_entries == 0
        and here.cache.tally.moved.tolist() == cache.tally.moved.tolist()
    )


def test_one_budget_over_layers_within_the_capacity():
    """A device's heads of all layers share its room: rows move between layers and devices, totals are exact."""
    capacity, made = 1.02, []
    for mesh in (None, mesh_of(2, 4)):
        policy = jaxkv.GlobalBudget(base=jaxkv.KeyDiff(budget=BUDGET, every=4), capacity=capacity)
        options = {"policy": policy, "max_new_tokens": 8, "stop_at_eos": False, "progress": False}
        made.append(jaxkv.generate(model_of(8), prompts(5, LENGTHS), mesh=mesh, **options).cache)
    here, there = made
    layers, even = len(here.kept), len(here.kept) * 2 * BUDGET
    for cache in made:
        assert (cache.kept.sum(axis=(0, 2)) == layers * 8 * BUDGET).all()
    assert here.tally.moved is None and (np.asarray(there.tally.moved) > 0).any()
    assert per_device(here, 4).sum(axis=0).max() > np.floor(capacity * even)
    assert per_device(there, 4).sum(axis=0).max() <= np.floor(capacity * even)

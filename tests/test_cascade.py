"""One budget over all layers in a cascade: the same caches as of layers held whole, in less memory."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from meshes import mesh_of, prompts

import jaxkv
from jaxkv import CriticalKV, CustomPolicy, GlobalBudget, LayerDefensiveKV, SnapKV
from jaxkv.engine import plan
from jaxkv.policies import (
    AdaptiveHeads,
    ByAge,
    EntropyLayers,
    Keep,
    LayerBudgetInputs,
    ProtectedHeads,
    TwoStageHeads,
    topk,
)
from jaxkv.policies.attended import ObservationWindowAttention
from jaxkv.policies.head_budgets import (
    ScoredEntries,
    limit_entries_per_device,
    multiply_rounding_down,
)
from jaxkv.policies.methods.cake import PreferenceLayerBudgets
from jaxkv.policies.survivors import (
    count_rounding_entries,
    mask_surviving_candidates,
    supports_survivor_mask,
)

LENGTHS = (60, 9, 41)
DEFENSIVE = LayerDefensiveKV(budget=16, window=8)
SNAP = SnapKV(budget=16, window=4)
ENTROPY = CustomPolicy(
    budget=9,
    scorer=ObservationWindowAttention(window=4),
    layers=EntropyLayers(),
    keep=Keep(window=4),
    evict=ByAge(),
)
HEADS = {
    "best": AdaptiveHeads(alpha=0.0),
    "shares": AdaptiveHeads(alpha=0.3),
    "even": AdaptiveHeads(alpha=1.0),
    "safe": ProtectedHeads(alpha=0.4),
    "stages": TwoStageHeads(budgets=AdaptiveHeads(alpha=0.25)),
    "safe stages": TwoStageHeads(budgets=ProtectedHeads(alpha=0.4), first=0.3),
}


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", HEADS)
def test_no_row_of_the_choice_is_dropped_on_the_way(name, devices):
    """Whatever heads come later, and whatever moves between devices: few levels of scores tie."""
    heads, layers, slots, batch, rng = HEADS[name], 3, 12, 24, np.random.default_rng(1)
    if not supports_survivor_mask(heads, devices):
        assert devices > 1 and name in ("shares", "even", "stages", "safe stages")
        return
    count = 2 * layers
    levels = rng.choice([3, 6, 1000], (batch, 1, 1))
    strong = rng.random((batch, count, 1))
    scores = jnp.asarray(np.floor(rng.random((batch, count, slots)) * levels * strong), jnp.float32)
    norms = jnp.asarray(rng.random(scores.shape) + 0.1, jnp.float32)
    candidates = jnp.broadcast_to(jnp.arange(slots) < slots - 2, (batch, count, slots))
    base, always_kept = (
        jnp.asarray(rng.integers(0, 9, batch), jnp.int32),
        jnp.full(batch, 2, jnp.int32),
    )
    kept = heads.choose_entries(ScoredEntries(scores, candidates, base, always_kept, norms))
    mine, most = count // devices, count * base
    if devices > 1:
        keys = jnp.where(candidates, topk.encode_sort_keys(scores), jnp.uint32(0))
        most = (
            multiply_rounding_down(heads.capacity, mine * (base + always_kept)) - mine * always_kept
        )
        kept, moved = limit_entries_per_device(
            kept, keys, heads.count_guaranteed_entries(base, always_kept), most, devices
        )
        assert (np.asarray(moved) > 0).any()
    headroom = most + mine * count_rounding_entries(heads)
    dropped = 0
    for device in range(devices):
        of = slice(device * mine, (device + 1) * mine)
        for seen in range(1, layers + 1):
            there = jnp.tile(jnp.arange(layers) < seen, mine // layers)[:, None]
            rows = ScoredEntries(
                scores[:, of], candidates[:, of] & there, base, always_kept, norms[:, of]
            )
            alive = mask_surviving_candidates(heads, rows, headroom)
            assert (
                not (kept[:, of] & there & ~alive).any()
                and not (alive & ~(candidates[:, of] & there)).any()
            )
            assert (alive.sum(axis=(1, 2)) <= headroom).all()
            dropped += int((candidates[:, of] & there & ~alive).sum())
    assert dropped > 0


@pytest.mark.parametrize("layers", [EntropyLayers(), PreferenceLayerBudgets(tau1=0.7)])
def test_no_layer_gets_more_rows_than_its_bound(layers):
    """Whatever the layers above weigh: full layers, empty ones, all alike; bounds sum to twice the budget at most."""
    rng, count, prompts = np.random.default_rng(5), 6, 3000
    length = rng.integers(1, 60, prompts)
    budget = rng.integers(1, length + 1)
    always_kept = rng.integers(0, budget + 1)
    weights = rng.random((count, prompts)) ** rng.choice([1, 4, 30], prompts) * (
        rng.random((count, prompts)) < 0.8
    )
    weights = np.log(weights + 1e-30) if isinstance(layers, PreferenceLayerBudgets) else weights
    final = layers.compute_layer_entries(
        LayerBudgetInputs(budget, length, always_kept, count, weights=weights)
    )
    assert (final.sum(axis=0) == count * budget).all()
    narrowed = 0
    for seen in range(1, count + 1):
        most = layers.bound_lower_layers(
            LayerBudgetInputs(budget, length, always_kept, count, weights=weights[:seen])
        )
        assert (final[:seen] <= most).all() and (most <= length).all()
        assert (most.sum(axis=0) <= count * (2 * budget + 1)).all()
        narrowed += (most < length).sum()
    assert narrowed > 10_000


CASES = {
    "two stages": (GlobalBudget(base=CriticalKV(base=SNAP), alpha=0.25), {}),
    "weights of layers": (jaxkv.CAKE(budget=0.2, window=4, sinks=2), {}),
    "entropy, evicting": (ENTROPY, {}),
    "mesh": (LayerDefensiveKV(budget=16, window=8, capacity=1.02), {"mesh": (2, 4)}),
}


def held_whole(monkeypatch):
    """From now on all layers' rows are held until the last one has run."""
    monkeypatch.setattr(plan, "compute_candidate_buffer_size", lambda *given: None)


def same(one, other):
    for mine, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))


@pytest.mark.parametrize("name", CASES)
def test_the_cache_of_layers_held_whole(name, monkeypatch):
    policy, given = CASES[name]
    mesh = given.get("mesh")
    shape = tiny.shape(layers=3, kv_heads=2 if mesh is None else 4, group=1, dim=8)
    model = tiny.tiny(shape)
    model = model if mesh is None else model.on(mesh_of(*mesh))
    ids, made, rows = prompts(3, LENGTHS), [], []
    for _ in range(2):
        session = jaxkv.Session(model, policy)
        needed = session.plan_without_memory_check(np.asarray(LENGTHS), 2)
        rows.append(needed.buffer)
        made.append(session.prefill(ids, needed=needed))
        held_whole(monkeypatch)
    assert rows[0] is not None and rows[1] is None
    same(*made)
    if name == "mesh":
        assert (np.asarray(made[0].tally.moved) > 0).any()


def test_what_lies_there_is_what_is_planned(monkeypatch):
    """Between layers no more than the buffer, scores and one layer: of many layers a fraction of their rows."""
    shape, tokens, most, plans = tiny.shape(layers=8, kv_heads=2, group=1, dim=16), 200, [], []
    model, ids = tiny.tiny(shape), prompts(4, (60,))[0] * 4
    for _ in range(2):
        session = jaxkv.Session(model, DEFENSIVE)
        needed = session.plan_without_memory_check(np.asarray([tokens]), 0)
        gc.collect()
        before, found = sum(each.nbytes for each in jax.live_arrays()), 0
        walk = session.iterate_prefill(ids[:tokens], needed=needed)
        for _ in walk:
            found = max(found, sum(each.nbytes for each in jax.live_arrays()) - before)
        del walk
        most.append(found)
        plans.append(needed.peak_bytes)
        held_whole(monkeypatch)
    assert most[0] < plans[0] < most[1] < plans[1] and most[0] < most[1] / 2

"""Faults seeded into the library: each must make a check fail that the real tests use."""

import dataclasses

import jax.numpy as jnp
import jaxtyping
import numpy as np
import oracles as o
import pytest
import slot_runs
import test_eviction as eviction
import test_in_place
import test_invariants as invariants
import test_oracle_agreement as agreement
import test_planning_compiled as recording
import test_session
import tiny
from policy_table import BY_NAME

from jaxkv import H2O, AdaKV, attention
from jaxkv.attention import columns
from jaxkv.cache import DenseStore, KVCache, packing
from jaxkv.cache.layout import SegmentLayout
from jaxkv.engine import compress, decode_loop, evict, observing, prefill, selection, slots
from jaxkv.engine.layers.terms import DecodeAttentionConfig
from jaxkv.policies import AdaptiveHeads, GroupReduce, Merge, head_budgets, layer_budgets, parts
from jaxkv.policies.attended import ObservationWindowAttention
from jaxkv.policies.methods.snapkv import ObservationWindowPolicy
from jaxkv.sharding.record import ProgramRecorder

SEEDS = range(3)


def agrees(name, budget=20):
    """Sets against the oracle; at least one input must be fit to tell."""
    assert any(
        [agreement.check_agreement(BY_NAME[name], seed, 3, (46, 30), budget) for seed in SEEDS]
    )


def in_order(name, budget=20):
    for seed in SEEDS:
        invariants.check_prefill(
            BY_NAME[name], tiny.tiny(tiny.MODELS["gqa3"]), seed, (60, 31), budget
        )


def as_alone(name):
    invariants.check_alone(BY_NAME[name], tiny.tiny(tiny.MODELS["gqa3"]), 0, (60, 31), 20)


def appends(name):
    model = tiny.tiny(tiny.MODELS["gqa3"])
    cache, _, _ = tiny.run(model, tiny.prompts(0, (60, 31)), BY_NAME[name].policy(20))
    invariants.check_decode(model, cache, (60, 31))


def ties():
    agreement.check_ties(
        AdaptiveHeads(alpha=0.2), lambda *a: o.ada_select(*a, alpha=0.2), seed=1, levels=2, base=7
    )


def highest_first(patch):
    real = head_budgets.mask_top_k
    patch.setattr(
        head_budgets, "mask_top_k", lambda keys, count: real(keys[..., ::-1], count)[..., ::-1]
    )


def window_not_forced(patch):
    real = ObservationWindowPolicy.compose_with_scorer

    def observed(self, **options):
        return real(self, **options).replace(keep=parts.Keep(sinks=self.sinks))

    patch.setattr(ObservationWindowPolicy, "compose_with_scorer", observed)


def window_sees_the_future(patch):
    real = columns.reduce_window_attention

    def mass(q, k, positions, reduce, **options):
        last = jnp.where(positions < 0, positions, positions.max(axis=1, keepdims=True))
        return real(q, k, last, reduce, **options)

    for module in (columns, attention):
        patch.setattr(module, "reduce_window_attention", mass)


def group_maximum(patch):
    real = ObservationWindowAttention.score_entries
    patch.setattr(
        ObservationWindowAttention,
        "score_entries",
        lambda self, seen: real(dataclasses.replace(self, group=GroupReduce.MAX), seen),
    )


def heads_rounded_down(patch):
    def targets(self, won, base):
        return (0.8 * won.astype(jnp.float32) + 0.2 * base[:, None].astype(jnp.float32)).astype(
            jnp.int32
        )

    patch.setattr(AdaptiveHeads, "compute_head_entries", targets)


def layers_rounded_down(patch):
    patch.setattr(
        layer_budgets,
        "round_to_sum",
        lambda values, total, most: np.clip(np.floor(values), 0, most).astype(np.int64),
    )


def padding_competes(patch):
    real = compress.select_entries

    def choose(layers, *rest, **options):
        everywhere = [
            dataclasses.replace(layer, inside=jnp.ones_like(layer.inside)) for layer in layers
        ]
        return real(everywhere, *rest, **options)

    patch.setattr(compress, "select_entries", choose)


def positions_from_length(patch):
    real = KVCache.tables.fget
    wrong = lambda self: dataclasses.replace(real(self), seen=real(self).length[0, :, 0])  # noqa: E731
    patch.setattr(KVCache, "tables", property(wrong))


def segments_one_row_early(patch):
    real = SegmentLayout.compute_segment_starts

    def place(self, length, rows, headroom=None):
        start = real(self, length, rows, headroom)
        return start - (start > 0).astype(jnp.int32)

    patch.setattr(SegmentLayout, "compute_segment_starts", place)


def window_of_the_bucket(patch):
    """The observation window is cut from the end of the padded prompt, not of the sequence."""
    real = prefill.run_layer

    def run(flat, index, x, length, *rest):
        own = real(flat, index, jnp.copy(x), length, *rest)
        full = real(flat, index, x, jnp.full_like(length, x.shape[1]), *rest)
        return dataclasses.replace(own, q=full.q)

    patch.setattr(prefill, "run_layer", run)


def nothing_is_forgotten(patch):
    patch.setattr(DecodeAttentionConfig, "score_decay", 1.0)


def single_rows_are_dropped(patch):
    real = Merge.merge_entry_while_decoding

    def merge_one(self, index, cosine, dropped, nearest, goes, tau):
        found = real(self, index, cosine, dropped, nearest, goes, tau)
        return found._replace(joins=jnp.zeros_like(goes))

    patch.setattr(Merge, "merge_entry_while_decoding", merge_one)


def nothing_waits_for_reads(patch):
    patch.setattr(evict, "order_after_read", lambda value, read: value)


def a_wrapper_loses_the_window(patch):
    real = AdaKV.replace_base_parts
    patch.setattr(
        AdaKV, "replace_base_parts", lambda self, base: real(self, base).replace(keep=parts.Keep())
    )


def stale_logits(patch):
    begin = decode_loop.DecodeLoop.__init__

    def first(self, flat, cache, **options):
        begin(self, flat, cache, **options)
        self._first = cache.logits

    real = decode_loop.DecodeLoop.finish_sampling
    patch.setattr(decode_loop.DecodeLoop, "__init__", first)
    patch.setattr(
        decode_loop.DecodeLoop,
        "finish_sampling",
        lambda self: dataclasses.replace(real(self), logits=self._first),
    )


def scores_stay_behind(patch):
    """The newest row moves into the place of the one that goes, its score does not."""
    real = evict._write_evictions

    def written(pool, *rest):
        return dataclasses.replace(real(pool, *rest), score=pool.score)

    patch.setattr(evict, "_write_evictions", written)


def values_stay_behind(patch):
    real = DenseStore.overwrite_entries
    patch.setattr(
        DenseStore,
        "overwrite_entries",
        lambda self, k, v: dataclasses.replace(real(self, k, v), v=self.v),
    )


def a_slot_keeps_a_row(patch):
    """A sequence finds rows behind its own in its slot: the former one's, where that had more."""
    real = slots.copy_into_slots

    def insert(running, new, slot, *, axes=None):
        before, at = np.array(running.cache.tables.length), int(slot.max())
        after = real(running, new, slot, axes=axes)
        length = np.array(after.cache.tables.length)
        length[:, at] = np.maximum(length[:, at], before[:, at])
        return dataclasses.replace(
            after, cache=after.cache.replace_arrays(length=jnp.asarray(length))
        )

    patch.setattr(slots, "copy_into_slots", insert)


def a_record_misses_a_call(patch):
    """A program is called past the recorder, and becomes a part of the walk."""
    real = ProgramRecorder.record_program_call

    def call(self, door, args, options):
        return (
            door.__wrapped__(*args, **options)
            if door.__name__ == "_choose"
            else real(self, door, args, options)
        )

    patch.setattr(ProgramRecorder, "record_program_call", call)


def every_call_is_recorded():
    # Plans are of shapes, which are no arrays.
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        recording.check_record("adakv")
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def in_slots():
    model, policy, given = (
        tiny.tiny(tiny.TWO_LAYERS),
        BY_NAME["full"].make(20),
        slot_runs.requests(0, 5),
    )
    tokens, _ = slot_runs.answered(slot_runs.made(model, policy), given)
    assert tokens == [slot_runs.alone(model, policy, asked) for asked in given]


def steps(name, **options):
    """Eviction and merging, step by step."""
    assert any(
        [
            eviction.check_steps(name, seed, 2, 16, SegmentLayout.EQUAL, like=0.7, **options)
            for seed in SEEDS
        ]
    )


FAULTS = (
    (scores_stay_behind, lambda: steps("h2o")),
    (values_stay_behind, lambda: steps("h2o")),
    (a_slot_keeps_a_row, in_slots),
    (a_record_misses_a_call, every_call_is_recorded),
    (nothing_is_forgotten, lambda: steps("fading")),
    (single_rows_are_dropped, lambda: steps("d2o-plain")),
    (nothing_waits_for_reads, lambda: test_in_place.check_in_place(H2O(budget=16))),
    (a_wrapper_loses_the_window, lambda: in_order("adakv")),
    (stale_logits, test_session.test_draws_go_on_where_the_last_one_ended),
    (highest_first, ties),
    (window_not_forced, lambda: in_order("snapkv")),
    (window_not_forced, lambda: agrees("snapkv-avg")),
    (window_sees_the_future, lambda: agrees("snapkv-nopool")),
    (group_maximum, lambda: agrees("snapkv-nopool")),
    (heads_rounded_down, lambda: in_order("adakv")),
    (heads_rounded_down, lambda: agrees("adakv")),
    (layers_rounded_down, lambda: in_order("pyramidkv-linear")),
    (padding_competes, lambda: in_order("local")),
    (positions_from_length, lambda: appends("snapkv")),
    (segments_one_row_early, lambda: in_order("adakv")),
    (window_of_the_bucket, lambda: as_alone("snapkv")),
)


def _id(case):
    return case[0].__name__


def forget_programs():
    """The programs the faults are in: compiled before a fault they would hide it, compiled with it outlive it."""
    for compiled in (
        observing.observe,
        selection._choose,
        packing.pack_layer_entries,
        packing.pack_into_shared_pool,
    ):
        compiled.clear_cache()


@pytest.fixture
def compiled_anew():
    forget_programs()
    yield
    forget_programs()


@pytest.mark.parametrize("case", FAULTS, ids=_id)
def test_a_seeded_fault_is_found(case, monkeypatch, compiled_anew):
    fault, check = case
    check()
    forget_programs()
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check()

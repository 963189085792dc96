"""A policy of each kind on meshes of eight devices: the tokens and the kept entries of a single device."""

import dataclasses

import jax.numpy as jnp
import meshes
import pytest
from meshes import BUDGET, DIM, KINDS, LAYERS, NEW, run

from jaxkv.policies import Merged, Merger

# What follows a prompt one way in each form of pool, merged or not: rows evicted, appended, chosen anew, not all read.
APART = ("tova", "defensivekv", "d2o", "adakv-variance", "rkv", "omnikv")
EVERY = 3


@dataclasses.dataclass(frozen=True)
class MeanByMass(Merger):
    """Kept values move towards the mean of the evicted ones, weighted by attention."""

    def merge_evicted_entries(self, k, v, kept, inside, mass, tau, key):
        weight = jnp.where(inside & ~kept, mass, 0.0)[..., None]
        total = weight.sum(axis=2, keepdims=True)
        mean = (weight * v).sum(axis=2, keepdims=True) / jnp.where(total > 0, total, 1.0)
        return Merged(k, jnp.where(kept[..., None] & (total > 0), (v + mean) / 2, v), tau)


# Heads of as many rows, and of their own number, and rows merged in a pool for all layers; a merger reads attention.
AGAIN = {"snapkv": {"merge": MeanByMass()}, "defensivekv": {}, "adakv-variance": {}}


@pytest.fixture(scope="module", autouse=True)
def nothing_of_other_files():
    """Programs that other files compiled are not these tests' to judge."""
    meshes.forget()


# One of each kind of pool, and of what else is observed of a prompt, or divided among heads and layers.
NAMES = (
    *(name for name in KINDS if name not in APART),
    "cake",
    "capkv",
    "compactor",
    "criticalkv-pyramidinfer",
    "expected",
    "layerdefensivekv-mass",
    "pyramidkv-entropy",
)


@pytest.mark.parametrize("name", NAMES)
def test_every_kind(name):
    assert run(name, 4, mesh=(2, 4)) == run(name, 4)


@pytest.mark.parametrize("name", APART)
def test_one_of_each_kind_with_query_heads_apart(name):
    """Two kv heads on four devices, each of which has a query head of one; questions come behind the prompts."""
    assert run(name, 2, mesh=(2, 4), asks=True) == run(name, 2, asks=True)


@pytest.mark.parametrize("name", AGAIN)
def test_compressed_again(name):
    again = run(name, 2, mesh=(2, 4), every=EVERY, **AGAIN[name])
    assert again == run(name, 2, every=EVERY, **AGAIN[name])
    rows = [sum(map(len, kept.values())) for kept in (again.prompts, again.answers)]
    assert rows[1] - rows[0] < NEW * len(again.answers)


# --- what travels ----------------------------------------------------------------------------------------------------

# By program what may: hidden states (E) and logits (V); numbers of R rows, be they a prompt's or a pool's, of kv heads
# K, of all layers' kv heads J, of G query heads of each, and of w queries. Keys and values never do.
TRAVELS = {
    "embed_tokens": {"all-reduce": ["B R E"]},
    # Attention's and the MLP's sums; norms of values, where a group's query heads lie apart.
    "layer": {"all-reduce": ["B R E", "B K R"]},
    # What is observed, and logits of window queries, where a group's query heads lie apart; whether any score is NaN;
    # claims of heads, of n numbers each, on rows.
    "observe": {
        "all-reduce": ["B K R", "B R", "B K w R", ""],
        "all-gather": ["B K", "B K G", "B K G n"],
    },
    # The second pass, whose embeddings are as above: two sums of hidden states a layer.
    "_rerun_block": {"all-reduce": ["B R E"]},
    "_choose": {"all-gather": ["B K R", "B J R"]},
    # Whether any head drops rows.
    "_run_merger": {"all-reduce": ["B"]},
    # The same of a cache; norms of values and positions of their rows, where a position's norms are compared.
    "_gather_candidates": {"all-reduce": ["B K R", "B K w R"], "all-gather": ["B K R"]},
    "_gather_entries_to_pack": {"all-reduce": ["B K R"]},
    # The next token, whether all have ended; TOVA's ranks, and what filters choose by.
    "_loop": {"all-reduce": ["B R E", "", "B K K R", "B w R", "B R"], "all-gather": ["B V"]},
    "_run_compiled_step": {"all-reduce": ["B R E", "B R"]},
    # The first head's choice, which the next layer's is made of.
    "gather": {"all-reduce": ["B R"]},
    # What a model is known by: samples of its parameters, on their way to the host.
    "_summarise_parameter_bits": {
        "all-reduce": ["", "n", "n n", "n n n", "n n n n"],
        "all-gather": ["n"],
    },
}


@pytest.fixture(scope="module")
def compiled():
    """All that runs on 2x4 for any policy, kv heads or query heads of one apart; nothing is compiled for it anew."""
    for name in NAMES:
        run(name, 4, mesh=(2, 4))
    for name in APART:
        run(name, 2, mesh=(2, 4), asks=True)
    for name, options in AGAIN.items():
        run(name, 2, mesh=(2, 4), every=EVERY, **options)
    return [each for each in meshes.COMPILED if each.mesh == (2, 4)]


def fits(shape, letters, config):
    """Whether a shape may be that of an array of these logical axes."""
    exact, names = {"E": config.embed, "V": config.vocab}, letters.split()
    # No pool of a device has as many rows as that, and no row's numbers one after the other are as few.
    most = exact | {"R": 480, "B": 8, "K": 4, "J": 4 * LAYERS, "G": 2, "w": BUDGET, "n": 128}
    return len(names) == len(shape) and all(
        exact.get(name, 1) <= size <= most[name] for name, size in zip(names, shape, strict=True)
    )


def test_no_keys_or_values_travel(compiled):
    config, seen = meshes.model_of(4).config, set()
    for each in compiled:
        for kind, shape in each.sent:
            assert DIM not in shape, (each.name, kind, shape)
            allowed = [
                letters
                for letters in TRAVELS.get(each.name, {}).get(kind, [])
                if fits(shape, letters, config)
            ]
            assert allowed, f"{each.name} sends {shape} by {kind}"
            seen.add((each.name, kind))
    names = {each.name for each in compiled}
    assert (
        set(TRAVELS)
        | {
            "pack_layer_entries",
            "pack_into_shared_pool",
            "compute_all_segment_starts",
            "fill_query_buffer",
            "compute_logits",
        }
        <= names
    )
    # The table says no more than what was met.
    assert {(name, kind) for name, kinds in TRAVELS.items() for kind in kinds} == seen


def test_a_step_sends_two_sums_a_layer(compiled):
    """And the embedding's, the logits, whether all have ended; for some policies a number for each row of a layer."""
    steps = [each.sent for each in compiled if each.name == "_loop"]
    assert len(steps) > 10
    for sent in steps:
        hidden = [shape for _, shape in sent if shape == (4, 1, meshes.model_of(4).config.embed)]
        assert len(hidden) == 2 * LAYERS + 1
        assert [kind for kind, _ in sent].count("all-gather") == 1 and sent.count(
            ("all-reduce", ())
        ) == 1
        assert len(sent) - len(hidden) - 2 <= 2 * LAYERS


def test_pools_stay_where_they_are(compiled):
    assert not [shape for shape in meshes.MOVED if DIM in shape]
    writes = [each for each in compiled if each.name in ("_loop", "pack_into_shared_pool")]
    assert len(writes) > 10 and not any(each.copied or each.fresh for each in writes)
    # A program that only reads its pools is seen to do so.
    reads = [each.fresh for each in compiled if each.name == "_gather_entries_to_pack"]
    assert reads and min(reads) >= 2

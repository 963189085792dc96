"""Whole chunks of rows, the same in every head: the choice against its oracle, and what it rejects as a base."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import oracles as o
import pytest

from jaxkv import ChunkKV, KNorm, SnapKV
from jaxkv.engine import selection
from jaxkv.policies.methods.chunkkv import ChunkHeadBudgets

SLOTS = 64


def library(scores, rows, always_kept, n, chunk, peaks=None):
    """Kept positions of one sequence, beside another of half its length, in slots with padding that ranks first."""
    padded = np.full((2, len(scores), SLOTS), 1e9)
    padded[:, :, :n] = scores
    mask = jnp.asarray(np.isin(np.arange(SLOTS), always_kept)[None] & np.array([[True], [False]]))
    length = jnp.asarray([n, n // 2], jnp.int32)
    layer = selection.create_prompt_candidates(jnp.asarray(padded, jnp.float32), mask, length)
    heads = ChunkHeadBudgets(chunk=chunk, peaks=peaks)
    chosen = selection.select_entries(
        [layer], jnp.asarray([rows, 1], jnp.int32), heads=heads
    ).masks[0]
    assert (np.asarray(chosen)[1].sum(axis=-1) == 1).all()
    return [np.flatnonzero(head).tolist() for head in np.asarray(chosen)[0]]


@pytest.mark.parametrize("levels", (3, 1000), ids=("tied", "apart"))
@pytest.mark.parametrize("always_kept", ((), (0, 1, 2), (0, 12, 40, 41, 42)), ids=len)
@pytest.mark.parametrize("chunk", (4, 20, 100))
def test_rows_are_those_of_the_oracle(levels, always_kept, chunk):
    rng, n = np.random.default_rng(chunk), 43
    # Sums of four whole numbers, and their means over chunks of a power of two, are exact.
    scores = rng.integers(-levels, levels, (4, n)).astype(np.float64)
    for rows in (len(always_kept) + 1, 17, 30, n - 1, n):
        expected, gap = o.chunk_select(scores, rows, list(always_kept), n, chunk)
        if chunk != 20 or gap > o.MIN_GAP:
            assert library(scores, rows, always_kept, n, chunk) == expected
        assert all(len(head) == rows for head in expected)


@pytest.mark.parametrize("signed", (False, True))
@pytest.mark.parametrize("always_kept", ((), (0, 12, 40, 41, 42)), ids=len)
def test_uneven_chunks_keep_their_peaks(signed, always_kept):
    rng, n, chunk, peaks, sure, cut = np.random.default_rng(1), 43, 4, 2, 0, 0
    for rows in (len(always_kept) + 1, 9, 17, 30, n - 1, n):
        # Few large scores, as attention has.
        scores = rng.integers(1, 1000, (4, n)) ** 3 / 2.0**24 - 20 * signed
        expected, gap = o.gated_chunk_select(scores, rows, list(always_kept), n, chunk, peaks)
        assert all(len(head) == rows for head in expected)
        if gap > o.MIN_GAP:
            assert library(scores, rows, always_kept, n, chunk, peaks) == expected
            sure, cut = (
                sure + 1,
                cut + (expected != o.chunk_select(scores, rows, list(always_kept), n, chunk)[0]),
            )
    assert sure > 3 and cut > 1


def test_a_gate_is_kvpress_numbers():
    plain, gated = (
        ChunkKV(budget=64).build_policy_parts().heads,
        ChunkKV(budget=64, gated=True).build_policy_parts().heads,
    )
    assert (plain.chunk, plain.peaks, gated.chunk, gated.peaks) == (20, None, 10, 4)


def test_the_base_is_snapkv_unless_said():
    unsaid, snapkv, knorm = (
        ChunkKV(**given).build_policy_parts()
        for given in ({"budget": 64}, {"base": SnapKV(budget=64)}, {"base": KNorm(budget=64)})
    )
    assert unsaid == snapkv != knorm
    assert dataclasses.replace(
        ChunkKV(budget=64), chunk=7
    ).build_policy_parts().heads == ChunkHeadBudgets(chunk=7)

"""The TPU kernels of policies that score attention and evict rows, copies simulated, against plain numpy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from test_kernels import DTYPES, draw, wide
from test_kernels_tpu import COUNTS, LENGTH, ROWS, START, compare, drawn, with_rows

from jaxkv.pallas_kernels import tpu_decode, tpu_evict


def scored_oracle(q, k, v, start, length, *, softcap=None, sinks=None):
    """Output, and attention that pool rows received, mean over the queries of their head."""
    out, received = np.zeros(q.shape), np.zeros(k.shape[:2])
    for b, h in np.ndindex(start.shape):
        span = slice(start[b, h], start[b, h] + length[b, h])
        if length[b, h] == 0:
            continue
        logits = wide(q)[b, h] @ k[b, span].T / np.sqrt(q.shape[-1])
        logits = logits if softcap is None else softcap * np.tanh(logits / softcap)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        total = weights.sum(axis=1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks[h][:, None] - logits.max(axis=1, keepdims=True))
        out[b, h] = weights / total @ v[b, span]
        received[b, span] = (weights / total).mean(axis=0)
    return out, received


# Queries of one kv head, in one dtype or the other; logits capped, and learned sinks beside them.
CASES = [
    (64, "float32", 3, {}),
    (80, "bfloat16", 1, {"sinks": True}),
    (128, "bfloat16", 4, {}),
    (256, "float32", 11, {"softcap": 2.0, "sinks": True}),
]


@pytest.mark.parametrize(("dim", "dtype", "group", "more"), CASES)
def test_a_token_joins_and_rows_receive_attention(dim, dtype, group, more):
    q, new_k, new_v, k, v = drawn(dim, dtype, group)
    tables = [jnp.asarray(each) for each in (START, LENGTH, COUNTS)]
    sinks = (
        np.linspace(-1, 6, START.shape[1] * group, dtype=np.float32).reshape(-1, group)
        if "sinks" in more
        else None
    )
    given = {
        "softcap": more.get("softcap"),
        "sink_logits": None if sinks is None else jnp.asarray(sinks),
    }
    run = tpu_decode.append_and_score
    out, received, *pool = run(
        q, (new_k, new_v), k, v, *tables, widest=2571, **given, interpret=True
    )
    wanted = [with_rows(each, new, START, LENGTH, COUNTS) for each, new in ((k, new_k), (v, new_v))]
    for mine, its in zip(pool, wanted, strict=True):
        np.testing.assert_array_equal(wide(mine), its)
    held = LENGTH + COUNTS[:, None]
    expected, shares = scored_oracle(
        q, *wanted, START, held, softcap=more.get("softcap"), sinks=sinks
    )
    compare((out,), (expected,), dtype)
    shares[COUNTS == 0] = 0
    assert received.shape == (len(COUNTS), ROWS)
    np.testing.assert_allclose(
        wide(received), shares, atol=DTYPES[dtype][1] / 10, rtol=DTYPES[dtype][1]
    )


def by_score(score, pos, seen, prompt):
    """Ranks by mean attention; the first two tokens stay, and answers."""
    return score / jnp.maximum(seen - pos, 1).astype(jnp.float32), (pos >= 2) & (pos < 2 * prompt)


@pytest.mark.parametrize("scored", [True, False])
def test_evict_rows(scored):
    """Segments above their limit lose the lowest, the latest of equals; others, and rows that must stay, do not."""
    rng, batch = np.random.default_rng(5), 9
    start = np.tile(np.asarray([[0, 20, 26, 1150]], np.int32), (batch, 1))
    length = np.tile(np.asarray([[12, 5, 1100, 9]], np.int32), (batch, 1))
    limit = np.tile(np.asarray([[11, 4, 1099, 9]], np.int32), (batch, 1))
    length[3] = [0, 6, 3, 40]
    recent = np.tile(np.asarray([[1, 0, 3, 1]], np.int32), (batch, 1))
    k, v = (rng.normal(size=(batch, 1400, 16)).astype(np.float32) for _ in range(2))
    pos, score = (
        np.full((batch, 1400), -1, np.int32),
        rng.choice([0.0, 0.5, 1.0], size=(batch, 1400)).astype(np.float32),
    )
    for b, h in np.ndindex(start.shape):
        pos[b, start[b, h] : start[b, h] + length[b, h]] = rng.permutation(length[b, h])
    # A row that must stay, and one that takes its own place.
    pos[5, 12], pos[6, :12] = 1, np.arange(12)
    score[6, 11] = -1
    recent[6, 0] = 0
    seen, prompt = (
        rng.integers(1200, 1300, batch).astype(np.int32),
        rng.integers(400, 900, batch).astype(np.int32),
    )
    given = [jnp.asarray(each) for each in (k, v, pos, score)]
    given = given if scored else [*given[:3], None]
    tables = [jnp.asarray(each) for each in (start, length, limit, recent, seen, prompt)]
    found = tpu_evict.evict_rows(*given, *tables, weigh=by_score, interpret=True)
    went = np.zeros(start.shape, np.int32)
    for b, h in np.ndindex(start.shape):
        rows = np.arange(start[b, h], start[b, h] + length[b, h])
        mine = pos[b, rows]
        free = (mine >= 2) & (mine < 2 * prompt[b]) & (mine < seen[b] - recent[b, h])
        if length[b, h] <= limit[b, h] or not free.any():
            continue
        mean = (score[b, rows] if scored else np.zeros(len(rows), np.float32)) / (
            seen[b] - mine
        ).astype(np.float32)
        lowest = free & (mean == mean[free].min())
        to, at = rows[lowest][np.argmax(mine[lowest])], rows[-1]
        went[b, h] = 1
        k[b, to], v[b, to], pos[b, to], score[b, to] = k[b, at], v[b, at], pos[b, at], score[b, at]
        pos[b, at], score[b, at] = -1, 0
    assert went.sum() == 26 and went[3].tolist() == [0, 1, 0, 1]
    np.testing.assert_array_equal(np.asarray(found[4]), went)
    for ours, theirs in zip(found[:3], (k, v, pos), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), theirs)
    assert (found[3] is None) is not scored
    if scored:
        np.testing.assert_array_equal(np.asarray(found[3]), score)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_move(dtype):
    """The newest row in the place of another: heads that change one tile, one that keeps its place, one that stays."""
    k, v = draw(7, (2, 40, 128), (2, 40, 128), dtype=DTYPES[dtype][0])
    place, last = (
        np.asarray([[0, 2, 5, 39], [8, 9, 14, 30]]),
        np.asarray([[1, 4, 6, 39], [8, 10, 29, 31]]),
    )
    over = np.asarray([[True, True, True, True], [True, True, False, True]])
    tables = [jnp.asarray(each, jnp.int32) for each in (place, last)]
    pos = jnp.arange(80, dtype=jnp.int32).reshape(2, 40)
    *found, score = tpu_evict.replace_rows(
        k, v, pos, None, *tables, jnp.asarray(over), interpret=True
    )
    assert score is None
    for ours, theirs in zip(found, (wide(k).copy(), wide(v).copy(), np.array(pos)), strict=True):
        for b, h in zip(*np.nonzero(over), strict=True):
            theirs[b, place[b, h]] = theirs[b, last[b, h]]
            if theirs.ndim == 2:
                theirs[b, last[b, h]] = -1
        np.testing.assert_array_equal(wide(ours), theirs)


def test_what_they_take():
    """Pools whose positions and scores fit VMEM, and segments whose logits do."""
    assert tpu_evict.takes(8200) and not tpu_evict.takes(1 << 16)
    assert tpu_decode.takes_scores(8200, 1025, 4) and tpu_decode.takes_scores(1 << 17, 1 << 14, 4)
    assert not tpu_decode.takes_scores(1 << 18, 1025, 4) and not tpu_decode.takes_scores(
        1 << 17, 1 << 17, 4
    )

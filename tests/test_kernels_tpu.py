"""The TPU kernel of decode attention, its copies simulated, against plain numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_kernels import DTYPES, attend_oracle, draw, wide

from jaxkv.attention import Implementation, LogitShaping, get_attention_backend
from pallas_kernels.tpu import decode, prefill

# One head ten times longer than the others and over several blocks, heads without rows, segments of one tile; the
# second sequence has ended.
START = np.asarray([[0, 301, 310, 2900], [5, 140, 150, 700], [1, 5, 8, 41]], np.int32)
LENGTH = np.asarray([[290, 0, 2570, 17], [129, 0, 500, 64], [3, 2, 30, 0]], np.int32)
COUNTS = np.asarray([1, 0, 1], np.int32)
ROWS = 2960


def drawn(dim, dtype, group, rows=ROWS):
    """Queries, new rows, and pools."""
    batch, heads = START.shape
    of_token, of_pool = (batch, heads, dim), (batch, rows, dim)
    return draw(
        dim,
        (batch, heads, group, dim),
        of_token,
        of_token,
        of_pool,
        of_pool,
        dtype=DTYPES[dtype][0],
    )


def with_rows(pool, new, start, length, counts):
    """The pool with the new rows of the sequences that go on, float64."""
    found = wide(pool).copy()
    for b, h in zip(*np.nonzero(np.broadcast_to(counts[:, None] > 0, start.shape)), strict=True):
        found[b, start[b, h] + length[b, h]] = wide(new)[b, h]
    return found


def compare(ours, theirs, dtype):
    tolerance = DTYPES[dtype][1]
    for mine, its in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(wide(mine), its, rtol=tolerance, atol=tolerance)


def test_rows_are_only_read():
    q, _, _, k, v = drawn(64, "bfloat16", 2)
    out, lse = decode.attend(q, k, v, jnp.asarray(START), jnp.asarray(LENGTH), interpret=True)
    compare((out, lse), attend_oracle(q, k, v, START, LENGTH)[:2], "bfloat16")
    assert not wide(out)[0, 1].any() and np.isneginf(wide(lse)[0, 1]).all()


def test_a_window_with_capped_logits():
    """A window is a later start; logits become softcap * tanh(logits / softcap), the new row's too."""
    softcap, dim = 2.0, 64
    q, new_k, new_v, k, v = drawn(dim, "float32", 2)
    late = np.maximum(LENGTH - 20, 0)
    tables = [jnp.asarray(each) for each in (START + late, LENGTH - late, COUNTS)]
    run = jax.jit(lambda *given: decode.append_and_attend(*given, softcap=softcap, interpret=True))
    out, lse, *pool = run(q, (new_k, new_v), k, v, *tables)
    np.testing.assert_array_equal(wide(pool[0]), with_rows(k, new_k, START, LENGTH, COUNTS))
    held = START + late, LENGTH - late + COUNTS[:, None]
    compare((out, lse), attend_oracle(q, *pool, *held, softcap)[:2], "float32")


def test_what_it_takes():
    """Whole tiles of bfloat16 or float32."""
    assert decode.supports_pool(48, jnp.bfloat16) and decode.supports_pool(40, jnp.float32)
    assert decode.supports_pool(40, jnp.bfloat16) and not decode.supports_pool(44, jnp.bfloat16)
    assert not decode.supports_pool(48, jnp.float16)


@pytest.mark.parametrize("masking", [{}, {"shaping": LogitShaping(softcap=3.0), "window": 100}])
def test_prompts_are_prefilled_by_splash_attention(masking, monkeypatch):
    """Right padding needs no mask; log-sum-exp, capped logits and windows as XLA has them, in float32.

    Of three prompts two are computed together.
    """
    monkeypatch.setattr(prefill, "_TOKENS", 800)
    assert [prefill.count_batched_tokens(3, slots) for slots in (384, 1024, 128)] == [
        768,
        1024,
        384,
    ]
    q, k, v = draw(3, (3, 2, 2, 384, 64), (3, 2, 384, 64), (3, 2, 384, 64), dtype=jnp.bfloat16)
    length = jnp.asarray([384, 130, 7], jnp.int32)
    backend, oracle = (
        get_attention_backend(each) for each in (Implementation.TPU_INTERPRETED, Implementation.XLA)
    )
    found = backend.compute_prefill_attention(q, k, v, length, **masking)
    wanted = oracle.compute_prefill_attention(
        *(each.astype(jnp.float32) for each in (q, k, v)), length, **masking
    )
    assert (
        found[0].dtype == q.dtype
        and backend.compute_prefill_attention(q, k, v, length, lse=False)[1] is None
    )
    compare(found, map(wide, wanted), "bfloat16")


def test_where_splash_attention_does_not_serve():
    """Float32 and short prompts take XLA, in blocks of queries; so do sums of columns."""
    assert prefill.supports_prompt(384, jnp.bfloat16)
    assert not prefill.supports_prompt(64, jnp.bfloat16) and not prefill.supports_prompt(
        384, jnp.float32
    )
    q, k, v = draw(4, (2, 2, 2, 1024, 16), (2, 2, 1024, 16), (2, 2, 1024, 16))
    length = jnp.asarray([1024, 700], jnp.int32)
    backend, oracle = (
        get_attention_backend(each) for each in (Implementation.TPU_INTERPRETED, Implementation.XLA)
    )
    found, wanted = (each.compute_prefill_attention(q, k, v, length) for each in (backend, oracle))
    compare(found, map(wide, wanted), "float32")
    found, wanted = (
        each.sum_attention_per_key(q, k, wanted[1], length) for each in (backend, oracle)
    )
    np.testing.assert_allclose(wide(found), wide(wanted), rtol=1e-4, atol=1e-4)

"""Chunks, and the kernels that take a new token, interpreted, against plain numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import DTYPES, KINDS, SMALL, attend_oracle, draw, inside_any, wide
from test_quantised import bytes_of, nibbles_of, numbers_of, words_of

import pallas_kernels

# Two layers in one pool, three sequences: ragged, a head ten times longer, heads without rows; the last has ended.
LENGTH = np.asarray([[[9, 20], [3, 0], [4, 5]], [[7, 70], [0, 33], [0, 17]]], np.int32)
ROOM = 3


def laid_out(length, headroom=ROOM):
    """First rows, layer after layer and head after head, with room behind each; and the pool's rows."""
    sizes = np.moveaxis(length, 0, 1).reshape(length.shape[1], -1) + headroom
    start = (np.cumsum(sizes, axis=1) - sizes).reshape(length.shape[1], length.shape[0], -1)
    return np.moveaxis(start, 1, 0).astype(np.int32), int(sizes.sum(axis=1).max())


def scheduled(length, programs, block):
    start, _ = laid_out(length)
    chunks = pallas_kernels.build_work_table(
        jnp.asarray(start), jnp.asarray(length), programs=programs, block=block
    )
    return start, {name: np.asarray(getattr(chunks, name)) for name in chunks.__dataclass_fields__}


@settings(max_examples=12, deadline=None)
@given(
    shape=st.sampled_from([(1, 1, 3), (2, 2, 4)]),
    programs=st.sampled_from([1, 7, 40]),
    data=st.data(),
)
def test_chunks_cover_every_row_once(shape, programs, data):
    """Neighbours in order, one at least per segment, whole blocks but for the last, and nothing beside them."""
    rows = st.one_of(st.just(0), st.integers(0, 90), st.integers(0, 20_000))
    length = np.asarray(
        data.draw(st.lists(rows, min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))),
        np.int32,
    )
    length = length.reshape(shape)
    start, table = scheduled(length, programs, 16)
    for layer in range(shape[0]):
        at = 0
        for segment, (begin, n) in enumerate(
            zip(start[layer].ravel(), length[layer].ravel(), strict=True)
        ):
            assert table["first"][layer].ravel()[segment] == at
            count, row = table["count"][layer].ravel()[segment], begin
            assert count >= 1
            for w in range(at, at + count):
                assert (table["segment"][layer, w], table["row"][layer, w]) == (segment, row)
                assert table["last"][layer, w] == (w == at + count - 1)
                assert table["last"][layer, w] or (
                    table["rows"][layer, w] > 0 and table["rows"][layer, w] % 16 == 0
                )
                row += table["rows"][layer, w]
            assert row == begin + n
            at += count
        assert not table["rows"][layer, at:].any() and not table["last"][layer, at:].any()


@pytest.mark.parametrize(("batch", "rows"), [(1, 131072), (8, 8192)])
def test_chunks_fill_the_device(batch, rows):
    """As many as there are programs, and none much longer than its share; one head is ten times longer than others."""
    length = np.full((1, batch, 8), rows, np.int32)
    length[..., 0] *= 10
    chunks = scheduled(length, 396, 64)[1]["rows"]
    assert chunks.max() < 1.2 * length.sum() / 396
    assert (chunks > 0).sum() <= 396 + 8 * batch


def test_small_caches_have_small_chunks():
    """One sequence of 1024 rows a head keeps 128 programs busy."""
    assert scheduled(np.full((1, 1, 8), 1024, np.int32), 396, 64)[1]["rows"].max() == 64


def turned(x, cos, sin):
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def token_of(seed, dim, dtype, group, layer):
    """What `append_and_attend` is told: rows that no segment of the layer has are NaN."""
    batch, heads = LENGTH.shape[1:]
    kind, _ = DTYPES[dtype]
    start, rows = laid_out(LENGTH)
    # Two parts that add up, of two sequences more than there are: what a split product of padded rows leaves.
    q, kv = draw(seed, (2, batch + 2, heads, group, dim), (2, batch + 2, 2, heads, dim))
    q, kv = (leaf.at[:, batch:].set(jnp.nan) for leaf in (q, kv))
    k, v = draw(seed + 1, (batch, rows, dim), (batch, rows, dim), dtype=kind)
    outside = ~inside_any(start[layer], LENGTH[layer], rows)[..., None]
    k, v = (jnp.where(jnp.asarray(outside), jnp.asarray(jnp.nan, kind), leaf) for leaf in (k, v))
    positions = np.asarray([80, 35, 17], np.int32)
    angle = positions[:, None] * 100.0 ** (-np.arange(dim // 2) / dim)
    cos, sin = (jnp.asarray(part, jnp.float32) for part in (np.cos(angle), np.sin(angle)))
    pos = jnp.asarray(np.random.default_rng(seed).integers(0, 16, (batch, rows)), jnp.int32)
    chunks = pallas_kernels.build_work_table(
        jnp.asarray(start), jnp.asarray(LENGTH), programs=5, block=16
    )
    counts = jnp.asarray([1, 1, 0], jnp.int32)
    return q, kv, cos, sin, jnp.asarray(positions), counts, k, v, pos, jnp.asarray(start), chunks


def called(given):
    """Arguments of `append_and_attend` as it takes them."""
    q, kv, cos, sin, positions, counts, k, v, pos, _, chunks = given
    return q, pallas_kernels.NewTokenInputs(kv, cos, sin, positions, counts, pos), (k, v), chunks


def nibbles(rows):
    """4-bit codes, scales and least values of rows, by the oracle; scales of NaN where rows are NaN."""
    numbers, scales, leasts = nibbles_of(np.nan_to_num(np.asarray(rows.astype(jnp.float32))), 32)
    scales[np.isnan(wide(rows)).any(axis=-1)] = np.nan
    return pallas_kernels.Int4Pool(*map(jnp.asarray, (words_of(numbers), scales, leasts)))


def coded(rows):
    """8-bit codes and scales of rows, by the oracle; scales of NaN where rows are NaN."""
    codes, scales = bytes_of(np.nan_to_num(np.asarray(rows.astype(jnp.float32))))
    scales[np.isnan(wide(rows)).any(axis=-1)] = np.nan
    return pallas_kernels.Int8Pool(jnp.asarray(codes), jnp.asarray(scales))


def decoded(rows):
    """Float64 rows of codes, scales and least values, or of plain rows."""
    if isinstance(rows, pallas_kernels.Int4Pool):
        groups = numbers_of(np.asarray(rows.code)).reshape(*rows.scale.shape, 32).astype(np.float64)
        return (groups * wide(rows.scale)[..., None] + wide(rows.least)[..., None]).reshape(
            *groups.shape[:-2], -1
        )
    return (
        wide(rows.code) * wide(rows.scale)[..., None]
        if isinstance(rows, pallas_kernels.Int8Pool)
        else wide(rows)
    )


# How keys and values are encoded, by the store.
CODES = {"int8": (coded, coded), "int4": (nibbles, nibbles), "mixed": (coded, nibbles)}


def check_token(
    seed, dim, dtype, group, *, layer, scored=False, widest=None, store=None, values=1.0
):
    encode = CODES.get(store)
    kind, tolerance = DTYPES[dtype]
    given = token_of(seed, dim, dtype, group, layer)
    if values != 1:
        # Small values, and a new token that is attended to most: its key is the first query.
        q, kv, *rest = given
        kv = jnp.stack([q[:, :, :, 0], kv[:, :, 1] * values], axis=2)
        given = (q, kv, *rest[:5], rest[5] * jnp.asarray(values, kind), *rest[6:])
    if encode:
        given = (
            *given[:6],
            *(of(rows) for of, rows in zip(encode, given[6:8], strict=True)),
            *given[8:],
        )
    q, kv, cos, sin, positions, counts, k, v, pos, start, _ = given
    batch, rows = pos.shape
    q, kv = (leaf.sum(axis=0)[:batch] for leaf in (q, kv))
    k_new, v_new = kv[:, 0], kv[:, 1]
    score, begin = draw(seed + 2, (batch, rows), start.shape[1:])
    scores = pallas_kernels.EntryScores(score=score, begin=begin, start=start, widest=widest)
    options = {"scores": scores} if scored else {}
    options["dtype"] = kind
    results = pallas_kernels.append_and_attend(
        *called(given), layer=layer, **options, tiles=SMALL, interpret=True
    )
    out, new_k, new_v, new_pos = results[0][:batch], *results[1:4]
    assert out.dtype == kind and [leaf.dtype for leaf in jax.tree.leaves((new_k, new_v))] == [
        leaf.dtype for leaf in jax.tree.leaves((k, v))
    ]

    cos, sin = np.asarray(cos, np.float64), np.asarray(sin, np.float64)
    rounded = lambda x: wide(jnp.asarray(x, jnp.float32).astype(kind))  # noqa: E731
    queries = rounded(turned(wide(q), cos[:, None, None], sin[:, None, None]))
    key, value = rounded(turned(wide(k_new), cos[:, None], sin[:, None])), rounded(wide(v_new))
    if encode:
        new = zip(encode, (key, value), strict=True)
        key, value = (decoded(of(jnp.asarray(each, jnp.float32))) for of, each in new)
    start, length = np.asarray(start)[layer], LENGTH[layer].copy()
    wanted = [decoded(k), decoded(v), np.asarray(pos).copy(), np.asarray(score, np.float64)]
    for b, h in np.ndindex(*length.shape):
        if counts[b]:
            row = start[b, h] + length[b, h]
            for leaf, put in zip(
                wanted, (key[b, h], value[b, h], positions[b], begin[b, h]), strict=True
            ):
                leaf[b, row] = put
            length[b, h] += 1
    want, _, mass = attend_oracle(
        jnp.asarray(queries), jnp.asarray(wanted[0]), jnp.asarray(wanted[1]), start, length
    )
    np.testing.assert_allclose(wide(out), want, rtol=tolerance, atol=tolerance * values)
    # A rotated key may be rounded the other way; the rest is what it was, bit for bit.
    apart = {"rtol": tolerance / 2, "atol": 1e-6}
    if encode:
        # Here it may be one code away.
        apart = {"rtol": 0, "atol": float(np.nanmax(wide(new_k.scale))) * 1.001}
    np.testing.assert_allclose(decoded(new_k), wanted[0], **apart)
    np.testing.assert_array_equal(decoded(new_v), wanted[1])
    np.testing.assert_array_equal(np.asarray(new_pos), wanted[2])
    if scored:
        mass *= np.asarray(counts)[:, None]
        np.testing.assert_allclose(
            wide(results[4]), wanted[3] + mass, rtol=tolerance, atol=tolerance
        )
        untouched = mass == 0
        np.testing.assert_array_equal(
            np.asarray(results[4])[untouched], np.asarray(score)[untouched]
        )


@pytest.mark.parametrize(
    ("dim", "dtype", "group"),
    [(*kind, group) for kind, group in zip(KINDS, [1, 3, 4, 7, 8, 3], strict=True)],
)
def test_a_token_joins_and_attends(dim, dtype, group):
    """RoPE, append and attention at once; a sequence that has ended keeps its rows, and NaN elsewhere stays there."""
    check_token(0, dim, dtype, group, layer=1)


@pytest.mark.parametrize(
    ("dtype", "group", "widest"),
    [("float32", 3, None), ("float32", 3, 71), ("bfloat16", 20, 71)],
)
def test_a_tokens_attention_is_added_to_scores(dtype, group, widest):
    """The new row's score begins and grows too, by groups of several tiles; logits lie as rows do, or by head."""
    check_token(3, 80, dtype, group, layer=1, scored=True, widest=widest)


@pytest.mark.parametrize(
    ("dim", "dtype", "group", "scored", "store"),
    [
        (64, "float32", 3, True, "int8"),
        (20, "bfloat16", 2, False, "int8"),
        (128, "float16", 20, False, "int4"),
        (64, "bfloat16", 1, True, "int4"),
        (192, "float32", 2, False, "mixed"),
    ],
)
def test_a_token_joins_and_attends_to_rows_in_codes(dim, dtype, group, scored, store):
    """8 bits are read as they are, groups by scales and least values; the new row is encoded as its store does."""
    check_token(
        6, dim, dtype, group, layer=1, scored=scored, widest=71 if scored else None, store=store
    )


@pytest.mark.parametrize(
    ("dtype", "store", "values"),
    [
        ("float32", "int8", 1e-3),
        ("bfloat16", "mixed", 20.0),
    ],
)
def test_a_new_token_weighs_what_its_logit_says_beside_codes(dtype, store, values):
    """Scales of values join the logits of all rows, the new one's too, which is on top."""
    check_token(7, 64, dtype, 1, layer=1, store=store, values=values)


@pytest.mark.parametrize("store", ["int8", "int4"])
def test_thousands_of_rows_in_codes_in_one_chunk(store):
    """What codes have on top does not add up over a chunk."""
    q, k, v = draw(9, (1, 1, 1, 64), (1, 8192, 64), (1, 8192, 64))
    k, v = (of(rows) for of, rows in zip(CODES[store], (k, v + 0.5), strict=True))
    of = (jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1), 8192, jnp.int32))
    chunks = pallas_kernels.build_work_table(of[0][None], of[1][None], programs=1, block=16)
    out, _ = pallas_kernels.attend(q * 0.1, k, v, *of, chunks=chunks, tiles=SMALL, interpret=True)
    want, _, _ = attend_oracle(
        q * 0.1, jnp.asarray(decoded(k)), jnp.asarray(decoded(v)), *map(np.asarray, of)
    )
    np.testing.assert_allclose(wide(out), want, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize(("dtype", "store"), [("float32", "int8"), ("bfloat16", "int4")])
def test_rows_in_codes_of_any_magnitude(dtype, store):
    """Queries and keys from 1e-4 to 1e4, values from 1e-4 to 10, rows of zeros: scales and offsets lose nothing."""
    kind, tolerance = DTYPES[dtype]
    start, rows = laid_out(LENGTH)
    rng = np.random.default_rng(4)
    q, k, v = draw(8, (3, 2, 4, 64), (3, rows, 64), (3, rows, 64))
    # Products stay within some tens, so that more than one row counts.
    size = 10.0 ** rng.integers(-4, 5, (3, 1, 1, 1))
    q, k = (jnp.asarray(q * size * 3).astype(kind), k / size[:, 0])
    sizes = 10.0 ** rng.integers(-4, 2, (3, rows, 1)) * (rng.random((3, rows, 1)) > 0.1)
    k, v = (
        of(rows)
        for of, rows in zip(CODES[store], (k, v * jnp.asarray(sizes, jnp.float32)), strict=True)
    )
    of = (jnp.asarray(start[1]), jnp.asarray(LENGTH[1]))
    out, lse = pallas_kernels.attend(q, k, v, *of, tiles=SMALL, interpret=True)
    want, want_lse, _ = attend_oracle(
        q, jnp.asarray(decoded(k)), jnp.asarray(decoded(v)), start[1], LENGTH[1]
    )
    # Each head by its own outputs.
    largest = np.maximum(np.abs(want).max(axis=(2, 3), keepdims=True), 1e-30)
    np.testing.assert_allclose(
        wide(out) / largest, want / largest, rtol=tolerance, atol=tolerance / 4
    )
    # Products with 8-bit codes are exact; keys in 4 bits are decoded to float16.
    apart = 1e-3 if store == "int4" and dtype == "bfloat16" else 2e-5
    np.testing.assert_allclose(wide(lse), want_lse, rtol=apart, atol=apart)


@pytest.mark.parametrize("alike", [True, False])
def test_a_token_attends_to_picked_rows(alike):
    """Some rows by number, the same for all heads or each head's own, fewer than dealt for; then all from one on."""
    layer, dealt_for, rng = 1, np.asarray([5, 12, 3], np.int32), np.random.default_rng(9)
    q, kv, cos, sin, positions, counts, k, v, pos, start, _ = token_of(2, 80, "float32", 3, layer)
    length = np.stack([LENGTH[0], np.asarray([[9, 70], [40, 33], [4, 17]], np.int32)])
    k, v = draw(3, k.shape, v.shape)
    start, rows = laid_out(length)
    k, v, pos = (jnp.resize(leaf, (3, rows, *leaf.shape[2:])) for leaf in (k, v, pos))
    rest = np.minimum(length, [[[4, 60], [30, 33], [3, 9]]]).astype(np.int32)
    heads = 1 if alike else 2
    most = rest[layer].min(axis=1, keepdims=True) if alike else rest[layer]
    held = np.minimum(np.broadcast_to(dealt_for[:, None] - (not alike), most.shape), most).astype(
        np.int32
    )
    picks = np.zeros((3, heads, 12), np.int32)
    for b, h in np.ndindex(3, heads):
        picks[b, h, : held[b, h]] = np.sort(rng.permutation(most[b, h])[: held[b, h]])
    virtual = dealt_for[:, None] + length[layer] - rest[layer]
    chunks = pallas_kernels.build_work_table(
        jnp.asarray(np.stack([start[0], np.zeros_like(start[0])])),
        jnp.asarray(np.stack([length[0], virtual])),
        programs=7,
        block=16,
    )
    of = (
        jnp.asarray(picks),
        jnp.asarray(dealt_for),
        jnp.asarray(held),
        jnp.asarray(rest),
        jnp.asarray(start),
    )
    given = (q, kv, cos, sin, positions, counts, k, v, pos, jnp.asarray(start), chunks)
    options = {
        "layer": layer,
        "dtype": jnp.float32,
        "picks": pallas_kernels.SelectedEntries(*of),
        "tiles": SMALL,
        "interpret": True,
    }
    out, new_k, new_v, new_pos = pallas_kernels.append_and_attend(*called(given), **options)

    new_k, new_v = wide(new_k), wide(new_v)
    queries = turned(
        wide(q.sum(axis=0)[:3]), *(np.asarray(a, np.float64)[:, None, None] for a in (cos, sin))
    )
    for b, h in np.ndindex(3, 2):
        mine = picks[b, 0 if alike else h][: held[b, 0 if alike else h]]
        read = [*mine, *range(rest[layer, b, h], length[layer, b, h] + int(counts[b]))]
        at = start[layer, b, h] + np.asarray(read, int)
        if counts[b]:
            assert new_pos[b, start[layer, b, h] + length[layer, b, h]] == positions[b]
        want, _, _ = attend_oracle(
            jnp.asarray(queries[b : b + 1, h : h + 1]),
            jnp.asarray(new_k[b : b + 1, at]),
            jnp.asarray(new_v[b : b + 1, at]),
            np.zeros((1, 1), np.int32),
            np.full((1, 1), len(read), np.int32),
        )
        np.testing.assert_allclose(wide(out)[b, h], want[0, 0], rtol=1e-5, atol=1e-5)

"""Rows in 8 and 4 bits: each rounding by a numpy oracle, and every policy's choices, caches and answers over them."""

import dataclasses
import re
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import lettered
import meshes
import numpy as np
import pytest
import tiny
from policy_table import BY_NAME

import jaxkv
from jaxkv.cache import DenseStore, Int4Store, Int8Store, MixedStore, ResidualInt4Store
from jaxkv.exporting import runtime

KINDS = {"int8": Int8Store, "int4": Int4Store, "mixed": MixedStore}
PROMPTS = (61, 40)
POOLS = ("full", "adakv", "d2o", "pyramidkv-entropy", "streaming-rolling", "quest", "omnikv")


def scale_for(width):
    """The float16 scale for steps of `width`, at least the smallest one."""
    return np.where(width > 0, np.maximum(np.float32(width), np.float32(2.0**-24)), width).astype(
        np.float16
    )


def bytes_of(rows):
    """Oracle of 8 bits: codes and scale of each vector, by loops."""
    codes, scales = np.zeros(rows.shape, np.int8), np.zeros(rows.shape[:-1], np.float16)
    for at in np.ndindex(*rows.shape[:-1]):
        row = rows[at].astype(np.float32)
        scales[at] = scale_for(np.abs(row).max() / np.float32(127))
        if scales[at]:
            codes[at] = np.clip(np.rint(row / np.float32(scales[at])), -127, 127)
    return codes, scales


def nibbles_of(rows, size):
    """Oracle of 4 bits: numbers from 0 to 15, scale and least value of each group of `size` elements, by loops."""
    groups = rows.shape[-1] // size
    codes = np.zeros(rows.shape, np.uint8)
    scales, leasts = (np.zeros((*rows.shape[:-1], groups), np.float16) for _ in range(2))
    for at in np.ndindex(*rows.shape[:-1], groups):
        own = (*at[:-1], slice(at[-1] * size, (at[-1] + 1) * size))
        part = rows[own].astype(np.float32)
        leasts[at] = np.float16(part.min())
        off = part - np.float32(leasts[at])
        scales[at] = scale_for(np.maximum(part.max() - np.float32(leasts[at]), 0) / np.float32(15))
        if scales[at]:
            codes[own] = np.clip(np.rint(off / np.float32(scales[at])), 0, 15)
    return codes, scales, leasts


def words_of(numbers):
    """Numbers as words: of four neighbouring groups of 32 where 128 divides their count, else of the two halves."""
    dim = numbers.shape[-1]
    if dim % 128:
        return numbers[..., : dim // 2] | (numbers[..., dim // 2 :] << 4)
    words = np.zeros((*numbers.shape[:-1], dim // 4), np.uint16)
    for at in range(dim):
        block, group, element = at // 128, at // 32 % 4, at % 32
        words[..., 32 * block + element] |= numbers[..., at].astype(np.uint16) << 4 * group
    return words


def numbers_of(words):
    """What `words_of` made words of."""
    if words.dtype == np.uint8:
        return np.concatenate([words & 15, words >> 4], axis=-1)
    dim = 4 * words.shape[-1]
    found = [words[..., 32 * (at // 128) + at % 32] >> 4 * (at // 32 % 4) & 15 for at in range(dim)]
    return np.stack(found, axis=-1)


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(64, "float32"), (80, "bfloat16"), (256, "float16")],
)
def test_roundings_are_the_oracles_bit_by_bit(dim, dtype):
    rng = np.random.default_rng(dim)
    rows = rng.normal(size=(2, 9, dim)) * np.exp(rng.normal(size=(2, 9, 1)) * 3) + rng.normal(
        size=(dim,)
    )
    rows[0, 0], rows[0, 1], rows[0, 2] = 0.0, 3.0, 1e-9
    given = jnp.asarray(rows, dtype)
    exact, size = np.asarray(given.astype(jnp.float32)), np.gcd(dim, 32)
    found = MixedStore.encode_entries(given, given)
    codes, scales = bytes_of(exact)
    np.testing.assert_array_equal(found.k.code, codes)
    np.testing.assert_array_equal(found.k.scale, scales)
    numbers, steps, leasts = nibbles_of(exact, size)
    np.testing.assert_array_equal(found.v.code, words_of(numbers))
    np.testing.assert_array_equal(found.v.scale, steps)
    np.testing.assert_array_equal(found.v.least, leasts)
    # Decoded rows lie within half a step of the true ones, and a rounding of the least value.
    wide = dataclasses.replace(found, wide="float32")
    k, v = (np.asarray(each) for each in wide.decode_entries())
    assert (np.abs(k - exact) <= 0.51 * scales[..., None].astype(np.float32) + 1e-7).all()
    step = np.repeat(steps.astype(np.float32), size, axis=-1)
    off = np.repeat(np.abs(leasts.astype(np.float32)) * 2.0**-11, size, axis=-1)
    assert (np.abs(v - exact) <= 0.51 * step + off + 1e-7).all()
    assert [each.dtype for each in found.decode_entries()] == [given.dtype] * 2


@pytest.mark.parametrize("store", ["int8", "int4"])
def test_moving_rows_does_not_round_them_again(store):
    rows = jax.random.normal(jax.random.key(0), (2, 12, 64))
    kind = KINDS[store]
    held = kind.encode_entries(rows, rows)
    for _ in range(10):
        held = held.gather_entries(jnp.asarray([[11, *range(11)]] * 2))
    back = held.gather_entries(jnp.asarray([[*range(10, 12), *range(10)]] * 2))
    chex_equal = [
        np.array_equal(a, b)
        for a, b in zip(
            jax.tree.leaves(back), jax.tree.leaves(kind.encode_entries(rows, rows)), strict=True
        )
    ]
    assert all(chex_equal)
    none = jnp.full((2, 1), 12)
    put = held.overwrite_entries((jnp.asarray([[3], [4]]), rows[:, :1] * 9), (none, rows[:, :1]))
    same = np.asarray(put.k.code != held.k.code).any(axis=-1)
    assert same.sum() == 2 and same[0, 3] and same[1, 4]
    chex.assert_trees_all_equal(put.v, held.v)
    sizes = sum(leaf.nbytes for leaf in jax.tree.leaves(held)) // (2 * 12)
    assert sizes == kind.compute_entry_bytes(64, 4)
    assert np.isnan(
        np.asarray(kind.encode_entries(rows.at[0, 0, 0].set(jnp.nan), rows).decode_entries()[0])[
            0, 0
        ]
    ).any()


# A row of each kind of pool with one store, in turns.
CASES = [(BY_NAME[name], [*KINDS][at % 3]) for at, name in enumerate(POOLS)]


@pytest.mark.parametrize(("row", "store"), CASES, ids=lambda each: getattr(each, "name", each))
def test_choices_are_made_before_rows_are_rounded(row, store):
    """Rows are at the dense store's positions, in fewer bytes; answers are sampled."""
    model, prompts = tiny.tiny(tiny.TWO_LAYERS), tiny.prompts(1, PROMPTS)
    dense = jaxkv.Session(model, row.make(24)).prefill(prompts)
    policy = (
        dataclasses.replace(row.make(24), store=store)
        if row.keeps_all
        else row.make(24, store=store)
    )
    session = jaxkv.Session(model, policy)
    cache = session.prefill(prompts, new=8)
    assert {type(pool.store) for pool in cache.pools} == {KINDS[store]}
    np.testing.assert_array_equal(cache.kept, dense.kept)
    for mine, its in zip(tiny.segments(cache), tiny.segments(dense), strict=True):
        (*one, k, v, pos), (*other, its_k, its_v, its_pos) = mine, its
        assert one == other
        np.testing.assert_array_equal(pos, its_pos)
        for ours, theirs in ((k, its_k), (v, its_v)):
            assert np.abs(ours - theirs).max(initial=0) <= np.abs(theirs).max(initial=0) / 7
    assert cache.entry_bytes < dense.entry_bytes and (session.sample(cache, 8)[1] >= 0).all()


def test_meshes_draw_the_same():
    """Prompts, questions on top of them and tokens; the planned bytes are the cache's."""
    policy, model = (
        meshes.roomy("adakv", store="int4-residual"),
        tiny.tiny(tiny.shape(layers=2, kv_heads=4, group=2, dim=8)),
    )
    alone = meshes.ran(model, policy, asks=True)
    assert meshes.ran(model.on(meshes.mesh_of(2, 4)), policy, asks=True) == alone


def test_saved_caches_engines_and_exports_hold_the_same_rows(tmp_path):
    model, policy = lettered.tiny(), jaxkv.KNorm(budget=16, store="int4-residual")
    text, options = lettered.DOC, {"max_new_tokens": 9, "stop_at_eos": False}
    cache = jaxkv.prefill(model, text, policy=policy)
    cache.save(tmp_path / "cache")
    again = jaxkv.load_cache(tmp_path / "cache", model)
    chex.assert_trees_all_equal(again.arrays, cache.arrays)
    assert again.policy == policy
    assert {type(pool.store) for pool in again.pools} == {ResidualInt4Store}
    asked = jaxkv.generate(model, "who?", cache=cache, **options)
    assert jaxkv.generate(model, "who?", cache=again, **options).text == asked.text
    alone = jaxkv.generate(model, text, policy=policy, **options)
    limits = {"slots": 2, "max_prompt_tokens": 64, "max_question_tokens": 16, "max_new_tokens": 16}
    with jaxkv.Engine(model, policy=policy, **limits) as engine:
        document = engine.document(text)
        requests = [
            engine.submit(text, **options),
            engine.submit("who?", document=document, **options),
        ]
        assert [each.result().text for each in requests] == [alone.text, asked.text]
    folder = jaxkv.export(
        model, tmp_path / "export", policy=policy, lengths=64, question=0, new=9, batch=1
    )
    tokens, answer, _ = runtime.Model(folder).generate(text, 9)
    assert tokens == alone.tokens.tolist() and answer == alone.text


@pytest.mark.parametrize("store", ["int8", "int4"])
def test_decoded_rows_have_the_same_codes_and_scales_again(store):
    rows = jax.random.normal(jax.random.key(1), (2, 300, 64)) * jnp.exp(
        jax.random.normal(jax.random.key(2), (2, 300, 1))
    )
    held = KINDS[store].encode_entries(rows, rows + 0.3)
    chex.assert_trees_all_equal(KINDS[store].encode_entries(*held.decode_entries()), held)


def test_compressing_again_rounds_no_row_twice():
    """Five times over 40 tokens: what is still there of the prompt has the codes and scales it was first held in."""
    model = tiny.tiny(tiny.TWO_LAYERS)
    session = jaxkv.Session(model, jaxkv.KeyDiff(budget=24, every=8, store="int4"))
    first = session.prefill(tiny.prompts(3, PROMPTS), new=40)
    last, _ = session.sample(first, 40)
    held, compared = {}, 0
    for cache in (first, last):
        for layer, pool in enumerate(cache.pools):
            start, length = np.asarray(cache.start)[layer], np.asarray(cache.length)[layer]
            codes, scales, leasts = (np.asarray(each) for each in jax.tree.leaves(pool.store.k))
            pos = np.asarray(pool.pos)
            for row, head in np.ndindex(*start.shape):
                for at in range(start[row, head], start[row, head] + length[row, head]):
                    key = (layer, row, head, pos[row, at])
                    code = (
                        codes[row, at].tobytes()
                        + scales[row, at].tobytes()
                        + leasts[row, at].tobytes()
                    )
                    compared += key in held
                    assert held.setdefault(key, code) == code
    assert compared > 50


def test_what_no_store_can_be_is_refused(as_users_call):
    narrow = tiny.tiny(tiny.shape(layers=1, kv_heads=1, group=1, dim=12))
    for given in ("int2", jaxkv.KNorm):
        with pytest.raises(ValueError, match="store="):
            jaxkv.SnapKV(budget=64, store=given)
    assert (
        jaxkv.SnapKV(budget=64, store=Int4Store)
        == jaxkv.SnapKV(budget=64, store="int4")
        != jaxkv.SnapKV(budget=64)
    )
    with pytest.raises(ValueError, match="store='int4'"):
        jaxkv.AdaKV(base=jaxkv.SnapKV(budget=64, store="int8"), store="int4")
    with pytest.raises(ValueError, match="need dense entries"):
        jaxkv.OmniKV(filter_layers=(0,), store="int8", offload=True)
    with pytest.raises(ValueError, match="has no 4-bit groups"):
        jaxkv.Session(narrow, jaxkv.KNorm(budget=8, store="int4")).prefill([[1] * 20])
    k = jnp.zeros((1, 2, 32, 8))
    with pytest.raises(ValueError, match="policy=KNorm.*transformed entries"):
        jaxkv.compress(k, k, policy=jaxkv.KNorm(budget=8, store="int4"))
    held = jaxkv.compress(k, k, policy=jaxkv.KNorm(budget=8, store="int8"))
    assert isinstance(held.get_layer_pool().store, Int8Store)


def test_the_page_says_what_a_row_takes():
    """Bytes of a row of 128 elements with its position, as docs/policies.md lists them, are those of a cache."""
    page = (Path(__file__).parents[1] / "docs" / "policies.md").read_text()
    listed = dict(
        re.findall(
            r'^\| `"(dense|int8|mixed|int4)"` \|.*\| (\d+)(?: bytes in bfloat16)? \|$', page, re.M
        )
    )
    k = jnp.zeros((1, 1, 128), jnp.bfloat16)
    for name, store in {"dense": DenseStore, **KINDS}.items():
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(store.encode_entries(k, k)))
        assert int(listed[name]) == held + 4 == store.compute_entry_bytes(128, 2) + 4


def test_plans_count_narrow_rows_and_what_reads_them():
    """GPU kernels read rows of 8 and 4 bits as they are; evicted from, they are decoded, a layer at a time."""
    setting = {"gpus": "h200", "context": 32768, "batch": 8, "new": 128}
    dense, int8, int4 = (
        jaxkv.plan("llama-3.1-8b", policy=jaxkv.SnapKV(budget=2048, store=store), **setting)
        for store in ("dense", "int8", "int4")
    )
    assert dense.speed.rows > int8.speed.rows
    assert int4.speed is None and "4 bits" in int4.silent
    assert (
        0.5 < int8.sizes.cache / dense.sizes.cache < 0.53
        and int4.sizes.cache / dense.sizes.cache < 0.32
    )
    assert int8.sizes.decode == int4.sizes.decode == dense.sizes.decode
    dense, int4 = (
        jaxkv.plan("llama-3.1-8b", policy=jaxkv.H2O(budget=2048, store=store), **setting)
        for store in ("dense", "int4")
    )
    assert int4.speed is None and int4.silent
    assert int4.sizes.decode - dense.sizes.decode == 8 * 8 * (2048 + 1) * 2 * 128 * 2

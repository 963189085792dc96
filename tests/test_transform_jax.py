"""What is done with rows token by token, and what JAX may do with them: jit, vmap, grad, shard_map, 16 bits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles as o
import pytest
from jax.sharding import PartitionSpec as P
from transforming import (
    ADA,
    ENTROPY,
    LENGTHS,
    SLOTS,
    SNAP,
    WINDOW,
    attended,
    batched,
    draw,
    kept,
    one_step,
    segments,
)

import jaxkv
from jaxkv import AdaKV, KNorm, SnapKV
from jaxkv.policies import Merge

# --- what is done with rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "tokens"), [(SNAP, 4), (ADA, 1)])
def test_new_tokens_attend_to_what_was_kept(policy, tokens):
    k, v, q = draw()
    new_k, new_v, new_q = draw(1)
    rows = jaxkv.compress(
        k, v, queries=q, length=jnp.asarray(LENGTHS), policy=policy, headroom=2 * tokens
    )
    for step in range(2):
        part = slice(step * tokens, (step + 1) * tokens)
        rows = rows.append(new_k[:, :, part], new_v[:, :, part])
        out = rows.attend(new_q[:, :, part])
        np.testing.assert_allclose(out, attended(new_q[:, :, part], rows, last=tokens), atol=2e-5)
    np.testing.assert_array_equal(rows.seen[0], np.asarray(LENGTHS) + 2 * tokens)
    for _, row, head, _, _, pos in segments(rows):
        assert pos[-2 * tokens :].tolist() == [LENGTHS[row] + n for n in range(2 * tokens)]
        np.testing.assert_array_equal(rows.positions()[row][head], pos)


def test_layers_share_a_pool(policy=AdaKV(base=ENTROPY)):  # noqa: B008  a value
    arrays, new = [draw(layer) for layer in range(3)], [draw(layer + 9) for layer in range(3)]
    k, v, q = (list(each) for each in zip(*arrays, strict=True))
    rows = jaxkv.compress_layers(
        k, v, queries=q, length=jnp.asarray(LENGTHS), policy=policy, headroom=4
    )
    assert [pool.k.shape for pool in rows.pools] == [(2, 2 * 3 * (16 + 4), 8)]
    before = kept(rows)
    for step in range(4):
        for layer, (new_k, new_v, new_q) in enumerate(new):
            part = slice(step, step + 1)
            rows = rows.append(new_k[:, :, part], new_v[:, :, part], layer=layer)
            out = rows.attend(new_q[:, :, part], layer=layer)
            np.testing.assert_allclose(
                out, attended(new_q[:, :, part], rows, layer=layer), atol=2e-5
            )
    for layer, row, head in np.ndindex(3, 2, 2):
        grown = [*before[layer][row][head], *range(LENGTHS[row], LENGTHS[row] + 4)]
        assert kept(rows)[layer][row][head] == rows.positions(layer)[row][head].tolist() == grown
    with pytest.raises(ValueError, match="layer=3: give an index from 0 to 2"):
        rows.positions(3)


def test_everything_kept_is_full_attention():
    k, v, q = draw(slots=SLOTS + 1)
    policy = AdaKV(base=SnapKV(budget=SLOTS, window=WINDOW))
    rows = jaxkv.compress(
        k[:, :, :-1], v[:, :, :-1], queries=q[:, :, :-1], policy=policy, headroom=1
    )
    rows = rows.append(k[:, :, -1:], v[:, :, -1:])
    for row in range(2):
        whole, _ = o.causal_attention(q[row], k[row], v[row])
        np.testing.assert_allclose(rows.attend(q[:, :, -1:])[row, :, 0], whole[:, -1], atol=2e-5)


def test_padded_tokens_stay_out():
    k, v, q = draw()
    new_k, new_v, new_q = (each[:, :, :4] for each in draw(1))
    start = jaxkv.compress(k, v, queries=q, length=jnp.asarray(LENGTHS), policy=ADA, headroom=4)
    count = jnp.asarray([4, 2])
    poison = lambda each: each.at[1, :, 2:].set(jnp.nan)  # noqa: E731
    rows = start.append(poison(new_k), poison(new_v), count=count)
    out = rows.attend(new_q, count=count)
    short = start.append(new_k[:, :, :2], new_v[:, :, :2])
    np.testing.assert_allclose(
        out[1, :, :2], attended(new_q[:, :, :2], short, last=2)[1], atol=2e-5
    )
    np.testing.assert_allclose(out[0], attended(new_q, rows, last=4)[0], atol=2e-5)
    assert np.isfinite(np.asarray(out)).all()
    np.testing.assert_array_equal(rows.seen[0], [54, 39])


@pytest.mark.parametrize("policy", [SNAP, ADA], ids=["equal", "ragged"])
def test_tokens_without_room_are_refused_or_left_out(policy):
    k, v, q = draw()
    rows = jaxkv.compress(k, v, queries=q, length=jnp.asarray([64, 60]), policy=policy, headroom=2)
    rows = rows.append(k[:, :, :1], v[:, :, :1])
    message = (
        "^k='[0-9]+ tokens': [0-9]+ more than the headroom: give jaxkv.compress a larger headroom"
    )
    with pytest.raises(ValueError, match=message):
        rows.append(9 + k[:, :, :40], 9 + v[:, :, :40])
    after = jax.jit(jaxkv.CompressedKV.append)(rows, 9 + k[:, :, :40], 9 + v[:, :, :40])
    free = np.asarray(rows.compute_remaining_headroom())
    for before, (*at, keys, _, pos) in zip(segments(rows), segments(after), strict=True):
        assert at == list(before[:3])
        held = len(before[5])
        assert pos[:held].tolist() == before[5].tolist()
        np.testing.assert_array_equal(keys[:held], before[3])
        np.testing.assert_array_equal(keys[held:], 9 + np.asarray(k)[at[1], at[2], : free[at[1]]])
    assert not np.asarray(after.compute_remaining_headroom()).any()


# --- transformations -------------------------------------------------------------------------------------------------


def test_jit_gives_the_same_and_one_compilation_serves_all_lengths():
    arrays, policy = draw(), jaxkv.H2O(budget=0.3, mode="prefill")
    run = functools.partial(one_step, policy=policy)
    jitted = jax.jit(run)
    for lengths in ((50, 37), (64, 20)):
        ours, theirs = (each(*arrays, jnp.asarray(lengths)) for each in (jitted, run))
        assert kept(ours[0]) == kept(theirs[0])
        for mine, its in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(mine, its, atol=1e-6)
    assert jitted._cache_size() == 1


def test_budgets_from_scores_are_the_same_in_a_trace():
    base = SnapKV(budget=16, window=4, layers=jaxkv.policies.VarianceLayers(), merge=Merge())
    policy = AdaKV(base=base)
    k, v, q = (list(each) for each in zip(*[draw(layer) for layer in range(2)], strict=True))
    run = lambda length: jaxkv.compress_layers(k, v, queries=q, length=length, policy=policy)  # noqa: E731
    jitted = jax.jit(run)
    for lengths in ((50, 37), (64, 30)):
        assert kept(jitted(jnp.asarray(lengths))) == kept(run(jnp.asarray(lengths)))
    assert jitted._cache_size() == 1


def test_vmap_is_a_loop(policy=ADA):
    arrays = [draw(seed) for seed in range(2)]
    stacked = [jnp.stack(each) for each in zip(*arrays, strict=True)]
    lengths = jnp.asarray([[50, 37], [64, 20]])
    one = lambda *given: one_step(*given, policy=policy)  # noqa: E731
    with batched():
        rows, out = jax.jit(jax.vmap(one))(*stacked, lengths)
    for index, given in enumerate(arrays):
        alone, mine = one(*given, lengths[index])
        assert kept(jax.tree.map(lambda leaf: leaf[index], rows)) == kept(alone)  # noqa: B023
        np.testing.assert_allclose(out[index], mine, atol=1e-6)


@pytest.mark.parametrize(
    ("policy", "dtype"), [(SNAP, jnp.bfloat16), (ADA, jnp.float32)], ids=["equal", "ragged"]
)
def test_gradients_reach_the_kept_rows_and_stop_at_the_choice(policy, dtype):
    k, v, q = draw(dtype=dtype)
    new_k, new_v, new_q = (each[:, :, :2] for each in draw(1, dtype=dtype))
    length = jnp.asarray(LENGTHS)
    weights = jnp.asarray(np.random.default_rng(2).standard_normal(new_q.shape), jnp.float32)

    def ours(k, v, q, new_k, new_v, new_q):
        rows = jaxkv.compress(k, v, queries=q, length=length, policy=policy, headroom=2)
        rows = rows.append(new_k, new_v)
        return (rows.attend(new_q).astype(jnp.float32) * weights).sum()

    given = (k, v, q, new_k, new_v, new_q)
    mask = np.zeros((2, 2, SLOTS + 2), bool)
    for _, row, head, _, _, pos in segments(
        jaxkv.compress(k, v, queries=q, length=length, policy=policy)
    ):
        mask[row, head, pos] = True
    mask[:, :, SLOTS:] = True

    def whole(k, v, q, new_k, new_v, new_q):
        """The same rows of the whole arrays, under a mask."""
        wide = lambda a: a.astype(jnp.float32)  # noqa: E731
        keys, values = (
            jnp.concatenate([wide(a), wide(b)], axis=2) for a, b in ((k, new_k), (v, new_v))
        )
        grouped = wide(new_q).reshape(2, 2, 3, 2, 8)
        logits = jnp.einsum("bkgnd,bksd->bkgns", grouped, keys) / np.float32(np.sqrt(8))
        late = np.arange(SLOTS + 2) > SLOTS + np.arange(2)[:, None]
        seen = mask[:, :, None, None] & ~late
        out = jnp.einsum(
            "bkgns,bksd->bkgnd", jax.nn.softmax(jnp.where(seen, logits, -1e30)), values
        )
        return (out.reshape(weights.shape) * weights).sum()

    mine, its = (jax.jit(jax.grad(each, argnums=tuple(range(6))))(*given) for each in (ours, whole))
    atol = 1e-5 if dtype == jnp.float32 else 0.06
    for ours_, theirs in zip(mine, its, strict=True):
        np.testing.assert_allclose(
            np.asarray(ours_, np.float32), np.asarray(theirs, np.float32), atol=atol
        )
    assert not np.asarray(mine[2]).any() and all(
        np.asarray(mine[at], np.float32).any() for at in (0, 1, 3, 4, 5)
    )


@pytest.mark.parametrize(
    ("policy", "checked", "parts"),
    [
        (dataclasses.replace(SNAP, merge=Merge()), False, P("data", "kv")),
        # Heads that look at one another lie together.
        (ADA, True, P("data")),
    ],
    ids=["merge", "adakv"],
)
def test_sequences_and_kv_heads_can_lie_on_several_devices(policy, checked, parts):
    k, v, q = draw(heads=4)
    mesh = jax.make_mesh((2, 4), ("data", "kv"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def one(k, v, q, length):
        rows, out = one_step(k, v, q, length, policy=policy)
        return rows.get_layer_pool().pos, rows.get_layer_pool().k, rows.get_layer_pool().v, out

    length = jnp.asarray(LENGTHS)
    specs = {
        "in_specs": (parts, parts, parts, P("data")),
        "out_specs": (parts,) * 4,
        "check_vma": checked,
    }
    split = jax.jit(jax.shard_map(one, mesh=mesh, **specs))(k, v, q, length)
    for ours, theirs in zip(split, one(k, v, q, length), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_sixteen_bits(policy=ADA):
    arrays = draw(dtype=jnp.bfloat16)
    rows, out = jax.jit(one_step, static_argnames=("policy",))(
        *arrays, jnp.asarray(LENGTHS), policy=policy
    )
    assert out.dtype == rows.get_layer_pool().k.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(out, np.float64), attended(arrays[2][:, :, :1], rows), atol=0.03
    )


def test_a_process_may_have_chosen_64_bits():
    k, v, q = draw()
    with jax.enable_x64(True):
        run = jax.jit(lambda n: one_step(k, v, q, n, policy=ADA))
        rows, out = run(jnp.asarray(LENGTHS, jnp.int32))
    assert out.dtype == jnp.float32 and rows.length.dtype == jnp.int32
    assert kept(rows) == kept(one_step(k, v, q, jnp.asarray(LENGTHS), policy=ADA)[0])


@pytest.mark.usefixtures("as_users_call")
def test_more_queries_than_the_last_rows_have_positions_are_refused():
    k, v, q = draw()
    rows = jaxkv.compress(k, v, queries=q, length=jnp.asarray(LENGTHS), policy=ADA, headroom=4)
    rows = rows.append(*(each[:, :, :2] for each in draw(seed=1)[:2]))
    held = 2 + WINDOW
    many = q[:, :, : held + 6]
    with pytest.raises(ValueError, match=f"q='{held + 6} tokens': sequence 0 "):
        rows.attend(many)
    with pytest.raises(ValueError, match=f"q='{held + 6} tokens': sequence 1 "):
        rows.attend(many, count=jnp.asarray([held, held + 6]))
    # No more than that is right, whether `append` put them there or the window kept them, and so are fewer of some.
    few = many[:, :, :held]
    np.testing.assert_allclose(rows.attend(few), attended(few, rows, last=held), atol=2e-5)
    out = rows.attend(many, count=jnp.asarray([held, 1]))
    np.testing.assert_allclose(out[0, :, :held], attended(few, rows, last=held)[0], atol=2e-5)
    np.testing.assert_allclose(out[1, :, 0], attended(few[:, :, :1], rows)[1, :, 0], atol=2e-5)


@pytest.mark.usefixtures("as_users_call")
def test_queries_of_tokens_that_were_appended_one_by_one_and_of_sequences_that_took_no_part():
    k, v, _ = draw()
    new_k, new_v, new_q = (each[:, :, :4] for each in draw(seed=1))
    start = jaxkv.compress(k, v, length=jnp.asarray(LENGTHS), policy=KNorm(budget=16), headroom=4)
    rows = start
    for at in range(4):
        one = slice(at, at + 1)
        rows = rows.append(new_k[:, :, one], new_v[:, :, one], count=jnp.asarray([1, 0]))
    out = rows.attend(new_q, count=jnp.asarray([4, 0]))
    np.testing.assert_allclose(out[0], attended(new_q, rows, last=4)[0], atol=2e-5)
    with pytest.raises(ValueError, match="q='4 tokens': sequence 1 "):
        rows.attend(new_q, count=jnp.asarray([0, 4]))
    # Of what found no room no row tells, and none is asked for.
    full = jax.jit(lambda *new: start.append(*new))(
        *(jnp.tile(each, (1, 1, 2, 1)) for each in (new_k, new_v))
    )
    both = jnp.tile(new_q, (1, 1, 2, 1))
    np.testing.assert_allclose(full.attend(both), attended(both, full, last=8), atol=2e-5)
    # It is counted, also where it comes again.
    assert (
        full.left_out.tolist() == [[4, 4]] and not start.left_out.any() and not rows.left_out.any()
    )
    again = jax.jit(jaxkv.CompressedKV.append)(full, new_k, new_v, count=jnp.asarray([0, 3]))
    assert again.left_out.tolist() == [[4, 7]] and again.seen.tolist() == [
        [LENGTHS[0] + 8, LENGTHS[1] + 11]
    ]

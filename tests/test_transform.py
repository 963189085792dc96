"""The transform: what it keeps against `prefill` and the oracles, what it refuses, and what JAX may do with it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles as o
import pytest
import tiny
from jax.sharding import PartitionSpec as P
from policy_table import SPANS, TABLE, WINDOW, Row

import jaxkv
from jaxkv import AdaKV, FullKV, KNorm, Merge, PyramidKV, Random, SnapKV
from jaxkv.attention.xla import Form
from jaxkv.models import prefill as prefilling
from jaxkv.policies import EntropyLayers, KVPressLayers, LinearLayers
from jaxkv.transform import _sizes

GQA, SLOTS = tiny.MODELS["gqa3"], 64
LENGTHS = (50, 37)
SNAP = SnapKV(budget=16, window=WINDOW)
ADA = AdaKV(base=SNAP)
ENTROPY = PyramidKV(budget=16, window=WINDOW, allocation=EntropyLayers())


def refusal(row: Row) -> str | None:
    """What the message says where a row of the table is refused."""
    if row.rolling:
        return "RoPE"
    if row.evicts:
        return "none go"
    if row.name == "omnikv":
        return "what is read"
    return "output projection" if "critical" in row.name else None


TAKEN = [row for row in TABLE if refusal(row) is None]
REFUSED = [row for row in TABLE if refusal(row) is not None]
named = lambda rows: pytest.mark.parametrize("row", rows, ids=lambda row: row.name)  # noqa: E731


def draw(seed=0, *, batch=2, heads=2, group=3, slots=SLOTS, dim=8, dtype=jnp.float32):
    """Random k, v `[B, K, S, D]` and all queries `[B, H, S, D]`."""
    rng = np.random.default_rng(seed)
    shapes = ((batch, heads, slots, dim), (batch, heads, slots, dim), (batch, heads * group, slots, dim))
    k, v, q = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    return k, v, 1.5 * q


def poisoned(array, lengths=LENGTHS):
    """What is not a number in place of padding."""
    inside = np.arange(array.shape[2]) < np.asarray(lengths)[:, None]
    return jnp.where(inside[:, None, :, None], array, jnp.nan)


@pytest.fixture(scope="module")
def layers():
    """Keys, values and queries of every layer of a tiny model over two prompts, padding poisoned."""
    model, ids = tiny.tiny(GQA), tiny.prompts(0, LENGTHS)
    cache, _, needed = tiny.run(model, ids, FullKV())
    tokens = np.zeros((2, needed.slots), np.int32)
    for row, each in enumerate(ids):
        tokens[row, : len(each)] = each
    length = jnp.asarray(LENGTHS, jnp.int32)
    read = prefilling.read_layers(tiny.flat(model), jnp.asarray(tokens), length, queries=needed.slots)
    out = []
    for pool, (q, _, _) in zip(cache.pools, read, strict=True):
        k, v = (leaf.reshape(2, GQA.kv_heads, needed.slots, GQA.head_dim) for leaf in (pool.k, pool.v))
        q = q.reshape(2, GQA.heads, needed.slots, GQA.head_dim)
        # They come with the last one last: each sequence's first one to the front.
        q = jnp.stack([jnp.roll(each, n - needed.slots, axis=1) for each, n in zip(q, LENGTHS, strict=True)])
        out.append([poisoned(each) for each in (k, v, q)])
    return [list(each) for each in zip(*out, strict=True)]


def segments(rows: jaxkv.Rows):
    """Every segment as `(layer, sequence, head, k, v, pos)` of its rows."""
    start, length = np.asarray(rows.start), np.asarray(rows.length)
    for at in np.ndindex(*start.shape):
        layer, row, _ = at
        index = 0 if rows.form is Form.SHARED else layer
        span = slice(start[at], start[at] + length[at])
        yield *at, *(np.asarray(leaf[index])[row, span] for leaf in (rows.k, rows.v, rows.pos))


def kept(rows: jaxkv.Rows) -> list:
    """Positions by layer, sequence and head."""
    layers, batch, heads = rows.start.shape
    out = [[[None] * heads for _ in range(batch)] for _ in range(layers)]
    for layer, row, head, _, _, pos in segments(rows):
        out[layer][row][head] = pos.tolist()
    return out


def attended(q, rows: jaxkv.Rows, *, last: int = 1, layer: int = 0) -> np.ndarray:
    """Float64 attention of the last queries `[B, H, N, D]` over a layer's rows, each over those that come no later."""
    q = np.asarray(q, np.float64)
    batch, heads, _, dim = q.shape
    out = np.zeros(q.shape)
    for at, row, head, k, v, pos in segments(rows):
        group = heads // rows.start.shape[2]
        for h in range(head * group, head * group + group) if at == layer else ():
            for n in range(last):
                here = pos <= np.asarray(rows.seen)[layer, row] - last + n
                weights = np.exp(k[here].astype(np.float64) @ q[row, h, n] / np.sqrt(dim))
                out[row, h, n] = weights @ v[here].astype(np.float64) / weights.sum()
    return out


# --- what it keeps ---------------------------------------------------------------------------------------------------


@named(TAKEN)
@pytest.mark.parametrize("budget", [20, 0.5])
def test_keeps_what_prefill_keeps(row, budget, layers):
    policy = row.policy(budget)
    cache, _, _ = tiny.run(tiny.tiny(GQA), tiny.prompts(0, LENGTHS), policy)
    k, v, q = layers
    rows = jaxkv.compress_layers(k, v, queries=q, length=jnp.asarray(LENGTHS), policy=policy, room=3)
    assert kept(rows) == tiny.kept(cache)
    for ours, theirs in zip(segments(rows), tiny.segments(cache), strict=True):
        for mine, its in zip(ours[3:], theirs[3:], strict=True):
            np.testing.assert_allclose(mine, its, atol=2e-5)
    np.testing.assert_array_equal(rows.seen, np.broadcast_to(LENGTHS, rows.seen.shape))
    assert all((np.asarray(rows.free(layer)) >= 3).all() for layer in range(GQA.layers))
    parts = policy.parts()
    if parts.form is Form.SHARED or parts.nested:
        return
    for layer in range(GQA.layers):
        options = {"layer": layer, "layers": GQA.layers, "length": jnp.asarray(LENGTHS), "room": 3}
        alone = jaxkv.compress(k[layer], v[layer], queries=q[layer], policy=policy, **options)
        assert kept(alone) == [kept(rows)[layer]]
        assert alone.k[0].shape == rows.k[layer].shape


@named(REFUSED)
def test_what_needs_more_is_refused_by_name(row, layers):
    k, v, q = (each[0] for each in layers)
    with pytest.raises(ValueError, match=f"^policy=.*{refusal(row)}"):
        jaxkv.compress(k, v, queries=q, length=jnp.asarray(LENGTHS), policy=row.policy(20), layers=GQA.layers)


def test_a_window_of_queries_does_as_well_as_all():
    k, v, q = draw()
    length = jnp.asarray([50, 5])
    last = jnp.stack([q[0, :, 50 - WINDOW : 50], jnp.roll(q[1], 3, axis=1)[:, :WINDOW]])
    every = jaxkv.compress(k, v, queries=q, length=length, policy=SNAP)
    assert kept(jaxkv.compress(k, v, queries=last, length=length, policy=SNAP)) == kept(every)


def test_draws_follow_the_key():
    k, v, _ = draw()
    policy = Random(budget=16)
    rows = [kept(jaxkv.compress(k, v, policy=policy, key=key)) for key in (None, jax.random.key(0), 1)]
    assert rows[0] == rows[1] != rows[2]


def test_a_policy_can_be_named():
    k, v, _ = draw()
    assert kept(jaxkv.compress(k, v, policy="knorm")) == kept(jaxkv.compress(k, v, policy=KNorm))


@pytest.mark.parametrize("budget", [7, 100, 0.1, 1 / 3, 0.30000000000000004, 0.7, 1.0])
@pytest.mark.parametrize("policy", [KNorm(), SnapKV(window=4, sinks=2, protect=SPANS)], ids=["plain", "spans"])
def test_traced_budgets_are_exact_for_every_length(policy, budget):
    if isinstance(budget, float):
        policy = dataclasses.replace(policy, min_budget="clamp")
    policy = dataclasses.replace(policy, budget=budget)
    k, v, q = draw(batch=SLOTS + 1, heads=1, group=1, dim=2)
    lengths = jnp.arange(SLOTS + 1, dtype=jnp.int32)
    rows = jax.jit(lambda n: jaxkv.compress(k, v, queries=q, length=n, policy=policy))(lengths)
    first, last = policy.parts().keep.sinks, policy.parts().keep.window
    for n, length in enumerate(np.asarray(rows.length)[0, :, 0].tolist()):
        forced = len(o.forced_positions(n, first, last, policy.protect)) if n else 0
        assert length == (max(o.resolve_budget(budget, n), forced) if n else 0), n


def test_forced_rows_are_the_hosts_for_every_length():
    policy = SnapKV(budget=20, window=4, sinks=3, protect=(*SPANS, (-3, 2), (5, -20), (-200, -100)))
    lengths = np.arange(SLOTS + 1)
    mask = jax.jit(lambda n: policy.parts().keep.mask(n, SLOTS))(jnp.asarray(lengths, jnp.int32))
    np.testing.assert_array_equal(mask, policy.parts().keep.mask(lengths, SLOTS))
    np.testing.assert_array_equal(
        _sizes(policy.parts(), 1, SLOTS).forced, policy.parts().keep.mask(lengths, SLOTS).sum(axis=1)
    )


@pytest.mark.parametrize("allocation", [LinearLayers(), KVPressLayers(beta=1.5)], ids=["linear", "kvpress"])
@pytest.mark.parametrize("budget", [20, 0.3])
def test_schedules_are_the_hosts_for_every_length(allocation, budget):
    policy = PyramidKV(budget=budget, window=4, allocation=allocation, min_budget="clamp")
    sizes = _sizes(policy.parts(), 4, SLOTS)
    for n in range(1, SLOTS + 1):
        length = np.asarray([n])
        forced = policy.parts().keep.mask(length, SLOTS).sum(axis=1)
        parts = policy.parts()
        rows = parts.layers.rows(
            parts.budgets(length, forced, strict=False), length, forced, layers=4, window=4, weights=None
        )
        np.testing.assert_array_equal(sizes.rows[:, n], np.minimum(rows, n)[:, 0])
    assert sizes.capacity == tuple(sizes.rows.max(axis=1).tolist())


def test_scores_that_are_no_numbers_are_refused():
    k, v, q = draw()
    with pytest.raises(ValueError, match="^scores='NaN': .*layer 2"):
        jaxkv.compress(k.at[0, 1, 3, 0].set(jnp.nan), v, queries=q, policy=KNorm(budget=8), layer=2)


# --- what is done with it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [SNAP, ADA, FullKV()], ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("tokens", [1, 4])
def test_new_tokens_attend_to_what_was_kept(policy, tokens):
    k, v, q = draw()
    new_k, new_v, new_q = draw(1)
    rows = jaxkv.compress(k, v, queries=q, length=jnp.asarray(LENGTHS), policy=policy, room=2 * tokens)
    for step in range(2):
        part = slice(step * tokens, (step + 1) * tokens)
        rows = jaxkv.append(rows, new_k[:, :, part], new_v[:, :, part])
        out = jaxkv.attend(new_q[:, :, part], rows)
        np.testing.assert_allclose(out, attended(new_q[:, :, part], rows, last=tokens), atol=2e-5)
    np.testing.assert_array_equal(rows.seen[0], np.asarray(LENGTHS) + 2 * tokens)
    for _, row, _, _, _, pos in segments(rows):
        assert pos[-2 * tokens :].tolist() == [LENGTHS[row] + n for n in range(2 * tokens)]


@pytest.mark.parametrize("policy", [ENTROPY, AdaKV(base=ENTROPY)], ids=["entropy", "adakv-entropy"])
def test_layers_share_a_pool(policy):
    arrays, new = [draw(layer) for layer in range(3)], [draw(layer + 9) for layer in range(3)]
    k, v, q = (list(each) for each in zip(*arrays, strict=True))
    rows = jaxkv.compress_layers(k, v, queries=q, length=jnp.asarray(LENGTHS), policy=policy, room=4)
    assert [leaf.shape for leaf in rows.k] == [(2, 2 * 3 * (16 + 4), 8)]
    before = kept(rows)
    for step in range(4):
        for layer, (new_k, new_v, new_q) in enumerate(new):
            part = slice(step, step + 1)
            rows = jaxkv.append(rows, new_k[:, :, part], new_v[:, :, part], layer=layer)
            out = jaxkv.attend(new_q[:, :, part], rows, layer=layer)
            np.testing.assert_allclose(out, attended(new_q[:, :, part], rows, layer=layer), atol=2e-5)
    for layer, row, head in np.ndindex(3, 2, 2):
        grown = [*before[layer][row][head], *range(LENGTHS[row], LENGTHS[row] + 4)]
        assert kept(rows)[layer][row][head] == grown


def test_everything_kept_is_full_attention():
    k, v, q = draw(slots=SLOTS + 1)
    policy = AdaKV(base=SnapKV(budget=SLOTS, window=WINDOW))
    rows = jaxkv.compress(k[:, :, :-1], v[:, :, :-1], queries=q[:, :, :-1], policy=policy, room=1)
    rows = jaxkv.append(rows, k[:, :, -1:], v[:, :, -1:])
    for row in range(2):
        whole, _ = o.causal_attention(q[row], k[row], v[row])
        np.testing.assert_allclose(jaxkv.attend(q[:, :, -1:], rows)[row, :, 0], whole[:, -1], atol=2e-5)


def test_padded_tokens_stay_out():
    k, v, q = draw()
    new_k, new_v, new_q = (each[:, :, :4] for each in draw(1))
    start = jaxkv.compress(k, v, queries=q, length=jnp.asarray(LENGTHS), policy=ADA, room=4)
    count = jnp.asarray([4, 2])
    poison = lambda each: each.at[1, :, 2:].set(jnp.nan)  # noqa: E731
    rows = jaxkv.append(start, poison(new_k), poison(new_v), count=count)
    out = jaxkv.attend(new_q, rows, count=count)
    short = jaxkv.append(start, new_k[:, :, :2], new_v[:, :, :2])
    np.testing.assert_allclose(out[1, :, :2], attended(new_q[:, :, :2], short, last=2)[1], atol=2e-5)
    np.testing.assert_allclose(out[0], attended(new_q, rows, last=4)[0], atol=2e-5)
    assert np.isfinite(np.asarray(out)).all()
    np.testing.assert_array_equal(rows.seen[0], [54, 39])


@pytest.mark.parametrize("policy", [SNAP, ADA], ids=["equal", "ragged"])
def test_tokens_without_room_are_refused_or_left_out(policy):
    k, v, q = draw()
    rows = jaxkv.compress(k, v, queries=q, length=jnp.asarray([64, 60]), policy=policy, room=2)
    rows = jaxkv.append(rows, k[:, :, :1], v[:, :, :1])
    with pytest.raises(ValueError, match="^rows='[0-9]+ rows short': there is room for 1 more tokens: .*room"):
        jaxkv.append(rows, 9 + k[:, :, :40], 9 + v[:, :, :40])
    after = jax.jit(jaxkv.append)(rows, 9 + k[:, :, :40], 9 + v[:, :, :40])
    free = np.asarray(rows.free())
    for before, (*at, keys, _, pos) in zip(segments(rows), segments(after), strict=True):
        assert at == list(before[:3])
        held = len(before[5])
        assert pos[:held].tolist() == before[5].tolist()
        np.testing.assert_array_equal(keys[:held], before[3])
        np.testing.assert_array_equal(keys[held:], 9 + np.asarray(k)[at[1], at[2], : free[at[1]]])
    assert not np.asarray(after.free()).any()


# --- what JAX may do with it -----------------------------------------------------------------------------------------


def step(k, v, q, length, *, policy):
    """One compression, one token, one attention."""
    rows = jaxkv.compress(k, v, queries=q, length=length, policy=policy, room=1)
    rows = jaxkv.append(rows, k[:, :, :1], v[:, :, :1])
    return rows, jaxkv.attend(q[:, :, :1], rows)


@pytest.mark.parametrize(
    "policy",
    [SNAP, ADA, SnapKV(budget=0.3, window=4), jaxkv.H2O(budget=0.3, mode="prefill")],
    ids=["snapkv", "adakv", "ratio", "h2o"],
)
def test_jit_gives_the_same_and_one_compilation_serves_all_lengths(policy):
    arrays = draw()
    run = functools.partial(step, policy=policy)
    jitted = jax.jit(run)
    for lengths in ((50, 37), (64, 20)):
        ours, theirs = (each(*arrays, jnp.asarray(lengths)) for each in (jitted, run))
        assert kept(ours[0]) == kept(theirs[0])
        for mine, its in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(mine, its, atol=1e-6)
    assert jitted._cache_size() == 1


@pytest.mark.parametrize(
    "policy",
    [
        dataclasses.replace(ENTROPY, budget=0.3),
        AdaKV(base=SnapKV(budget=16, window=4, allocation=jaxkv.VarianceLayers(), merge=Merge())),
    ],
    ids=["entropy", "adakv-variance"],
)
def test_budgets_from_scores_are_the_same_in_a_trace(policy):
    k, v, q = (list(each) for each in zip(*[draw(layer) for layer in range(3)], strict=True))
    run = lambda length: jaxkv.compress_layers(k, v, queries=q, length=length, policy=policy)  # noqa: E731
    jitted = jax.jit(run)
    for lengths in ((50, 37), (64, 30)):
        assert kept(jitted(jnp.asarray(lengths))) == kept(run(jnp.asarray(lengths)))
    assert jitted._cache_size() == 1


@pytest.mark.parametrize("policy", [SNAP, ADA], ids=["equal", "ragged"])
def test_vmap_is_a_loop(policy):
    arrays = [draw(seed) for seed in range(3)]
    stacked = [jnp.stack(each) for each in zip(*arrays, strict=True)]
    lengths = jnp.asarray([[50, 37], [64, 20], [16, 33]])
    one = lambda *given: step(*given, policy=policy)  # noqa: E731
    rows, out = jax.vmap(one)(*stacked, lengths)
    for index, given in enumerate(arrays):
        alone, mine = one(*given, lengths[index])
        assert kept(jax.tree.map(lambda leaf: leaf[index], rows)) == kept(alone)  # noqa: B023
        np.testing.assert_allclose(out[index], mine, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("policy", [SNAP, ADA], ids=["equal", "ragged"])
def test_gradients_reach_the_kept_rows_and_stop_at_the_choice(policy, dtype):
    k, v, q = draw(dtype=dtype)
    new_k, new_v, new_q = (each[:, :, :2] for each in draw(1, dtype=dtype))
    length = jnp.asarray(LENGTHS)
    weights = jnp.asarray(np.random.default_rng(2).standard_normal(new_q.shape), jnp.float32)

    def ours(k, v, q, new_k, new_v, new_q):
        rows = jaxkv.compress(k, v, queries=q, length=length, policy=policy, room=2)
        rows = jaxkv.append(rows, new_k, new_v)
        return (jaxkv.attend(new_q, rows).astype(jnp.float32) * weights).sum()

    given = (k, v, q, new_k, new_v, new_q)
    mask = np.zeros((2, 2, SLOTS + 2), bool)
    for _, row, head, _, _, pos in segments(jaxkv.compress(k, v, queries=q, length=length, policy=policy)):
        mask[row, head, pos] = True
    mask[:, :, SLOTS:] = True

    def whole(k, v, q, new_k, new_v, new_q):
        """The same rows of the whole arrays, under a mask."""
        wide = lambda a: a.astype(jnp.float32)  # noqa: E731
        keys, values = (jnp.concatenate([wide(a), wide(b)], axis=2) for a, b in ((k, new_k), (v, new_v)))
        grouped = wide(new_q).reshape(2, 2, 3, 2, 8)
        logits = jnp.einsum("bkgnd,bksd->bkgns", grouped, keys) / np.float32(np.sqrt(8))
        late = np.arange(SLOTS + 2) > SLOTS + np.arange(2)[:, None]
        seen = mask[:, :, None, None] & ~late
        out = jnp.einsum("bkgns,bksd->bkgnd", jax.nn.softmax(jnp.where(seen, logits, -1e30)), values)
        return (out.reshape(weights.shape) * weights).sum()

    mine, its = (jax.jit(jax.grad(each, argnums=tuple(range(6))))(*given) for each in (ours, whole))
    atol = 1e-5 if dtype == jnp.float32 else 0.06
    for ours_, theirs in zip(mine, its, strict=True):
        np.testing.assert_allclose(np.asarray(ours_, np.float32), np.asarray(theirs, np.float32), atol=atol)
    assert not np.asarray(mine[2]).any() and all(np.asarray(mine[at], np.float32).any() for at in (0, 1, 3, 4, 5))


@pytest.mark.parametrize(
    ("policy", "checked"),
    [(SNAP, True), (KNorm(budget=0.3), True), (jaxkv.H2O(budget=16, mode="prefill"), False)]
    + [(dataclasses.replace(SNAP, merge=Merge()), False)],
    ids=["snapkv", "knorm", "h2o", "merge"],
)
def test_kv_heads_can_lie_on_several_devices(policy, checked):
    k, v, q = draw(heads=4)
    mesh = jax.make_mesh((4,), ("kv",), axis_types=(jax.sharding.AxisType.Auto,))
    heads = P(None, "kv")

    def one(k, v, q, length):
        rows, out = step(k, v, q, length, policy=policy)
        return rows.pos[0], rows.k[0], out

    length = jnp.asarray(LENGTHS)
    specs = {"in_specs": (heads, heads, heads, P()), "out_specs": (heads, heads, heads), "check_vma": checked}
    split = jax.jit(jax.shard_map(one, mesh=mesh, **specs))(k, v, q, length)
    for ours, theirs in zip(split, one(k, v, q, length), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("policy", [SNAP, ADA], ids=["equal", "ragged"])
def test_sixteen_bits(policy):
    arrays = draw(dtype=jnp.bfloat16)
    rows, out = jax.jit(step, static_argnames=("policy",))(*arrays, jnp.asarray(LENGTHS), policy=policy)
    assert out.dtype == rows.k[0].dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float64), attended(arrays[2][:, :, :1], rows), atol=0.03)


def test_a_process_may_have_chosen_64_bits():
    k, v, q = draw()
    with jax.enable_x64(True):
        run = jax.jit(lambda n: step(k, v, q, n, policy=ADA))
        rows, out = run(jnp.asarray(LENGTHS, jnp.int32))
    assert out.dtype == jnp.float32 and rows.length.dtype == jnp.int32
    assert kept(rows) == kept(step(k, v, q, jnp.asarray(LENGTHS), policy=ADA)[0])


# --- what is refused -------------------------------------------------------------------------------------------------


def call(policy=SNAP, **changed):
    k, v, q = draw()
    return jaxkv.compress(**({"k": k, "v": v, "queries": q, "policy": policy} | changed))


@pytest.mark.usefixtures("as_users_call")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"queries": None}, "queries=None: WindowAttention looks at attention: give the last 8 queries"),
        ({"queries": jnp.zeros((2, 6, 4, 8))}, "queries='4 of 64 tokens': .*last 8 queries"),
        ({"queries": jnp.zeros((2, 2, 3, 64, 8))}, r"queries=\[2, 2, 3, 64, 8\]: .*q.reshape\(B, K \* G, N, D\)"),
        ({"queries": jnp.zeros((2, 5, 64, 8))}, r"queries=\[2, 5, 64, 8\]: .*a multiple of K = 2"),
        ({"queries": jnp.zeros((2, 6, 64, 8), jnp.bfloat16)}, "queries='bfloat16': keys are float32"),
        ({"policy": jaxkv.H2O(budget=16, mode="prefill"), "queries": None}, "queries=None: .*all S queries"),
        ({"policy": jaxkv.H2O(budget=16, mode="prefill"), "queries": jnp.zeros((2, 6, 8, 8))}, "queries=.*all S"),
        ({"policy": SnapKV(budget=16, window=8, every=4)}, "policy=SnapKV.*every"),
        ({"policy": PyramidKV(budget=16)}, "layers=None: PyramidKV's budget differs by layer"),
        ({"policy": PyramidKV(budget=16), "layer": 3, "layers": 3}, "layer=3: .*below layers=3"),
        ({"policy": ENTROPY, "layers": 3}, "policy=.*compress_layers"),
        ({"policy": jaxkv.PyramidInfer(budget=64), "layers": 3}, "policy=.*compress_layers"),
        ({"policy": SnapKV(budget=0.1, window=8)}, "budget=0.1: .*clamp"),
        ({"k": jnp.zeros((2, 64, 8))}, r"k=\[2, 64, 8\]: give \[B, K, S, D\]"),
        ({"k": jnp.zeros((2, 2, 64, 8), jnp.int32)}, "k='int32': give floating-point"),
        ({"v": jnp.zeros((2, 2, 63, 8))}, r"v='float32\[2, 2, 63, 8\]'"),
        ({"v": jnp.zeros((2, 2, 64, 8), jnp.bfloat16)}, "v='bfloat16"),
        ({"length": jnp.asarray([64, 65])}, r"length=\[64, 65\]: there are 64 tokens"),
        ({"length": jnp.asarray([64])}, r"length='int32\[1\]': give one whole number for each of 2"),
        ({"length": jnp.asarray([64.0, 3.0])}, r"length='float32\[2\]'"),
        ({"room": -1}, "room=-1"),
        ({"layer": -1}, "layer=-1"),
    ],
)
def test_arguments_are_refused_by_name(changed, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call(**changed)


@pytest.mark.usefixtures("as_users_call")
def test_tokens_that_do_not_fit_are_refused_by_name():
    rows, (k, v, q) = call(room=4), draw(1)
    some = slice(0, 2)
    for message, use in (
        (r"k=\[2, 1, 2, 8\]: these rows take", lambda: jaxkv.append(rows, k[:, :1, some], v[:, :1, some])),
        ("k='bfloat16': ", lambda: jaxkv.append(rows, *(x[:, :, some].astype(jnp.bfloat16) for x in (k, v)))),
        (r"count=\[3, 0\]", lambda: jaxkv.append(rows, k[:, :, some], v[:, :, some], count=jnp.asarray([3, 0]))),
        ("layer=1: these rows hold layers 0 to 0", lambda: jaxkv.attend(q[:, :, some], rows, layer=1)),
        (r"q=\[2, 2, 3, 2, 8\]: ", lambda: jaxkv.attend(q[:, :, some].reshape(2, 2, 3, 2, 8), rows)),
        (r"q=\[1, 6, 2, 8\]: ", lambda: jaxkv.attend(q[:1, :, some], rows)),
        ("v='2 layers'", lambda: jaxkv.compress_layers([k], [v, v], policy=KNorm)),
        (r"k='float32\[2, 2, 8, 8\]'", lambda: jaxkv.compress_layers([k, k[:, :, :8]], [v, v[:, :, :8]], policy=KNorm)),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            use()

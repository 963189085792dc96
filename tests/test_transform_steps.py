"""`CompressedKV.step` in no model: every token against the oracles' plain loops in float64, under the caller's jit."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import oracles as o
import pytest
from stepping import DIM, HEADS, LENGTHS, draw
from test_eviction import CASES, SHARED, check_rows
from transforming import attended, batched

import jaxkv
from jaxkv import H2O, AdaKV, KNorm, Quest, SnapKV
from jaxkv.machine.compilation import StageClock

NEW = 24


def queries(a):
    """`[B, K, G, n, D]` as the transform takes them: `[B, H, n, D]`."""
    return jnp.asarray(a.reshape(len(a), -1, *a.shape[3:]))


def compressed(drawn, policy, **options):
    k, v, length = jnp.asarray(drawn.k), jnp.asarray(drawn.v), jnp.asarray(LENGTHS)
    return jaxkv.compress(
        k, v, queries=queries(drawn.q), length=length, policy=policy, headroom=NEW, **options
    )


def steps(state, drawn):
    """States and outputs after each token."""
    q, k, v = queries(drawn.q_new), jnp.asarray(drawn.k_new), jnp.asarray(drawn.v_new)
    step = jax.jit(
        lambda state, at: state.step(*(each[:, :, at][:, :, None] for each in (q, k, v)))
    )
    for at in range(NEW):
        state, out = step(state, at)
        yield state, np.asarray(out)[:, :, 0]


def agrees(case, seed, budget) -> bool:
    """Asserts equality with the oracle at every step; False where its choices are too narrow to tell."""
    make, sinks, accumulate, share, merge = CASES[case]
    drawn, expected = draw(seed, 2, like=0.7), []
    for row, n in enumerate(LENGTHS):
        *new, q, k, v = drawn.of(row, n)
        recent = max(1, int((budget - sinks) * share))
        given = (*new, *(each[:, :NEW] for each in (q, k, v)))
        rule = {"rows": budget, "sinks": sinks, "recent": recent}
        prefill, after, gap = o.simulate(*given, **rule, accumulate=accumulate, merge=merge)
        if gap < o.MIN_GAP:
            return False
        expected.append(after)
    for at, (state, out) in enumerate(steps(compressed(drawn, make(budget=budget)), drawn)):
        tau = None if state.tables[0].state.tau is None else state.tables[0].state.tau[0]
        segments = SimpleNamespace(start=state.segment_starts[0], length=state.length[0], tau=tau)
        check_rows(
            state.get_layer_pool(), segments, [each[at] for each in expected], accumulate, merge
        )
        for row in range(len(LENGTHS)):
            np.testing.assert_allclose(
                out[row].reshape(-1, DIM), expected[row][at]["out"], atol=1e-5
            )
        assert not np.asarray(state.left_out).any()
    return True


@pytest.mark.parametrize("case", [*sorted(set(CASES) - set(SHARED)), "norm", "halving"])
def test_every_token_agrees_with_the_oracle(case):
    assert any(agrees(case, seed, 16) for seed in range(3))


def test_eviction_begins_when_the_budget_is_reached():
    assert any(agrees("h2o", seed, 40) for seed in range(3))


def test_a_state_takes_no_more_memory_than_budget_and_one_token():
    drawn = draw(0, 2)
    state = compressed(drawn, H2O(budget=16))
    assert state.get_layer_pool().row_count == HEADS * 17
    assert compressed(drawn, H2O(budget=44)).get_layer_pool().row_count == HEADS * 45


def test_tokens_read_the_pages_of_the_oracle():
    drawn, policy = draw(1, 2), Quest(budget=16, page=4)
    state, gaps = compressed(drawn, policy, layer=2, layers=4), []
    for at, (_, out) in enumerate(steps(state, drawn)):
        for row, n in enumerate(LENGTHS):
            _, k, v, q_new, k_new, v_new = drawn.of(row, n)
            held = [
                np.concatenate([a, b[:, : at + 1]], axis=1) for a, b in ((k, k_new), (v, v_new))
            ]
            rows, gap = o.quest_rows(q_new[:, at], held[0], budget=16, page=4)
            gaps.append(gap)
            if gap > o.MIN_GAP:
                wanted = o.attention_over(q_new[:, at], *held, rows)
                np.testing.assert_allclose(out[row], wanted, atol=1e-5)
    assert np.mean(np.asarray(gaps) > o.MIN_GAP) > 0.9


def test_policies_that_append_take_several_tokens_at_once():
    drawn = draw(2, 3)
    state = compressed(drawn, AdaKV(base=SnapKV(budget=16, window=4)))
    q, k, v = (each[:, :, :5] for each in (queries(drawn.q_new), drawn.k_new, drawn.v_new))
    count = jnp.asarray([5, 3])
    after, out = state.step(q, jnp.asarray(k), jnp.asarray(v), count=count)
    halves = state.append(jnp.asarray(k), jnp.asarray(v), count=count)
    assert after.length.tolist() == halves.length.tolist()
    np.testing.assert_allclose(out[0], halves.attend(q, count=count)[0], atol=2e-5)
    np.testing.assert_allclose(out[0], attended(q, after, last=5)[0], atol=2e-5)
    np.testing.assert_allclose(out[1, :, :3], halves.attend(q, count=count)[1, :, :3], atol=2e-5)


def test_a_sequence_of_no_token_stays_as_it_is():
    drawn = draw(3, 2)
    state = compressed(drawn, H2O(budget=16))
    one = [each[:, :, :1] for each in (queries(drawn.q_new), drawn.k_new, drawn.v_new)]
    after, _ = jax.jit(lambda *new: state.step(*new, count=jnp.asarray([1, 0])))(
        *map(jnp.asarray, one)
    )
    both, _ = state.step(*map(jnp.asarray, one))
    assert [each.tolist() for each in after.positions()[1]] == [
        each.tolist() for each in state.positions()[1]
    ]
    assert after.seen.tolist() == [[LENGTHS[0] + 1, LENGTHS[1]]]
    for mine, its in zip(after.positions()[0], both.positions()[0], strict=True):
        assert mine.tolist() == its.tolist()


def test_a_layer_with_a_window_reads_it_alone():
    drawn, policy = draw(4, 2), H2O(budget=16)
    windowed = compressed(drawn, policy, sliding_window=6, layers=2, layer=0)
    for at, (state, out) in enumerate(steps(windowed, drawn)):
        assert not np.asarray(state.left_out).any()
        for row, n in enumerate(LENGTHS):
            _, k, v, q_new, k_new, v_new = drawn.of(row, n)
            held = [
                np.concatenate([a, b[:, : at + 1]], axis=1) for a, b in ((k, k_new), (v, v_new))
            ]
            last = [list(range(n + at + 1 - 6, n + at + 1))] * HEADS
            np.testing.assert_allclose(
                out[row], o.attention_over(q_new[:, at], *held, last), atol=1e-5
            )


def test_what_a_step_cannot_honour_is_rejected_by_name():
    drawn = draw(5, 2)
    several = [each[:, :, :2] for each in (queries(drawn.q_new), drawn.k_new, drawn.v_new)]
    state = compressed(drawn, H2O(budget=16))
    with pytest.raises(ValueError, match="^k='2 tokens': .*one token per call"):
        state.step(*map(jnp.asarray, several))
    for half in (
        lambda: state.append(*map(jnp.asarray, several[1:])),
        lambda: state.attend(several[0]),
    ):
        with pytest.raises(ValueError, match="^state=.*use step"):
            half()
    with pytest.raises(ValueError, match="^layers=None"):
        compressed(drawn, Quest(budget=16, page=4))


def test_it_runs_under_vmap_and_scan():
    drawn, policy = draw(6, 2), H2O(budget=16)
    q, k, v = queries(drawn.q_new), jnp.asarray(drawn.k_new), jnp.asarray(drawn.v_new)
    *_, (one_by_one, out) = steps(compressed(drawn, policy), drawn)

    def whole(k_old, v_old, q_old, length, new):
        state = jaxkv.compress(
            *(each[None] for each in (k_old, v_old)),
            queries=q_old[None],
            length=length[None],
            policy=policy,
            headroom=NEW,
        )
        by_token = jax.tree.map(lambda a: jnp.moveaxis(a[:, :NEW], 1, 0)[:, None, :, None], new)
        return jax.lax.scan(lambda state, token: state.step(*token), state, by_token)

    old = (jnp.asarray(drawn.k), jnp.asarray(drawn.v), queries(drawn.q), jnp.asarray(LENGTHS))
    with batched():
        state, outs = jax.jit(jax.vmap(whole))(*old, (q, k, v))
    np.testing.assert_allclose(outs[:, -1, 0, :, 0], out, atol=1e-5)
    np.testing.assert_array_equal(state.tables[0].length[:, 0, 0], one_by_one.length[0])


@pytest.mark.parametrize(
    "make", [KNorm, lambda **of: AdaKV(base=KNorm(**of), alpha=0.0)], ids=["equal", "ragged"]
)
def test_every_few_tokens_the_state_is_compressed_again(make):
    drawn, policy = draw(7, 2), make(budget=16, every=5)
    state = compressed(drawn, policy)
    # Room for the budget, and for what comes until the next compression.
    assert state.get_layer_pool().row_count <= HEADS * (16 + 5)
    kept = [[head.tolist() for head in row] for row in state.positions()]
    for at, (after, _) in enumerate(steps(state, drawn)):
        for row, n in enumerate(LENGTHS):
            keys = np.concatenate([drawn.k[row][:, :n], drawn.k_new[row]], axis=1)
            norms = np.linalg.norm(keys.astype(np.float64), axis=-1)
            kept[row] = [[*head, n + at] for head in kept[row]]
            if (at + 1) % 5 == 0:
                order = sorted(
                    (norms[head, position], head, position)
                    for head, held in enumerate(kept[row])
                    for position in held
                )
                if isinstance(policy, AdaKV):
                    kept[row] = shared(order)
                else:
                    kept[row] = [
                        sorted([p for _, mine, p in order if mine == head][:16])
                        for head in range(HEADS)
                    ]
            found = [sorted(head.tolist()) for head in after.positions()[row]]
            assert found == kept[row], (at, row)
        assert not np.asarray(after.left_out).any()


def shared(order):
    """Positions that heads keep of a budget for which they compete."""
    best = order[: HEADS * 16]
    return [sorted(p for _, mine, p in best if mine == head) for head in range(HEADS)]


@pytest.mark.parametrize("policy", [H2O(budget=12), Quest(budget=12, page=4)], ids=["h2o", "quest"])
def test_a_sequence_may_begin_without_a_token(policy):
    """It grows to the budget, and reads its pages, as any other."""
    drawn, none = draw(8, 2), {"layer": 2, "layers": 4}
    k, v = jnp.asarray(drawn.k), jnp.asarray(drawn.v)
    begun = jaxkv.compress(
        k,
        v,
        queries=queries(drawn.q),
        length=jnp.asarray([LENGTHS[0], 0]),
        policy=policy,
        headroom=NEW,
        **none,
    )
    for at, (state, out) in enumerate(steps(begun, drawn)):
        held = [each.tolist() for each in state.positions(0)[1]]
        assert len(held[0]) == min(at + 1, 12) or isinstance(policy, Quest)
        if at < 12:
            _, _, _, q_new, k_new, v_new = drawn.of(1, 1)
            rows = [list(range(at + 1))] * HEADS
            wanted = o.attention_over(q_new[:, at], k_new[:, : at + 1], v_new[:, : at + 1], rows)
            np.testing.assert_allclose(out[1], wanted, atol=1e-5)


def test_many_tokens_at_once_are_as_many_halves():
    rng, policy = np.random.default_rng(0), SnapKV(budget=16, window=4)
    new = [jnp.asarray(rng.standard_normal((2, h, 257, DIM)), jnp.float32) for h in (4, 2, 2)]
    old = [jnp.asarray(rng.standard_normal((2, h, 30, DIM)), jnp.float32) for h in (4, 2, 2)]
    state = jaxkv.compress(*old[1:], queries=old[0], policy=policy, headroom=257)
    _, out = state.step(*new)
    np.testing.assert_allclose(out, state.append(*new[1:]).attend(new[0]), atol=2e-5)


@pytest.mark.parametrize("length", (1, 2, 6))
def test_a_prompt_below_its_budget_grows_to_it_and_no_further(length):
    """Sinks that are still to come count: they leave 4 of 8 entries, 3 of them recent."""
    policy, rng = H2O(budget=8, sinks=4, recent=0.75), np.random.default_rng(length)
    new = lambda: jnp.asarray(rng.standard_normal((1, 1, 1, DIM)), jnp.float32)  # noqa: E731
    k = jnp.asarray(rng.standard_normal((1, 1, 6, DIM)), jnp.float32)
    given = {"queries": k, "length": np.asarray([length]), "policy": policy, "headroom": 9}
    state = jaxkv.compress(k, k, **given)
    for _ in range(14):
        state, _ = state.step(new(), new(), new())
    (held,) = state.positions()[0]
    assert len(held) == 8 and {0, 1, 2, 3} <= {*held.tolist()}
    last = length + 13
    assert {last, last - 1, last - 2} <= {*held.tolist()}


@pytest.mark.parametrize("policy", (H2O(budget=8), SnapKV(budget=8, window=2)), ids=repr)
def test_padding_that_is_no_number_changes_nothing(policy):
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    tokens = 1 if isinstance(policy, H2O) else 3
    k, q = make(2, 2, 12, DIM), make(2, 4, 12, DIM)
    state = jaxkv.compress(k, k, queries=q, policy=policy, headroom=9)
    count = jnp.asarray([tokens, tokens - 1])
    given = make(2, 4, tokens, DIM), make(2, 2, tokens, DIM), make(2, 2, tokens, DIM)
    plain, out = state.step(*given, count=count)
    spoiled = (each.at[1, :, tokens - 1 :].set(jnp.nan) for each in given)
    again, same = state.step(*spoiled, count=count)
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(out, same)
    assert not out[1, :, tokens - 1 :].any()


def test_an_eager_step_compiles_once_and_its_state_can_be_donated():
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    policy = SnapKV(budget=8, window=2, every=2)
    k, q = make(2, 2, 12, DIM), make(2, 4, 12, DIM)
    state = jaxkv.compress(k, k, queries=q, policy=policy, headroom=9)
    donating = jax.jit(jaxkv.CompressedKV.step, donate_argnums=0)
    state, _ = donating(state, make(2, 4, 1, DIM), make(2, 2, 1, DIM), make(2, 2, 1, DIM))
    state, _ = state.step(make(2, 4, 1, DIM), make(2, 2, 1, DIM), make(2, 2, 1, DIM))
    new = make(2, 4, 1, DIM), make(2, 2, 1, DIM), make(2, 2, 1, DIM)
    with StageClock() as clock:
        state, _ = state.step(*new)
    assert clock.programs == 0
    with pytest.raises(ValueError, match="query heads"):
        state.step(new[0][:, :2], *new[1:])

"""Scorers and ranks that users write: scores that are no numbers, rows of no rank, programs of what compares equal."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from refusals_parts import Given, Odd, evicting, prefilled
from test_user_policies import policy_of

import jaxkv
from jaxkv import AdaKV, CriticalKV, Policy, VarianceLayers
from jaxkv.policies import KeyNorm, Scorer, UniformLayers
from jaxkv.policies.topk import top

GQA = tiny.MODELS["gqa3"]
pytestmark = pytest.mark.usefixtures("as_users_call")


# --- scorers ----------------------------------------------------------------------------------------------------------


def torn(mass):
    """Not a number at position 30: within the first prompt, behind the second."""
    return mass.at[:, 1, 30].set(jnp.nan)


def test_scores_that_are_not_numbers_are_refused():
    for wrap in (lambda p: p, lambda p: CriticalKV(base=p), lambda p: AdaKV(base=p)):
        with pytest.raises(
            ValueError, match=r"scores='NaN': Given\(.* gave rows of layers \[0, 1, 2\] what is not"
        ):
            prefilled(Given(torn), wrap=wrap)
    # Padding may hold anything.
    policy = policy_of(Given(torn))
    assert jaxkv.prefill(tiny.tiny(GQA), tiny.prompts(1, (25,)), policy=policy).kept.max() == 20


def test_what_is_not_a_number_comes_last():
    scores = jnp.asarray([[[3.0, jnp.nan, -jnp.inf, -jnp.nan, 1.0]]])
    keys = jaxkv.policies.topk.sortable(scores)
    assert top(keys, jnp.asarray([[2]]))[0, 0].tolist() == [True, False, False, False, True]


def test_a_scorer_need_not_be_derived():
    class Plain:
        queries, sums, rank, observe = 0, False, None, KeyNorm.observe

        def scores(self, mass, length):
            return mass

    kept, _, _ = tiny.run(tiny.tiny(GQA), tiny.prompts(1, (40,)), policy_of(Plain()))
    other, _, _ = tiny.run(tiny.tiny(GQA), tiny.prompts(1, (40,)), policy_of(KeyNorm()))
    assert tiny.kept(kept) == tiny.kept(other)


def test_rows_of_no_rank_go_first():
    # Were they never to go, segments would grow over one another.
    out = evicting(Odd(order=lambda score: jnp.where(score > jnp.float32(0.5), jnp.nan, score)))
    assert (out.cache.kept == 20).all()


@dataclasses.dataclass(frozen=True)
class FromTheEnd(Scorer):
    """The first rows for a number of one kind, the last for its equal of another."""

    way: int | float = 1

    def observe(self, seen):
        position = jnp.arange(seen.k.shape[2], dtype=jnp.float32)
        signed = position if isinstance(self.way, float) else -position
        return jnp.broadcast_to(signed, seen.k.shape[:3])


@dataclasses.dataclass(frozen=True)
class Reads(Scorer):
    """Scores by a field of the layer that no property asks for."""

    field: str

    def observe(self, seen):
        return jnp.zeros(seen.k.shape[:3], jnp.float32) + jnp.size(getattr(seen, self.field))


UNASKED = {
    **{
        "q": "queries",
        "q_positions": "queries",
        "sums": "sums",
        "norms": "norms",
        "norm_totals": "norms",
    },
    **{"moments": "future", "replayed": "replay", "blocks": "blocks", "unrotated": "blocks"},
    **{"hidden": "gate", "gate": "gate", "key": "draws"},
}


@pytest.mark.parametrize("name", UNASKED)
def test_what_a_scorer_did_not_ask_for_cannot_be_read(name):
    policy, said = policy_of(Reads(name)), rf"seen\.{name}: .*`{UNASKED[name]}`"
    rng = np.random.default_rng(0)
    k, q = (
        jnp.asarray(rng.standard_normal((2, 2, *shape, 40, 8)), jnp.float32) for shape in ((), (3,))
    )
    compress = functools.partial(jaxkv.compress, policy=policy, length=jnp.asarray([40, 31]))
    for run in (
        lambda: jaxkv.prefill(tiny.tiny(GQA), tiny.prompts(1, (40, 25)), policy=policy),
        lambda: jaxkv.testing.check_policy(policy),
        lambda: compress(k, k, queries=q),
        lambda: jax.jit(compress)(k, k, queries=q),
    ):
        with pytest.raises(TypeError, match=said):
            run()


def test_what_another_part_asked_for_cannot_be_read_either():
    policy = Policy(budget=20, scorer=Reads("sums"), layers=VarianceLayers())
    with pytest.raises(TypeError, match=r"seen\.sums: .*`sums`"):
        jaxkv.prefill(tiny.tiny(GQA), tiny.prompts(1, (40, 25)), policy=policy)
    # Nor by layer budgets that do not say so, which would see an empty window.
    policy = Policy(budget=20, scorer=KeyNorm(), layers=ReadsWindow())
    with pytest.raises(TypeError, match=r"seen\.q: .*`queries`"):
        jaxkv.prefill(tiny.tiny(GQA), tiny.prompts(1, (40, 25)), policy=policy)


@dataclasses.dataclass(frozen=True)
class ReadsWindow(UniformLayers):
    """Layer budgets by the last queries, without `needs_queries`."""

    from_scores = True

    def of_heads(self, scores, candidates, seen):
        return scores.max(axis=-1) + jnp.size(seen.q)


@dataclasses.dataclass(frozen=True)
class OfShorterKeys(Scorer):
    """Another scorer's scores of a layer with smaller keys, of which the layer's other fields are unchanged."""

    base: Scorer

    def observe(self, seen):
        assert jax.tree.structure(seen) == jax.tree.structure(
            jax.tree.map(lambda leaf: leaf, seen)
        ) and repr(seen)
        return self.base.observe(dataclasses.replace(seen, k=seen.k / 2))


def test_a_scorer_may_change_what_another_sees():
    model, ids = tiny.tiny(GQA), tiny.prompts(2, (40, 25))
    ours, other = (
        tiny.run(model, ids, policy_of(each))[0] for each in (OfShorterKeys(KeyNorm()), KeyNorm())
    )
    assert tiny.kept(ours) == tiny.kept(other)


def test_scorers_that_compare_equal_share_no_programs():
    model, ids = tiny.tiny(GQA), tiny.prompts(5, (40,))
    assert FromTheEnd(way=1) == FromTheEnd(way=1.0)
    kept = []
    for way in (1, 1.0):
        policy = Policy(budget=4, scorer=FromTheEnd(way=way))
        cache = jaxkv.prefill(model, ids, policy=policy)
        kept.append([layer[0][0] for layer in tiny.kept(cache)])
    assert kept == [[[0, 1, 2, 3]] * GQA.layers, [[36, 37, 38, 39]] * GQA.layers]


# --- layer budgets ----------------------------------------------------------------------------------------------------


def test_layer_budgets_need_no_base_class():
    """Nor `needs_queries`, which the protocol did not always have."""
    names = ("of_heads", "weight", "rows", "bound", "widest", "recents", "unlimited")
    said = {name: getattr(UniformLayers, name) for name in names}
    plain = type(
        "Plain",
        (),
        said | {"from_scores": False, "exact": True, "joint": False, "needs_sums": False},
    )()
    assert policy_of(KeyNorm(), layers=plain).parts().layers is plain

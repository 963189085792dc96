"""Scorers and ranks that users write: scores that are no numbers, rows of no rank, programs of what compares equal."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import tiny
from refusals_parts import Given, Odd, evicting, prefilled
from test_user_policies import policy_of

import jaxkv
from jaxkv import AdaKV, CriticalKV
from jaxkv.policies import KeyNorm, Scorer
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


def test_rows_of_no_rank_go_first():
    # Were they never to go, segments would grow over one another.
    out = evicting(Odd(order=lambda score: jnp.where(score > jnp.float32(0.5), jnp.nan, score)))
    assert (out.cache.kept == 20).all()


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

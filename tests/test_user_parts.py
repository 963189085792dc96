"""Parts that users write: scores that are no numbers, rows of no rank, what subclasses declare anew."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest
import tiny
from refusals_parts import Given, Odd, evicting, prefilled
from test_user_policies import policy_of

import jaxkv
from jaxkv import AdaKV, ChunkKV, CriticalKV, Refit
from jaxkv.models.config import LayerSpec
from jaxkv.policies import (
    ByAttention,
    HeadBudgets,
    KeyNorm,
    LayerBudgets,
    Merge,
    Needs,
    Scorer,
    SelectionOrder,
    UniformHeads,
    UniformLayers,
)
from jaxkv.policies.topk import mask_top_k

GQA = tiny.MODELS["gqa3"]
pytestmark = pytest.mark.usefixtures("as_users_call")


# --- scorers ----------------------------------------------------------------------------------------------------------


def torn(mass):
    """Not a number at position 30: within the first prompt, behind the second."""
    return mass.at[:, 1, 30].set(jnp.nan)


def test_scores_that_are_not_numbers_are_refused():
    for wrap in (lambda p: p, lambda p: CriticalKV(base=p), lambda p: AdaKV(base=p)):
        with pytest.raises(
            ValueError,
            match=r"scores='NaN': Given\(.* returned NaN in layers \[0, 1, 2\]: correct",
        ):
            prefilled(Given(torn), wrap=wrap)
    # Padding may hold anything.
    policy = policy_of(Given(torn))
    assert jaxkv.prefill(tiny.tiny(GQA), tiny.prompts(1, (25,)), policy=policy).kept.max() == 20


def test_what_is_not_a_number_comes_last():
    scores = jnp.asarray([[[3.0, jnp.nan, -jnp.inf, -jnp.nan, 1.0]]])
    keys = jaxkv.policies.topk.encode_sort_keys(scores)
    assert mask_top_k(keys, jnp.asarray([[2]]))[0, 0].tolist() == [True, False, False, False, True]


def test_rows_of_no_rank_go_first():
    # Were they never to go, segments would grow over one another.
    out = evicting(Odd(order=lambda score: jnp.where(score > jnp.float32(0.5), jnp.nan, score)))
    assert (out.cache.kept == 20).all()


@dataclasses.dataclass(frozen=True)
class OfShorterKeys(Scorer):
    """Another scorer's scores of a layer with smaller keys, of which the layer's other fields are unchanged."""

    base: Scorer

    def score_entries(self, seen):
        assert jax.tree.structure(seen) == jax.tree.structure(
            jax.tree.map(lambda leaf: leaf, seen)
        ) and repr(seen)
        return self.base.score_entries(dataclasses.replace(seen, k=seen.k / 2))


@dataclasses.dataclass(frozen=True)
class ReadsUnasked(Scorer):
    """It reads sums, and asks for values' norms alone, which it finds under their name."""

    needs: ClassVar[Needs] = Needs(norms=True)

    def score_entries(self, seen):
        assert seen.norms.shape == seen.k.shape[:3]
        return seen.sums.mean(axis=2)


def test_what_a_scorer_did_not_ask_for_is_named():
    with pytest.raises(AttributeError, match=r"seen\.sums: .*Needs\(sums=\.\.\.\)"):
        tiny.run(tiny.tiny(GQA), tiny.prompts(2, (40, 25)), policy_of(ReadsUnasked()))


@dataclasses.dataclass(frozen=True)
class ReadsReferences(Scorer):
    """Its scores come from four reference queries."""

    needs: ClassVar[Needs] = Needs(references=4)

    def score_entries(self, seen):
        assert seen.references.shape[3] == 4
        return jnp.einsum("bksd,bkgrd->bks", seen.k, seen.references)


def test_scorers_and_mergers_read_equally_many_reference_queries():
    model, ids = tiny.tiny(GQA), tiny.prompts(2, (40, 25))
    plain, merged = (
        tiny.run(model, ids, dataclasses.replace(policy_of(ReadsReferences()), merge=merge))[0]
        for merge in (None, Merge())
    )
    assert tiny.kept(plain) == tiny.kept(merged)
    with pytest.raises(ValueError, match=r"^merge=ValueRefit.*reads 4 reference queries"):
        Refit(base=policy_of(ReadsReferences()), references=8)


def test_a_scorer_may_change_what_another_sees():
    model, ids = tiny.tiny(GQA), tiny.prompts(2, (40, 25))
    ours, other = (
        tiny.run(model, ids, policy_of(each))[0] for each in (OfShorterKeys(KeyNorm()), KeyNorm())
    )
    assert tiny.kept(ours) == tiny.kept(other)


# --- what a class declares, and its subclasses lose -------------------------------------------------------------------


class Backwards:
    """A mixin that chooses the rows of lowest scores, and ranks the best lowest."""

    def choose_entries(self, rows):
        return UniformHeads().choose_entries(rows._replace(scores=-rows.scores))

    def rank_entries(self, score, age):
        return -score


class BackwardsHeads(Backwards, UniformHeads):
    """Heads of another order than their base declares."""


class BackwardsRank(Backwards, ByAttention):
    """A rank that no kernel was said to compute."""


class OfThree(LayerBudgets, HeadBudgets):
    """Budgets of three layers, which say nothing of models that have windows."""

    needs_layer_index = True
    has_exact_sum = False
    compute_layer_entries, choose_entries = (
        UniformLayers.compute_layer_entries,
        UniformHeads.choose_entries,
    )


def test_a_mixin_takes_what_a_base_declares():
    assert (
        UniformHeads().selection_order
        is type("Named", (UniformHeads,), {})().selection_order
        is SelectionOrder.OWN
    )
    assert BackwardsHeads().selection_order is SelectionOrder.OTHER
    assert ByAttention().runs_in_kernels and not BackwardsRank().runs_in_kernels
    with pytest.raises(ValueError, match="^base="):
        ChunkKV(base=policy_of(KeyNorm(), heads=BackwardsHeads()))


def test_heads_that_differ_by_layer_are_cut_beside_windows():
    policy, kinds = (
        policy_of(KeyNorm(), heads=OfThree()),
        (LayerSpec(), LayerSpec(sliding_window=8)),
    )
    model = tiny.tiny(dataclasses.replace(GQA, kinds=kinds))
    with pytest.raises(ValueError, match=r"^heads=.*restrict_to_full_attention\(sliding_windows\)"):
        jaxkv.prefill(model, tiny.prompts(3, (40,)), policy=policy)

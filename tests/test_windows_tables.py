"""Policies with tables by layer and head, where some layers have windows: their rows are ignored."""

import dataclasses

import numpy as np
import pytest
import tiny
from meshes import mesh_of
from test_windows import KINDS, LENGTHS, SHAPE, prompts
from test_windows_shared import check_rows_and_tokens, drawn

import jaxkv
from jaxkv.engine.plan import plan_prefill
from jaxkv.policies import OfficialVarianceLayers, VarianceLayers

# Four layers, of which the second and the last attend to everything.
TWO = dataclasses.replace(SHAPE, layers=4, kinds=KINDS)
WHOLE = [1, 3]
TABLE = np.random.default_rng(0).uniform(0.05, 1.0, (4, 2))
BY_QUERY_HEAD = np.random.default_rng(1).uniform(0.05, 1.0, (4, 4))
CURVES = np.linspace(0.01, 0.99, 99)[:, None, None] ** np.random.default_rng(2).uniform(
    0.6, 1.4, (4, 2)
)


def tuples(table):
    return tuple(map(tuples, table)) if np.ndim(table) else float(table)


def share(budget):
    """A share that gives the longest prompt as many rows."""
    return min(1.0, budget / max(LENGTHS))


# From a budget and the layers of a table that are given.
POLICIES = {
    "headkv": lambda budget, of=slice(None): jaxkv.HeadKV(
        scores=tuples(TABLE[of]), budget=budget, window=6
    ),
    "headkv, query heads": lambda budget, of=slice(None): jaxkv.HeadKV(
        scores=tuples(BY_QUERY_HEAD[of]), budget=budget, window=6, every=4
    ),
    "lukv": lambda budget, of=slice(None): jaxkv.LUKV(
        curves=tuples(CURVES[:, of]),
        base=jaxkv.SnapKV(budget=share(budget), window=2, min_budget="clamp"),
    ),
    "duoattention": lambda budget, of=slice(None): jaxkv.DuoAttention(
        pattern=tuples(TABLE[of]), sinks=3, window=budget - 3
    ),
    "d2o": lambda budget: jaxkv.D2O(
        budget=budget, sinks=2, layers=VarianceLayers(dense_layers=(-1,))
    ),
    "d2o, official": lambda budget: jaxkv.D2O(
        budget=budget, sinks=2, layers=OfficialVarianceLayers(dense_layers=(1,))
    ),
}
TABLES = [name for name in POLICIES if "d2o" not in name]


def lengths_of(shape, policy):
    """Rows of each segment; bytes are as planned."""
    cache = jaxkv.Session(tiny.tiny(shape), policy).prefill(prompts())
    assert cache.nbytes == plan_prefill(shape, policy, LENGTHS).cache_bytes
    return np.asarray(cache.length)


def test_rows_and_tokens():
    check_rows_and_tokens(TWO, POLICIES["headkv"])


def test_a_mesh():
    """Heads have limits of their own, and are on two devices."""
    model, policy = tiny.tiny(TWO), POLICIES["duoattention"](16)
    assert drawn(model, prompts(), policy, mesh=mesh_of(2, 2)) == drawn(model, prompts(), policy)


@pytest.mark.parametrize("name", TABLES)
def test_layers_without_a_window_keep_what_a_model_of_them_alone_would(name):
    """As many rows of each head: numbers of rows follow from the table, not from what rows hold."""
    found = lengths_of(TWO, POLICIES[name](16))[WHOLE]
    alone = dataclasses.replace(TWO, layers=2, kinds=KINDS[1:])
    assert found.tolist() == lengths_of(alone, POLICIES[name](16, WHOLE)).tolist()
    if name.startswith("headkv"):
        assert (found.sum(axis=(0, 2)) == np.minimum(LENGTHS, 16) * 4).all()


@pytest.mark.parametrize(("name", "dense"), [("d2o", 3), ("d2o, official", 1)])
def test_dense_layers_count_all_layers_of_the_model(name, dense):
    length = lengths_of(TWO, POLICIES[name](40))
    assert (length[dense] == np.asarray(LENGTHS)[:, None]).all()
    if name == "d2o":
        assert (length[WHOLE].sum(axis=(0, 2)) == np.minimum(LENGTHS, 40) * 4).all()


def test_what_is_refused():
    model = tiny.tiny(TWO)
    no_scores = tuples(TABLE * [[1], [0], [1], [0]])
    for policy, named in (
        (jaxkv.HeadKV(scores=no_scores), "scores="),
        (jaxkv.HeadKV(scores=tuples(TABLE[WHOLE])), "scores='layers=2'"),
        (jaxkv.D2O(budget=16, official=True), "dense_layers="),
        (
            jaxkv.D2O(budget=16, layers=VarianceLayers(dense_layers=(4,))),
            r"dense_layers=\(4,\): the model has 4 layers",
        ),
    ):
        with pytest.raises(ValueError, match=named):
            jaxkv.Session(model, policy)

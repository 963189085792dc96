"""Rows of the policy table on meshes of every form: the tokens and the kept rows of a single device."""

import pytest
from meshes import run


@pytest.mark.parametrize(
    ("name", "mesh", "kv_heads"),
    [("globalbudget-h2o", (1, 8), 8), ("defensivekv", (4, 2), 4), ("omnikv", (8, 1), 4)],
)
def test_rows(name, mesh, kv_heads):
    assert run(name, kv_heads, mesh=mesh) == run(name, kv_heads)


# Of layers' pools, and of one for all of them: policies whose heads compete, and look at query heads and at norms.
@pytest.mark.parametrize(
    ("name", "kv_heads", "group"),
    [("adakv-critical", 1, 4), ("adakv-variance", 2, 2)],
)
def test_few_heads(name, kv_heads, group):
    assert run(name, kv_heads, group, mesh=(4, 2)) == run(name, kv_heads, group)

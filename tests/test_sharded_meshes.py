"""One row of the policy table of each kind on meshes of every form: the tokens and the kept rows of a single device."""

import pytest
from meshes import KINDS, run

# Of layers' pools, and of one for all of them: policies whose heads compete, and look at query heads and at norms.
FEW = ("pyramidinfer", "adakv-critical", "adakv-variance")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "mesh, kv_heads", [((1, 8), 8), ((4, 2), 4), ((8, 1), 4)], ids=["1x8", "4x2", "8x1"]
)
def test_one_of_each_kind(name, mesh, kv_heads):
    assert run(name, kv_heads, mesh=mesh) == run(name, kv_heads)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("kv_heads, group", [(2, 2), (1, 4)], ids=["a head each", "one head"])
def test_few_heads(name, kv_heads, group):
    assert run(name, kv_heads, group, mesh=(4, 2)) == run(name, kv_heads, group)

"""Every row of the policy table on meshes of eight devices: the tokens and the kept rows of a single device."""

import pytest
from meshes import BUDGET, run
from policy_table import TABLE


def kind(row):
    """What makes programs differ: how segments lie, what follows the prompt, what is looked at."""
    parts = row.policy(BUDGET).parts()
    return parts.layout, type(parts.after), bool(parts.merge), bool(parts.read), parts.needs.queries > 0


def one_of_each(rows):
    """Names of rows, the last one of each kind: those at the end of the table are made of more parts."""
    return tuple({kind(row): row.name for row in rows}.values())


KINDS = one_of_each(TABLE)
AGAIN = one_of_each(row for row in TABLE if not (row.keeps_all or row.evicts or row.policy(BUDGET).parts().nested))
EVERY = 3


@pytest.mark.parametrize("name", [row.name for row in TABLE])
def test_every_policy(name):
    assert run(name, 4, mesh=(2, 4)) == run(name, 4)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "mesh, kv_heads, group",
    [((1, 8), 8, 2), ((4, 2), 4, 2), ((4, 2), 2, 2), ((8, 1), 4, 2), ((2, 4), 2, 2), ((4, 2), 1, 4)],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_one_of_each_kind_on_other_meshes(name, mesh, kv_heads, group):
    assert run(name, kv_heads, group, mesh=mesh) == run(name, kv_heads, group)


@pytest.mark.parametrize("name", AGAIN)
def test_compressed_again(name):
    once, again = run(name, 4), run(name, 4, every=EVERY)
    assert run(name, 4, mesh=(2, 4), every=EVERY) == again
    assert again.prompts == once.prompts and again.answers != once.answers

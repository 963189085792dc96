"""Every row of the policy table on meshes of eight devices: the tokens and the kept rows of a single device."""

import meshes
import pytest
from meshes import BUDGET, DIM, LAYERS, run
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


# --- what travels ----------------------------------------------------------------------------------------------------

# By program what may: E is hidden states, V logits; what is known of each of R rows, be they a prompt's or a pool's, of
# heads K or of queries w; a letter behind `?` is not there in each. Keys and values never do.
TRAVELS = {
    "_embed": {"all-reduce": ["B R E"]},
    # Attention's and the MLP's sums; norms of values, where a group's query heads lie apart.
    "layer": {"all-reduce": ["B R E", "B K R"]},
    # What is observed, where a group's query heads lie apart; claims of heads on their layer's budget.
    "_observe": {"all-reduce": ["B K R"], "all-gather": ["B K", "B K G"]},
    "unordered": {"all-reduce": [""]},
    "_choose": {"all-gather": ["B K R"]},
    # Whether any head drops rows.
    "_merged": {"all-reduce": ["B"]},
    "_candidates": {"all-reduce": ["B K R"]},
    "_unpacked": {"all-reduce": ["B K R"]},
    # The next token, whether all have ended; TOVA's ranks, and what filters choose by.
    "_loop": {"all-reduce": ["B R E", "", "B K K R", "B w R", "B R"], "all-gather": ["B V"]},
    # The first head's choice, which the next layer's is made of.
    "gather": {"all-reduce": ["B R"]},
    # What a model is known by: samples of its parameters, on their way to the host.
    "_sampled": {"all-reduce": ["", "n", "n n", "n n n", "n n n n"], "all-gather": ["n"]},
}


@pytest.fixture(scope="module")
def compiled():
    """All that runs for any policy with heads, or query heads of one head, apart; nothing is compiled for it anew."""
    for kv_heads, rows in ((4, [row.name for row in TABLE]), (2, KINDS)):
        for name in rows:
            run(name, kv_heads, mesh=(2, 4))
    for name in AGAIN:
        run(name, 4, mesh=(2, 4), every=EVERY)
    return meshes.COMPILED


def fits(shape, letters, config):
    """Whether a shape may be that of an array of these letters."""
    sizes = {"E": config.embed, "V": config.vocab}
    names = letters.split()
    return len(names) == len(shape) and all(
        sizes.get(name, size) == size for name, size in zip(names, shape, strict=True)
    )


def test_no_keys_or_values_travel(compiled):
    config, seen = meshes.model_of(4).config, set()
    for each in compiled:
        for kind, shape in each.sent:
            assert DIM not in shape, (each.name, kind, shape)
            allowed = [letters for letters in TRAVELS.get(each.name, {}).get(kind, []) if fits(shape, letters, config)]
            assert allowed, f"{each.name} sends {shape} by {kind}"
            seen.add((each.name, kind, allowed[0]))
    names = {each.name for each in compiled}
    assert set(TRAVELS) | {"pack", "pack_shared", "placed", "_ring", "_logits"} <= names
    # The table says no more than what was met.
    assert {(name, kind) for name, kinds in TRAVELS.items() for kind in kinds} == {
        (name, kind) for name, kind, _ in seen
    }


def test_a_step_sends_two_sums_a_layer(compiled):
    """And those of the embedding, of the end, the logits; a policy whose heads share a choice one more a layer."""
    for each in compiled:
        if each.name == "_loop":
            kinds = [kind for kind, _ in each.sent]
            assert kinds.count("all-gather") == 1
            assert kinds.count("all-reduce") <= 2 * LAYERS + 2 + LAYERS


def test_pools_stay_where_they_are(compiled):
    assert not [shape for shape in meshes.MOVED if DIM in shape]
    writes = [each for each in compiled if each.name in ("_loop", "pack_shared")]
    assert len(writes) > 10 and not any(each.copied or each.fresh for each in writes)

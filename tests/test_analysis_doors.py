"""What people give to an analysis: numbers and lists of every kind."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxkv
from jaxkv import Random, SnapKV
from jaxkv.analysis import Similarity, best_filters, budgets, filter_layers, recall, retained
from jaxkv.policies.reading import whole_layers

# Users have no checks of annotations, which would speak before jaxkv does.
pytestmark = pytest.mark.usefixtures("as_users_call")
CONFIG = tiny.shape(layers=2, kv_heads=2, group=2, dim=8)
TEXTS = tiny.prompts(0, (40, 23))
POLICY = SnapKV(window=4)


def counted(texts=TEXTS, **options):
    return budgets(tiny.tiny(CONFIG), texts, **{"policies": [POLICY], "budgets": [8], **options})


def test_numbers_of_numpy_are_plain_ones_in_what_is_found(tmp_path):
    plain, given = counted(budgets=[8, 0.4], following=2), np.float32(0.4)
    found = counted(
        budgets=(each for each in (jnp.int32(8), given)), following=np.int64(2), texts=iter(TEXTS)
    )
    assert found.budgets == (8, 0.4) and found.lengths == (38, 21)
    assert json.loads(json.dumps(found.records())) == plain.records()
    found.picture(tmp_path / "found.svg")
    plain.picture(tmp_path / "plain.svg")
    assert (tmp_path / "found.svg").read_bytes() == (tmp_path / "plain.svg").read_bytes()
    layers = filter_layers(
        tiny.tiny(CONFIG), TEXTS, m=1, adjacent=0, share=np.float32(0.1), queries=np.int64(4)
    )
    assert json.loads(layers.to_json())["similarity"]["share"] == 0.1
    assert retained(tiny.tiny(CONFIG), TEXTS[:1], shares=iter((0.5, np.float32(0.1)))).shares == (
        0.1,
        0.5,
    )


def test_a_policy_that_draws_takes_a_seed_or_a_key():
    of = {"policies": {"one": Random()}, "budgets": [8], "following": 4}
    keys = (3, jax.random.key(3), np.int64(4), 0, None)
    one, two, other, *zero = (recall(tiny.tiny(CONFIG), TEXTS, **of, key=key) for key in keys)
    np.testing.assert_array_equal(zero[0].recall, zero[1].recall)
    np.testing.assert_array_equal(one.recall, two.recall)
    assert (one.recall != other.recall).any()


def test_a_picture_goes_through_a_link_and_leaves_nothing_where_it_fails(tmp_path):
    (tmp_path / "link.svg").symlink_to(tmp_path / "real.svg")
    (tmp_path / "folder.svg").mkdir()
    counted().picture(tmp_path / "link.svg")
    with pytest.raises(OSError):
        counted().picture(tmp_path / "folder.svg")
    assert (tmp_path / "link.svg").is_symlink() and (tmp_path / "real.svg").read_text().startswith(
        "<?xml"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "folder.svg",
        "link.svg",
        "real.svg",
    ]


def test_filters_that_are_found_leave_a_layer_to_read_their_choice():
    """OmniKV takes whatever was found, told the same `adjacent`; with more of them it says why it cannot."""
    found = 0
    for layers, m, adjacent, most in itertools.product(
        range(2, 8), (1, 2), (0, 1, 2), (None, 3, 7)
    ):
        mass = np.triu(np.random.default_rng(layers).random((layers, layers))).astype(np.float32)
        given = Similarity(mass=mass, share=0.1, queries=4, lengths=(9,))
        try:
            filters = best_filters(given, m=m, adjacent=adjacent, most_whole=most).filters
        except ValueError as error:
            assert "leave no such set" in str(error)
            continue
        found += 1
        assert len(whole_layers(filters, adjacent, layers)) < layers
        jaxkv.OmniKV(filter_layers=filters, adjacent=adjacent).for_model(layers, None)
    assert found > 40
    with pytest.raises(ValueError, match="all 4 read all, with adjacent=1"):
        jaxkv.OmniKV(filter_layers=(2,)).for_model(4, None)


def test_a_map_that_is_not_finite_is_refused():
    given = Similarity(mass=np.full((4, 4), np.nan, np.float32), share=0.1, queries=4, lengths=(9,))
    with pytest.raises(ValueError, match="not finite"):
        best_filters(given, m=1)


def test_attention_that_is_not_finite_is_no_figure():
    broken = tiny.tiny(CONFIG, seed=5)
    weight = broken.decoder.blocks[1].attention.q
    before = weight[...]
    weight[...] = jnp.full_like(before, jnp.nan)
    try:
        with pytest.raises(ValueError, match="not finite"):
            retained(broken, TEXTS[:1])
    finally:
        weight[...] = before


def test_a_picture_leaves_the_users_own_figures_alone(tmp_path):
    """A notebook's backend shows them; another one, switched to behind its back, would not."""
    from matplotlib import pyplot

    before = pyplot.get_backend()
    try:
        pyplot.switch_backend("svg")
        mine = pyplot.figure()
        counted().picture(tmp_path / "a.png")
        assert pyplot.get_backend() == "svg" and pyplot.get_fignums() == [mine.number]
    finally:
        pyplot.close("all")
        pyplot.switch_backend(before)

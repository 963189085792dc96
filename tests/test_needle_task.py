"""The needle map: one sentence at every length and depth, and how the papers score what was said."""

import pytest

from jaxkv.evals import Needle, Ruler, encode_sample
from jaxkv.evals.needle import NEEDLE
from tests.ruler_cases import model, pieces, small_vocabulary

DEPTHS = (0.0, 0.25, 0.5, 1.0)


@pytest.mark.parametrize("wording", ["official", "small"])
def test_a_grid(wording):
    asked = Needle(lengths=(256, 1024), depths=DEPTHS, count=2, wording=wording)
    made = asked.samples(model())
    assert [(each.tags["length"], each.tags["depth"]) for each in made[::2]] == [
        (length, depth) for length in (256, 1024) for depth in DEPTHS
    ]
    assert len({each.id for each in made}) == len({each.context for each in made}) == 16
    assert made == asked.samples(model()) and {each.group for each in made} == {"needle"}
    for each in made:
        taken = sum(map(len, encode_sample(model().text, each))) + each.new_tokens
        assert 0.9 * each.tags["length"] <= taken <= each.tags["length"]
        at = each.context.find(NEEDLE if wording == "official" else "One of the special magic")
        opening = (
            each.context.index("<book> ") + 7
            if wording == "official"
            else each.context.index("\n") + 1
        )
        hay = len(each.context) - opening
        # At the end of a sentence before its depth, of which the longest takes some of a short text.
        depth = (at - opening) / hay
        headroom = 0.35 if each.tags["length"] == 256 else 0.12
        assert depth <= each.tags["depth"] + 0.02 and depth >= each.tags["depth"] - headroom
        if each.tags["depth"] == 1:
            assert each.context[at:].count(".") == 1
        else:
            assert at == opening or each.context[at - 2] in ".!?"


@pytest.mark.parametrize(
    "positions, fit, long",
    [(2048, (512, 1024, 2048), 2048), (2047, (512, 1024), 2047), (300, (300,), 300)],
)
def test_lengths_that_nobody_asked_for_are_those_that_the_model_has_positions_for(
    positions, fit, long
):
    short = model(positions=positions)
    made = Needle(depths=(0.5,), wording="small").samples(short)
    assert tuple(each.tags["length"] for each in made) == fit
    (one,) = Ruler(tasks=("niah_single_1",), count=1, wording="small").samples(short)
    assert one.tags["length"] == long
    for task in (Needle(lengths=(512, 4096)), Ruler(lengths=(512, 4096))):
        with pytest.raises(ValueError, match="^lengths="):
            task.samples(short)


def test_the_first_sample_begins_with_the_text():
    first, second = Needle(lengths=(256,), depths=(0.5,), count=2).samples(model())
    assert "<book> CHAPTER 1. Loomings. Call me Ishmael." in first.context
    assert "Call me Ishmael" not in second.context and second.context.count("Dolores") == 1


def test_the_small_wording():
    asked = Needle(lengths=(300,), depths=(0.5,), wording="small")
    (made,) = asked.samples(model())
    (value,) = made.answers
    assert set(pieces(made.context + made.question + made.prefix)) <= small_vocabulary()
    assert asked.score(made, f" {value}.") == 1 and asked.score(made, "0000") == 0


def test_scores():
    """Those of the papers' maps: different words of the answer that were said, whatever their order."""
    asked = Needle(lengths=(256,), depths=(0.5,))
    (sample,) = asked.samples(model())
    for said, shares in (
        (" eat a sandwich and sit in Dolores Park on a sunny day.", 1),
        ("DAY. a and park IN eat sandwich sit dolores on sunny", 1),
        ("\n\nTo EAT a sandwich", 3 / 11),
        (" a park\neat a sandwich and sit in Dolores Park on a sunny day.", 2 / 11),
        ("", 0),
    ):
        assert asked.score(sample, said) == shares

"""One model, many ways through it: blocks, chunks, batches, forms of the cache. All give the same logits."""

import dataclasses

import numpy as np
import pytest
import running
import tiny

import jaxkv
from jaxkv import AdaKV, FullKV, PyramidKV, SnapKV
from jaxkv.cache.layout import SegmentLayout
from jaxkv.policies import EntropyLayers

# One, two and eight kv heads: the cache's formulations of attention go by their number. Golden logits cover the rest.
CONFIGS = {
    name: dataclasses.replace(config, max_positions=2048)
    for name, config in {
        "mqa8": tiny.MODELS["mqa8"],
        "gqa3": tiny.TWO_LAYERS,
        "many_heads": tiny.shape(layers=2, kv_heads=8, group=2, dim=8),
    }.items()
}


def model(name):
    return tiny.tiny(CONFIGS[name])


def prompts(seed, *lengths):
    return tiny.prompts(seed, lengths)


def everything(rows):
    """Policies that may keep `rows` rows, by the layout their caches have."""
    return {
        SegmentLayout.EQUAL: SnapKV(budget=rows),
        SegmentLayout.RAGGED: AdaKV(budget=rows),
        SegmentLayout.SHARED: PyramidKV(budget=rows, layers=EntropyLayers()),
    }


# --- blocks, chunks, tokens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gqa3", "mqa8"])
def test_blocks_one_block_chunks_and_tokens_agree(name):
    ids = prompts(0, 600, 70)
    # 600 slots are no multiple of a query block: one block. 768 are three of 256, 1024 two of 512.
    _, whole = running.prefill(model(name), ids, slots=600)
    for slots in (768, 1024):
        assert running.gap(running.prefill(model(name), ids, slots=slots)[1], whole) < 1e-4
    first, _ = running.prefill(model(name), [each[:-40] for each in ids])
    for chunk in (1, 16):
        after, cache = running.extend(model(name), first, [each[-40:] for each in ids], chunk=chunk)
        assert running.gap(np.stack([each[-1] for each in after]), whole) < 1e-4
        assert np.asarray(cache.seen).tolist() == [600, 70]


# --- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layout"),
    [("gqa3", None), ("gqa3", SegmentLayout.SHARED), ("many_heads", SegmentLayout.RAGGED)],
    ids=str,
)
def test_a_batch_of_unequal_prompts_gives_each_row_what_it_gets_alone(name, layout):
    # Five sequences: from four on, few heads take another formulation. Alone they have three buckets.
    ids = prompts(1, 300, 1, 45, 280, 46)
    more = prompts(2, 6, 6, 6, 6, 6)
    policy = FullKV() if layout is None else everything(512)[layout]
    cache, logits = running.prefill(model(name), ids, policy)
    after, _ = running.extend(model(name), cache, more)
    for row, each in enumerate(ids):
        alone, single = running.prefill(model(name), [each], policy)
        assert running.gap(logits[row : row + 1], single) < 1e-4
        assert running.gap(after[row], running.extend(model(name), alone, [more[row]])[0][0]) < 1e-4


# --- questions on top of a cache -------------------------------------------------------------------------------------


def test_a_question_on_a_full_cache_gives_the_logits_of_one_long_prompt():
    document, questions, of = prompts(5, 200), prompts(6, 300, 7), model("gqa3")
    cache = jaxkv.prefill(of, document[0])
    # Longer than one chunk, and shorter; the document's one cache serves both.
    out = jaxkv.generate(of, questions, cache=cache, max_new_tokens=5, stop_at_eos=False)
    whole = [document[0] + each for each in questions]
    expected = jaxkv.generate(of, whole, max_new_tokens=5, stop_at_eos=False)
    assert [each.tokens.tolist() for each in out] == [each.tokens.tolist() for each in expected]


# --- budgets that drop nothing ---------------------------------------------------------------------------------------


# --- a cache that grows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [SegmentLayout.RAGGED, SegmentLayout.SHARED], ids=str)
def test_growing_block_by_block_equals_one_run(layout):
    ids, steps = prompts(9, 90, 60), 300
    policy = everything(64)[layout]
    cache, logits = running.prefill(model("gqa3"), ids, policy)
    expected = running.greedy(model("gqa3"), cache, steps).tolist()
    out = jaxkv.generate(model("gqa3"), ids, policy=policy, max_new_tokens=steps, stop_at_eos=False)
    assert [each.tokens.tolist() for each in out] == expected
    assert np.asarray(out.cache.seen).tolist() == [90 + steps, 60 + steps]
    assert np.array_equal(out.cache.kept, cache.kept + steps)

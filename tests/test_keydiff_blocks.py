"""KeyDiff's published prefill: a prompt read in blocks under a cache that never holds more than budget and block."""

import numpy as np
import oracles as o
import tiny

import jaxkv
from jaxkv import KeyDiff

ROWS, BLOCK = 24, 8


def test_each_block_is_followed_by_the_choice_that_the_oracle_makes_among_the_rows_held():
    model, lengths = tiny.tiny(tiny.MODELS["gqa3"]), (70, 64)
    rng = np.random.default_rng(2)
    # No token twice in a block: equal tokens lie near to one another, and rounding would choose.
    texts = [
        np.concatenate([rng.permutation(tiny.VOCAB) for _ in range(2)])[:n].tolist()
        for n in lengths
    ]
    session, first = jaxkv.Session(model, KeyDiff(budget=ROWS, every=BLOCK)), [30, 24]
    cache = session.prefill([text[:n] for text, n in zip(texts, first, strict=True)], new=1)
    for at in range(0, 40, BLOCK):
        block = [text[n + at : n + at + BLOCK] for text, n in zip(texts, first, strict=True)]
        grown = session.extend(cache, block)
        cache = session.extend(cache, block, new=1, donate=True)
        kept = {part[:3]: sorted(part[5].tolist()) for part in tiny.segments(cache)}
        for layer, row, head, k, _, pos in tiny.segments(grown):
            assert len(pos) <= ROWS + BLOCK
            order = np.argsort(pos)
            chosen, gap = o.top_select(o.keydiff_scores(k[None, order])[0], ROWS, [], len(pos))
            assert gap > o.MIN_GAP
            assert kept[layer, row, head] == np.sort(pos)[chosen].tolist()
    assert np.asarray(cache.seen).tolist() == list(lengths) and (cache.kept == ROWS).all()

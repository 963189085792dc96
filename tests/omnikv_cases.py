"""A tiny model with filter layers, and short ways to feed it tokens, whichever memory its rows are in."""

import numpy as np
import pytest
import tiny

import jaxkv
from jaxkv import OmniKV
from jaxkv.cache import repack_cache

CONFIG = tiny.shape(layers=7, kv_heads=2, group=3, dim=8)
# Layers 0, 1, 2, 4 and 5 read everything; 3 and 6 what 1 and 4 have chosen.
FILTERS = (1, 4)
LENGTHS = (60, 33)
both = pytest.mark.parametrize("offload", (False, True), ids=("device", "offloaded"))


def omni(budget=12, **options):
    return OmniKV(filter_layers=FILTERS, budget=budget, **options)


def feed(model, cache, tokens, *, session=None):
    """Logits `[steps, B, V]` of tokens `[steps][B]` on top of a copy of the cache, and the copy."""
    session = jaxkv.Session(model, cache.policy) if session is None else session
    copy, out = repack_cache(cache, headroom=len(tokens)), []
    for each in tokens:
        copy = session.extend(copy, [[token] for token in each], chunk=1, donate=True)
        out.append(np.asarray(copy.logits))
    return np.stack(out), copy


def walk(steps, batch=2, seed=9):
    return np.random.default_rng(seed).integers(0, tiny.VOCAB, (steps, batch)).tolist()

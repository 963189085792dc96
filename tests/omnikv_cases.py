"""A tiny model with filter layers, and short ways to feed it tokens, whichever memory its rows lie in."""

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxkv import OmniKV
from jaxkv.bank import Traffic
from jaxkv.cache import repack
from jaxkv.models import staged
from jaxkv.models.decode import extend
from jaxkv.models.moving import program_for
from jaxkv.policies import Selector

CONFIG = tiny.shape(layers=7, kv_heads=2, group=3, dim=8)
# Layers 0, 1, 2, 4 and 5 read everything; 3 and 6 what 1 and 4 have chosen.
FILTERS = (1, 4)
LENGTHS = (60, 33)
selectors = pytest.mark.parametrize("selector", Selector, ids=lambda each: each.value)
both = pytest.mark.parametrize("offload", (False, True), ids=("device", "offloaded"))


def omni(budget=12, **options):
    return OmniKV(filter_layers=FILTERS, budget=budget, **options)


def step(model, cache, tokens, traffic=None):
    """One call of the program that `generate` would use; the pools are consumed."""
    flat, count = tiny.flat(model), jnp.full((len(tokens),), len(tokens[0]), jnp.int32)
    program, given = program_for(flat, cache), jnp.asarray(tokens, jnp.int32)
    if cache.bank is None:
        return extend(flat, cache, given, count, program=program)
    traffic = Traffic() if traffic is None else traffic
    return staged.step(flat, cache, given, count, program=program, traffic=traffic)


def feed(model, cache, tokens, *, traffic=None):
    """Logits `[steps, B, V]` of tokens `[steps][B]` on top of a copy of the cache, and the copy."""
    copy, out = repack(cache, room=len(tokens)), []
    for each in tokens:
        logits, copy = step(model, copy, [[token] for token in each], traffic)
        out.append(np.asarray(logits))
    return np.stack(out), copy


def walk(steps, batch=2, seed=9):
    return np.random.default_rng(seed).integers(0, tiny.VOCAB, (steps, batch)).tolist()

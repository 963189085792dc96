"""A tiny model's queries, keys and values over two texts, for oracles of what attention looks like."""

import functools

import jax.numpy as jnp
import numpy as np
import oracles as o
import tiny

from jaxkv.engine.lengths import round_up_to_bucket
from jaxkv.engine.prefill import iterate_layer_outputs
from jaxkv.policies.scorer import Needs

CONFIG = tiny.shape(layers=3, kv_heads=2, group=3, dim=8)
HEADS = CONFIG.heads
TEXTS = tiny.prompts(0, (60, 37))


@functools.cache
def shown(row):
    """A text's layers: rotated queries [H, n, D], keys and values [K, n, D], the output projection [H, D, E]."""
    model, ids = tiny.tiny(CONFIG), TEXTS[row]
    slots = round_up_to_bucket(len(ids))
    padded = jnp.asarray([ids + [0] * (slots - len(ids))], jnp.int32)
    out = []
    for index, layer in enumerate(
        iterate_layer_outputs(
            model.flat_decoder,
            padded,
            jnp.asarray([len(ids)], jnp.int32),
            needs=Needs(queries=slots),
        )
    ):
        q = np.asarray(layer.q, np.float64)[0, :, :, slots - len(ids) :].reshape(
            HEADS, len(ids), -1
        )
        k, v = (np.asarray(each, np.float64)[0, :, : len(ids)] for each in (layer.k, layer.v))
        weight = np.asarray(model.decoder.blocks[index].attention.out[...], np.float64)
        out.append((q, k, v, weight.T.reshape(HEADS, CONFIG.head_dim, -1)))
    return out


@functools.cache
def weights(row, layer):
    """All attention weights of a layer, [H, n, n]."""
    q, k, _, _ = shown(row)[layer]
    return o.causal_probs(q, k)[0]

"""Tiny random models, and short ways to run prompts through them and to look into the caches that come out."""

import functools

import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxkv
from jaxkv.attention.xla import Form
from jaxkv.cache import repack
from jaxkv.load import LanguageModel
from jaxkv.models.decoder import Decoder

VOCAB = 64


def shape(*, layers: int, kv_heads: int, group: int, dim: int) -> jaxkv.ModelConfig:
    """A small decoder of K kv heads with G query heads each."""
    heads = kv_heads * group
    return jaxkv.ModelConfig(
        vocab=VOCAB, layers=layers, embed=24, hidden=32, heads=heads, kv_heads=kv_heads, head_dim=dim, max_positions=512
    )


# GQA ratios 1, 3, 4 and 8; one, two and three kv heads; two to four layers.
MODELS = {
    "mha": shape(layers=2, kv_heads=3, group=1, dim=8),
    "gqa3": shape(layers=3, kv_heads=2, group=3, dim=8),
    "gqa4": shape(layers=4, kv_heads=2, group=4, dim=16),
    "mqa8": shape(layers=2, kv_heads=1, group=8, dim=8),
}


@functools.cache
def tiny(config: jaxkv.ModelConfig, seed: int = 0, dtype: str = "float32") -> LanguageModel:
    """A decoder of random weights and no tokenizer; queries and keys are large, so that attention is far from flat."""
    rng = np.random.default_rng(seed)
    decoder = Decoder(config, dtype=jnp.dtype(dtype))

    def value(path, parameter):
        name, size = path[-1], parameter.shape
        if name == "scale":
            return 1 + 0.1 * rng.standard_normal(size)
        gain = {"q": 1.6, "kv": 1.6, "embedding": size[-1] ** 0.5}.get(name, 1.0)
        return gain * rng.standard_normal(size) / size[-1] ** 0.5

    for path, parameter in nnx.to_flat_state(nnx.state(decoder, nnx.Param)):
        name = [part for part in path if part != "value"]
        at = decoder
        for part in name:
            at = at[part] if isinstance(part, int) else getattr(at, part)
        at.set_value(jnp.asarray(value(name, parameter.get_value()), dtype))
    return LanguageModel(decoder, text=None, name=f"tiny-{seed}")


def prompts(seed: int, lengths) -> list[list[int]]:
    """Random token ids of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).tolist() for n in lengths]


def run(model: LanguageModel, ids: list[list[int]], policy, *, room: int = 0):
    """Prefills and returns the cache, the logits of each last token, and the plan."""
    session = jaxkv.Session(model, policy)
    needed = jaxkv.plan(model.config, session.policy, [len(each) for each in ids], room=room)
    cache = session.prefill(ids, needed=needed)
    return cache, np.asarray(cache.logits), needed


def decode(model: LanguageModel, cache, tokens, *, room: int = 4):
    """Feeds tokens `[steps][B]` one by one on top of a copy of the cache: the logits `[steps, B, V]` and the copy."""
    session, copy, out = jaxkv.Session(model, cache.policy), repack(cache, room=room), []
    for step in tokens:
        copy = session.extend(copy, [[token] for token in step], chunk=1, donate=True)
        out.append(np.asarray(copy.logits))
    return np.stack(out), copy


def segments(cache):
    """Every segment as `(layer, sequence, head, k, v, pos)` of its rows, in the order they lie in."""
    start, length = np.asarray(cache.start), np.asarray(cache.length)
    host = [(np.asarray(p.k), np.asarray(p.v), np.asarray(p.pos)) for p in cache.pools]
    for index in np.ndindex(*start.shape):
        layer, row, _ = index
        k, v, pos = host[0 if cache.form is Form.SHARED else layer]
        span = slice(start[index], start[index] + length[index])
        yield *index, k[row, span], v[row, span], pos[row, span]


def kept(cache) -> list[list[list[list[int]]]]:
    """Kept positions by layer, sequence and head."""
    layers, batch, heads = cache.start.shape
    out = [[[[] for _ in range(heads)] for _ in range(batch)] for _ in range(layers)]
    for layer, row, head, _, _, pos in segments(cache):
        out[layer][row][head] = pos.tolist()
    return out

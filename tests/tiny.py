"""Tiny random models, and short ways to run prompts through them and to look into the caches that come out."""

import functools

import numpy as np

import jaxkv
from jaxkv.cache import repack_cache
from jaxkv.engine.plan import plan_prefill
from jaxkv.loading import LanguageModel
from jaxkv.testing import segments, tiny_model

__all__ = ["segments"]

VOCAB = 64


def shape(*, layers: int, kv_heads: int, group: int, dim: int) -> jaxkv.ModelConfig:
    """A small decoder of K kv heads with G query heads each."""
    heads = kv_heads * group
    return jaxkv.ModelConfig(
        vocab=VOCAB,
        layers=layers,
        embed=24,
        hidden=32,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        max_positions=512,
    )


# GQA ratios 1, 3, 4 and 8; one, two and three kv heads; two to four layers.
MODELS = {
    "mha": shape(layers=2, kv_heads=3, group=1, dim=8),
    "gqa3": shape(layers=3, kv_heads=2, group=3, dim=8),
    "gqa4": shape(layers=4, kv_heads=2, group=4, dim=16),
    "mqa8": shape(layers=2, kv_heads=1, group=8, dim=8),
}
# A decode step is compiled layer by layer: where those in the middle prove nothing, two do.
TWO_LAYERS = shape(layers=2, kv_heads=2, group=3, dim=8)


@functools.cache
def tiny(config: jaxkv.ModelConfig, seed: int = 0, dtype: str = "float32") -> LanguageModel:
    """A decoder of random weights and no tokenizer; queries and keys are large, so that attention is far from flat."""
    return tiny_model(config, seed=seed, dtype=dtype)


def prompts(seed: int, lengths) -> list[list[int]]:
    """Random token ids of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).tolist() for n in lengths]


def run(model: LanguageModel, ids: list[list[int]], policy, *, headroom: int = 0):
    """Prefills and returns the cache, the logits of each last token, and the plan."""
    session = jaxkv.Session(model, policy)
    needed = plan_prefill(
        model.config,
        session.policy,
        [len(each) for each in ids],
        headroom=headroom,
        mesh=model.flat_decoder.mesh,
    )
    cache = session.prefill(ids, needed=needed)
    return cache, np.asarray(cache.logits), needed


def decode(model: LanguageModel, cache, tokens, *, headroom: int = 4):
    """Feeds tokens `[steps][B]` one by one on top of a copy of the cache: the logits `[steps, B, V]` and the copy."""
    session, copy, out = (
        jaxkv.Session(model, cache.policy),
        repack_cache(cache, headroom=headroom),
        [],
    )
    for step in tokens:
        copy = session.extend(copy, [[token] for token in step], chunk=1, donate=True)
        out.append(np.asarray(copy.logits))
    return np.stack(out), copy


def kept(cache) -> list[list[list[list[int]]]]:
    """Kept positions by layer, sequence and head."""
    layers, batch, heads = cache.start.shape
    out = [[[[] for _ in range(heads)] for _ in range(batch)] for _ in range(layers)]
    for layer, row, head, _, _, pos in segments(cache):
        out[layer][row][head] = pos.tolist()
    return out

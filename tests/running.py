"""Ways to run a model over ids, so that tests can compare them: prefill, chunk by chunk, token by token, greedy."""

import dataclasses
import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import tiny
from flax import nnx

import jaxkv
from jaxkv.attention import Implementation
from jaxkv.cache import ConversationState, KVCache, repack_cache
from jaxkv.engine import prefill_layer
from jaxkv.engine.embedding import embed_tokens
from jaxkv.engine.lengths import round_up_to_bucket
from jaxkv.engine.plan import plan_prefill
from jaxkv.engine.tokens import compute_angles_by_rope
from jaxkv.loading import LanguageModel
from jaxkv.models.decoder import Decoder
from jaxkv.policies.scorer import Needs
from jaxkv.text.prompts import EncodedPrompts

GOLDEN = Path(__file__).parent / "golden"


@functools.cache
def smollm2() -> LanguageModel:
    """The real model, loaded once a session: all golden data of SmolLM2 was made from these weights."""
    return jaxkv.load("smollm2-135m-instruct", dtype="float32", progress=False)


@functools.cache
def lowest_layers(count: int) -> LanguageModel:
    """The real model without its upper layers: programs grow with depth, and what holds at any is seen as well here."""
    whole = smollm2()
    decoder = Decoder(dataclasses.replace(whole.config, layers=count), dtype=whole.dtype)
    for name in ("embedding", "norm", "head"):
        setattr(decoder, name, getattr(whole.decoder, name))
    decoder.blocks = nnx.List(whole.decoder.blocks[:count])
    return LanguageModel(decoder, text=whole.text, name=f"{whole.name}, {count} layers")


@functools.cache
def golden_model(name: str, dtype: str = "float32") -> LanguageModel:
    """One of the tiny checkpoints that transformers wrote."""
    return jaxkv.load(GOLDEN / "models" / name, dtype=dtype, progress=False)


def layer_by_each_implementation(model: LanguageModel, index: int, needs: Needs, length):
    """What a layer gives for two prompts of 32 tokens, on a CPU and as GPUs run it; and which tokens are real."""
    flat, ids = model.flat_decoder, np.asarray(tiny.prompts(1, (32, 32)), np.int32)
    graphs, outs = flat.get_layer_graphs(index), []
    for each in (Implementation.XLA, Implementation.INTERPRETED):
        x = embed_tokens(flat.ends, jnp.asarray(ids), graphs=flat.graphs)
        table = compute_angles_by_rope(flat, 32)[graphs.spec.rope]
        options = {"graphs": graphs, "needs": needs, "last": False, "implementation": each}
        lengths = jnp.asarray(length, jnp.int32)
        outs.append(prefill_layer.layer(flat.blocks[index], x, lengths, table, **options))
    return outs, np.arange(32) < np.asarray(length)[:, None]


def archive(path: str) -> dict[str, np.ndarray]:
    """The arrays of a golden file."""
    with np.load(GOLDEN / path) as arrays:
        return {name: arrays[name] for name in arrays.files}


def prefill(
    model: LanguageModel,
    ids: list,
    policy: jaxkv.CustomPolicy | None = None,
    *,
    headroom: int = 0,
    slots: int | None = None,
) -> tuple[KVCache, np.ndarray]:
    """Cache and logits `[B, V]` of the last tokens. `slots` replaces the bucket, and with it the query blocks."""
    session = jaxkv.Session(model, policy)
    needed = plan_prefill(
        model.config,
        session.policy,
        [len(each) for each in ids],
        dtype=model.dtype,
        headroom=headroom,
        mesh=model.flat_decoder.mesh,
    )
    cache = session.prefill(
        ids, needed=needed if slots is None else dataclasses.replace(needed, padded_len=slots)
    )
    return cache, np.asarray(cache.logits)


def extend(
    model: LanguageModel, cache: KVCache, ids: list, *, chunk: int = 1
) -> tuple[list[np.ndarray], KVCache]:
    """Feeds ids, `chunk` at a time, on top of a copy of the cache; rows may have different lengths.

    Returns each row's logits at the last token of every chunk, `[chunks, V]`, and the copy.
    """
    session, longest = jaxkv.Session(model, cache.policy), max(len(each) for each in ids)
    copy, seen = (
        repack_cache(cache, headroom=-(-longest // chunk) * chunk, batch=len(ids)),
        [[] for _ in ids],
    )
    for first in range(0, longest, chunk):
        part = [each[first : first + chunk] for each in ids]
        # Some may have come to their end: as encoded prompts, which may be empty.
        new = EncodedPrompts(ids=part, single=False, turns=(ConversationState.RAW,) * len(ids))
        copy = session.extend(copy, new, chunk=chunk, donate=True)
        host = np.asarray(copy.logits)
        for row in np.flatnonzero([len(each) for each in part]):
            seen[row].append(host[row])
    return [np.stack(each) for each in seen], copy


def by_prefixes(model: LanguageModel, ids: list) -> list[np.ndarray]:
    """Logits `[S, V]` at every position of every row: all prefixes of all rows, prefilled as one right-padded batch."""
    _, logits = prefill(model, [each[: end + 1] for each in ids for end in range(len(each))])
    return np.split(logits, np.cumsum([len(each) for each in ids])[:-1])


def by_tokens(
    model: LanguageModel, ids: list, policy: jaxkv.CustomPolicy | None = None
) -> list[np.ndarray]:
    """Logits `[S, V]` at every position of every row: the first token prefilled, the others decoded one by one."""
    # In the bucket of the whole prompts, whose programs other tests need anyway.
    cache, first = prefill(
        model,
        [each[:1] for each in ids],
        policy,
        slots=round_up_to_bucket(max(len(each) for each in ids)),
    )
    rest, _ = extend(model, cache, [each[1:] for each in ids])
    return [np.concatenate([first[row : row + 1], after]) for row, after in enumerate(rest)]


def greedy(model: LanguageModel, cache: KVCache, steps: int) -> np.ndarray:
    """Tokens `[B, steps]` sampled on top of the cache."""
    return jaxkv.Session(model, cache.policy).sample(cache, steps)[1]


def greedy_after_one(
    model: LanguageModel, cache: KVCache, steps: int
) -> tuple[np.ndarray, list[int]]:
    """One sequence's logits after the first token sampled, and all tokens; one program samples both times.

    The cache is given up: a copy would take a program for each size of pools.
    """
    session = jaxkv.Session(model, cache.policy)
    after, first = session.sample(cache, 1, new=steps, donate=True)
    _, rest = session.sample(after, steps - 1, new=steps, donate=True)
    return np.asarray(after.logits)[0], [*first[0].tolist(), *rest[0].tolist()]


def kept(cache: KVCache, slots: int) -> np.ndarray:
    """Which positions each segment holds, `bool[L, B, K, slots]`."""
    start, length = cache.segment_first_rows, cache.kept
    positions = [np.asarray(pool.pos) for pool in cache.pools]
    out = np.zeros((*start.shape, slots), bool)
    for layer, row, head in np.ndindex(*start.shape):
        of = positions[cache.layout.get_pool_index(layer)][row]
        begin = start[layer, row, head]
        out[layer, row, head, of[begin : begin + length[layer, row, head]]] = True
    return out


def gap(ours, theirs) -> float:
    """The largest difference."""
    assert np.shape(ours) == np.shape(theirs), (np.shape(ours), np.shape(theirs))
    return float(np.abs(np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)).max())

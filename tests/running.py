"""Ways to run a model over ids, so that tests can compare them: prefill, chunk by chunk, token by token, greedy."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.attention.xla import Form
from jaxkv.cache import KVCache, repack
from jaxkv.load import LanguageModel
from jaxkv.models import decode as decoding
from jaxkv.models import loop as looping
from jaxkv.models import prefill as prefilling
from jaxkv.models.decoder import Flat
from jaxkv.models.moving import Program
from jaxkv.plan import bucket, plan
from jaxkv.sampling import Greedy

GOLDEN = Path(__file__).parent / "golden"


@functools.cache
def smollm2() -> LanguageModel:
    """The real model, loaded once a session: all golden data of SmolLM2 was made from these weights."""
    return jaxkv.load("smollm2-135m-instruct", dtype="float32", progress=False)


@functools.cache
def golden_model(name: str, dtype: str = "float32") -> LanguageModel:
    """One of the tiny checkpoints that transformers wrote."""
    return jaxkv.load(GOLDEN / "models" / name, dtype=dtype, progress=False)


def archive(path: str) -> dict[str, np.ndarray]:
    """The arrays of a golden file."""
    with np.load(GOLDEN / path) as arrays:
        return {name: arrays[name] for name in arrays.files}


@functools.cache
def flat(model: LanguageModel) -> Flat:
    """The model taken apart for jitted code, once."""
    return Flat(model.decoder)


def padded(ids: list, slots: int) -> np.ndarray:
    """Rows of ids as one array, zeros on the right."""
    out = np.zeros((len(ids), slots), np.int32)
    for row, each in enumerate(ids):
        out[row, : len(each)] = each
    return out


def prefill(
    model: LanguageModel, ids: list, policy: jaxkv.Policy | None = None, *, room: int = 0, slots: int | None = None
) -> tuple[KVCache, np.ndarray]:
    """Cache and logits `[B, V]` of the last tokens. `slots` replaces the bucket, and with it the query blocks."""
    policy = jaxkv.FullKV() if policy is None else policy
    lengths = np.asarray([len(each) for each in ids], np.int32)
    needed = plan(model.config, policy, lengths.tolist(), dtype=model.dtype, room=room)
    if slots is not None:
        needed = dataclasses.replace(needed, slots=slots)
    cache, logits = prefilling.prefill(
        flat(model),
        model.config,
        padded(ids, needed.slots),
        lengths,
        policy,
        needed,
        key=jax.random.key(0),
        model=model.fingerprint,
    )
    return cache, np.asarray(logits)


def program(model: LanguageModel, cache: KVCache) -> Program:
    """What decoding on top of this cache is compiled for."""
    return Program(graphs=flat(model).graphs, config=model.config, form=cache.form, rolling=cache.policy.rolling)


def extend(model: LanguageModel, cache: KVCache, ids: list, *, chunk: int = 1) -> tuple[list[np.ndarray], KVCache]:
    """Feeds ids, `chunk` at a time, on top of a copy of the cache; rows may have different lengths.

    Returns each row's logits at the last token of every chunk, `[chunks, V]`, and the copy.
    """
    lengths = np.asarray([len(each) for each in ids])
    steps = -(-int(lengths.max()) // chunk)
    tokens = padded(ids, steps * chunk)
    copy = repack(cache, room=steps * chunk, batch=len(ids))
    static, seen = program(model, copy), [[] for _ in ids]
    for step in range(steps):
        count = np.clip(lengths - step * chunk, 0, chunk).astype(np.int32)
        part = jnp.asarray(tokens[:, step * chunk : (step + 1) * chunk])
        logits, copy = decoding.extend(flat(model), copy, part, jnp.asarray(count), program=static)
        host = np.asarray(logits)
        for row in np.flatnonzero(count):
            seen[row].append(host[row])
    return [np.stack(each) for each in seen], copy


def by_prefixes(model: LanguageModel, ids: list) -> list[np.ndarray]:
    """Logits `[S, V]` at every position of every row: all prefixes of all rows, prefilled as one right-padded batch."""
    _, logits = prefill(model, [each[: end + 1] for each in ids for end in range(len(each))])
    return np.split(logits, np.cumsum([len(each) for each in ids])[:-1])


def by_tokens(model: LanguageModel, ids: list, policy: jaxkv.Policy | None = None) -> list[np.ndarray]:
    """Logits `[S, V]` at every position of every row: the first token prefilled, the others decoded one by one."""
    # In the bucket of the whole prompts, whose programs other tests need anyway.
    cache, first = prefill(model, [each[:1] for each in ids], policy, slots=bucket(max(len(each) for each in ids)))
    rest, _ = extend(model, cache, [each[1:] for each in ids])
    return [np.concatenate([first[row : row + 1], after]) for row, after in enumerate(rest)]


def greedy(model: LanguageModel, cache: KVCache, logits: np.ndarray, steps: int) -> np.ndarray:
    """Tokens `[B, steps]` drawn in one loop from a copy of the cache, the first one from the logits given."""
    _, out = _drawn(model, cache, logits, (steps,), steps)
    return out


def greedy_after_one(
    model: LanguageModel, cache: KVCache, logits: np.ndarray, steps: int
) -> tuple[np.ndarray, list[int]]:
    """One sequence's logits after the first token drawn, and all tokens."""
    after, out = _drawn(model, cache, logits, (1, steps - 1), steps)
    return after[0][0], out[0].tolist()


def _drawn(model, cache, logits, runs, size):
    """One program, run for so many steps and again so many: the logits after each run, and the tokens."""
    copy = repack(cache, room=size)
    draw = looping.Draw(logits=jnp.asarray(logits), done=jnp.zeros((cache.batch,), bool), key=jax.random.key(0))
    static, never = program(model, copy), jnp.asarray([-2], jnp.int32)
    state, after, tokens = looping.begin(copy, program=static, size=size), [], []
    for steps in runs:
        state, draw, out, _ = looping.decode(
            flat(model), state, draw, never, steps, program=static, sampling=Greedy(), size=size
        )
        after.append(np.asarray(draw.logits))
        tokens.append(np.asarray(out)[:, :steps])
    return after, np.concatenate(tokens, axis=1)


def kept(cache: KVCache, slots: int) -> np.ndarray:
    """Which positions each segment holds, `bool[L, B, K, slots]`."""
    start, length = np.asarray(cache.start), np.asarray(cache.length)
    positions = [np.asarray(pool.pos) for pool in cache.pools]
    out = np.zeros((*start.shape, slots), bool)
    for layer, row, head in np.ndindex(*start.shape):
        of = positions[0 if cache.form is Form.SHARED else layer][row]
        begin = start[layer, row, head]
        out[layer, row, head, of[begin : begin + length[layer, row, head]]] = True
    return out


def gap(ours, theirs) -> float:
    """The largest difference."""
    assert np.shape(ours) == np.shape(theirs), (np.shape(ours), np.shape(theirs))
    return float(np.abs(np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)).max())

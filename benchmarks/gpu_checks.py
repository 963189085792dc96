"""Every kernel on this device against numpy in float64, for one dtype and head dim at a time."""

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from benchmarks.gpu_kernels import coded
from benchmarks.gpu_timing import INTERPRET, random
from jaxkv.attention import Implementation, get_attention_backend, get_cuda_capability
from jaxkv.attention.backend import DeviceTraits
from jaxkv.cache.layout import SegmentLayout
from jaxkv.cache.quantised import Int4Vectors
from pallas_kernels import mosaic

# Largest difference as a share of the largest value.
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-3}


def wide(array):
    """An array, or the rows that codes stand for, as float64 on the host."""
    if isinstance(array, pallas_kernels.Int8Pool):
        return wide(array.code) * wide(array.scale)[..., None]
    if isinstance(array, pallas_kernels.Int4Pool):
        return np.asarray(
            Int4Vectors(code=array.code, scale=array.scale, least=array.least).dequantise_vectors(),
            np.float64,
        )
    return np.asarray(array.astype(jnp.float32), np.float64)


def oracle(q, k, v, start, length):
    """Attention over segments, its log-sum-exp, and the weights of each segment's rows."""
    q, k, v = wide(q), wide(k), wide(v)
    out, lse, mass = np.zeros(q.shape), np.full(q.shape[:3], -np.inf), np.zeros(k.shape[:2])
    for b, h in np.ndindex(*q.shape[:2]):
        span = slice(int(start[b, h]), int(start[b, h] + length[b, h]))
        if span.start == span.stop:
            continue
        logits = q[b, h] @ k[b, span].T / np.sqrt(q.shape[-1])
        top = logits.max(axis=-1, keepdims=True)
        weights = np.exp(logits - top)
        total = weights.sum(axis=-1, keepdims=True)
        out[b, h], lse[b, h] = weights / total @ v[b, span], (top + np.log(total))[:, 0]
        mass[b, span] = (weights / total).mean(axis=0)
    return out, lse, mass


def error(ours, theirs):
    """Largest difference as a share of the largest value; what is -inf must be so on both sides."""
    ours = wide(ours)
    real = np.isfinite(theirs)
    if not (ours[~real] == theirs[~real]).all() or not np.isfinite(ours[real]).all():
        return float("inf")
    return float(np.abs(ours[real] - theirs[real]).max() / np.abs(theirs[real]).max())


def attend(case, dtype):
    """Decode attention: unequal segments, one ten times longer, one empty; with scores and without."""
    heads, group, dim, rows = case["kv_heads"], case["group"], case["dim"], case["rows"]
    share = np.ones((2, heads))
    share[0, 0], share[1, -1] = 10, 0
    length = (
        share / share.sum(axis=1, keepdims=True) * [[heads * rows], [heads * rows * 0.7]]
    ).astype(np.int32)
    length = jnp.asarray(length)
    start = SegmentLayout.RAGGED.compute_segment_starts(length[None], heads * rows)[0]
    k, v = (random(i, (2, heads * rows, dim), dtype) for i in (0, 1))
    q = random(2, (2, heads, group, dim), dtype)
    out, lse, mass = oracle(q, k, v, start, length)
    ours = pallas_kernels.attend(q, k, v, start, length, interpret=INTERPRET)
    found = {"attend": error(ours[0], out), "attend lse": error(ours[1], lse)}
    score = jnp.zeros(k.shape[:2], jnp.float32)
    scored = pallas_kernels.attend(
        q, k, v, start, length, scores=pallas_kernels.EntryScores(score=score), interpret=INTERPRET
    )
    return found | {"attend scored": error(scored[0], out), "mass": error(scored[2], mass)}


def _turned(x, cos, sin):
    """RoPE: the halves of a vector are the parts of complex numbers."""
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def codes(case, dtype):
    """What `token` checks, over rows in 8 and, where they can be, in 4 bits; new keys and values may be a code off."""
    stores = ("int8", "int4", "mixed")[: 1 if case["dim"] % 64 else 3]
    return {
        name: each for store in stores for name, each in token(case, dtype, store=store).items()
    }


def token(case, dtype, *, store=None):
    """A new token's rotation, append and attention, with scores; the last of three sequences has ended."""
    heads, group, dim, rows = case["kv_heads"], case["group"], case["dim"], case["rows"] // 2
    share = np.ones((3, heads))
    share[0, 0], share[1, -1] = 10, 0
    length = (
        share / share.sum(axis=1, keepdims=True) * heads * rows * [[1.0], [0.7], [0.4]]
    ).astype(np.int32)
    # A free place behind each segment.
    start = (np.cumsum(length + 1, axis=1) - length - 1).astype(np.int32)
    pool = heads * (rows + 1)
    k, v = (random(10 + i, (3, pool, dim), dtype) for i in (0, 1))
    name, (k, v) = store or "token", coded(k, v, store) if store else (k, v)
    q, kv = (
        random(12, (2, 3, heads, group, dim), jnp.float32),
        random(13, (2, 3, 2, heads, dim), jnp.float32),
    )
    angle, counts = np.linspace(0, 3, 3 * dim // 2).reshape(3, -1), np.asarray([1, 1, 0], np.int32)
    positions, score = np.asarray([rows, rows, rows], np.int32), random(14, (3, pool), jnp.float32)
    pos, begin = jnp.zeros((3, pool), jnp.int32), random(15, (3, heads), jnp.float32)
    scheduled = {"programs": 8 if INTERPRET else 264, "block": 16}
    chunks = pallas_kernels.build_work_table(
        jnp.asarray(start)[None], jnp.asarray(length)[None], **scheduled
    )
    new = (
        jnp.cos(angle).astype(jnp.float32),
        jnp.sin(angle).astype(jnp.float32),
        positions,
        counts,
    )
    first = jnp.asarray(start)[None]
    scores = pallas_kernels.EntryScores(score=score, begin=begin, start=first)
    options = {"layer": 0, "scores": scores, "interpret": INTERPRET}
    options["dtype"] = dtype
    out, *ours = pallas_kernels.append_and_attend(
        q, pallas_kernels.NewTokenInputs(kv, *map(jnp.asarray, new), pos), (k, v), chunks, **options
    )
    rounded = lambda x: wide(jnp.asarray(x, jnp.float32).astype(dtype))  # noqa: E731
    cos, sin, both = np.cos(angle)[:, None], np.sin(angle)[:, None], wide(kv).sum(axis=0)
    queries = rounded(_turned(wide(q).sum(axis=0), cos[:, None], sin[:, None]))
    row, value = rounded(_turned(both[:, 0], cos, sin)), rounded(both[:, 1])
    if store:
        row, value = map(
            wide, coded(*(jnp.asarray(each, jnp.float32) for each in (row, value)), store)
        )
    want = [wide(k), wide(v), np.asarray(pos, np.float64), wide(score)]
    for b, h in np.ndindex(*length.shape):
        if counts[b]:
            for array, put in zip(
                want, (row[b, h], value[b, h], positions[b], float(begin[b, h])), strict=True
            ):
                array[b, start[b, h] + length[b, h]] = put
    length = length + counts[:, None]
    theirs, _, mass = oracle(
        jnp.asarray(queries, jnp.float32), *map(jnp.asarray, want[:2]), start, length
    )
    want[3] = want[3] + mass * counts[:, None]
    leaves = zip(("k", "v", "pos", "score"), ours, want, strict=True)
    return {name: error(out[:3], theirs)} | {
        f"{name} {leaf}": error(mine, array) for leaf, mine, array in leaves
    }


def beside(case, dtype):
    """What else a step is made of: residual and norm, and one row in another's place."""
    dim, rows = case["dim"], 40
    x, added, scale = (
        random(20, (3, 8 * dim), dtype),
        random(21, (4, 3, 8 * dim), jnp.float32),
        random(22, (8 * dim,), dtype),
    )
    total, normed = pallas_kernels.add_norm(x, added, scale, eps=1e-5, interpret=INTERPRET)
    want = wide(total)
    want = want / np.sqrt((want * want).mean(axis=-1, keepdims=True) + 1e-5) * wide(scale)
    found = {"sum": error(total, wide(x) + wide(added).sum(axis=0)), "norm": error(normed, want)}
    k, v = (random(i, (2, rows, dim), dtype) for i in (23, 24))
    pos, score = (
        jnp.asarray(np.arange(2 * rows).reshape(2, rows), jnp.int32),
        random(25, (2, rows), jnp.float32),
    )
    place, last = (
        np.asarray([[3, 12, 39], [0, 19, 30]], np.int32),
        np.asarray([[9, 19, 39], [8, 19, 35]], np.int32),
    )
    over = np.asarray([[True, False, True], [True, True, False]])
    want = [wide(k), wide(v), np.asarray(pos, np.float64), wide(score)]
    for b, h in zip(*np.nonzero(over), strict=True):
        to, at = place[b, h], last[b, h]
        for array in want:
            array[b, to] = array[b, at]
        want[2][b, at], want[3][b, at] = -1, 0
    ours = pallas_kernels.overwrite_evicted_rows(
        k, v, pos, score, *map(jnp.asarray, (place, last, over)), interpret=INTERPRET
    )
    return found | {
        f"replaced {name}": error(mine, array)
        for name, mine, array in zip(("k", "v", "pos", "score"), ours, want, strict=True)
    }


def flash(case, dtype):
    """Causal attention of unequal prompts, by Mosaic too where it takes them, and how much each key receives."""
    heads, group, dim, slots = case["kv_heads"], case["group"], case["dim"], case["slots"]
    k, v = (random(i, (2, heads, slots, dim), dtype) for i in (3, 4))
    q = random(5, (2, heads, group, slots, dim), dtype)
    tokens = (slots - 5, slots // 3)
    zero, length = jnp.zeros((2,), jnp.int32), jnp.asarray(tokens, jnp.int32)
    out, lse = pallas_kernels.flash(q, k, v, zero, length, interpret=INTERPRET)
    sums = pallas_kernels.sum_attention_per_key(q, k, lse, zero, length, interpret=INTERPRET)
    ours = {"flash": out, "flash lse": lse, "column sums": sums}
    setting = DeviceTraits("gpu", dtype, dim, get_cuda_capability(jax.devices()[0]))
    if not INTERPRET and get_attention_backend(Implementation.MOSAIC).is_auto_candidate(setting):
        ours |= dict(
            zip(("mosaic", "mosaic lse"), mosaic.flash(q, k, v, zero, length), strict=True)
        )
    return causal(q, k, v, tokens, ours)


def causal(q, k, v, tokens, ours):
    """Errors of causal attention of unequal prompts by name, of its log-sum-exp (" lse") and of "column sums"."""
    found, dim = dict.fromkeys(ours, 0.0), q.shape[-1]
    for b, real in enumerate(tokens):
        queries, keys, values = wide(q)[b, :, :, :real], wide(k)[b, :, :real], wide(v)[b, :, :real]
        logits = np.einsum("kgtd,ksd->kgts", queries, keys) / np.sqrt(dim)
        logits[..., ~np.tri(real, dtype=bool)] = -np.inf
        top = logits.max(axis=-1, keepdims=True)
        weights = np.exp(logits - top)
        total = weights.sum(axis=-1, keepdims=True)
        weights /= total
        attended, summed = (
            np.einsum("kgts,ksd->kgtd", weights, values),
            (top + np.log(total))[..., 0],
        )
        for name, mine in ours.items():
            if name == "column sums":
                off = error(mine[b, :, :real], weights.sum(axis=2).mean(axis=1))
            else:
                off = error(mine[b, :, :, :real], summed if name.endswith("lse") else attended)
            found[name] = max(found[name], off)
    return found


def linear(case, dtype):
    """Products of one vector, and of five, with a weight in 8 and in 4 bits, of more outputs than whole tiles."""
    width, found = 32 * case["dim"], {}
    x, rng = random(30, (5, width), dtype), np.random.default_rng(1)
    for bits in (8, 4):
        held = rng.integers(0, 256, (70, width * bits // 8)).astype(np.uint8)
        if bits == 8:
            codes, scale = held.astype(np.int8), rng.random(70, np.float32)
            given, weight = (codes, scale, None, None), codes * scale[:, None].astype(np.float64)
        else:
            scales, leasts = rng.standard_normal((2, 70, width // 32)).astype(np.float16)
            groups = held.reshape(70, -1, 16)
            codes = np.concatenate([groups & 15, groups >> 4], axis=-1).astype(np.float64)
            given = (held, None, scales, leasts)
            weight = (codes * scales[..., None] + leasts[..., None].astype(np.float64)).reshape(
                70, width
            )
        given = [None if each is None else jnp.asarray(each) for each in given]
        ours = pallas_kernels.multiply_codes(x[:1], *given, interpret=INTERPRET).sum(axis=0)
        found[f"linear {bits} bits"] = error(ours, wide(x[:1]) @ weight.T)
        # Two blocks by the second of two weights, a third that is not there.
        two = jax.tree.map(lambda each: jnp.stack([jnp.zeros_like(each), each]), given)
        ours = pallas_kernels.multiply_blocks_by_tensor_cores(
            jnp.stack([x, 2 * x, x]), jnp.asarray([1, 1, -1]), *two, interpret=INTERPRET
        ).sum(axis=0)
        found[f"linear {bits} bits blocks"] = error(ours[1], wide(2 * x) @ weight.T)
    return found


def window(case, dtype):
    """How much attention each key receives from the last queries of unequal prompts, one shorter than the window."""
    heads, group, dim, slots = case["kv_heads"], case["group"], case["dim"], case["slots"]
    few, tokens = 32, np.asarray([slots - 5, 20], np.int32)
    k, q = random(8, (2, heads, slots, dim), dtype), random(9, (2, heads, group, few, dim), dtype)
    given = [jnp.asarray(each) for each in (tokens - few, tokens)]
    ours = pallas_kernels.sum_window_attention(q, k, *given, interpret=INTERPRET)
    want = np.zeros(ours.shape)
    for b, begin in enumerate(tokens - few):
        for row in range(max(0, -begin), few):
            keys = slice(0, begin + row + 1)
            logits = np.einsum(
                "kgd,ksd->kgs", wide(q)[b, :, :, row], wide(k)[b, :, keys]
            ) / np.sqrt(dim)
            weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
            want[b, :, keys] += (weights / weights.sum(axis=-1, keepdims=True)).mean(axis=1)
    return {"window": error(ours, want)}


def compact(case, dtype):
    """Rows of a layer's prefill, moved exactly."""
    heads, dim, slots = case["kv_heads"], case["dim"], case["slots"]
    k, v = (random(i, (2, heads, slots, dim), dtype) for i in (6, 7))
    source = np.random.default_rng(0).integers(-1, heads * slots, (2, 100)).astype(np.int32)
    ours = pallas_kernels.gather_kept_entries(k, v, jnp.asarray(source), interpret=INTERPRET)
    found = {}
    for name, packed, whole in (("compact k", ours[0], k), ("compact v", ours[1], v)):
        rows = np.stack([wide(whole)[b].reshape(-1, dim)[each] for b, each in enumerate(source)])
        found[name] = error(packed, np.where(source[..., None] < 0, 0, rows))
    return found | {"compact pos": error(ours[2], np.where(source < 0, -1, source % slots))}


KERNELS = {
    each.__name__: each for each in (attend, token, codes, beside, linear, flash, window, compact)
}


def check(case):
    """Calls the checks for a dtype and head dim: errors by kernel, and the largest.

    Raises:
        ValueError: naming those that are wrong; what a kernel itself raises counts as wrong.
    """
    dtype, errors, wrong = jnp.dtype(case["dtype"]), {}, []
    for name, kernel in KERNELS.items():
        try:
            errors |= kernel(case, dtype)
        except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as failed:
            wrong.append(f"{name}: {str(failed).splitlines()[0][:200]}")
    wrong += [
        f"{name}: {size:.1e}"
        for name, size in errors.items()
        if not size <= TOLERANCE[case["dtype"]]
    ]
    if wrong:
        raise ValueError(f"WRONG: {'; '.join(wrong)}")
    return {"largest": max(errors.values()), "errors": errors}

"""What a device gives, and what the kernels make of it: copies, matrix products, attention, rows gathered.

Each function takes a case as `gpu_parts` has it and returns figures; shares of one another are the report's business.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels
from benchmarks.gpu_timing import INTERPRET, chained, random, rotation
from jaxkv.attention import Implementation, get_attention_backend
from jaxkv.attention.kernels import wrap_kernel_inputs
from jaxkv.cache.layout import SegmentLayout
from jaxkv.cache.named_stores import STORES
from jaxkv.models import mixture
from jaxkv.models.stored import StoredWeight
from pallas_kernels.codes import compute_mean_itemsize

# Estimates by which the number of calls goes: bytes and operations per second of a Hopper device.
_BYTES, _FLOPS = 3e12, 3e14


def copy(case):
    """Bytes per second of x + 1 in place, read and written, and of a sum, read only."""
    size = case["bytes"]
    arrays = [random(i, (size // 4,), jnp.float32) for i in range(rotation(size))]

    def add(rest, _):
        done = []
        while rest:
            # Those behind it wait for it.
            first, rest = lax.optimization_barrier((rest[0] + 1.0, rest[1:]))
            done.append(first)
        return done

    both = chained(add, arrays, [()], estimate=2 * size / _BYTES, each=len(arrays))
    reading = chained(
        lambda x, array: x + (array * x).sum() * 1e-9,
        jnp.float32(1),
        arrays,
        estimate=size / _BYTES,
    )
    found = {"copy_bytes_per_second": 2 * size / both["seconds"]}
    return found | {
        "read_bytes_per_second": size / reading["seconds"],
        "copy": both,
        "read": reading,
    }


def _normed(x):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt((wide * wide).mean(axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def products(case):
    """Matrix products: one large square, or the four of a layer of Llama 3 8B's shape with what lies between them."""
    tokens, embed, hidden, heads = case["tokens"], case["embed"], case["hidden"], case["qkv"]
    weight = lambda i, a, b: random(i, (a, b), jnp.bfloat16, scale=a**-0.5)  # noqa: E731
    x = random(0, (tokens, embed), jnp.bfloat16)
    if not hidden:
        flops = 2 * tokens * embed * embed
        found = chained(
            lambda x, w: _normed(x @ w), x, [weight(1, embed, embed)], estimate=flops / _FLOPS
        )
        return found | {"flops_per_second": flops / found["seconds"]}
    sizes = ((embed, heads), (embed, embed), (embed, 2 * hidden), (hidden, embed))
    nbytes = sum(2 * a * b for a, b in sizes)
    pools = [
        [weight(8 * i + j, *size) for j, size in enumerate(sizes)]
        for i in range(min(4, rotation(nbytes)))
    ]

    def layer(x, weights):
        qkv, out, up, down = weights
        x = _normed((x @ qkv)[:, :embed] @ out)
        gate, up = jnp.split(x @ up, 2, axis=-1)
        return _normed((jax.nn.silu(gate) * up) @ down)

    flops = tokens * nbytes
    found = chained(layer, x, pools, estimate=nbytes / _BYTES + flops / _FLOPS)
    return found | {
        "flops_per_second": flops / found["seconds"],
        "bytes_per_second": nbytes / found["seconds"],
    }


def linear(case):
    """A layer's four products of Llama 3 8B's shape, as in `products`, with weights in 8 or 4 bits by their kernel."""
    vectors, bits, sizes = case["tokens"], case["bits"], _outputs(case)
    weights = [_codes(index, *size, bits) for index, size in enumerate(sizes)]
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))

    def times(x, w):
        if vectors == 1:
            return (
                pallas_kernels.multiply_codes(x, *w, interpret=INTERPRET)
                .sum(axis=0)
                .astype(x.dtype)
            )
        alone, ids = jax.tree.map(lambda leaf: leaf[None], w), jnp.zeros(1, jnp.int32)
        by = pallas_kernels.multiply_blocks_by_tensor_cores
        return by(x[None], ids, *alone, interpret=INTERPRET).sum(axis=0)[0].astype(x.dtype)

    def layer(x, weights):
        qkv, out, up, down = weights
        x = _normed(times(times(x, qkv)[:, : case["embed"]], out))
        gate, up = jnp.split(times(x, up), 2, axis=-1)
        return _normed(times(jax.nn.silu(gate) * up, down))

    x = random(0, (vectors, case["embed"]), jnp.bfloat16)
    found = chained(layer, x, [weights], estimate=nbytes / _BYTES)
    return found | {"bytes": nbytes, "bytes_per_second": nbytes / found["seconds"]}


def _outputs(case):
    embed, hidden = case["embed"], case["hidden"]
    return ((case["qkv"], embed), (embed, embed), (2 * hidden, embed), (embed, hidden))


def _codes(key, outputs, width, bits):
    codes = jax.random.bits(jax.random.key(key), (outputs, width * bits // 8), jnp.uint8)
    if bits == 8:
        return codes.astype(jnp.int8), jnp.full((outputs,), 0.0005, jnp.float32), None, None
    group = (outputs, width // 32)
    return codes, None, jnp.full(group, 0.0075, jnp.float16), jnp.full(group, -0.06, jnp.float16)


def lengths_of(case):
    """Rows of each segment, i32[B, K], that sum to as many as equal ones would."""
    batch, heads, rows = case["batch"], case["kv_heads"], case["rows"]
    share, sequence = np.ones((batch, heads)), np.ones(batch)
    if case["lengths"] == "one head 10x":
        share[:, 0] = 10
    elif case["lengths"] == "unequal":
        # Sequences from an eighth to two of the mean, heads from a third to ten times another's.
        sequence = 1 + 2 * (np.arange(batch) % 8)
        share = 1 + (3 * np.arange(heads)[None, :] + np.arange(batch)[:, None]) % 10
    weight = share * sequence[:, None]
    length = np.maximum(1, np.floor(weight / weight.sum() * batch * heads * rows)).astype(np.int32)
    length[-1, -1] += batch * heads * rows - int(length.sum())
    return length


@partial(jax.jit, static_argnums=2)
def coded(k, v, store):
    """Keys and values as a store holds them, as kernels take them."""
    return wrap_kernel_inputs(STORES[store].encode_entries(k, v))


def pools_of(case, dtype):
    """Queries, pools that a device's cache cannot hold, starts, lengths, and bytes of the rows that are read."""
    length, dim = lengths_of(case), case["dim"]
    batch, heads = length.shape
    # Room for 256 new rows a head, as a cache has it.
    rows = int(length.sum(axis=1).max()) + heads * min(256, case["rows"])
    store = case.get("store", "dense")
    nbytes = int(length.sum()) * STORES[store].compute_entry_bytes(dim, dtype.itemsize)
    count = min(rotation(nbytes), 48)
    pools = [
        tuple(random(2 * i + j, (batch, rows, dim), dtype) for j in (0, 1)) for i in range(count)
    ]
    if store != "dense":
        pools = [coded(*pool, store) for pool in pools]
    length = jnp.asarray(length)
    start = SegmentLayout.RAGGED.compute_segment_starts(length[None], rows)[0]
    q = random(10_000, (batch, heads, case["group"], dim), dtype)
    return q, pools, start, length, nbytes


def _dealt(start, length, case, pool, dtype):
    """Who reads what, as a step finds it out once for all its layers."""
    programs = pallas_kernels.count_concurrent_programs(
        dim=case["dim"], itemsize=compute_mean_itemsize(*pool, dtype), interpret=INTERPRET
    )
    return pallas_kernels.build_work_table(start[None], length[None], programs=programs)


def decode(case):
    """Attention of one new token's queries over segments of a pool."""
    dtype = jnp.dtype(case["dtype"])
    q, pools, start, length, nbytes = pools_of(case, dtype)
    options = {"chunks": _dealt(start, length, case, pools[0], dtype), "interpret": INTERPRET}
    attend = lambda q, pool: pallas_kernels.attend(q, *pool, start, length, **options)[0]  # noqa: E731
    found = chained(attend, q, pools, estimate=nbytes / _BYTES + 1e-5)
    return found | {"bytes": nbytes, "bytes_per_second": nbytes / found["seconds"]}


def tokens(q, pools, start, chunks, **options):
    """A step of a chain: the new token of a layer, in one pool after the other, and what it begins with."""
    batch, heads = start.shape
    dim, dtype = q.shape[-1], q.dtype
    ones, angle = jnp.ones((batch,), jnp.int32), random(20_001, (batch, dim // 2), jnp.float32)
    kv = random(20_000, (1, batch, 2, heads, dim), dtype)
    new, pos = (
        (kv, jnp.cos(angle), jnp.sin(angle), 7 * ones, ones),
        jax.tree.leaves(pools[0])[0].shape[:2],
    )
    pools = [(*pool, jnp.zeros(pos, jnp.int32)) for pool in pools]

    def step(carry, _):
        q, written = carry[0], []
        for pool in carry[1]:
            *rows, pos = pool
            of = (q[None], pallas_kernels.NewTokenInputs(*new, pos), tuple(rows), chunks)
            q, *pool = pallas_kernels.append_and_attend(*of, layer=0, **options)
            written.append(tuple(pool))
        return q, written

    return step, (q, pools)


def token(case):
    """What a layer's step does between its products: the new token is rotated, joins the pool, and attends to it."""
    dtype = jnp.dtype(case["dtype"])
    q, pools, start, length, nbytes = pools_of(case, dtype)
    options = {"interpret": INTERPRET, "dtype": dtype}
    step, carry = tokens(q, pools, start, _dealt(start, length, case, pools[0], dtype), **options)
    found = chained(step, carry, [()], estimate=nbytes / _BYTES + 1e-5, each=len(pools))
    return found | {"bytes": nbytes, "bytes_per_second": nbytes / found["seconds"]}


def mass(case):
    """The same, with each row's attention added to its score (H2O, D2O)."""
    q, pools, start, length, nbytes = pools_of(case, jnp.dtype(case["dtype"]))
    score = jnp.zeros(pools[0][0].shape[:2], jnp.float32)

    def attend(carry, pool):
        scores = pallas_kernels.EntryScores(score=carry[1])
        out, _, score = pallas_kernels.attend(
            carry[0], *pool, start, length, scores=scores, interpret=INTERPRET
        )
        return out, score

    found = chained(attend, (q, score), pools, estimate=nbytes / _BYTES + 1e-5)
    return found | {"bytes": nbytes, "bytes_per_second": nbytes / found["seconds"]}


def _prompt(case):
    heads, slots, dim, dtype = (
        case["kv_heads"],
        case["tokens"],
        case["dim"],
        jnp.dtype(case["dtype"]),
    )
    q = random(0, (1, heads, case["group"], slots, dim), dtype)
    k, v = (random(i, (1, heads, slots, dim), dtype) for i in (1, 2))
    return q, k, v, jnp.full((1,), slots, jnp.int32)


def prefill(case):
    """Causal attention of a prompt by one implementation, as prefill asks for it."""
    q, k, v, length = _prompt(case)
    implementation = Implementation(case["by"])
    if INTERPRET and implementation is not Implementation.XLA:
        implementation = Implementation.INTERPRETED
    window, tokens = case.get("window"), case["tokens"]
    by = get_attention_backend(implementation).compute_prefill_attention
    by = partial(by, lse=False, window=window)
    # Half of all pairs, or a band as wide as the window.
    flops = 2 * q.size * (tokens if window is None else 2 * window)
    # Twice, so that what one gives need not be copied to where the next finds it.
    found = chained(lambda q, kv: by(q, *kv, length)[0], q, 2 * [(k, v)], estimate=flops / _FLOPS)
    return found | {"flops": flops, "flops_per_second": flops / found["seconds"]}


def scores(case):
    """What a prompt's scores cost on top of its attention: a window's, and the sums over all queries."""
    q, k, _, length = _prompt(case)
    zero, window = jnp.zeros_like(length), case["window"]
    by_window = partial(pallas_kernels.sum_window_attention, interpret=INTERPRET)
    lse = jnp.zeros(q.shape[:4], jnp.float32)

    # Sums become a number that is added to the queries: the next call waits for it.
    def last(few, k):
        sums = by_window(few, k, length - window, length)
        return few + (1e-6 * sums[0, 0, 0]).astype(few.dtype)

    def every(lse, k):
        sums = pallas_kernels.sum_attention_per_key(q, k, lse, zero, length, interpret=INTERPRET)
        return lse + 1e-6 * jnp.minimum(sums[0, 0, 0], 1.0)

    flops = 2 * q.size * case["tokens"]
    return {
        "window": chained(last, q[..., -window:, :], [k], estimate=2e-4),
        "columns": chained(every, lse + 12.0, [k], estimate=flops / 2 / _FLOPS),
    }


def gather(case):
    """Compaction of a layer's prefill: rows chosen head by head, read and written."""
    heads, slots, kept, dim = case["kv_heads"], case["tokens"], case["kept"], case["dim"]
    dtype, batch = jnp.dtype(case["dtype"]), case["batch"]
    rng = np.random.default_rng(0)
    nbytes = 4 * batch * heads * kept * dim * dtype.itemsize
    count = rotation(nbytes)
    pools = [
        tuple(random(2 * i + j, (batch, heads, slots, dim), dtype) for j in (0, 1))
        for i in range(min(4, count))
    ]

    def each():
        return np.concatenate(
            [h * slots + np.sort(rng.permutation(slots)[:kept]) for h in range(heads)]
        )  # noqa: E731

    source = jnp.asarray(np.stack([each() for _ in range(batch)]).astype(np.int32))

    def compact(source, pool):
        _, _, pos = pallas_kernels.gather_kept_entries(*pool, source, interpret=INTERPRET)
        return jnp.where(pos < 0, 0, source)

    found = chained(compact, source, pools, estimate=nbytes / _BYTES)
    return found | {"bytes": nbytes, "bytes_per_second": nbytes / found["seconds"]}


def experts(case):
    """A mixture's experts for tokens of a decode step, by each of the three ways that compute them."""
    tokens, chosen, count, bits = (case[each] for each in ("tokens", "chosen", "count", "bits"))
    embed, hidden = case["embed"], case["hidden"]
    gate_up, down = (
        _expert_codes(seed, count, *size, bits)
        for seed, size in enumerate(((2 * hidden, embed), (embed, hidden)))
    )
    gate_up = jax.tree.map(lambda leaf: leaf.reshape(count, 2, hidden, *leaf.shape[2:]), gate_up)
    x = random(2, (tokens, embed), jnp.bfloat16)
    logits = jax.random.normal(jax.random.key(3), (tokens, count))
    shares, ids = lax.top_k(jax.nn.softmax(logits), chosen)
    weights = StoredWeight(*gate_up), StoredWeight(*down)
    each = sum(leaf.nbytes for leaf in jax.tree.leaves(weights)) / count
    nbytes, found = len(np.unique(ids)) * each, {}
    for name, way in {
        "tensor_cores": partial(mixture.apply_experts_on_tensor_cores, interpret=INTERPRET),
        "by_token": mixture.apply_experts_by_token,
        "in_blocks": mixture.apply_experts_in_blocks,
    }.items():

        def layer(x, weights, way=way):
            return _normed(way(mixture.ExpertInputs(x, ids, shares, *weights))).astype(x.dtype)

        found[name] = chained(layer, x, [weights], estimate=nbytes / _BYTES)
    best = found["tensor_cores"]["seconds"]
    return found | {"bytes": nbytes, "seconds": best, "bytes_per_second": nbytes / best}


def _expert_codes(key, count, outputs, width, bits):
    if bits == 16:
        return (
            random(key, (count, outputs, width), jnp.bfloat16, scale=width**-0.5),
            None,
            None,
            None,
        )
    codes = _codes(key, count * outputs, width, bits)
    return jax.tree.map(lambda leaf: leaf.reshape(count, outputs, *leaf.shape[1:]), codes)

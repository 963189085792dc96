"""Checks and times the kernels, and whole decode steps, on a GPU.

    python -m benchmarks.gpu --out DIR             on a GPU: under 8 minutes, nothing to install beyond jaxkv's packages
    python -m benchmarks.gpu --out DIR --quick     tiny shapes; on a CPU the kernels are interpreted (what CI runs)

First every kernel is held against numpy (bfloat16 within 1e-2, float32 within 1e-3, relative to the largest value);
then the device's copy bandwidth is measured, and the rest is given as a share of it, or of cuDNN: random weights at
real shapes, fresh random data. Times are medians of several runs of a jitted loop, with their range.
"""

import argparse
import datetime
import json
import statistics
import sys
import time
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxkv
from benchmarks import shapes
from jaxkv import attention, pallas_kernels
from jaxkv.attention import Implementation
from jaxkv.cache.layout import Layout
from jaxkv.cache.pools import Pool
from jaxkv.engine.decode import step
from jaxkv.engine.prefill_layer import layer
from jaxkv.models.decoder import Flat
from jaxkv.models.rope import angles
from jaxkv.policies.protocol import Needs

GPU = jax.default_backend() == "gpu"
INTERPRET = not GPU
TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-3}
MIB = 2**20


def timed(call, *, repeats=7):
    """Seconds of one call: median, least and most, after one that compiles."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds), min(seconds), max(seconds)


def many(function, count):
    """Runs a function of its index `count` times in one program, so that a launch from Python is not what is timed.

    Each run depends on the one before through a value that is zero and that the compiler cannot know to be.
    """

    def body(index, carry):
        out = jax.tree.leaves(function(carry))[0]
        return lax.optimization_barrier(carry + jnp.minimum(jnp.abs(out.reshape(-1)[0].astype(jnp.float32)), 0.0))

    return jax.jit(lambda zero: lax.fori_loop(0, count, body, zero))


def random(key, shape, dtype):
    """Normal values made on the device."""
    return jax.jit(lambda: jax.random.normal(key, shape, jnp.float32).astype(dtype))()


def ragged(rng, batch, heads, rows, *, spread):
    """Segment lengths that sum to heads * rows per sequence; with spread 0 all equal."""
    shares = rng.dirichlet([1.0 / spread] * heads, batch) if spread else np.full((batch, heads), 1.0 / heads)
    length = np.floor(shares * heads * rows).astype(np.int32)
    length[:, 0] += heads * rows - length.sum(axis=1)
    return jnp.asarray(length)


def oracle(q, k, v, start, length):
    """Attention over segments in float64."""
    q, k, v = (np.asarray(a.astype(jnp.float32), np.float64) for a in (q, k, v))
    out = np.zeros(q.shape)
    for b, h in np.ndindex(*q.shape[:2]):
        span = slice(int(start[b, h]), int(start[b, h] + length[b, h]))
        logits = q[b, h] @ k[b, span].T / np.sqrt(q.shape[-1])
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        out[b, h] = weights / weights.sum(axis=-1, keepdims=True) @ v[b, span]
    return out


def error(ours, theirs):
    """Largest difference as a share of the largest value."""
    return float(np.abs(np.asarray(ours.astype(jnp.float32), np.float64) - theirs).max() / np.abs(theirs).max())


def check(rng, quick):
    """Every kernel against numpy: name, dtype, head dim, error."""
    found = []
    keys = iter(jax.random.split(jax.random.key(0), 1000))
    models = [m for m in shapes.MODELS if m.name in shapes.PER_DIM][: 1 if quick else None]
    for heads in models:
        rows, slots = (40, 48) if quick else (700, 384)
        for name in TOLERANCE:
            dtype = jnp.dtype(name)
            make = lambda *shape, dtype=dtype: random(next(keys), shape, dtype)  # noqa: E731
            length = ragged(rng, 2, heads.kv_heads, rows, spread=1.0)
            start = Layout.RAGGED.place(length[None], heads.kv_heads * rows)[0]
            k, v = (make(2, heads.kv_heads * rows, heads.dim) for _ in range(2))
            q = make(2, heads.kv_heads, heads.group, heads.dim)
            score = jnp.zeros(k.shape[:2], jnp.float32)
            out, _, mass = pallas_kernels.attend(q, k, v, start, length, score=score, interpret=INTERPRET)
            found.append(("attend", name, heads.dim, error(out, oracle(q, k, v, start, length))))
            found.append(
                ("mass sums to 1", name, heads.dim, error(mass.sum(axis=1), np.full(2, float(heads.kv_heads))))
            )
            k, v = (make(1, heads.kv_heads, slots, heads.dim) for _ in range(2))
            q = make(1, heads.kv_heads, heads.group, slots, heads.dim)
            zero, tokens = jnp.zeros((1,), jnp.int32), jnp.full((1,), slots - 5, jnp.int32)
            out, lse = pallas_kernels.flash(q, k, v, zero, tokens, interpret=INTERPRET)
            sums = pallas_kernels.column_sums(q, k, lse, zero, tokens, interpret=INTERPRET)
            wide = [np.asarray(a.astype(jnp.float32), np.float64) for a in (q, k, v)]
            logits = np.einsum("bkgtd,bksd->bkgts", wide[0], wide[1]) / np.sqrt(heads.dim)
            logits[..., ~np.tri(slots, dtype=bool)] = -np.inf
            weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            real = slots - 5
            want = np.einsum("bkgts,bksd->bkgtd", weights, wide[2])[:, :, :, :real]
            found.append(("flash", name, heads.dim, error(out[:, :, :, :real], want)))
            want = weights[:, :, :, :real].sum(axis=3).mean(axis=2)[..., :real]
            found.append(("column sums", name, heads.dim, error(sums[..., :real], want)))
            source = jnp.asarray(rng.integers(0, heads.kv_heads * slots, (1, 100)).astype(np.int32))
            packed, _, _ = pallas_kernels.compact(k, v, source, interpret=INTERPRET)
            want = wide[1].reshape(1, -1, heads.dim)[:, np.asarray(source[0])]
            found.append(("compact", name, heads.dim, error(packed, want)))
    return found


def bandwidth(quick):
    """Bytes per second of a copy: each byte counted once read and once written."""
    size = (1 if quick else 2048) * MIB
    array = jnp.ones((size // 4,), jnp.float32)
    # In place, and with work that no optimisation can drop.
    add = jax.jit(lambda a: a + 1.0, donate_argnums=0)
    seconds = []
    for _ in range(9):
        begin = time.perf_counter()
        array = jax.block_until_ready(add(array))
        seconds.append(time.perf_counter() - begin)
    return 2 * size / statistics.median(seconds)


def decode_rates(rng, copy, quick):
    """Bytes per second of attention over segments, as a share of the copy's: uniform, ragged, with mass."""
    lines = []
    count = 2 if quick else 20
    for name in ("SmolLM2-135M",) if quick else ("Llama-3-8B", "Llama-3-70B/8", "Llama-2-7B", "SmolLM2-135M"):
        heads = next(m for m in shapes.MODELS if m.name == name)
        for total in (MIB,) if quick else (64 * MIB, 256 * MIB, 1024 * MIB):
            batch = 1 if quick else 4
            rows = total // (2 * 2 * heads.dim * heads.kv_heads * batch)
            k, v = (random(jax.random.key(i), (batch, heads.kv_heads * rows, heads.dim), jnp.bfloat16) for i in (0, 1))
            q = random(jax.random.key(2), (batch, heads.kv_heads, heads.group, heads.dim), jnp.bfloat16)
            row = {"model": name, "mebibytes": total / MIB}
            score = jnp.zeros(k.shape[:2], jnp.float32)
            for label, spread, into in (("uniform", 0, None), ("ragged", 1.0, None), ("mass", 0, score)):
                length = ragged(rng, batch, heads.kv_heads, rows, spread=spread)
                start = Layout.RAGGED.place(length[None], heads.kv_heads * rows)[0]

                def once(zero, start=start, length=length, score=into, q=q, k=k, v=v):
                    query = q + zero.astype(q.dtype)
                    return pallas_kernels.attend(query, k, v, start, length, score=score, interpret=INTERPRET)

                run = many(once, count)
                middle, least, most = timed(lambda run=run: run(jnp.float32(0)), repeats=1 if quick else 7)
                row[label] = {"seconds": middle / count, "range": [least / count, most / count]}
                row[label]["share_of_copy"] = total / (middle / count) / copy
            lines.append(row)
    return lines


def gather_rates(rng, copy, quick):
    """Bytes per second of compaction, read and written, as a share of the copy's."""
    lines = []
    count = 2 if quick else 20
    for name in ("SmolLM2-135M",) if quick else ("Llama-3-8B", "SmolLM2-135M"):
        heads = next(m for m in shapes.MODELS if m.name == name)
        slots, kept = (256, 64) if quick else (32768, 8192)
        k, v = (random(jax.random.key(i), (2, heads.kv_heads, slots, heads.dim), jnp.bfloat16) for i in (0, 1))
        rows = [
            np.concatenate([h * slots + np.sort(rng.permutation(slots)[:kept]) for h in range(heads.kv_heads)])
            for _ in range(2)
        ]
        source = jnp.asarray(np.stack(rows).astype(np.int32))

        def once(zero, k=k, v=v, source=source):
            return pallas_kernels.compact(k, v, source + zero.astype(jnp.int32), interpret=INTERPRET)

        run = many(once, count)
        middle, least, most = timed(lambda run=run: run(jnp.float32(0)), repeats=1 if quick else 7)
        moved = 2 * 2 * source.size * heads.dim * 2
        lines.append({"model": name, "seconds": middle / count, "range": [least / count, most / count]})
        lines[-1]["share_of_copy"] = moved / (middle / count) / copy
    return lines


def prefill_rates(quick):
    """FLOP/s of causal attention against cuDNN's, and what scores cost."""
    lines = []
    heads = next(m for m in shapes.MODELS if m.name == ("SmolLM2-135M" if quick else "Llama-3-8B"))
    for slots in (64,) if quick else (8192, 32768):
        shape = (1, heads.kv_heads, heads.group, slots, heads.dim)
        q = random(jax.random.key(0), shape, jnp.bfloat16)
        k, v = (random(jax.random.key(i), (1, heads.kv_heads, slots, heads.dim), jnp.bfloat16) for i in (1, 2))
        zero, length = jnp.zeros((1,), jnp.int32), jnp.full((1,), slots, jnp.int32)
        flops = 2 * 2 * heads.kv_heads * heads.group * slots * slots / 2 * heads.dim
        flash = jax.jit(
            lambda q, k=k, v=v, zero=zero, length=length: pallas_kernels.flash(
                q, k, v, zero, length, interpret=INTERPRET
            )
        )
        _, lse = flash(q)
        window = jax.jit(
            lambda q, k=k, lse=lse, length=length, w=32: pallas_kernels.column_sums(
                q[..., -w:, :], k, lse[..., -w:], length - w, length, interpret=INTERPRET
            )
        )
        columns = jax.jit(
            lambda q, k=k, lse=lse, zero=zero, length=length: pallas_kernels.column_sums(
                q, k, lse, zero, length, interpret=INTERPRET
            )
        )
        repeats = 1 if quick else 7
        row = {"slots": slots, "flash": timed(lambda q=q, flash=flash: flash(q), repeats=repeats)}
        row["flops_per_second"] = flops / row["flash"][0]
        row["window_extra"] = timed(lambda q=q, window=window: window(q), repeats=repeats)[0] / row["flash"][0]
        row["columns_total"] = 1 + timed(lambda q=q, columns=columns: columns(q), repeats=repeats)[0] / row["flash"][0]
        if GPU:
            by_token = lambda a: jnp.swapaxes(a.reshape(1, -1, slots, heads.dim), 1, 2)  # noqa: B023, E731
            inputs = [jax.block_until_ready(by_token(a)) for a in (q, k, v)]
            cudnn = jax.jit(lambda *a: jax.nn.dot_product_attention(*a, is_causal=True, implementation="cudnn"))
            row["cudnn"] = timed(lambda cudnn=cudnn, inputs=inputs: cudnn(*inputs))
            row["share_of_cudnn"] = row["cudnn"][0] / row["flash"][0]
        lines.append(row)
    return lines


def llama(quick):
    """A model of Llama 3 8B's shape with random weights; tiny if quick."""
    config = shapes.llama_3_8b()
    if quick:
        small = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
        small |= {"num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 256, "rms_norm_eps": 1e-5}
        small |= {"max_position_embeddings": 4096, "eos_token_id": 0, "tie_word_embeddings": True, "hidden_act": "silu"}
        config = jaxkv.ModelConfig.from_hf(small)
    flat = shapes.abstract(config)
    keys = iter(jax.random.split(jax.random.key(0), 100_000))
    fill = lambda leaf: random(next(keys), leaf.shape, leaf.dtype) * jnp.asarray(0.02, leaf.dtype)  # noqa: E731
    made = Flat.__new__(Flat)
    made.graphs, made.ends, made.blocks = flat.graphs, jax.tree.map(fill, flat.ends), jax.tree.map(fill, flat.blocks)
    return config, made


def decode_steps(config, flat, rng, quick):
    """Seconds and peak bytes of a whole decode step, by tokens and policy (Ada-KV's figure 6)."""
    lines = []
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves((flat.ends, flat.blocks)))
    available = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 2**33)
    for tokens in (64,) if quick else (8192, 32768, 131072):
        for batch in (1,) if quick else (1, 8):
            for policy, kept, spread in (("FullKV", tokens, 0), ("SnapKV", 1024, 0), ("AdaKV", 1024, 0.3)):
                kept = min(kept, tokens)
                rows = config.kv_heads * (kept + (16 if quick else 256))
                needed = weights + 2 * config.layers * batch * rows * config.head_dim * 2
                if needed > 0.9 * available:
                    lines.append({"tokens": tokens, "batch": batch, "policy": policy, "left_out_bytes": needed})
                    continue
                length = jnp.stack(
                    [ragged(rng, batch, config.kv_heads, kept, spread=spread) for _ in range(config.layers)]
                )
                start = jnp.concatenate([Layout.RAGGED.place(each[None], rows) for each in length])
                pools = tuple(
                    Pool(
                        k=random(jax.random.key(2 * i), (batch, rows, config.head_dim), jnp.bfloat16),
                        v=random(jax.random.key(2 * i + 1), (batch, rows, config.head_dim), jnp.bfloat16),
                        pos=jnp.zeros((batch, rows), jnp.int32),
                    )
                    for i in range(config.layers)
                )
                implementation = Implementation.PALLAS if GPU else Implementation.INTERPRETED
                program = shapes.program(config, flat, implementation=implementation)

                def run(pools, start, length, seen, ends, blocks, token, program=program):
                    cache = shapes.cache_of(config, pools=pools, start=start, length=length, seen=seen)
                    logits, cache, _ = step(ends, blocks, cache, token, jnp.ones_like(seen), program=program)
                    return cache.pools, jnp.argmax(logits, axis=-1).astype(jnp.int32)[:, None]

                jitted = jax.jit(run, donate_argnums=0)
                seen, token = jnp.full((batch,), tokens, jnp.int32), jnp.zeros((batch, 1), jnp.int32)
                seconds = []
                for _ in range(2 if quick else 12):
                    begin = time.perf_counter()
                    pools, token = jax.block_until_ready(
                        jitted(pools, start, length, seen, flat.ends, flat.blocks, token)
                    )
                    seconds.append(time.perf_counter() - begin)
                held = sum(leaf.nbytes for leaf in jax.tree.leaves(pools))
                spent = seconds[1:]
                lines.append(
                    {
                        "tokens": tokens,
                        "batch": batch,
                        "policy": policy,
                        "pool_bytes": held,
                        "range": [min(spent), max(spent)],
                    }
                    | {"seconds": statistics.median(spent), "memory_stats": jax.devices()[0].memory_stats()}
                )
                del pools
    return lines


def prefill_layers(config, flat, quick):
    """Seconds of one prefill layer, with the window's queries given out and without."""
    lines = []
    implementation = Implementation.PALLAS if GPU else Implementation.INTERPRETED
    for tokens in (64,) if quick else (8192, 32768):
        row = {"tokens": tokens}
        for label, queries in (("without_scores", 0), ("with_scores", 32)):
            statics = {"graphs": flat.graphs, "needs": Needs(queries=queries), "last": False}

            def run(x, leaves, length, statics=statics):
                table = angles(jnp.arange(x.shape[1], dtype=jnp.int32)[None], config.rope, config.head_dim)
                out = layer(leaves, x, length, table, **statics, implementation=implementation)
                if not statics["needs"].queries:
                    return out.x, out.k
                first = out.q_positions[:, 0]
                return out.x, attention.window_sums(out.q, out.k, first, length, implementation=implementation)

            jitted = jax.jit(run)
            x, length = (
                random(jax.random.key(0), (1, tokens, config.embed), jnp.bfloat16),
                jnp.full((1,), tokens, jnp.int32),
            )
            row[label] = timed(
                lambda jitted=jitted, x=x, length=length: jitted(x, flat.blocks[0], length), repeats=1 if quick else 5
            )
        lines.append(row)
    return lines


def main():
    """Runs everything and writes DIR/<device>.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that everything runs")
    args = parser.parse_args()
    if not GPU and not args.quick:
        parser.error("there is no GPU here: --quick interprets the kernels at tiny shapes")
    rng = np.random.default_rng(0)
    device = jax.devices()[0].device_kind
    results = {"device": device, "date": datetime.date.today().isoformat(), "quick": args.quick}
    results["versions"] = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax")}
    results["checks"] = check(rng, args.quick)
    wrong = [each for each in results["checks"] if not each[3] <= TOLERANCE[each[1]]]
    copy = results["copy_bytes_per_second"] = bandwidth(args.quick)
    results["decode"] = decode_rates(rng, copy, args.quick)
    results["gather"] = gather_rates(rng, copy, args.quick)
    results["prefill"] = prefill_rates(args.quick)
    config, flat = llama(args.quick)
    results["decode_step"] = decode_steps(config, flat, rng, args.quick)
    results["prefill_layer"] = prefill_layers(config, flat, args.quick)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{device.lower().replace(' ', '-')}{'-quick' if args.quick else ''}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(path)
    print(json.dumps(results, indent=1))
    print(f"written to {path}")
    for name, dtype, dim, size in wrong:
        print(f"WRONG {name} {dtype} {dim}: error {size:.2e}", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

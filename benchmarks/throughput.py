"""D2O's Table 5 at this machine's scale: tokens per second of whole generations, by the batch that as many bytes hold.

    python -m benchmarks.throughput                              SmolLM2 in float32, a quarter of the paper's lengths
    python -m benchmarks.throughput --settings 64+256 --repeats 3
    python -m benchmarks.throughput --gpu                        a Llama 3 8B's shape, random bfloat16, on a GPU
    python -m benchmarks.throughput --gpu --quick                the same code, tiny; runs on a CPU

FullKV generates at --batch. H2O and D2O have a budget of the prompt's length, and the largest batch whose cache weighs
no more than FullKV's at the end of its generation; with --gpu the paper's batches. Seconds are those of decoding the
whole generation by the wall-clock: of several repeats the first one includes compilation, whose seconds stand beside.
Ratios are to FullKV in the same repeat. --gpu has not been run on a GPU yet, with --quick on a CPU only.
"""

import argparse
import statistics
from pathlib import Path

import jax
import numpy as np

import jaxkv
from benchmarks import record, shapes
from jaxkv.engine.plan import plan_prefill
from jaxkv.machine.compilation import enable_compilation_cache

MODEL = "smollm2-135m-instruct"
SETTINGS = ((64, 256), (128, 512), (256, 1024), (512, 2048))
GPU_SETTINGS = ((256, 1024), (512, 2048), (1024, 4096), (2048, 8192))
# FullKV's batch and the others', by setting.
GPU_BATCHES = ((8, 32), (4, 16), (2, 8), (1, 4))
QUICK = ((16, 32),), ((2, 8),)
POLICIES = {"FullKV": None, "H2O": jaxkv.H2O, "D2O": jaxkv.D2O}
# Table 5's ratios at the lengths of GPU_SETTINGS.
PAPER = {"H2O": (2.45, 2.57, 2.90, 3.10), "D2O": (2.34, 2.49, 2.80, 3.04)}


def policy_of(name, prompt):
    """FullKV, or a policy that keeps as many rows as the prompt has tokens."""
    return jaxkv.FullKV() if name == "FullKV" else POLICIES[name](budget=prompt)


def cache_bytes(model, policy, batch, prompt, new):
    """What the cache weighs in the end: FullKV's with all new rows, an evicting one's with its spare row."""
    headroom = 1 if policy.build_policy_parts().evicts_while_decoding else new
    return plan_prefill(
        model.config, policy, [prompt] * batch, dtype=model.dtype, headroom=headroom
    ).cache_bytes


def largest_batch(model, policy, prompt, new, limit):
    """The largest batch whose cache weighs no more than `limit`."""
    fits = lambda batch: cache_bytes(model, policy, batch, prompt, new) <= limit  # noqa: E731
    if not fits(1):
        raise SystemExit(
            f"{policy} at batch 1 weighs more than FullKV's {limit:,} bytes: raise --batch"
        )
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def batches(model, prompt, new, full):
    """The batch of every policy at equal bytes."""
    limit = cache_bytes(model, jaxkv.FullKV(), full, prompt, new)
    others = {name: policy_of(name, prompt) for name in POLICIES if name != "FullKV"}
    return {"FullKV": full} | {
        n: largest_batch(model, policy, prompt, new, limit) for n, policy in others.items()
    }


def measure(model, name, batch, prompt, new):
    """One generation."""
    policy, where = policy_of(name, prompt), record.machine()
    ids = np.random.default_rng(0).integers(5, model.config.vocab, (batch, prompt)).tolist()
    stats = jaxkv.generate(
        model, ids, policy=policy, max_new_tokens=new, stop_at_eos=False, progress=False
    ).stats
    assert stats.new_tokens == batch * new
    return {
        "policy": name,
        "batch": batch,
        "cache_bytes": cache_bytes(model, policy, batch, prompt, new),
        "allocated_bytes": stats.allocated_bytes,
        "decode_seconds": stats.decode_seconds,
        "prefill_seconds": stats.prefill_seconds,
        "compile_seconds": stats.compile_seconds,
        "tokens_per_second": stats.decode_tokens_per_second,
        "attention": stats.attention,
        "layout": stats.layout,
        "machine": where,
    }


def ratios(cells):
    """Of each policy's tokens per second to FullKV's in the same repeat."""
    full = {
        cell["repeat"]: cell["tokens_per_second"] for cell in cells if cell["policy"] == "FullKV"
    }
    found = {}
    for name in POLICIES:
        mine = [
            c for c in cells if c["policy"] == name and c["repeat"] in full and name != "FullKV"
        ]
        if mine:
            found[name] = record.spread(
                [cell["tokens_per_second"] / full[cell["repeat"]] for cell in mine]
            )
    return found


def show(results, listed):
    """Prints what has been measured, a policy a row, medians over repeats."""
    print(
        f"\n{'setting':12}{'policy':8}{'batch':>6}{'cache MB':>10}{'decode s':>10}{'prefill s':>10}{'compile s':>10}"
        f"{'tok/s':>9}{'ratio':>7}{'least':>7}{'most':>7}{'paper':>7}"
    )
    for title, setting in results["measured"].items():
        for name in POLICIES:
            cells = [cell for cell in setting["cells"] if cell["policy"] == name]
            if not cells:
                continue
            middle = lambda key, cells=cells: statistics.median(cell[key] for cell in cells)  # noqa: E731
            row = f"{title:12}{name:8}{cells[0]['batch']:6}{cells[0]['cache_bytes'] / 1e6:10.1f}"
            row += "".join(
                f"{middle(f'{part}_seconds'):10.1f}" for part in ("decode", "prefill", "compile")
            )
            row += f"{middle('tokens_per_second'):9.1f}"
            ratio = setting["ratios"].get(name)
            if ratio:
                row += "".join(f"{ratio[key]:7.2f}" for key in ("median", "least", "most"))
                row += (
                    f"{PAPER[name][listed.index(title)]:7.2f}" if title in listed else f"{'-':>7}"
                )
            print(row)


def pair(text):
    """Prompt and new tokens, written 64+256."""
    prompt, _, new = text.partition("+")
    if not (prompt.isdigit() and new.isdigit() and int(prompt) and int(new)):
        raise argparse.ArgumentTypeError(f"{text!r}: write prompt+new, such as 64+256")
    return int(prompt), int(new)


def main():
    """Measures setting by setting, saves after every cell, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--settings",
        type=pair,
        nargs="+",
        metavar="P+N",
        help="prompt and new tokens (default: all)",
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument(
        "--batch", type=int, help="FullKV's batch (default: 8; with --gpu the paper's)"
    )
    parser.add_argument("--gpu", action="store_true", help="a Llama 3 8B's shape on a GPU")
    parser.add_argument("--quick", action="store_true", help="with --gpu: a tiny model and setting")
    parser.add_argument(
        "--out", type=Path, help="default: benchmarks/results/throughput[-DEVICE][-quick].json"
    )
    options = parser.parse_args()
    if options.quick and not options.gpu:
        parser.error("--quick goes with --gpu: without it, choose short --settings")
    if options.gpu and not options.quick and jax.default_backend() != "gpu":
        parser.error("there is no GPU here: --quick runs the same code, tiny")
    if options.gpu and options.batch:
        parser.error("with --gpu the batches are the paper's: leave --batch out")
    if options.repeats < 1 or (options.batch is not None and options.batch < 1):
        parser.error("--repeats and --batch are 1 or more")
    known, fixed = (
        QUICK if options.quick else (GPU_SETTINGS, GPU_BATCHES) if options.gpu else (SETTINGS, None)
    )
    chosen = options.settings or list(known)
    if options.gpu and not set(chosen) <= set(known):
        parser.error(f"with --gpu the settings are {', '.join(f'{p}+{n}' for p, n in known)}")
    device = f"-{jax.devices()[0].device_kind.lower().replace(' ', '-')}" if options.gpu else ""
    out = (
        options.out
        or record.RESULTS / f"throughput{device}{'-quick' if options.quick else ''}.json"
    )

    enable_compilation_cache()
    model = (
        shapes.random_llama("tiny" if options.quick else "llama-3-8b")
        if options.gpu
        else jaxkv.load(MODEL, "float32")
    )
    settings = {
        "model": model.name,
        "dtype": model.dtype.name,
        "batch": None if options.gpu else options.batch or 8,
    }
    results = record.resume(out, settings)
    measured = results.setdefault("measured", {})
    for prompt, new in chosen:
        title = f"{prompt}+{new}"
        if fixed is None:
            sizes = batches(model, prompt, new, settings["batch"])
        else:
            full, others = fixed[known.index((prompt, new))]
            sizes = {name: full if name == "FullKV" else others for name in POLICIES}
        setting = measured[title] = {"cells": [], "ratios": {}}
        for repeat in range(options.repeats):
            for name, batch in sizes.items():
                cell = measure(model, name, batch, prompt, new)
                setting["cells"].append({"repeat": repeat, **cell})
                setting["ratios"] = ratios(setting["cells"])
                record.save(out, results)
                print(
                    f"{title} {name} batch {batch}: {cell['tokens_per_second']:.1f} tokens/s",
                    flush=True,
                )
    listed = [f"{prompt}+{new}" for prompt, new in (GPU_SETTINGS if options.gpu else SETTINGS)]
    show(results, listed)
    print(
        f"\nratio: to FullKV in the same repeat; paper: D2O's Table 5 at {'these' if options.gpu else '4x the'} lengths"
    )
    print(f"saved to {out}")


if __name__ == "__main__":
    main()

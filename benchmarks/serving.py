"""Many requests at once on this machine's CPU: `jaxkv serve`, `jaxkv.Engine`, `generate` one by one, and a peer.

    .venv/bin/python -m benchmarks.serving [--rounds 3] [--peer .venv-peer/bin/python]
    .venv/bin/python -m benchmarks.serving --together [--rounds 3] [--peer .venv-peer/bin/python]

A round answers the same 32 requests (300 to 1,500 tokens, 32 to 200 new, SmolLM2 in float32, greedy, all there from
the beginning) by every contestant in turn; programs are compiled before. The peer is transformers' continuous batching
(`generate_batch`) with as many sequences at a time as the engine has slots. `jaxkv serve` is asked by as many clients
as there are requests, which read streams over HTTP. The last part has one request sample while
a prompt of 4,096 tokens arrives, with tokens sampled between its layers and without.

`--together` runs only this, and prints it: 16 requests of 600 tokens and 64 new, 8 slots, with prompts prefilled
together, one by one, and by the peer, in turns.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks import record
from benchmarks.serving_http import by_http, serving
from benchmarks.workers import Worker

RESULTS = record.RESULTS / "serving.json"
MODEL, REQUESTS, SLOTS, LONG = "smollm2-135m-instruct", 32, 8, 4096
# Tokens of a prompt with --together.
READ, TOGETHER = 600, ("SnapKV", "FullKV")
POLICIES = {"FullKV": {}, "SnapKV": {"budget": 256}, "AdaKV": {"budget": 256}}
SERVED = {"FullKV": "full", "SnapKV": "snapkv --budget 256", "AdaKV": "adakv --budget 256"}
PEER, CACHE = "transformers, continuous batching", 2e9
LIMITS = {"max_prompt_tokens": 1536, "max_new_tokens": 200}
HEAD = """# Many requests at once

`python -m benchmarks.serving` writes this: 32 requests of 300 to 1,500 tokens, 32 to 200 new, SmolLM2-135M in float32
on this machine's CPU, all there from the beginning; medians over the rounds, least and largest in brackets. "Ratio" is
requests a minute over those of the first row of its round. Seconds to the first token and per token after it: median
and 95th percentile over the requests. "CPU" are seconds of the process per 100 new tokens, which other work on the
machine changes least. The last column counts the slots, each for the longest request, that 2 GB of cache hold.
"""


def workload():
    """Prompts of real token ids, and the number of new tokens of each."""
    rng = np.random.default_rng(31)
    path = record.ROOT / "tests" / "golden" / "parity" / "needle1024.json"
    ids = np.concatenate(
        [np.asarray(case["input_ids"]) for case in json.loads(path.read_text())["cases"]]
    )
    lengths, new = rng.integers(300, 1501, REQUESTS), rng.integers(32, 201, REQUESTS)
    prompts = [
        np.take(ids, np.arange(n) + 613 * at, mode="wrap").tolist() for at, n in enumerate(lengths)
    ]
    return prompts, new.tolist()


def figures(seconds, cpu, firsts, later, new):
    """Figures of one round of one contestant."""
    return {
        "requests_a_minute": 60 * REQUESTS / seconds,
        "tokens_a_second": sum(new) / seconds,
        "cpu_a_hundred_tokens": 100 * cpu / sum(new),
        "first_token": [float(np.quantile(firsts, share)) for share in (0.5, 0.95)],
        "per_token": [float(np.quantile(later, share)) for share in (0.5, 0.95)],
    }


def one_by_one(model, policy, prompts, new):
    """Calls of `generate`, each after the other."""
    import jaxkv

    begun, cpu, firsts, later = time.perf_counter(), time.process_time(), [], []
    for prompt, count in zip(prompts, new, strict=True):
        stats = jaxkv.generate(
            model, prompt, policy=policy, max_new_tokens=count, stop_at_eos=False, progress=False
        ).stats
        step = stats.decode_seconds / count
        firsts.append(time.perf_counter() - begun - stats.decode_seconds + step)
        later.append(step)
    return figures(time.perf_counter() - begun, time.process_time() - cpu, firsts, later, new)


def by_engine(engine, prompts, new):
    """All requests given to an engine at once."""
    begun, cpu = time.perf_counter(), time.process_time()
    requests = [
        engine.submit(prompt, max_new_tokens=count, stop_at_eos=False)
        for prompt, count in zip(prompts, new, strict=True)
    ]
    stats = [(request.result(), request.stats)[1] for request in requests]
    seconds = time.perf_counter() - begun
    later = [(each.seconds - each.first_token_seconds) / (each.new_tokens - 1) for each in stats]
    firsts = [each.first_token_seconds for each in stats]
    return figures(seconds, time.process_time() - cpu, firsts, later, new)


def by_peer(worker, prompts, new):
    """All requests given to transformers' continuous batching."""
    found = worker.ask({"prompts": prompts, "new": new})
    return figures(found["seconds"], found["cpu"], found["firsts"], found["later"], new)


def pauses(model, interleaved):
    """Longest pause of a request that samples while a prompt of 4,096 tokens arrives, and seconds of that prefill."""
    import jaxkv

    (prompt, *_), _ = workload()
    long = np.resize(np.asarray(prompt), LONG).tolist()
    limits = {"slots": 2, "max_prompt_tokens": LONG, "max_new_tokens": 200}
    with jaxkv.Engine(model, policy=jaxkv.SnapKV(budget=256), **limits) as engine:
        running = engine.submit(
            prompt, max_new_tokens=200, stop_at_eos=False, offline=not interleaved
        )
        times, asked = [], None
        for _ in running:
            times.append(time.perf_counter())
            if len(times) == 10:
                asked = engine.submit(long, max_new_tokens=2, stop_at_eos=False)
        asked.result()
    return {"longest_pause": float(np.diff(times).max()), "prefill": asked.stats.prefill_seconds}


def together(model, rounds, peer):
    """Prints, of each policy, how many times better prompts read together are than one by one, and than the peer."""
    import jaxkv

    (prompt, *_), _ = workload()
    ids = np.resize(np.asarray(prompt), 20 * READ)
    prompts, new = [ids[at * 64 :][:READ].tolist() for at in range(16)], [64] * 16
    limits = {"slots": SLOTS, "max_prompt_tokens": READ, "max_new_tokens": 64}
    for name in TOGETHER:
        policy, found = getattr(jaxkv, name)(**POLICIES[name]), {}
        contestants = {
            way: jaxkv.Engine(model, policy=policy, prefill_tokens=tokens, **limits)
            for way, tokens in (("together", 4096), ("one by one", 1))
        }
        if peer is not None:
            contestants[PEER] = peer
        for at in range(rounds + 1):
            for way, contestant in contestants.items():
                mine = (by_peer if contestant is peer else by_engine)(contestant, prompts, new)
                # The first round touches the pages of the slots.
                if at:
                    found.setdefault(way, []).append(mine)
                    told = mine["first_token"][0], mine["tokens_a_second"]
                    print(f"{name}, {way}: {told[0]:.1f} s, {told[1]:.1f} tokens/s", flush=True)
        ours, *others = found
        for other in others:
            pairs = list(zip(found[ours], found[other], strict=True))
            shares = {
                "first token": [b["first_token"][0] / a["first_token"][0] for a, b in pairs],
                "throughput": [a["tokens_a_second"] / b["tokens_a_second"] for a, b in pairs],
            }
            for key, ratios in shares.items():
                told = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                print(f"{name}, {key}, {ours} against {other}: {told}", flush=True)
        for way in (ours, "one by one"):
            contestants[way].close()


def measured(model, peer, served, rounds):
    """Of each contestant its rounds; bytes of its slots. `served` are the port and process of `jaxkv serve`."""
    import jaxkv

    prompts, new = workload()
    policies = {name: getattr(jaxkv, name)(**options) for name, options in POLICIES.items()}
    engines = {
        f"jaxkv.Engine, {name}": jaxkv.Engine(model, policy=policy, slots=SLOTS, **LIMITS)
        for name, policy in policies.items()
    }
    for engine in engines.values():
        # Bytes of the slots' pages are touched, and the machine's clock is up.
        by_engine(engine, prompts[:SLOTS], new[:SLOTS])
    for policy in policies.values():
        one_by_one(model, policy, prompts, [2] * REQUESTS)
    names = {f"jaxkv serve, {name}": each for name, each in models_of(policies).items()}
    for each in names.values():
        by_http(*served, each, prompts[:SLOTS], new[:SLOTS])
    found = {}

    def keep(name, mine):
        # A round takes most of an hour on a slow machine: one that is ended has told what it measured.
        print(f"{name}: {mine['requests_a_minute']:.1f} requests a minute", flush=True)
        found.setdefault(name, []).append(mine)

    for _ in range(rounds):
        if peer is not None:
            keep(PEER, by_peer(peer, prompts, new))
        for name, policy in policies.items():
            keep(f"generate, one by one, {name}", one_by_one(model, policy, prompts, new))
        for name, engine in engines.items():
            keep(name, by_engine(engine, prompts, new))
        for name, each in names.items():
            keep(name, figures(*by_http(*served, each, prompts, new), new))
    sizes = {name: engine.stats.nbytes for name, engine in engines.items()}
    sizes |= {name: sizes[name.replace("jaxkv serve", "jaxkv.Engine")] for name in names}
    config = model.config
    sizes[PEER] = (
        SLOTS * sum(LIMITS.values()) * 2 * config.layers * config.kv_heads * config.head_dim * 4
    )
    for engine in engines.values():
        engine.close()
    return found, sizes


def models_of(policies):
    """Names of the server's models by the policies' names."""
    first, *others = policies
    return {first: "model"} | {
        name: f"model:{SERVED[name].replace(' --', '-').replace(' ', '-')}" for name in others
    }


def table(results):
    """Lines of the page."""
    rounds = results["rounds"]
    base = next(iter(rounds.values()))
    yield "| | requests a minute | ratio | tokens/s | CPU | first token, s | per token, s | slots, MB | in 2 GB |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for name, mine in rounds.items():
        ratios = [
            a["requests_a_minute"] / b["requests_a_minute"] for a, b in zip(mine, base, strict=True)
        ]
        middle = lambda key, of=mine: statistics.median(each[key] for each in of)  # noqa: E731
        pair = lambda key, of=mine: " / ".join(  # noqa: E731
            f"{statistics.median(each[key][at] for each in of):.2f}" for at in (0, 1)
        )
        size = results["bytes"].get(name)
        held = " | |" if size is None else f"{size / 1e6:.0f} | {int(CACHE * SLOTS / size)} |"
        yield (
            f"| {name} | {middle('requests_a_minute'):.1f} | {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) | {middle('tokens_a_second'):.1f} "
            f"| {middle('cpu_a_hundred_tokens'):.1f} | {pair('first_token')} | {pair('per_token')} "
            f"| {held}"
        )


def main():
    """Runs all rounds and writes both files."""
    import jaxkv
    from jaxkv.checkpoints import fetch_checkpoint
    from jaxkv.machine.compilation import enable_compilation_cache

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--peer", type=Path, help="Python of an environment with torch and transformers"
    )
    parser.add_argument("--together", action="store_true", help="only prompts prefilled together")
    options = parser.parse_args()
    enable_compilation_cache()
    model, peer = jaxkv.load(MODEL, "float32", progress=False), None
    longest = READ + 64 if options.together else sum(LIMITS.values())
    if options.peer is not None:
        sizes = [str(each) for each in (fetch_checkpoint(MODEL), SLOTS, longest)]
        peer = Worker([options.peer, "-m", "benchmarks.serving_peer", *sizes])
    if options.together:
        together(model, options.rounds, peer)
        return
    policies = {"model": SERVED["FullKV"]} | {
        models_of(SERVED)[name]: SERVED[name] for name in list(SERVED)[1:]
    }
    with serving(MODEL, policies, slots=SLOTS, limits=LIMITS) as served:
        rounds, sizes = measured(model, peer, served, options.rounds)
    if peer is not None:
        peer.stop()
    found = {name: pauses(model, name == "with") for name in ("with", "without")}
    results = {"machine": record.machine(), "bytes": sizes, "rounds": rounds, "pauses": found}
    record.save(RESULTS, results)
    told = [
        f"Longest pause of a request while a prompt of {LONG:,} tokens arrives: "
        f"{found['with']['longest_pause']:.2f} s with tokens sampled between its layers (its prefill took "
        f"{found['with']['prefill']:.1f} s, {found['with']['prefill'] / model.config.layers:.2f} s a layer), "
        f"{found['without']['longest_pause']:.2f} s without."
    ]
    load = f"Load of the machine, {results['machine']['cores']} cores, at the end: {results['machine']['load']:.1f}."
    RESULTS.with_suffix(".md").write_text(
        "\n".join([HEAD, load, "", *table(results), "", *told, ""])
    )
    print(RESULTS.with_suffix(".md").read_text())


if __name__ == "__main__":
    sys.exit(main())

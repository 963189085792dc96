"""OmniKV's decode step against FullKV's over the same cache: budgets, host memory, bytes that the programs touch.

    python -m benchmarks.omnikv                            8000 tokens, batch 1 and 8, float32
    python -m benchmarks.omnikv --batches 8 --budgets 512  the file keeps the figures of other settings
    python -m benchmarks.omnikv --only prefill             prompts in chunks that read little, against whole prompts

One prefill under full attention serves all: rows are the same, only who reads them differs. All ways of reading live in
one process and take turns of some steps, round after round; a ratio is taken within a round, the figure is the rounds'
median. Steps are sampled and taken back, so that no cache grows.
"""

import argparse
import dataclasses
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from benchmarks import record
from jaxkv.cache.host_store import commit_to_device
from jaxkv.engine import token_loop as looping
from jaxkv.engine.chunked import offload_layers
from jaxkv.engine.plan import plan_prefill
from jaxkv.engine.spec import create_cache_spec, create_selection_state
from jaxkv.machine.compilation import enable_compilation_cache
from jaxkv.policies.reads import count_attended_prompt_tokens

MODEL = "smollm2-135m-instruct"
ROOM = 64


def cache_of(model, batch, tokens):
    """A full cache of random prompts with room for a turn, and the logits behind it."""
    ids = np.random.default_rng(0).integers(5, model.config.vocab, (batch, tokens)).astype(np.int32)
    needed = plan_prefill(
        model.config, jaxkv.FullKV(), [tokens] * batch, dtype=model.dtype, headroom=ROOM
    )
    cache = jaxkv.Session(model).prefill(ids, needed=needed)
    # Pools that have met rows from host memory are bound to their device: all are from the beginning, so that no way
    # makes another compile again.
    return commit_to_device(cache), needed


def read_by(cache, policy):
    """The same cache, as if this policy had prefilled it."""
    reads = count_attended_prompt_tokens(
        policy.build_policy_parts().read, np.asarray(cache.seen), cache.config.sliding_windows
    )
    state = commit_to_device(create_selection_state(cache.seen, reads, cache.length))
    return dataclasses.replace(cache.replace_arrays(state=state), policy=policy)


class Way:
    """One way of reading the cache."""

    def __init__(self, name, model, cache, needed, steps):
        """Takes the cache's tables; its pools are passed around."""
        self.name, self.size, self.session = (
            name,
            16 * -(-steps // 16),
            jaxkv.Session(model, cache.policy),
        )
        self.cache, self.away = cache, ()
        reading = cache.policy.build_policy_parts().build_read_config(
            cache.config.sliding_windows, needed.padded_len
        )
        if reading.offloaded:
            self.cache, self.away = offload_layers(cache, reading, needed), reading.offloaded
        # Pools of offloaded layers are this way's own; the others are everybody's.
        self.own = {layer: self.cache.pools[layer] for layer in self.away}
        self.cache = self.cache.replace_arrays(pools=())

    def over(self, pools):
        """The cache, with everybody's pools where it has none of its own."""
        return self.cache.replace_arrays(
            pools=tuple(self.own.get(at, pool) for at, pool in enumerate(pools))
        )

    def run(self, pools, steps):
        """Samples and takes back; returns pools and seconds."""
        loop = self.session.start_decode_loop(self.over(pools), new=self.size)
        begin = time.perf_counter()
        if steps:
            loop.sample_tokens(steps)
        seconds = time.perf_counter() - begin
        # The tables are those of before: rows sampled lie behind them, where the next ones go.
        after = loop.finish_sampling().pools
        self.own = {layer: after[layer] for layer in self.away}
        return tuple(
            pool if at in self.own else after[at] for at, pool in enumerate(pools)
        ), seconds

    def bytes_accessed(self, pools):
        """What the compiled loop says it reads and writes, its body counted once; None if it is staged."""
        if self.cache.host_store is not None:
            return None
        flat, cache = self.session.params.flat_decoder, self.over(pools)
        spec, none = create_cache_spec(flat, cache), jnp.asarray((-2,), jnp.int32)
        state = looping.create_sampling_state(
            cache.logits, jnp.zeros((cache.batch,), bool), jax.random.key(0), none
        )
        given = looping.collect_loop_arguments(
            flat, cache.arrays, state, 1, jaxkv.Sampling(temperature=0), 0, spec=spec
        )
        compiled = looping._loop.trace(*given, spec=spec, size=self.size).lower().compile()
        return float(compiled.cost_analysis()["bytes accessed"])


def ways(budgets, filters, layers):
    """Name to policy, for a model of so many layers."""
    found = {"FullKV": jaxkv.FullKV()}
    for budget in budgets:
        found[f"OmniKV-{budget}"] = jaxkv.OmniKV(budget=budget, filter_layers=filters)
    middle = budgets[len(budgets) // 2] if 512 not in budgets else 512
    found[f"OmniKV-{middle}-offloaded"] = jaxkv.OmniKV(
        budget=middle, filter_layers=filters, offload=True
    )
    found["BrutalOffload"] = jaxkv.BrutalOffload(resident_layers=min(10, layers - 1))
    return found


def measure(model, *, batch, tokens, budgets, filters, rounds, steps):
    """Milliseconds per step, ratios and bytes of every way."""
    where = record.machine()
    cache, needed = cache_of(model, batch, tokens)
    policies = ways(budgets, filters, model.config.layers)
    each = {}
    for name, policy in policies.items():
        mine = cache if name == "FullKV" else read_by(cache, policy)
        each[name] = Way(name, model, mine, needed, steps)
    pools, touched = cache.pools, {}
    for name, way in each.items():
        touched[name] = way.bytes_accessed(pools)
        # No steps compile; a turn makes the pages of code and scratch present.
        for some in (0, 2):
            pools, _ = way.run(pools, some)
    spent = {name: [] for name in each}
    for way in each.values():
        way.session.decode_traffic.transfers = way.session.decode_traffic.bytes = 0
    for _ in range(rounds):
        for name, way in each.items():
            pools, seconds = way.run(pools, steps)
            spent[name].append(1e3 * seconds / steps)
    out = {}
    for name, values in spent.items():
        ratios = [theirs / mine for mine, theirs in zip(values, spent["FullKV"], strict=True)]
        traffic = each[name].session.decode_traffic
        out[name] = {
            "policy": repr(policies[name]),
            "milliseconds": values,
            "step": record.spread(values),
            "speed_over_full": record.spread(ratios),
            "bytes_accessed": touched[name],
            "transfers_per_token": traffic.transfers / (rounds * steps),
            "bytes_per_token": traffic.bytes / (rounds * steps),
        }
    return {"ways": out, "machine": where}


def measure_prefill(model, *, tokens, filters, ratios, rounds):
    """Seconds and ratios of a prompt's prefill, chunk by chunk and whole, in turns."""
    ids = np.random.default_rng(0).integers(5, model.config.vocab, tokens).tolist()
    policies = {"FullKV": jaxkv.FullKV()}
    for ratio in ratios:
        policies[f"OmniKV, {ratio} for each"] = jaxkv.OmniKV(
            filter_layers=filters, prefill_ratio=ratio
        )
    spent = {name: [] for name in policies}
    for number in range(rounds + 1):
        for name, policy in policies.items():
            begin = time.perf_counter()
            jax.block_until_ready(jaxkv.prefill(model, ids, policy=policy).pools)
            # The first round compiles.
            spent[name] += [time.perf_counter() - begin] if number else []
    out = {}
    for name, values in spent.items():
        ratios = [theirs / mine for mine, theirs in zip(values, spent["FullKV"], strict=True)]
        out[name] = {
            "policy": repr(policies[name]),
            "seconds": values,
            "speed_over_full": record.spread(ratios),
        }
        speed = out[name]["speed_over_full"]
        spreads = "".join(f"{speed[key]:8.2f}" for key in ("median", "least", "most"))
        print(f"prefill  {name:24}{statistics.median(values):9.2f} s{spreads}", flush=True)
    return {"ways": out, "machine": record.machine()}


def show(title, found):
    """Prints one table."""
    print(f"\n{title}")
    print(
        f"{'way':24}{'ms/step':>9}{'speed':>8}{'least':>8}{'most':>8}{'MB touched':>12}{'sent':>6}{'MB sent':>9}"
    )
    for name, cell in found["ways"].items():
        speed, touched = cell["speed_over_full"], cell["bytes_accessed"]
        row = f"{name:24}{statistics.median(cell['milliseconds']):9.1f}"
        row += "".join(f"{speed[key]:8.2f}" for key in ("median", "least", "most"))
        row += f"{touched / 1e6:12.0f}" if touched else f"{'-':>12}"
        print(f"{row}{cell['transfers_per_token']:6.0f}{cell['bytes_per_token'] / 1e6:9.2f}")


def main():
    """Measures batch by batch, saves after each, and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument(
        "--filters", type=int, nargs="+", help="filter layers (default: those found for the model)"
    )
    parser.add_argument(
        "--ratios", type=float, nargs="+", default=[2], help="chosen tokens per token of a chunk"
    )
    parser.add_argument("--prefill-rounds", type=int, default=3)
    parser.add_argument(
        "--only", choices=("decode", "prefill"), help="one of the two (default: both)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "omnikv.json")
    options = parser.parse_args()
    if options.steps > ROOM:
        parser.error(f"--steps is at most {ROOM}")
    enable_compilation_cache()
    model = jaxkv.load(MODEL, options.dtype)
    filters = tuple(options.filters) if options.filters else model.filter_layers
    settings = {"model": model.name, "tokens": options.tokens, "filters": filters}
    results = record.resume(options.out, settings)
    if options.only != "decode":
        asked = {"tokens": options.tokens, "filters": filters, "ratios": options.ratios}
        results["prefill"] = measure_prefill(model, rounds=options.prefill_rounds, **asked)
        record.save(options.out, results)
    for batch in options.batches if options.only != "prefill" else ():
        title = f"{model.dtype.name}, batch {batch}, {options.tokens} tokens"
        found = measure(
            model,
            batch=batch,
            tokens=options.tokens,
            budgets=options.budgets,
            filters=filters,
            rounds=options.rounds,
            steps=options.steps,
        )
        results.setdefault("measured", {})[title] = found
        record.save(options.out, results)
        show(title, found)
    print(f"\nsaved to {options.out}")


if __name__ == "__main__":
    main()

"""Random conversations over eight slots, few bytes for prefixes: answers are those without a prefix cache.

    python -m benchmarks.soak_prefixes [--conversations 1000]

Conversations of one to five turns, many with the same first text, are held by twelve threads at once, under policies
that keep every entry and attend to all of them (Quest and OmniKV read answers sparsely, so that a conversation goes on
as a `Session` would, not as its whole text). Every prompt is asked of an engine that reuses prefixes within eight
conversations' bytes, and again of one that does not. The model is a tiny random one.
"""

import argparse
import collections
import concurrent.futures
import json
import sys

import numpy as np

import jaxkv
from benchmarks import record
from jaxkv.serving import PrefixCacheConfig
from jaxkv.testing import tiny_model

VOCAB = 64
MODEL = jaxkv.ModelConfig(
    vocab=VOCAB,
    layers=3,
    embed=24,
    hidden=32,
    heads=6,
    kv_heads=2,
    head_dim=8,
    max_positions=1024,
)
LIMITS = {
    "slots": 8,
    "max_prompt_tokens": 400,
    "max_question_tokens": 128,
    "max_new_tokens": 16,
    "queue": 64,
}
NONE = PrefixCacheConfig(policies="none")
POLICIES = {
    "full": jaxkv.FullKV(),
    "knorm, budget above all": jaxkv.KNorm(budget=512),
}


def hold_conversation(engines, seed, count, check):
    """Hold one conversation with both engines; count its turns."""
    rng = np.random.default_rng(seed)
    few = np.random.default_rng(seed % 17)
    prompt = few.integers(0, VOCAB, int(few.integers(20, 160))).tolist()
    for _ in range(int(rng.integers(1, 6))):
        prompt = prompt + rng.integers(0, VOCAB, int(rng.integers(1, 40))).tolist()
        options = {"max_new_tokens": int(rng.integers(1, 12)), "stop_at_eos": False}
        if rng.random() < 0.5:
            options |= {
                "key": int(rng.integers(100)),
                "sampling": jaxkv.Sampling(temperature=0.8),
            }
        asked = [each.submit(prompt, **options) for each in engines]
        answer, plain = (each.result().tokens.tolist() for each in asked)
        reused = asked[0].stats.cached_tokens
        count["turns"] += 1
        count["turns from a prefix"] += reused > 0
        count["tokens reused"] += reused
        count["tokens of prompts"] += len(prompt)
        if answer != plain:
            count["different"] += 1
            print("different:", seed, len(prompt), reused, options, answer, plain, flush=True)
        check()
        prompt = prompt + answer
        if len(prompt) > 340:
            return


def main():
    """Hold all conversations; return 1 for any different answer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=1000)
    given = parser.parse_args()
    params = tiny_model(MODEL)
    found = {}
    for name, policy in POLICIES.items():
        count = collections.Counter(different=0)
        long = np.arange(300, dtype=np.int32) % VOCAB
        config = PrefixCacheConfig(max_bytes=8 * jaxkv.prefill(params, long, policy=policy).nbytes)
        most = [0]
        with (
            jaxkv.Engine(params, policy=policy, prefix_cache=config, **LIMITS) as reusing,
            jaxkv.Engine(params, policy=policy, prefix_cache=NONE, **LIMITS) as plain,
        ):

            def check(engine=reusing, most=most):
                most[0] = max(most[0], engine.stats.prefix_bytes)

            with concurrent.futures.ThreadPoolExecutor(12) as pool:
                engines = reusing, plain
                held = [
                    pool.submit(hold_conversation, engines, seed, count, check)
                    for seed in range(given.conversations)
                ]
                for each in held:
                    each.result()
        found[name] = dict(count) | {"most bytes": most[0], "bound": config.max_bytes}
        print(name, json.dumps(found[name]), flush=True)
    record.save(record.RESULTS / "soak_prefixes.json", {"machine": record.machine(), **found})
    bad = any(each["different"] or each["most bytes"] > each["bound"] for each in found.values())
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())

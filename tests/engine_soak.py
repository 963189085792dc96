"""Half an hour of random requests to one `Engine`: memory that does not grow, no slot lost, an empty queue at the end.

python tests/engine_soak.py [minutes] [policy row]

Every round submits prompts, questions on documents, cancellations and deadlines, adds a document and removes one, and
repeats one request alone. Memory is the process' resident memory after malloc gave free pages back, once a minute;
the first fifth of the time is warm-up.
"""

import ctypes
import dataclasses
import gc
import statistics
import sys
import time
import warnings
from concurrent.futures import CancelledError
from pathlib import Path

import engine_runs as runs
import numpy as np
import slot_runs
import tiny

import jaxkv

ROUND, WARM, MOST_GROWTH, CLOSE = 48, 0.2, 0.01, 1e-5


def resident():
    """Bytes of resident memory, without those that malloc keeps for later."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Soak:
    """An engine with three documents, and counts of what became of its requests."""

    def __init__(self, engine, model, policy):
        self.engine, self.model, self.policy, self.rng = (
            engine,
            model,
            policy,
            np.random.default_rng(0),
        )
        self.documents = [engine.document(self._text()) for _ in range(3)]
        self.counts = dict.fromkeys(("answered", "cancelled", "late", "alone", "equally likely"), 0)

    def _text(self):
        return self.rng.permutation(64)[:50].tolist()

    def _compare(self, asked, tokens):
        """Compares the tokens of a greedy request with those of `Session` alone, up to two equally likely ones."""
        alone = slot_runs.alone(self.model, self.policy, asked)
        if tokens == alone:
            self.counts["alone"] += 1
            return
        first = next(
            at for at, pair in enumerate(zip(tokens, alone, strict=True)) if pair[0] != pair[1]
        )
        session = jaxkv.Session(self.model, self.policy, key=asked.seed)
        cache = session.prefill(asked.prompt, new=slot_runs.NEW)
        cache = session.draw(cache, first, new=slot_runs.NEW, donate=True)[0] if first else cache
        logits = np.asarray(cache.logits)[0]
        # In float32, programs of different batch sizes round differently.
        assert abs(logits[tokens[first]] - logits[alone[first]]) < CLOSE, (asked, tokens, alone)
        self.counts["equally likely"] += 1

    def round(self, seed):
        """Submits a round of requests, waits for all, and compares one with its tokens alone."""
        given = [
            dataclasses.replace(each, eos=())
            for each in slot_runs.requests(seed, ROUND, sampled=True)
        ]
        asked = []
        for at, each in enumerate(given):
            document = self.documents[at % 3] if at % 5 == 4 else None
            prompt = each.prompt if document is None else each.prompt[: runs.QUESTION]
            options = {"max_new_tokens": each.new, "sampling": each.sampling, "key": each.seed}
            late = 1e-3 if at % 11 == 7 else None
            asked.append(self.engine.submit(prompt, document=document, deadline=late, **options))
            if at % 7 == 3:
                asked[at - 2].cancel()
        for request in asked:
            try:
                request.result()
                self.counts["answered"] += 1
            except TimeoutError:
                self.counts["late"] += 1
            except CancelledError:
                self.counts["cancelled"] += 1
        self._compare(given[0], asked[0].result().tokens.tolist())
        self.engine.documents.remove(self.documents.pop(0).id)
        self.documents.append(self.engine.document(self._text()))


def main(minutes=30.0, name="adakv"):
    warnings.simplefilter("ignore")
    model, policy = tiny.tiny(tiny.TWO_LAYERS), slot_runs.policy_of(name)
    with jaxkv.Engine(model, policy=policy, **runs.LIMITS) as engine:
        soak, seed = Soak(engine, model, policy), 0
        soak.round(seed)
        began, next_look, sizes = time.monotonic(), 0.0, []
        while (passed := time.monotonic() - began) < 60 * float(minutes):
            seed += 1
            soak.round(seed)
            if passed >= next_look:
                next_look += 60 if float(minutes) > 5 else 5
                sizes.append((passed, resident()))
                print(
                    f"{passed / 60:5.1f} min: {sizes[-1][1] / 1e6:,.1f} MB, {soak.counts}",
                    flush=True,
                )
        stats = engine.stats
        engine.submit(list(range(17)), max_new_tokens=4).result()
        free = engine.stats.slots - engine.stats.running
    settled = [size for at, size in sizes if at >= WARM * 60 * float(minutes)]
    third = max(1, len(settled) // 3)
    first, last = statistics.median(settled[:third]), statistics.median(settled[-third:])
    print(f"{name}, {seed} rounds of {ROUND}: {soak.counts}")
    print(
        f"memory: {first / 1e6:,.1f} MB -> {last / 1e6:,.1f} MB ({last / first - 1:+.2%}); {free} slots free"
    )
    print(f"queue: {stats.waiting} waiting, {stats.ready} ready, {stats.running} running")
    assert stats.waiting == stats.ready == stats.running == 0 and free == engine.stats.slots
    assert last <= (1 + MOST_GROWTH) * first


if __name__ == "__main__":
    main(*sys.argv[1:])

"""One of two processes that share a mesh of eight devices, four each: `tests/test_hosts.py` starts it twice."""

import dataclasses
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

PROCESSES = 2
# Seconds: by default 100 and 300. What is killed is missed by the one, what has an error of its own by the other.
TIMEOUTS = {"killed": (8, 60), "raises": (60, 4)}
# What the processes are about before one of them ends, and how it does.
ENDS = {"answering": "raises", "refused": "killed"}
NEW, BUDGET = 6, 24
ACROSS, BOTH = (2, 4), (1, 8)
# Sequences in either process, or the heads of each sequence in both.
CASES = [(ACROSS, "every"), (BOTH, "d2o"), (BOTH, "chunks")]
LOADED = Path(__file__).parent / "golden" / "models" / "llama_gqa8"


def policy_of(name):
    from policy_table import BY_NAME

    if name == "every":
        return BY_NAME["adakv"].make(BUDGET, every=4)
    if name == "chunks":
        return dataclasses.replace(
            BY_NAME["omnikv"].make(BUDGET), prefill_ratio=0.5, prefill_chunk=32
        )
    return BY_NAME[name].make(BUDGET)


def prompts(seed, lengths):
    """Ids none of which comes twice: rows of one token tie, and are told apart by rounding alone."""
    rng = np.random.default_rng(seed)
    return [rng.permutation(64)[:length].tolist() for length in lengths]


def whole_model():
    import tiny

    return tiny.tiny(tiny.shape(layers=2, kv_heads=4, group=2, dim=8))


def answers(model, name, **options):
    """Tokens, and the positions that each segment holds behind them."""
    import jaxkv
    from jaxkv.testing import segments

    made = jaxkv.generate(
        model,
        prompts(5, (61, 37)),
        policy=policy_of(name),
        max_new_tokens=NEW,
        stop_at_eos=False,
        progress=False,
        **options,
    )
    return [each.tokens.tolist() for each in made], [
        sorted(part.pos.tolist()) for part in segments(made.cache)
    ]


def questions(model, **shown):
    """Tokens of a document compressed once, asked, and once more on top of the answer, as a stream; its last cache."""
    import jaxkv

    (document,), asked = prompts(8, (60,)), prompts(9, (5, 3))
    cache = jaxkv.prefill(model, document, policy=policy_of("adakv"), progress=False)
    options = {"max_new_tokens": NEW, "stop_at_eos": False}
    first = jaxkv.generate(model, asked[0], cache=cache, progress=False, **options)
    stream = jaxkv.generate(model, asked[1], cache=first.cache, stream=True, **options, **shown)
    pieces = sum(1 for _ in stream)
    made = stream.result
    return [pieces, first.tokens.tolist(), made.tokens.tolist()], made.cache


def answering(rank, folder):
    """Everything that must be the same as in one process; returns the last model and its prompt."""
    import jax

    import jaxkv

    for shape, name in CASES:
        mesh = jax.make_mesh(shape, ("data", "model"))
        say("tokens", [shape, name], answers(whole_model(), name, mesh=mesh))
    model = jaxkv.load(LOADED, mesh=mesh)
    told, cache = questions(model, progress=True)
    say("questions", model.fingerprint, told)
    # Its repr asks no other process for anything.
    say("shown", "", repr(cache) if rank else "")
    return model, prompts(8, (60,))


def refused(rank, folder):
    """What one of them alone was given wrongly, and what all say then; they go on in step, with what is returned."""
    import jax

    import jaxkv

    mesh = jax.make_mesh((2, 4), ("data", "model"))
    model, good = whole_model().on(mesh), prompts(5, (61, 37))
    session = jaxkv.Session(model, jaxkv.FullKV())
    other = prompts(6, (61, 37)) if rank else good
    cache = jaxkv.prefill(model, good, policy=policy_of("adakv"), progress=False)
    # All call it, and one writes.
    cache.save(folder / "cache")
    calls = {
        "prompt": lambda: jaxkv.generate(model, [] if rank else good),
        "policy": lambda: jaxkv.generate(model, good, policy=jaxkv.SnapKV(budget=32 + rank)),
        "key": lambda: jaxkv.prefill(model, good, key=rank),
        "ids": lambda: session.prefill(other),
        "call": lambda: jaxkv.prefill(model, good) if rank else jaxkv.generate(model, good),
        "path": lambda: jaxkv.load(LOADED / "nowhere" if rank else LOADED, mesh=mesh),
        "cache": lambda: jaxkv.load_cache(folder / ("nowhere" if rank else "cache"), mesh=mesh),
        "mesh": lambda: jaxkv.load(
            LOADED, mesh=jax.make_mesh((1, 8) if rank else (2, 4), ("data", "model"))
        ),
    }
    for name, call in calls.items():
        try:
            call()
        except (RuntimeError, ValueError) as error:
            say("refused", name, f"{type(error).__name__}: {error}")
    say("in step", "", answers(model, "full")[0])
    back = jaxkv.load_cache(folder / "cache", model)
    options = {"max_new_tokens": NEW, "stop_at_eos": False, "progress": False}
    asked = [
        jaxkv.generate(model, prompts(9, (5, 3)), cache=each, **options) for each in (cache, back)
    ]
    say("saved", "", [[each.tokens.tolist() for each in out] for out in asked])
    return model, good


def drawing(rank, dies, model, ids):
    """Samples on; one of them is killed meanwhile, or has an error of its own."""
    import jaxkv

    session = jaxkv.Session(model, policy_of("adakv"))
    cache, _ = session.sample(session.prefill(ids, new=NEW), NEW)
    say("drawing", "", time.time())
    if rank == 1 and dies == "killed":
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if rank == 1 and dies == "raises":
        raise LookupError("a mistake of one process")
    for _ in range(10_000):
        session.sample(cache, NEW)


def say(kind, what, value):
    print("said", json.dumps([kind, what, value]), flush=True)


def main():
    rank, port, what, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    heartbeat, shutdown = TIMEOUTS[ENDS[what]]
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        PROCESSES,
        rank,
        heartbeat_timeout_seconds=heartbeat,
        shutdown_timeout_seconds=shutdown,
    )
    drawing(rank, ENDS[what], *{"answering": answering, "refused": refused}[what](rank, folder))


if __name__ == "__main__":
    main()

"""The jaxkv side of `bench_peer.py`; that file's docstring defines the protocol."""

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from benchmarks.memory import reset_peak, status_bytes
from jaxkv import enable_compilation_cache
from jaxkv.engine.lengths import bucket
from jaxkv.engine.plan import plan_prefill
from jaxkv.policies import AvgPool, KVPressLayers, ProtectedHeads

# Prompt tokens in all, up to which a whole run warms the process up; a larger cell warms itself.
SMALL = 4096


def policy_of(request):
    """The policy that does what the peer's press does, with the same window, pooling and safeguard."""
    budget, pooling = request["budget"], AvgPool(request["kernel"])
    snap = {"budget": budget, "window": request["window"], "pooling": pooling}
    match request["policy"]:
        case "full":
            return jaxkv.FullKV()
        case "snapkv":
            return jaxkv.SnapKV(**snap)
        case "pyramidkv":
            return jaxkv.PyramidKV(**snap, allocation=KVPressLayers(beta=float(request["beta"])))
        case "adakv":
            return jaxkv.AdaKV(
                base=jaxkv.SnapKV(**snap), safeguard=ProtectedHeads(alpha=request["alpha"])
            )
        case "streaming":
            return jaxkv.StreamingLLM(budget=budget, sinks=request["sinks"])
    raise ValueError(
        f"policy={request['policy']!r}: give full, snapkv, pyramidkv, adakv or streaming"
    )


class Cell:
    """One cell of the comparison: a batch of prompts, a policy, a number of steps."""

    def __init__(self, model, request):
        """Reads the prompts and plans."""
        self.model, self.steps = model, request["new_tokens"]
        self.room = bucket(self.steps + 1)  # As jaxkv.generate gives.
        self.ids = np.load(request["prompt_ids"])
        self.policy = policy_of(request)
        self.session, lengths = (
            jaxkv.Session(model, self.policy),
            [self.ids.shape[1]] * len(self.ids),
        )
        self.plan = plan_prefill(
            model.config, self.policy, lengths, dtype=model.dtype, room=self.room
        )

    def compile(self):
        """Compiles the prefill; the decode loop is compiled by a run of no steps before its clock starts."""
        self.session.compile_ahead(self.plan, len(self.ids))

    def run(self):
        """One run: seconds of prefill and per step, rows kept, bytes, the tokens."""
        model, room = self.model, self.room
        begin = time.perf_counter()
        cache = self.session.prefill(self.ids, needed=self.plan)
        first = np.asarray(jnp.argmax(cache.logits, axis=-1))
        prefill_seconds = time.perf_counter() - begin
        kept = cache.kept
        spare = (
            len(self.ids)
            * kept.shape[0]
            * kept.shape[2]
            * room
            * model.config.head_dim
            * 2
            * model.cache_dtype.itemsize
        )
        stored = sum(pool.k.nbytes + pool.v.nbytes for pool in cache.pools) - spare
        drawing = self.session.drawing(cache, new=self.room)
        del cache
        # The loop draws first and runs the token after. Its first step compiles, and makes the pages of its code and of
        # its scratch present, which takes as long as several steps: it runs before the clock starts, once per cell.
        drawn, begin = [drawing.draw(1)], time.perf_counter()
        while sum(part.shape[1] for part in drawn) < self.steps:
            drawn.append(drawing.draw(self.steps - sum(part.shape[1] for part in drawn)))
        step_seconds = (time.perf_counter() - begin) / (self.steps - 1)
        after = drawing.close()
        drawn.append(np.asarray(jnp.argmax(after.logits, axis=-1))[:, None])
        tokens = np.concatenate(drawn, axis=1)
        assert (tokens[:, 0] == first).all()
        return prefill_seconds, step_seconds, kept, stored, tokens


_cells = set()


def forget_other_programs(model, request):
    """Drops the programs of the cell before, which a process that runs this cell alone would not hold."""
    cell = (request["policy"], request["prompt_ids"])
    if cell not in _cells:
        _cells.clear()
        _cells.add(cell)
        jax.clear_caches()
        model.flat.compiled.clear()


def measure(model, request):
    """Answers one request."""
    cell = Cell(model, request)
    forget_other_programs(model, request)
    begin = time.perf_counter()
    cell.compile()
    if cell.ids.size <= SMALL:
        cell.run()
    warmup = time.perf_counter() - begin
    per_cell = reset_peak()
    base = status_bytes("VmRSS")
    runs = [cell.run() for _ in range(request["repeats"])]
    peak = status_bytes("VmHWM")
    prefills, steps = [run[0] for run in runs], [run[1] for run in runs]
    kept = runs[-1][2]
    return {
        "id": request["id"],
        "library": "jaxkv",
        "dtype": model.dtype.name,
        "policy": request["policy"],
        "batch": len(cell.ids),
        "length": cell.ids.shape[1],
        "warmup_seconds": warmup,
        "prefill_seconds": prefills,
        "prefill_median": statistics.median(prefills),
        "decode_median": statistics.median(steps),
        "decode_mean": statistics.mean(steps),
        "decode_timing": "loop",
        "kept_per_layer": kept.mean(axis=(1, 2)).tolist(),
        "kept_mean": float(kept.mean()),
        "cache_bytes": int(runs[-1][3]),
        "base_rss": base,
        "peak_rss": peak,
        "peak_is_per_cell": per_cell,
        "tokens": runs[-1][4].tolist(),
    }


def main():
    """Loads the weights, says so, and serves requests line by line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--serve", action="store_true", required=True)
    args = parser.parse_args()
    # The protocol keeps standard output for itself; what libraries print there goes to standard error.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # As the CLI and the demo do: programs compiled in an earlier run are read, which also spares the compiler's memory.
    enable_compilation_cache()
    begin = time.perf_counter()
    model = jaxkv.load(args.gguf, args.dtype, progress=False)
    ready = {
        "ready": True,
        "library": "jaxkv",
        "versions": {"jaxkv": metadata.version("jaxkv"), "jax": jax.__version__},
        "dtype": args.dtype,
        "threads": len(os.sched_getaffinity(0)),
        "load_seconds": time.perf_counter() - begin,
        "load_peak_rss": status_bytes("VmHWM"),
        "rss": status_bytes("VmRSS"),
    }
    print(json.dumps(ready), file=out)
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "quit":
            break
        try:
            response = measure(model, request)
        except (
            Exception
        ) as error:  # The driver reports the cell as failed and goes on with the next one.
            traceback.print_exc()
            response = {"id": request.get("id"), "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(response), file=out)


if __name__ == "__main__":
    main()

"""The jaxkv side of `bench_peer.py`; that file's docstring defines the protocol."""

import argparse
import os
import time
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from benchmarks import workers
from jaxkv.engine.lengths import round_up_to_bucket
from jaxkv.engine.plan import plan_prefill
from jaxkv.machine.compilation import enable_compilation_cache
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
            return jaxkv.PyramidKV(**snap, layers=KVPressLayers(beta=float(request["beta"])))
        case "adakv":
            return jaxkv.AdaKV(
                base=jaxkv.SnapKV(**snap), heads=ProtectedHeads(alpha=request["alpha"])
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
        self.headroom = round_up_to_bucket(self.steps + 1)  # As jaxkv.generate gives.
        self.ids = np.load(request["prompt_ids"])
        self.policy = policy_of(request)
        self.session, lengths = (
            jaxkv.Session(model, self.policy),
            [self.ids.shape[1]] * len(self.ids),
        )
        self.plan = plan_prefill(
            model.config, self.policy, lengths, dtype=model.dtype, headroom=self.headroom
        )

    def warm(self):
        """Compiles the prefill; the decode loop is compiled by a step before its clock starts."""
        self.session.prefill(self.ids, needed=self.plan)
        if self.ids.size <= SMALL:
            self.run()

    def run(self):
        """One run, as `workers.measured` takes it; the loop is timed whole."""
        model, headroom = self.model, self.headroom
        begin = time.perf_counter()
        cache = self.session.prefill(self.ids, needed=self.plan)
        first = np.asarray(jnp.argmax(cache.logits, axis=-1))
        prefill_seconds = time.perf_counter() - begin
        kept = cache.kept
        spare = (
            len(self.ids)
            * kept.shape[0]
            * kept.shape[2]
            * headroom
            * model.config.head_dim
            * 2
            * model.cache_dtype.itemsize
        )
        stored = sum(pool.k.nbytes + pool.v.nbytes for pool in cache.pools) - spare
        loop = self.session.start_decode_loop(cache, new=self.headroom)
        del cache
        # The loop samples first and runs the token after. Its first step compiles, and makes pages of its code and of
        # its scratch present, which takes as long as several steps: it runs before the clock starts, once per cell.
        sampled, begin = [loop.sample_tokens(1)], time.perf_counter()
        while sum(part.shape[1] for part in sampled) < self.steps:
            sampled.append(loop.sample_tokens(self.steps - sum(part.shape[1] for part in sampled)))
        step_seconds = (time.perf_counter() - begin) / (self.steps - 1)
        after = loop.finish_sampling()
        sampled.append(np.asarray(jnp.argmax(after.logits, axis=-1))[:, None])
        tokens = np.concatenate(sampled, axis=1)
        assert (tokens[:, 0] == first).all()
        rows = kept.mean(axis=(1, 2)).tolist()
        return prefill_seconds, [step_seconds], rows, int(stored), tokens.tolist()


_cells = set()


def forget_other_programs(model, request):
    """Drops the programs of the cell before, which a process that runs this cell alone would not hold."""
    cell = (request["policy"], request["prompt_ids"])
    if cell not in _cells:
        _cells.clear()
        _cells.add(cell)
        jax.clear_caches()


def measure(model, request):
    """Answers one request."""
    cell = Cell(model, request)
    forget_other_programs(model, request)
    return workers.measured(request, cell.warm, cell.run)


def main():
    """Loads the weights, says so, and serves requests line by line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--threads", type=int, help="ignored: XLA takes what the process may have")
    args = parser.parse_args()

    def load():
        # As the CLI and the demo do: programs compiled in an earlier run are read, which also spares the compiler's
        # memory.
        enable_compilation_cache()
        model = jaxkv.load(args.gguf, args.dtype, progress=False)
        versions = {"jaxkv": metadata.version("jaxkv"), "jax": jax.__version__}
        ready = {"library": "jaxkv", "versions": versions, "decode_timing": "loop"}
        ready |= {"threads": len(os.sched_getaffinity(0))}
        return ready, lambda request: measure(model, request)

    workers.serve(load)


if __name__ == "__main__":
    main()

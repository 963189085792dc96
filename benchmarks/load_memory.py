"""Measures what loading adds to a process' memory, for checkpoints of 500 MB in formats of quantised weights.

    python -m benchmarks.load_memory [--rounds 3]

A process for each format and kind of weights, in turns, loads twice, because programs stay; the ratio is the second
load's peak above what the process had before it, over the bytes of the loaded weights. Codes are random.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from benchmarks import record
from benchmarks.against import FREES_AT_ONCE
from benchmarks.workers import reset_peak, status_bytes

HIDDEN, WIDE, VOCAB = 1024, 3072, 8192
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (512, HIDDEN),
    "self_attn.v_proj": (512, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (WIDE, HIDDEN),
    "mlp.up_proj": (WIDE, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDE),
}
BFLOAT = ml_dtypes.bfloat16


def blocks(rng, outputs, inputs):
    """Weights of DeepSeek's layout: float8, a scale for each 128 x 128."""
    codes = rng.integers(0, 120, (outputs, inputs), np.uint8).view(ml_dtypes.float8_e4m3fn)
    grid = np.full((outputs // 128, inputs // 128), 1e-4, np.float32)
    return {"weight": codes, "weight_scale_inv": grid}


def awq(rng, outputs, inputs):
    """Weights of AWQ's layout: groups of 128 inputs."""
    words = lambda rows: rng.integers(0, 2**31, (rows, outputs // 8), np.int32)  # noqa: E731
    scales = np.full((inputs // 128, outputs), 1e-3, np.float16)
    return {"qweight": words(inputs), "qzeros": words(inputs // 128), "scales": scales}


def floats(rng, outputs, inputs):
    """Unquantised weights."""
    return {"weight": rng.standard_normal((outputs, inputs), np.float32).astype(BFLOAT)}


# How a folder is written, its config, and its number of layers.
FORMATS = {
    "bfloat16": (floats, None, 20),
    "fp8": (blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}, 39),
    "awq": (awq, {"quant_method": "awq", "bits": 4}, 75),
}


def write(folder, name):
    """A folder of one format, of about 500 MB."""
    make, quantised, layers = FORMATS[name]
    rng = np.random.default_rng(0)
    tensors = {"model.embed_tokens.weight": floats(rng, VOCAB, HIDDEN)["weight"]}
    tensors["model.norm.weight"] = np.ones(HIDDEN, BFLOAT)
    for layer in range(layers):
        for base, shape in LINEAR.items():
            parts = make(rng, *shape)
            tensors |= {f"model.layers.{layer}.{base}.{key}": each for key, each in parts.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = np.ones(HIDDEN, BFLOAT)
    folder.mkdir()
    config = CONFIG | {"num_hidden_layers": layers, "quantization_config": quantised}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def measure(folder, weights):
    """Loads a folder in this process; returns bytes and seconds."""
    import jaxkv

    options = {"weights": None if weights == "bfloat16" else weights, "progress": False}
    # Programs, threads and what libraries keep for themselves.
    jaxkv.load(folder, "bfloat16", **options)
    reset_peak()
    before, begun = status_bytes("VmRSS"), time.perf_counter()
    model = jaxkv.load(folder, "bfloat16", **options)
    seconds = time.perf_counter() - begun
    return {"peak": status_bytes("VmHWM") - before, "weights": model.nbytes, "seconds": seconds}


def measure_alone(folder, weights):
    """Loads a folder in a process of its own; returns the ratio, megabytes of the file and the weights, seconds."""
    command = [sys.executable, "-m", "benchmarks.load_memory", "--measure", str(folder), weights]
    environment = {**os.environ, **FREES_AT_ONCE}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    file = (folder / "model.safetensors").stat().st_size
    return {
        "ratio": round(found["peak"] / found["weights"], 3),
        "file MB": round(file / 1e6),
        "weights MB": round(found["weights"] / 1e6),
        "seconds": round(found["seconds"], 2),
    }


def main():
    """Writes each format, measures each kind of weights, and saves after each round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "WEIGHTS"), help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "load_memory.json")
    asked = parser.parse_args()
    if asked.measure:
        print(json.dumps(measure(*asked.measure)))
        return
    results = {"machine": record.machine(), "rounds": 0, "loads": {}}
    with tempfile.TemporaryDirectory() as there:
        folders = {name: write(Path(there) / name, name) for name in FORMATS}
        cases = [*itertools.product(FORMATS, ("bfloat16", "int8", "int4"))]
        rounds = {case: [] for case in cases}
        for at in range(asked.rounds):
            for name, weights in cases:
                found = measure_alone(folders[name], weights)
                rounds[name, weights].append(found)
                print(f"{name} as {weights}: {json.dumps(found)}", flush=True)
            loads = {
                f"{name} as {weights}": {
                    key: record.spread([each[key] for each in found]) for key in found[0]
                }
                for (name, weights), found in rounds.items()
            }
            results |= {"rounds": at + 1, "loads": loads}
            record.save(asked.out, results)


if __name__ == "__main__":
    main()

"""transformers' continuous batching for `benchmarks.serving`: a line of JSON with requests in, one with times out.

    .venv-peer/bin/python benchmarks/serving_peer.py SLOTS

Its own process and environment: torch and transformers are no packages of jaxkv's.
"""

import json
import os
import sys

import torch
import transformers

CHECKPOINT = "SmolLM2-135M-Instruct.Q8_0.gguf"


def main():
    """Answers lines until the input ends; a request's times are those of its first and last token."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import peer_worker

    model = peer_worker.load_model(torch.float32)
    config = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    for line in sys.stdin:
        asked = json.loads(line)
        out.write(json.dumps(answered(model, config, asked)) + "\n")


def answered(model, config, asked):
    """Seconds of all requests together, of the process, and of each its first token and those after it."""
    raise NotImplementedError


if __name__ == "__main__":
    main()

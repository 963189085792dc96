"""Runs transformers' own logits processors on random logits and settings, and writes processors.npz.

    .venv-peer/bin/python tests/golden/make_processors.py

The order is that of transformers' `_get_logits_processor`: bias, repetition penalty, temperature, top-k, top-p, min-p.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

COUNT, VOCAB, PROMPT, ANSWER, BIASED = 200, 24, 6, 5, 3


def main() -> None:
    """Write settings, ids, logits, processed logits and masks."""
    rng = np.random.default_rng(54)
    given = {
        "logits": rng.normal(scale=2, size=(COUNT, VOCAB)).astype(np.float32),
        "prompts": rng.integers(0, VOCAB, (COUNT, PROMPT)).astype(np.int32),
        "answers": rng.integers(0, VOCAB, (COUNT, ANSWER)).astype(np.int32),
        "biased": np.stack([1 + rng.permutation(VOCAB - 1)[:BIASED] for _ in range(COUNT)]).astype(
            np.int32
        ),
        "biases": rng.uniform(-4, 4, (COUNT, BIASED)).astype(np.float32),
        "repetition_penalty": rng.uniform(0.5, 2, COUNT).astype(np.float32),
        "temperature": rng.uniform(0.3, 3, COUNT).astype(np.float32),
        "top_k": rng.integers(1, VOCAB + 1, COUNT).astype(np.int32),
        "top_p": rng.uniform(0.3, 1, COUNT).astype(np.float32),
        "min_p": rng.uniform(0.01, 0.3, COUNT).astype(np.float32),
    }
    processed, masks = [], []
    for at in range(COUNT):
        row = {name: array[at] for name, array in given.items()}
        ids = torch.tensor(np.concatenate([row["prompts"], row["answers"]])[None]).long()
        scores = torch.tensor(row["logits"][None])
        bias = [
            [[int(token)], float(number)]
            for token, number in zip(row["biased"], row["biases"], strict=True)
        ]
        scores = SequenceBiasLogitsProcessor(sequence_bias=bias)(ids, scores)
        scores = RepetitionPenaltyLogitsProcessor(float(row["repetition_penalty"]))(ids, scores)
        processed.append(scores.numpy()[0])
        for warper in (
            TemperatureLogitsWarper(float(row["temperature"])),
            TopKLogitsWarper(int(row["top_k"])),
            TopPLogitsWarper(float(row["top_p"])),
            MinPLogitsWarper(float(row["min_p"])),
        ):
            scores = warper(ids, scores)
        masks.append(np.isfinite(scores.numpy()[0]))
    made = given | {"processed": np.stack(processed), "masks": np.stack(masks)}
    np.savez_compressed(Path(__file__).with_name("processors.npz"), **made)


if __name__ == "__main__":
    main()

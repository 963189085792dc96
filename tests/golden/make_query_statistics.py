"""Writes a file of queries' statistics as TriAttention's code does, in an environment with ``torch==2.13.0`` (CPU)::

    python tests/golden/make_query_statistics.py

Two layers of three query heads, whose four channel pairs hold numbers that tell layer, head and pair.
"""

from pathlib import Path

import torch

NAMES = ("q_mean_real", "q_mean_imag", "q_abs_mean")
LAYERS, HEADS, PAIRS = 2, 3, 4

if __name__ == "__main__":
    stats = {}
    for layer in range(LAYERS):
        for head in range(HEADS):
            first = torch.arange(PAIRS) + 10.0 * head + 100.0 * layer
            each = {name: first + 1000.0 * at for at, name in enumerate(NAMES)}
            # As the real part of a complex tensor is: with gaps.
            each["q_mean_real"] = torch.complex(first, -first).real
            stats[f"layer{layer:02d}_head{head:02d}"] = each
    sampled = [[layer, head] for layer in range(LAYERS) for head in range(HEADS)]
    metadata = {"head_dim": 2 * PAIRS, "rope_style": "half", "sampled_heads": sampled}
    torch.save(
        {"metadata": metadata, "stats": stats}, Path(__file__).with_name("query_statistics.pt")
    )

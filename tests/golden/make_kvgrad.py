"""Writes what kvpress' KVgrad keeps of two prompts of a tiny Llama, in an environment with kvpress 0.5.5 and torch::

    python tests/golden/make_kvgrad.py

The model is `models/llama_gqa` in float32. Texts of the second pass are the token ids of `TEXTS`. For each prompt I of
`LENGTHS` tokens, `kvgrad.npz` holds `I/ids` int32 [n], `I/scores` float32 [L, K, n] before sinks are raised, and
`I/kept` bool [L, K, n] after three quarters of all entries have gone.
"""

from pathlib import Path

import numpy as np
import torch
from kvpress import KVgradPress
from kvpress.presses import kvzip_press
from transformers import AutoModelForCausalLM, DynamicCache

HERE = Path(__file__).parent
LENGTHS = (64, 40)
TEXTS = {
    "": (),
    "\n": (6,),
    "\n\nRepeat the previous context exactly.": (1, 2, 3),
    "\n\nRepeat the part of the previous context exactly, starting with": (4, 5),
}


class Tokenizer:
    """What the press asks of a tokenizer without a chat template."""

    chat_template = None

    @classmethod
    def from_pretrained(cls, name):
        return cls()

    def encode(self, text, return_tensors, add_special_tokens):
        return torch.tensor([TEXTS[text]], dtype=torch.long)


class Recorded(KVgradPress):
    """The press, which keeps the scores of its last prompt."""

    def compress_post(self, model):
        self.found = self.score_val[:, 0].numpy().copy()
        super().compress_post(model)


if __name__ == "__main__":
    kvzip_press.AutoTokenizer = Tokenizer
    model = AutoModelForCausalLM.from_pretrained(
        HERE / "models/llama_gqa", dtype=torch.float32, attn_implementation="sdpa"
    )
    generator, arrays = np.random.default_rng(57), {}
    for index, count in enumerate(LENGTHS):
        ids = generator.integers(7, model.config.vocab_size, count)
        press = Recorded(compression_ratio=0.75, chunk_size=24)
        with press(model):
            given = torch.tensor(ids)[None]
            model.model(input_ids=given, past_key_values=DynamicCache(config=model.config))
        kept = np.ones(press.found.shape, bool)
        for layer, block in enumerate(model.model.layers):
            _, heads, positions = block.self_attn.masked_key_indices
            kept[layer, heads, positions] = False
        arrays |= {
            f"{index}/ids": ids.astype(np.int32),
            f"{index}/scores": press.found,
            f"{index}/kept": kept,
        }
    np.savez_compressed(HERE / "kvgrad.npz", **arrays)

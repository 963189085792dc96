"""kvpress' side of `qa_peer.py`: its pipeline on given token ids; prints kept rows, answers and gaps of logits as JSON.

It runs in the environment of `peer_worker.py`, which loads the model.
"""

import json
import sys
from pathlib import Path

import kvpress
import torch
from kvpress.pipeline import KVPressTextGenerationPipeline
from transformers import AutoTokenizer

from benchmarks.peer_worker import load

PRESSES = {
    "snapkv@0.5": lambda: kvpress.SnapKVPress(0.5, window_size=64, kernel_size=5),
    "knorm@0.9": lambda: kvpress.KnormPress(1 - 0.9),
}


def recorded(press):
    """The press, and a list that its scores go to, as the rows that its own call of topk keeps of them."""
    kept, score = [], press.score

    def scored(module, hidden, keys, *rest):
        scores = score(module, hidden, keys, *rest)
        count = int(keys.shape[2] * (1 - press.compression_ratio))
        kept.append(scores.topk(count, dim=-1).indices[0].sort().values.tolist())
        return scores

    press.score = scored
    return press, kept


def answered(pipe, document, press, new_tokens):
    """Tokens and gaps of the two largest logits for each question of a document, compressed once."""
    steps = []

    def noted(module, inputs, output):
        best = output[0, -1].float().topk(2)
        steps.append((int(best.indices[0]), float(best.values[0] - best.values[1])))

    hook, found = pipe.model.lm_head.register_forward_hook(noted), []
    given = {
        "context_ids": torch.tensor([document["context"]]),
        "questions_ids": [torch.tensor([each]) for each in document["questions"]],
    }
    generate = pipe.generate_answer

    def generated(**options):
        steps.clear()
        text = generate(**options)
        ends = pipe.model.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends])
        found.append(
            {
                "tokens": [token for token, _ in steps if token not in ends],
                "gaps": [gap for _, gap in steps],
            }
        )
        return text

    pipe.generate_answer = generated
    try:
        with torch.inference_mode():
            pipe._forward(given, max_new_tokens=new_tokens, press=press)
    finally:
        pipe.generate_answer = generate
        hook.remove()
    return found


def main():
    """Reads the request, runs every policy, prints one JSON object."""
    asked = json.loads(Path(sys.argv[1]).read_text())
    model, path = load(asked["gguf"], "float32"), Path(asked["gguf"])
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    pipe = KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    out = {}
    for name, make in PRESSES.items():
        rows, answers = [], []
        for document in asked["documents"]:
            press, kept = recorded(make())
            answers += answered(pipe, document, press, asked["new_tokens"])
            rows.append(
                {
                    f"{layer},{head}": pos
                    for layer, heads in enumerate(kept)
                    for head, pos in enumerate(heads)
                }
            )
        out[name] = {"kept": rows, "answers": answers}
    print(json.dumps(out))


main()

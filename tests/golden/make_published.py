"""Counts the parameters of published models by transformers' classes on torch's meta device.

Run it in an environment that has ``torch==2.13.0`` (CPU), ``transformers==5.23.0`` and jaxkv::

    python tests/golden/make_published.py

``published.json`` has a line of each model: ``sources``, where its config was read (a repository and a path, or an
address), its ``config``, unless the catalogue has it, and what this script writes: ``parameters`` and ``buffers``,
numbers of elements in the class' state dict. ``partial`` says that the source lists a part of the keys; others have the
published values by the class' defaults.
The text model alone is counted: no towers for images, no layers that predict further tokens.
"""

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from jaxkv.planning.catalog import catalog

FILE = Path(__file__).resolve().with_name("published.json")
# Types that transformers reads as others.
SAME = {"kimi_k2": "deepseek_v3"}


def count(published):
    """Elements of a class' parameters, and of its buffers that a checkpoint has, built from a config."""
    text = published.get("text_config", published)
    shared = {key: published[key] for key in ("tie_word_embeddings",) if key in published}
    keys = {**text, **shared}
    kind = keys.pop("model_type")
    for key in ("auto_map", "quantization_config"):
        keys.pop(key, None)
    with torch.device("meta"):
        config = AutoConfig.for_model(SAME.get(kind, kind), **keys)
        model = AutoModelForCausalLM.from_config(config)
    held = model.state_dict()
    buffers = sum(each.numel() for name, each in model.named_buffers() if name in held)
    return sum(each.numel() for each in model.parameters()), buffers


def main():
    """Counts every model, and writes the file anew."""
    models = json.loads(FILE.read_text("utf-8"))
    for name, known in catalog().items():
        models.setdefault(name, {"sources": [known.source]})
    lines = []
    for name, model in sorted(models.items()):
        config = model.get("config") or catalog()[name].raw
        parameters, buffers = count(config)
        row = {"sources": model["sources"], "parameters": parameters, "buffers": buffers}
        row |= {key: model[key] for key in ("partial", "config") if key in model}
        lines.append(f"{json.dumps(name)}: {json.dumps(row)}")
        print(name, parameters, buffers, flush=True)
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


if __name__ == "__main__":
    main()

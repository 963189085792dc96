"""Statistics of queries that come with jaxkv (TriAttention): `python -m benchmarks.query_statistics`, in minutes.

Texts are the packaged documents for SmolLM2, and contexts of the tasks that the tiny model was trained on for it.
"""

from pathlib import Path

import jaxkv
from jaxkv.analysis import fit_query_statistics
from jaxkv.evals import Ruler
from jaxkv.evals.texts import read_texts

FOLDER = Path(__file__).parent.parent / "checkpoints/query_statistics"
TOKENS = 32768


def main() -> None:
    """Write a file for each named model."""
    FOLDER.mkdir(exist_ok=True)
    for name, size in (("tiny-retrieval", 1024), ("smollm2-135m-instruct", 4096)):
        params = jaxkv.load(name)
        if name == "tiny-retrieval":
            asked = Ruler(lengths=(size,), count=4, wording="small", seed=77).samples(params)
            texts = [each.context for each in asked]
        else:
            texts = [*read_texts(None, 0).values()]
        ids = [params.tokenizer.encode(text, bos=True) for text in texts]
        every = [token for each in ids for token in each][:TOKENS]
        pieces = [every[at : at + size] for at in range(0, len(every), size)]
        found = fit_query_statistics(params, pieces)
        (FOLDER / f"{name}.safetensors").write_bytes(found.encode_safetensors())
        print(name, len(every), "tokens")


if __name__ == "__main__":
    main()

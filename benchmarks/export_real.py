"""Exports SmolLM2, runs the exports in processes that cannot import jaxkv, and holds their tokens to `generate`'s.

    .venv/bin/python -m benchmarks.export_real              all policies, float32 and bfloat16, batch 1 and 3
    .venv/bin/python -m benchmarks.export_real snapkv       one of them

Prompts of 300 to 500 tokens, 32 new ones, and questions on top of their caches. A table goes to stdout.
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jaxkv

ROOT = Path(__file__).parents[1]
NEW = 32
POLICIES = {
    "full": jaxkv.FullKV(),
    "snapkv": jaxkv.SnapKV(budget=128),
    "adakv": jaxkv.AdaKV(budget=128),
    "h2o": jaxkv.H2O(budget=128),
    "d2o": jaxkv.D2O(budget=128),
}
QUESTIONS = ("What is this text about?", "Who is named in it?", "Give its first sentence again.")
# -S: what an editable install put on the path is not there.
ALONE = """
import importlib.util, json, sys, time
sys.path[:0] = json.loads(sys.argv[2])
assert importlib.util.find_spec("jaxkv") is None
spec = importlib.util.spec_from_file_location("runtime", sys.argv[1] + "/runtime.py")
runtime = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runtime)
begun = time.perf_counter()
model = runtime.Model(sys.argv[1])
loaded, out = time.perf_counter(), []
for prompts, questions, new in json.loads(sys.stdin.read()):
    cache = model.read(prompts)
    out.append([model.generate(prompts, new)[0], model.generate(questions, new, cache=cache)[0]])
print(json.dumps([out, loaded - begun, time.perf_counter() - loaded]))
"""


def asked(model, count):
    """Prompts of unequal length, and questions, as ids."""
    words = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    ids = model.text.encode(words, bos=False)
    prompts = [ids[at * 500 : at * 500 + length] for at, length in enumerate((487, 301, 402))]
    return prompts[:count], [model.text.encode(each, bos=False) for each in QUESTIONS][:count]


def row(model, name, folder):
    """One policy in one dtype: whether all tokens are the same, and what it took."""
    policy, given, wanted = POLICIES[name], [], []
    for count in (1, 3):
        prompts, questions = asked(model, count)
        given.append([prompts, questions, NEW])
        answer = jaxkv.generate(model, prompts, policy=policy, max_new_tokens=NEW, progress=False)
        cache = jaxkv.prefill(model, prompts, policy=policy, progress=False)
        asking = jaxkv.generate(model, questions, cache=cache, max_new_tokens=NEW, progress=False)
        wanted.append([[tokens.tokens.tolist() for tokens in each] for each in (answer, asking)])
    begun = time.perf_counter()
    jaxkv.export(model, folder, policy=policy, lengths=512, batch=(1, 3), question=16, new=NEW)
    seconds = time.perf_counter() - begun
    size = sum(each.stat().st_size for each in (folder / "programs").iterdir())
    places = {
        str(Path(importlib.util.find_spec(each).origin).parents[1])
        for each in ("jax", "flatbuffers")
    }
    command = [sys.executable, "-I", "-S", "-c", ALONE, str(folder), json.dumps(sorted(places))]
    done = subprocess.run(
        command, input=json.dumps(given), capture_output=True, text=True, check=True
    )
    found, loaded, ran = json.loads(done.stdout.splitlines()[-1])
    return found == wanted, seconds, size / 1e6, loaded, ran


def main():
    names = sys.argv[1:] or list(POLICIES)
    print(
        "| dtype | policy | same tokens, batch 1 and 3 | export s | programs MB | load s | all answers s |"
    )
    print("|---|---|---|---|---|---|---|")
    for dtype in ("float32", "bfloat16"):
        model = jaxkv.load("smollm2-135m-instruct", dtype=dtype, progress=False)
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                same, *figures = row(model, name, Path(folder) / "export")
            said = " | ".join(f"{each:.1f}" for each in figures)
            print(f"| {dtype} | {name} | {'yes' if same else 'NO'} | {said} |", flush=True)


if __name__ == "__main__":
    main()

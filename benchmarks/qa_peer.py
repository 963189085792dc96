"""`jaxkv eval qa` beside kvpress' own pipeline on one file: 20 documents of 5 questions, kept rows and answers.

Each document is compressed before its questions are seen, and all five are asked on top of it. kvpress gets the same
token ids, in an environment of its own (.venv-peer), through its pipeline's `_forward`. Kept rows are compared as
sets for each layer and kv head. Answers are compared token by token; where they part, the peer's own two largest logits
say whether its choice was clear. The run is also killed after 40 % of its lines and run again: the same bytes.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np

import jaxkv
from jaxkv.checkpoints import fetch_checkpoint
from jaxkv.evals import DocumentQuestionsTask, How, encode_sample, evaluate
from jaxkv.evals.texts import read_texts
from jaxkv.policies import AvgPool
from jaxkv.testing import segments

MODEL, DOCUMENTS, QUESTIONS, WORDS, NEW = "smollm2-135m-instruct", 20, 5, 400, 16
POLICIES = {
    "snapkv@0.5": jaxkv.SnapKV(budget=0.5, window=64, pooling=AvgPool(5)),
    "knorm@0.9": jaxkv.KNorm(budget=0.9),
}
# Logits that differ by less may be in another order after sums in another order.
CLEAR = 1e-2
FACTS = (
    (
        "The treasurer of the society is {}.",
        "Who is the society's treasurer?",
        ("Ada Moss", "Ian Bell", "Lea Wolf"),
    ),
    (
        "The old bridge was closed in {}.",
        "In which year was the old bridge closed?",
        ("1871", "1904", "1923"),
    ),
    (
        "The meeting took place in {}.",
        "Where did the meeting take place?",
        ("Lisbon", "Geneva", "Montreal"),
    ),
    ("The ship carried a load of {}.", "What did the ship carry?", ("copper", "cotton", "timber")),
    (
        "The password of the vault is {}.",
        "What is the password of the vault?",
        ("falcon", "marble", "juniper"),
    ),
)


def rows(seed: int, count: int = WORDS) -> list[dict]:
    """Lines of the data file: passages of `count` words with five facts at random places, and questions about these."""
    rng, texts = np.random.default_rng(seed), list(read_texts(None).values())
    made = []
    for number in range(DOCUMENTS):
        words = texts[number % len(texts)].split()
        start = int(rng.integers(len(words) - count))
        parts = np.array_split(words[start : start + count], QUESTIONS + 1)
        values = [str(rng.choice(each)) for *_, each in FACTS]
        said = [fact.format(value) for (fact, *_), value in zip(FACTS, values, strict=True)] + [""]
        text = " ".join(f"{' '.join(part)} {fact}" for part, fact in zip(parts, said, strict=True))
        asked = [{"question": FACTS[n][1], "answer": values[n]} for n in range(QUESTIONS)]
        made.append({"id": f"{number:02d}", "document": text.strip(), "questions": asked})
    return made


def ours(params, documents, policy) -> dict:
    """Kept positions by document, layer and kv head, and the tokens of all answers, of one policy."""
    ends, kept, answers = set(params.text.eos_ids), [], []
    for each in documents:
        cache = jaxkv.prefill(params, [each["context"]], policy=policy)
        kept.append(
            {
                f"{layer},{head}": sorted(pos.tolist())
                for layer, _, head, _, _, pos in segments(cache)
            }
        )
        for question in each["questions"]:
            tokens = jaxkv.generate(
                params, [question], cache=cache, max_new_tokens=NEW
            ).tokens.tolist()
            answers.append([token for token in tokens if token not in ends])
    return {"kept": kept, "answers": answers}


def compared(mine: dict, theirs: dict) -> dict:
    """Share of equal kept rows and heads, and counts of answers: equal, parted where unclear, parted where clear."""
    same = rows = heads = equal_heads = 0
    for one, other in zip(mine["kept"], theirs["kept"], strict=True):
        for head, kept in one.items():
            both = len(set(kept) & set(other[head]))
            same, rows = same + both, rows + max(len(kept), len(other[head]))
            heads, equal_heads = heads + 1, equal_heads + (both == len(kept) == len(other[head]))
    found = {"equal": 0, "unclear": 0, "clear": 0}
    for tokens, answer in zip(mine["answers"], theirs["answers"], strict=True):
        said, gaps = answer["tokens"], answer["gaps"]
        parted = next(
            (at for at in range(len(gaps)) if tokens[at : at + 1] != said[at : at + 1]), None
        )
        found["equal" if parted is None else "unclear" if gaps[parted] < CLEAR else "clear"] += 1
    return {"rows": same / rows, "heads": equal_heads / heads, **found}


def main() -> None:
    """Runs both sides and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--peer-python",
        default=".venv-peer/bin/python",
        help="Python of an environment with torch and kvpress (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    params = jaxkv.load(MODEL, dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "mine.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows(options.seed)))
        task = DocumentQuestionsTask(data=str(data), new_tokens=NEW)
        samples = list(task.samples(params))
        ids = [encode_sample(params.text, each) for each in samples]
        documents = [
            {"context": ids[at][0], "questions": [ids[n][1] for n in range(at, at + QUESTIONS)]}
            for at in range(0, len(samples), QUESTIONS)
        ]
        how, batch = How(agnostic=True), 2 * QUESTIONS
        done = evaluate(params, task, POLICIES, Path(folder) / "out", how=how, batch=batch)
        lines = Path(folder) / "out" / "results.jsonl"
        whole = lines.read_bytes()
        lines.write_bytes(whole[: len(whole) * 2 // 5])
        evaluate(params, task, POLICIES, Path(folder) / "out", how=how, batch=batch)
        print(
            f"killed after 40 % and run again: {'the same' if lines.read_bytes() == whole else 'OTHER'} bytes"
        )
        asked = Path(folder) / "asked.json"
        gguf = str(fetch_checkpoint(MODEL))
        asked.write_text(json.dumps({"gguf": gguf, "documents": documents, "new_tokens": NEW}))
        command = [options.peer_python, "-m", "benchmarks.qa_peer_worker", str(asked)]
        answer = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        theirs = json.loads(answer.stdout)
        shortest = min(len(each["context"]) for each in documents)
        print(f"documents of {shortest} tokens or more; float32; seed {options.seed}")
        print(
            "| policy | right, % | rows in common, % | equal heads, % | answers: equal | parted, unclear | clear |"
        )
        print("|---|---:|---:|---:|---:|---:|---:|")
        for name, policy in POLICIES.items():
            mine = ours(params, documents, policy)
            text = [params.text.decode(tokens) for tokens in mine["answers"]]
            batched = [record.prediction for record in done.records if record.policy == name]
            found = compared(mine, theirs[name])
            counts = f"{found['equal']} | {found['unclear']} | {found['clear']}"
            shares = f"{100 * found['rows']:.3f} | {100 * found['heads']:.2f}"
            print(f"| {name} | {100 * done.cell(name).mean:.1f} | {shares} | {counts} |")
            print(
                f"{name}: {sum(map(str.__eq__, text, batched))} of {len(text)} answers one by one as in batches"
            )


if __name__ == "__main__":
    main()

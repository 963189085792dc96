"""D2O's Table 6 as loss: how well a model goes on with real documents over caches that a policy has compressed.

    python -m benchmarks.loss                          all policies
    python -m benchmarks.loss --policies FullKV D2O    some; the file keeps the others as they are
    python -m benchmarks.loss --missing                those that the file lacks, after a run that was killed

The first --prefix tokens of each document are prefilled; then --tokens true tokens follow one by one, and the figure is
the mean loss of these (nats a token), the first one judged by the prefix's logits. Errors are standard errors over
documents; the documents are the same for all policies, so differences are taken document by document.
"""

import argparse
import gzip
import json
import math
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from benchmarks import record
from jaxkv.engine.compilation import enable_compilation_cache
from jaxkv.policies import UniformLayers

DOCUMENTS = Path(__file__).parent / "data" / "documents.json.gz"
MODEL = "smollm2-135m-instruct"
POLICIES = {
    "FullKV": lambda budget: jaxkv.FullKV(),
    "StreamingLLM": lambda budget: jaxkv.StreamingLLM(budget=budget),
    "StreamingLLM-slide": lambda budget: jaxkv.StreamingLLM(budget=budget, slide=True),
    "H2O": lambda budget: jaxkv.H2O(budget=budget),
    "D2O": lambda budget: jaxkv.D2O(budget=budget),
    "D2O-no-merging": lambda budget: jaxkv.D2O(budget=budget, merge=None),
    "D2O-no-layers": lambda budget: jaxkv.D2O(budget=budget, allocation=UniformLayers()),
    "D2O-neither": lambda budget: jaxkv.D2O(budget=budget, merge=None, allocation=UniformLayers()),
}
# A statement is a chain of (left, relation, right), where policies joined by "&" stand for their mean.
STATEMENTS = {
    "D2O is no worse than midway between FullKV and StreamingLLM": [("D2O", "<=", "FullKV & StreamingLLM")],
    "FullKV < D2O <= H2O < StreamingLLM": [
        ("FullKV", "<", "D2O"),
        ("D2O", "<=", "H2O"),
        ("H2O", "<", "StreamingLLM"),
    ],
    "Table 6: D2O <= no layer budgets <= no merging <= neither": [
        ("D2O", "<=", "D2O-no-layers"),
        ("D2O-no-layers", "<=", "D2O-no-merging"),
        ("D2O-no-merging", "<=", "D2O-neither"),
    ],
}
# StreamingLLM's default appends and ends with more rows than its budget; the sliding one holds as many as the others.
BESIDES = {
    "(besides) the first one against StreamingLLM-slide": [("D2O", "<=", "FullKV & StreamingLLM-slide")],
    "(besides) the second one against StreamingLLM-slide": [("H2O", "<", "StreamingLLM-slide")],
    "(besides) D2O is no worse than each of its ablations": [
        ("D2O", "<=", name) for name in ("D2O-no-layers", "D2O-no-merging", "D2O-neither")
    ],
}


@jax.jit
def judged(logits, token):
    """The loss of each sequence's next token."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=1)[:, 0]


def run(model, policy, ids, prefix):
    """Mean loss of each sequence after its prefix, and rows per head after prefill and in the end."""
    session, losses = jaxkv.Session(model, policy), []
    cache = session.prefill(ids[:, :prefix], new=ids.shape[1] - prefix)
    kept = cache.kept.mean()
    for at in range(prefix, ids.shape[1]):
        if at > prefix:
            cache = session.extend(cache, ids[:, at - 1 : at], chunk=1, donate=True)
        losses.append(judged(cache.logits, ids[:, at]))
    return np.stack(losses, dtype=np.float64).mean(axis=0), float(kept), float(cache.kept.mean())


def measure(model, policy, ids, prefix, batch):
    """One policy over all documents, `batch` at a time."""
    begin, losses, kept, ended = time.perf_counter(), [], [], []
    where = record.machine()
    for first in range(0, len(ids), batch):
        some = ids[first : first + batch]
        # The last batch is filled up with its last document, so that nothing is compiled for another shape.
        filled = np.concatenate([some, np.repeat(some[-1:], batch - len(some), axis=0)])
        each, before, after = run(model, policy, filled, prefix)
        losses += each[: len(some)].tolist()
        kept.append(before)
        ended.append(after)
    return {
        "policy": repr(policy),
        "losses": losses,
        **summary(losses),
        "rows": float(np.mean(kept)),
        "rows_in_the_end": float(np.mean(ended)),
        "batch": batch,
        "seconds": time.perf_counter() - begin,
        "machine": where,
    }


def summary(values):
    """Mean, standard deviation and standard error; the last two are null for one value alone."""
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
    error = None if deviation is None else deviation / math.sqrt(len(values))
    return {"mean": float(np.mean(values)), "standard_deviation": deviation, "standard_error": error}


def judge(losses):
    """Every statement whose policies have all been measured: whether it holds on average, link by link."""
    found = []
    for text, links in {**STATEMENTS, **BESIDES}.items():
        names = {name for left, _, right in links for name in (left, *right.split(" & "))}
        if names - losses.keys():
            found.append({"statement": text, "holds": None, "missing": sorted(names - losses.keys())})
            continue
        told = [_link(losses, *link) for link in links]
        found.append({"statement": text, "holds": all(link["holds"] for link in told), "links": told})
    return found


def _link(losses, left, relation, right):
    """What sets left apart from right over documents, and on how many of these the relation holds."""
    theirs = np.mean([losses[name] for name in right.split(" & ")], axis=0)
    apart = np.asarray(losses[left]) - theirs
    holds = apart <= 0 if relation == "<=" else apart < 0
    of = summary(apart.tolist())
    average = of["mean"] <= 0 if relation == "<=" else of["mean"] < 0
    link = {"link": f"{left} {relation} {right}", "holds": bool(average), "difference": of["mean"]}
    return link | {"standard_error": of["standard_error"], "documents": int(holds.sum()), "of": len(apart)}


def number(value, signed=False):
    """A figure, or a dash for one that needs more documents."""
    return "-" if value is None else f"{value:{'+' if signed else ''}.4f}"


def show(results):
    """Prints the table and the statements."""
    measured = results["policies"]
    print(f"\n{'policy':20}{'loss':>9}{'st. err.':>10}{'st. dev.':>10}{'rows':>9}{'in the end':>12}{'seconds':>9}")
    for name in POLICIES:
        if name in measured:
            row = measured[name]
            figures = (number(row["mean"]), number(row["standard_error"]), number(row["standard_deviation"]))
            figures = "".join(f"{text:>{width}}" for text, width in zip(figures, (9, 10, 10), strict=True))
            rows = f"{row['rows']:9.1f}{row['rows_in_the_end']:12.1f}{row['seconds']:9.0f}"
            print(f"{name:20}{figures}{rows}")
    print()
    for each in results["statements"]:
        if each["holds"] is None:
            print(f"not known: {each['statement']} (not measured: {', '.join(each['missing'])})")
            continue
        print(f"{'holds' if each['holds'] else 'DOES NOT HOLD'}: {each['statement']}")
        for link in each["links"]:
            apart = f"{number(link['difference'], signed=True)} +- {number(link['standard_error'])}"
            count = f"{link['documents']} of {link['of']} documents"
            print(f"    {'yes' if link['holds'] else 'NO ':3} {link['link']:44} {apart}, {count}")


def read(model, documents, length):
    """The first `length` tokens of the first documents."""
    with gzip.open(DOCUMENTS, "rt", encoding="utf-8") as file:
        found = json.load(file)[:documents]
    ids = [model.text.encode(each["text"], bos=True) for each in found]
    short = [each["title"] for each, tokens in zip(found, ids, strict=True) if len(tokens) < length]
    if short:
        raise SystemExit(f"these documents have fewer than {length} tokens: {', '.join(short)}: lower --prefix")
    return np.asarray([tokens[:length] for tokens in ids], np.int32)


def main():
    """Measures the policies asked for and saves after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), metavar="NAME")
    parser.add_argument("--missing", action="store_true", help="leave out what the file holds already")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--prefix", type=int, default=4096, help="tokens prefilled (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens judged (default: %(default)s)")
    # A share of the prefix, or a number of rows.
    parser.add_argument("--budget", type=lambda s: int(s) if s.isdigit() else float(s), default=0.2)
    parser.add_argument("--batch", type=int, default=4, help="documents at a time (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "loss.json")
    options = parser.parse_args()
    if min(options.documents, options.prefix, options.tokens, options.batch) < 1:
        parser.error("--documents, --prefix, --tokens and --batch are 1 or more")
    settings = {"model": MODEL, "dtype": "float32"}
    settings |= {name: getattr(options, name) for name in ("documents", "prefix", "tokens", "budget")}
    results = record.resume(options.out, settings)
    measured = results.setdefault("policies", {})

    enable_compilation_cache()
    model = jaxkv.load(MODEL, "float32")
    ids = read(model, options.documents, options.prefix + options.tokens)
    names = [name for name in options.policies if not (options.missing and name in measured)]
    for name in names:
        row = measure(model, POLICIES[name](options.budget), ids, options.prefix, min(options.batch, len(ids)))
        measured[name] = row
        results["statements"] = judge({name: row["losses"] for name, row in measured.items()})
        record.save(options.out, results)
        print(f"{name}: {row['mean']:.4f} nats a token, {row['seconds']:.0f} s", flush=True)
    if not measured:
        return
    results["statements"] = judge({name: row["losses"] for name, row in measured.items()})
    show(results)
    print(f"\nsaved to {options.out}")


if __name__ == "__main__":
    main()

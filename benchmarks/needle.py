"""How many of ten needles in 1024 tokens are found, policy by policy, with the question seen and unseen.

Run it with jaxkv's environment; it takes minutes on two cores, and the second table half an hour::

    python -m benchmarks.needle [--model NAME] [--tables seen unseen] [--budgets 128 256] [--shares 0.25 0.5]

The prompts and the peer's figures are those of ``tests/golden/parity/needle1024.json`` (its README says how they were
made). With ten cases, one more or less is noise.

The first table is of policies that see the question: the first rows of each budget reproduce kvpress' semantics and
stand beside the peer's figures; the last ones are the defaults of this library, which the peer has no figures for.

The second table is of contexts that are compressed before the question is seen, and asked about afterwards. What was
run is saved as it comes, so that the same command goes on where it was ended, and a new policy is one more line here.
"""

import argparse
import json
import time
from pathlib import Path

import jaxkv
from benchmarks import record
from jaxkv import AdaKV, FullKV, PyramidKV, SnapKV, StreamingLLM
from jaxkv.machine.compilation import enable_compilation_cache
from jaxkv.policies import AvgPool, KVPressLayers, ProtectedHeads

NEEDLES = Path(__file__).parents[1] / "tests" / "golden" / "parity" / "needle1024.json"
QUESTION = "\nWhat is the special magic number for"


def like_the_peer(budget):
    """Policies under kvpress' semantics, by the name the peer's figure has in the file."""

    def snap(kernel):
        return SnapKV(budget=budget, window=32, pooling=AvgPool(kernel))

    return {
        f"snap32@{budget}": snap(5),
        f"snap32k7@{budget}": snap(7),
        f"snap32k13@{budget}": snap(13),
        f"snap32k21@{budget}": snap(21),
        f"pyr20w8k13@{budget}": PyramidKV(
            budget=budget, window=8, pooling=AvgPool(13), layers=KVPressLayers(beta=20.0)
        ),
        f"ada32@{budget}": AdaKV(base=snap(5), heads=ProtectedHeads(alpha=0.2)),
        f"ada32k13@{budget}": AdaKV(base=snap(13), heads=ProtectedHeads(alpha=0.2)),
        f"stream@{budget}": StreamingLLM(budget=budget),
    }


def defaults(budget):
    """The library's policies as they come."""
    return {
        f"SnapKV(budget={budget})": SnapKV(budget=budget),
        f"PyramidKV(budget={budget})": PyramidKV(budget=budget),
        f"AdaKV(budget={budget})": AdaKV(budget=budget),
        f"AdaKV(base=PyramidKV(budget={budget}))": AdaKV(base=PyramidKV(budget=budget)),
    }


def unseen(share):
    """Policies that compress before the question is seen, by the text that stands in the table."""
    snap = SnapKV(budget=share, pooling=AvgPool(13))
    expected = jaxkv.ExpectedAttention(budget=share, epsilon=0.01)
    return {
        "StreamingLLM": StreamingLLM(budget=share),
        "SnapKV, AvgPool(13)": snap,
        "AdaKV over it": AdaKV(base=snap),
        "PyramidKV, AvgPool(13)": PyramidKV(budget=share, pooling=AvgPool(13)),
        "CriticalKV over SnapKV, AvgPool(13)": jaxkv.CriticalKV(base=snap),
        "CaM": jaxkv.CaM(budget=share, expected=True),
        "PyramidInfer": jaxkv.PyramidInfer(budget=share),
        "TOVA": jaxkv.TOVA(budget=share),
        "H2O": jaxkv.H2O(budget=share),
        "RoCo": jaxkv.RoCo(budget=share),
        "D2O": jaxkv.D2O(budget=share),
        "KNorm": jaxkv.KNorm(budget=share),
        "OmniKV (drops nothing)": jaxkv.OmniKV(budget=share),
        "KeyDiff": jaxkv.KeyDiff(budget=share),
        "AdaKV over KeyDiff": AdaKV(base=jaxkv.KeyDiff(budget=share)),
        "ExpectedAttention": jaxkv.ExpectedAttention(budget=share),
        "AdaKV over ExpectedAttention(epsilon=0.01)": AdaKV(base=expected),
        "GlobalBudget over it": jaxkv.GlobalBudget(base=expected),
        "DefensiveKV": jaxkv.DefensiveKV(budget=share),
        "LayerDefensiveKV": jaxkv.LayerDefensiveKV(budget=share),
        "KVzip": jaxkv.KVzip(budget=share),
        "CurDKV": jaxkv.CurDKV(budget=share),
        "Compactor": jaxkv.Compactor(budget=share),
    }


def cut(model, ids):
    """A case's ids before the question, and from the question on.

    Args:
        model: whose tokenizer the ids are of.
        ids: the whole prompt.

    Returns:
        Context and question, which together are the prompt.
    """
    asked = model.text.encode(QUESTION, bos=False)
    at = max(at for at in range(len(ids)) if ids[at : at + len(asked)] == asked)
    return ids[:at], ids[at:]


def found(cases, texts):
    """Whether each case's answer is in its text."""
    return [case["answer"] in text for case, text in zip(cases, texts, strict=True)]


def print_seen(model, needles, budgets):
    """Prints a line per policy that sees the question, as it is measured, beside kvpress' figure."""
    cases, peer = needles["cases"], needles["peer"]
    policies = {"full": FullKV()}
    for budget in budgets:
        policies |= like_the_peer(budget) | defaults(budget)
    print(f"{'policy':36s} {'jaxkv':>6s} {'kvpress':>8s} {'seconds':>8s}")
    for name, policy in policies.items():
        begin = time.perf_counter()
        out = jaxkv.generate(
            model,
            [case["input_ids"] for case in cases],
            policy=policy,
            max_new_tokens=needles["new_tokens"],
            stop_at_eos=False,
        )
        right = sum(found(cases, [each.text for each in out]))
        theirs = str(peer[name][0]) if name in peer else "-"
        print(f"{name:36s} {right:6d} {theirs:>8s} {time.perf_counter() - begin:8.1f}", flush=True)


def ask_unseen(model, needles, policy):
    """Compresses all contexts by a policy, then asks.

    Args:
        model: from `jaxkv.load`.
        needles: cases and new tokens.
        policy: the compression.

    Returns:
        A dict: whether each answer was right, the texts, and rows kept per kv head over those of the full cache.
    """
    contexts, questions = zip(
        *(cut(model, case["input_ids"]) for case in needles["cases"]), strict=True
    )
    cache = jaxkv.prefill(model, list(contexts), policy=policy)
    # Of OmniKV all: what it reads is its budget.
    kept = float(cache.kept.mean() / (sum(map(len, contexts)) / len(contexts)))
    options = {"max_new_tokens": needles["new_tokens"], "stop_at_eos": False}
    answers = jaxkv.generate(model, list(questions), cache=cache, **options)
    texts = [each.text for each in answers]
    return {
        "right": found(needles["cases"], texts),
        "texts": texts,
        "kept": round(kept, 4),
        "policy": repr(policy),
    }


def measure_unseen(model, needles, shares, path, only=None):
    """Runs what a file has no figures of, and saves each in it.

    Args:
        model: from `jaxkv.load`.
        needles: cases and new tokens.
        shares: of the context's rows.
        path: the file.
        only: names of policies; None for all.

    Returns:
        The cells by name and share.
    """
    results = record.resume(
        path, {"model": model.name, "fingerprint": model.fingerprint, "dtype": str(model.dtype)}
    )
    cells = results.setdefault("cells", {})
    wanted = {"full cache": FullKV()}
    wanted |= {
        f"{name} @ {share}": policy for share in shares for name, policy in unseen(share).items()
    }
    for title, policy in wanted.items():
        if title.split(" @ ")[0] in (only or [title.split(" @ ")[0]]) and title not in cells:
            begin = time.perf_counter()
            cells[title] = ask_unseen(model, needles, policy)
            results["machine"] = record.machine()
            record.save(path, results)
            line = f"{title:44s} {sum(cells[title]['right']):3d} of {len(needles['cases'])}"
            print(
                f"{line}  kept {cells[title]['kept']:.3f} {time.perf_counter() - begin:8.1f} s",
                flush=True,
            )
    return cells


def table(cells, shares):
    """The second table, as lines of Markdown."""
    lines = [
        "# Needles with the question unseen",
        "",
        "By `python -m benchmarks.needle --tables unseen`: right answers of ten, needles in 1,024 tokens whose context",
        "was compressed before the question was there; SmolLM2-135M-Instruct, float32. One more or less is noise.",
        "",
        "| policy | " + " | ".join(f"{100 * share:.0f} % of rows" for share in shares) + " |",
        "|---|" + "---:|" * len(shares),
    ]
    right = {title: str(sum(cell["right"])) for title, cell in cells.items()}
    names = ["full cache", *unseen(shares[0])]
    for name in names:
        row = [
            right.get("full cache" if name == "full cache" else f"{name} @ {share}", "-")
            for share in shares
        ]
        lines.append(f"| {name} | {' | '.join(row)} |")
    return [*lines, ""]


def main():
    """Prints the tables, a line per policy as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="what to load (default: %(default)s)"
    )
    parser.add_argument(
        "--tables", nargs="+", choices=("seen", "unseen"), default=["seen", "unseen"]
    )
    parser.add_argument(
        "--budgets",
        type=int,
        nargs="+",
        default=[128, 256],
        help="rows per head (default: 128 256)",
    )
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[0.25, 0.5], help="of rows (default: 0.25 0.5)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="policies of the second table, by the table's names",
    )
    parser.add_argument("--out", type=Path, default=record.RESULTS / "needle_unseen.json")
    options = parser.parse_args()
    needles = json.loads(NEEDLES.read_text("utf-8"))
    enable_compilation_cache()
    model = jaxkv.load(options.model)
    if "seen" in options.tables:
        print_seen(model, needles, options.budgets)
    if "unseen" in options.tables:
        cells = measure_unseen(model, needles, options.shares, options.out, options.only)
        lines = table(cells, options.shares)
        options.out.with_suffix(".md").write_text("\n".join(lines), "utf-8")
        print("\n".join(lines))


if __name__ == "__main__":
    main()

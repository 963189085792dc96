"""What SmolLM2's attention looks like in real documents, and what policies recall and lose of it at equal totals.

    python -m benchmarks.recall                     eight documents, prompts of 4096 tokens; twenty minutes or so
    python -m benchmarks.recall --documents 2 --prompt 1024

PyramidKV against SnapKV (PyramidKV's figure 8) with the same window and as many rows in all; besides, PyramidKV with
the rounding of the published code, which keeps more than its budget. Uniform, safeguarded and adaptive budgets of heads
by the change of each layer's output (Ada-KV's figure 2). The tokens behind each prompt ask; they are the document's.
Writes analysis.json, analysis.md and a picture of each figure into benchmarks/results.
"""

import argparse
import gzip
import json
import time
from pathlib import Path

import jaxkv
from benchmarks import record
from jaxkv import AdaKV, PyramidKV, SnapKV
from jaxkv.analysis.budgets import BudgetsMeasure
from jaxkv.analysis.choosing import grid
from jaxkv.analysis.density import DensityMeasure
from jaxkv.analysis.figures import error
from jaxkv.analysis.loss import ALLOCATIONS, LossMeasure
from jaxkv.analysis.measuring import measured
from jaxkv.analysis.recall import RecallMeasure
from jaxkv.analysis.retained import RetainedMeasure
from jaxkv.compilation import enable_compilation_cache
from jaxkv.policies import OfficialLayers

DOCUMENTS = record.ROOT / "jaxkv" / "evals" / "data" / "documents.json.gz"
MODEL = "smollm2-135m-instruct"
WINDOW = 8
PUBLISHED = "PyramidKV, published rounding"
POLICIES = {
    "SnapKV": SnapKV(window=WINDOW),
    "PyramidKV": PyramidKV(window=WINDOW),
    PUBLISHED: PyramidKV(window=WINDOW, allocation=OfficialLayers()),
    "AdaKV": AdaKV(base=SnapKV(window=WINDOW)),
}
BUDGETS = (64, 128, 256, 512, 1024, 2048)
LOSS_BUDGETS = (128, 256, 512, 1024)
# Of losses of a hundred or so, where a policy keeps everything.
ROUNDING = 0.05
# What PyramidKV's appendix N reports for its figure 8, in points.
PAPER = (1.87, 0.64, 0.61, 0.56, 0.47, 0.36)


def read(model, documents, tokens):
    """The first tokens of the first documents."""
    with gzip.open(DOCUMENTS, "rt", encoding="utf-8") as file:
        found = json.load(file)[:documents]
    ids = [model.text.encode(each["text"], bos=True) for each in found]
    short = [each["title"] for each, mine in zip(found, ids, strict=True) if len(mine) < tokens]
    if short:
        raise SystemExit(
            f"these documents have fewer than {tokens} tokens: {', '.join(short)}: lower --prompt"
        )
    return [mine[:tokens] for mine in ids], [each["title"] for each in found]


def recalled(found):
    """Recall by policy and budget, document by document; and how policies differ from SnapKV."""
    rows = {}
    for at, name in enumerate(found.policies):
        mean, spread = found.difference(name, "SnapKV")
        rows[name] = [
            {
                "budget": budget,
                "rows": found.rows[at, column].tolist(),
                "recall": found.by_text[at, column].round(6).tolist(),
                "mean": float(found.by_text[at, column].mean()),
                "standard_error": error(found.by_text[at, column])
                if len(found.lengths) > 1
                else None,
                "visible": float(found.visible[at, column].mean()),
                "above_snapkv": float(mean[column]),
                "standard_error_of_that": float(spread[column]) if len(found.lengths) > 1 else None,
                "documents_above": int(
                    (found.by_text[at, column] > found.by_text[0, column]).sum()
                ),
            }
            for column, budget in enumerate(found.budgets)
        ]
    return rows


def lost(found):
    """Losses and bounds by allocation and budget, and how often each is no larger than uniform's."""
    rows = {}
    for at, name in enumerate(found.policies):
        queries, layers = found.at_most(name, "uniform")
        rows[name] = [
            {
                "budget": budget,
                "rows": found.rows[at, column].tolist(),
                "loss": float(found.loss[at, column].mean()),
                "bound": float(found.bound[at, column].mean()),
                "queries_at_most_uniform": float(queries[column]),
                "layers_at_most_uniform": float(layers[column]),
                "bound_holds": bool(
                    (found.loss[at, column] <= found.bound[at, column] + ROUNDING).all()
                ),
            }
            for column, budget in enumerate(found.budgets)
        ]
    return rows


def told(results):
    """The tables as Markdown."""
    settings, recall, loss = (results[name] for name in ("settings", "recall", "loss"))
    documents = settings["documents"]
    lines = [
        "# Attention of SmolLM2-135M in real documents",
        "",
        f"`python -m benchmarks.recall`: {documents} documents, prompts of {settings['prompt']} tokens, "
        f"{settings['following']} tokens that follow each; {results['machine']['date'][:10]}, "
        f"commit {results['machine']['commit']}, {results['seconds'] / 60:.1f} minutes on a CPU. "
        "Pictures: [density](analysis_density.png), [retained](analysis_retained.png), "
        "[budgets](analysis_budgets.png), [recall](analysis_recall.png), [loss](analysis_loss.png).",
        "",
        "## Recall at equal totals",
        "",
        f"The share of the attention paid to the prompt that falls on rows kept, in %; all with a window of {WINDOW}. "
        "Differences are taken document by document, +- their standard error, in points.",
        "",
        "| rows a head | SnapKV | PyramidKV | PyramidKV - SnapKV | documents above | the paper | AdaKV - SnapKV | "
        f"{PUBLISHED} - SnapKV | rows that it keeps |",
        "|---|---|---|---|---|---|---|---|---|",
    ]

    def apart(each):
        spread = each["standard_error_of_that"]
        return f"{100 * each['above_snapkv']:+.2f}" + (
            "" if spread is None else f" +- {100 * spread:.2f}"
        )

    for at, budget in enumerate(settings["budgets"]):
        snap, pyramid, published, ada = (
            recall[name][at] for name in ("SnapKV", "PyramidKV", PUBLISHED, "AdaKV")
        )
        assert pyramid["rows"] == snap["rows"] == ada["rows"]
        more = sum(published["rows"]) / sum(snap["rows"]) - 1
        lines.append(
            f"| {budget} | {100 * snap['mean']:.2f} | {100 * pyramid['mean']:.2f} | {apart(pyramid)} | "
            f"{pyramid['documents_above']} of {documents} | +{PAPER[at]} | {apart(ada)} | {apart(published)} | "
            f"{100 * more:+.1f} % |"
        )
    lines += [
        "",
        "## Eviction loss",
        "",
        "The L1 distance of each layer's attention output from full attention's, averaged, and theorem 3.1's bound; "
        "windows of 32, equal totals. Shares: how often the loss is at most that of uniform budgets, over documents, "
        "layers and queries; and over documents and layers, queries averaged.",
        "",
        "| rows a head | allocation | loss | bound | queries at most uniform's | layers at most uniform's |",
        "|---|---|---|---|---|---|",
    ]
    for at, budget in enumerate(settings["loss_budgets"]):
        for name, rows in loss.items():
            each = rows[at]
            assert each["rows"] == loss["uniform"][at]["rows"] and each["bound_holds"]
            shares = "| - | - |"
            if name != "uniform":
                shares = f"| {each['queries_at_most_uniform']:.1%} | {each['layers_at_most_uniform']:.1%} |"
            lines.append(f"| {budget} | {name} | {each['loss']:.1f} | {each['bound']:.0f} {shares}")
    return "\n".join(lines) + "\n"


def main():
    """Looks, draws, saves and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument(
        "--prompt", type=int, default=4096, help="tokens that policies see (default: %(default)s)"
    )
    parser.add_argument(
        "--following", type=int, default=64, help="tokens behind them (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    options = parser.parse_args()
    enable_compilation_cache()
    model, begin = jaxkv.load(MODEL, "float32"), time.perf_counter()
    ids, titles = read(model, options.documents, options.prompt + options.following)
    where, cells = record.machine(), grid(model, POLICIES, BUDGETS)
    measures = {
        "density": DensityMeasure(),
        "retained": RetainedMeasure(),
        "budgets": BudgetsMeasure(cells),
        "recall": RecallMeasure(cells),
        "loss": LossMeasure(grid(model, ALLOCATIONS, LOSS_BUDGETS)),
    }

    def progress(at, tokens):
        return print(f"{time.perf_counter() - begin:5.0f} s: {titles[at]}", flush=True)  # noqa: E731

    found = measured(
        model, ids, list(measures.values()), following=options.following, begin=progress
    )
    figures = dict(zip(measures, found, strict=True))
    settings = {name: getattr(options, name) for name in ("documents", "prompt", "following")}
    results = {
        "settings": {
            "model": MODEL,
            "dtype": "float32",
            **settings,
            "budgets": BUDGETS,
            "loss_budgets": LOSS_BUDGETS,
        },
        "titles": titles,
        "policies": {name: repr(policy) for name, policy in {**POLICIES, **ALLOCATIONS}.items()},
        "recall": recalled(figures["recall"]),
        "loss": lost(figures["loss"]),
        "density": figures["density"].records(),
        "retained": figures["retained"].records(),
        "seconds": time.perf_counter() - begin,
        "machine": where,
    }
    record.save(options.out / "analysis.json", results)
    (options.out / "analysis.md").write_text(told(results), encoding="utf-8")
    for name, figure in figures.items():
        figure.picture(options.out / f"analysis_{name}.png")
    print(told(results))


if __name__ == "__main__":
    main()

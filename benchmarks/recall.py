"""What SmolLM2's attention looks like in real documents, and what policies recall and lose of it at equal totals.

    python -m benchmarks.recall                     eight documents, prompts of 4096 tokens; an hour or so
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

import numpy as np
from matplotlib.figure import Figure

import jaxkv
from benchmarks import record
from jaxkv import AdaKV, PyramidKV, SnapKV, analysis
from jaxkv.machine.compilation import enable_compilation_cache
from jaxkv.policies import OfficialLayers

DOCUMENTS = record.ROOT / "jaxkv" / "evals" / "data" / "documents.json.gz"
MODEL = "smollm2-135m-instruct"
WINDOW = 8
PUBLISHED = "PyramidKV, published rounding"
POLICIES = {
    "SnapKV": SnapKV(window=WINDOW),
    "PyramidKV": PyramidKV(window=WINDOW),
    PUBLISHED: PyramidKV(window=WINDOW, layers=OfficialLayers()),
    "AdaKV": AdaKV(base=SnapKV(window=WINDOW)),
}
ALLOCATIONS = {"uniform": SnapKV(), "safeguarded": AdaKV(), "adaptive": AdaKV(alpha=0.0)}
SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
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


def error(values):
    """Standard error of the mean over documents; None of a single one."""
    return float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else None


def recalled(found):
    """Recall by policy and budget, document by document; and how policies differ from SnapKV."""
    by_text, rows = found.recall.mean(axis=(3, 4)).astype(float), {}
    for at, name in enumerate(POLICIES):
        apart = by_text[at] - by_text[0]
        rows[name] = [
            {
                "budget": budget,
                "rows": found.rows[at, column].tolist(),
                "recall": by_text[at, column].round(6).tolist(),
                "mean": by_text[at, column].mean(),
                "standard_error": error(by_text[at, column]),
                "visible": float(found.visible[at, column].mean()),
                "above_snapkv": apart[column].mean(),
                "standard_error_of_that": error(apart[column]),
                "documents_above": int((apart[column] > 0).sum()),
            }
            for column, budget in enumerate(BUDGETS)
        ]
    return rows


def lost(found):
    """Losses and bounds by allocation and budget, and how often each is no larger than uniform's."""
    rows = {}
    for at, name in enumerate(ALLOCATIONS):
        rows[name] = [
            {
                "budget": budget,
                "rows": found.rows[at, column].tolist(),
                "loss": float(loss.mean()),
                "bound": float(found.bound[at, column].mean()),
                "queries_at_most_uniform": float((loss <= uniform).mean()),
                "layers_at_most_uniform": float((loss.mean(-1) <= uniform.mean(-1)).mean()),
                "bound_holds": bool((loss <= found.bound[at, column] + ROUNDING).all()),
            }
            for column, (budget, loss, uniform) in enumerate(
                zip(LOSS_BUDGETS, found.loss[at], found.loss[0], strict=True)
            )
        ]
    return rows


def plot(folder, dense, held, given, found, loss):
    """Writes a picture of each measurement."""
    layers, shares = np.arange(len(held)), 100 * np.asarray(SHARES)
    chosen = (0, 1, len(held) // 2, len(held) - 2, len(held) - 1)
    curves = {
        f"{100 * quantile:g} % of heads": (shares, 100 * np.quantile(held, quantile, axis=(0, 1)))
        for quantile in (0, 0.1, 0.5, 0.9, 1)
    }
    across = {
        name: (
            found.rows[at].mean(axis=1) / held[..., 0].size,
            100 * found.recall[at].mean((1, 2, 3)),
        )
        for at, name in enumerate(POLICIES)
    }
    losses = {name: (layers, loss.loss[at, 0].mean((0, 2))) for at, name in enumerate(ALLOCATIONS)}
    losses["bound of uniform"] = layers, loss.bound[0, 0].mean((0, 2))
    maps = {f"layer {each}": np.log10(np.maximum(dense.maps[each], 1e-7)) + 7 for each in chosen}
    rows = {name: given[at, 0].mean(axis=0) for at, name in enumerate(POLICIES)}
    panels = {
        "density": lambda figure: analysis.plot_maps(
            figure, maps, across="key, bins", down="query, bins", label="mean weight, log10 + 7"
        ),
        "retained": lambda figure: analysis.plot_lines(
            figure, curves, across="keys of each head, %", up="attention retained, %", log="x"
        ),
        "budgets": lambda figure: analysis.plot_maps(
            figure, rows, across="kv head", down="layer", label="rows kept"
        ),
        "recall": lambda figure: analysis.plot_lines(
            figure, across, across="rows per kv head and layer", up="attention recall, %", log="x"
        ),
        "loss": lambda figure: analysis.plot_lines(
            figure, losses, across="layer", up="eviction loss, L1", log="y"
        ),
    }
    for name, into in panels.items():
        into(figure := Figure(figsize=(8, 3), layout="constrained"))
        figure.savefig(folder / f"analysis_{name}.png", dpi=150)


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
    """Looks, samples, saves and prints."""
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
    where, of = record.machine(), {"following": options.following}
    dense = analysis.density(model, ids)
    held = analysis.retained(model, ids, shares=SHARES)
    of_policies = {"policies": list(POLICIES.values()), "budgets": BUDGETS, **of}
    given = analysis.budgets(model, ids, **of_policies)
    found = analysis.recall(model, ids, **of_policies)
    loss = analysis.eviction_loss(
        model, ids, policies=list(ALLOCATIONS.values()), budgets=LOSS_BUDGETS, **of
    )
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
        "recall": recalled(found),
        "loss": lost(loss),
        "density": {
            "variance": dense.variance.mean(axis=1).tolist(),
            "dense": dense.dense.mean(axis=1).tolist(),
        },
        "retained": dict(zip(map(str, SHARES), held.mean(axis=(0, 1)).tolist(), strict=True)),
        "seconds": time.perf_counter() - begin,
        "machine": where,
    }
    record.save(options.out / "analysis.json", results)
    (options.out / "analysis.md").write_text(told(results), encoding="utf-8")
    plot(options.out, dense, held, given, found, loss)
    print(told(results))


if __name__ == "__main__":
    main()

"""What every policy recalls and loses on SmolLM2, with the question seen and unseen, at 5 to 40 % of the rows.

    python -m benchmarks.recall_methods [--count 1] [--tokens 1024] [--out FILE]

Texts are RULER's samples with their right answers. Recall is the share of full attention on the prompt's rows that
falls on kept rows; loss the L1 change of a layer's attention output, each layer's input being that of full attention.
Both are of the last tokens of a text: of 40, the question and the answer, where policies see the context alone, and of
8, the answer's, where they see the question as well. Windows are of 8 tokens, so that policies differ by their scores.
"""

import argparse
import dataclasses
import warnings
from pathlib import Path

import numpy as np

import jaxkv
from benchmarks import record
from jaxkv import (
    AdaKV,
    ChunkKV,
    CriticalKV,
    DefensiveKV,
    ExpectedAttention,
    GlobalBudget,
    KVzip,
    SnapKV,
)
from jaxkv.analysis.choosing import grid
from jaxkv.analysis.figures import error
from jaxkv.analysis.loss import LossMeasure
from jaxkv.analysis.measuring import measured
from jaxkv.analysis.recall import RecallMeasure
from jaxkv.evals import Ruler
from jaxkv.policies.registry import as_policy

MODEL, WINDOW, SHARES = "smollm2-135m-instruct", 8, (0.05, 0.1, 0.2, 0.4)
# Last tokens of a text that policies do not see, whose attention is measured.
FOLLOWING = {"unseen": 40, "seen": 8}
_SNAP = SnapKV(window=WINDOW)
_NAMES = (
    *(
        "streamingllm",
        "random",
        "knorm",
        "tova",
        "pyramidkv",
        "keydiff",
        "lagkv",
        "curdkv",
        "capkv",
        "compactor",
    ),
    *("cake", "dropkv", "expectedattention", "kvzip", "layerdefensivekv"),
)


def policies():
    """Policies by name, with windows of eight tokens where they have one."""
    found = {"snapkv": _SNAP, "adakv": AdaKV(base=_SNAP), "chunkkv": ChunkKV(base=_SNAP)}
    for name in _NAMES:
        policy = as_policy(name, options={})
        sized = "window" in {each.name for each in dataclasses.fields(policy)}
        found[name] = dataclasses.replace(policy, window=WINDOW) if sized else policy
    return found | {
        "criticalkv": CriticalKV(base=_SNAP),
        "snapkv, all layers": GlobalBudget(base=_SNAP),
        "defensivekv": DefensiveKV(window=WINDOW),
        "adakv, expectedattention": AdaKV(base=ExpectedAttention(epsilon=0.01)),
        "kvzip+": KVzip(weighted=True),
    }


def texts(params, tokens, count):
    """Token ids of samples, right answers behind them."""
    samples = Ruler(lengths=(tokens,), count=count).samples(params)
    whole = (
        f"{each.context}{each.question}{each.prefix} {' '.join(each.answers)}" for each in samples
    )
    return [params.text.encode(each, bos=True) for each in whole]


def table(title, figures, names, digits):
    """Lines of a table: a row a policy, best first at a fifth of the rows; cells are means and standard errors."""
    yield from (
        "",
        f"## {title}",
        "",
        f"| policy | {' | '.join(f'{100 * share:g} %' for share in SHARES)} |",
    )
    yield "|---|" + "---:|" * len(SHARES)
    order = sorted(
        range(len(names)), key=lambda at: figures[at, 2].mean(), reverse=title.startswith("Recall")
    )
    for at in order:
        cells = [f"{each.mean():.{digits}f} ± {error(each):.{digits}f}" for each in figures[at]]
        yield f"| {names[at]} | {' | '.join(cells)} |"


def main():
    """Measures, prints tables and saves them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=int, default=1024, help="of each text (default: %(default)s)"
    )
    parser.add_argument(
        "--count", type=int, default=1, help="texts of each of 11 tasks (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="a Markdown file to write")
    asked = parser.parse_args()
    warnings.simplefilter("ignore", jaxkv.UnseenQuestionWarning)
    params = jaxkv.load(MODEL)
    ids, where, cells = (
        texts(params, asked.tokens, asked.count),
        record.machine(),
        grid(params, policies(), SHARES),
    )
    lines = [
        "# What policies recall and lose on SmolLM2, the question seen and unseen",
        "",
        f"`python -m benchmarks.recall_methods` at {where['commit']}, float32: {len(ids)} texts of RULER of about "
        f"{asked.tokens} tokens. Means over texts, layers and query heads, with standard errors over texts.",
    ]
    for name, following in FOLLOWING.items():
        found = measured(
            params, ids, [RecallMeasure(cells), LossMeasure(cells)], following=following
        )
        lines += table(f"Recall, %, question {name}", 100 * found[0].by_text, cells.names, 1)
        lines += table(
            f"Loss, L1, question {name}", np.mean(found[1].loss, axis=(3, 4)), cells.names, 2
        )
    print("\n".join(lines))
    if asked.out:
        asked.out.write_text("\n".join([*lines, ""]), "utf-8")


if __name__ == "__main__":
    main()

"""`jaxkv analyze`: measures attention in texts, prints tables, saves arrays and pictures."""

import argparse
import contextlib
import io
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv._drawing import drawing
from jaxkv._errors import require
from jaxkv.analysis.budgets import BudgetsMeasure
from jaxkv.analysis.choosing import Grid, PolicyLike, checked, grid
from jaxkv.analysis.density import DensityMeasure
from jaxkv.analysis.figures import Figure
from jaxkv.analysis.loss import ALLOCATIONS, LossMeasure
from jaxkv.analysis.measuring import Measure, measured
from jaxkv.analysis.recall import FOLLOWING, RecallMeasure
from jaxkv.analysis.retained import RetainedMeasure
from jaxkv.analysis.similarity import SimilarityMeasure
from jaxkv.arguments import random_key
from jaxkv.cli.files import Target, read_long_text
from jaxkv.cli.models import (
    add_dtype_option,
    add_model_option,
    add_weights_option,
    ids_of,
    require_model,
)
from jaxkv.cli.numbers import argument, positive, row_budgets, seed
from jaxkv.cli.policy_rows import spelled
from jaxkv.cli.streams import to_stderr, to_stdout
from jaxkv.compilation import enable_compilation_cache
from jaxkv.loading import LanguageModel, load

# Titles of the figures' tables; all but the first three are figures of policies.
FIGURES = {
    "density": "how evenly layers attend (D2O, figures 1 and 4)",
    "retained": "attention that the top keys of a kv head hold (Ada-KV, figures 1a and 11)",
    "similarity": "attention that other layers pay to a layer's top tokens (OmniKV, figures 1a and 8)",
    "budgets": "rows that policies keep, by layer and kv head",
    "recall": "full attention on rows that policies keep (PyramidKV, figure 8)",
    "loss": "change of a layer's output, and its bound (Ada-KV, figure 2 and theorem 3.1)",
}
_OF_MODELS: Mapping[str, Callable[[], Measure]] = {
    "density": DensityMeasure,
    "retained": RetainedMeasure,
    "similarity": SimilarityMeasure,
}
_OF_POLICIES: Mapping[str, Callable[[Grid], Measure]] = {
    "budgets": BudgetsMeasure,
    "recall": RecallMeasure,
    "loss": LossMeasure,
}
_KINDS = ("png", "svg", "pdf")
_TOKENS = 4096
# What the figures of policies are worth, in the words of docs/which_policy.md.
_JUDGE = (
    "recall and loss of attention are no answers, and order policies otherwise than answers do (docs/which_policy.md); "
    "to choose one, ask questions: `jaxkv eval qa --data mine.jsonl`, or `jaxkv eval needle --question-agnostic`"
)
_USUAL = "snapkv --window 8,pyramidkv --window 8,adakv --window 8"

ANALYZE_NOTES = """\
Each text is run through the model once under full attention, layer by layer; its beginning once more where figures are
of policies, which see all but its last tokens. A policy's options follow its name: 'adakv --base pyramidkv --alpha 0'.

examples:
  everything there is about a model, in two documents:
    jaxkv analyze --text report.txt other.txt --budgets 128,256 --out found

  what PyramidKV's layer budgets are worth, at equal totals:
    jaxkv analyze --text report.txt --what recall --budgets 64,256,1024 \\
        --policies "snapkv --window 8,pyramidkv --window 8"
"""


def add_analyze_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jaxkv analyze` to its parser."""
    count = argument(positive)
    add = parser.add_argument_group("what is looked at").add_argument
    add_model_option(add)
    add_dtype_option(add)
    add_weights_option(add)
    add(
        "--text",
        nargs="+",
        required=True,
        metavar="FILE",
        help="UTF-8 texts, long ones; - for stdin",
    )
    usual = f"of each text at most (default: {_TOKENS}, or what the model was made for)"
    add("--tokens", type=count, metavar="N", help=usual)
    add("--what", default=",".join(FIGURES), metavar="A,B", help="figures (default: %(default)s)")
    add = parser.add_argument_group("policies, for budgets, recall and loss").add_argument
    uniform = "of loss: uniform, safeguarded and adaptive heads"
    add(
        "--policies",
        metavar="A,B",
        help=f"with options behind a name (default: {_USUAL}; {uniform})",
    )
    rows = "rows per kv head and layer, or shares of a prompt (default: %(default)s)"
    add("--budgets", default="64,128,256", metavar="N,N", help=rows)
    behind = "last tokens of each text, which policies do not see (default: %(default)s)"
    add("--following", type=count, default=FOLLOWING, metavar="N", help=behind)
    add(
        "--seed",
        type=argument(seed),
        default=0,
        metavar="N",
        help="of policies that draw (default: %(default)s)",
    )
    add = parser.add_argument_group("output").add_argument
    add("--out", metavar="DIR", help="write arrays (.npz), pictures and analysis.json there")
    kinds = (
        f"of pictures: {', '.join(_KINDS)}, or none; they need jaxkv[plots] (default: %(default)s)"
    )
    add("--pictures", default="png,svg", metavar="A,B", help=kinds)
    add("--json", action="store_true", help="print JSON instead of tables")


def run_analyze(options: argparse.Namespace) -> int:
    """Runs `jaxkv analyze`: measures texts, prints tables or JSON, then writes files; returns exit code 0.

    Bad options are refused before the model is loaded. If a file cannot be written, the tables are already on stdout.
    """
    require_model(options.model)
    names = _listed(options.what, "--what", FIGURES)
    sizes = row_budgets(options.budgets)
    policies = _policies(_USUAL if options.policies is None else options.policies)
    special = {"loss": ALLOCATIONS} if options.policies is None else {}
    of_policies = bool(set(names) & set(_OF_POLICIES))
    require(
        bool(sizes) or not of_policies,
        "--budgets",
        options.budgets,
        "give one or more, such as 64,128,0.2",
    )
    _measures(names, lambda name: checked(special.get(name, policies), sizes))
    kinds = [] if options.pictures == "none" else _listed(options.pictures, "--pictures", _KINDS)
    folder = None if options.out is None else _folder(options.out, pictures=bool(kinds))
    texts = [read_long_text(name, "--text") for name in options.text]
    enable_compilation_cache()
    params = load(options.model, dtype=options.dtype, weights=options.weights)
    measures = _measures(names, lambda name: grid(params, special.get(name, policies), sizes))
    following = options.following if of_policies else 0
    whole = ids_of(params, options.model, texts)
    ids = _cut(params, options, whole, following)

    def begin(at: int, tokens: int) -> None:
        count = len(whole[at])
        cut = f"the first {tokens} of {count}" if tokens < count else str(tokens)
        to_stderr(f"jaxkv: text {at + 1} of {len(ids)}, {cut} tokens")

    found = measured(
        params, ids, measures, following=following, key=random_key(options.seed), begin=begin
    )
    figures: dict[str, Figure] = dict(zip(names, found, strict=True))
    tables = {
        name: [_without_nan(each) for each in figure.records()] for name, figure in figures.items()
    }
    record = {
        "settings": {
            "model": params.name,
            "dtype": str(params.dtype),
            "following": following,
            "seed": options.seed,
        },
        "texts": [
            {"file": name, "tokens": len(cut), "of": len(each)}
            for name, cut, each in zip(options.text, ids, whole, strict=True)
        ],
        "figures": tables,
    }
    if options.json:
        to_stdout(json.dumps(record, indent=2))
    else:
        to_stdout(
            "\n\n".join(
                f"{name}: {FIGURES[name]}\n{_table(records)}" for name, records in tables.items()
            )
        )
        if not {"recall", "loss"}.isdisjoint(tables):
            to_stderr(f"jaxkv: {_JUDGE}")
    if folder is not None:
        _write(folder, figures, record, kinds)
    return 0


def _measures(names: Sequence[str], grid_of: Callable[[str], Grid]) -> list[Measure]:
    """List of one `Measure` per figure name; `grid_of(name)` gives policies and budgets for a figure of policies."""
    return [
        _OF_MODELS[name]() if name in _OF_MODELS else _OF_POLICIES[name](grid_of(name))
        for name in names
    ]


def _listed(given: str, flag: str, known: Iterable[str]) -> list[str]:
    """Comma-separated names as a list without repeats; ValueError for an empty list or a name not in `known`."""
    names = list(dict.fromkeys(word.strip() for word in given.split(",") if word.strip()))
    odd = [name for name in names if name not in known]
    require(
        bool(names) and not odd, flag, ",".join(odd) or given, f"give some of {', '.join(known)}"
    )
    return names


def _policies(given: str) -> dict[str, PolicyLike]:
    """Dict {text as written: policy} of `--policies`; ValueError for a policy whose options set a budget."""
    made: dict[str, PolicyLike] = {}
    for each in spelled(given):
        require(
            not each.sized, "--policies", each.text, "budgets are the same for all: give --budgets"
        )
        made[each.text] = each.policy()
    return made


def _folder(given: str, *, pictures: bool) -> Path:
    """Path of the `--out` folder, left uncreated; an error if it cannot be written, or pictures lack matplotlib."""
    if pictures:
        drawing()
    folder = Path(os.path.expanduser(given))
    require(
        not os.path.lexists(folder) or folder.is_dir(),
        "--out",
        given,
        "it is no folder: give another",
    )
    new = [each for each in (folder, *folder.parents) if not os.path.exists(each)]
    try:
        _make(folder)
        require(
            os.access(folder, os.W_OK | os.X_OK),
            "--out",
            given,
            "the folder cannot be written to: give another",
        )
    finally:
        # Created again with the first file, so that a run that is refused or stopped leaves no folder.
        for each in new:
            with contextlib.suppress(OSError):
                each.rmdir()
    return folder


def _make(folder: Path) -> None:
    """Creates a folder and its parents; an OSError names `--out`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"--out={folder}: {error.strerror or error}; give another folder") from error


def _cut(
    params: LanguageModel, options: argparse.Namespace, texts: list[list[int]], following: int
) -> list[list[int]]:
    """List of each text's token ids cut to --tokens; ValueError for more than the model takes, or texts too short."""
    longest = params.config.max_positions
    tokens = min(_TOKENS, longest) if options.tokens is None else options.tokens
    require(tokens <= longest, "--tokens", tokens, f"the model was made for {longest} at most")
    ids = [each[:tokens] for each in texts]
    for name, each in zip(options.text, ids, strict=True):
        behind = f", of which {following} follow the prompt" if following else ""
        remedy = f"it has {len(each)} tokens{behind}: give a longer text"
        require(len(each) > following + 1, "--text", name, remedy)
    return ids


def _without_nan(record: dict[str, Any]) -> dict[str, Any]:
    """Copy of a flat dict with None in place of float NaN and infinity, which JSON lacks."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }


def _table(records: list[dict[str, Any]]) -> str:
    """Text of a table of records: a header, then a line for each, with numbers aligned to the right."""
    if not records:
        return "(nothing to say: a single layer)"
    lines = [list(records[0]), *([_cell(value) for value in each.values()] for each in records)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    marks = ["<" if isinstance(value, str) else ">" for value in records[0].values()]
    layout = "  ".join(f"{{:{mark}{width}}}" for mark, width in zip(marks, widths, strict=True))
    return "\n".join(layout.format(*line).rstrip() for line in lines)


def _cell(value: Any) -> str:
    """Text of a table cell: numbers rounded, None as a dash."""
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return "-" if value is None else str(value)


def _write(
    folder: Path, figures: Mapping[str, Figure], record: dict[str, Any], kinds: Sequence[str]
) -> None:
    """Writes all figures' arrays (.npz), pictures and, last, analysis.json into a folder; names it on stderr."""
    _make(folder)
    for name, figure in figures.items():
        file = io.BytesIO()
        np.savez_compressed(file, allow_pickle=False, **figure.arrays())
        _put(folder / f"{name}.npz", file.getvalue())
        with tempfile.TemporaryDirectory() as drawn:
            for kind in kinds:
                picture = Path(drawn) / f"{name}.{kind}"
                figure.picture(picture)
                _put(folder / picture.name, picture.read_bytes())
    _put(folder / "analysis.json", (json.dumps(record, indent=1) + "\n").encode())
    to_stderr(f"jaxkv: arrays and pictures are in {folder}")


def _put(path: Path, data: bytes) -> None:
    """Writes bytes to a file by `Target`, atomically if possible; an OSError names the option `--out`."""
    Target(flag="--out", name=str(path)).write(data)

"""What `jaxkv analyze` does: looks at attention in some texts, prints what it found, saves arrays and pictures."""

import argparse
import contextlib
import io
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv._drawing import drawing
from jaxkv._errors import require
from jaxkv.analysis.budgets import BudgetsWatcher
from jaxkv.analysis.choosing import Grid, PolicyLike, checked, grid
from jaxkv.analysis.density import DensityWatcher
from jaxkv.analysis.figures import Figure
from jaxkv.analysis.loss import ALLOCATIONS, LossWatcher
from jaxkv.analysis.recall import FOLLOWING, RecallWatcher
from jaxkv.analysis.retained import RetainedWatcher
from jaxkv.analysis.similarity import SimilarityWatcher
from jaxkv.analysis.watching import Watcher, watch
from jaxkv.cli.files import Target, read_text
from jaxkv.cli.generating import random_key, require_model
from jaxkv.cli.numbers import argument, seed, whole
from jaxkv.cli.policy_rows import budgets_of, spelled
from jaxkv.cli.streams import to_stderr, to_stdout
from jaxkv.compilation import enable_compilation_cache
from jaxkv.loading import LanguageModel, load

# What each figure says, above its table; those behind the first three are of policies.
FIGURES = {
    "density": "how evenly layers attend (D2O, figures 1 and 4)",
    "retained": "attention that the top keys of a kv head hold (Ada-KV, figures 1a and 11)",
    "similarity": "attention that other layers pay to a layer's top tokens (OmniKV, figures 1a and 8)",
    "budgets": "rows that policies keep, by layer and kv head",
    "recall": "full attention on rows that policies keep (PyramidKV, figure 8)",
    "loss": "change of a layer's output, and its bound (Ada-KV, figure 2 and theorem 3.1)",
}
_OF_MODELS: Mapping[str, Callable[[], Watcher]] = {
    "density": DensityWatcher,
    "retained": RetainedWatcher,
    "similarity": SimilarityWatcher,
}
_OF_POLICIES: Mapping[str, Callable[[Grid], Watcher]] = {
    "budgets": BudgetsWatcher,
    "recall": RecallWatcher,
    "loss": LossWatcher,
}
_KINDS = ("png", "svg", "pdf")
_TOKENS = 4096
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
    """The subcommand's options.

    Args:
        parser: the subcommand's.
    """
    count = argument(whole, least=1)
    add = parser.add_argument_group("what is looked at").add_argument
    known = "a name from `jaxkv models`, a Hugging Face folder, a .gguf file or a hub id (default: %(default)s)"
    add("--model", default="smollm2-135m-instruct", metavar="NAME", help=known)
    add("--dtype", help="float32, bfloat16 or float16 (default: bfloat16 on a GPU, float32 on a CPU)")
    add("--text", nargs="+", required=True, metavar="FILE", help="UTF-8 texts, long ones; - for stdin")
    usual = f"of each text at most (default: {_TOKENS}, or what the model was made for)"
    add("--tokens", type=count, metavar="N", help=usual)
    add("--what", default=",".join(FIGURES), metavar="A,B", help="figures (default: %(default)s)")
    add = parser.add_argument_group("policies, for budgets, recall and loss").add_argument
    uniform = "of loss: uniform, safeguarded and adaptive heads"
    add("--policies", metavar="A,B", help=f"with options behind a name (default: {_USUAL}; {uniform})")
    rows = "rows per kv head and layer, or shares of a prompt (default: %(default)s)"
    add("--budgets", default="64,128,256", metavar="N,N", help=rows)
    behind = "last tokens of each text, which policies do not see (default: %(default)s)"
    add("--following", type=count, default=FOLLOWING, metavar="N", help=behind)
    add("--seed", type=argument(seed), default=0, metavar="N", help="of policies that draw (default: %(default)s)")
    add = parser.add_argument_group("output").add_argument
    add("--out", metavar="DIR", help="write arrays (.npz), pictures and analysis.json there")
    kinds = f"of pictures: {', '.join(_KINDS)}, or none; they need jaxkv[plots] (default: %(default)s)"
    add("--pictures", default="png,svg", metavar="A,B", help=kinds)
    add("--json", action="store_true", help="print JSON instead of tables")


def run_analyze(options: argparse.Namespace) -> int:
    """Looks at texts, prints and writes.

    Args:
        options: of `add_analyze_options`.

    Returns:
        The exit code, 0.

    Raises:
        ValueError: for options that cannot be honoured, before the model is fetched and loaded where that can be told.
        ImportError: for pictures without matplotlib, likewise.
        OSError: where a file could not be written; the tables are then on stdout.
    """
    require_model(options.model)
    names = _listed(options.what, "--what", FIGURES)
    budgets = budgets_of(options.budgets)
    policies = _policies(_USUAL if options.policies is None else options.policies)
    given = {"loss": ALLOCATIONS} if options.policies is None else {}
    of_policies = bool(set(names) & set(_OF_POLICIES))
    require(bool(budgets) or not of_policies, "--budgets", options.budgets, "give one or more, such as 64,128,0.2")
    _watchers(names, lambda name: checked(given.get(name, policies), budgets))
    kinds = () if options.pictures == "none" else _listed(options.pictures, "--pictures", _KINDS)
    folder = None if options.out is None else _folder(options.out, bool(kinds))
    texts = [_text(name) for name in options.text]
    enable_compilation_cache()
    params = load(options.model, dtype=options.dtype)
    watchers = _watchers(names, lambda name: grid(params, given.get(name, policies), budgets))
    following = options.following if of_policies else 0
    ids, had = _ids(params, options, texts, following)
    key = random_key(options.seed)

    def told(at: int, tokens: int) -> None:
        cut = f"the first {tokens} of {had[at]}" if tokens < had[at] else str(tokens)
        to_stderr(f"jaxkv: text {at + 1} of {len(ids)}, {cut} tokens")

    found = watch(params, ids, watchers, following=following, key=key, begin=told)
    figures: dict[str, Figure] = dict(zip(names, found, strict=True))
    read = zip(options.text, ids, had, strict=True)
    said = [{"file": name, "tokens": len(each), "of": tokens} for name, each, tokens in read]
    settings = {"model": params.name, "dtype": str(params.dtype), "following": following, "seed": options.seed}
    tables = _records(figures)
    record = {"settings": settings, "texts": said, "figures": tables}
    to_stdout(json.dumps(record, indent=2) if options.json else _tables(tables))
    if folder is not None:
        _write(folder, figures, record, kinds)
    return 0


def _watchers(names: Sequence[str], of: Callable[[str], Grid]) -> list[Watcher]:
    """Who looks for each figure; `of` says with what policies."""
    return [_OF_MODELS[name]() if name in _OF_MODELS else _OF_POLICIES[name](of(name)) for name in names]


def _listed(given: str, flag: str, known: Any) -> list[str]:
    """Names with commas between them, each once."""
    names = list(dict.fromkeys(word.strip() for word in given.split(",") if word.strip()))
    odd = [name for name in names if name not in known]
    require(bool(names) and not odd, flag, ",".join(odd) or given, f"give some of {', '.join(known)}")
    return names


def _policies(given: str) -> dict[str, PolicyLike]:
    """Policies as the command line writes them, by what was written."""
    made: dict[str, PolicyLike] = {}
    for each in spelled(given):
        require(not each.sized, "--policies", each.text, "budgets are the same for all: give --budgets")
        made[each.text] = each.policy()
    return made


def _folder(given: str, pictures: bool) -> Path:
    """Where files go, refused before the work if they cannot."""
    if pictures:
        drawing()
    folder = Path(os.path.expanduser(given))
    require(not os.path.lexists(folder) or folder.is_dir(), "--out", given, "it is no folder: give another")
    new = [each for each in (folder, *folder.parents) if not os.path.exists(each)]
    try:
        _make(folder)
        require(os.access(folder, os.W_OK | os.X_OK), "--out", given, "the folder cannot be written to: give another")
    finally:
        # Made once more with the first file: a run that is refused or ended leaves nothing.
        for each in new:
            with contextlib.suppress(OSError):
                each.rmdir()
    return folder


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"--out={folder}: {error.strerror or error}; give another folder") from error


def _text(name: str) -> str:
    text = read_text(name, "--text")
    require(bool(text.strip()), "--text", name, "it is empty: give a long text")
    return text


def _ids(
    params: LanguageModel, options: argparse.Namespace, texts: list[str], following: int
) -> tuple[list[list[int]], list[int]]:
    """The texts as ids, cut to what was asked for; and how many each had."""
    remedy = "the checkpoint has no tokenizer: use jaxkv.analysis on ids"
    require(params.text is not None, "--model", options.model, remedy)
    assert params.text is not None
    longest = params.config.max_positions
    tokens = min(_TOKENS, longest) if options.tokens is None else options.tokens
    require(tokens <= longest, "--tokens", tokens, f"the model was made for {longest} at most")
    every = [params.text.encode(text, bos=True) for text in texts]
    ids = [each[:tokens] for each in every]
    for name, each in zip(options.text, ids, strict=True):
        behind = f", of which {following} follow the prompt" if following else ""
        remedy = f"it has {len(each)} tokens{behind}: give a longer text"
        require(len(each) > following + 1, "--text", name, remedy)
    return ids, [len(each) for each in every]


def _records(figures: Mapping[str, Figure]) -> dict[str, list[dict[str, Any]]]:
    """The tables, as JSON has them."""
    return {name: [_plain(each) for each in figure.records()] for name, figure in figures.items()}


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: a spread over one text is not known."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }


def _tables(tables: Mapping[str, list[dict[str, Any]]]) -> str:
    return "\n\n".join(f"{name}: {FIGURES[name]}\n{_table(records)}" for name, records in tables.items())


def _table(records: list[dict[str, Any]]) -> str:
    if not records:
        return "(nothing to say: a single layer)"
    lines = [list(records[0]), *([_cell(value) for value in each.values()] for each in records)]
    wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
    words = [isinstance(value, str) for value in records[0].values()]
    put = lambda cell, width, word: cell.ljust(width) if word else cell.rjust(width)  # noqa: E731
    return "\n".join("  ".join(map(put, line, wide, words)).rstrip() for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return "-" if value is None else str(value)


def _write(folder: Path, figures: Mapping[str, Figure], record: dict[str, Any], kinds: Sequence[str]) -> None:
    """Each file whole or not at all, the record last: it says that the others are there."""
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
    Target(flag="--out", name=str(path)).write(data)

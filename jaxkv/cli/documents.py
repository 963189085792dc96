"""`jaxkv compress` saves a document's compressed cache; `jaxkv ask` loads it and answers questions about it."""

import argparse
import dataclasses
import os
import sys
from pathlib import Path

from jaxkv._errors import require
from jaxkv.arguments import random_key
from jaxkv.attention import named
from jaxkv.cache.saved import load_cache
from jaxkv.cli.files import read_long_text
from jaxkv.cli.generating import add_drawing_options, json_text, require_text, sampling_from
from jaxkv.cli.models import (
    add_dtype_option,
    add_implementation_option,
    add_model_option,
    add_weights_option,
    require_model,
)
from jaxkv.cli.numbers import argument, seed
from jaxkv.cli.policy_options import add_policy_options, policy_from
from jaxkv.cli.streams import to_stderr, to_stdout
from jaxkv.generation import generate, prefill
from jaxkv.loading import load
from jaxkv.machine.compilation import enable_compilation_cache
from jaxkv.planning.plans import policy_name

DOCUMENT_NOTES = """\
`jaxkv compress` reads a document once and saves its compressed cache to a folder; `jaxkv ask` answers questions from
that folder, in any later process with the same model. The questions are not known when the document is compressed:
choose a policy that does not go by the prompt's end, such as kvzip, keydiff or defensivekv.

examples:
  keep a quarter of a report's cache, and ask it two questions:
    jaxkv compress report.txt --policy kvzip --budget 0.25 --out report.cache
    jaxkv ask report.cache "Who is the director?" "What did it cost?"

"""


def add_compress_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jaxkv compress` to its parser."""
    add = parser.add_argument_group("model and document").add_argument
    add(
        "file",
        metavar="FILE",
        help="a UTF-8 text file with the document, 64 MiB at most; - for stdin",
    )
    add("--out", required=True, metavar="FOLDER", help="folder to make for the compressed cache")
    _add_model_options(parser)
    add("--raw", action="store_true", help="plain text: no chat template")
    add(
        "--seed",
        type=argument(seed),
        default=0,
        metavar="N",
        help="of policies that draw (default: %(default)s)",
    )
    add_policy_options(parser)


def add_ask_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jaxkv ask` to its parser."""
    add = parser.add_argument_group("document and questions").add_argument
    add(
        "folder",
        metavar="FOLDER",
        help="what `jaxkv compress`, or `cache.save` in Python, has written",
    )
    some = "a question; several are answered side by side, by programs that are compiled for each number of questions"
    add("questions", nargs="+", metavar="QUESTION", help=some)
    _add_model_options(parser)
    add_drawing_options(parser)
    parser.add_argument_group("output").add_argument(
        "--json",
        action="store_true",
        help="a list on stdout: question, text, token ids, reason of the end",
    )


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--model`, `--dtype`, `--weights` and `--implementation` to a command's parser."""
    add = parser.add_argument_group("model").add_argument
    add_model_option(add)
    add_dtype_option(add)
    add_weights_option(add)
    add_implementation_option(add)


def run_compress(options: argparse.Namespace) -> int:
    """Runs `jaxkv compress`: prefills the document, saves its cache; prints figures to stderr; returns exit code 0."""
    policy, implementation = policy_from(options), named(options.implementation)
    require_model(options.model)
    out = Path(os.path.expanduser(options.out))
    require(
        not os.path.lexists(out),
        "--out",
        options.out,
        "it is there: give a new folder, or remove it",
    )
    require(
        out.parent.is_dir(), "--out", options.out, f"there is no folder {out.parent}: make it first"
    )
    text = read_long_text(options.file, "FILE").strip()
    enable_compilation_cache()
    model = load(options.model, dtype=options.dtype, weights=options.weights)
    key = random_key(options.seed)
    cache = prefill(
        model, text, policy=policy, key=key, raw=options.raw, implementation=implementation
    )
    cache.save(out)
    rows = f"{cache.kept.mean():,.0f} of {int(cache.seen.max()):,} rows per kv head"
    sizes = f"{cache.kept_nbytes / 1e6:,.1f} of {cache.full_nbytes / 1e6:,.1f} MB"
    to_stderr(f"jaxkv: {options.out}: {rows}, {sizes}, {policy_name(policy)}")
    return 0


def run_ask(options: argparse.Namespace) -> int:
    """Runs `jaxkv ask`: loads a saved cache, answers all questions on top of it, prints them; returns exit code 0."""
    sampling, implementation = sampling_from(options), named(options.implementation)
    require_model(options.model)
    require_text("QUESTION", options.questions)
    require_text("--stop", options.stop or ())
    require(all(map(str.strip, options.questions)), "QUESTION", "", "it has no text: ask something")
    enable_compilation_cache()
    # Before the minutes that a large model takes to load.
    cache = load_cache(options.folder)
    remedy = "it is of several documents: ask them in Python, jaxkv.generate(params, questions, cache=cache)"
    require(cache.batch == 1, "FOLDER", options.folder, remedy)
    model = load(options.model, dtype=options.dtype, weights=options.weights)
    answers = generate(
        model,
        options.questions,
        cache=cache,
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
        stop=options.stop or (),
        key=random_key(options.seed),
        implementation=implementation,
    )
    stats = answers.stats
    told = f"{len(options.questions)} questions, read in {stats.prefill_seconds:.1f} s"
    told += f"; {stats.new_tokens} tokens, {stats.decode_tokens_per_second:.1f} a second"
    to_stderr(f"jaxkv: {told}; {stats.compile_seconds:.1f} s of these compiling")
    if options.json:
        found = [
            {"question": question, **dataclasses.asdict(answer), "tokens": answer.tokens.tolist()}
            for question, answer in zip(options.questions, answers, strict=True)
        ]
        to_stdout(json_text(found, getattr(sys.stdout, "encoding", None) or "utf-8"))
        return 0
    for question, answer in zip(options.questions, answers, strict=True):
        text = " ".join(map(str, answer.tokens.tolist())) if answer.text is None else answer.text
        to_stdout(
            text if len(options.questions) == 1 else f"{question}\n  {' '.join(text.split())}"
        )
    return 0

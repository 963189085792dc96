"""`jaxkv batch`: checks its options, loads the model, and answers a file of requests into a file of answers."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxkv._errors import require
from jaxkv.attention import named
from jaxkv.cli.extras import needing
from jaxkv.cli.files import Target
from jaxkv.cli.models import (
    add_dtype_option,
    add_implementation_option,
    add_model_option,
    add_weights_option,
    require_model,
)
from jaxkv.cli.numbers import argument, natural, positive
from jaxkv.cli.policy_options import add_policy_options, policy_from
from jaxkv.cli.serving import slots_from
from jaxkv.cli.streams import to_stderr
from jaxkv.serving.recipe import Recipe

BATCH_NOTES = """\
Each line of FILE is a request in OpenAI's batch format, each line of the output an answer, in the same order. A line
that cannot be read, or is refused, has an error there. A run that was ended goes on with the same command: answers lie
in OUT.jsonl.partial until all are there. Where OUT.jsonl is there, it keeps its answers, and other requests are asked.

a line:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0}}

examples:
  answer a file of requests:
    jaxkv batch requests.jsonl -o answers.jsonl --model smollm2-135m-instruct --policy adakv --budget 1024

  by all machines of a Ray cluster:
    jaxkv batch requests.jsonl -o answers.jsonl --policy adakv --budget 1024 --ray --ray-address auto
"""


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jaxkv batch` to its parser."""
    count = argument(positive)
    add = parser.add_argument_group("files").add_argument
    add("file", metavar="FILE", help="requests, one JSON object a line")
    add("-o", "--out", required=True, metavar="FILE", help="answers, one JSON object a line")
    add = parser.add_argument_group("more machines").add_argument
    add(
        "--ray", action="store_true", help="answer by workers of a Ray cluster, each with an engine"
    )
    about = "the cluster; auto for the one that runs here (default: RAY_ADDRESS, or one of this machine alone)"
    add("--ray-address", metavar="HOST:PORT", help=about)
    about = "number of engines (default: as many as the cluster's GPUs allow, else one for each machine)"
    add("--workers", type=count, metavar="N", help=about)
    add = parser.add_argument_group("model").add_argument
    add_model_option(add)
    add_dtype_option(add)
    add_weights_option(add)
    add(
        "--served-model-name",
        metavar="NAME",
        help="the model's name in requests (default: what --model says)",
    )
    add_implementation_option(add)
    add(
        "--mesh",
        metavar="DxM",
        help="devices to run on, such as 1x8: slots over D, kv heads over M",
    )
    add = parser.add_argument_group("slots").add_argument
    add(
        "--slots",
        default="auto",
        metavar="N",
        help="requests answered at the same time; auto: as many as fit",
    )
    about = "most tokens of a prompt (default: 4096, if the model can)"
    add("--max-prompt-tokens", type=count, metavar="N", help=about)
    about = "most tokens of an answer (default: %(default)s)"
    add("--max-new-tokens", type=count, default=512, metavar="N", help=about)
    about = "most tokens of a question on a document; 0: no documents (default: %(default)s)"
    add("--max-question-tokens", type=argument(natural), default=0, metavar="N", help=about)
    add(
        "--documents",
        metavar="FOLDER",
        help="folder of documents of `jaxkv serve` that requests may ask",
    )
    add_policy_options(parser)


def run_batch(options: argparse.Namespace) -> int:
    """Runs `jaxkv batch`: answers the requests that earlier runs left and writes all answers; returns exit code 0."""
    with needing("serve", "batches need"):
        from jaxkv.serving.batch_answers import QUEUE
        from jaxkv.serving.batch_files import Ledger, alone
    recipe = _recipe(options, queue=QUEUE)
    requests, out = _files(options)
    name = options.served_model_name or options.model
    # A folder is the same model however its path is written.
    path = os.path.expanduser(options.model)
    model = os.path.realpath(path) if os.path.exists(path) else options.model
    about = [model, options.dtype, repr(recipe.options["policy"]), options.max_new_tokens]

    for flag, given in (("--ray-address", options.ray_address), ("--workers", options.workers)):
        require(
            given is None or options.ray,
            flag,
            given,
            "it says something of --ray: give that as well",
        )

    with alone(out):
        ledger = Ledger(requests, out, json.dumps(about))
        require(ledger.lines > 0, "FILE", options.file, "it is empty: give a request a line")
        bad = _answered(ledger, lambda: _answering(options, recipe, name))
    refused = f", {bad} of them without status 200" if bad else ""
    to_stderr(f"jaxkv: {ledger.lines} lines in {options.out}{refused}")
    return 0


def _answering(options: argparse.Namespace, recipe: Recipe, name: str) -> Any:
    """Context manager yielding a function from request lines to answers: by an engine here, or by Ray workers."""
    if not options.ray:
        return _here(recipe, name)
    with needing("ray", "--ray needs"):
        from jaxkv.serving.ray_batches import cluster_answers
    return cluster_answers(recipe, name=name, address=options.ray_address, workers=options.workers)


@contextlib.contextmanager
def _here(recipe: Recipe, name: str) -> Iterator[Callable[..., Any]]:
    """Context manager that makes an engine in this process and yields its function from request lines to answers."""
    from jaxkv.serving.batch_answers import Batch

    with recipe.made() as engine:
        to_stderr(f"jaxkv: {name}, {engine.stats.slots} slots, {recipe.options['policy']}")
        yield Batch(engine, name=name).answers


def _answered(ledger: Any, answering: Callable[[], Any]) -> int:
    """Answers the lines a ledger has left, with a progress bar, writes the output; returns how many lack status 200."""
    if ledger.kept:
        to_stderr(f"jaxkv: {ledger.kept} of {ledger.lines} lines are answered already")
    try:
        if ledger.kept < ledger.lines:
            shown = sys.stderr.isatty()
            bar = tqdm(
                total=ledger.lines,
                initial=ledger.kept,
                unit=" lines",
                disable=not shown,
                file=sys.stderr,
            )
            with bar, answering() as answers:
                for line, answer in answers(ledger.left()):
                    ledger.add(line, answer)
                    bar.update()
        return ledger.finish()
    finally:
        ledger.close()


def _files(options: argparse.Namespace) -> tuple[Path, Path]:
    """Paths (requests, answers) of the options; ValueError unless one is a readable file and the other writable."""
    requests = Path(os.path.expanduser(options.file))
    remedy = "give a file that can be read; it is read twice, so that no pipe will do"
    require(requests.is_file() and os.access(requests, os.R_OK), "FILE", options.file, remedy)
    Target(flag="-o", name=options.out).check({"FILE": options.file})
    out = Path(os.path.realpath(os.path.expanduser(options.out)))
    require(
        not out.exists() or out.is_file(),
        "-o",
        options.out,
        "it is a pipe or a device: give a file",
    )
    for end in (".partial", ".lock"):
        beside = out.with_name(out.name + end)
        free = not (beside.exists() and beside.samefile(requests))
        require(
            free,
            "-o",
            options.out,
            f"{beside.name} beside it, which this run would write, is FILE: give another",
        )
    return requests, out


def _recipe(options: argparse.Namespace, *, queue: int) -> Recipe:
    """`Recipe` (model, dtype, mesh and engine's arguments) made from parsed options; ValueError for bad options."""
    require_model(options.model)
    engine = {
        "policy": policy_from(options),
        "slots": slots_from(options.slots),
        "max_prompt_tokens": options.max_prompt_tokens,
        "max_new_tokens": options.max_new_tokens,
        "max_question_tokens": options.max_question_tokens,
        "queue": queue,
        "documents": options.documents,
        "implementation": named(options.implementation),
    }
    model = {"model": options.model, "dtype": options.dtype, "weights": options.weights}
    return Recipe(**model, mesh=options.mesh, options=engine)

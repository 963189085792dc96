"""`jaxkv eval`: checks its options, then loads the model, runs a task under policies, prints and draws."""

import argparse
import dataclasses
import functools
import json

from jaxkv._errors import require
from jaxkv.cli.models import add_dtype_option, add_model_option, add_weights_option, require_model
from jaxkv.cli.numbers import argument, budgets, natural, positive, seed
from jaxkv.cli.policy_rows import rows_of
from jaxkv.cli.streams import to_stderr, to_stdout
from jaxkv.cli.task_options import add_task_options, task_from
from jaxkv.evals.arguments import require_how
from jaxkv.evals.page import report
from jaxkv.evals.results import require_folder
from jaxkv.evals.runs import evaluate
from jaxkv.evals.task import TASKS, How, Task
from jaxkv.loading import load
from jaxkv.machine.compilation import enable_compilation_cache
from jaxkv.policies.registry import documented
from jaxkv.sharding.sizes import mesh_of

NOTES = """\
A run that was ended goes on with the same command, and ends with the same lines. In the folder: results.jsonl,
what was asked, and a line for each sample under each policy; table.md; pictures where matplotlib is there.

examples:
  two policies at three budgets, and what they are held against:
    jaxkv eval 2stageretr --model smollm2-135m-instruct --policies full,snapkv,adakv --budgets 64,128,0.2 --out found

  the context compressed before the question is seen:
    jaxkv eval 2stageretr --policies snapkv,adakv --budgets 128 --question-agnostic --out agnostic

  on two machines, then together:
    jaxkv eval 2stageretr --policies snapkv --budgets 128 --batch 4 --shard 0/2 --out part0
    jaxkv eval 2stageretr --policies snapkv --budgets 128 --batch 4 --shard 1/2 --out part1
    jaxkv eval report part0 part1

  a page to look at and to send:
    jaxkv eval report found
"""


def add_eval_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--list` and the subcommands of `jaxkv eval` to its parser: each task, and report."""
    parser.add_argument("--list", action="store_true", help="print the tasks with their settings")
    commands = parser.add_subparsers(title="tasks, and what is done after them", metavar="TASK")
    for name, cls in TASKS.items():
        about = _described(cls).replace("%", "%%")
        one = commands.add_parser(name, help=about.rstrip("."), description=about)
        _add_run_options(one, cls)
        add_task_options(one, cls)
        one.set_defaults(run=functools.partial(run_task, cls=cls))
    reporting = commands.add_parser("report", help="write an evaluation as one HTML page")
    about = "of one evaluation: its shards, or further policies"
    reporting.add_argument("folders", nargs="+", metavar="DIR", help=about)
    about = "of each policy (default: 200)"
    reporting.add_argument(
        "--samples", type=argument(natural), default=200, metavar="N", help=about
    )
    reporting.add_argument("--out", metavar="FILE", help="default: report.html in the first folder")
    reporting.set_defaults(run=run_report)


def _add_run_options(parser: argparse.ArgumentParser, cls: type[Task]) -> None:
    """Adds the options that all tasks share (model, policies, folder, batch, mesh) to one task's parser."""
    add = parser.add_argument_group("what is run").add_argument
    add_model_option(add)
    about = "of `jaxkv policies`, with commas between them; options go behind a name: 'snapkv,adakv --base pyramidkv'"
    add("--policies", required=True, metavar="A,B", help=about)
    about = "rows per kv head and layer, shares of each prompt, or bytes of its cache: 64,0.2,16MB; for policies whose "
    about += "options say none"
    add("--budgets", default="", metavar="N,N", help=about)
    add("--out", required=True, metavar="DIR", help="the folder, made where it is not there")
    if cls.asks:
        agnostic = "compress the context before the question is seen"
        add("--question-agnostic", action="store_true", help=agnostic)
    add("--raw", action="store_true", help="plain text: no chat template")
    about = "of samples that are drawn, and of policies that draw (default: the task's)"
    add("--seed", type=argument(seed), metavar="N", help=about)
    add = parser.add_argument_group("where it is run").add_argument
    about = "samples at a time (default: %(default)s)"
    add("--batch", type=argument(positive), default=8, metavar="N", help=about)
    about = "every N-th batch from the I-th on, from 0; `jaxkv eval report` takes all folders"
    add("--shard", metavar="I/N", help=about)
    add("--mesh", metavar="DxM", help="devices by data and model, such as 1x8 (default: one)")
    add_dtype_option(add)
    add_weights_option(add)
    add("--json", action="store_true", help="print JSON instead of the table")


def run_task(options: argparse.Namespace, cls: type[Task]) -> int:
    """Runs an evaluation task under policies, by options; writes its folder, prints table or JSON; returns exit code 0.

    Bad options are refused before the model is loaded.
    """
    task = task_from(options, cls)
    policies = rows_of(options.policies, budgets(options.budgets))
    agnostic = getattr(options, "question_agnostic", False)
    how = How(agnostic=agnostic, raw=options.raw, seed=options.seed or 0)
    require_how(task, how)
    require_model(options.model)
    shard = None if options.shard is None else _shard(options.shard)
    folder = require_folder(options.out, "--out")
    mesh = None if options.mesh is None else mesh_of(options.mesh)
    enable_compilation_cache()
    params = load(options.model, dtype=options.dtype, weights=options.weights, mesh=mesh)
    done = evaluate(
        params,
        task,
        policies,
        folder,
        how=how,
        batch=options.batch,
        shard=shard,
        mesh=mesh,
        progress=True,
    )
    to_stdout(json.dumps(done.as_dict(), indent=2) if options.json else done.table())
    to_stderr(f"jaxkv: all of it is in {done.folder}")
    return 0


def run_report(options: argparse.Namespace) -> int:
    """Runs `jaxkv eval report`: writes an evaluation's HTML page and prints its path; returns exit code 0."""
    to_stdout(str(report(*options.folders, samples=options.samples, out=options.out)))
    return 0


def print_tasks(options: argparse.Namespace) -> int:
    """Runs `jaxkv eval --list`: prints each task with its settings; returns exit code 0; ValueError without --list."""
    remedy = f"give one of {', '.join(TASKS)}, or report; --list prints what they are"
    require(options.list, "TASK", None, remedy)
    for name, cls in TASKS.items():
        about = documented(cls)
        to_stdout(f"{name}: {_described(cls)}")
        for field in dataclasses.fields(cls):
            to_stdout(f"  {field.name.replace('_', '-'):<14}{about.get(field.name, '')}")
        to_stdout("")
    return 0


def _described(task: type[Task]) -> str:
    """First line of a task's docstring."""
    return (task.__doc__ or "").strip().partition("\n")[0].rstrip()


def _shard(given: str) -> tuple[int, int]:
    """Pair of a shard's index and the number of shards, parsed from text such as 0/4; ValueError for other text."""
    first, slash, count = given.partition("/")
    fine = bool(slash) and first.isdecimal() and count.isdecimal() and int(first) < int(count)
    require(fine, "--shard", given, "give I/N, such as 0/4 for the first of four parts")
    return int(first), int(count)

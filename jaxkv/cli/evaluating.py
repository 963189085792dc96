"""`jaxkv eval`: validates its options, loads the model, runs a task under policies, prints and plots results."""

import argparse
import dataclasses
import functools
import json
from typing import Annotated

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.cli.models import ModelLoadingOptions
from jaxkv.cli.options import (
    ArgumentSpec,
    Count,
    File,
    Folder,
    Mesh,
    Natural,
    Seed,
    add_dataclass_options,
    build_dataclass_from_options,
    configure_command_parser,
    make_comma_list_spec,
    parse_budget,
    parse_integer,
    parse_policy_list,
)
from jaxkv.cli.outputs import write_to_stderr, write_to_stdout
from jaxkv.evals.html_report import report
from jaxkv.evals.results import require_evaluation_folder
from jaxkv.evals.runs import evaluate, require_questions
from jaxkv.evals.task import TASKS, EvaluationTask, How
from jaxkv.policies import Policy
from jaxkv.policies.registry import parse_field_descriptions
from jaxkv.sharding.mesh_argument import make_mesh_from_text

NOTES = """\
To resume a run, repeat the command; the results are the same. The folder holds results.jsonl, with the settings and a
line per sample and policy, table.md, and pictures if matplotlib is installed.

examples:
  two policies at three budgets, compared with the full cache:
    jaxkv eval 2stageretr --model smollm2-135m-instruct --policies full,snapkv,adakv --budgets 64,128,0.2 --out found

  compress the context before the question is seen:
    jaxkv eval 2stageretr --policies snapkv,adakv --budgets 128 --question-agnostic --out agnostic

  on two machines, then combined:
    jaxkv eval 2stageretr --policies snapkv --budgets 128 --batch 4 --shard 0/2 --out part0
    jaxkv eval 2stageretr --policies snapkv --budgets 128 --batch 4 --shard 1/2 --out part1
    jaxkv eval report part0 part1

  an HTML page of the results:
    jaxkv eval report found
"""
_TASK = "task "


def _parse_shard(text: str) -> tuple[int, int]:
    """Parse the shard's index and the number of shards from text such as 0/4; ValueError for other text."""
    first, _, count = text.partition("/")
    return parse_integer(first, least=0, most=parse_integer(count) - 1), parse_integer(count)


@frozen_dataclass
class EvaluationOptions(ModelLoadingOptions):
    """Options of `jaxkv eval TASK`: model, policies, budgets, output folder, batch, shard, mesh.

    Attributes:
        policies: names from `jaxkv policies`, separated by commas, each with options: 'snapkv,adakv --base
            pyramidkv'.
        budgets: entries per kv head and layer, shares of each prompt, or bytes of its cache: 64,0.2,16MB; for policies
            without a budget of their own.
        out: folder of the results, created if missing.
        question_agnostic: compress the context before the question is seen.
        raw: treat prompts as plain text, without a chat template.
        seed: seed of random samples, and of policies that use random numbers (default: the task's).
        batch: number of samples per batch.
        shard: run every N-th batch from the I-th on, from 0; `jaxkv eval report` combines the folders.
        mesh: devices by data and model, such as 1x8 (default: one device).
        json: print JSON instead of the table.
    """

    policies: Annotated[str, ArgumentSpec("A,B")]
    budgets: Annotated[tuple[int | float | str, ...], make_comma_list_spec(parse_budget)] = ()
    out: Folder
    question_agnostic: bool = False
    raw: bool = False
    seed: Seed | None = None
    batch: Count = 8
    shard: Annotated[tuple[int, int], ArgumentSpec("I/N", _parse_shard)] | None = None
    mesh: Mesh | None = None
    json: bool = False

    def run_task(self, task: EvaluationTask) -> None:
        """Evaluate policies on a task; write the results to a folder, and print a table or JSON.

        Invalid options are rejected before the model is loaded.
        """
        policies = self._combine_policies_and_budgets()
        how = How(agnostic=self.question_agnostic, raw=self.raw, seed=self.seed or 0)
        require_questions(task, how)
        folder = require_evaluation_folder(self.out, "--out")
        mesh = make_mesh_from_text(self.mesh)
        done = evaluate(
            self.load_model(mesh=mesh),
            task,
            policies,
            folder,
            how=how,
            batch=self.batch,
            shard=self.shard,
            mesh=mesh,
            progress=True,
        )
        write_to_stdout(json.dumps(done.as_dict(), indent=2) if self.json else done.table())
        write_to_stderr(f"jaxkv: the results are in {done.folder}")

    def _combine_policies_and_budgets(self) -> dict[str, Policy]:
        """Return policies by row name: each of --policies per --budgets value, once if it needs none."""
        rows: dict[str, Policy] = {}
        for each in parse_policy_list(self.policies, "--policies"):
            if each.has_unset_budget:
                remedy = f"{each.name} needs a budget: use entries or a share, such as 128 or 0.2"
                require(bool(self.budgets), "--budgets", None, remedy)
                rows |= {
                    f"{each.text}@{budget}": each.build_with_budget(budget)
                    for budget in self.budgets
                }
            else:
                rows[each.text] = each.build_policy()
        return rows


@frozen_dataclass
class EvalReportCommand:
    """The command `jaxkv eval report` and its options: write an evaluation as an HTML page.

    Attributes:
        folders: folders of one evaluation: its shards, or further policies.
        samples: number of samples per policy.
        out: file of the page (default: report.html in the first folder).
    """

    folders: Annotated[tuple[str, ...], ArgumentSpec("DIR", tuple, "extend", place=True)]
    samples: Natural = 200
    out: File | None = None

    def run_command(self) -> None:
        """Write the evaluation in these folders as one HTML page, and print the page's path."""
        write_to_stdout(str(report(*self.folders, samples=self.samples, out=self.out)))


@frozen_dataclass
class ListTasksCommand:
    """`jaxkv eval` without a task: print all tasks and their settings with --list, else raise ValueError.

    Attributes:
        list: print the tasks and their settings.
    """

    list: bool = False

    @staticmethod
    def add_task_subcommands(parser: argparse.ArgumentParser) -> None:
        """Add the subcommands of `jaxkv eval` to its parser: one per task, and report."""
        commands = parser.add_subparsers(title="tasks and report", metavar="TASK")
        for name, cls in TASKS.items():
            about = _get_docstring_summary(cls).replace("%", "%%")
            one = commands.add_parser(name, help=about.rstrip("."), description=about)
            add_dataclass_options(one, EvaluationOptions)
            add_dataclass_options(one, cls, _TASK, leave=["seed"])
            one.set_defaults(run=functools.partial(_run_task_from_options, cls))
        reporting = commands.add_parser("report", help="write an evaluation as one HTML page")
        configure_command_parser(reporting, EvalReportCommand)

    def run_command(self) -> None:
        """Print each evaluation task with its settings if --list is given, else raise ValueError."""
        remedy = f"no task: use one of {', '.join(TASKS)}, or report; --list describes them"
        require(self.list, "TASK", None, remedy)
        for name, cls in TASKS.items():
            about = parse_field_descriptions(cls)
            write_to_stdout(f"{name}: {_get_docstring_summary(cls)}")
            for field in dataclasses.fields(cls):
                write_to_stdout(f"  {field.name.replace('_', '-'):<14}{about.get(field.name, '')}")
            write_to_stdout("")


def build_task(cls: type[EvaluationTask], options: argparse.Namespace) -> EvaluationTask:
    """Build an `EvaluationTask` of class `cls` from argparse's parsed options, with the run's seed if given."""
    seed = build_dataclass_from_options(EvaluationOptions, options).seed
    more = {} if seed is None or not hasattr(cls, "seed") else {"seed": seed}
    return build_dataclass_from_options(cls, options, _TASK, **more)


def _run_task_from_options(cls: type[EvaluationTask], options: argparse.Namespace) -> None:
    """Build a task of class `cls` from parsed options, and run it under the policies of the options."""
    build_dataclass_from_options(EvaluationOptions, options).run_task(build_task(cls, options))


def _get_docstring_summary(task: type[EvaluationTask]) -> str:
    """Return the first line of a task class's docstring, or an empty string without one."""
    return (task.__doc__ or "").strip().partition("\n")[0].rstrip()

"""`jaxkv eval`: validates its options, loads the model, runs a task under policies, prints and plots results."""

import argparse
import dataclasses
import functools
import json
from typing import Annotated

from jaxkv._errors import require
from jaxkv.cli.models import Loaded
from jaxkv.cli.options import (
    Count,
    File,
    Folder,
    Mesh,
    Natural,
    Seed,
    Word,
    add_command,
    add_options,
    budget,
    commas,
    made,
    spelled,
    whole,
)
from jaxkv.cli.outputs import to_stderr, to_stdout
from jaxkv.evals.html_report import report
from jaxkv.evals.results import require_folder
from jaxkv.evals.runs import evaluate, require_how
from jaxkv.evals.task import TASKS, How, Task
from jaxkv.policies import Policy
from jaxkv.policies.registry import documented
from jaxkv.sharding.mesh_argument import mesh_of

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


def _shard(text: str) -> tuple[int, int]:
    """Parse the index of a shard and the number of shards from text such as 0/4; ValueError for other text."""
    first, _, count = text.partition("/")
    return whole(first, least=0, most=whole(count) - 1), whole(count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions(Loaded):
    """Options of an evaluation: policies, budgets, folder, batch, shard, mesh.

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

    policies: Annotated[str, Word("A,B")]
    budgets: Annotated[tuple[int | float | str, ...], commas(budget)] = ()
    out: Folder
    question_agnostic: bool = False
    raw: bool = False
    seed: Seed | None = None
    batch: Count = 8
    shard: Annotated[tuple[int, int], Word("I/N", _shard)] | None = None
    mesh: Mesh | None = None
    json: bool = False

    def of(self, task: Task) -> None:
        """Run a task under policies; write its folder, and print a table or JSON.

        Invalid options are rejected before the model is loaded.
        """
        policies = self._rows()
        how = How(agnostic=self.question_agnostic, raw=self.raw, seed=self.seed or 0)
        require_how(task, how)
        folder = require_folder(self.out, "--out")
        mesh = mesh_of(self.mesh)
        done = evaluate(
            self.loaded(mesh=mesh),
            task,
            policies,
            folder,
            how=how,
            batch=self.batch,
            shard=self.shard,
            mesh=mesh,
            progress=True,
        )
        to_stdout(json.dumps(done.as_dict(), indent=2) if self.json else done.table())
        to_stderr(f"jaxkv: the results are in {done.folder}")

    def _rows(self) -> dict[str, Policy]:
        """Return policies by row name of the table: each of `--policies` at each budget, or at its own."""
        rows: dict[str, Policy] = {}
        for each in spelled(self.policies, "--policies"):
            if each.takes_budget:
                remedy = f"{each.name} needs a budget: use entries or a share, such as 128 or 0.2"
                require(bool(self.budgets), "--budgets", None, remedy)
                rows |= {f"{each.text}@{budget}": each.at(budget) for budget in self.budgets}
            else:
                rows[each.text] = each.policy()
        return rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """`jaxkv eval report`.

    Attributes:
        folders: folders of one evaluation: its shards, or further policies.
        samples: number of samples per policy.
        out: file of the page (default: report.html in the first folder).
    """

    folders: Annotated[tuple[str, ...], Word("DIR", tuple, "extend", place=True)]
    samples: Natural = 200
    out: File | None = None

    def run(self) -> None:
        """Write an evaluation as an HTML page, and print its path."""
        to_stdout(str(report(*self.folders, samples=self.samples, out=self.out)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TasksCommand:
    """`jaxkv eval` without a task: print all tasks and their settings with --list, else raise ValueError.

    Attributes:
        list: print the tasks and their settings.
    """

    list: bool = False

    @staticmethod
    def add(parser: argparse.ArgumentParser) -> None:
        """Add the subcommands of `jaxkv eval` to its parser: each task, and report."""
        commands = parser.add_subparsers(title="tasks and report", metavar="TASK")
        for name, cls in TASKS.items():
            about = _described(cls).replace("%", "%%")
            one = commands.add_parser(name, help=about.rstrip("."), description=about)
            add_options(one, RunOptions)
            add_options(one, cls, _TASK, leave=["seed"])
            one.set_defaults(run=functools.partial(_run, cls))
        reporting = commands.add_parser("report", help="write an evaluation as one HTML page")
        add_command(reporting, Report)

    def run(self) -> None:
        """Print each task with its settings; ValueError without --list."""
        remedy = f"no task: use one of {', '.join(TASKS)}, or report; --list describes them"
        require(self.list, "TASK", None, remedy)
        for name, cls in TASKS.items():
            about = documented(cls)
            to_stdout(f"{name}: {_described(cls)}")
            for field in dataclasses.fields(cls):
                to_stdout(f"  {field.name.replace('_', '-'):<14}{about.get(field.name, '')}")
            to_stdout("")


def task_from(cls: type[Task], options: argparse.Namespace) -> Task:
    """Build a task from the parsed options, with the seed of the run."""
    seed = made(RunOptions, options).seed
    more = {} if seed is None or not hasattr(cls, "seed") else {"seed": seed}
    return made(cls, options, _TASK, **more)


def _run(cls: type[Task], options: argparse.Namespace) -> None:
    """Run a task with the parsed options."""
    made(RunOptions, options).of(task_from(cls, options))


def _described(task: type[Task]) -> str:
    """Return the first line of a task's docstring."""
    return (task.__doc__ or "").strip().partition("\n")[0].rstrip()

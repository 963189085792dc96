"""`jaxkv eval`: checks its options, then loads the model, runs a task under policies, prints and samples."""

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
_TASK = "task "


def _shard(text: str) -> tuple[int, int]:
    """Pair of a shard's index and the number of shards, parsed from text such as 0/4; ValueError for other text."""
    first, _, count = text.partition("/")
    return whole(first, least=0, most=whole(count) - 1), whole(count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions(Loaded):
    """Options of a task's run: policies, budgets, folder, batch, shard, mesh.

    Attributes:
        policies: of `jaxkv policies`, with commas between them; options go behind a name: 'snapkv,adakv --base
            pyramidkv'.
        budgets: entries per kv head and layer, shares of each prompt, or bytes of its cache: 64,0.2,16MB; for policies
            whose options say none.
        out: the folder, made where it is not there.
        question_agnostic: compress the context before the question is seen.
        raw: plain text: no chat template.
        seed: of samples that are sampled, and of policies that use random numbers (default: the task's).
        batch: samples at a time.
        shard: every N-th batch from the I-th on, from 0; `jaxkv eval report` takes all folders.
        mesh: devices by data and model, such as 1x8 (default: one).
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
        """Runs a task under policies; writes its folder, prints table or JSON.

        Bad options are rejected before the model is loaded.
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
        to_stderr(f"jaxkv: all of it is in {done.folder}")

    def _rows(self) -> dict[str, Policy]:
        """Dict from row name to policy of the table: each of `--policies` at each budget, or at its own alone."""
        rows: dict[str, Policy] = {}
        for each in spelled(self.policies, "--policies"):
            if each.takes_budget:
                remedy = f"{each.name} keeps a part of each prompt: say which, such as 128 or 0.2"
                require(bool(self.budgets), "--budgets", None, remedy)
                rows |= {f"{each.text}@{budget}": each.at(budget) for budget in self.budgets}
            else:
                rows[each.text] = each.policy()
        return rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """`jaxkv eval report`.

    Attributes:
        folders: of one evaluation: its shards, or further policies.
        samples: of each policy.
        out: the page (default: report.html in the first folder).
    """

    folders: Annotated[tuple[str, ...], Word("DIR", tuple, "extend", place=True)]
    samples: Natural = 200
    out: File | None = None

    def run(self) -> None:
        """Writes an evaluation's HTML page, and prints its path."""
        to_stdout(str(report(*self.folders, samples=self.samples, out=self.out)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TasksCommand:
    """`jaxkv eval` without a task.

    Attributes:
        list: print the tasks with their settings.
    """

    list: bool = False

    @staticmethod
    def add(parser: argparse.ArgumentParser) -> None:
        """Adds the subcommands of `jaxkv eval` to its parser: each task, and report."""
        commands = parser.add_subparsers(title="tasks, and what is done after them", metavar="TASK")
        for name, cls in TASKS.items():
            about = _described(cls).replace("%", "%%")
            one = commands.add_parser(name, help=about.rstrip("."), description=about)
            add_options(one, RunOptions)
            add_options(one, cls, _TASK, leave=["seed"])
            one.set_defaults(run=functools.partial(_run, cls))
        reporting = commands.add_parser("report", help="write an evaluation as one HTML page")
        add_command(reporting, Report)

    def run(self) -> None:
        """Prints each task with its settings; ValueError without --list."""
        remedy = f"give one of {', '.join(TASKS)}, or report; --list prints what they are"
        require(self.list, "TASK", None, remedy)
        for name, cls in TASKS.items():
            about = documented(cls)
            to_stdout(f"{name}: {_described(cls)}")
            for field in dataclasses.fields(cls):
                to_stdout(f"  {field.name.replace('_', '-'):<14}{about.get(field.name, '')}")
            to_stdout("")


def task_from(cls: type[Task], options: argparse.Namespace) -> Task:
    """Task with the settings that the parsed options give, the run's seed among them."""
    seed = made(RunOptions, options).seed
    more = {} if seed is None or not hasattr(cls, "seed") else {"seed": seed}
    return made(cls, options, _TASK, **more)


def _run(cls: type[Task], options: argparse.Namespace) -> None:
    """Runs a task by parsed options."""
    made(RunOptions, options).of(task_from(cls, options))


def _described(task: type[Task]) -> str:
    """First line of a task's docstring."""
    return (task.__doc__ or "").strip().partition("\n")[0].rstrip()

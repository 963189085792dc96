"""`evaluate`: runs every policy over every sample of a task, and appends a line for each to the evaluation's folder."""

import dataclasses
import hashlib
import importlib.metadata
import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from tqdm import tqdm

from jaxkv import _checks as checks
from jaxkv._errors import require
from jaxkv.arguments import validate_model
from jaxkv.checkpoints.whole_files import write_file_atomically
from jaxkv.evals.pictures import PLOTS_MISSING, plot_evaluation
from jaxkv.evals.results import (
    Evaluation,
    EvaluationSettings,
    SampleRecord,
    append_lines,
    dump_json_line,
    lock_folder,
    require_evaluation_folder,
    resume_or_create_results,
)
from jaxkv.evals.task import TASKS, EvaluationTask, How, SampleOutcome, TaskSample
from jaxkv.evals.token_shading import count_keeping_heads
from jaxkv.loading import LanguageModel
from jaxkv.policies.model_policy import resolve_policy_for_model
from jaxkv.policies.policy import Policy
from jaxkv.policies.registry import POLICIES, find_policy_class, takes_budget

# Linux allows a process 65,530 mappings by default; one row of an evaluation adds thousands.
_MOST_MAPPINGS = 30_000
# Rounding errors of summed shares may exceed 1.
_ROUNDING = 1e-6


def evaluate(
    params: LanguageModel,
    task: EvaluationTask | str,
    policies: Mapping[str, Policy | type[Policy] | str | None],
    out: str | os.PathLike[str],
    *,
    how: How | None = None,
    batch: int = 8,
    shard: tuple[int, int] | None = None,
    mesh: Mesh | None = None,
    progress: bool | None = None,
) -> Evaluation:
    """Run policies on a task's samples that folder `out` lacks; write results, table and plots; return an `Evaluation`.

    The same call resumes an interrupted run after its last complete batch, and ends with the same bytes. With further
    policies, it runs only these.

    Args:
        params: from `jaxkv.load`.
        task: a task such as `Ruler(lengths=(4096,))`, or a name of `jaxkv.evals.TASKS` for one with its defaults.
        policies: policies by row of the table; `at_budgets` makes such a dict from names and budgets.
        out: folder to create, for `results.jsonl`, `table.md`, and plots if matplotlib is installed.
        how: settings that belong to no task, such as whether policies see questions; `How()` by default.
        batch: number of samples per batch.
        shard: `(i, n)` runs every n-th batch from the i-th on; other machines run the others in their own folders, and
            `Evaluation.read` and `jaxkv.evals.report` combine them.
        mesh: devices of this process to run on, with the axes "data" and "model".
        progress: True for a progress bar on stderr; by default only if stderr is a terminal.

    Returns:
        The evaluation.

    Raises:
        ValueError: for a folder of another evaluation (with the differences) or one that another process has locked,
            and for invalid settings.
        TypeError: for an argument of the wrong type.
        OSError: if the folder cannot be written, as on a full disk.
    """
    params = validate_model(params, mesh)
    task = resolve_task(task)
    how = How() if how is None else how
    rows = resolve_policies(params, policies)
    folder = require_evaluation_folder(out)
    require_questions(task, how)
    samples = _list_samples(params, task)
    batch = checks.validate_int("batch", batch)
    batches = [range(len(samples))[at : at + batch] for at in range(0, len(samples), batch)]
    if shard is not None:
        fits = 0 <= shard[0] < shard[1] <= len(batches)
        require(
            fits,
            "shard",
            shard,
            f"invalid: use (i, n), i below n, n at most {len(batches)} (batches)",
        )
        batches = batches[shard[0] :: shard[1]]
    run = EvaluationSettings(
        task=get_task_name(task),
        settings=vars(task),
        unit=task.unit,
        higher=task.higher,
        model=params.name,
        fingerprint=params.fingerprint,
        dtype=params.dtype.name,
        **vars(how),
        batch=batch,
        shard=shard,
        samples=len(samples),
        digest=_hash_samples(samples),
        versions={name: importlib.metadata.version(name) for name in ("jaxkv", "jax", "jaxlib")},
        devices=_describe_devices(params),
    )
    with lock_folder(folder):
        there = resume_or_create_results(folder, run)
        for record in there:
            asked = rows.get(record.policy)
            remedy = f"the folder has {record.method} under this name: use another name, or folder"
            same = asked is None or repr(asked) == record.method
            require(same, f"policies[{record.policy!r}]", asked, remedy)
        done = {(record.policy, record.number) for record in there}
        _run_batches(
            _EvaluationJob(params, task, rows, samples, how, run), folder, batches, done, progress
        )
        evaluation = Evaluation.read(folder)
        write_file_atomically(folder / "table.md", (evaluation.table() + "\n").encode())
        if not PLOTS_MISSING:
            for name, data in plot_evaluation(evaluation, ("svg", "png")).items():
                write_file_atomically(folder / name, data)
    return evaluation


class _EvaluationJob(NamedTuple):
    """Validated arguments of `evaluate`, the task's samples, and the `EvaluationSettings` made from them."""

    params: LanguageModel
    task: EvaluationTask
    policies: Mapping[str, Policy]
    samples: Sequence[TaskSample]
    how: How
    run: EvaluationSettings


def _run_batches(
    job: _EvaluationJob,
    folder: Path,
    batches: Sequence[range],
    done: Set[tuple[str, int]],
    progress: bool | None,
) -> None:
    """Run each policy's batches that have samples not `done`; append a line per such sample, with a progress bar.

    Errors get a note that names the batch.
    """
    todo = [(name, part) for name in job.policies for part in batches]
    # None shows the bar only on a terminal.
    disable = None if progress is None else not progress
    # Few lines if stderr is a file.
    interval = 0.1 if sys.stderr.isatty() else 30.0
    bar = tqdm(todo, job.run.task, unit=" batches", disable=disable, mininterval=interval)
    before = None
    for name, part in bar:
        bar.set_postfix_str(name, refresh=False)
        new = [at for at in part if (name, at) not in done]
        if new:
            if before not in (None, name):
                _free_compiled_programs()
            before = name
            batch = [job.samples[at] for at in part]
            try:
                outcomes = dict(zip(part, _run_batch(job, job.policies[name], batch), strict=True))
                records = [_make_record(job, name, at, outcomes[at]) for at in new]
                append_lines(folder, b"".join(dump_json_line(vars(record)) for record in records))
            except Exception as error:
                ids = f"{batch[0].id} to {batch[-1].id}"
                error.add_note(f"{name}, samples {ids}: the same call resumes from there")
                raise


def _run_batch(
    job: _EvaluationJob, policy: Policy, batch: Sequence[TaskSample]
) -> list[SampleOutcome]:
    """Run a batch, filled with copies, or samples singly if the policy uses random numbers; return an outcome each."""
    # Programs are compiled for a batch size: the last batch is filled up with copies of its last sample.
    more = min(job.run.batch, job.run.samples) - len(batch)
    parts = (
        [[one] for one in batch]
        if policy.build_policy_parts().uses_random_key
        else [[*batch, *[batch[-1]] * more]]
    )
    outcomes = []
    for part in parts:
        how = dataclasses.replace(job.how, seed=_seed_for_sample(job, policy, part[0]))
        outcomes += job.task.run(job.params, policy, part, how)
    return outcomes[: len(batch)]


def _seed_for_sample(job: _EvaluationJob, policy: Policy, sample: TaskSample) -> int:
    """Return the run's seed, or a hash of the seed and the sample's id if the policy uses random numbers."""
    return (
        derive_seed(job.how.seed, sample.id)
        if policy.build_policy_parts().uses_random_key
        else job.how.seed
    )


def _make_record(job: _EvaluationJob, name: str, at: int, outcome: SampleOutcome) -> SampleRecord:
    """Make an outcome's `SampleRecord`, sample 0's with kept tokens; ValueError for NaN, inf, shares not in [0, 1]."""
    score = float(outcome.score)
    sample = job.samples[at]
    policy = job.policies[name]
    fits = math.isfinite(score)
    if job.run.unit == "%":
        fits = -_ROUNDING <= score <= 1 + _ROUNDING
        score = min(1.0, max(0.0, score))
    require(
        fits,
        "score",
        outcome.score,
        f"invalid for sample {sample.id}: return a share, or a finite number",
    )
    kept = policy.composed.budget
    ids = [] if at else job.task.list_compressed_ids(job.params, sample, job.how)
    said = {name: getattr(sample, name) for name in ("id", "group", "tags", "question", "answers")}
    return SampleRecord(
        policy=name,
        method=repr(policy),
        budget=None if kept is None else kept.value,
        number=at,
        **said,
        **{**vars(outcome), "score": score},
        held=count_keeping_heads(
            job.params, policy, ids, seed=_seed_for_sample(job, policy, sample)
        )
        if ids
        else None,
    )


def _list_samples(params: LanguageModel, task: EvaluationTask) -> list[TaskSample]:
    """List the task's samples; ValueError if there are none, or two with one id."""
    samples = list(task.samples(params))
    require(
        bool(samples),
        "samples",
        0,
        f"{get_task_name(task)} makes none with its settings: use others",
    )
    (twice, count), *_ = Counter(sample.id for sample in samples).most_common(1)
    require(
        count == 1,
        "samples",
        twice,
        f"{get_task_name(task)} has two samples with this id: make ids unique",
    )
    return samples


def _hash_samples(samples: Sequence[TaskSample]) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of all samples as JSON."""
    return hashlib.sha256(dump_json_line([vars(sample) for sample in samples])).hexdigest()[:16]


def _describe_devices(params: LanguageModel) -> str:
    """Return the kind of device and the mesh's sizes as text, such as "cpu, 1x8"; "cpu, 1" without a mesh."""
    if params.axes is None:
        return f"{jax.devices()[0].device_kind}, 1"
    mesh = params.axes.mesh
    return f"{mesh.devices.flat[0].device_kind}, {'x'.join(map(str, mesh.shape.values()))}"


def _free_compiled_programs() -> None:
    """Clear JAX's compiled programs if the process has over 30,000 memory mappings, as Linux allows only 65,530."""
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MOST_MAPPINGS:
        jax.clear_caches()


def at_budgets(
    names: Iterable[str], budgets: Iterable[int | float | str] = ()
) -> dict[str, Policy]:
    """Return a dict of policies by row name, such as "adakv@128": one per name and budget, or one if without budget.

    Args:
        names: names of registered policies.
        budgets: entries per kv head and layer, shares of each prompt, or bytes of a sequence's cache, such as "64MB".

    Returns:
        Policies by row.

    Raises:
        ValueError: for an unknown name, with the nearest; for a budget that a policy does not support.
    """
    budgets = list(budgets)
    rows = dict[str, Policy]()
    for name in names:
        cls = find_policy_class(name)
        known = next(each for each, one in POLICIES.items() if one is cls)
        if not takes_budget(cls):
            rows[known] = cls()
            continue
        remedy = f"{known} needs a budget: use entries or a share, such as 128 or 0.2"
        require(bool(budgets), "budgets", None, remedy)
        rows |= {f"{known}@{budget}": cls(budget=budget) for budget in budgets}
    return rows


def resolve_task(task: EvaluationTask | str) -> EvaluationTask:
    """Return `task` itself, or the task of that name with default settings; ValueError for an unknown name."""
    if isinstance(task, EvaluationTask):
        return task
    require(task in TASKS, "task", task, f"unknown task: use one of {', '.join(TASKS)}")
    return TASKS[task]()


def get_task_name(task: EvaluationTask) -> str:
    """Return the name under which a task's class is registered, or else the class's name in lower case."""
    cls = type(task)
    return next((name for name, each in TASKS.items() if each is cls), cls.__name__.lower())


def resolve_policies(params: LanguageModel, policies: Mapping[str, Any]) -> dict[str, Policy]:
    """Fit policies, classes or names to the model's layers; return a dict of `Policy` by row name; raise if invalid."""
    require(
        bool(policies),
        "policies",
        policies,
        "no policy: use at least one, under a name such as 'adakv@128'",
    )
    return {
        name: resolve_policy_for_model(
            each,
            field=f"policies[{name!r}]",
            config=params.config,
            filters=params.filter_layers,
            dtype=params.dtype,
        )
        for name, each in policies.items()
    }


def derive_seed(seed: int, name: str) -> int:
    """Hash `seed` and a name such as a sample's id to a 32-bit seed, the same in every process."""
    text = f"{seed} {name}".encode("utf-8", "backslashreplace")
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big")


def require_questions(task: EvaluationTask, how: How) -> None:
    """Raise ValueError for a question-agnostic run (`How.agnostic`) of a task without questions."""
    fits = task.asks or not how.agnostic
    require(fits, "agnostic", how.agnostic, f"{get_task_name(task)} has no questions: leave it out")

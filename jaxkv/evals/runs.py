"""`evaluate`: runs every policy over every sample of a task, and appends a line for each to the evaluation's folder."""

import dataclasses
import hashlib
import importlib.metadata
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from tqdm import tqdm

from jaxkv import _checks as checks
from jaxkv._errors import require
from jaxkv._values import is_whole, plain
from jaxkv.arguments import as_model
from jaxkv.checkpoints.whole_files import write_whole
from jaxkv.evals.arguments import (
    as_rows,
    as_task,
    name_of,
    require_budgets,
    require_how,
    seed_of,
    settings_of,
)
from jaxkv.evals.folder import Lines, locked, require_folder
from jaxkv.evals.kept import add_kept
from jaxkv.evals.pictures import PLOTS_MISSING, draw
from jaxkv.evals.records import RUN, Record, Run, differences, dumped, read_run
from jaxkv.evals.summary import Evaluation
from jaxkv.evals.task import How, Outcome, Sample, Task, tokenizer_of
from jaxkv.loading import LanguageModel
from jaxkv.policies.policy import Method

TABLE = "table.md"
# Of the 65,530 that Linux gives a process by default; one row of an evaluation takes some thousands.
_MOST_MAPPINGS = 30_000
# Shares that were summed up may come out above 1.
_ROUNDING = 1e-6


class Failed(RuntimeError):
    """Raised if a batch could not be run; names its samples and the number of lines written before it."""


def evaluate(
    params: LanguageModel,
    task: Task | str,
    policies: Mapping[str, Method | type[Method] | str | None],
    out: str | os.PathLike[str],
    *,
    how: How | None = None,
    batch: int = 8,
    shard: tuple[int, int] | None = None,
    mesh: Mesh | None = None,
    progress: bool | None = None,
) -> Evaluation:
    """Runs every policy over every sample of a task; writes one line per policy and sample, and returns all results.

    The same call continues a run that was interrupted, after its last complete batch, and ends with the same bytes.
    With further policies, it runs only these.

    Args:
        params: from `jaxkv.load`.
        task: `Ruler(lengths=(4096,))`, say, or a name of `jaxkv.evals.TASKS` for one with its defaults.
        policies: policies by row of the table; `at_budgets` makes such a dict from names and budgets.
        out: folder to make, for `run.json`, `samples.jsonl`, `table.md`, and pictures if matplotlib is installed.
        how: whether policies see questions, and other settings that belong to no task; `How()` by default.
        batch: number of samples that run together.
        shard: `(i, n)` runs every n-th batch from the i-th on; other machines run the others, and `merge` joins them.
        mesh: devices of this process to run on, with the axes "data" and "model".
        progress: True for a bar on stderr with the time left; by default only if stderr is a terminal.

    Returns:
        The finished evaluation.

    Raises:
        ValueError: for a folder of another evaluation (naming what differs) or that another process has locked, and
            for settings that cannot be honoured.
        TypeError: for an argument of the wrong kind.
        Failed: if a batch could not be run; complete batches before it stay.
        OSError: if the folder cannot be written, as on a full disk.
    """
    params, task, how = as_model(params, mesh), as_task(task), How() if how is None else how
    rows = as_rows(params, policies)
    folder = require_folder(out)
    remedy = "give shards of it to processes of their own: shard=(i, n)"
    require(jax.process_count() == 1, "processes", jax.process_count(), remedy)
    require_how(task, how)
    samples = _samples(params, task)
    require_budgets(params, task, rows, samples, how)
    job = _Job(params=params, task=task, policies=rows, samples=samples, how=how, folder=folder)
    run = job.run(checks.whole("batch", batch), shard)
    with locked(folder):
        run = begin(folder, run)
        lines = Lines(folder)
        job.fill(lines, run, progress)
        evaluation = Evaluation(folder=folder, run=run, records=tuple(lines.records))
        finish(evaluation)
    return evaluation


def require_same(folder: Path, asked: Mapping[str, Any]) -> Run | None:
    """`Run` (settings) of a folder, None if it has none; ValueError if `asked` differs by more than new policies.

    More policies than the folder has are no difference: they are run, too.
    """
    there = read_run(folder)
    if there is None:
        return None
    places = ("there", "asked for")
    found = differences(there.as_dict(), asked, places, may_add=("policies", "budgets"))
    remedy = "give it as it was, with further policies if you like, or another folder"
    require(
        not found,
        "out",
        str(folder),
        f"another evaluation has begun there ({'; '.join(found)}): {remedy}",
    )
    return there


def begin(folder: Path, run: Run) -> Run:
    """Writes a folder's `run.json`, or adds new policies to it, and returns its `Run`; ValueError if settings differ.

    Policies that an earlier run of the folder had come first, in its order, so that its lines stay as they are.
    """
    there = require_same(folder, run.as_dict())
    if there is not None:
        names = dict.fromkeys([*there.policies, *run.policies])
        policies = {name: run.policies[name] for name in names}
        run = dataclasses.replace(
            there, policies=policies, budgets={name: run.budgets[name] for name in names}
        )
    if there is None or len(there.policies) < len(run.policies):
        write_whole(folder / RUN, (dumped(run.as_dict(), indent=2) + "\n").encode())
    return run


def finish(evaluation: Evaluation) -> None:
    """Writes `table.md`, and plots (SVG, PNG) if matplotlib is installed, to a finished evaluation's folder."""
    write_whole(evaluation.folder / TABLE, (evaluation.table() + "\n").encode())
    if not PLOTS_MISSING:
        for name, data in draw(evaluation, ("svg", "png")).items():
            write_whole(evaluation.folder / name, data)


def _samples(params: LanguageModel, task: Task) -> list[Sample]:
    """List of the task's samples; raises if there are none, for objects other than `Sample`, and for repeated ids."""
    samples = list(task.samples(params))
    odd = next((each for each in samples if not isinstance(each, Sample)), None)
    if odd is not None:
        raise TypeError(
            f"samples: {name_of(task)} makes {type(odd).__name__}: give instances of Sample"
        )
    require(bool(samples), "samples", 0, f"{name_of(task)} makes none of its settings: give others")
    ids = [sample.id for sample in samples]
    twice = (
        next((each for each in ids if ids.count(each) > 1), "") if len(set(ids)) < len(ids) else ""
    )
    require(
        not twice,
        "samples",
        twice,
        f"{name_of(task)} has two samples of this id: give each its own",
    )
    return samples


def _digest(samples: Sequence[Sample]) -> str:
    """Text of 16 hexadecimal digits: the beginning of the SHA-256 of all samples."""
    digest = hashlib.sha256()
    for sample in samples:
        try:
            digest.update(
                dumped(
                    dataclasses.asdict(dataclasses.replace(sample, tags=dict(sample.tags)))
                ).encode()
            )
        except (TypeError, ValueError) as error:
            raise type(error)(f"sample {sample.id!r}: {error}") from None
    return digest.hexdigest()[:16]


def _shard(shard: Any, batches: int) -> tuple[int, int] | None:
    """Shard (i, n) as two ints, or None for the whole evaluation; ValueError if i >= n or n > `batches`."""
    if shard is None:
        return None
    pair = tuple(map(plain, shard)) if isinstance(shard, (tuple, list)) else ()
    fits = len(pair) == 2 and all(is_whole(each) for each in pair) and pair[0] < pair[1]
    require(fits, "shard", shard, "give (i, n), with i from 0 to n - 1")
    require(
        pair[1] <= batches,
        "shard",
        shard,
        f"there are {batches} batches: give as many shards at most",
    )
    return pair[0], pair[1]


def _made_with(params: LanguageModel) -> dict[str, str]:
    """Dict of the versions of jaxkv, JAX and numpy, the kind of device, and the mesh's sizes such as "1x8"."""
    versions = {}
    for name in ("jaxkv", "jax", "jaxlib", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # a plain checkout
            versions[name] = "unknown"
    mesh = None if params.axes is None else params.axes.mesh
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    sizes = "1" if mesh is None else "x".join(map(str, mesh.shape.values()))
    return versions | {"device": device.device_kind, "devices": sizes}


def _free_programs() -> None:
    """Clears JAX's compiled programs if the process has over 30,000 memory mappings, as Linux allows only 65,530."""
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MOST_MAPPINGS:
        jax.clear_caches()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
    """Checked arguments of `evaluate` (model, task, policies, samples, settings, folder) and methods that run them."""

    params: LanguageModel
    task: Task
    policies: Mapping[str, Method]
    samples: Sequence[Sample]
    how: How
    folder: Path

    def run(self, batch: int, shard: Any) -> Run:
        """Makes the `Run`, the settings that `run.json` stores, with hashes of weights and samples; runs nothing."""
        task, params = self.task, self.params
        return Run(
            task=name_of(task),
            settings=settings_of(task),
            unit=task.unit,
            higher=task.higher,
            model=params.name,
            fingerprint=params.fingerprint,
            dtype=params.dtype.name,
            policies={name: repr(policy) for name, policy in self.policies.items()},
            budgets={
                name: None if (kept := policy.composed.budget) is None else kept.value
                for name, policy in self.policies.items()
            },
            agnostic=self.how.agnostic,
            raw=self.how.raw,
            seed=self.how.seed,
            batch=batch,
            shard=_shard(shard, -(-len(self.samples) // batch)),
            samples=len(self.samples),
            digest=_digest(self.samples),
            made_with=_made_with(params),
        )

    def fill(self, lines: Lines, run: Run, progress: bool | None) -> None:
        """Runs all batches without lines in `samples.jsonl` and appends a line per sample, with a progress bar."""
        todo = [
            (name, [self.samples[at] for at in batch])
            for name in run.policies
            for batch in run.batches()
        ]
        skipped = self._skip(lines, todo)
        shown = sys.stderr.isatty() if progress is None else progress
        with tqdm(
            total=run.lines,
            initial=len(lines.records),
            desc=run.task,
            unit=" samples",
            disable=not shown,
            file=sys.stderr,
            # If stderr is a file, few lines.
            mininterval=0.1 if sys.stderr.isatty() else 30.0,
        ) as bar:
            before = None
            for name, batch in todo[skipped:]:
                bar.set_postfix_str(name, refresh=False)
                if before not in (None, name):
                    _free_programs()
                before = name
                # Programs are compiled for a batch's size: the last one is filled up with copies of its last sample.
                more = (
                    0
                    if self.policies[name].parts().draws or run.samples <= run.batch
                    else run.batch - len(batch)
                )
                lines.add(
                    self._records(run, name, [*batch, *batch[-1:] * more], len(lines.records))[
                        : len(batch)
                    ]
                )
                bar.update(len(batch))

    def _skip(self, lines: Lines, todo: Sequence[tuple[str, list[Sample]]]) -> int:
        """Number of batches whose lines are all in the file; truncates it after these; ValueError for wrong lines."""
        expected = [(name, sample.id) for name, batch in todo for sample in batch]
        for at, (record, (name, sample)) in enumerate(
            zip(lines.records, expected, strict=False), start=1
        ):
            remedy = f"the line of {name}, {sample} is expected: remove it and those behind it, or give another folder"
            same = (record.policy, record.id) == (name, sample)
            require(same, f"{self.folder}, line {at}", f"{record.policy}, {record.id}", remedy)
        there, all_of = len(lines.records), len(expected)
        require(
            there <= all_of,
            str(self.folder),
            f"{there} lines",
            f"{all_of} are all: remove the others",
        )
        count = whole = 0
        for _, batch in todo:
            if count + len(batch) > there:
                break
            count, whole = count + len(batch), whole + 1
        lines.keep(count)
        return whole

    def _records(self, run: Run, name: str, batch: Sequence[Sample], done: int) -> list[Record]:
        """Runs one batch under one policy and returns a list of `Record`; raises `Failed`, naming its samples."""
        ids = (
            f"sample {batch[0].id}"
            if len(batch) == 1
            else f"samples {batch[0].id} to {batch[-1].id}"
        )
        kept = f"{done} lines are in {self.folder}, and the same call goes on from there"
        try:
            outcomes = list(self._outcomes(self.policies[name], batch))
        except Exception as error:
            message = (
                str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            )
            raise Failed(f"{name}, {ids}: {message}; {kept}") from error
        if len(outcomes) != len(batch):
            raise Failed(
                f"{name}, {ids}: {run.task} gave {len(outcomes)} outcomes for {len(batch)}; {kept}"
            )
        records = []
        for sample, outcome in zip(batch, outcomes, strict=True):
            try:
                records.append(_record(run, name, sample, outcome))
            except (TypeError, ValueError, AttributeError, RecursionError) as error:
                raise Failed(f"{name}, sample {sample.id}: {error}; {kept}") from error
        if batch[0].id == self.samples[0].id and outcomes[0].held is not None:
            # Before the sample's line: where that is, this is, too.
            add_kept(self.folder, name, batch[0].id, outcomes[0].held, tokenizer_of(self.params))
        return records

    def _outcomes(self, policy: Method, batch: Sequence[Sample]) -> list[Outcome]:
        """List of a batch's outcomes; a policy that draws random numbers runs sample by sample, each with its seed."""
        how = dataclasses.replace(self.how, shown=self.samples[0].id)
        if not policy.parts().draws:
            return self.task.run(self.params, policy, batch, how)
        own = {
            sample.id: dataclasses.replace(how, seed=seed_of(how.seed, sample.id))
            for sample in batch
        }
        return [
            each for one in batch for each in self.task.run(self.params, policy, [one], own[one.id])
        ]


def _record(run: Run, name: str, sample: Sample, outcome: Outcome) -> Record:
    """Makes the `Record` of one sample's outcome; ValueError for a score not finite, or for shares not in [0, 1]."""
    score, shares = float(outcome.score), run.unit == "%"
    fits = math.isfinite(score) and (not shares or -_ROUNDING <= score <= 1 + _ROUNDING)
    require(
        fits,
        "score",
        score,
        f"{run.task} owes {'a share in [0, 1]' if shares else 'a finite number'}",
    )
    return Record(
        task=run.task,
        policy=name,
        budget=run.budgets[name],
        id=sample.id,
        group=sample.group,
        tags=sample.tags,
        prediction=outcome.prediction,
        answers=sample.answers,
        score=min(1.0, max(0.0, score)) if shares else score,
        tokens=outcome.tokens,
        rows=outcome.rows,
        nbytes=outcome.nbytes,
        figures=outcome.figures,
        question=sample.question,
    )

"""`evaluate`: every policy over every sample of a task, a line each, to be gone on with wherever it was ended."""

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from tqdm import tqdm

from jaxkv._errors import require
from jaxkv._values import is_whole, plain
from jaxkv.arguments import as_model
from jaxkv.checkpoints.whole_files import write_whole
from jaxkv.evals.arguments import as_rows, as_task, name_of, require_budgets, require_how, seed_of, settings_of
from jaxkv.evals.folder import Lines, locked, require_folder
from jaxkv.evals.pictures import PLOTS_MISSING, draw
from jaxkv.evals.records import RUN, Record, Run, differences, dumped, read_run, require_sound
from jaxkv.evals.summary import Evaluation
from jaxkv.evals.task import How, Outcome, Sample, Task
from jaxkv.loading import LanguageModel
from jaxkv.policies.policy import Method

TABLE = "table.md"
# Of the 65,530 that Linux gives a process by default; one row of an evaluation takes some thousands.
_MOST_MAPPINGS = 30_000
# Shares that were summed up may come out above 1.
_ROUNDING = 1e-6


class Failed(RuntimeError):
    """A batch that could not be run; its message names the samples, and says what is there already."""


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
    """Runs every policy over every sample of a task, and writes a line for each into a folder.

    A run that was ended goes on with the same call, behind its last whole batch, and ends with the same bytes.

    Args:
        params: from `jaxkv.load`.
        task: `Ruler(lengths=(4096,))`, say, or a name of `jaxkv.evals.TASKS` for one with its defaults.
        policies: by row of the table; `at_budgets` makes such rows of names and budgets.
        out: the folder, which is made: `run.json`, `samples.jsonl`, `table.md`, and pictures where matplotlib is there.
        how: whether policies see questions, and other things that are no task's; as usual by default.
        batch: samples that are run together.
        shard: `(i, n)` runs every n-th batch from the i-th on, another machine the others; `merge` joins them.
        mesh: devices with the axes "data" and "model" to run on, all of this process.
        progress: a bar on stderr with the time left; by default where stderr is a terminal.

    Returns:
        What came out.

    Raises:
        ValueError: for a folder of another evaluation, naming what differs, for one that another process is at, for
            settings that cannot be honoured.
        TypeError: for an argument of the wrong kind.
        Failed: where a batch could not be run; whole batches before it stay.
        OSError: where the folder takes no more.
    """
    params, task, how = as_model(params, mesh), as_task(task), How() if how is None else how
    rows = as_rows(params, policies)
    folder = require_folder(out)
    remedy = "give shards of it to processes of their own: shard=(i, n)"
    require(jax.process_count() == 1, "processes", jax.process_count(), remedy)
    require_how(task, how)
    samples = _samples(params, task)
    require_budgets(params, task, rows, samples, how)
    run = _run(params, task, rows, samples, how=how, batch=batch, shard=shard)
    with locked(folder):
        begin(folder, run)
        with Lines(folder) as lines:
            _fill(lines, params, task, rows, samples, run, how, folder, progress)
        evaluation = Evaluation.read(folder)
        finish(evaluation)
    return evaluation


def require_same(folder: Path, said: Mapping[str, Any]) -> None:
    """Refuses a folder where another evaluation has begun.

    Args:
        folder: of an evaluation; it need not be there.
        said: of `Run.as_dict`, or as much of it as is known.

    Raises:
        ValueError: naming what differs.
    """
    there = read_run(folder)
    if there is not None:
        found = differences(there.as_dict(), said)
        what = f"another evaluation has begun there ({'; '.join(found)})"
        require(not found, "out", str(folder), f"{what}: give it as it was, or another folder")


def begin(folder: Path, run: Run) -> None:
    """Writes down what is asked, before anything is run; where it has begun, it is the same.

    Args:
        folder: of an evaluation, locked.
        run: what is asked.

    Raises:
        ValueError: where another evaluation has begun there, naming what differs.
        OSError: where nothing can be written.
    """
    require_same(folder, run.as_dict())
    if read_run(folder) is None:
        write_whole(folder / RUN, (dumped(run.as_dict(), indent=2) + "\n").encode())


def finish(evaluation: Evaluation) -> None:
    """Writes the table and, where matplotlib is there, the pictures beside the lines.

    Args:
        evaluation: a complete one.

    Raises:
        OSError: where they cannot be written.
    """
    write_whole(evaluation.folder / TABLE, (evaluation.table() + "\n").encode())
    if not PLOTS_MISSING:
        for name, data in draw(evaluation, ("svg", "png")).items():
            write_whole(evaluation.folder / name, data)


def _samples(params: LanguageModel, task: Task) -> list[Sample]:
    samples = list(task.samples(params))
    odd = next((each for each in samples if not isinstance(each, Sample)), None)
    if odd is not None:
        raise TypeError(f"samples: {name_of(task)} makes {type(odd).__name__}: give instances of Sample")
    require(bool(samples), "samples", 0, f"{name_of(task)} makes none of its settings: give others")
    ids = [sample.id for sample in samples]
    twice = next((each for each in ids if ids.count(each) > 1), "") if len(set(ids)) < len(ids) else ""
    require(not twice, "samples", twice, f"{name_of(task)} has two samples of this id: give each its own")
    return samples


def _run(
    params: LanguageModel,
    task: Task,
    rows: Mapping[str, Method],
    samples: Sequence[Sample],
    *,
    how: How,
    batch: int,
    shard: tuple[int, int] | None,
) -> Run:
    batch = plain(batch)
    require(is_whole(batch, 1), "batch", batch, "run at least 1 sample at a time")
    if shard is not None:
        shard = tuple(map(plain, shard)) if isinstance(shard, (tuple, list)) else shard
        pair = isinstance(shard, tuple) and len(shard) == 2 and all(is_whole(each) for each in shard)
        require(pair and 0 <= shard[0] < shard[1], "shard", shard, "give (i, n), with i from 0 to n - 1")
        most = -(-len(samples) // batch)
        require(
            shard[1] <= most, "shard", shard, f"{len(samples)} samples are {most} batches: give as many shards at most"
        )
        shard = (shard[0], shard[1])
    digest = hashlib.sha256()
    for sample in samples:
        try:
            digest.update(dumped(dataclasses.asdict(dataclasses.replace(sample, tags=dict(sample.tags)))).encode())
        except (TypeError, ValueError) as error:
            raise type(error)(f"sample {sample.id!r}: {error}") from None
    device = jax.devices()[0] if params.axes is None else params.axes.mesh.devices.flat[0]
    versions = {name: _version(name) for name in ("jaxkv", "jax", "jaxlib", "numpy")}
    return Run(
        task=name_of(task),
        settings=settings_of(task),
        unit=task.unit,
        higher=task.higher,
        model=params.name,
        fingerprint=params.fingerprint,
        dtype=params.dtype.name,
        policies={name: repr(policy) for name, policy in rows.items()},
        budgets={name: policy.parts().budget for name, policy in rows.items()},
        agnostic=how.agnostic,
        raw=how.raw,
        seed=how.seed,
        batch=batch,
        shard=shard,
        samples=len(samples),
        digest=digest.hexdigest()[:16],
        made_with=versions | {"device": device.device_kind, "devices": _devices(params)},
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # a plain checkout
        return "unknown"


def _devices(params: LanguageModel) -> str:
    sizes = {} if params.axes is None else dict(params.axes.mesh.shape)
    return "x".join(str(size) for size in sizes.values()) or "1"


def _fill(
    lines: Lines,
    params: LanguageModel,
    task: Task,
    rows: Mapping[str, Method],
    samples: Sequence[Sample],
    run: Run,
    how: How,
    folder: Path,
    progress: bool | None,
) -> None:
    """Runs what is not there yet."""
    todo = [(name, [samples[at] for at in batch]) for name in rows for batch in run.batches()]
    skipped = _there(lines, todo, folder)
    shown = sys.stderr.isatty() if progress is None else progress
    with tqdm(
        total=run.lines,
        initial=len(lines.records),
        desc=run.task,
        unit=" samples",
        disable=not shown,
        file=sys.stderr,
        # In a file, a line now and then.
        mininterval=0.1 if sys.stderr.isatty() else 30.0,
    ) as bar:
        before = None
        for name, batch in todo[skipped:]:
            bar.set_postfix_str(name, refresh=False)
            if before not in (None, name):
                _make_room()
            before = name
            # Programs are compiled for a batch's size: the last one is filled up with copies of its last sample.
            more = 0 if rows[name].parts().draws or run.samples <= run.batch else run.batch - len(batch)
            filled = [*batch, *batch[-1:] * more]
            made = _records(params, task, run, name, rows[name], filled, how, len(lines.records), folder)
            lines.add(made[: len(batch)])
            bar.update(len(batch))


def _make_room() -> None:
    """Frees programs where they take up too many of the memory mappings that a process may have, and XLA crashes."""
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MOST_MAPPINGS:
        jax.clear_caches()


def _there(lines: Lines, todo: Sequence[tuple[str, list[Sample]]], folder: Path) -> int:
    """Whole batches that are there; lines of one that is not whole are dropped."""
    at = whole = 0
    for name, batch in todo:
        mine = lines.records[at : at + len(batch)]
        for line, (record, sample) in enumerate(zip(mine, batch, strict=False), start=at + 1):
            same = (record.policy, record.id) == (name, sample.id)
            remedy = (
                f"the line of {name}, {sample.id} is expected: remove it and those behind it, or give another folder"
            )
            require(same, f"{folder}, line {line}", f"{record.policy}, {record.id}", remedy)
        if len(mine) < len(batch):
            break
        at, whole = at + len(batch), whole + 1
    else:
        require(
            len(lines.records) == at, str(folder), f"{len(lines.records)} lines", f"{at} are all: remove the others"
        )
    lines.keep(at)
    return whole


def _ran(params: LanguageModel, task: Task, policy: Method, batch: Sequence[Sample], how: How) -> list[Outcome]:
    """A batch; of a policy that draws, sample by sample, so that each has draws of its own."""
    if not policy.parts().draws:
        return task.run(params, policy, batch, how)
    own = {sample.id: dataclasses.replace(how, seed=seed_of(how.seed, sample.id)) for sample in batch}
    return [outcome for sample in batch for outcome in task.run(params, policy, [sample], own[sample.id])]


def _records(
    params: LanguageModel,
    task: Task,
    run: Run,
    name: str,
    policy: Method,
    batch: Sequence[Sample],
    how: How,
    done: int,
    folder: Path,
) -> list[Record]:
    """What became of a batch, as its lines have it; what no line can have is told, and how many are there."""
    ids = f"sample {batch[0].id}" if len(batch) == 1 else f"samples {batch[0].id} to {batch[-1].id}"
    kept = f"{done} lines are in {folder}, and the same call goes on from there"
    try:
        outcomes = list(_ran(params, task, policy, batch, how))
    except Exception as error:
        message = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
        raise Failed(f"{name}, {ids}: {message}; {kept}") from error
    if len(outcomes) != len(batch):
        raise Failed(f"{name}, {ids}: {name_of(task)} gave {len(outcomes)} outcomes for {len(batch)}; {kept}")
    made = []
    for sample, outcome in zip(batch, outcomes, strict=True):
        try:
            score = float(outcome.score)
            if not math.isfinite(score) or (task.unit == "%" and not -_ROUNDING <= score <= 1 + _ROUNDING):
                wanted = "a share in [0, 1]" if task.unit == "%" else "a finite number"
                raise ValueError(f"score={score}: {name_of(task)} owes {wanted}")
            made.append(_record(run, name, sample, outcome, score))
            require_sound(json.loads(made[-1].line()), "give texts and finite numbers")
        except (TypeError, ValueError, AttributeError) as error:
            raise Failed(f"{name}, sample {sample.id}: {error}; {kept}") from error
    return made


def _record(run: Run, name: str, sample: Sample, outcome: Outcome, score: float) -> Record:
    return Record(
        task=run.task,
        policy=name,
        budget=run.budgets[name],
        id=sample.id,
        group=sample.group,
        tags=dict(sample.tags),
        prediction=outcome.prediction,
        answers=list(sample.answers),
        score=min(1.0, max(0.0, score)) if run.unit == "%" else score,
        tokens=outcome.tokens,
        rows=outcome.rows,
        nbytes=outcome.nbytes,
        figures=dict(outcome.figures),
    )

"""`merge`: joins the shards of an evaluation, run on several machines, into the evaluation that they are parts of."""

import dataclasses
import itertools
import os
from collections.abc import Sequence

from jaxkv._errors import require
from jaxkv.checkpoints.whole_files import write_whole
from jaxkv.evals.folder import locked, require_folder
from jaxkv.evals.kept import read_kept, write_kept
from jaxkv.evals.records import SAMPLES, Record, Run, differences
from jaxkv.evals.runs import begin, finish
from jaxkv.evals.summary import Evaluation

# Entries of `Run.made_with` that may differ between the machines of shards.
_OWN = ("device", "devices")


def merge(folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Evaluation:
    """Joins an evaluation's finished shards in a new folder with all its files; returns the unsharded `Evaluation`.

    Args:
        folders: all shards of one evaluation, each finished, in any order.
        out: the folder to make.

    Returns:
        The whole evaluation.

    Raises:
        ValueError: for shards that are missing, given twice, not finished, or of different evaluations.
        TypeError: for one folder instead of a list.
        OSError: where `out` cannot be written.
    """
    if isinstance(folders, (str, os.PathLike)):
        raise TypeError(f"folders={str(folders)!r}: give a list of the shards' folders")
    require(bool(folders), "folders", list(folders), "give the shards' folders")
    shards = [Evaluation.read(folder) for folder in folders]
    whole = next((str(each.folder) for each in shards if each.run.shard is None), None)
    require(whole is None, "folders", whole, "it is no shard, but a whole evaluation")
    shards.sort(key=lambda each: each.run.shard or (0, 0))
    run = _whole_run([(str(shard.folder), shard.run) for shard in shards])
    target = require_folder(out)
    with locked(target):
        run = begin(target, run)
        records = _in_order(run, shards)
        write_whole(target / SAMPLES, b"".join(record.line() for record in records))
        kept = next(filter(None, (read_kept(shard.folder) for shard in shards)), None)
        if kept is not None:
            rows = {name: kept.policies[name] for name in run.policies if name in kept.policies}
            write_kept(target, dataclasses.replace(kept, policies=rows))
        evaluation = Evaluation(folder=target, run=run, records=tuple(records))
        finish(evaluation)
    return evaluation


def _whole_run(shards: Sequence[tuple[str, Run]]) -> Run:
    """Merges (folder, `Run`) pairs of shards to the whole evaluation's `Run`; ValueError if one is missing."""
    first_folder, first = shards[0]
    for folder, run in shards:
        # Policies may have been added in another order.
        if run.policies.keys() == first.policies.keys():
            run = dataclasses.replace(
                run, policies={name: run.policies[name] for name in first.policies}
            )
        found = differences(
            _compared(first), _compared(run), ("in the first", "in the second"), but=("shard",)
        )
        where = f"{first_folder} and {folder}"
        require(
            not found,
            "folders",
            where,
            f"they are no shards of one evaluation ({'; '.join(found)})",
        )
    pairs = [run.shard for _, run in shards if run.shard is not None]
    count, here = pairs[0][1], [index for index, _ in pairs]
    require(
        all(each == count for _, each in pairs),
        "folders",
        pairs,
        "they are shards of different numbers",
    )
    twice = sorted({index for index in here if here.count(index) > 1})
    require(
        not twice,
        "folders",
        f"shard {twice} of {count}",
        "it is there more than once: give each once",
    )
    missing = sorted(set(range(count)) - set(here))
    remedy = "it is missing: run it with --shard, and give it, too"
    require(not missing, "folders", f"shard {missing} of {count}", remedy)
    devices = {
        name: ", ".join(dict.fromkeys(run.made_with[name] for _, run in shards)) for name in _OWN
    }
    return dataclasses.replace(first, shard=None, made_with={**first.made_with, **devices})


def _compared(run: Run) -> dict[str, object]:
    """Dict of a run (`Run.as_dict`) without the entries about devices, which may differ between shards."""
    made_with = {name: each for name, each in run.made_with.items() if name not in _OWN}
    return {**run.as_dict(), "made_with": made_with}


def _in_order(run: Run, shards: Sequence[Evaluation]) -> list[Record]:
    """List of all shards' records in the order of an unsharded run: by policy, then by batch."""
    records = list[Record]()
    for policy in run.policies:
        rest = [iter(each.of(policy)) for each in shards]
        for at, batch in enumerate(run.batches()):
            records += itertools.islice(rest[at % len(rest)], len(batch))
    return records

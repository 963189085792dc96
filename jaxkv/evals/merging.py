"""`merge`: the shards of an evaluation, run on several machines, as the one evaluation that they are."""

import dataclasses
import itertools
import os
from collections.abc import Sequence

from jaxkv._errors import require
from jaxkv.checkpoints.whole_files import write_whole
from jaxkv.evals.folder import locked, require_folder
from jaxkv.evals.records import SAMPLES, Record, Run, differences
from jaxkv.evals.runs import begin, finish
from jaxkv.evals.summary import Evaluation

# What the shards' machines may have of their own.
_OWN = ("device", "devices")


def merge(folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Evaluation:
    """Joins shards: the lines are byte for byte those of a run that was not split.

    Args:
        folders: all shards of one evaluation, each finished, in any order.
        out: the folder to make.

    Returns:
        The whole evaluation.

    Raises:
        ValueError: for shards that are missing, there twice, not finished, or of different evaluations.
        TypeError: for one folder that is in no list.
        OSError: where `out` cannot be written.
    """
    if isinstance(folders, (str, os.PathLike)):
        raise TypeError(f"folders={str(folders)!r}: give a list of the shards' folders")
    require(bool(folders), "folders", list(folders), "give the shards' folders")
    shards = [Evaluation.read(folder) for folder in folders]
    run = _whole(shards)
    target = require_folder(out)
    records = [shard.records for shard in sorted(shards, key=_number)]
    with locked(target):
        begin(target, run)
        write_whole(target / SAMPLES, b"".join(record.line() for record in _joined(run, records)))
        whole = Evaluation.read(target)
        finish(whole)
    return whole


def _number(shard: Evaluation) -> int:
    assert shard.run.shard is not None
    return shard.run.shard[0]


def _whole(shards: Sequence[Evaluation]) -> Run:
    """The run that the shards are parts of, all of them there."""
    first = shards[0]
    for shard in shards:
        require(shard.run.shard is not None, "folders", str(shard.folder), "it is no shard, but a whole evaluation")
        mine, theirs = (_compared(each.run) for each in (first, shard))
        found = differences(mine, theirs, but=("shard",))
        where = f"{first.folder} and {shard.folder}"
        require(not found, "folders", where, f"they are no shards of one evaluation ({'; '.join(found)})")
    numbers = [shard.run.shard for shard in shards if shard.run.shard is not None]
    count = numbers[0][1]
    require(all(of == count for _, of in numbers), "folders", numbers, "they are shards of different numbers")
    here = [number for number, _ in numbers]
    twice = sorted({number for number in here if here.count(number) > 1})
    require(not twice, "folders", f"shard {twice} of {count}", "it is there more than once: give each once")
    missing = sorted(set(range(count)) - set(here))
    require(
        not missing, "folders", f"shard {missing} of {count}", "it is missing: run it with --shard, and give it, too"
    )
    made_with = dict(first.run.made_with)
    for name in _OWN:
        made_with[name] = ", ".join(dict.fromkeys(shard.run.made_with[name] for shard in sorted(shards, key=_number)))
    return dataclasses.replace(first.run, shard=None, made_with=made_with)


def _compared(run: Run) -> dict[str, object]:
    said = run.as_dict()
    return {**said, "made_with": {name: each for name, each in run.made_with.items() if name not in _OWN}}


def _joined(run: Run, shards: Sequence[Sequence[Record]]) -> list[Record]:
    """Records of all shards in the order of a run that was not split: batches in turns, policy by policy."""
    rest, made = [iter(records) for records in shards], list[Record]()
    for _ in run.policies:
        for at, batch in enumerate(run.batches()):
            made += itertools.islice(rest[at % len(rest)], len(batch))
    return made

"""What an evaluation leaves on disk: `run.json` says what was asked, `samples.jsonl` has a line for every sample.

Lines are in one order, policy by policy and within each sample by sample, and are never changed once they are whole. So
a run that was ended anywhere goes on behind the last whole batch, and ends with the same bytes as one that was not.
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv._errors import require
from jaxkv._values import is_whole, shortened

RUN, SAMPLES = "run.json", "samples.jsonl"
_FORMAT = 1
# The same weights may lie elsewhere on another machine.
_NOT_COMPARED = ("model",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """All that the lines of an evaluation depend on.

    Attributes:
        task: its name.
        settings: its fields, as JSON has them.
        unit: what a score is: "%", of shares in [0, 1], or another.
        higher: whether more is better.
        model: what was loaded.
        fingerprint: of its weights.
        dtype: of weights and cache.
        policies: by row, such as "adakv@128", what the policy is in full.
        budgets: by row, the policy's budget; None keeps everything.
        agnostic: whether contexts were compressed before questions were seen.
        raw: whether the chat template was left out.
        seed: of policies that draw.
        batch: samples that are run together.
        shard: which part of how many this is; None is all of it.
        samples: cases of the whole task.
        digest: of the cases.
        made_with: versions, and the device.
    """

    task: str
    settings: Mapping[str, Any]
    unit: str
    higher: bool
    model: str
    fingerprint: str
    dtype: str
    policies: Mapping[str, str]
    budgets: Mapping[str, int | float | None]
    agnostic: bool
    raw: bool
    seed: int
    batch: int
    shard: tuple[int, int] | None
    samples: int
    digest: str
    made_with: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return json.loads(dumped({"format": _FORMAT, **dataclasses.asdict(self)}))

    def batches(self) -> list[range]:
        """Of this shard: places of samples in the task's list that are run together.

        They are the same in all shards, each of which takes every n-th: a batch's results may depend on who is in it.
        """
        every = [range(at, min(at + self.batch, self.samples)) for at in range(0, self.samples, self.batch)]
        return every if self.shard is None else every[self.shard[0] :: self.shard[1]]

    @property
    def lines(self) -> int:
        """Lines of a finished evaluation."""
        first, step = (0, 1) if self.shard is None else self.shard
        batches = -(-self.samples // self.batch)
        mine = range(first, batches, step)
        # The last batch may be a short one.
        short = batches * self.batch - self.samples if batches - 1 in mine else 0
        return len(self.policies) * (len(mine) * self.batch - short)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One line: what became of one sample under one policy.

    Attributes:
        task: its name.
        policy: the row, such as "adakv@128".
        budget: the policy's.
        id: the sample's.
        group: the row of the table that it counts in.
        tags: numbers and names that pictures are drawn over.
        prediction: the text drawn.
        answers: what is right.
        score: as the task gives it.
        tokens: of the prompt; None where the task does not count them.
        rows: kept of it per kv head and layer, averaged; None likewise.
        nbytes: that they weigh, wherever they lie; None likewise.
        figures: numbers, and lists of numbers, besides.
    """

    task: str
    policy: str
    budget: int | float | None
    id: str
    group: str
    tags: Mapping[str, Any]
    prediction: str
    answers: Sequence[str]
    score: float
    tokens: int | None = None
    rows: float | None = None
    nbytes: int | None = None
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def line(self) -> bytes:
        """As the file has it."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return (dumped(given) + "\n").encode()


_FIELDS = {field.name for field in dataclasses.fields(Record)}


def dumped(value: Any, **options: Any) -> str:
    """JSON with its letters as they are, numpy's numbers among them.

    Args:
        value: anything that JSON has, and numbers and arrays of numpy.
        **options: of `json.dumps`.

    Returns:
        The text.

    Raises:
        ValueError: for NaN and infinities, which JSON has not.
        TypeError: for anything else.
    """
    options = {"allow_nan": False, "default": _plain, **options}
    text = json.dumps(value, ensure_ascii=False, **options)
    # A lone surrogate has no UTF-8.
    return text if text.isascii() or _encodes(text) else json.dumps(value, **options)


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} {shortened(repr(value))}: give numbers, texts, lists and mappings")


def read_run(folder: Path) -> Run | None:
    """What a folder's lines are of.

    Args:
        folder: of an evaluation.

    Returns:
        The run; None where none has begun.

    Raises:
        ValueError: for a file that is none of ours.
    """
    path = folder / RUN
    remedy = "no evaluation's file, or one of another version: give another folder"
    try:
        said = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}; {remedy}") from None
    names = {field.name for field in dataclasses.fields(Run)}
    require(isinstance(said, dict) and said.pop("format", None) == _FORMAT, str(path), "format", remedy)
    require(said.keys() == names, str(path), ", ".join(sorted(said.keys() ^ names)), remedy)
    shard = said.pop("shard")
    kinds = {**dict.fromkeys(("policies", "budgets", "settings", "made_with"), dict), "unit": str}
    sound = all(isinstance(said[name], kind) for name, kind in kinds.items())
    sound = sound and is_whole(said["batch"], 1) and is_whole(said["samples"], 1)
    sound = sound and said["policies"].keys() == said["budgets"].keys() != set()
    pair = isinstance(shard, list) and len(shard) == 2 and all(map(is_whole, shard)) and shard[0] < shard[1]
    require(sound and (shard is None or pair), str(path), "changed", remedy)
    return Run(**said, shard=None if shard is None else tuple(shard))


def differences(one: Mapping[str, Any], other: Mapping[str, Any], but: Sequence[str] = ()) -> list[str]:
    """What differs between two runs, or parts of them, in words.

    Args:
        one: of `Run.as_dict`.
        other: another one; what either has not is not compared.
        but: names that may differ.

    Returns:
        A piece for each difference: "batch: 8, not 4".
    """
    found = []
    for name in (name for name in one if name in other and name not in (*_NOT_COMPARED, *but)):
        mine, theirs = one[name], other[name]
        if isinstance(mine, dict) and isinstance(theirs, dict):
            if name == "policies" and list(mine) != list(theirs):
                found.append(f"{name}: {', '.join(mine)}, not {', '.join(theirs)}")
                continue
            keys = dict.fromkeys([*mine, *theirs])
            found += [f"{name}.{k}: {_told(mine, k)}, not {_told(theirs, k)}" for k in keys if _differ(mine, theirs, k)]
        elif mine != theirs:
            found.append(f"{name}: {shortened(dumped(mine))}, not {shortened(dumped(theirs))}")
    return found


def _told(of: Mapping[str, Any], key: str) -> str:
    return shortened(dumped(of[key])) if key in of else "nothing"


def _differ(mine: Mapping[str, Any], theirs: Mapping[str, Any], key: str) -> bool:
    return (key in mine) != (key in theirs) or mine.get(key) != theirs.get(key)


def read_record(line: bytes, where: str) -> Record:
    """One line's record.

    Args:
        line: of `samples.jsonl`.
        where: it stands, for the error.

    Returns:
        The record.

    Raises:
        ValueError: for a line that none has written.
    """
    try:
        said = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {error}; the file was changed: remove the line and those behind it") from None
    fits = isinstance(said, dict) and said.keys() == _FIELDS
    require(fits, where, shortened(repr(line)), "no line of an evaluation: remove it and those behind it")
    try:
        require_sound(said, "remove the line and those behind it")
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return Record(**said)


def require_sound(said: Mapping[str, Any], remedy: str) -> None:
    """Refuses a record with something else in it than belongs there.

    Args:
        said: its fields, as JSON has them.
        remedy: what to do.

    Raises:
        ValueError: naming the field.
    """
    for name, sound in _SOUND.items():
        require(
            sound(said[name]), name, shortened(repr(said[name])), f"no text or finite number as lines have it: {remedy}"
        )


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, int) or math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _is_number_or_none(value: Any) -> bool:
    return value is None or _is_number(value)


_SOUND: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("task", "policy", "id", "group", "prediction"), _is_text),
    **dict.fromkeys(("tags", "figures"), _is_mapping),
    **dict.fromkeys(("budget", "tokens", "rows", "nbytes"), _is_number_or_none),
    "score": _is_number,
    "answers": lambda value: isinstance(value, list) and all(map(_is_text, value)),
}

"""The files of an evaluation: `run.json` has its settings, `samples.jsonl` one line per policy and sample.

Lines are ordered by policy, then by sample, and a complete line is never changed. A run that was killed therefore
continues after its last complete batch, and ends with the same bytes as a run that was not.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv._errors import require
from jaxkv._values import is_whole, shortened

RUN, SAMPLES = "run.json", "samples.jsonl"
_FORMAT = 1
_REMEDY = "no evaluation's file, or one of another version: give another folder"
# A model's name may be a path, which can differ between machines with the same weights.
_NOT_COMPARED = ("model",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Settings that an evaluation's results depend on, as `run.json` stores them: task, model, policies, batch, seed.

    Attributes:
        task: name of the task.
        settings: the task's fields, as JSON values.
        unit: unit of scores: "%" for shares in [0, 1], or another such as "nats".
        higher: True if a higher score is better.
        model: name of the model.
        fingerprint: hash of its weights.
        dtype: dtype of weights and cache.
        policies: the policy's `repr` by row, such as "adakv@128".
        budgets: the policy's budget by row; None keeps everything.
        agnostic: True if contexts were compressed before questions were seen.
        raw: True if the chat template was left out.
        seed: seed of policies that draw random numbers.
        batch: number of samples that run together.
        shard: `(i, n)` for the i-th of n shards; None for the whole evaluation.
        samples: number of samples of the whole task.
        digest: hash of the samples.
        made_with: versions of packages, and the device.
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
        """Dict of the run's fields as JSON values and the file format's version, as `run.json` stores it."""
        return {"format": _FORMAT, **as_json(dataclasses.asdict(self))}

    def batches(self) -> list[range]:
        """List of ranges of sample indices, one for each batch of this shard.

        Batches are the same in all shards, each of which takes every n-th: results may depend on the batch.
        """
        every = [
            range(at, min(at + self.batch, self.samples))
            for at in range(0, self.samples, self.batch)
        ]
        return every if self.shard is None else every[self.shard[0] :: self.shard[1]]

    @property
    def lines(self) -> int:
        """Number of lines in `samples.jsonl` once this shard is finished: its samples times the policies."""
        first, step = (0, 1) if self.shard is None else self.shard
        batches = -(-self.samples // self.batch)
        mine = range(first, batches, step)
        # The last batch may have fewer samples.
        short = batches * self.batch - self.samples if batches - 1 in mine else 0
        return len(self.policies) * (len(mine) * self.batch - short)


# Name in `Record.figures` of samples whose budget was raised to what must stay.
RAISED = "raised"
_NUMBER = (int, float)
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("task", "policy", "id", "group", "question", "prediction"), (str,)),
    **dict.fromkeys(("tags", "figures"), (dict,)),
    **dict.fromkeys(("budget", "tokens", "rows", "nbytes"), (*_NUMBER, type(None))),
    "answers": (list,),
    "score": _NUMBER,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One line of `samples.jsonl`: prediction, score, and tokens, rows and bytes of one sample under one policy.

    Attributes:
        task: name of the task.
        policy: the row, such as "adakv@128".
        budget: the policy's budget.
        id: id of the sample.
        group: row of the table that the sample counts in.
        tags: numbers and names that pictures are drawn over.
        prediction: the text drawn.
        answers: right answers.
        score: as the task gives it.
        tokens: number of tokens of the prompt; None if the task does not count them.
        rows: rows kept of the prompt per kv head and layer, averaged; None if the task does not count them.
        nbytes: bytes of these rows, on the device or in host memory; None if the task does not count them.
        figures: further numbers, and lists of numbers.
        question: text of the prompt after its context; empty if it has none, or an earlier jaxkv wrote the line.
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
    question: str = ""

    def __post_init__(self):
        for name, kinds in _KINDS.items():
            value = as_json(getattr(self, name), name)
            fits = isinstance(value, kinds) and not isinstance(value, bool)
            fits = fits and (name != "answers" or all(isinstance(each, str) for each in value))
            wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            require(fits, name, shortened(repr(value)), f"lines have {wanted} here: give that")
            object.__setattr__(self, name, value)

    def line(self) -> bytes:
        """The record as one line of JSON in UTF-8 bytes, with its line feed."""
        return (
            dumped({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
            + "\n"
        ).encode()


_FIELDS = {field.name for field in dataclasses.fields(Record)}


def as_json(value: Any, name: str = "value") -> Any:
    """Returns `value` as plain JSON types (dict, list, str, number, bool, None); raises for NaN, infinities and others.

    Numpy's numbers and arrays become plain ones, tuples lists, mappings dicts and paths texts.
    """
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        require(math.isfinite(value), name, value, "JSON has no such number: give a finite one")
        return value
    if isinstance(value, (list, tuple)):
        return [as_json(each, name) for each in value]
    if isinstance(value, Mapping):
        return {_key(key, name): as_json(each, name) for key, each in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    shown = f"{type(value).__name__} {shortened(repr(value))}"
    raise TypeError(f"{name}: {shown}: give numbers, texts, lists and mappings")


def _key(key: Any, name: str) -> str:
    """Key of a mapping as text: a text unchanged, a number, bool or None as its JSON; TypeError for other types."""
    if not (key is None or isinstance(key, (str, int, float))):
        raise TypeError(
            f"{name}: a key of type {type(key).__name__}: give numbers, texts, lists and mappings"
        )
    return key if isinstance(key, str) else json.dumps(as_json(key, name))


def dumped(value: Any, *, indent: int | None = None) -> str:
    """JSON text of `value`; non-ASCII characters are escaped only if it has lone surrogates, which UTF-8 lacks."""
    plain = as_json(value)
    text = json.dumps(plain, ensure_ascii=False, indent=indent)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(plain, indent=indent)
    return text


def read_json(path: Path, remedy: str) -> Any:
    """Parsed content of a JSON file; None if it does not exist; ValueError, with `remedy`, for null or invalid JSON."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}; {remedy}") from None
    require(found is not None, str(path), "null", remedy)
    return found


def read_run(folder: Path) -> Run | None:
    """`Run` (settings) from a folder's `run.json`; None if there is no such file; ValueError for another format."""
    path = folder / RUN
    found = read_json(path, _REMEDY)
    if found is None:
        return None
    require(
        isinstance(found, dict) and found.pop("format", None) == _FORMAT,
        str(path),
        "format",
        _REMEDY,
    )
    names = {field.name for field in dataclasses.fields(Run)}
    require(found.keys() == names, str(path), ", ".join(sorted(found.keys() ^ names)), _REMEDY)
    shard = found.pop("shard")
    mappings = all(
        isinstance(found[name], dict) for name in ("policies", "budgets", "settings", "made_with")
    )
    fits = (
        mappings
        and isinstance(found["unit"], str)
        and found["policies"].keys() == found["budgets"].keys() != set()
    )
    fits = fits and is_whole(found["batch"], 1) and is_whole(found["samples"], 1)
    pair = (
        isinstance(shard, list)
        and len(shard) == 2
        and all(map(is_whole, shard))
        and shard[0] < shard[1]
    )
    require(fits and (shard is None or pair), str(path), "changed", _REMEDY)
    return Run(**found, shard=None if shard is None else tuple(shard))


def differences(
    one: Mapping[str, Any],
    other: Mapping[str, Any],
    places: tuple[str, str],
    *,
    but: Sequence[str] = (),
    may_add: Sequence[str] = (),
) -> list[str]:
    """List of texts such as "batch: 8 there, 4 asked for", one for each entry in which two `Run.as_dict` differ.

    `places` say where each of the two is. Names in `but`, and names that only one of the two has, are not compared;
    mappings named in `may_add` may have more entries in `other`.
    """
    found = []
    first, second = places
    for name in (name for name in one if name in other and name not in (*_NOT_COMPARED, *but)):
        mine, theirs = one[name], other[name]
        if not (isinstance(mine, dict) and isinstance(theirs, dict)):
            if mine != theirs:
                found.append(
                    f"{name}: {shortened(dumped(mine))} {first}, {shortened(dumped(theirs))} {second}"
                )
            continue
        keys = dict.fromkeys(mine if name in may_add else [*mine, *theirs])
        if name == "policies" and (
            [*mine] != [*theirs] if name not in may_add else not keys.keys() <= theirs.keys()
        ):
            found.append(f"{name}: {', '.join(mine)} {first}, {', '.join(theirs)} {second}")
            continue
        for key in keys:
            if (key in mine) != (key in theirs) or mine.get(key) != theirs.get(key):
                shown = [
                    shortened(dumped(each[key])) if key in each else "nothing"
                    for each in (mine, theirs)
                ]
                found.append(f"{name}.{key}: {shown[0]} {first}, {shown[1]} {second}")
    return found


def whole_lines(folder: Path) -> list[bytes]:
    """List of the complete lines, as bytes, of a folder's `samples.jsonl`: no truncated last one; [] without file."""
    try:
        whole, end, _ = (folder / SAMPLES).read_bytes().rpartition(b"\n")
    except FileNotFoundError:
        return []
    return [line + b"\n" for line in whole.split(b"\n")] if end else []


def read_record(line: bytes, where: str) -> Record:
    """`Record` parsed from one line (bytes) of `samples.jsonl`; ValueError, beginning with `where`, for other lines."""
    try:
        found = json.loads(line)
        fits = isinstance(found, dict) and found.keys() | {"question"} == _FIELDS
        require(fits, "line", shortened(repr(line)), "it is none of an evaluation")
        return Record(**found)
    except (ValueError, TypeError, RecursionError) as error:
        remedy = "the file was changed: remove the line and those behind it"
        raise ValueError(f"{where}: {error}; {remedy}") from None

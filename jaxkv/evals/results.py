"""Results of evaluations: the file `results.jsonl` of a folder, and `Evaluation`, read from one folder or more.

The first line of the file is the `EvaluationSettings`, on which the results depend; every other line is a
`SampleRecord`, one sample under
one policy. Lines are only appended, so that a killed run resumes after its last complete batch.
"""

import contextlib
import dataclasses
import functools
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxkv._checks import shorten_text
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require

RESULTS = "results.jsonl"
_FORMAT = 3
# Samples with more distinct lengths were not made for given lengths.
_MOST_LENGTHS = 25
# Fields in which shards, and machines with the same weights, may differ.
_OWN = ("shard", "model", "devices")


@frozen_dataclass
class EvaluationSettings:
    """Settings that decide an evaluation's results, from task and model to versions; first line of `results.jsonl`.

    Attributes:
        task: name of the task.
        settings: fields of the task, as JSON values.
        unit: unit of scores: "%" for shares in [0, 1], or another such as "nats".
        higher: True if a higher score is better.
        model: name of the model.
        fingerprint: hash of its weights.
        dtype: dtype of weights and cache.
        agnostic: True if contexts were compressed before questions were seen.
        raw: True if the chat template was left out.
        seed: seed of policies that use random numbers.
        batch: number of samples per batch.
        shard: `[i, n]` for the i-th of n shards; None for the whole evaluation.
        samples: number of samples of the task.
        digest: hash of the samples.
        versions: versions of packages.
        devices: kind of device, and sizes of the mesh.
        format: version of the file format.
    """

    task: str
    settings: Mapping[str, Any]
    unit: str
    higher: bool
    model: str
    fingerprint: str
    dtype: str
    agnostic: bool
    raw: bool
    seed: int
    batch: int
    shard: Sequence[int] | None
    samples: int
    digest: str
    versions: Mapping[str, str]
    devices: str
    format: int = _FORMAT


@frozen_dataclass
class SampleRecord:
    """One line of `results.jsonl`: a sample's prediction, score, tokens, and kept entries and bytes under one policy.

    Attributes:
        policy: row of the table, such as "adakv@128".
        method: the policy's `repr`.
        budget: the policy's budget; None keeps every entry.
        number: number of the sample in its task.
        id: id of the sample.
        group: row of the table by group that counts the sample.
        tags: numbers and names for plots.
        question: text of the prompt after its context.
        prediction: sampled text.
        answers: right answers.
        score: score from the task.
        tokens: tokens of the prompt; 0 if the task does not count them.
        rows: entries of the prompt kept per kv head and layer, on average; None if the task does not count them.
        nbytes: bytes of these entries, on the device or in host memory; None if the task does not count them.
        figures: further numbers, and lists of numbers.
        held: tokens of the first sample's prompt, and how many kv heads keep each after prefill; None for others.
    """

    policy: str
    method: str
    budget: int | float | None
    number: int
    id: str
    group: str
    tags: Mapping[str, Any]
    question: str
    prediction: str
    answers: Sequence[str]
    score: float
    tokens: int
    rows: float | None
    nbytes: int | None
    figures: Mapping[str, Any]
    held: Mapping[str, Any] | None = None


def dump_json_line(value: Any) -> bytes:
    """Encode a value as a line of UTF-8 JSON, also NumPy values and paths; ValueError for NaN, TypeError for others."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_convert_for_json)
    # Half of a surrogate pair is written as a JSON escape.
    return (text + "\n").encode("utf-8", "backslashreplace")


def _convert_for_json(value: Any) -> Any:
    """Convert NumPy values to numbers or lists, paths to texts, mappings to dicts; TypeError for other objects."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else dict(value)


def require_evaluation_folder(out: str | os.PathLike[str], name: str = "out") -> Path:
    """Return `out` as a Path, without writing; ValueError for a file, or a non-empty folder without `results.jsonl`."""
    path = Path(out).expanduser()
    inside = {each.name for each in path.iterdir()} - {".lock"} if path.is_dir() else set()
    fits = not path.is_file() and (not inside or RESULTS in inside)
    other = "a file, or contains other files, such as an evaluation of an earlier version"
    require(fits, name, str(out), f"it is {other}: use a new folder")
    return path


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Context manager that creates a folder and locks it; ValueError if another process has locked it."""
    import filelock  # 50 ms

    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / ".lock", timeout=0)
    try:
        held = lock.acquire()
    except filelock.Timeout:
        remedy = "another process writes it: wait for its end, or use another folder"
        raise ValueError(f"out={str(folder)!r}: {remedy}") from None
    with held:
        yield


def append_lines(folder: Path, lines: bytes) -> None:
    """Append lines, as bytes, to the `results.jsonl` of a locked folder, and sync it to disk."""
    with (folder / RESULTS).open("ab") as file:
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())


def resume_or_create_results(folder: Path, run: EvaluationSettings) -> list[SampleRecord]:
    """Return a folder's `SampleRecord` list, partial line cut; if new, write `run`; ValueError for another.

    An incomplete last line, of a killed run, is removed.
    """
    path = folder / RESULTS
    data = path.read_bytes() if path.exists() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if not whole:
        path.unlink(missing_ok=True)
        append_lines(folder, dump_json_line(vars(run)))
        return []
    os.truncate(path, len(whole))
    there, records = _read_results(folder, "out")
    found = _describe_differences(there, run, but=("model",))
    remedy = "use the same settings, or another folder"
    require(not found, "out", str(folder), f"it has another evaluation ({found}): {remedy}")
    return records


def _describe_differences(
    one: EvaluationSettings, other: EvaluationSettings, but: Sequence[str]
) -> str:
    """Return text of fields, except `but`, in which two settings differ: "batch: 8 there, 4 here"; empty if none."""
    pairs = []
    for run in (one, other):
        fields = json.loads(dump_json_line(vars(run)))
        settings = fields.pop("settings")
        pairs.append(fields | {f"settings.{name}": value for name, value in settings.items()})
    first, second = pairs
    return "; ".join(
        f"{name}: {shorten_text(str(first.get(name)))} there, {shorten_text(str(second.get(name)))} here"
        for name in first | second
        if name not in but and first.get(name) != second.get(name)
    )


def _read_results(
    folder: str | os.PathLike[str], field: str
) -> tuple[EvaluationSettings, list[SampleRecord]]:
    """Read the settings and records in a folder's complete lines; ValueError without a file, or for a changed line."""
    path = Path(folder).expanduser() / RESULTS
    require(
        path.is_file(),
        field,
        str(folder),
        f"no evaluation: it has no {RESULTS}: use another folder",
    )
    head, *lines = path.read_bytes().split(b"\n")[:-1] or [b"{}"]
    try:
        run = EvaluationSettings(**json.loads(head))
        records = [SampleRecord(**json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{field}={str(folder)!r}: {RESULTS} was changed ({error}): use another folder"
        ) from None
    require(run.format == _FORMAT, field, str(folder), "another format version: use another folder")
    return run, records


@frozen_dataclass
class PolicySummary:
    """Mean score, its 95% interval, and mean tokens, entries and bytes of one policy over one group, or all groups.

    Attributes:
        policy: name of the row, such as "adakv@128".
        group: samples that count together; "mean" for the mean of all groups with equal weights.
        n: number of samples.
        mean: mean score.
        low: lower end of the mean's 95% interval; None without an interval, as for one sample that is not a share.
        high: upper end of the interval.
        tokens: mean tokens of a prompt; 0 if the task does not count them.
        rows: mean entries of a prompt kept per kv head and layer; None if the task does not count them.
        nbytes: mean bytes of these entries, on the device or in host memory; None if the task does not count them.
    """

    policy: str
    group: str
    n: int
    mean: float
    low: float | None
    high: float | None
    tokens: float
    rows: float | None
    nbytes: float | None


@frozen_dataclass
class ScoreDifference:
    """Mean difference of two policies' scores on the same samples, its 95% interval, and numbers of wins.

    Attributes:
        mean: mean of the differences; above 0 if the first policy has the higher scores.
        low: lower end of the mean's 95% interval; None for one sample whose score is not a share.
        high: upper end of the interval.
        above: number of samples with a higher score of the first policy.
        below: number of samples with a higher score of the second policy.
        n: number of samples.
    """

    mean: float
    low: float | None
    high: float | None
    above: int
    below: int
    n: int


def compute_confidence_interval(
    scores: Float[np.ndarray, " n"], bounds: tuple[int, int] | None = (0, 1)
) -> tuple[float, float] | None:
    """Return the 95% confidence interval (low, high) of the mean of independent scores; None for one unbounded score.

    Args:
        scores: the n scores.
        bounds: smallest and largest possible score; None for unbounded scores.

    Returns:
        Lower and upper end: Wilson's interval if every share is 0 or 1, else Student's. If all shares are equal,
        Wilson's upper end for 0 of n bounds the share of others that may differ. None for one score without bounds.
    """
    from scipy import stats  # imported here, because it takes longer than all of jaxkv's own files

    n = len(scores)
    mean = float(scores.mean())
    if bounds and (scores == mean).all():
        # None of n samples differs: others may differ by the maximum, in Wilson's upper share of cases.
        most = float(stats.binomtest(0, n).proportion_ci(method="wilson").high)
        return mean - most * (mean - bounds[0]), mean + most * (bounds[1] - mean)
    if bounds == (0, 1) and np.isin(scores, bounds).all():
        found = stats.binomtest(int(scores.sum()), n).proportion_ci(method="wilson")
        return float(found.low), float(found.high)
    if n == 1:
        return None
    # Not `stats.t.interval`, which is undefined for equal scores.
    half = stats.t.ppf(0.975, n - 1) * stats.sem(scores)
    least, most = bounds or (-np.inf, np.inf)
    return float(max(least, mean - half)), float(min(most, mean + half))


def _average_groups(
    records: Sequence[SampleRecord], values: Iterable[float], bounds: tuple[int, int] | None
) -> tuple[float, float | None, float | None]:
    """Return the unweighted mean of the groups' means, and both ends of its 95% interval (MOVER), or None for each.

    There is one value per record.
    """
    groups: dict[str, list[float]] = {}
    for record, value in zip(records, values, strict=True):
        groups.setdefault(record.group, []).append(value)
    means = np.asarray([np.mean(part) for part in groups.values()])
    mean = float(means.mean())
    found = [compute_confidence_interval(np.asarray(part), bounds) for part in groups.values()]
    ends = [each for each in found if each is not None]
    if len(ends) < len(found):
        return mean, None, None
    # Zou and Donner 2008: distances of the ends from the means add up in quadrature.
    low, high = np.hypot.reduce(np.abs(np.transpose(ends) - means), axis=1) / len(means)
    return mean, mean - float(low), mean + float(high)


@frozen_dataclass
class Evaluation:
    """Results of an evaluation: settings and records, with mean scores, policy differences and tables from them.

    Attributes:
        folder: the folder, or the first of several.
        run: settings of the evaluation.
        records: outcome of every sample under every policy, by policy, then by sample.
    """

    folder: Path
    run: EvaluationSettings
    records: tuple[SampleRecord, ...] = dataclasses.field(repr=False)

    @classmethod
    def read(cls, *folders: str | os.PathLike[str]) -> "Evaluation":
        """Read a complete or incomplete evaluation from its folder, or combine several: shards, or further policies.

        Args:
            *folders: folders given as `out`; several are shards, or further policies, of one evaluation.

        Returns:
            The evaluation.

        Raises:
            ValueError: if a folder has no evaluation, or one with other settings.
            TypeError: for a folder that is not a path.
        """
        found = [_read_results(folder, "folder") for folder in folders]
        run = found[0][0]
        records = dict[tuple[str, str], SampleRecord]()
        for folder, (other, lines) in zip(folders, found, strict=True):
            wrong = _describe_differences(run, other, but=_OWN)
            require(
                not wrong,
                "folder",
                str(folder),
                f"other settings ({wrong}): use folders of one evaluation",
            )
            for each in lines:
                same = records.setdefault((each.policy, each.id), each) == each
                remedy = f"another folder has a different result of {each.policy}, {each.id}: leave one out"
                require(same, "folder", str(folder), remedy)
        order = [*dict.fromkeys(policy for policy, _ in records)]
        sort = sorted(records.values(), key=lambda each: (order.index(each.policy), each.number))
        if len(found) > 1:
            run = dataclasses.replace(run, shard=None)
        return cls(folder=Path(folders[0]).expanduser(), run=run, records=tuple(sort))

    @functools.cached_property
    def policy_reprs(self) -> dict[str, str]:
        """Dict of policies' `repr` by row name, such as "adakv@128", in the order in which they ran."""
        return {record.policy: record.method for record in self.records}

    @property
    def policy_names(self) -> tuple[str, ...]:
        """Names of the table's rows, one per policy and budget, such as "adakv@128", in the order in which they ran."""
        return tuple(self.policy_reprs)

    @functools.cached_property
    def group_names(self) -> tuple[str, ...]:
        """Distinct names of the samples' groups, in order of first occurrence."""
        return tuple(dict.fromkeys(record.group for record in self.records))

    @functools.cached_property
    def distinct_prompt_lengths(self) -> tuple[int, ...]:
        """Distinct prompt lengths (tag "length"), ascending; empty if a sample has none, or if not 2 to 25."""
        found = set[Any](record.tags.get("length") for record in self.records)
        fits = None not in found and 1 < len(found) <= _MOST_LENGTHS
        return tuple(sorted(found)) if fits else ()

    def select_records(
        self, policy: str, group: str | None = None, **tags: Any
    ) -> list[SampleRecord]:
        """Return the records of one policy in sample order, optionally only of one group or with given tags.

        Args:
            policy: name of a row.
            group: only records of this group; of all groups by default.
            **tags: only records with these tags, such as `length=4096`.

        Returns:
            The records.

        Raises:
            ValueError: for an unknown row or group, and for tags that no sample has.
        """
        require(
            policy in self.policy_reprs,
            "policy",
            policy,
            f"unknown row: use one of {', '.join(self.policy_names)}",
        )
        found = [
            record
            for record in self.records
            if record.policy == policy
            and group in (None, record.group)
            and all(record.tags.get(name) == value for name, value in tags.items())
        ]
        require(bool(found), "group", group or tags, "no sample has these: use others")
        return found

    def scores(self, policy: str, group: str | None = None, **tags: Any) -> Float[np.ndarray, " n"]:
        """Return one policy's scores as float64 `[n]`, in sample order, optionally of one group or with tags."""
        return np.asarray(
            [record.score for record in self.select_records(policy, group, **tags)], np.float64
        )

    def cell(self, policy: str, group: str | None = None, **tags: Any) -> PolicySummary:
        """Return one policy's `PolicySummary`, of all groups, of one, or of tags: mean score, interval, entries, bytes.

        Args:
            policy: name of a row.
            group: only samples of this group; by default the mean of all groups with equal weights.
            **tags: only samples with these tags, such as `length=4096`.

        Returns:
            The cell.

        Raises:
            ValueError: for an unknown row or group, and for tags that no sample has.
        """
        records = self.select_records(policy, group, **tags)
        scores = [record.score for record in records]
        mean, low, high = _average_groups(records, scores, (0, 1) if self.run.unit == "%" else None)
        return PolicySummary(
            policy=policy,
            group="mean" if group is None else group,
            n=len(records),
            mean=mean,
            low=low,
            high=high,
            tokens=float(np.mean([record.tokens or 0 for record in records])),
            rows=_average_or_none([record.rows for record in records]),
            nbytes=_average_or_none([record.nbytes for record in records]),
        )

    def difference(self, first: str, second: str, group: str | None = None) -> ScoreDifference:
        """Return the `ScoreDifference` of two policies' scores on their common samples, first minus second.

        Args:
            first: name of a row.
            second: name of another row.
            group: only samples of this group; by default the mean of all groups with equal weights, as in `cell`.

        Returns:
            The difference, first minus second.

        Raises:
            ValueError: for an unknown row or group, and for rows without a common sample.
        """
        others = {record.id: record.score for record in self.select_records(second, group)}
        ones = [record for record in self.select_records(first, group) if record.id in others]
        require(bool(ones), "second", second, f"no sample in common with {first}: use another row")
        apart = np.asarray([record.score - others[record.id] for record in ones])
        mean, low, high = _average_groups(ones, apart, (-1, 1) if self.run.unit == "%" else None)
        above = int((apart > 0).sum())
        below = int((apart < 0).sum())
        return ScoreDifference(
            mean=mean, low=low, high=high, above=above, below=below, n=len(apart)
        )

    def as_dict(self) -> dict[str, Any]:
        """Return a dict: "run", settings by name; "cells", list of summary dicts, per policy by group and over all."""
        cells = [
            dataclasses.asdict(self.cell(policy, group))
            for policy in self.policy_names
            for group in (*self.group_names, None)
        ]
        return {"run": vars(self.run), "cells": cells}

    def build_tables(self) -> dict[str, list[list[str]]]:
        """Return tables (rows of texts, headings first) by title: scores and costs; if several, by group, by length."""
        head = [
            "policy",
            self.score_label,
            "95% interval",
            "n",
            "entries kept",
            "MB",
            "prompt tokens",
        ]
        tables = {"Policies": [head]}
        for cell in map(self.cell, self.policy_names):
            costs = [
                format_decimal_number(cell.rows, 1),
                format_decimal_number(cell.nbytes, 3, 1e6),
                format_decimal_number(cell.tokens, 0),
            ]
            ends = (
                "-"
                if cell.low is None
                else f"{self.format_score(cell.low)} to {self.format_score(cell.high)}"
            )
            row = [cell.policy, self.format_score(cell.mean), ends, str(cell.n), *costs]
            tables["Policies"].append(row)
        parts: dict[str, tuple[Any, ...]] = {
            "group": self.group_names,
            "length": self.distinct_prompt_lengths,
        }
        for name, values in parts.items():
            if len(values) > 1:
                tables[f"By {name}"] = [["policy", *map(str, values)]]
                for policy in self.policy_names:
                    cells = [self.cell(policy, **{name: value}) for value in values]
                    row = [policy, *(self.format_score(cell.mean) for cell in cells)]
                    tables[f"By {name}"].append(row)
        return tables

    def table(self) -> str:
        """Return the evaluation as Markdown text: title, notes and all tables."""
        lines = [f"# {self.run_title}", *self.result_warnings]
        for head, *rows in self.build_tables().values():
            first, *others = [
                f"| {' | '.join(map(_escape_markdown_cell, row))} |" for row in (head, *rows)
            ]
            lines.append("\n".join([first, "|---|" + "---:|" * (len(head) - 1), *others]))
        return "\n\n".join(lines)

    @property
    def result_warnings(self) -> list[str]:
        """Warnings as texts: policies with missing samples, and a full cache that scores 0; empty if neither occurs."""
        counts = Counter(record.policy for record in self.records)
        lacking = [f"{name} {n}" for name, n in counts.items() if n < self.run.samples]
        full = [each.score for each in self.records if each.method.startswith("FullKV(")]
        notes = []
        if lacking:
            notes.append(f"Not finished: of {self.run.samples} samples, {', '.join(lacking)}.")
        if full and self.run.higher and not any(full):
            notes.append("The full cache scored 0: this compares nothing; use another model.")
        return notes

    @property
    def run_title(self) -> str:
        """One-line title: task, number of samples, model, and if so question-agnostic, no chat template, shard."""
        run = self.run
        said = [run.model, run.agnostic * "question-agnostic", run.raw * "no chat template"]
        if run.shard is not None:
            said.append(f"shard {run.shard[0]} of {run.shard[1]}")
        return ", ".join(filter(None, [f"{run.task}: {run.samples} samples", *said]))

    @property
    def score_label(self) -> str:
        """Label of scores with unit and direction, such as "score, %, higher is better"."""
        return f"score, {self.run.unit}, {'higher' if self.run.higher else 'lower'} is better"

    def format_score(self, score: float | None) -> str:
        """Format a score as text: percent without a sign if the unit is "%", else four decimals; a dash for None."""
        return (
            format_decimal_number(score, 1, 0.01)
            if self.run.unit == "%"
            else format_decimal_number(score, 4)
        )


def _average_or_none(values: Sequence[int | float | None]) -> float | None:
    """Return the mean of the values; None if there are none, or if any is None."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known and len(known) == len(values) else None


def format_decimal_number(value: int | float | None, digits: int, unit: int | float = 1.0) -> str:
    """Format `value / unit` as text with `digits` decimals and commas between thousands; a dash for None."""
    return "-" if value is None else f"{value / unit:,.{digits}f}"


def _escape_markdown_cell(text: str) -> str:
    """Join a text's lines, and escape each "|", for a cell of a Markdown table."""
    return " ".join(text.splitlines()).replace("|", "\\|")
